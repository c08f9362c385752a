"""Refine: drop the recomputations that the whole memory model finds room or no use for.

The search works on the condensed graph, whose bytes are estimates where a compiler fuses kernels. Here plans
are weighed by the model itself. What a plan computes again is left out, together as much as there seems to
be room for, the dearest by seconds per byte first; if the plan without is too high, or no faster, half of
that is tried. So from the lowest plan to the highest: each starts from what the one below has come to, or
from itself, and between plans that lie far apart there are peaks of no plan's. Where a budget is asked for,
that ends with the first plan above it. What was found until then is what a higher budget finds as well, and
all that it finds besides lies above: so more memory never costs time. Then the gap between two plans that
the budget lies in is filled with more. Linear in steps for each plan that is weighed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fxremat.graph.joint import JointGraph
from fxremat.memory.liveness import profile_of
from fxremat.predict.cost import seconds_by_step
from fxremat.predict.problem import Problem, Solution, pareto, progress

AHEAD = 4  # plans above a budget that are refined as well, of which lower ones may come
MAX_ROUNDS = 3  # of drops from one plan at one peak
APART, MAX_BETWEEN = 1.03, 3  # how much higher the next peak may be without others between; how many
CLOSE, MAX_CLOSE = 1.01, 12  # the same around a budget


def refine(
    problem: Problem, solutions: Sequence[Solution], evaluations: int, highest: int | None = None
) -> list[Solution]:
    """Plans that take less time than those that are known, at their peaks and between them.

    Args:
        problem: The problem.
        solutions: What is known.
        evaluations: How many plans may be weighed.
        highest: The highest budget that is asked for, in bytes; None: all may be.
    """
    search = _Search(problem, evaluations)
    front = pareto(solutions)[::-1]
    floors = [0] * AHEAD + [each.peak_bytes for each in front]
    best: Solution | None = None
    places = itertools.zip_longest(front, front[1:])
    for (known, above), floor in progress(list(zip(places, floors, strict=False)), "refining plans"):
        if highest is not None and floor > highest:
            break
        starts = [known] if best is None else [best, known]
        best = search.fastest(starts, floor, known.peak_bytes)
        if above is not None:
            for limit in _between(known.peak_bytes, above.peak_bytes, APART, MAX_BETWEEN):
                best = search.fastest([best], floor, limit)
    return search.found


def refine_around(problem: Problem, solutions: Sequence[Solution], budget: int, most: int) -> list[Solution]:
    """Plans between the two neighbours of a budget, which are the same for all budgets between these.

    Args:
        problem: The problem.
        solutions: What is known.
        budget: Bytes.
        most: How many plans may be weighed.
    """
    search = _Search(problem, most)
    front = pareto(solutions)[::-1]
    place = sum(each.peak_bytes <= budget for each in front)
    if not 0 < place < len(front):
        return []
    best = known = front[place - 1]
    for limit in _between(known.peak_bytes, front[place].peak_bytes, CLOSE, MAX_CLOSE):
        best = search.fastest([best, known], known.peak_bytes, limit)
    return search.found


def _between(low: int, high: int, apart: float, most: int) -> Iterator[int]:
    """Peaks between two, in equal ratios that are no smaller than one."""
    count = 1 + min(most, int(math.log(high / low) / math.log(apart))) if 0 < low < high else 1
    for place in range(1, count):
        yield int(low * (high / low) ** (place / count))


class Drop(NamedTuple):
    """A run of an operator that may be left out, for there is one before.

    Attributes:
        operator: The node that is run again.
        run: Its place among the plan's runs.
        before: That of the run before, which picks the results instead.
        seconds: What it takes.
        holds: The steps through which each result would be held instead, as (first, end, bytes).
    """

    operator: int
    run: int
    before: int
    seconds: float
    holds: tuple[tuple[int, int, int], ...]

    @property
    def worth(self) -> tuple[float, int]:
        """By which drops are sorted: the most seconds per byte first."""
        return -self.seconds / max(1, sum(size for _, _, size in self.holds)), self.run


class _Search:
    """Plans that are weighed, as many as may be.

    Attributes:
        found: Those that were faster than what they were made from.
    """

    def __init__(self, problem: Problem, evaluations: int) -> None:
        self.problem = problem
        self.left = evaluations
        self.found: list[Solution] = []
        self._idle: set[int] = set()  # operators without whose recomputation a plan was no faster
        self._weighed: dict[tuple[int, ...], Solution] = {}
        self._drops: dict[Solution, _Drops] = {}

    def fastest(self, starts: Sequence[Solution], least: int, limit: int) -> Solution:
        """The fastest plan that any of these leads to, with a peak between two."""
        return min((self._improved(each, least, limit) for each in starts), key=lambda each: each.seconds)

    def _improved(self, solution: Solution, least: int, limit: int) -> Solution:
        for _ in range(MAX_ROUNDS):
            better = self._without_some(solution, least, limit) if self.left else None
            if better is None:
                break
            solution = better
            self.found.append(better)
        return solution

    def _without_some(self, solution: Solution, least: int, limit: int) -> Solution | None:
        """The plan without what seems to fit, or half of that, or half of that again; None for no gain."""
        if solution not in self._drops:
            self._drops[solution] = _Drops(self.problem, solution)
        drops = self._drops[solution]
        chosen = drops.fitting(limit, self._idle)
        while chosen and self.left:
            found = self._weigh(drops.without(chosen))
            is_faster = found.seconds < solution.seconds
            is_within = least <= found.peak_bytes <= limit
            if is_faster and is_within and self.problem.allows(found.schedule):
                return found
            if not is_faster and len(chosen) == 1:
                self._idle.add(chosen[0].operator)
            chosen = chosen[: len(chosen) // 2]
        return None

    def _weigh(self, nodes: tuple[int, ...]) -> Solution:
        if nodes not in self._weighed:
            self.left -= 1
            self._weighed[nodes] = self.problem.evaluate_nodes(nodes, "auto")
        return self._weighed[nodes]


class _Drops:
    """What a plan could leave out, and what is live meanwhile."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        graph, (binding, lowering) = problem.graph, problem.lowered(solution)
        profile = profile_of(graph, binding, lowering)
        deaths = {(storage, birth): death for _, storage, _, birth, death in profile.lives}
        spent = seconds_by_step(graph, binding, lowering, problem.costs)
        nodes, runs_at = binding.nodes, lowering.runs_at
        steps = [*_runs(graph, nodes), len(nodes)]
        self.live = profile.live_bytes
        self.runs = [nodes[first:end] for first, end in itertools.pairwise(steps)]

        def holds(before: int, run: int) -> Iterator[tuple[int, int, int]]:
            birth, end = runs_at[steps[before]], runs_at[steps[run]]
            for storage in (storage for node in self.runs[run] for storage in graph.nodes[node].recreates):
                first = deaths.get((storage, birth), birth - 1) + 1
                if first < end:
                    yield first, end, graph.storage_bytes[storage]

        latest: dict[int, int] = {}
        drops = []
        for run, (operator, *_) in enumerate(self.runs):
            before = latest.get(operator)
            seconds = math.fsum(spent[steps[run] : steps[run + 1]])
            if before is not None and seconds > 0:
                drops.append(Drop(operator, run, before, seconds, tuple(holds(before, run))))
            latest[operator] = run
        self.drops = sorted(drops, key=lambda each: each.worth)

    def fitting(self, limit: int, idle: Collection[int]) -> list[Drop]:
        """What could be left out together within a peak, as far as can be told without lowering."""
        live, chosen = self.live.copy(), []
        for drop in self.drops:
            if drop.operator in idle:
                continue
            for first, end, size in drop.holds:
                live[first:end] += size
            if all(live[first:end].max() <= limit for first, end, _ in drop.holds):
                chosen.append(drop)
                continue
            for first, end, size in drop.holds:
                live[first:end] -= size
        return chosen

    def without(self, drops: Sequence[Drop]) -> tuple[int, ...]:
        """The plan's nodes in their order, without these runs."""
        runs = list(self.runs)
        for drop in sorted(drops, key=lambda each: -each.run):
            runs[drop.before] = tuple(dict.fromkeys((*runs[drop.before], *runs[drop.run])))
            runs[drop.run] = ()
        return tuple(itertools.chain(*runs))


def _runs(graph: JointGraph, nodes: Sequence[int]) -> Iterator[int]:
    """The steps at which an operator runs; those between pick its results."""
    return (step for step, node in enumerate(nodes) if graph.nodes[node].leader is None)
