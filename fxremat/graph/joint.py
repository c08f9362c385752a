"""JointGraph: the forward and the backward of a model as one graph, with the facts that planning needs.

Terms:
    input: a placeholder or attribute. Its bytes are the caller's. Tangents are inputs of the backward.
    storage: a piece of memory that one node allocates. Views share it; each output of an operator with
        several is one of its own. The nodes whose values share a storage are its alias set.
    boundary: the position where the backward begins: behind the last FORWARD node.

A JointGraph is a value: it is built once, from an fx graph or from plain mappings, and never edited. Its
nodes stand in canonical order (``canonical.py``, which also defines the phases). Linear in nodes and edges.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from fxremat import given
from fxremat._torch import graphs
from fxremat.errors import GraphError, InvalidOptionError, shown
from fxremat.graph import ops, twins
from fxremat.graph.canonical import canonical_copy
from fxremat.graph.generators import STATE
from fxremat.graph.loops import Loop, loop
from fxremat.graph.nodes import Node, Phase, analyse, boundary_of
from fxremat.graph.places import Origin, module_path, source_line

_Figure = TypeVar("_Figure", int, float)


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The joint graph of a training step.

    Attributes:
        nodes: All nodes in canonical order; the first ``num_inputs`` are inputs.
        storage_bytes: Bytes of each storage, symbolic sizes by their hints. The caller's count 0.
        tangent_bytes: Bytes of the tangents: they arrive with the backward and stay to its end.
        boundary: Index of the first node of the backward.
        forward_outputs: Indices of what the forward returns; None for a constant.
        backward_outputs: Indices of the gradients; None where an input has none.
        module: The fx graph itself; None for a graph made of mappings.
        name: What reports call it.
        given_seconds: Seconds of the nodes of a graph made of mappings.
        scratch_bytes: For each node, bytes that it allocates and frees again while it runs; empty where
            none are known (``device/calibrate.py``).
    """

    nodes: tuple[Node, ...]
    num_inputs: int
    storage_bytes: tuple[int, ...]
    tangent_bytes: int
    boundary: int
    forward_outputs: tuple[int | None, ...]
    backward_outputs: tuple[int | None, ...]
    module: fx.GraphModule | None = None
    name: str = "graph"
    given_seconds: Mapping[str, float] = field(default_factory=dict)
    scratch_bytes: tuple[int, ...] = ()

    @classmethod
    def from_fx(
        cls,
        module: fx.GraphModule,
        num_forward_outputs: int,
        *,
        name: str = "graph",
        keep: Collection[str] = (),
        redraws: bool = False,
    ) -> JointGraph:
        """Analyse a copy of a joint fx graph, such as AOTAutograd hands to a partitioner.

        Args:
            module: Its placeholders are primals and tangents (named ``tangents...``), its outputs the
                forward outputs followed by the gradients; every node carries ``meta["val"]``.
            num_forward_outputs: How many of the outputs belong to the forward.
            name: What reports call it.
            keep: Names of nodes that must not run a second time, besides those known not to.
            redraws: Whether random operators of the forward may run again, from a state of their generator
                that is kept. For graphs that run as they are: no compiler takes what reads the state.

        Raises:
            CaptureError: The graph is not one that can be split into a forward and a backward.
        """
        copy, phases = canonical_copy(module, num_forward_outputs, redraws)
        *fx_nodes, output = copy.graph.nodes
        nodes, sizes = analyse(fx_nodes, output, phases, frozenset(keep))
        index = {node: position for position, node in enumerate(fx_nodes)}
        leaves = graphs.leaves(output.args[0])
        outputs = [index[leaf] if isinstance(leaf, fx.Node) else None for leaf in leaves]
        graph = cls(
            nodes,
            sum(phase is Phase.INPUT for phase in phases),
            sizes,
            sum(ops.value_bytes(node) for node in fx_nodes if graphs.is_tangent(node)),
            boundary_of(nodes),
            tuple(outputs[:num_forward_outputs]),
            tuple(outputs[num_forward_outputs:]),
            module=copy,
            name=name,
        )
        graph.check()
        return graph

    @classmethod
    def from_mappings(
        cls,
        operands: Mapping[str, Sequence[str]],
        bytes: Mapping[str, int],
        *,
        forward_outputs: Sequence[str] = (),
        backward_outputs: Sequence[str] = (),
        backward: Collection[str] = (),
        keep: Collection[str] = (),
        seconds: Mapping[str, float] | None = None,
        name: str = "graph",
    ) -> JointGraph:
        """Make a graph without tensors, so that planners run on any DAG.

        Args:
            operands: For each node, in topological order with the forward first, the nodes it reads.
                A node that reads nothing and has no entry in ``bytes`` is an input of the caller's.
            bytes: What running a node allocates.
            forward_outputs: What lives on when the forward ends.
            backward_outputs: What lives on to the end.
            backward: The nodes of the backward.
            keep: Nodes that must not run a second time.
            seconds: What running a node takes; nodes left out take none.
            name: What reports call it.

        Raises:
            GraphError: A name is that of no node, or bytes or seconds are negative or no numbers.

        Example:
            >>> g = JointGraph.from_mappings(
            ...     {"x": (), "a": ["x"], "b": ["a"], "da": ["b", "a"]}, {"a": 4, "b": 4, "da": 4},
            ...     backward=["da"], backward_outputs=["da"])
            >>> [node.name for node in g.nodes], g.boundary
            (['x', 'a', 'b', 'da'], 3)
        """
        reads = _operands(operands)
        marked = (*forward_outputs, *backward_outputs, *backward, *keep)
        for node in (*itertools.chain(*reads.values()), *marked):
            if node not in reads:
                raise GraphError(node, "it is read, returned or marked but is no node of the graph")
        sizes_of = _figures("bytes", bytes, reads, given.whole)
        inputs = {node for node, read in reads.items() if not read and node not in sizes_of}
        order = sorted(reads, key=lambda node: node not in inputs)
        index = {node: position for position, node in enumerate(order)}
        behind = frozenset(backward)
        needed = set(forward_outputs)
        for node in reversed(list(reads)):
            needed.update(reads[node] if node in needed else ())
        sizes: list[int] = []
        nodes: list[Node] = []
        for node in order:
            created = () if node in inputs else (len(sizes),)
            sizes.extend(sizes_of.get(node, 0) for _ in created)
            phase = Phase.FORWARD if node in needed else Phase.DEFERRED
            phase = Phase.BACKWARD if node in behind else phase
            nodes.append(
                Node(
                    node,
                    phase if created else Phase.INPUT,
                    tuple(dict.fromkeys(index[operand] for operand in reads[node])),
                    creates=created,
                    recreates=created,
                    views=created,
                    keep="it is forbidden" if node in keep else None,
                )
            )
        graph = cls(
            tuple(nodes),
            len(inputs),
            tuple(sizes),
            0,
            len(order) - len(behind),
            tuple(index[node] for node in forward_outputs),
            tuple(index[node] for node in backward_outputs),
            name=name,
            given_seconds=_figures("seconds", seconds or {}, reads, given.amount),
        )
        if sum(sizes) > given.MOST_BYTES:
            raise GraphError(name, "its nodes allocate more bytes than can be counted")
        graph.check()
        return graph

    @functools.cached_property
    def index(self) -> Mapping[str, int]:
        """The index of each node by its name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for position, node in enumerate(self.nodes):
            for operand in node.operands:
                readers[operand].append(position)
        return tuple(map(tuple, readers))

    @functools.cached_property
    def computed_operands(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each node, its operands that are no inputs, and the operators whose outputs they are."""
        operators: list[int] = []
        for position, node in enumerate(self.nodes):
            operators.append(position if node.leader is None else operators[node.leader])
        return tuple(
            tuple((each, operators[each]) for each in node.operands if each >= self.num_inputs)
            for node in self.nodes
        )

    @functools.cached_property
    def fx_nodes(self) -> tuple[fx.Node, ...]:
        """The fx node behind each node; empty for a graph made of mappings."""
        if self.module is None:
            return ()
        by_name = {node.name: node for node in self.module.graph.nodes}
        return tuple(by_name[node.name] for node in self.nodes)

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """What each node is to a compiler that fuses; empty for a graph made of mappings."""
        return tuple(map(loop, self.fx_nodes))

    @functools.cached_property
    def bytes_of_nodes(self) -> tuple[int, ...]:
        """Bytes that running each node allocates."""
        return tuple(sum([self.storage_bytes[storage] for storage in node.creates]) for node in self.nodes)

    @functools.cached_property
    def bytes_at_the_end(self) -> int:
        """Bytes of all that is returned, and of the tangents."""
        returned = {storage for output in self.outputs for storage in self.nodes[output].views}
        return sum(self.storage_bytes[storage] for storage in returned) + self.tangent_bytes

    @property
    def bytes_without_backward(self) -> int:
        """The same where nothing runs in the backward, which returns tangents as they are; 0 elsewhere."""
        is_idle = self.boundary == len(self.nodes) and any(each is not None for each in self.backward_outputs)
        return self.bytes_at_the_end if is_idle else 0

    @functools.cached_property
    def shared_places(self) -> tuple[int | None, ...]:
        """For each node that shares storages, which of its operands has them; None for others."""
        return tuple(None if node.shares is None else node.operands.index(node.shares) for node in self.nodes)

    @functools.cached_property
    def writable_operands(self) -> tuple[tuple[int, ...], ...]:
        """For each node, which of its operands a twin could write over; empty for a graph of mappings."""
        written = map(twins.writable_operands, self.fx_nodes)
        return tuple(
            tuple(node.operands.index(self.index[operand.name]) for operand in operands)
            for node, operands in zip(self.nodes, written, strict=False)
        )

    @functools.cached_property
    def is_plain(self) -> tuple[bool, ...]:
        """For each node, whether it is done with its operands and its result when it returns."""
        return tuple(map(twins.is_plain, self.fx_nodes))

    @functools.cached_property
    def redrawn(self) -> frozenset[int]:
        """Indices of the nodes whose last operand is a state of random numbers, which only mirrors read."""
        return frozenset(index for index, node in enumerate(self.fx_nodes) if STATE in node.meta)

    @functools.cached_property
    def is_on_cpu(self) -> bool:
        """Whether all its values are on a CPU; False for a graph made of mappings."""
        values = (tensor for node in self.fx_nodes for tensor in ops.tensors(node.meta.get("val")))
        return {tensor.device.type for tensor in values} == {"cpu"}

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices of all outputs, each once."""
        both = (*self.forward_outputs, *self.backward_outputs)
        return tuple(dict.fromkeys(output for output in both if output is not None))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes but the inputs, in order: the schedule that the graph itself is."""
        return tuple(node.name for node in self.nodes[self.num_inputs :])

    def leader(self, name: str) -> str | None:
        """The operator whose output a ``getitem`` picks, through nested ones; None for other nodes."""
        node = self.nodes[self.index[name]]
        if node.leader is None:
            return None
        leader = self.nodes[node.leader].name
        return self.leader(leader) or leader

    def is_kept(self, index: int) -> bool:
        """Whether a node may not run again, itself or the operator whose output it picks."""
        node = self.nodes[index]
        return node.keep is not None or (node.leader is not None and self.is_kept(node.leader))

    def node_bytes(self, index: int) -> int:
        """Bytes that running the node allocates."""
        return self.bytes_of_nodes[index]

    def is_backward(self, index: int) -> bool:
        """Whether the node stands behind the boundary."""
        return index >= self.boundary

    def source(self, name: str) -> str:
        """The user's file and line that the node comes from, empty where the trace does not say."""
        if self.module is None:
            return ""
        return source_line(self.fx_nodes[self.index[name]])

    def module_path(self, name: str) -> str:
        """The user's module that the node comes from, empty where the trace does not say."""
        if self.module is None:
            return ""
        return module_path(self.fx_nodes[self.index[name]])

    def operator(self, name: str) -> str:
        """What computes the node, such as ``aten.mm.default``."""
        return ops.title(self.fx_nodes[self.index[name]]) if self.fx_nodes else ""

    @functools.cached_property
    def origins(self) -> tuple[Origin, ...]:
        """For each node, what it is to its user."""
        names = (node.name for node in self.nodes)
        return tuple(
            Origin(name, self.operator(name), self.module_path(name), self.source(name)) for name in names
        )

    def check(self) -> None:
        """Raise GraphError unless the graph keeps its invariants: order, phases, boundary, outputs."""
        for position, node in enumerate(self.nodes):
            late = [self.nodes[operand].name for operand in node.operands if operand >= position]
            if late:
                raise GraphError(
                    node.name, f"it reads {late[0]!r}, which is computed later", self.source(node.name)
                )
            if (node.phase is Phase.INPUT) != (position < self.num_inputs):
                raise GraphError(node.name, "inputs must stand first")
            if node.phase is Phase.FORWARD and position >= self.boundary:
                raise GraphError(node.name, "it is needed by a forward output and stands in the backward")
            if node.phase is Phase.BACKWARD and position < self.boundary:
                raise GraphError(node.name, "it depends on a tangent and stands in the forward")
            if node.leader is not None and not node.leader < position:
                raise GraphError(node.name, "it stands before the operator whose output it is")
            self._check_phases(node)
        for output in self.forward_outputs:
            if output is not None and output >= self.boundary:
                raise GraphError(
                    self.nodes[output].name, "the forward returns it but the backward computes it"
                )

    def _check_phases(self, node: Node) -> None:
        if node.phase not in (Phase.FORWARD, Phase.DEFERRED):
            return
        for operand in node.operands:
            if self.nodes[operand].phase is Phase.BACKWARD:
                problem = f"a {node.phase.value} node reads the backward's {self.nodes[operand].name!r}"
                raise GraphError(node.name, problem, self.source(node.name))


def check_graph(graph: object) -> None:
    """Raise InvalidOptionError unless it is a JointGraph."""
    if not isinstance(graph, JointGraph):
        expected = "a JointGraph, such as fxremat.capture() makes of a model"
        raise InvalidOptionError("graph", f"got {shown(graph)}, expected {expected}.")


def _operands(operands: object) -> dict[str, tuple[str, ...]]:
    """What each node reads, by name."""
    found: dict[str, tuple[str, ...]] = {}
    for name, read in given.mapping("operands", operands).items():
        if not isinstance(name, str):
            raise GraphError(name, "the name of a node is a text")
        if isinstance(read, str) or not isinstance(read, Iterable):
            raise GraphError(name, f"got {shown(read)}, expected the names of the nodes that it reads")
        found[name] = tuple(read)
    return found


def _figures(
    kind: str, figures: object, nodes: Collection[str], read: Callable[[object], _Figure | None]
) -> dict[str, _Figure]:
    """The bytes or the seconds of nodes, by name."""
    found = {}
    for name, value in given.mapping(kind, figures).items():
        if name not in nodes:
            raise GraphError(name, f"it has {kind} but is no node of the graph")
        figure = read(value)
        if figure is None:
            raise GraphError(name, f"got {shown(value)}, expected {kind} as a number from 0")
        found[name] = figure
    return found
