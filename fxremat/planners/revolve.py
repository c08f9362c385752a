"""Revolve on graphs: the segments between narrow cuts, run as Griewank and Walther's chain (Algorithm 799).

The forward is cut at its narrow places. Of the cuts at most s - 1 are held at a time; from them segments
are run again in the order that ``chain.revolve`` gives, which needs the fewest forwards on a chain of equal
segments. Values that cross several cuts, and those that may not be computed again, are simply held.

O(n) per forward of the chain. Left out: segments of unequal bytes and seconds.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, prune
from fxremat.predict.problem import Problem, Solution
from fxremat.search import chain
from fxremat.search.cuts import forward_lives, narrow_places

MAX_STEPS = 500_000  # of all plans together, shortest first; bounds the planner's time
CHECKPOINTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The plans of several numbers of checkpoints, least peak first."""
    solutions = [problem.evaluate(each, "revolve") for each in schedules(problem, MAX_STEPS)]
    solutions.append(problem.identity("revolve"))
    return tuple(sorted(solutions, key=lambda solution: (solution.peak_bytes, solution.seconds)))


def schedules(problem: Problem, max_steps: int) -> Sequence[Schedule]:
    """The schedules of several numbers of checkpoints, the shortest first; of all together so many steps."""
    found: dict[Schedule, None] = {}
    for places in narrow_places(forward_lives(problem.graph)):
        for checkpoints in CHECKPOINTS:
            if checkpoints <= len(places) + 1:
                found[schedule(problem.graph, places, checkpoints)] = None
    obedient = sorted(filter(problem.allows, found), key=len)
    steps = itertools.accumulate(map(len, obedient))
    return [each for each, taken in zip(obedient, steps, strict=True) if taken <= max_steps]


def schedule(graph: JointGraph, places: Sequence[int], checkpoints: int) -> Schedule:
    """Revolve's schedule of a graph.

    Args:
        graph: The graph.
        places: The positions behind which the forward is cut, ascending.
        checkpoints: How many of the cuts are held at most, the graph's inputs among them; at least 1.
    """
    firsts = [graph.num_inputs, *(place + 1 for place in places)]
    ends = [*firsts[1:], graph.boundary]
    gradients = _gradients(graph, firsts)
    order: list[int] = []
    has_run = 0
    for step in chain.revolve(len(firsts), checkpoints):
        if step.is_gradient:
            order += gradients[step.layer]
            continue
        is_again = step.layer < has_run
        part = range(firsts[step.layer], ends[step.layer])
        order += [node for node in part if not (is_again and graph.is_kept(node))]
        has_run = max(has_run, step.layer + 1)
    return prune(graph, [graph.nodes[node].name for node in order])


def _gradients(graph: JointGraph, firsts: Sequence[int]) -> list[list[int]]:
    """For each segment the nodes of the backward that run with it, in order.

    A node belongs to the last segment whose values it reads, but not to one behind its operands' in the
    backward, nor, if it has an effect, to one behind the effects before it.
    """
    found: list[list[int]] = [[] for _ in firsts]
    of_node = dict.fromkeys(range(graph.num_inputs), -1)
    for node in range(graph.num_inputs, graph.boundary):
        of_node[node] = bisect.bisect_right(firsts, node) - 1
    latest = latest_ordered = len(firsts) - 1
    for node in range(graph.boundary, len(graph.nodes)):
        operands = graph.nodes[node].operands
        forward = [of_node[operand] for operand in operands if operand < graph.boundary]
        backward = [of_node[operand] for operand in operands if operand >= graph.boundary]
        segment = min([max(forward, default=-1), *backward]) if forward and max(forward) >= 0 else -1
        if segment < 0:
            segment = min(backward, default=latest)
        if graph.nodes[node].ordered:
            segment = latest_ordered = min(segment, latest_ordered)
        of_node[node] = segment
        latest = segment
        found[segment].append(node)
    return found
