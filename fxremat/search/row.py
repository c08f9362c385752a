"""Row: plans for each of a row of budgets, on the condensed graph.

The budgets lie between the least that a plan can be found for and what keeping everything takes; half of
them in equal ratios, half where time falls the most between two. Work is bounded in tries.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fxremat.predict.problem import progress
from fxremat.search import tables
from fxremat.search.condensed import Condensed
from fxremat.search.evict import evict
from fxremat.search.order import memory_order
from fxremat.search.retain import peak_bytes, retain
from fxremat.search.table import Plan

MAX_BUDGETS, MIN_BUDGETS = 32, 6  # for which plans are looked for
MAX_ATTEMPTS = 16  # runs of ``evict`` per budget
BUDGETS_PER_ROOT = 1.7  # budgets for the root of the tries: with more tries there are more of both
ENOUGH_TRIES = 64  # for each variant of the condensed graph, and for plans besides those for budgets
DISTANCE_POWERS = (0.5, 1.0)  # of ``evict``'s prices, in turn
PLAIN = 2  # attempts without noise
NOISE = 0.3  # standard deviation of the logarithm of the other prices
PROMISING = 1.1  # how much slower than the best an attempt may be that is still worth improving
LEAD = 4.0  # how much cheaper what the best plan recomputes is made
PRECISION = 1.01  # with which the least budget is found


class _Found(NamedTuple):
    """A plan with its seconds; the fastest is the least."""

    seconds: float
    plan: tuple[int, ...]


class Search:
    """Plans for a row of budgets, within a number of tries."""

    def __init__(self, condensed: Condensed, tries: int, starts: Iterable[tuple[int, ...]] = ()) -> None:
        self.condensed = condensed
        own = tuple(range(len(condensed.operators)))
        self.everything = max(1, peak_bytes(condensed, own))
        self.orders = tuple(dict.fromkeys((own, memory_order(condensed))))
        self.tables = tables.solve(condensed)
        self.known = tables.spread(self.tables)
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
        known = [*self.known, *tables.fitting(self.tables, budget)]
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
