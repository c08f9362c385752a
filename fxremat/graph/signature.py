"""Signature: what a joint graph computes, in a form that two processes can compare.

Terms:
    body: the nodes of a graph but its inputs, in canonical order, without the copies by which a compiled
        graph writes back to its inputs. A captured graph returns what is to be written; both mark it
        ``written``.
    digest: a short hash of an operator's arguments. A node among them counts by its position in the body, an
        input by when the body first uses it.

Two graphs with equal signatures run the same operators on values of the same sizes, and read, return and
write the same ones. So a schedule of one is a schedule of the other, node by node. What does not count: how
nodes are called, in which order inputs come, which of a machine's devices it is, strides, and regions, which
whoever takes a schedule over checks by itself. Symbolic sizes count by their hints.

Linear in nodes and edges.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import TRACED

DIGITS = 12  # of a digest, hexadecimal
_MOST_KINDS = 3  # of operators that a difference lists


class Row(NamedTuple):
    """A node of the body.

    Attributes:
        name: What schedules call it.
        operator: What computes it.
        value: The data type and the sizes of its results.
        arguments: The digest of what it is called with.
        use: Whether it is an ``output``, a ``gradient``, or ``written`` to an input; several in this order.
    """

    name: str
    operator: str
    value: str
    arguments: str
    use: str

    @property
    def told(self) -> str:
        """Operator and value, for a person."""
        return f"{self.operator} {self.value}".strip()


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph computes.

    Attributes:
        inputs: The values of the inputs that the body uses, in the order of their first use.
        nodes: The body.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Row, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of all but the names."""
        told = repr((self.inputs, [row[1:] for row in self.nodes]))
        return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """How a graph differs from the one that is expected.

    Attributes:
        kind: What is not the same first: ``"input"``, ``"operator"``, ``"size"``, ``"dtype"``,
            ``"arguments"``, ``"use"``, or ``"count"`` where one has all nodes of the other and more.
        text: The same for a person.
        nodes: How many nodes one has that the other has not, in both directions.
        node: The name in the graph of the first node that differs; empty where there is none.
    """

    kind: str
    text: str
    nodes: int
    node: str = ""


def signature(graph: JointGraph) -> Signature:
    """The signature of a graph."""
    return _Reading(graph).signature()


def body(graph: JointGraph) -> tuple[int, ...]:
    """The nodes of the body, by index."""
    nodes = range(graph.num_inputs, len(graph.nodes))
    return tuple(node for node in nodes if _written_back(graph, node) is None)


def _written_back(graph: JointGraph, index: int) -> int | None:
    """What a node writes to an input, by index; None for any other node."""
    if not graph.fx_nodes or graph.fx_nodes[index].target is not ops.aten.copy_.default:
        return None
    to, *what = graph.fx_nodes[index].all_input_nodes
    return graph.index[(what or [to])[0].name] if graph.index[to.name] < graph.num_inputs else None


class _Reading:
    """A graph whose signature is made."""

    def __init__(self, graph: JointGraph) -> None:
        self._graph = graph
        self._body = body(graph)
        self._place = {node: place for place, node in enumerate(self._body)}
        self._inputs: dict[int, int] = {}  # the place of each input that is used

    def signature(self) -> Signature:
        uses = self._uses()
        rows = tuple(self._row(node, " ".join(uses.get(node, ()))) for node in self._body)
        inputs = tuple(f"{self._input(node)} {' '.join(uses.get(node, ()))}".strip() for node in self._inputs)
        return Signature(inputs, rows)

    def _uses(self) -> Mapping[int, Sequence[str]]:
        """What becomes of nodes, but for being read."""
        graph = self._graph
        uses: dict[int, dict[str, None]] = {}
        described = _output_descriptions(graph)
        written = [_written_back(graph, node) for node in range(graph.num_inputs, len(graph.nodes))]
        for place, node in enumerate(graph.forward_outputs):
            is_written = place < len(described) and graphs.mutated_input_of(described[place]) is not None
            if node is not None and not is_written:
                uses.setdefault(node, {})["output"] = None
            elif node is not None:
                written.append(node)
        for node in graph.backward_outputs:
            if node is not None:
                uses.setdefault(node, {})["gradient"] = None
        for node in written:
            if node is not None:
                uses.setdefault(node, {})["written"] = None
        return {node: tuple(each) for node, each in uses.items()}

    def _row(self, node: int, use: str) -> Row:
        graph = self._graph
        name = graph.nodes[node].name
        if not graph.fx_nodes:
            reads = tuple(map(self._reference, graph.nodes[node].operands))
            return Row(name, "", f"{graph.node_bytes(node)} bytes", _digest(repr(reads)), use)
        of = graph.fx_nodes[node]
        told = f"{self._argument(of.args)} {self._argument(of.kwargs)}"
        traced = of.meta.get(TRACED, of.meta.get("val"))  # alike on machines whose kernels are not
        return Row(name, ops.title(of), _value(traced), _digest(told), use)

    def _reference(self, node: int) -> str:
        if node < self._graph.num_inputs:
            return f"input {self._inputs.setdefault(node, len(self._inputs))}"
        return f"node {self._place.get(node)}"

    def _argument(self, value: object) -> str:
        """What a node is called with, by a text that every process has for it."""
        if isinstance(value, fx.Node):
            return self._reference(self._graph.index[value.name])
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, Mapping):
            return self._argument([(str(key), value[key]) for key in sorted(value, key=str)])
        if isinstance(value, slice):
            return f"slice {self._argument((value.start, value.stop, value.step))}"
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, torch.SymInt):
            return str(graphs.hint(value))
        plain = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
        return repr(value) if value is None or isinstance(value, plain) else type(value).__name__

    def _input(self, index: int) -> str:
        if not self._graph.fx_nodes:
            return "input"
        node = self._graph.fx_nodes[index]
        if node.op == "get_attr":
            return f"constant {_attribute(self._graph.module, str(node.target), node)}".strip()
        return f"{'tangent ' if graphs.is_tangent(node) else ''}{_value(node.meta.get('val'))}"


def _output_descriptions(graph: JointGraph) -> Sequence[object]:
    if graph.module is None:
        return ()
    (output,) = graph.module.graph.find_nodes(op="output")
    return graphs.leaves(output.meta.get("desc"))


def _attribute(module: fx.GraphModule | None, target: str, node: fx.Node) -> str:
    """A tensor by its value, a graph by its text."""
    inner = functools.reduce(lambda owner, name: getattr(owner, name, None), target.split("."), module)
    if not isinstance(inner, fx.GraphModule):
        return _value(node.meta.get("val"))
    rows = [(each.op, ops.title(each), str(each.args), str(each.kwargs)) for each in inner.graph.nodes]
    return f"graph {_digest(repr(rows))}"


def _value(value: object) -> str:
    """The data type and the sizes of a node's results.

    >>> _value(torch.ones(2, 3))
    'float32[2, 3]'
    """
    if isinstance(value, torch.Tensor):
        sizes = ("?" if size is None else str(size) for size in map(graphs.hint, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return f"int {graphs.hint(value)}"
    return "" if value is None else type(value).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


def device_title(graph: JointGraph) -> str:
    """The card that a graph runs on, by its name; another device by its kind, the CPU last."""
    values = (tensor for node in graph.fx_nodes for tensor in ops.tensors(node.meta.get("val")))
    kinds = sorted({tensor.device.type for tensor in values}, key=lambda kind: (kind == "cpu", kind))
    if kinds and kinds[0] == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return kinds[0] if kinds else ""


# --- Comparison ---------------------------------------------------------------------------------------


def difference(expected: Signature, found: Signature) -> Difference | None:
    """How a graph differs from the one that is expected; None if it does not."""
    if expected.fingerprint == found.fingerprint:
        return None
    counts, number = _counts(expected, found)
    pairs = enumerate(zip(expected.nodes, found.nodes, strict=False))
    place, (before, after) = next(
        ((place, rows) for place, rows in pairs if rows[0][1:] != rows[1][1:]), (-1, (None, None))
    )
    if before is not None and after is not None:
        kind, what = _first(before, after)
        where = f"the first is {after.name!r}, node {place + 1}: {what}"
        return Difference(kind, f"{where}; {counts}", number, after.name)
    if len(expected.nodes) != len(found.nodes):
        return Difference("count", counts, number)
    pairs_of_inputs = zip(expected.inputs, found.inputs, strict=False)
    text = next(
        (f"an input is {after}, expected {before}" for before, after in pairs_of_inputs if before != after),
        f"{len(found.inputs)} inputs are used, expected {len(expected.inputs)}",
    )
    return Difference("input", text, number)


def _first(before: Row, after: Row) -> tuple[str, str]:
    """What differs between two nodes."""
    if before.operator != after.operator:
        return "operator", f"{after.told}, expected {before.told}"
    if before.value != after.value:
        is_size = re.findall(r"\[.*?\]", before.value) != re.findall(r"\[.*?\]", after.value)
        return "size" if is_size else "dtype", f"{after.told}, expected {before.value}"
    if before.use != after.use:
        return (
            "use",
            f"{after.told} is used as {after.use or 'a value'}, expected as {before.use or 'a value'}",
        )
    return "arguments", f"{after.told} has other arguments or operands"


def _counts(expected: Signature, found: Signature) -> tuple[str, int]:
    """How many nodes one has and the other has not, and of which operators."""
    mine, theirs = (Counter(row.told for row in each.nodes) for each in (expected, found))
    missing, added = mine - theirs, theirs - mine
    told = [f"{len(found.nodes)} nodes, expected {len(expected.nodes)}"]
    told += (f"{sum(each.values())} {text} ({_kinds(each)})" for each, text in _named(missing, added) if each)
    return ", ".join(told), sum(missing.values()) + sum(added.values())


def _named(missing: Counter[str], added: Counter[str]) -> Iterable[tuple[Counter[str], str]]:
    return (missing, "missing"), (added, "not expected")


def _kinds(rows: Counter[str]) -> str:
    most = rows.most_common(_MOST_KINDS)
    rest = ", ..." if len(rows) > len(most) else ""
    return ", ".join(f"{count} x {told}" if count > 1 else told for told, count in most) + rest
