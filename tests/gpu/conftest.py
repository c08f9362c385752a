"""The device of the tests in this folder: a GPU, and at reduced size the CPU: no test waits for a GPU."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """At reduced size, compiling takes most of the time, and other tests do it: such tests are slow ones."""
    for item in items:  # of the whole session
        is_here = item.path.parent == pathlib.Path(__file__).parent
        if is_here and item.get_closest_marker("inductor") and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(
    params=[
        pytest.param("cpu", id="cpu, reduced size"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where networks are trained, in full float32 and by deterministic kernels where there are any."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield request.param
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
