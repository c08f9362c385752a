"""The shape of the package: who may import whom, and who may touch torch's private names.

The rules are checked on the syntax trees of the installed files, so that an import inside of a
function or under ``TYPE_CHECKING`` counts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# A module imports only from modules listed above it. `planners.*` are the planners without an entry
# of their own: they do not know each other. `planners` is their registry.
LAYERS = (
    "mincut",
    "_torch",
    "_compilers",
    "_profilers",
    "_autograd",
    "errors",
    "given",
    "drawing",
    "chain",
    "annotate",
    "generators",
    "ops",
    "replays",
    "arithmetic",
    "twins",
    "canonical",
    "nodes",
    "graph",
    "schedule",
    "instances",
    "inplace",
    "kernels",
    "layout",
    "concatenation",
    "windows",
    "reads",
    "inlining",
    "fusion",
    "memory",
    "packing",
    "allocate",
    "measure",
    "ledger",
    "rates",
    "calibrate",
    "cost",
    "closures",
    "bounds",
    "planners.base",
    "planners.cuts",
    "planners.flat",
    "planners.condensed",
    "planners.shapes",
    "planners.blocks",
    "planners.lives",
    "planners.replay",
    "planners.table",
    "planners.persistent",
    "planners.sets",
    "planners.moves",
    "planners.stages",
    "planners.*",
    "planners.auto",
    "planners.milp",
    "planners",
    "options",
    "rewrite",
    "partition",
    "writes",
    "report",
    "lowered",
    "enclosed",
    "capture",
    "pipeline",
    "backend",
    "demo",
    "example",
    "frontier_points",
    "frontier_plot",
    "paper.networks",
    "paper.strategies",
    "paper.speed",
    "paper.figures",
    "paper.tables",
    "paper.plots",
    "paper.command",
    "paper",
    "cli",
    "__main__",
)
DOORS = ("_torch", "_compilers", "_profilers", "_autograd")
MAX_LINES = 400
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common", "tools"}
TORCH_PACKAGES = ("torch", "functorch")


def package_directory() -> Path:
    """The directory that ``import fxremat`` would load."""
    spec = find_spec("fxremat")
    assert spec is not None and spec.origin is not None, "fxremat is not installed"
    return Path(spec.origin).parent


def package_sources() -> dict[str, str]:
    """The source of every module by its name inside the package; ``""`` is the package itself."""
    root = package_directory()
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        sources[".".join(part for part in parts if part != "__init__")] = path.read_text("utf-8")
    return sources


SOURCES = package_sources()
MODULES = [name for name in SOURCES if name]


def layer(module: str) -> int | None:
    """The position of ``module`` in ``LAYERS``, or None if it has none."""
    for name in (module, module.rpartition(".")[0] + ".*"):
        if name in LAYERS:
            return LAYERS.index(name)
    return None


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str, str]]:
    """Line, full dotted name and local name of everything that ``tree`` imports.

    Args:
        tree: A module's syntax tree.
        package: The package that relative imports start from, e.g. ``fxremat.planners``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = [*(base if node.level else []), *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*source, alias.name]), alias.asname or alias.name


def imported_modules(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each module of fxremat that ``module`` imports from."""
    is_package = module == "" or any(name.startswith(module + ".") for name in SOURCES)
    parent = module if is_package else module.rpartition(".")[0]
    package = f"fxremat.{parent}" if parent else "fxremat"
    for line, name, _ in imported_names(ast.parse(source), package):
        first, _, rest = name.partition(".")
        if first == "fxremat":  # `rest` is a module, or a name inside of one
            yield line, rest if rest in SOURCES else rest.rpartition(".")[0]


def misplaced_imports(module: str, source: str) -> list[str]:
    """The imports in ``module`` that the order of ``LAYERS`` forbids."""
    here = layer(module)
    assert here is not None
    faults = []
    for line, target in imported_modules(module, source):
        there = layer(target)
        if there is None or there >= here:
            faults.append(f"line {line}: {module} imports {target or 'the package itself'}")
    return faults


def is_private(name: str) -> bool:
    """Whether a part of a dotted name has a leading underscore and is not a dunder."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_torch_names(source: str) -> list[str]:
    """The private names of torch that ``source`` imports, or reads from something it imported."""
    tree = ast.parse(source)
    torch_imports = [
        (line, name, local)
        for line, name, local in imported_names(tree, "fxremat")
        if name.partition(".")[0] in TORCH_PACKAGES
    ]
    faults = [f"line {line}: {name}" for line, name, _ in torch_imports if is_private(name)]
    torch_locals = {local for _, _, local in torch_imports}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            dotted = ast.unparse(node)
            if dotted.partition(".")[0] in torch_locals:
                faults.append(f"line {node.lineno}: {dotted}")
    return faults


def test_every_module_has_a_layer() -> None:
    """Every module of the package is listed in LAYERS, so that no import goes unchecked."""
    assert [module for module in MODULES if layer(module) is None] == []


@pytest.mark.parametrize("module", [module for module in MODULES if layer(module) is not None])
def test_imports_point_upwards(module: str) -> None:
    """A module imports only from modules that are listed above it."""
    assert misplaced_imports(module, SOURCES[module]) == []


@pytest.mark.parametrize("module", [module for module in SOURCES if module not in DOORS])
def test_private_torch_names_have_one_door(module: str) -> None:
    """Only the doors use names that torch marks as private."""
    assert private_torch_names(SOURCES[module]) == []


def test_modules_are_short() -> None:
    """A module that outgrows the limit is two modules."""
    lengths = {module: len(source.splitlines()) for module, source in SOURCES.items()}
    assert {module: n for module, n in lengths.items() if n > MAX_LINES} == {}


def test_no_module_is_a_drawer() -> None:
    """A module is named after what it answers, never utils or helpers."""
    assert [module for module in MODULES if module.split(".")[-1] in VAGUE_NAMES] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor.config",
        "from torch._inductor import config",
        "from torch import _C",
        "import torch\nx = torch.fx._symbolic_trace",
        "import torch as t\nx = t.fx.graph._BoxedCodeGen()",
        "def late():\n    from torch import fx\n    return fx.node._side_effectful_functions",
    ],
)
def test_private_torch_names_are_found(source: str) -> None:
    """The check sees a private name however it is reached."""
    assert len(private_torch_names(source)) == 1


def test_public_and_foreign_names_pass() -> None:
    """Dunders, public names and private names of our own are no faults."""
    source = "import torch\nfrom fxremat import _torch\nx = torch.__version__, torch.fx, _torch._x"
    assert private_torch_names(source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph", "from fxremat.backend import x"),
        ("graph", "def late():\n    import fxremat.cli"),
        ("graph", "from . import backend"),
        ("graph", "from .graph import x"),
        ("graph", "from fxremat import plan"),
        ("planners.sublinear", "from .recursive import x"),
        ("planners.sublinear", "from ..rewrite import x"),
    ],
)
def test_misplaced_imports_are_found(module: str, source: str) -> None:
    """The check sees an import of something below, however it is written."""
    assert len(misplaced_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph", "from .errors import GraphError"),
        ("graph", "from fxremat import errors"),
        ("planners.sublinear", "from .base import x\nfrom ..errors import FxrematError"),
        ("pipeline", "from .planners import x\nfrom .planners.base import y"),
    ],
)
def test_placed_imports_pass(module: str, source: str) -> None:
    """An import of something above is no fault."""
    assert misplaced_imports(module, source) == []
