"""Refine: improve plans by the whole memory model.

The search works on the condensed graph, whose bytes are estimates where a compiler fuses kernels. Here plans
are weighed by the model itself. There are two ways from a plan to another:

1. *Drops.* What a plan computes again is left out, together as much as there seems to be room for, the
   dearest by seconds per byte first; if the plan without is too high, or no faster, half of that is tried.
2. *Squeezes* (``squeeze.py``). What lies in memory where a plan is too high is let go of and computed again.

``refine`` goes from the lowest plan to the highest by drops: each starts from what the one below has come to,
or from itself, and between plans that lie far apart there are peaks of no plan's. ``lower`` squeezes the
lowest plans, at their prices and then at prices with noise. ``refine_around`` goes for a budget: it halves
the range of peaks that the budget lies in until that is narrow, and looks each time for the fastest plan
within the lower half, by drops from a lower plan, by squeezes from higher ones, and by squeezes that make
room for drops; a budget in the lower half of all has lower plans looked for first. Linear in steps for each
plan that is weighed.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fxremat.graph.schedule import operator_steps
from fxremat.memory.liveness import profile_of
from fxremat.predict.cost import seconds_by_step
from fxremat.predict.problem import PEAK_AND_SECONDS, Problem, Solution, pareto, progress
from fxremat.search.squeeze import Squeeze

BEHIND = 4  # plans by which those that come of a plan may be lower than it
MAX_ROUNDS = 3  # of drops from one plan at one peak
MAX_SQUEEZES = 4  # of one plan for one peak
MAX_MISSES, MISSES_NODES = 40, 200  # squeezes with noise that bring nothing new, of graphs of so many nodes
NEAREST = 3  # plans on either side of a peak from which one for it is looked for
LOWEST = 6  # plans from which a lower one is looked for
APART, MAX_BETWEEN = 1.03, 3  # how much higher the next peak may be without others between; how many
WIDE, NARROW = 1.5, 1.006  # how much higher the end of a range is: where it is looked into, and no more
ROOM = (0.97, 0.94, 0.9)  # parts of a peak to which a plan is squeezed, so that there is room for drops
FIRST_PART, LAST_PART = 0.05, 0.001  # by which the lowest plan shall be lower, at first and at last


def refine(problem: Problem, solutions: Sequence[Solution], evaluations: int) -> list[Solution]:
    """Plans that take less time than those that are known, at their peaks and between them.

    Args:
        problem: The problem.
        solutions: What is known.
        evaluations: How many plans may be weighed.
    """
    search = _Search(problem, evaluations)
    front = pareto(solutions)[::-1]
    floors = [0] * BEHIND + [each.peak_bytes for each in front]
    best: Solution | None = None
    places = list(zip(itertools.zip_longest(front, front[1:]), floors, strict=False))
    for (known, above), floor in progress(places, "refining plans"):
        starts = [known] if best is None else [best, known]
        best = search.fastest(starts, floor, known.peak_bytes)
        if above is not None:
            for limit in _between(known.peak_bytes, above.peak_bytes):
                best = search.fastest([best], floor, limit)
    return search.found


def lower(problem: Problem, solutions: Sequence[Solution], evaluations: int) -> list[Solution]:
    """Faster plans at the lowest peaks that are known, and plans with lower ones.

    Args:
        problem: The problem.
        solutions: What is known.
        evaluations: How many plans may be weighed, to find lower ones, and to find faster ones.
    """
    squeezes, part = _Search(problem, evaluations), FIRST_PART
    starts = pareto(solutions)[::-1][:LOWEST]
    known = list(starts)
    while squeezes.left and part > LAST_PART:
        least = starts[0].peak_bytes
        plans = (squeezes.squeezed(each, int(least * (1 - part))) for each in starts)
        lowest = min((each for each in plans if each is not None), key=PEAK_AND_SECONDS, default=starts[0])
        if lowest.peak_bytes < least:
            known.append(lowest)
            starts = [lowest, *starts[:-1]]
        else:
            part /= 2
    known += squeezes.drawn(known)
    drops = _Search(problem, evaluations)
    return [drops.fastest([each], 0, each.peak_bytes) for each in sorted(known, key=PEAK_AND_SECONDS)]


def refine_around(
    problem: Problem, solutions: Sequence[Solution], budget: int, evaluations: int, squeezes: int = 0
) -> list[Solution]:
    """What is known, with plans for a budget.

    Lower plans are looked for where the budget lies in the lower half of all peaks, or below them. Which
    half a budget lies in is all that is asked of it: what is found until two budgets part is the same.

    From then on the higher one takes no plan that is as low as that at which they part, so a smaller budget
    never has a higher peak. Nor does the lower one take a plan that is as fast, unless the range was too wide
    to be looked into when they parted: then less memory may take a little less time.

    Args:
        problem: The problem.
        solutions: What is known.
        budget: Bytes.
        evaluations: How many plans may be weighed.
        squeezes: How many may be weighed besides for lower plans; see ``lower``.
    """
    search, known = _Search(problem, evaluations), pareto(solutions)[::-1]
    floor, ceiling, fastest = known[0].peak_bytes, known[-1].peak_bytes, 0.0
    if budget < floor:
        known, squeezes = _with_lower(problem, known, squeezes), 0
        floor = known[0].peak_bytes
    while floor <= budget < ceiling and ceiling > max(floor * NARROW, floor + 1) and search.left:
        limit = max(floor + 1, math.isqrt(floor * ceiling))
        best = _within(known, limit)[-1]
        is_searched = ceiling <= floor * WIDE or best.peak_bytes <= floor
        if is_searched:
            higher = [each for each in known if each.peak_bytes > limit]
            found = search.between(_within(known, limit)[-NEAREST:], higher[:NEAREST], floor, limit)
            known = pareto([*known, *(each for each in found if each.seconds > fastest)])[::-1]
            best = _within(known, limit)[-1]
        if best.peak_bytes > budget:
            ceiling, fastest = best.peak_bytes, best.seconds if is_searched else 0.0
            if squeezes:
                known, squeezes = _with_lower(problem, known, squeezes), 0
                floor = known[0].peak_bytes
            continue
        squeezes = 0
        if best.peak_bytes > floor:
            floor = best.peak_bytes
        elif limit <= budget:
            floor = limit
        else:
            break
    return known


def _with_lower(problem: Problem, known: Sequence[Solution], squeezes: int) -> list[Solution]:
    """What is known, with the lowest plans that are found from it, by rising peak."""
    return pareto([*known, *lower(problem, known, squeezes)])[::-1]


def _within(front: Sequence[Solution], limit: int) -> list[Solution]:
    """Those within a peak, by rising peak."""
    return [each for each in front if each.peak_bytes <= limit]


def _between(low: int, high: int) -> Iterator[int]:
    """Peaks between two, in equal ratios that are no smaller than one."""
    count = 1 + min(MAX_BETWEEN, int(math.log(high / low) / math.log(APART))) if 0 < low < high else 1
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
        self._squeezes: dict[Solution, Squeeze] = {}

    def fastest(self, starts: Sequence[Solution], least: int, limit: int) -> Solution:
        """The fastest plan that any of these leads to, with a peak between two."""
        return min((self._improved(each, least, limit) for each in starts), key=lambda each: each.seconds)

    def between(
        self, lower: Sequence[Solution], higher: Sequence[Solution], floor: int, limit: int
    ) -> Sequence[Solution]:
        """Plans with peaks between two: what comes of lower plans, and of higher ones that are squeezed.

        The fastest of these is squeezed as well, for room in which others are dropped.
        """
        plans = [self._improved(each, floor, limit) for each in lower]
        ways = [*((each, limit) for each in higher), *((None, int(limit * part)) for part in ROOM)]
        for start, peak in ways:
            plan = self.squeezed(start or min(plans, key=lambda each: each.seconds), peak)
            if plan is not None and floor < plan.peak_bytes <= limit:
                plans.append(self._improved(plan, floor, limit))
        return plans

    def drawn(self, known: Sequence[Solution]) -> list[Solution]:
        """Plans that squeezes of the lowest lead to whose prices have noise, until many bring nothing new."""
        found, chance = sorted(known, key=PEAK_AND_SECONDS), random.Random(len(known))
        misses = round(MAX_MISSES * min(1.0, MISSES_NODES / max(1, len(self.problem.graph.nodes))))
        while self.left and misses:
            part = LAST_PART * (FIRST_PART / LAST_PART) ** chance.random()
            limit = int(found[0].peak_bytes * (1 - part))
            plan = self.squeezed(chance.choice(found[:LOWEST]), limit, chance)
            if plan is None or plan in found:
                misses -= 1
            else:
                bisect.insort(found, plan, key=PEAK_AND_SECONDS)
        return [each for each in found if each not in known]

    def squeezed(self, start: Solution, limit: int, chance: random.Random | None = None) -> Solution | None:
        """The lowest plan that squeezes lead to, until one is within a peak; None for none."""
        plan, asked = start, limit
        for _ in range(MAX_SQUEEZES):
            nodes = self._squeeze(plan).within(asked, chance) if self.left else None
            if nodes is None:
                break
            found = self._weigh(nodes)
            if found.peak_bytes < plan.peak_bytes and self.problem.allows(found.schedule):
                plan = found
            else:
                asked -= max(0, found.peak_bytes - limit)
            if found.peak_bytes <= limit:
                break
        return None if plan is start else plan

    def _squeeze(self, solution: Solution) -> Squeeze:
        if solution not in self._squeezes:
            self._squeezes[solution] = Squeeze(self.problem, solution)
        return self._squeezes[solution]

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
        steps = [*operator_steps(graph, nodes), len(nodes)]
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
