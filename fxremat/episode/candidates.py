"""Candidates: the plans of a graph among which a step chooses.

To a graph alone a plan is a peak and seconds. To the step around it it is also what it holds while other
graphs run, and its forward and its backward have peaks of their own, at different times (``trace.py``). The
plans that no other beats in all of these are found in four ways:

1. the graph's own planner is asked for the problem as it is, whose plans have low peaks;
2. and for held problems (``hold.py``), whose plans hold less, the less the larger the hold;
3. what is found is improved by the whole memory model for holds of other sizes;
4. and one plan holds nothing but what the backward cannot have again from the inputs.

They are a coarse frontier: what a step needs of it in detail is looked for when it has settled
(``tailor.py``).
Every plan is measured on the problem as it is. Quadratic in the plans found, which are some hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fxremat._torch import graphs
from fxremat.episode.hold import held, with_hold, without_hold
from fxremat.episode.trace import TANGENTS, Candidate, Level, Place
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding, Schedule
from fxremat.memory.liveness import profile_of
from fxremat.memory.lowering import Lowering
from fxremat.predict.problem import Problem, Solution, pareto

Solve: TypeAlias = Callable[[Problem], Sequence[Solution]]
Improve: TypeAlias = Callable[[Problem, Sequence[Solution], int | None], Sequence[Solution]]

MAX_CANDIDATES = 48
SEARCHED, IMPROVED = (0.4, 0.6), (0.25, 1.0)  # of the highest peak that the planner found: bytes of the holds
NARROWER, MAX_NARROWED = 0.97, 2  # holds that ask for less than the least plan; how many
MANY = 12  # calls of a graph for which that is the least
HELD_SECONDS = 0.15  # that a planner may search for each held problem, unless the problem says otherwise


def candidates(problem: Problem, solve: Solve, improve: Improve | None = None) -> tuple[Candidate, ...]:
    """The plans that no other beats in seconds, held bytes, either peak, and the inputs and outputs held.

    Args:
        problem: The problem of the graph; whatever budgets it is asked for, all are meant.
        solve: The planner.
        improve: Finds plans of a problem from others that are known, for a budget or for all; without it the
            planner is asked for each held problem.

    Returns:
        By rising seconds; at least one, and at most ``MAX_CANDIDATES``.
    """
    problem = replace(problem, budgets=None)
    solutions = solve(problem)
    limit = problem.time_limit_seconds
    quick = replace(problem, time_limit_seconds=HELD_SECONDS if limit is None else min(limit, HELD_SECONDS))

    def plans(schedules: Iterable[Schedule]) -> list[Candidate]:
        return fresh(problem, schedules, found)

    def searched(scratch_bytes: float) -> list[Candidate]:
        return plans(without_hold(each.schedule) for each in solve(held(quick, round(scratch_bytes))))

    def improved(scratch_bytes: float) -> list[Candidate]:
        if improve is None:
            return searched(scratch_bytes)
        narrowed = held(problem, round(scratch_bytes))
        schedules = (with_hold(each.schedule, problem.graph) for each in found)
        known = pareto(narrowed.evaluate(each, "auto") for each in schedules)
        return plans(without_hold(each.schedule) for each in improve(narrowed, known, None))

    found: list[Candidate] = []
    found += plans((*(each.schedule for each in solutions), _least_held(problem)))
    highest = max(each.peak_bytes for each in solutions)
    for part in SEARCHED:
        found += searched(part * highest)
    for part in IMPROVED:
        found += improved(part * highest)
    for _ in range(MAX_NARROWED):
        before = _least_together(found)
        found += improved(NARROWER * (before.backward_bytes + problem.graph.tangent_bytes))
        if _least_together(found) is before:
            break
    return tuple(_thinned(_unbeaten(found)))


def fresh(problem: Problem, schedules: Iterable[Schedule], known: Iterable[Candidate]) -> list[Candidate]:
    """What the step around a graph sees of schedules that obey, and that are none of the known plans'."""
    have = {each.schedule for each in known}
    made = (each for each in dict.fromkeys(schedules) if each not in have and problem.allows(each))
    return [candidate(problem, problem.evaluate(each, "auto")) for each in made]


def _least_together(plans: Iterable[Candidate]) -> Candidate:
    """The plan that takes the least in a step with many calls of its graph."""
    return min(plans, key=lambda each: (MANY * each.held_bytes + each.backward_bytes, each.seconds))


def _least_held(problem: Problem) -> Schedule:
    """The schedule that computes all again, in the backward, that may be."""
    graph = problem.graph
    everything = {node.name: 1 for node in graph.nodes[graph.num_inputs : graph.boundary]}
    return problem.mirror(everything, "auto").schedule


def candidate(problem: Problem, solution: Solution) -> Candidate:
    """What the step around a graph sees of a plan.

    Args:
        problem: The problem of the graph.
        solution: A solution of it.
    """
    graph = problem.graph
    binding, lowering = problem.lowered(solution)
    profile = profile_of(graph, binding, lowering)
    boundary, outputs = profile.boundary, _returned(graph)
    copies = sum(size for first, last, size in lowering.extra_bytes if first < boundary <= last)
    returned = [life for life in profile.saved if life.storage in outputs]
    returned_bytes = sum(life.bytes for life in returned)
    own = profile.live_bytes[boundary:] - graph.tangent_bytes
    for life in returned:
        own[: life.death + 1 - boundary] -= life.bytes
    holds = _held_places(graph, binding)
    needs = dict.fromkeys(holds, len(binding.nodes)) | _needs(graph, binding, lowering)
    return Candidate(
        solution.schedule,
        solution.seconds,
        profile.saved_bytes - returned_bytes + copies,
        int(profile.live_bytes[:boundary].max(initial=0)),
        int(own.max(initial=0)),
        holds,
        tuple(_levels(own, {place: last - boundary for place, last in needs.items()})),
    )


def _levels(own: npt.NDArray[np.int64], needs: Mapping[Place, int]) -> Iterator[Level]:
    """The levels of a backward, from what is live in it and the last step that needs each place."""
    start, highest = 0, -1
    for last in sorted({*needs.values(), len(own) - 1}):
        level = int(own[start : last + 1].max(initial=0))
        if level > highest:  # else a part before it, which needs as much and more, is no lower
            yield level, frozenset(place for place, until in needs.items() if until >= start)
            highest = level
        start = last + 1


def _needs(graph: JointGraph, binding: Binding, lowering: Lowering) -> dict[Place, int]:
    """The last step at which the backward needs each input, and any tangent."""
    inputs = dict(_at_caller(graph).inputs)
    if graph.module is not None:
        tangents = (index for index, node in enumerate(graph.fx_nodes) if graphs.is_tangent(node))
        inputs |= dict.fromkeys(tangents, TANGENTS)
    found: dict[Place, int] = {}
    for step in range(binding.boundary, len(binding.nodes)):
        for operand in graph.nodes[binding.nodes[step]].operands:
            place = inputs.get(_root(graph, operand))
            if place is not None:
                found[place] = max(lowering.read_until[step], found.get(place, 0))
    roots = (_root(graph, each) for each in graph.backward_outputs if each is not None)
    return found | {inputs[root]: len(binding.nodes) for root in roots if root in inputs}


def _returned(graph: JointGraph) -> Set[int]:
    """The storages of what the caller gets of the forward; new values of inputs are copied, and let go of."""
    if graph.module is not None:
        return _at_caller(graph).storages.keys()
    outputs = (graph.nodes[output] for output in graph.forward_outputs if output is not None)
    return frozenset(storage for node in outputs for storage in node.views)


def _held_places(graph: JointGraph, binding: Binding) -> frozenset[Place]:
    """The inputs and outputs whose memory the backward reads, directly or through views."""
    at_caller = _at_caller(graph)
    found: dict[Place, None] = {}
    for operand, read in _late_reads(graph, binding):
        if read is not None and read >= binding.boundary:
            continue
        for storage in graph.nodes[operand].views:
            if storage in at_caller.storages:
                found[at_caller.storages[storage]] = None
        root = operand if read is None else _root(graph, operand)
        if root in at_caller.inputs:
            found[at_caller.inputs[root]] = None
    return frozenset(found)


def _late_reads(graph: JointGraph, binding: Binding) -> Iterator[tuple[int, int | None]]:
    """The nodes that the backward reads or returns, and the steps that computed them; None for inputs."""
    for step in range(binding.boundary, len(binding.nodes)):
        yield from zip(graph.nodes[binding.nodes[step]].operands, binding.reads[step], strict=True)
    latest = {node: step for step, node in enumerate(binding.nodes)}
    for output in graph.backward_outputs:
        if output is not None:
            yield output, latest.get(output)


def _root(graph: JointGraph, index: int) -> int:
    """The node whose memory a node shows: itself, but for views."""
    while (shares := graph.nodes[index].shares) is not None:
        index = shares
    return index


class _AtCaller(NamedTuple):
    """The tensors of a graph that are the caller's as well.

    Attributes:
        inputs: The place of each input among the caller's.
        storages: For each storage that the forward returns, the place of the first output that shows it.
    """

    inputs: Mapping[int, Place]
    storages: Mapping[int, Place]


def _at_caller(graph: JointGraph) -> _AtCaller:
    """Whose memory the caller knows; nothing of a graph made of mappings."""
    inputs: dict[int, Place] = {}
    storages: dict[int, Place] = {}
    if graph.module is None:
        return _AtCaller(inputs, storages)
    for index, node in enumerate(graph.fx_nodes[: graph.num_inputs]):
        place = _place(node.meta.get("desc"))
        if place is not None and isinstance(node.meta.get("val"), Tensor):
            inputs[index] = place
    (output,) = graph.module.graph.find_nodes(op="output")
    described = graphs.leaves(output.meta.get("desc"))
    for shown, description in zip(graph.forward_outputs, described, strict=False):
        place = _place(description)
        if shown is not None and place is not None:
            storages = dict.fromkeys(graph.nodes[shown].views, place) | storages
    return _AtCaller(inputs, storages)


def _place(description: object) -> Place | None:
    """The place of an input or an output among the caller's; None for the graph's own attributes."""
    place = graphs.place_at_caller(description)
    return None if place is None or place[0] == "attributes" else place


def _figures(plan: Candidate) -> tuple[float, int, int, int]:
    """What plans are compared by, besides the inputs and outputs that they hold."""
    return plan.seconds, plan.held_bytes, plan.forward_bytes, plan.backward_bytes


def _unbeaten(plans: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats, in order; of equals the first counts."""
    found: list[Candidate] = []
    for plan in sorted(plans, key=lambda each: (*_figures(each), len(each.holds))):
        if not any(_beats(other, plan) for other in found):
            found.append(plan)
    return found


def _beats(plan: Candidate, other: Candidate) -> bool:
    """Whether a plan takes no more than another of anything."""
    pairs = zip(_figures(plan), _figures(other), strict=True)
    return plan.holds <= other.holds and all(own <= its for own, its in pairs)


def _thinned(plans: Sequence[Candidate]) -> Sequence[Candidate]:
    """At most ``MAX_CANDIDATES`` of them: the best in each respect, and as many between, evenly."""
    if len(plans) <= MAX_CANDIDATES:
        return plans
    places = range(len(plans))
    best = {min(places, key=lambda place: each(plans[place])) for each in (_held, _peak, _held_and_peak)}
    last, count = len(plans) - 1, MAX_CANDIDATES - len(best)
    return [plans[place] for place in sorted(best | {last * step // (count - 1) for step in range(count)})]


def _held(plan: Candidate) -> int:
    return plan.held_bytes


def _peak(plan: Candidate) -> int:
    return max(plan.forward_bytes, plan.backward_bytes)


def _held_and_peak(plan: Candidate) -> int:
    return _held(plan) + _peak(plan)
