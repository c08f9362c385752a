"""What holds for all tests: a fresh compiler for each, and a skip that says what the machine lacks."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import hypothesis
import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from fxremat.device.rates import CPU, CUDA, PINNED
from fxremat.driver import journal
from fxremat.graph import region
from fxremat.options.settings import VARIABLES
from fxremat.step import stored
from fxremat.step.step import steps

# The same drawn examples in every automatic run; elsewhere each run draws new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def pinned_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of calibrations for all tests and their processes: it starts with the rates of the table.

    So plans are the same on every machine, and what is measured here is no part of the user's. No option is
    taken from the environment.
    """
    folder = tmp_path_factory.mktemp("calibration")
    (folder / PINNED).write_text(json.dumps({"cpu": asdict(CPU), "cuda": asdict(CUDA)}), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable, raising=False)
        patch.setenv("FXREMAT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def forget_compiled_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Behind each test Dynamo forgets what it compiled: at its recompilation limit it would run eagerly.

    So does fxremat. Reports of thousands of graphs would be held, and each measurement, which looks through
    all that Python holds, would take seconds.
    """
    monkeypatch.setattr(journal, "_finished", [])
    monkeypatch.setattr(region, "_outside", {})
    yield
    steps.__init__()  # type: ignore[misc]
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def kernels_are_inductors() -> Iterator[None]:
    """A file that has Inductor's kernels do nothing leaves them to the next one as it found them."""

    def own() -> list[object]:
        return [vars(AsyncCompile)[name] for name in ("cpp_pybinding", "wait")]

    before = own()
    yield
    assert own() == before


@pytest.fixture(autouse=True)
def nothing_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test begins with the plans that the steps of another have settled for."""
    monkeypatch.setattr(stored, "folder", lambda: None)


def pytest_collection_finish() -> None:
    """What stands before the first test is looked through by no garbage collection, nor by measurements."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu or inductor are skipped where there is no device or no compiler."""
    compilers = ("c++", "g++", "clang++")
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "inductor": None if any(map(shutil.which, compilers)) else "needs a C++ compiler",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
