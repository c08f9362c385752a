"""Schedule: in which order a graph's nodes run, and which run more than once.

A schedule is a sequence of names of the graph's nodes, inputs left out.

1. A name that stands again is a recomputation, a *mirror*.
2. A use reads the latest earlier occurrence of its operand.
3. A forward output is the latest occurrence before the boundary, a gradient the last one of all.
4. The *boundary* is where the backward begins: behind the last FORWARD node that runs for the first time
   and the ``getitem`` that follow it.

Mirror counts, recursion, one mirror per use and reordering without recomputation are all schedules.
``expand`` makes one from mirror counts: Algorithm 2 of Chen et al. 2016 (Sec. 4.1). Everything here is
linear in steps and edges.
"""

from __future__ import annotations

import itertools
import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxremat import given
from fxremat.canonical import Phase
from fxremat.errors import InvalidOptionError, ScheduleError, shown
from fxremat.graph import JointGraph, check_graph


class Schedule(tuple[str, ...]):
    """An execution order; a plain tuple of names with a few questions answered."""

    __slots__ = ()

    @property
    def mirror_counts(self) -> dict[str, int]:
        """How often each name runs again, in order; names that run once are left out.

        >>> Schedule(("a", "b", "a", "a")).mirror_counts
        {'a': 2}
        """
        return {name: count - 1 for name, count in Counter(self).items() if count > 1}


@dataclass(frozen=True, slots=True)
class Binding:
    """A schedule resolved against its graph: what each step runs and what it reads.

    Attributes:
        nodes: For each step, the index of the node.
        reads: For each step, for each of the node's operands, the step that computed it; None for an input.
        boundary: The first step of the backward.
        outputs: The steps whose values are the graph's outputs, each once.
        is_mirror: For each step, whether the node ran before.
    """

    nodes: tuple[int, ...]
    reads: tuple[tuple[int | None, ...], ...]
    boundary: int
    outputs: tuple[int, ...]
    is_mirror: tuple[bool, ...]

    def schedule(self, graph: JointGraph) -> Schedule:
        """The names again."""
        return Schedule(graph.nodes[node].name for node in self.nodes)


def identity(graph: JointGraph) -> Schedule:
    """The schedule that the graph itself is: every node once, in the graph's order."""
    return Schedule(graph.names)


def bind(graph: JointGraph, schedule: Sequence[str]) -> Binding:
    """Resolve each use to the step that it reads.

    Raises:
        ScheduleError: A name is unknown, or a node runs before what it reads.
    """
    check_graph(graph)
    if isinstance(schedule, str) or not isinstance(schedule, Iterable):
        expected = "names of nodes in the order in which they run"
        raise InvalidOptionError("schedule", f"got {shown(schedule)}, expected {expected}.")
    nodes = []
    for step, name in enumerate(schedule):
        position = graph.index.get(name) if isinstance(name, str) else None
        if position is None or position < graph.num_inputs:
            raise ScheduleError(name, step, "the graph has no such node to run")
        nodes.append(position)
    return _bind_nodes(graph, nodes)


def _bind_nodes(graph: JointGraph, nodes: Sequence[int]) -> Binding:
    operands = [node.operands for node in graph.nodes]
    latest: list[int | None] = [None] * len(operands)
    latest_of = latest.__getitem__
    reads: list[tuple[int | None, ...]] = []
    mirrors: list[bool] = []
    for step, position in enumerate(nodes):
        read = tuple(map(latest_of, operands[position]))
        if None in read:
            _check_inputs(graph, step, position, read)
        reads.append(read)
        mirrors.append(latest[position] is not None)
        latest[position] = step
    boundary = _boundary(graph, nodes, mirrors)
    outputs = _outputs(graph, nodes, boundary, latest)
    return Binding(tuple(nodes), tuple(reads), boundary, outputs, tuple(mirrors))


def _check_inputs(graph: JointGraph, step: int, position: int, read: Sequence[int | None]) -> None:
    node = graph.nodes[position]
    for operand, source in zip(node.operands, read, strict=True):
        if source is None and operand >= graph.num_inputs:
            missing = graph.nodes[operand].name
            raise ScheduleError(node.name, step, f"it reads {missing!r}, which has not run yet")


def _boundary(graph: JointGraph, nodes: Sequence[int], mirrors: Sequence[bool]) -> int:
    boundary = len(nodes)
    while boundary and (mirrors[boundary - 1] or graph.nodes[nodes[boundary - 1]].phase is not Phase.FORWARD):
        boundary -= 1
    while boundary < len(nodes) and graph.nodes[nodes[boundary]].leader is not None:
        boundary += 1
    return boundary


def _outputs(
    graph: JointGraph, nodes: Sequence[int], boundary: int, latest: Sequence[int | None]
) -> tuple[int, ...]:
    missing = {node for node in graph.forward_outputs if node is not None and node >= graph.num_inputs}
    in_forward: dict[int, int] = {}
    for step in range(boundary - 1, -1, -1) if missing else ():
        if nodes[step] in missing:
            in_forward[nodes[step]] = step
            missing.remove(nodes[step])
            if not missing:
                break
    steps = [in_forward.get(node) for node in graph.forward_outputs if node is not None]
    steps += [latest[node] for node in graph.backward_outputs if node is not None]
    return tuple(dict.fromkeys(step for step in steps if step is not None))


def validate(graph: JointGraph, schedule: Sequence[str]) -> Binding:
    """Resolve a schedule and make sure that it is an execution of the graph that computes the same.

    Raises:
        ScheduleError: It reads a value before it is there, leaves out a node, runs a node again that may
            not, changes the order of effects, tears a ``getitem`` from its operator, or runs the backward
            before the forward has ended.
    """
    binding = bind(graph, schedule)
    present = set(binding.nodes)
    for position in range(graph.num_inputs, len(graph.nodes)):
        if position not in present:
            raise ScheduleError(graph.nodes[position].name, None, "it never runs")
    steps = zip(binding.nodes, binding.is_mirror, strict=True)
    ordered = [node for node, is_mirror in steps if graph.nodes[node].ordered and not is_mirror]
    for before, after in pairwise(ordered):
        if before > after:
            name = graph.nodes[after].name
            raise ScheduleError(
                name, None, f"it must run before {graph.nodes[before].name!r}, having an effect"
            )
    for step, position in enumerate(binding.nodes):
        _validate_step(graph, binding, step, position)
    return binding


def _validate_step(graph: JointGraph, binding: Binding, step: int, position: int) -> None:
    node = graph.nodes[position]
    if binding.is_mirror[step] and node.keep is not None:
        raise ScheduleError(node.name, step, f"it may not run again: {node.keep}")
    if node.phase is Phase.BACKWARD and step < binding.boundary:
        raise ScheduleError(node.name, step, "the forward has not ended")
    if node.leader is None:
        return
    operator = _operator(graph, position)
    if step == 0 or _operator(graph, binding.nodes[step - 1]) != operator:
        raise ScheduleError(node.name, step, f"it must follow {graph.nodes[operator].name!r}")


def _operator(graph: JointGraph, position: int) -> int:
    """The operator whose output a ``getitem`` picks, through nested ones; other nodes are their own."""
    while (leader := graph.nodes[position].leader) is not None:
        position = leader
    return position


def prune(graph: JointGraph, schedule: Sequence[str]) -> Schedule:
    """Leave out every occurrence whose value nobody reads: no output, no effect, no reader."""
    return bind_needed(graph, schedule).schedule(graph)


def bind_needed(graph: JointGraph, schedule: Sequence[str]) -> Binding:
    """What ``prune`` leaves, resolved already."""
    return _prune(graph, bind(graph, schedule))


def _prune(graph: JointGraph, binding: Binding) -> Binding:
    live = [False] * len(binding.nodes)
    for step in binding.outputs:
        live[step] = True
    for step in reversed(range(len(binding.nodes))):
        is_ordered = graph.nodes[binding.nodes[step]].ordered and not binding.is_mirror[step]
        if not live[step] and not is_ordered:
            continue
        live[step] = True
        for read in binding.reads[step]:
            if read is not None:
                live[read] = True
    if all(live):
        return binding
    return _bind_nodes(graph, list(itertools.compress(binding.nodes, live)))


def expand(graph: JointGraph, mirror_counts: Mapping[str, int], early: Iterable[str] = ()) -> Schedule:
    """Algorithm 2: the schedule that drops a value with count m > 0 and computes it up to m more times.

    Copy k of a node reads copy min(k, m) of each operand, the backward reads the last copies, and a copy
    runs just before the first node of the backward that needs it (the lazy placement of the paper's last
    clause). Counts of backward nodes, of nodes that may not run again and of inputs are taken as 0; a
    ``getitem`` follows its operator; what the user ordered (``annotate.region``) overrules the counts. With
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
    check_graph(graph)
    counts = _effective_counts(graph, mirror_counts)
    moved = _with_deferred_operands(graph, early)
    if not any(counts) and not moved:
        return _bind_nodes(graph, range(graph.num_inputs, len(graph.nodes)))
    placement = _Placement(graph, counts, moved)
    for node in range(graph.boundary, len(graph.nodes)):
        if graph.nodes[node].phase is Phase.BACKWARD or graph.nodes[node].ordered:
            placement.place(node)
    for output in graph.outputs:
        placement.place(output)
    return _prune(graph, _bind_nodes(graph, placement.order))


def _effective_counts(graph: JointGraph, mirror_counts: Mapping[str, int]) -> list[int]:
    counts = [0] * len(graph.nodes)
    for name, count in given.mapping("mirror_counts", mirror_counts).items():
        if name not in graph.index:
            raise ScheduleError(name, None, "the graph has no such node to mirror")
        if not isinstance(count, numbers.Integral) or count < 0:
            problem = f"a mirror count must be a whole number, 0 or more, got {shown(count)}"
            raise ScheduleError(name, None, problem)
        counts[graph.index[name]] = int(count)
    for position, node in enumerate(graph.nodes):
        at_most = counts[position] if node.at_most is None else node.at_most
        counts[position] = max(min(counts[position], at_most), node.at_least)
        if node.leader is not None:
            counts[position] = counts[node.leader]
        if node.keep is not None or not graph.num_inputs <= position < graph.boundary:
            counts[position] = 0
    return counts


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
        operator = _operator(graph, node)
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
        missing: set[int] = set()
        stack = [_operator(self.graph, node) * self.levels + self.counts[node]]
        while stack:
            copy = stack.pop()
            if copy not in self.placed and copy not in missing:
                missing.add(copy)
                self._push_operands(copy, stack)
        for copy in sorted(missing):
            self._append(copy)

    def _append(self, copy: int) -> None:
        nodes = self.graph.nodes
        position, level = divmod(copy, self.levels)
        while True:
            if level == 0 or nodes[position].keep is None:
                self.order.append(position)
                self.placed.add(position * self.levels + level)
            position += 1
            if position == len(nodes) or nodes[position].leader is None:
                return

    def _push_operands(self, copy: int, stack: list[int]) -> None:
        """Put the copies that a copy reads on the stack, each by the operator that it is placed with."""
        nodes, counts = self.graph.nodes, self.counts
        position, level = divmod(copy, self.levels)
        is_last = position >= self.graph.boundary
        for operand in nodes[position].operands:
            if operand < self.graph.num_inputs:
                continue
            count = counts[operand]
            if not is_last and level < count:
                count = level
            if nodes[operand].leader is not None:
                operand = _operator(self.graph, operand)
            stack.append(operand * self.levels + count)
