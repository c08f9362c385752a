"""Bounds: what no schedule of a graph can undercut, whatever it recomputes and in whatever order.

Two certificates, for each memory model (``inductor/fusion.py``):

1. *Seconds within a budget.* Take a *moment*, such as the first step of the backward. Of the values made
   before it, those that are read from there on are live together and fit the budget; whatever else those
   steps read runs again, from values that are live or run again. So the seconds beyond one run of each node
   are at least those of the cheapest such choice (``closures.py``).
2. *Bytes at all.* A node's operands and results are live while it runs, all outputs at the end, and at the
   first step of the backward the forward's outputs and what nothing can make again.

Moments are the first step of the backward and, where nothing is fused, the first run of the node of the
backward at which the graph's own order has its peak. Linear in nodes and edges but for the cuts. Left out:
what must be computed a third time.

Under Inductor only what the model materialises in every schedule counts, and the bounds hold for schedules
in which every step serves an output or an effect, as planners make them: a dead loop may take the place of
a buffer that counts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.nodes import Phase
from fxremat.predict.cost import Costs
from fxremat.predict.models import MemoryModel
from fxremat.proof.closures import SINK, SOURCE, Edge, Network


class Bounds:
    """The bounds of a graph; what was found out for one budget serves the next.

    Args:
        graph: The joint graph.
        costs: Seconds of its nodes.
        model: The memory model that predicts the peak.

    Example:
        >>> from fxremat.predict.cost import costs
        >>> from fxremat.predict.models import EVERY_VALUE
        >>> reads = {"x": (), "a": ["x"], "b": ["a"], "c": ["b"]}
        >>> reads |= {"dc": ["c"], "db": ["dc", "b"], "da": ["db", "a"]}
        >>> names = [name for name in reads if reads[name]]
        >>> g = JointGraph.from_mappings(
        ...     reads, dict.fromkeys(names, 4), forward_outputs=["c"], backward=names[3:],
        ...     backward_outputs=["da"], seconds=dict.fromkeys(names, 1.0))
        >>> bounds = Bounds(g, costs(g), EVERY_VALUE)
        >>> bounds.lowest_peak_bytes, [bounds.seconds(budget) for budget in (20, 16, 15)]
        (16, [6.0, 7.0, inf])
    """

    def __init__(self, graph: JointGraph, costs: Costs, model: MemoryModel) -> None:
        self.facts = _Facts(graph, model)
        nodes = range(graph.num_inputs, len(graph.nodes))
        self.again = {node: self.facts.sure_seconds(costs, node) for node in nodes}
        self.written = {node: self.facts.write_seconds(costs, node) for node in nodes}
        written_once = [self.written.pop(node) for node in self.facts.surely_written()]
        self.once = math.fsum((*self.again.values(), *written_once))
        self.moments = [(moment, self._network(moment)) for moment in self.facts.moments()]

    @functools.cached_property
    def lowest_peak_bytes(self) -> int:
        """Bytes below which no schedule has its predicted peak."""
        live = (moment.held_bytes + network.least_bytes for moment, network in self.moments)
        return max(self.facts.bytes_at_nodes(), self.facts.bytes_at_end(), *live)

    def seconds(self, budget_bytes: float) -> float:
        """Seconds that every schedule takes whose predicted peak is within a budget; inf if there is none."""
        if budget_bytes < self.lowest_peak_bytes:
            return math.inf
        found = (network.least_seconds(budget_bytes - moment.held_bytes) for moment, network in self.moments)
        return self.once + max(found, default=0.0)

    def _network(self, moment: _Moment) -> Network:
        """What may be live at the moment, and what may run again behind it.

        A storage that is needed is live, which is the edge from its maker, or made again, with its maker on
        the sink's side. What runs again needs its operands. A view needs no more than its storage.
        """
        facts = self.facts
        edges: list[Edge] = []
        needed = dict.fromkeys(moment.needed, SINK)  # the vertex of each storage
        makers: dict[int, int] = {}  # the vertex of each node
        stack = list(needed)
        while stack:
            storage = stack.pop()
            node = facts.maker[storage]
            if node not in makers:
                makers[node] = run = len(needed) + len(makers) + 2
                if moment.has_run[node]:
                    is_kept = facts.graph.is_kept(node)
                    edges.append((SOURCE, run, math.inf if is_kept else self.again[node], 0))
                for operand in filter(moment.must_be_had, facts.storages_read(node)):
                    if operand not in needed:
                        needed[operand] = len(needed) + len(makers) + 2
                        stack.append(operand)
                    if needed[operand] != SINK:
                        edges.append((needed[operand], run, math.inf, 0))
            edges.append(self._held(moment, storage, needed[storage], makers[node]))
        return Network(len(needed) + len(makers) + 2, edges)

    def _held(self, moment: _Moment, storage: int, vertex: int, maker: int) -> Edge:
        """The edge that stands for a storage's being live at the moment."""
        graph, node = self.facts.graph, self.facts.maker[storage]
        is_lost = moment.has_run[node] and storage not in graph.nodes[node].recreates
        written = self.written.get(node, 0.0) if len(graph.nodes[node].creates) == 1 else 0.0
        return SOURCE if is_lost else maker, vertex, written, graph.storage_bytes[storage]


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    """A moment in the backward of any schedule.

    Attributes:
        held_bytes: Bytes that are live at it in any case: tangents, the forward's outputs, a node's results.
        has_run: For each node, whether it surely ran before.
        needed: The storages that must be live at it or made from then on.
        must_be_had: Tells of a storage whether it can be read behind the moment only if it is live then or
            made again: not held in any case, nor made for the first time by a node that runs behind.
    """

    held_bytes: int
    has_run: Sequence[bool]
    needed: tuple[int, ...]
    must_be_had: Callable[[int], bool]


class _Facts:
    """What holds in every schedule of a graph under a memory model."""

    def __init__(self, graph: JointGraph, model: MemoryModel) -> None:
        self.graph = graph
        self.model = model.on(graph)
        self.loops = graph.loops if self.model.fuses else ()
        self.maker = [0] * len(graph.storage_bytes)
        for position, node in enumerate(graph.nodes):
            for storage in node.creates:
                self.maker[storage] = position
        self.returned = self._storages(graph.outputs)
        forward_outputs = [output for output in graph.forward_outputs if output is not None]
        self.returned_by_forward = self._storages(forward_outputs)

    def storages_read(self, node: int) -> tuple[int, ...]:
        """The storages that the operands of a node's first run lie in, each once; none of the caller's."""
        operands = self.graph.nodes[node].operands[: -1 if node in self.graph.redrawn else None]
        views = (self.graph.nodes[operand].views for operand in operands)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(views)))

    def _storages(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """The storages of values that are surely materialised if they are returned."""
        found = dict.fromkeys(storage for node in nodes for storage in self.graph.nodes[node].views)
        return tuple(storage for storage in found if not self._may_vanish(self.maker[storage]))

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.graph.storage_bytes[storage] for storage in storages)

    # -- seconds

    def sure_seconds(self, costs: Costs, node: int) -> float:
        """Seconds that each run of a node takes at least.

        Under Inductor a run takes its fixed seconds, and it reads what the caller holds, views, and what is
        surely materialised. An external kernel writes its result, unless it is a product that may be computed
        with a sum; and all that it reads is materialised for it, or for the sum.
        """
        if not self.model.fuses or costs.is_view[node]:
            return costs.of_node(self.graph, node)
        is_kernel = self.loops[node].kind is Kind.KERNEL
        reads = [
            costs.read[operand]
            for operand in self.graph.nodes[node].operands
            if is_kernel or operand < self.graph.num_inputs or self._is_sure(operand)
        ]
        return costs.fixed[node] + (costs.write[node] if self._is_sure(node) else 0.0) + sum(reads)

    def write_seconds(self, costs: Costs, node: int) -> float:
        """What ``sure_seconds`` leaves out, of a run whose value is returned or crosses to the backward."""
        return 0.0 if not self.model.fuses or self._is_sure(node) else costs.write[node]

    def surely_written(self) -> Iterable[int]:
        """Nodes of whose runs one at least is materialised: what is returned or read by external kernels."""
        storages = dict.fromkeys(self.returned)
        for node, loop in enumerate(self.loops):
            if loop.kind is Kind.KERNEL:
                storages.update(dict.fromkeys(self.storages_read(node)))
        return dict.fromkeys(self.maker[storage] for storage in storages)

    def _is_sure(self, node: int) -> bool:
        """Whether each run's value is materialised, under Inductor; reading a view always counts."""
        kind = self.loops[node].kind
        return kind is Kind.VIEW or (kind is Kind.KERNEL and not self._may_vanish(node))

    def _may_vanish(self, node: int) -> bool:
        """Whether the node is a product that may be computed with a sum, and has no value then."""
        if not self.model.fuses or not self.loops[node].is_product:
            return False
        readers = (self.loops[user] for user in self.graph.users[node])
        return any(each.is_sum and each.elements == self.loops[node].elements for each in readers)

    # -- bytes

    def bytes_at_nodes(self) -> int:
        """The most bytes of what a node reads and makes, and of all that is live whenever it runs."""
        graph = self.graph
        most = 0
        for position in range(graph.num_inputs, len(graph.nodes)):
            if self.model.fuses and self.loops[position].kind is not Kind.KERNEL:
                continue
            live = dict.fromkeys(self.storages_read(position))
            held = 0
            if graph.nodes[position].phase is Phase.BACKWARD:
                live.update(dict.fromkeys(self.returned_by_forward))
                held = graph.tangent_bytes
            if graph.scratch_bytes and not self.model.fuses:
                held += graph.scratch_bytes[position]
            most = max(most, held + self._bytes(live) + self._result_bytes(position))
        return most

    def _result_bytes(self, node: int) -> int:
        """Bytes that a run of a node surely adds to those of its operands."""
        is_overwriting = self.model.may_overwrite(self.graph, node)
        return 0 if is_overwriting or self._may_vanish(node) else self.graph.node_bytes(node)

    def bytes_at_end(self) -> int:
        """The bytes of all outputs, and of the operands of the one that is made last."""
        graph = self.graph
        phase_of = {self.maker[storage]: graph.nodes[self.maker[storage]].phase for storage in self.returned}
        is_behind = Phase.BACKWARD in phase_of.values()  # then the last one is no output of the forward
        last = [node for node in graph.backward_outputs if node is not None] if is_behind else graph.outputs
        makers = {self.maker[storage]: None for node in last for storage in graph.nodes[node].views}
        beside = [
            self._bytes(storage for storage in self.storages_read(maker) if storage not in self.returned)
            for maker in makers
            if not self.model.overwrites
        ]
        has_backward = any(node.phase is Phase.BACKWARD for node in graph.nodes)
        tangents = graph.tangent_bytes if has_backward else 0
        return tangents + self._bytes(self.returned) + min(beside, default=0)

    # -- moments

    def moments(self) -> Iterable[_Moment]:
        """The first step of the backward, and the first run of the node at which the graph's order peaks."""
        phases = [node.phase for node in self.graph.nodes]
        if Phase.BACKWARD not in phases:
            return
        has_run = [phase is Phase.FORWARD for phase in phases]
        yield self._moment(has_run, [phase is Phase.BACKWARD for phase in phases], 0)
        if self.model.fuses:
            return  # kernels run when their operands are there, which is not when they stand first
        graph = self.graph
        live = self.model.profile(graph, graph.names).live_bytes.tolist()
        peak = max(
            (step for step in range(len(live)) if phases[graph.num_inputs + step] is Phase.BACKWARD),
            key=live.__getitem__,
        )
        node = graph.num_inputs + peak
        has_run = [ran or is_before for ran, is_before in zip(has_run, self._ancestors(node), strict=True)]
        scratch = graph.scratch_bytes[node] if graph.scratch_bytes else 0
        yield self._moment(has_run, self._descendants(node), self._result_bytes(node) + scratch)

    def _moment(self, has_run: Sequence[bool], is_later: Sequence[bool], held_bytes: int) -> _Moment:
        held = frozenset(self.returned_by_forward)

        def must_be_had(storage: int) -> bool:
            return storage not in held and not is_later[self.maker[storage]]

        later = (node for node, is_behind in enumerate(is_later) if is_behind)
        needed = dict.fromkeys(itertools.chain(self.returned, *map(self.storages_read, later)))
        held_bytes += self.graph.tangent_bytes + self._bytes(held)
        return _Moment(held_bytes, has_run, tuple(filter(must_be_had, needed)), must_be_had)

    def _ancestors(self, node: int) -> list[bool]:
        """Which nodes a node needs, directly or not."""
        found = [False] * len(self.graph.nodes)
        stack = [node]
        while stack:
            for operand in self.graph.nodes[stack.pop()].operands:
                if not found[operand]:
                    found[operand] = True
                    stack.append(operand)
        return found

    def _descendants(self, node: int) -> list[bool]:
        """Which nodes need a node, directly or not, and the node itself."""
        found = [False] * len(self.graph.nodes)
        found[node] = True
        for position in range(node + 1, len(found)):
            found[position] = any(found[operand] for operand in self.graph.nodes[position].operands)
        return found
