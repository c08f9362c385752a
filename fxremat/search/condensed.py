"""Condensed: a joint graph as planning weighs it, a quarter of the nodes and nothing but integers.

Terms:
    operator: a node that allocates or may run only once, with the ``getitem`` that follow it.
    buffer: a storage that an operator allocates.
    free node: a view; under Inductor also a pointwise node that is computed inside of its readers. It holds
        no memory of its own, so a plan need not speak of it: it runs wherever an operator needs it.

A *plan* is a sequence of operators; one that stands again is a recomputation. ``Condensed.schedule`` puts the
free nodes in and gives the schedule that the plan stands for. Under Inductor sizes and seconds are estimates,
made from the fusion of one reference schedule; without fusion they are exact, but that a state of random
numbers counts until they are drawn even if they are not drawn again. Linear in nodes and edges.

The proofs contract a graph by a stricter rule: see ``proof/moves.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import Schedule, operator_of
from fxremat.memory.lowering import Copies
from fxremat.predict.cost import Costs
from fxremat.predict.models import EVERY_VALUE, MemoryModel
from fxremat.search.flat import Flat, Integers, Ragged

UNLIMITED = 1 << 30
NO_COPIES = Copies()


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a condensed graph. Nodes, buffers and operators are referred to by index.

    Attributes:
        members: The node and the ``getitem`` that follow it.
        free: The free nodes that must be at hand when it runs, in order.
        reads: The buffers that it reads, itself or through free nodes.
        makes: The buffers that its first run allocates.
        remakes: The buffers that each further run allocates.
        seconds: What one run takes, that of inlined nodes included.
        scratch_bytes: What it allocates and frees again while it runs.
        overwrites: The buffers that its result may take the place of, if nothing needs them any more.
        ends_forward: Whether the backward begins behind its first run at the earliest.
        runs_at_most: How often it may run.
        is_loop: Whether it is taken to run in one call with the loops around it: what they read and make is
            live throughout.
        may_move: Whether it need not keep its place in the order: it has no effect and draws no numbers.
        must_repeat: Whether the backward may not read what the forward made of it.
        worth: Weight of its seconds where values are chosen: what the user wishes.
    """

    members: tuple[int, ...]
    free: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    remakes: tuple[int, ...]
    seconds: float
    scratch_bytes: int
    overwrites: tuple[int, ...]
    ends_forward: bool
    runs_at_most: int
    is_loop: bool
    may_move: bool
    must_repeat: bool
    worth: float


@dataclass(frozen=True, eq=False)
class Condensed:
    """A condensed joint graph.

    Attributes:
        graph: What it was made of.
        operators: The operators in the graph's order.
        size: Bytes of each buffer.
        maker: The operator that makes each buffer.
        pinned: For each buffer, whether a value in it is returned.
        inlined: Nodes that are computed inside of their readers.
        after_bytes: What is live at least when all has run.
    """

    graph: JointGraph
    operators: tuple[Operator, ...]
    size: tuple[int, ...]
    maker: tuple[int, ...]
    pinned: tuple[bool, ...]
    inlined: frozenset[int]
    after_bytes: int = 0

    @functools.cached_property
    def boundary(self) -> int:
        """The first operator that stands behind the graph's own boundary."""
        return sum(operator.members[0] < self.graph.boundary for operator in self.operators)

    def boundary_of(self, plan: Sequence[int]) -> int:
        """Where in a plan the backward begins: behind the last operator of the forward that runs first."""
        return int(self.first_runs(plan)[self.flat.ends_forward].max(initial=-1)) + 1

    def first_runs(self, plan: Sequence[int]) -> Integers:
        """For each operator its first run in a plan; -1 if it has none."""
        found = np.full(len(self.operators), -1, dtype=np.int64)
        found[np.array(plan[::-1], dtype=np.int64)] = np.arange(len(plan))[::-1]  # of several the last counts
        return found

    @functools.cached_property
    def is_once(self) -> tuple[bool, ...]:
        """Whether each buffer cannot be made again."""
        makers = map(self.operators.__getitem__, self.maker)
        return tuple(
            maker.runs_at_most == 1 or buffer not in maker.remakes for buffer, maker in enumerate(makers)
        )

    @functools.cached_property
    def behind(self) -> tuple[tuple[int, ...], ...]:
        """For each buffer, those that its readers make, in order."""
        found: list[list[int]] = [[] for _ in self.size]
        for operator in self.operators:
            for buffer in operator.reads:
                found[buffer] += operator.makes
        return tuple(map(tuple, found))

    @functools.cached_property
    def flat(self) -> Flat:
        """The same as arrays."""
        operators = self.operators
        return Flat(
            Ragged.of_rows([each.reads for each in operators]),
            Ragged.of_rows([made for each in operators for made in (each.makes, each.remakes)]),
            np.array(self.size, dtype=np.int64),
            np.array(self.pinned, dtype=bool),
            Ragged.of_rows([each.overwrites for each in operators]),
            np.array([each.runs_at_most for each in operators], dtype=np.int64),
            np.array([each.scratch_bytes for each in operators], dtype=np.int64),
            np.array([each.ends_forward for each in operators], dtype=bool),
            np.array([each.is_loop for each in operators], dtype=bool),
        )

    @functools.cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The buffers that each operator reads."""
        return tuple(operator.reads for operator in self.operators)

    @functools.cached_property
    def runs_at_most(self) -> tuple[int, ...]:
        """How often each operator may run."""
        return tuple(operator.runs_at_most for operator in self.operators)

    @functools.cached_property
    def each_seconds(self) -> tuple[float, ...]:
        """What one run of each operator takes."""
        return tuple(operator.seconds for operator in self.operators)

    @functools.cached_property
    def worths(self) -> tuple[float, ...]:
        """The weighted seconds of each operator."""
        return tuple(operator.seconds * operator.worth for operator in self.operators)

    @functools.cached_property
    def made_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes that each operator allocates when it runs first, and when it runs again."""
        size, operators = self.size, self.operators
        first = tuple(sum([size[buffer] for buffer in each.makes]) for each in operators)
        return first, tuple(sum([size[buffer] for buffer in each.remakes]) for each in operators)

    @functools.cached_property
    def _uses(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        return {}

    def uses(self, order: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """For each buffer, the places in an order of the operators that read it, the last one first."""
        if order not in self._uses:
            found: list[list[int]] = [[] for _ in self.size]
            for place in reversed(range(len(order))):
                for buffer in self.operators[order[place]].reads:
                    found[buffer].append(place)
            self._uses[order] = tuple(map(tuple, found))
        return self._uses[order]

    @functools.cached_property
    def must_repeat(self) -> bool:
        """Whether there is an operator of which the backward may not read what the forward made."""
        return any(operator.must_repeat for operator in self.operators)

    def seconds(self, plan: Iterable[int]) -> float:
        """What the operators of a plan take."""
        return sum(map(self.each_seconds.__getitem__, plan))

    def reordered(self, order: Sequence[int]) -> Condensed:
        """The operators of an order in which each reads what is made before it.

        What an operator makes that is left out, since nothing reads it, is made behind the last one.
        """
        place = {operator: position for position, operator in enumerate(order)}
        operators = tuple(self.operators[operator] for operator in order)
        maker = tuple(place.get(maker, len(order)) for maker in self.maker)
        return replace(self, operators=operators, maker=maker)

    def schedule(self, plan: Sequence[int]) -> Schedule:
        """The schedule of a plan: free nodes run where they are first needed, and anew where they are stale.

        A free node is stale when something that it reads was computed again since, or, being inlined, when it
        ran in the forward and is needed in the backward.
        """
        nodes = self.graph.nodes
        order: list[int] = []
        ran_at = [-1] * len(nodes)
        boundary, first_backward = self.boundary_of(plan), UNLIMITED

        def run(node: int) -> None:
            ran_at[node] = len(order)
            order.append(node)

        def follows(leader: int) -> bool:
            return leader in (order[-1], nodes[order[-1]].leader)

        for place, index in enumerate(plan):
            operator = self.operators[index]
            if place == boundary:
                first_backward = len(order)
            for node in operator.free:
                at = ran_at[node]
                is_late = at < first_backward <= len(order) and node in self.inlined
                leader = nodes[node].leader
                if leader is not None and at < ran_at[leader] and not follows(leader):
                    run(leader)  # what it picks from must stand directly before it
                if at < 0 or is_late or any(ran_at[operand] > at for operand in nodes[node].operands):
                    run(node)
            is_again = ran_at[operator.members[0]] >= 0
            for node in operator.members:
                if not (is_again and nodes[node].keep is not None):
                    run(node)
        return Schedule(nodes[node].name for node in order)


def condense(
    graph: JointGraph,
    costs: Costs,
    model: MemoryModel = EVERY_VALUE,
    inlined: frozenset[int] = frozenset(),
    joins_calls: bool = False,
    copies: Copies = NO_COPIES,
) -> Condensed:
    """Condense a graph.

    Args:
        graph: The graph.
        costs: Seconds of its nodes.
        model: The memory model. If it lets results be written over operands that die, they are, as far as
            operators (``graph/twins.py``) or Inductor's loops can.
        inlined: Nodes that get no buffer, whatever the schedule.
        joins_calls: Whether neighbouring loops are taken to run in one call, as on a CPU if no plan ends it.
        copies: The copies that all schedules have in common. Those of inputs are made by their first reader,
            when it runs first.
    """
    return _Condenser(graph, costs, model, inlined, joins_calls, copies).condense()


class _Condenser:
    """One pass over the nodes."""

    def __init__(
        self,
        graph: JointGraph,
        costs: Costs,
        model: MemoryModel,
        inlined: frozenset[int],
        joins_calls: bool,
        copies: Copies,
    ) -> None:
        self.graph = graph
        self.joins_calls = joins_calls
        self.model = model.on(graph)
        self.costs = costs
        self.buffers: dict[int, int] = {}  # of each storage, in order of making
        self.bytes: list[int] = []  # of each buffer
        self.layouts = self.model.layouts(graph)
        self.lying: dict[int, Hashable] = {}  # the layouts of buffers
        returned = frozenset(graph.outputs)
        self.inlined = frozenset(node for node in inlined if self._may_be_free(node, returned))
        self.is_free: list[bool] = []
        for index, node in enumerate(graph.nodes):
            is_free = node.leader is not None and self.is_free[node.leader]
            is_view = self._is_view(index) and self._may_be_free(index, returned)
            self.is_free.append(is_free or index in self.inlined or is_view)
        # What a view that runs once looks at must not be computed again under it.
        self.once = {
            storage
            for index, node in enumerate(graph.nodes)
            if not self.is_free[index] and not node.creates and node.leader is None
            for storage in node.views
        }
        self.storage_bytes = list(graph.storage_bytes)  # and, behind the graph's own, of the copies
        self.copies_made: dict[int, list[int]] = {}  # by operator
        self.copies_read: dict[int, list[int]] = {}
        self.after_bytes = max(copies.after_bytes, graph.bytes_without_backward)
        self._count(copies)

    def _count(self, copies: Copies) -> None:
        """Number the copies behind the storages, and say who makes and who reads them."""
        for readers, size in copies.of_inputs:
            storage = len(self.storage_bytes)
            operators = {operator_of(self.graph, node) for node in readers if not self.is_free[node]}
            for place, operator in enumerate(sorted(operators)):
                (self.copies_read if place else self.copies_made).setdefault(operator, []).append(storage)
            self.storage_bytes.append(size)

    def condense(self) -> Condensed:
        graph = self.graph
        groups = self._groups()
        maker: list[int] = []
        for index, group in enumerate(groups):
            for storage in self._made(group):
                self.buffers[storage] = len(maker)
                self.bytes.append(self.storage_bytes[storage] if storage >= 0 else 0)
                maker.append(index)
        for node, layout in self.layouts.items():
            each = graph.nodes[node]
            made = each.creates if each.leader is None else each.views
            self.lying |= {self.buffers[storage]: layout for storage in made if storage in self.buffers}
        returned = {storage for node in graph.outputs for storage in graph.nodes[node].views}
        return Condensed(
            graph,
            tuple(map(self._operator, groups)),
            tuple(self.bytes),
            tuple(maker),
            tuple(storage in returned for storage in self.buffers),
            self.inlined,
            self.after_bytes,
        )

    def _made(self, group: tuple[int, ...]) -> list[int]:
        """The storages that a group allocates; one that allocates none stands for one without bytes."""
        created = [storage for node in group for storage in self.graph.nodes[node].creates]
        return [*(created or [-1 - group[0]]), *self.copies_made.get(group[0], ())]

    def _is_view(self, node: int) -> bool:
        """Whether a node allocates nothing and holds what it reads for as long as it is needed."""
        each = self.graph.nodes[node]
        if node < self.graph.num_inputs or each.creates:
            return False
        others = (read for read in each.operands if read != each.shares)
        return not any(self.graph.nodes[read].views for read in others)

    def _may_be_free(self, node: int, returned: frozenset[int]) -> bool:
        """Whether a node, and the ``getitem`` that follow it, may run anywhere and any number of times."""
        nodes = self.graph.nodes
        together = (node, *(user for user in self.graph.users[node] if nodes[user].leader == node))
        is_bound = any(nodes[each].keep is not None or nodes[each].ordered for each in together)
        return nodes[node].leader is None and not is_bound and returned.isdisjoint(together)

    def _groups(self) -> list[tuple[int, ...]]:
        """The nodes that are not free, each with the ``getitem`` that follow it."""
        groups: list[list[int]] = []
        for node in range(self.graph.num_inputs, len(self.graph.nodes)):
            if self.is_free[node]:
                continue
            if self.graph.nodes[node].leader is None:
                groups.append([node])
            else:
                groups[-1].append(node)
        return [tuple(group) for group in groups]

    def _operator(self, group: tuple[int, ...]) -> Operator:
        graph, buffers = self.graph, self.buffers
        nodes = [graph.nodes[node] for node in group]
        free = self._free_behind(group)
        read = dict.fromkeys(
            buffers[storage]
            for node in (*free, *group)
            for operand in graph.nodes[node].operands
            if operand not in group and not self.is_free[operand]
            for storage in (*graph.nodes[operand].views, -1 - operator_of(graph, operand))
            if storage in buffers
        )
        read |= dict.fromkeys(buffers[storage] for storage in self.copies_read.get(group[0], ()))
        made = self._made(group)
        remade = [storage for node in nodes for storage in node.recreates]
        is_kept = any(graph.is_kept(node) for node in group[:1]) or not self.once.isdisjoint(made)
        is_late = group[0] >= graph.boundary
        limits = [node.at_most + 1 for node in nodes if node.at_most is not None]
        inlined = [node for node in free if node in self.inlined]
        return Operator(
            group,
            free,
            tuple(read),
            tuple(buffers[storage] for storage in made),
            tuple(buffers[storage] for storage in remade),
            self._seconds(group, inlined),
            max((graph.scratch_bytes[node] for node in group), default=0) if graph.scratch_bytes else 0,
            self._overwrites(group[0], tuple(read)),
            nodes[0].phase is Phase.FORWARD,
            1 if is_kept or is_late else min(limits, default=UNLIMITED),
            self.joins_calls and self._is_loop(group[0]),
            not any(node.ordered for node in nodes),
            any(node.at_least > 0 for node in nodes) and not is_kept,
            {"save": 1e6, "recompute": 1e-6}.get(nodes[0].wish, 1.0),
        )

    def _overwrites(self, node: int, read: Sequence[int]) -> tuple[int, ...]:
        """The buffers whose place a node's result may take: as large, and held by no view or other output."""
        graph = self.graph
        if not self.model.overwrites or len(graph.nodes[node].creates) != 1 or not graph.is_plain[node]:
            return ()
        if self.model.fuses:
            size = graph.node_bytes(node) if self.model.may_overwrite(graph, node) else None
            own = self.layouts.get(node)
            return tuple(
                each
                for each in read
                if self.bytes[each] == size and (own is None or self.lying.get(each, own) == own)
            )
        found = []
        for position in graph.writable_operands[node]:
            operand = graph.nodes[graph.nodes[node].operands[position]]
            is_whole = len(operand.views) == 1 and operand.views[0] in self.buffers
            if is_whole and graph.storage_bytes[operand.views[0]] == graph.node_bytes(node):
                found.append(self.buffers[operand.views[0]])
        return tuple(found)

    def _is_loop(self, node: int) -> bool:
        return self.graph.loops[node].is_generated

    def _seconds(self, group: Sequence[int], inlined: Sequence[int]) -> float:
        """What a group takes that computes these within: it reads what has a buffer, and writes its own."""
        costs, nodes = self.costs, self.graph.nodes
        run = [node for node in (*inlined, *group) if not costs.is_view[node]]
        arithmetic = sum(costs.fixed[node] for node in run)
        writes = sum(costs.write[node] for node in group)
        operands = (operand for node in run for operand in nodes[node].operands)
        return arithmetic + writes + sum(costs.read[each] for each in operands if each not in self.inlined)

    def _free_behind(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The free nodes that a group reads, directly or through others, in order."""
        found: set[int] = set()
        stack = [operand for node in group for operand in self.graph.nodes[node].operands]
        while stack:
            node = stack.pop()
            if self.is_free[node] and node not in found:
                found.add(node)
                stack.extend(self.graph.nodes[node].operands)
        return tuple(sorted(found))
