"""Mirror counts: the schedule that Algorithm 2 of Chen et al. makes of how often each node may run again."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence

from fxremat import given
from fxremat.errors import ScheduleError, shown
from fxremat.graph.joint import JointGraph, check_graph
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import Binding, Schedule, bind_nodes, operator_of, pruned


def expand(graph: JointGraph, mirror_counts: Mapping[str, int], early: Iterable[str] = ()) -> Schedule:
    """Algorithm 2: the schedule that drops a value with count m > 0 and computes it up to m more times.

    Copy k of a node reads copy min(k, m) of each operand, the backward reads the last copies, and a copy
    runs just before the first node of the backward that needs it (the lazy placement of the paper's last
    clause). Counts of backward nodes, of nodes that may not run again and of inputs are taken as 0; a
    ``getitem`` follows its operator; what the user ordered (``fxremat.region``) overrules the counts. With
    all counts 0 and no orders the result is the graph's own order.

    Args:
        graph: The graph.
        mirror_counts: Node name to m >= 0; absent names count 0.
        early: Names of DEFERRED nodes that stand in the backward and shall run in the forward, so that
            they are saved in place of what they are computed from, unless an ordered node is among them.

    Raises:
        ScheduleError: A name is unknown or a count negative.

    Example:
        >>> g = JointGraph.from_mappings(
        ...     {"x": (), "a": ["x"], "b": ["a"], "db": ["b"], "da": ["db", "a"]},
        ...     {"a": 4, "b": 4, "db": 4, "da": 4}, backward=["db", "da"], backward_outputs=["da"])
        >>> expand(g, {"a": 1})
        ('a', 'b', 'db', 'a', 'da')
    """
    return expand_bound(graph, mirror_counts, early).schedule(graph)


def expand_bound(graph: JointGraph, mirror_counts: Mapping[str, int], early: Iterable[str] = ()) -> Binding:
    """What ``expand`` makes, resolved already."""
    order = placed(graph, mirror_counts, early)
    binding = bind_nodes(graph, order)
    return binding if isinstance(order, range) else pruned(graph, binding)


def placed(graph: JointGraph, mirror_counts: Mapping[str, int], early: Iterable[str] = ()) -> Sequence[int]:
    """The nodes that ``expand`` has run, in order, those included whose values nobody reads."""
    check_graph(graph)
    counts = _effective_counts(graph, mirror_counts)
    moved = _with_deferred_operands(graph, early)
    if not any(counts) and not moved:
        return range(graph.num_inputs, len(graph.nodes))
    placement = _Placement(graph, counts, moved)
    for node in range(graph.boundary, len(graph.nodes)):
        if graph.nodes[node].phase is Phase.BACKWARD or graph.nodes[node].ordered:
            placement.place(node)
    for output in graph.outputs:
        placement.place(output)
    return placement.order


def _effective_counts(graph: JointGraph, mirror_counts: Mapping[str, int]) -> list[int]:
    counts = [0] * len(graph.nodes)
    for name, count in given.mapping("mirror_counts", mirror_counts).items():
        if name not in graph.index:
            raise ScheduleError(name, None, "the graph has no such node to mirror")
        if not isinstance(count, numbers.Integral) or count < 0:
            problem = f"a mirror count must be a whole number, 0 or more, got {shown(count)}"
            raise ScheduleError(name, None, problem)
        counts[graph.index[name]] = int(count)
    for position in range(graph.num_inputs, graph.boundary):
        node = graph.nodes[position]
        if node.keep is not None:
            counts[position] = 0
        elif node.leader is not None:
            counts[position] = counts[node.leader]
        else:
            at_most = counts[position] if node.at_most is None else node.at_most
            counts[position] = max(min(counts[position], at_most), node.at_least)
    others = len(graph.nodes) - graph.boundary
    return [0] * graph.num_inputs + counts[graph.num_inputs : graph.boundary] + [0] * others


def _with_deferred_operands(graph: JointGraph, early: Iterable[str]) -> list[int]:
    """The named nodes that stand in the backward, with the deferred nodes there that they need.

    A node that needs an ordered one stays where it is.
    """
    found: set[int] = set()
    for name in early:
        needed = _needed_in_backward(graph, name, found)
        if not any(graph.nodes[node].ordered for node in needed):
            found |= needed
    return sorted(found)


def _needed_in_backward(graph: JointGraph, name: str, found: Collection[int]) -> set[int]:
    """The node and its ancestors that stand in the backward, those found before left out."""
    if name not in graph.index:
        raise ScheduleError(name, None, "the graph has no such node to run early")
    needed: set[int] = set()
    stack = [graph.index[name]]
    while stack:
        node = stack.pop()
        if node < graph.boundary or node in found or node in needed:
            continue
        if graph.nodes[node].phase is not Phase.DEFERRED:
            raise ScheduleError(graph.nodes[node].name, None, "only a deferred node can run early")
        operator = operator_of(graph, node)
        needed.update(_with_outputs(graph, operator))
        stack.extend(graph.nodes[operator].operands)
    return needed


def _with_outputs(graph: JointGraph, operator: int) -> Iterable[int]:
    """An operator and the ``getitem`` that follow it."""
    yield operator
    for position in range(operator + 1, len(graph.nodes)):
        if graph.nodes[position].leader is None:
            return
        yield position


def _forward_order(graph: JointGraph, early: Sequence[int]) -> Iterable[int]:
    """The forward, each early node directly behind the last of its operands."""
    if graph.boundary == graph.num_inputs:
        yield from early
    behind: dict[int, list[int]] = {}
    place: dict[int, int] = {}
    for node in early:
        operands = graph.nodes[node].operands
        place[node] = max((place.get(operand, operand) for operand in operands), default=graph.num_inputs)
        behind.setdefault(max(place[node], graph.num_inputs), []).append(node)
    waiting: list[int] = []
    for position in range(graph.num_inputs, graph.boundary):
        yield position
        waiting.extend(behind.get(position, ()))
        if position + 1 == graph.boundary or graph.nodes[position + 1].leader is None:
            yield from waiting
            waiting.clear()


class _Placement:
    """The growing V' of Algorithm 2. A copy is a pair (node, level); level 0 ran in the forward.

    A pair is the number ``node * levels + level``, so that numbers stand in the order of nodes.
    """

    def __init__(self, graph: JointGraph, counts: Sequence[int], early: Sequence[int]) -> None:
        self.graph = graph
        self.counts = counts
        self.levels = max(counts) + 1
        self.order = list(_forward_order(graph, early))
        self.placed = {node * self.levels for node in (*range(graph.boundary), *early)}

    def place(self, node: int) -> None:
        """Append the last copy of a node behind those of its ancestors that are missing."""
        last = operator_of(self.graph, node) * self.levels + self.counts[node]
        if last not in self.placed:
            missing = self._missing(last)
            self.placed.update(missing)
            for copy in missing:
                self._append(copy)

    def _missing(self, last: int) -> list[int]:
        """A copy and its ancestors that are not placed, in order; those of outputs are their operators'."""
        placed, counts, levels, boundary = self.placed, self.counts, self.levels, self.graph.boundary
        computed_operands = self.graph.computed_operands
        missing, stack = {last}, [last]
        while stack:
            position, level = divmod(stack.pop(), levels)
            for operand, operator in computed_operands[position]:
                count = counts[operand]
                if level < count and position < boundary:
                    count = level
                copy = operator * levels + count
                if copy not in placed and copy not in missing:
                    missing.add(copy)
                    stack.append(copy)
        return sorted(missing)

    def _append(self, copy: int) -> None:
        """Let a copy of an operator run, and pick of its outputs."""
        nodes = self.graph.nodes
        position, level = divmod(copy, self.levels)
        while True:
            if level == 0 or nodes[position].keep is None:
                self.order.append(position)
            position += 1
            if position == len(nodes) or nodes[position].leader is None:
                return
