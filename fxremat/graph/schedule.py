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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxremat.errors import InvalidOptionError, ScheduleError, shown
from fxremat.graph.joint import JointGraph, check_graph
from fxremat.graph.nodes import Phase, boundary_of

NEVER = -1  # in the place of the latest step of a node that has not run


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
    return bind_nodes(graph, nodes)


def bind_nodes(graph: JointGraph, nodes: Sequence[int]) -> Binding:
    """Resolve a schedule of nodes by index."""
    operands = [node.operands for node in graph.nodes]
    latest: list[int | None] = [None] * graph.num_inputs
    latest += [NEVER] * (len(operands) - graph.num_inputs)
    latest_of = latest.__getitem__
    reads: list[tuple[int | None, ...]] = []
    mirrors: list[bool] = []
    for step, position in enumerate(nodes):
        read = tuple(map(latest_of, operands[position]))
        if NEVER in read:
            missing = graph.nodes[operands[position][read.index(NEVER)]].name
            problem = f"it reads {missing!r}, which has not run yet"
            raise ScheduleError(graph.nodes[position].name, step, problem)
        reads.append(read)
        mirrors.append(latest[position] != NEVER)
        latest[position] = step
    boundary = boundary_of([graph.nodes[position] for position in nodes], mirrors)
    outputs = _outputs(graph, nodes, boundary, latest)
    return Binding(tuple(nodes), tuple(reads), boundary, outputs, tuple(mirrors))


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
    return tuple(dict.fromkeys(step for step in steps if step is not None and step != NEVER))


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
    operator = operator_of(graph, position)  # which has run: this is not the first step
    if operator_of(graph, binding.nodes[step - 1]) != operator:
        raise ScheduleError(node.name, step, f"it must follow {graph.nodes[operator].name!r}")


def operator_of(graph: JointGraph, position: int) -> int:
    """The operator whose output a ``getitem`` picks, through nested ones; other nodes are their own."""
    while (leader := graph.nodes[position].leader) is not None:
        position = leader
    return position


def operator_steps(graph: JointGraph, nodes: Sequence[int]) -> list[int]:
    """The steps of a schedule of nodes at which an operator runs; those between pick its results."""
    return [step for step, node in enumerate(nodes) if graph.nodes[node].leader is None]


def prune(graph: JointGraph, schedule: Sequence[str]) -> Schedule:
    """Leave out every occurrence whose value nobody reads: no output, no effect, no reader."""
    return bind_needed(graph, schedule).schedule(graph)


def bind_needed(graph: JointGraph, schedule: Sequence[str]) -> Binding:
    """What ``prune`` leaves, resolved already."""
    return pruned(graph, bind(graph, schedule))


def pruned(graph: JointGraph, binding: Binding) -> Binding:
    """A resolved schedule without the steps that nobody reads."""
    live = [False] * len(binding.nodes)
    ordered = {index for index, node in enumerate(graph.nodes) if node.ordered}
    for step in binding.outputs:
        live[step] = True
    for step in reversed(range(len(binding.nodes))):
        if not live[step] and (binding.nodes[step] not in ordered or binding.is_mirror[step]):
            continue
        live[step] = True
        for read in binding.reads[step]:
            if read is not None:
                live[read] = True
    if all(live):
        return binding
    return bind_nodes(graph, list(itertools.compress(binding.nodes, live)))
