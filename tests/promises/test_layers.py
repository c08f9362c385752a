"""The shape of the package: who may import whom, and who may touch torch's private names.

The rules are checked on the syntax trees of the installed files, so that an import inside of a
function or under ``TYPE_CHECKING`` counts as well.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import fxremat

# The folders of the package, and the modules beside them. Each imports only from those listed above it.
LAYERS = (
    "_torch",  # the doors to torch's private names
    "errors",
    "given",
    "measure",
    "graph",  # the joint graph, and its schedules
    "memory",  # buffers: how long they live
    "device",  # what the machine does
    "inductor",  # what Inductor does
    "predict",  # bytes and seconds of a schedule
    "search",  # how plans are found
    "proof",  # what no plan undercuts
    "planners",  # the values of the option
    "emit",  # from a schedule to graphs
    "arena",  # from a schedule to offsets
    "episode",  # one budget for all graphs of a step
    "report",  # what a user is told
    "planfile",  # plans as files
    "options",  # what a user asks for
    "step",  # the calls of a training step
    "driver",  # from a user's call to compiled graphs
    "fitting",  # whether a card has room
    "plots",
    "public",  # what users import
    "",  # the package itself, which loads that when it is asked for
    "paper",
    "cli",
    "__main__",
)
DOOR = "_torch"
MAX_LINES = 500
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
    """The position of the folder of ``module`` in ``LAYERS``, or None if it has none."""
    folder = module.partition(".")[0]
    return LAYERS.index(folder) if folder in LAYERS else None


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
    return [
        f"line {line}: {module} imports {target or 'the package itself'}"
        for line, target in imported_modules(module, source)
        if (there := layer(target)) is None or there > here
    ]


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
    """A module imports only from its own folder and from those that are listed above it."""
    assert misplaced_imports(module, SOURCES[module]) == []


def test_imports_run_in_no_circle() -> None:
    """Inside of a folder, too."""
    imports = {
        module: {target for _, target in imported_modules(module, source) if target and target != module}
        for module, source in SOURCES.items()
        if module
    }
    tuple(graphlib.TopologicalSorter(imports).static_order())


def test_the_house_is_documented() -> None:
    """The page has a row for each folder, in the order of imports."""
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text("utf-8")
    cells = re.findall(r"^\| (`.*?`) +\|", page.partition("## The house")[2], re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert named == [each for each in LAYERS if each not in ("", "__main__")]


def test_the_planners_are_the_values_of_the_option() -> None:
    """One file each, and none besides."""
    found = {module.removeprefix("planners.") for module in MODULES if module.startswith("planners.")}
    assert found == set(fxremat.PLANNERS)


@pytest.mark.parametrize("module", [module for module in SOURCES if module.partition(".")[0] != DOOR])
def test_private_torch_names_have_one_door(module: str) -> None:
    """Only the folder of doors uses names that torch marks as private."""
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
        ("graph.joint", "from fxremat.driver.backend import x"),
        ("graph.joint", "def late():\n    import fxremat.cli.main"),
        ("graph.joint", "from ..search import row"),
        ("graph.joint", "from fxremat import plan"),
        ("planners.sublinear", "from ..emit.rewrite import x"),
    ],
)
def test_misplaced_imports_are_found(module: str, source: str) -> None:
    """The check sees an import of something below, however it is written."""
    assert len(misplaced_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph.joint", "from .nodes import Node"),
        ("graph.joint", "from fxremat import errors"),
        ("planners.sublinear", "from .recursive import x\nfrom ..errors import FxrematError"),
        ("driver.pipeline", "from ..planners import x\nfrom fxremat.predict.problem import y"),
    ],
)
def test_placed_imports_pass(module: str, source: str) -> None:
    """An import of something above is no fault."""
    assert misplaced_imports(module, source) == []
