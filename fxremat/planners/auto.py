"""The plan with the least time that fits the budget, among all at hand.

The graph is condensed first (``condensed.py``), so that a plan is found and weighed in milliseconds. Then, for
each of a row of budgets between the least that a plan can be found for and what keeping everything takes:

1. ``evict`` runs through the operators under the budget, dropping what is cheapest to have again, several
   times with different prices and in two orders;
2. the plan of the budget below is a start as well, so that more memory never costs time;
3. ``retain`` uses up what room is left by dropping recomputations.

The best of each budget is measured exactly. The frontier of all measured points does not depend on any budget,
hence a smaller budget never gives a higher peak. Work is bounded in steps, not in seconds, so the same graph
gives the same plan everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.fusion import lower
from fxremat.planners import drop_cheap, min_cut
from fxremat.planners.base import Problem, Solution
from fxremat.planners.condensed import Condensed, condense, never_materialised
from fxremat.planners.evict import evict
from fxremat.planners.order import memory_order
from fxremat.planners.retain import Runs, retain
from fxremat.schedule import Schedule, bind, prune

MAX_BUDGETS, MIN_BUDGETS = 24, 8  # for which plans are looked for
MAX_ATTEMPTS = 16  # runs of ``evict`` per budget
DISTANCE_POWERS = (0.5, 1.0, 0.0, 1.5)  # prices of the first attempts; the others are these with noise
NOISE = 0.5  # standard deviation of the logarithm of a noisy price
BISECTIONS = 12  # to find the least budget


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The default, which serves no budget at all, then the frontier by falling peak."""
    default = _default_plan(problem)
    found = [default, problem.identity("auto"), *drop_cheap.plan(problem)]
    graph = problem.graph
    inlined = _inlined(problem, default)
    # On a CPU the buffers of neighbouring loops live longer, but not all of them: plan for both.
    variants = (False, True) if inlined and graph.is_on_cpu else (False,)
    schedules: dict[Schedule, None] = {}
    for joins_calls in variants:
        condensed = condense(graph, problem.costs, inlined, joins_calls)
        for each in _Search(condensed, problem.max_steps // len(variants)).plans():
            schedules[prune(graph, condensed.schedule(each))] = None
    found += [problem.evaluate(each, "auto") for each in schedules if problem.allows(each)]
    return (default, *pareto(found))


def baseline_plan(problem: Problem) -> Solution:
    """What the user has without us: under Inductor PyTorch's min-cut, else what a checkpoint policy says.

    Without us nothing is written in place that the program does not write in place.
    """
    return _default_plan(replace(problem, fusion="none") if problem.fusion == "inplace" else problem)


def _default_plan(problem: Problem) -> Solution:
    if problem.fusion == "inductor":
        return min_cut.plan(problem)[0]
    wished = {node.name: 1 for node in problem.graph.nodes if node.wish == "recompute"}
    return problem.mirror(wished, "keep_all")


def pareto(solutions: Iterable[Solution]) -> list[Solution]:
    """Those that no other beats in both peak and time: peak strictly falling, time strictly rising."""
    best: list[Solution] = []
    for solution in sorted(solutions, key=lambda s: (s.peak_bytes, s.seconds)):
        if not best or solution.seconds < best[-1].seconds:
            best.append(solution)
    return best[::-1]


def _inlined(problem: Problem, default: Solution) -> frozenset[int]:
    """The nodes that get no buffer in the default plan, as a compiler lowers it."""
    if problem.fusion != "inductor" or not problem.graph.fx_nodes:
        return frozenset()
    binding = bind(problem.graph, default.schedule)
    lowering = lower(problem.graph, binding, problem.fusion)
    return never_materialised(problem.graph, binding.nodes, lowering.materialised)


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan with its seconds."""

    seconds: float
    plan: tuple[int, ...]


class _Search:
    """Plans for a row of budgets, within a number of steps."""

    def __init__(self, condensed: Condensed, max_steps: int) -> None:
        self.condensed = condensed
        own = tuple(range(len(condensed.operators)))
        self.everything = max(1, Runs(condensed, own).peak_bytes)
        self.orders = tuple(dict.fromkeys((own, memory_order(condensed))))
        tries = max_steps // max(1, len(own))
        self.budget_count = max(MIN_BUDGETS, min(MAX_BUDGETS, tries // 8))
        self.attempts = max(2, min(MAX_ATTEMPTS, tries // self.budget_count))

    def plans(self) -> Iterator[tuple[int, ...]]:
        """The best plan at hand for each budget, the least budget first, for that one all plans."""
        best: _Found | None = None
        for budget in self._budgets():
            found = [] if best is None else [self._improved(best.plan, budget)]
            found += [self._improved(each, budget) for each in self._attempts(budget)]
            if best is None:
                yield from (each.plan for each in found)
            if found:
                best = min(found, key=lambda each: (each.seconds, each.plan))
                yield best.plan

    def _improved(self, plan: Sequence[int], budget: int) -> _Found:
        better = retain(self.condensed, plan, budget)
        return _Found(self.condensed.seconds(better), better)

    def _attempts(self, budget: int) -> Iterator[tuple[int, ...]]:
        """Plans of ``evict`` with different prices, orders taken in turn."""
        noise = random.Random(budget)
        for attempt in range(self.attempts):
            order = self.orders[attempt % len(self.orders)]
            number = attempt // len(self.orders)
            power = DISTANCE_POWERS[number % len(DISTANCE_POWERS)]
            weights = None
            if number >= len(DISTANCE_POWERS):
                weights = [noise.lognormvariate(0, NOISE) for _ in self.condensed.operators]
            plan = evict(self.condensed, order, budget, power, weights)
            if plan is not None:
                yield plan

    def _budgets(self) -> list[int]:
        """Budgets in equal ratios from the least to what keeping everything takes."""
        low, high = 0, self.everything
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            if any(evict(self.condensed, order, middle, 1.0) is not None for order in self.orders):
                high = middle
            else:
                low = middle
        ratio = (self.everything / max(1, low)) ** (1 / self.budget_count)
        rest = [round(max(1, low) * ratio**step) for step in range(1, self.budget_count + 1)]
        return sorted({high, *rest})
