"""Which torch is refused or warned of, and that all is looked for that the doors use."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxremat._torch import versions

# Names that the doors use and need not have: they ask for them, or work without.
EXEMPT = (
    "torch._C._cuda_isHistoryEnabled",  # which builds for CUDA alone have
    "torch._inductor.async_compile",  # for code that is run on fake tensors
    "torch._inductor.config._realize_opcount_threshold_default",  # where the user has set none: from 2.12 on
    "torch._inductor.config.realize_cpu_opcount_threshold",
    "torch._inductor.constant_folding",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.lowering",  # imported for what it registers
    "torch._inductor.runtime.hints",
    "torch._library.opaque_object",  # has one of two names
    "torch.distributed.",  # is not built into every torch
    "torch.ops.",
    "torch.optim.optimizer.",  # a list that a card which is not there is added to
    "torch.utils._foreach_utils",
    "torch.utils._triton",
)


def torch_names(source: str) -> Iterator[str]:
    """The private names of torch that a module imports, or reads from what it imported, dotted."""
    tree = ast.parse(source)
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"
    yield from (name for name in known.values() if _is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known and rest.replace(".", "").isidentifier():
                name = f"{known[first]}.{rest}"
                if _is_private(name):
                    yield name


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def is_listed(name: str) -> bool:
    """Whether a name, what it is an attribute of, or its module is looked for."""
    listed = [
        f"{module}.{each}"
        for table in (versions.NAMES, versions.INDUCTORS)
        for module, names in table.items()
        for each in names
    ]
    return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in listed)


def test_all_that_the_doors_use_is_looked_for() -> None:
    """Or is exempt, for a reason."""
    doors = Path(versions.__file__).parent.glob("*.py")
    used = {name for door in sorted(doors) for name in torch_names(door.read_text("utf-8"))}
    assert len(used) > 50
    assert sorted(name for name in used if not is_listed(name) and not name.startswith(EXEMPT)) == []


def test_a_new_name_is_seen() -> None:
    """The check above finds it, however it is reached."""
    source = "import torch\nfrom torch._guards import invented\nx = torch._C._invented.y"
    assert [name for name in torch_names(source) if not is_listed(name)] == [
        "torch._guards.invented",
        "torch._C._invented.y",
        "torch._C._invented",
    ]


def test_this_torch_has_them() -> None:
    """All, those of Inductor as well."""
    assert versions.missing(versions.NAMES) + versions.missing(versions.INDUCTORS) == []


def test_the_supported_versions_are_those_that_are_installed() -> None:
    """What is checked is what the package requires."""
    (oldest, newest) = (".".join(map(str, each)) for each in (versions.OLDEST, versions.NEWEST))
    beyond = f"{versions.NEWEST[0]}.{versions.NEWEST[1] + 1}"
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8")
    assert f'"torch>={oldest},<{beyond}"' in project
    assert versions.is_supported(f"{newest}.1+cu130") and not versions.is_supported(f"{beyond}.0")


def test_a_missing_name_is_an_error_that_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name, and the torch that lacks it."""
    monkeypatch.setattr(versions, "NAMES", {"torch._guards": ("tracing", "taken_away"), "torch._gone": ()})
    with pytest.raises(ImportError, match=r"torch 2\.11 to 2\.15.*lacks") as caught:
        versions.check()
    assert "torch._guards.taken_away, torch._gone" in str(caught.value)
    assert torch.__version__ in str(caught.value)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20261101", "3.0"])
def test_an_untried_version_is_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may work: all names are there."""
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match=rf"made for torch 2\.11 to 2\.15, and this is {version}"):
        versions.check()


def test_a_supported_version_is_not() -> None:
    """Nor is a torch that is being imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check()
