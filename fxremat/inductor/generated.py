"""Generated code: what it will hold, read from the code itself, and so its *lowered peak*.

The code that Inductor generates says when each buffer is allocated, when it is freed and which other it
takes the place of, but for what the external kernels of a graph need while they run, and for what the caller
holds. So its peak is known before anything is compiled or run. Unlike the prediction (``fusion.py``) it can't
be had before the graphs are lowered.

Terms:
    reference: a name of the code that keeps a piece of memory alive. The memory goes with the last one.
    piece: what was allocated at once: a buffer of the code, or a storage that the forward saved.

Linear in the code.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from fxremat._torch.lowered import GeneratedCode
from fxremat.device.calibrate import scratch_bytes_of
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import MIRROR
from fxremat.inductor.facts import facts
from fxremat.inductor.layout import lies_as

ALIASES = ("reinterpret_tensor", "alias", "as_strided")  # functions that give memory another name
STRIDES = 2  # which argument they are of the first of these
ALLOCATIONS = "empty_strided"  # how the names of functions begin that allocate and compute nothing


@dataclass(frozen=True, slots=True)
class Handed:
    """What generated code does not say of the memory of a step.

    Attributes:
        storages: For each value of the forward, by name, the storages that it keeps alive but the caller's.
        storage_bytes: Bytes of each of these storages; the caller's and the forward's outputs count 0.
        constant_bytes: What is live all through the backward: the forward's outputs and the tangents.
        scratch_bytes: For each node, by name, bytes that it allocates and frees again while it runs.
        convolutions: The nodes, by name, of which the code says how it lays out what they read.
        weights: For the outputs of the backward that are gradients of convolutions' weights, these.
    """

    storages: Mapping[str, tuple[int, ...]]
    storage_bytes: Mapping[int, int]
    constant_bytes: int
    scratch_bytes: Mapping[str, int]
    convolutions: Mapping[str, fx.Node] = field(default_factory=dict)
    weights: Mapping[int, fx.Node] = field(default_factory=dict)


def handed(graph: JointGraph) -> Handed:
    """What the code of a graph's two halves will not say."""
    values = graph.nodes[: graph.boundary]
    outputs = [graph.nodes[output].views for output in graph.forward_outputs if output is not None]
    returned = frozenset(storage for views in outputs for storage in views)
    scratch = zip(graph.nodes, graph.scratch_bytes, strict=False)
    return Handed(
        {node.name: node.views for node in values},
        {
            storage: 0 if storage in returned else graph.storage_bytes[storage]
            for node in values
            for storage in node.views
        },
        sum(graph.storage_bytes[storage] for storage in returned) + graph.tangent_bytes,
        {node.name: size for node, size in scratch if size},
        {node.name: node for node in graph.fx_nodes if ops.has_convolution(node)},
        {place: graph.fx_nodes[place] for place in facts(graph).weights} if graph.fx_nodes else {},
    )


@dataclass(frozen=True, slots=True)
class CodeMemory:
    """What a graph's code says of its memory.

    Attributes:
        peak_bytes: The most bytes that it holds at once, above the parameters and the batch.
        given: What the code of the backward will not say.
        replaced: For buffers that take the place of another, that one, by their names.
        scratch_bytes: What its convolutions allocate and free again while they run, by their nodes' names.
    """

    peak_bytes: int
    given: Handed
    replaced: Mapping[str, str]
    scratch_bytes: Mapping[str, int] = field(default_factory=dict)


def read(code: GeneratedCode, given: Handed) -> CodeMemory | None:
    """What the code of a graph says of its memory.

    Args:
        code: The code of a forward or of a backward.
        given: What it does not say.

    Returns:
        None for code of another shape, such as that which is split for CUDA graphs.
    """
    body = _body(code.text)
    if body is None:
        return None
    statements = list(_statements(body))
    run = _Run(code, given, _parts(statements))
    for statement in statements:
        run.take(statement)
    return CodeMemory(run.peak_bytes, run.given, run.replaced, run.scratch_bytes)


def _body(text: str) -> Sequence[ast.stmt] | None:
    """The statements of the function that is called; None if it leaves its work to others."""
    definitions = _definitions(ast.parse(text))
    found = [node for node in definitions if node.name == "call" or node.name.startswith("partition_")]
    return found[0].body if len(found) == 1 else None


def _definitions(module: ast.Module) -> Iterable[ast.FunctionDef]:
    for node in module.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        yield from (each for each in inner if isinstance(each, ast.FunctionDef))


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """All statements in order, those under ``with`` included."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _parts(statements: Iterable[ast.stmt]) -> dict[str, list[str]]:
    """For what operators return, the names that its items, or the whole of it, get later."""
    found: dict[str, list[str]] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign):
            value = statement.value
            for whole in _names([value.value if isinstance(value, ast.Subscript) else value]):
                found.setdefault(whole, []).extend(_names(statement.targets))
    return found


class _Run:
    """The code, followed statement by statement."""

    def __init__(self, code: GeneratedCode, given: Handed, parts: Mapping[str, Sequence[str]]) -> None:
        self.code = code
        self.given = given
        self.parts = parts
        self.replaced: dict[str, str] = {}
        self.scratch_bytes: dict[str, int] = {}
        self.items: dict[str, Sequence[int]] = {}  # the pieces of returned items that have no name yet
        self.pieces: dict[str, list[int]] = {}  # that each name refers to
        self.references: dict[int, int] = {}  # how many to each piece
        self.bytes: dict[int, int] = {}
        self.live_bytes = given.constant_bytes if code.is_backward else 0
        self.peak_bytes = self.live_bytes
        if code.is_backward:
            self.bytes.update(given.storage_bytes)
        self.numbers = itertools.count(min(self.bytes, default=0) - 1, -1)  # of new pieces

    def take(self, statement: ast.stmt) -> None:
        """Follow one statement."""
        if isinstance(statement, ast.Assign):
            self._assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._delete(target)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._work(_written(statement.value))
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            if self.code.is_backward:
                self._take_gradients(statement.value.elts)
            else:
                self._return(statement.value.elts)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """A name is given to what was handed in, to what another name refers to, or to what a call makes."""
        if isinstance(target, ast.Tuple):
            if self.code.is_backward and isinstance(value, ast.Name) and value.id == "args":
                for name in _names(target.elts):
                    self._refer(name, self.given.storages.get(name, ()))
            return
        if not isinstance(target, ast.Name):
            return
        name = target.id
        source = _aliased(value)
        if name in self.items:
            self._refer(name, self.items.pop(name))
        elif source is not None:
            self.replaced[name] = source
            self._refer(name, self.pieces.get(source, ()))
        elif isinstance(value, ast.Call):
            self._call(name, value)

    def _call(self, name: str, call: ast.Call) -> None:
        """A buffer is allocated, or an operator makes one, or several that get their names later."""
        own = self._allocate(name)
        self._refer(name, own)
        for item in () if own else self.parts.get(name, ()):
            self.items[item] = self._allocate(item)
            self._refer(name, self.items[item])
        if not _function(call).startswith(ALLOCATIONS):
            self._work([name])

    def _return(self, values: Iterable[ast.expr]) -> None:
        """What is saved in another layout than it was made in is a copy, of an input or another output.

        So is each buffer in the place of an input, or of a view of one.
        """
        storages, sizes = dict(self.given.storages), dict(self.given.storage_bytes)
        first: dict[int, Sequence[int]] = {}  # for each storage, the pieces of the output that shows it first
        for node, value in zip(self.code.outputs, values, strict=False):
            pieces = self.pieces.get(_aliased(value) or "", ())
            if not isinstance(node, fx.Node) or not pieces:
                continue
            known = [first.setdefault(storage, pieces) for storage in storages.get(node.name, ())]
            if not known or any(each != pieces for each in known):
                storages[node.name] = tuple(pieces)
                sizes.update((piece, self.bytes[piece]) for piece in pieces)
        self.given = replace(self.given, storages=storages, storage_bytes=sizes)

    def _take_gradients(self, values: Sequence[ast.expr]) -> None:
        """Autograd copies each gradient that does not lie as its parameter does, one after the other."""
        copied = 0
        for place, parameter in self.given.weights.items():
            strides = self._strides(values[place])
            if strides is not None and not lies_as(parameter, strides):
                copied = max(copied, ops.value_bytes(parameter))
        if copied:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + copied)

    def _strides(self, value: ast.expr) -> Sequence[int] | None:
        """Those of a value as it is returned; None if the code does not say."""
        if isinstance(value, ast.Call) and _function(value) == "reinterpret_tensor":
            with contextlib.suppress(ValueError):  # there are symbols among them
                found: Sequence[int] = ast.literal_eval(value.args[STRIDES])
                return found
            return None
        return self.code.strides(value.id) if isinstance(value, ast.Name) else None

    def _allocate(self, name: str) -> Sequence[int]:
        """The pieces of a buffer, by their numbers: a new one, or those that it is a view of."""
        viewed = self.code.viewed(name)
        if viewed:
            return [piece for each in viewed for piece in self.pieces.get(each, ())]
        size = self.code.buffer_bytes(name)
        if not size:
            return ()
        piece = next(self.numbers)
        self.bytes[piece] = size
        return (piece,)

    def _refer(self, name: str, pieces: Iterable[int]) -> None:
        """A name keeps pieces alive; those that no other name did are new."""
        for piece in pieces:
            self.pieces.setdefault(name, []).append(piece)
            if not self.references.get(piece):
                self.live_bytes += self.bytes[piece]
            self.references[piece] = self.references.get(piece, 0) + 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _delete(self, target: ast.expr) -> None:
        """A name goes, and each piece to which it was the last reference."""
        for piece in self.pieces.pop(target.id, ()) if isinstance(target, ast.Name) else ():
            self.references[piece] -= 1
            if not self.references[piece]:
                self.live_bytes -= self.bytes[piece]

    def _work(self, names: Iterable[str]) -> None:
        """An external kernel runs that writes to buffers of these names.

        A mirror that is made to wait has lost its name, and needs what its original does.
        """
        for name in names:
            origins = [origin.meta.get(MIRROR, origin.name) for origin in self.code.origins(name)]
            needed = max((self._scratch_bytes(name, origin) for origin in origins), default=0)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + needed)

    def _scratch_bytes(self, name: str, origin: str) -> int:
        """What an external kernel needs, which writes to a buffer of a name, for one of its origins."""
        known = self.given.scratch_bytes.get(origin, 0)
        node, operation = self.given.convolutions.get(origin), self.code.operations.get(name)
        if node is None or operation is None:
            return known
        found = scratch_bytes_of(node, operation.layouts)
        if found is None:
            return known
        self.scratch_bytes[origin] = max(found, self.scratch_bytes.get(origin, 0))
        return found


def _names(targets: Iterable[ast.expr]) -> Iterable[str]:
    return (target.id for target in targets if isinstance(target, ast.Name))


def _aliased(value: ast.expr) -> str | None:
    """The name whose memory an expression is; None if it is new."""
    if isinstance(value, ast.Call) and _function(value) in ALIASES and value.args:
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else None


def _function(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _written(call: ast.Call) -> Iterable[str]:
    """What a call is told to write to."""
    return _names(keyword.value for keyword in call.keywords if keyword.arg == "out")
