"""The plan with the least time that fits the budget, among all at hand.

The graph is condensed first (``condensed.py``), so that a plan is found and weighed in milliseconds. Then,
for each of a row of budgets between the least that a plan can be found for and what keeping everything takes:

1. the dynamic programme over blocks (``persistent.py``) has plans that fit;
2. ``evict`` runs through the operators under the budget, dropping what is cheapest to have again; a few times
   in two orders, with prices that lean to what the best plan so far recomputes, and with noise;
3. the plan of the budget below is a start as well, so that more memory never costs time;
4. ``retain`` uses up what room is left by dropping recomputations.

The best of each budget is measured exactly. The frontier of all measured points does not depend on any
budget, hence a smaller budget never gives a higher peak. The plans of the simpler planners are starts too,
and are measured besides, if the graph is not large; of a large one only the plan of ``recursive`` with the
least memory. Graphs of few operators have the plans of ``exact``. Work is bounded in steps, not in seconds,
so the same graph gives the same plan everywhere.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fxremat.canonical import Phase
from fxremat.errors import InvalidOptionError
from fxremat.ops import Kind
from fxremat.planners import drop_cheap, exact, keep_all, min_cut, persistent, recursive, revolve, sublinear
from fxremat.planners.base import Problem, Solution, collector_paused, progress
from fxremat.planners.condensed import Condensed, condense
from fxremat.planners.evict import evict
from fxremat.planners.order import memory_order
from fxremat.planners.replay import followed
from fxremat.planners.retain import peak_bytes, retain
from fxremat.planners.table import Plan
from fxremat.schedule import Schedule

MAX_BUDGETS, MIN_BUDGETS = 32, 6  # for which plans are looked for
MAX_ATTEMPTS = 16  # runs of ``evict`` per budget
BUDGETS_PER_ROOT = 1.7  # budgets for the root of the tries: with more tries there are more of both
MAX_TRIES, FEW_NODES = 256, 1500  # plans that are tried for a graph of so many nodes; fewer for larger ones
STEPS_PER_SECOND = 150_000  # nodes whose part in a plan is tried in a second, on one core of a Zen 4 at 4 GHz
ENOUGH_TRIES = 64  # for each variant of the condensed graph, and for plans besides those for budgets
MAX_PROVED, MAX_PROVED_STATES = 16, 3000  # operators, and states opened, of graphs whose frontier is proved
STEPS_OF_REVOLVE = 30_000  # of its plans together, which are only compared
DISTANCE_POWERS = (0.5, 1.0)  # of ``evict``'s prices, in turn
PLAIN = 2  # attempts without noise
NOISE = 0.3  # standard deviation of the logarithm of the other prices
PROMISING = 1.1  # how much slower than the best an attempt may be that is still worth improving
LEAD = 4.0  # how much cheaper what the best plan recomputes is made
PRECISION = 1.01  # with which the least budget is found


@collector_paused()
def plan(problem: Problem) -> tuple[Solution, ...]:
    """The default, which serves no budget at all, then the frontier by falling peak."""
    default = _default_plan(problem)
    graph, inlined = problem.graph, _inlined(problem, default)
    # On a CPU the buffers of neighbouring loops live longer, but not all: plan for both if there is time.
    variants = [True, False] if inlined and graph.is_on_cpu else [False]
    tries = _tries(problem, len(graph.nodes))
    variants = variants[: max(1, tries // ENOUGH_TRIES)]
    recipes = _recipes(problem) if tries >= ENOUGH_TRIES else ()
    known = [each.schedule for each in recipes] or [recursive.deepest(problem)]
    schedules: dict[Schedule, None] = {}
    for joins_calls in variants:
        condensed = condense(graph, problem.costs, problem.fusion, inlined, joins_calls)
        starts = [followed(condensed, each) for each in known]
        plans = _Search(condensed, tries // len(variants), starts).plans()
        schedules |= dict.fromkeys(map(condensed.schedule, plans))
    found = [problem.evaluate_needed(each, "auto") for each in progress(schedules, "weighing plans")]
    found = [each for each in found if problem.allows(each.schedule)]
    if not found:
        found.append(problem.identity("auto"))
    if recipes:
        found += revolve.plan(problem, STEPS_OF_REVOLVE)
    found += [default, *recipes, *_proved(problem, len(condensed.operators))]
    return (default, *pareto(found))


def _recipes(problem: Problem) -> tuple[Solution, ...]:
    """The plans of the planners that follow a recipe, but for ``revolve``'s: too many to start from."""
    recipes = (keep_all, drop_cheap, min_cut, sublinear, recursive)
    return tuple(itertools.chain.from_iterable(each.plan(problem) for each in recipes))


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


def _tries(problem: Problem, nodes: int) -> int:
    """How many plans may be tried: as the time limit says, else fewer the larger the graph is."""
    if problem.time_limit_seconds is not None:
        return round(problem.time_limit_seconds * STEPS_PER_SECOND / max(1, nodes))
    return int(MAX_TRIES * min(1.0, FEW_NODES / max(1, nodes)) ** 2)


def _proved(problem: Problem, operators: int) -> tuple[Solution, ...]:
    """The proved frontier of a small graph; nothing where a search would take long."""
    if operators > MAX_PROVED or (problem.fusion != "none" and problem.graph.fx_nodes):
        return ()
    try:
        return exact.plan(problem, MAX_PROVED_STATES)
    except InvalidOptionError:  # it gave up
        return ()


def pareto(solutions: Iterable[Solution]) -> list[Solution]:
    """Those that no other beats in both peak and time: peak strictly falling, time strictly rising."""
    best: list[Solution] = []
    for solution in sorted(solutions, key=lambda s: (s.peak_bytes, s.seconds)):
        if not best or solution.seconds < best[-1].seconds:
            best.append(solution)
    return best[::-1]


def _inlined(problem: Problem, default: Solution) -> frozenset[int]:
    """The pointwise nodes that get no buffer at any step of the default plan, as a compiler lowers it."""
    graph = problem.graph
    if problem.fusion != "inductor" or not graph.fx_nodes:
        return frozenset()
    binding, lowering = problem.lowered(default)
    steps = zip(binding.nodes, lowering.materialised, strict=True)
    stored = {node for node, is_stored in steps if is_stored}
    return frozenset(
        node
        for node in binding.nodes
        if node not in stored
        and graph.loops[node].kind is Kind.POINTWISE
        and graph.nodes[node].phase is not Phase.INPUT
    )


class _Found(NamedTuple):
    """A plan with its seconds; the fastest is the least."""

    seconds: float
    plan: tuple[int, ...]


class _Search:
    """Plans for a row of budgets, within a number of tries."""

    def __init__(self, condensed: Condensed, tries: int, starts: Iterable[tuple[int, ...]] = ()) -> None:
        self.condensed = condensed
        own = tuple(range(len(condensed.operators)))
        self.everything = max(1, peak_bytes(condensed, own))
        self.orders = tuple(dict.fromkeys((own, memory_order(condensed))))
        self.tables = persistent.solve(condensed)
        self.known = persistent.spread(self.tables)
        self.known += (Plan(peak_bytes(condensed, each), condensed.seconds(each), each) for each in starts)
        self.budget_count = max(MIN_BUDGETS, min(MAX_BUDGETS, round(BUDGETS_PER_ROOT * math.sqrt(tries))))
        self.has_time = tries >= ENOUGH_TRIES
        self.attempts = max(2, min(MAX_ATTEMPTS, tries // self.budget_count))
        self.lowest: list[_Found] = []  # the plan for the least budget that ``evict`` can serve, if any
        self.best: dict[int, _Found] = {}  # of each budget, ascending

    def plans(self) -> Iterable[tuple[int, ...]]:
        """The best plan at hand for each budget, and what else no other plan beats."""
        first, *rest = self._budgets()
        lowest = self._solve(first, [each for each in self.lowest if self._peak_bytes(each) <= first])
        for budget in progress(rest, "planning for budgets"):
            self._solve(budget, list(self.best.values())[-1:])
        for _ in progress(range(self.budget_count - len(self.best)), "planning between budgets"):
            gap = self._widest_gap()
            if gap is None:
                break
            below, middle = gap
            self._solve(middle, [self.best[below]])
            self.best = dict(sorted(self.best.items()))
        found = [*self.lowest, *lowest, *self.best.values()]
        if self.has_time:
            found += [_Found(each.seconds, each.operators) for each in self.known]
        return dict.fromkeys(each.plan for each in self._undominated(found))

    def _undominated(self, found: Iterable[_Found]) -> list[_Found]:
        """Those that no other beats in both peak and time, as the condensed graph counts them."""
        best: list[_Found] = []
        for _, each in sorted((self._peak_bytes(each), each) for each in found):
            if not best or each.seconds < best[-1].seconds:
                best.append(each)
        return best

    def _budgets(self) -> list[int]:
        """Budgets in equal ratios from the least to what keeping everything takes, for half of the tries."""
        high = self._least_budget()
        least = max(1, min([high, *(each.peak_bytes for each in self.known)]))
        count = self.budget_count // 2
        ratio = max(1.0, self.everything / least) ** (1 / count)
        return sorted({least, *(round(least * ratio**step) for step in range(1, count + 1))})

    def _least_budget(self) -> int:
        """The least budget that ``evict`` can serve, or one that a plan is known for.

        Runs that fail are the longest, and seldom is ``evict`` content with less than what is known. With
        little time it is therefore asked for a bit less first.
        """
        low, high = min(map(self._least_need, self.orders)), self.everything
        if not self.has_time:
            high = min([high, *(each.peak_bytes for each in self.known)])
            less = int(high / PRECISION)
            if not self._serves(less):
                return high
            high = less
        while low + 1 < high and low * PRECISION < high:
            middle = min(max(round(math.sqrt(low * high)), low + 1), high - 1)
            if self._serves(middle):
                high = middle
            else:
                low = middle
        return high

    def _serves(self, budget: int) -> bool:
        """Whether ``evict`` has a plan for a budget, which is the lowest by now."""
        plans = (evict(self.condensed, order, budget, 1.0) for order in self.orders)
        lowest = next((each for each in plans if each is not None), None)
        if lowest is not None:
            self.lowest = [_Found(self.condensed.seconds(lowest), lowest)]
        return lowest is not None

    def _least_need(self, order: Sequence[int]) -> int:
        """What no plan in an order goes below: an operator's own buffers, and what is returned by then."""
        size, pinned = self.condensed.size, self.condensed.pinned
        returned, need = 0, 1
        for operator in (self.condensed.operators[index] for index in order):
            held = sum(size[buffer] for buffer in (*operator.reads, *operator.makes) if not pinned[buffer])
            returned += sum(size[buffer] for buffer in operator.makes if pinned[buffer])
            taken = max((size[buffer] for buffer in operator.overwrites), default=0)
            need = max(need, held + returned - taken)
        return need

    def _widest_gap(self) -> tuple[int, int] | None:
        """The neighbouring budgets between which time falls the most: the lower one, and one between them."""
        gaps = []
        for (below, slow), (above, fast) in itertools.pairwise(self.best.items()):
            middle = round(math.sqrt(below * above))
            if below < middle < above and fast.seconds < slow.seconds:
                gaps.append((fast.seconds - slow.seconds, below, middle))
        return min(gaps)[1:] if gaps else None

    def _solve(self, budget: int, found: list[_Found]) -> list[_Found]:
        """All plans for a budget; those found for less are starts."""
        known = [*self.known, *persistent.fitting(self.tables, budget)]
        fitting = [(each.seconds, each.operators) for each in known if each.peak_bytes <= budget]
        starts = [operators for _, operators in sorted(fitting)[:1]]
        found = [self._improved(each, budget) for each in (*starts, *(each.plan for each in found))]
        for each in self._attempts(budget, found):
            found.append(self._improved(each, budget))
        if found:
            self.best[budget] = min(found)
        return found

    def _peak_bytes(self, found: _Found) -> int:
        return peak_bytes(self.condensed, found.plan)

    def _improved(self, plan: Sequence[int], budget: int) -> _Found:
        better = retain(self.condensed, plan, budget)
        return _Found(self.condensed.seconds(better), better)

    def _attempts(self, budget: int, found: Sequence[_Found]) -> Iterator[tuple[int, ...]]:
        """Plans of ``evict``: two with plain prices, then in turn led by the best so far and free."""
        noise = random.Random(budget)
        for attempt in range(self.attempts):
            order = self.orders[attempt % len(self.orders)]
            weights = None
            if attempt >= PLAIN:
                weights = [noise.lognormvariate(0, NOISE) for _ in self.condensed.operators]
                if attempt % 2 and found:
                    for operator, runs in Counter(min(found).plan).items():
                        weights[operator] /= LEAD if runs > 1 else 1
            promising = min(found).seconds * PROMISING if found else math.inf
            power = DISTANCE_POWERS[attempt // 2 % 2]
            plan = evict(self.condensed, order, budget, power, weights, promising)
            if plan is not None:
                yield plan
