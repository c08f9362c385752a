"""Row: plans for each of a row of budgets, on the condensed graph.

The budgets lie between the least that a plan can be found for and what keeping everything takes; half of
them in equal ratios, half where time falls the most between two. Work is bounded in tries; a graph so large
that it has none gets four budgets, with one run of ``evict`` each. With few tries the lowest plans that are
known before are improved at their own peaks besides. Where low plans alone serve, none is looked for further
up. Where the condensed graph is exact, orders are searched as well: that of the best plan so far, with one
operator moved, is another for ``evict``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from fxremat.predict.problem import pareto, progress
from fxremat.search import tables
from fxremat.search.condensed import Condensed
from fxremat.search.evict import evict
from fxremat.search.order import memory_order, moved
from fxremat.search.profile import Plan, peak_bytes
from fxremat.search.retain import retain

MAX_BUDGETS, MIN_BUDGETS, LEAST_BUDGETS = 32, 6, 4  # for which plans are looked for; the last without tries
MAX_ATTEMPTS = 16  # runs of ``evict`` per budget
BUDGETS_PER_ROOT = 1.7  # budgets for the root of the tries: with more tries there are more of both
ENOUGH_TRIES = 40  # for a search for the least budget, and for all plans that are known
DISTANCE_POWERS = (0.5, 1.0)  # of ``evict``'s prices, in turn
PLAIN = 2  # attempts without noise
DRAWS = 24  # of noise for the least budget
NOISE, MUCH_NOISE = 0.3, 1.0  # standard deviation of the logarithm of the other prices; for the least budget
PROMISING = 1.1  # how much slower than the best an attempt may be that is still worth improving
MOST_IMPROVED = 4  # plans known before that are improved at their own peaks, where there are few tries
LEAD = 4.0  # how much cheaper what the best plan recomputes is made
PRECISION = 1.01  # with which the least budget is found

# The order, the power of the distance and the factors of prices with which ``evict`` runs.
Way: TypeAlias = tuple[Sequence[int], float, "Sequence[float] | None"]


class Row:
    """Plans for a row of budgets, within a number of tries.

    Args:
        condensed: The graph.
        tries: How many plans may be tried.
        starts: Plans that are known before.
        reach: How much higher than the lowest plan that is known the budgets go at most.
        moves: How many orders are tried, for the least budget and for each other.
    """

    def __init__(
        self,
        condensed: Condensed,
        tries: int,
        starts: Iterable[tuple[int, ...]] = (),
        reach: float = math.inf,
        moves: tuple[int, int] = (0, 0),
    ) -> None:
        self.condensed = condensed
        self.moves = moves
        self._measured: dict[tuple[int, ...], Plan] = {}
        self._retained: dict[tuple[tuple[int, ...], int], Plan] = {}
        own = tuple(range(len(condensed.operators)))
        self.everything = max(1, peak_bytes(condensed, own))
        self.orders = tuple(dict.fromkeys((own, memory_order(condensed))))
        self.tables = tables.solve(condensed)
        self.starts = [self._plan(each) for each in starts]
        self.known = [*tables.spread(self.tables), *self.starts]
        self.highest = reach * min([self.everything, *(each.peak_bytes for each in self.known)])
        fewest = MIN_BUDGETS if tries else LEAST_BUDGETS
        self.budget_count = max(fewest, min(MAX_BUDGETS, round(BUDGETS_PER_ROOT * math.sqrt(tries))))
        self.has_time = tries >= ENOUGH_TRIES
        self.attempts = max(2 if tries else 1, min(MAX_ATTEMPTS, tries // self.budget_count))
        self.lowest: list[Plan] = []  # for budgets each of which was the least by then that ``evict`` serves
        self.best: dict[int, Plan] = {}  # of each budget, ascending

    def plans(self) -> Iterable[tuple[int, ...]]:
        """The best plan at hand for each budget that one fits, and what else no other plan beats.

        Besides them all that was found for the least budget: which of it is lowest is not sure, for bytes are
        estimates where a compiler fuses kernels.
        """
        first, *rest = self._budgets()
        lowest = self._solve(first, self.lowest)
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
            found += (self._plan(each.operators) for each in self.known)
        else:
            worth = [each for each in pareto(self.known)[-MOST_IMPROVED:] if each.peak_bytes <= self.highest]
            found += self.starts
            found += (self._improved(each.operators, each.peak_bytes) for each in worth)
        low = (*self.lowest, *lowest) if self.has_time else ()
        return dict.fromkeys(each.operators for each in (*pareto(found), *low))

    def _budgets(self) -> list[int]:
        """Budgets in equal ratios from the least to what keeping everything takes, for half of the tries."""
        high = self._least_budget()
        least = max(1, min([high, *(each.peak_bytes for each in self.known)]))
        count = self.budget_count // 2
        ratio = max(1.0, self.everything / least) ** (1 / count)
        further = (round(least * ratio**step) for step in range(1, count + 1))
        return sorted({least, *(budget for budget in further if budget <= self.highest)})

    def _least_budget(self) -> int:
        """The least budget that ``evict`` can serve; with little time the least that a plan is known for.

        Runs that fail are the longest, and seldom is ``evict`` content with less than what is known.
        """
        if not self.has_time:
            return min([self.everything, *(each.peak_bytes for each in self.known)])
        low, high = min(map(self._least_need, self.orders)), self.everything
        noise = random.Random(low)
        for order in self.orders:
            high = self._least_served(low, high, order, 1.0, None)
        for draw in range(DRAWS):
            order, power = self.orders[draw % len(self.orders)], DISTANCE_POWERS[draw // 2 % 2]
            high = self._least_served(low, high, order, power, self._noise(noise, MUCH_NOISE))
        return self._least_of_orders(low, high, noise) if self.moves[0] else high

    def _least_of_orders(self, low: int, high: int, noise: random.Random) -> int:
        """The same in other orders, and where the backward makes again what it may write over then."""
        for order in self.orders:
            high = self._least_served(low, high, order, 1.0, None, anew=True)
        order = _order_of(self.lowest[-1]) if self.lowest else self.orders[-1]
        for _ in range(self.moves[0]):
            other = moved(self.condensed, order, noise)
            if other is None:
                break
            served = self._least_served(self._least_need(other), high, other, *self._drawn_prices(noise))
            if served < high:
                high, order = served, other
        self.orders = tuple(dict.fromkeys((*self.orders, order)))
        return high

    def _least_served(
        self,
        low: int,
        high: int,
        order: Sequence[int],
        power: float,
        weights: Sequence[float] | None,
        anew: bool = False,
    ) -> int:
        """The least budget between two that ``evict`` can serve with these prices; the higher one if none.

        Steps down grow while they are served: of most prices that are drawn one run fails, and no other.
        """
        ratio, found = PRECISION, None
        while low + 1 < high and low * PRECISION < high:
            lower = min(max(round(high / ratio), low + 1), high - 1)
            plan = evict(self.condensed, order, lower, power, weights, anew=anew)
            if plan is not None:
                found = self._plan(plan)
                high, ratio = min(lower, found.peak_bytes), ratio * ratio
            elif ratio == PRECISION:
                break
            else:
                low, ratio = lower, PRECISION
        if found is not None:
            self.lowest.append(found)
        return high

    def _drawn_prices(self, noise: random.Random) -> tuple[float, Sequence[float] | None]:
        """The power of the distance and the factors of prices, with noise or without."""
        weights = self._noise(noise, NOISE) if noise.random() < 0.5 else None
        return noise.choice(DISTANCE_POWERS), weights

    def _noise(self, noise: random.Random, deviation: float) -> list[float]:
        """Factors of the prices of all operators."""
        return [noise.lognormvariate(0, deviation) for _ in self.condensed.operators]

    def _least_need(self, order: Sequence[int]) -> int:
        """What no plan in an order goes below: an operator's own buffers, and what is returned by then."""
        size, pinned = self.condensed.size, self.condensed.pinned
        returned, need = 0, max(1, self.condensed.after_bytes)
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
            if fast.seconds < slow.seconds and below < middle < above:
                gaps.append((fast.seconds - slow.seconds, below, middle))
        return min(gaps)[1:] if gaps else None

    def _solve(self, budget: int, starts: Iterable[Plan]) -> list[Plan]:
        """All plans within a budget; those found for less are starts."""
        known = [*self.known, *tables.fitting(self.tables, budget)]
        fitting = [each for each in known if each.peak_bytes <= budget]
        best = [_fastest(fitting)] if fitting else []
        starts = [each for each in (*best, *starts) if each.peak_bytes <= budget]
        found = [self._improved(each.operators, budget) for each in starts]
        for operators in self._attempts(budget, found):
            plan = self._improved(operators, budget)
            if plan.peak_bytes <= budget:
                found.append(plan)
        if found:
            self.best[budget] = _fastest(found)
        return found

    def _improved(self, operators: tuple[int, ...], budget: int) -> Plan:
        """A plan with as few recomputations as a budget has room for."""
        key = operators, budget
        if key not in self._retained:
            self._retained[key] = self._plan(retain(self.condensed, operators, budget))
        return self._retained[key]

    def _plan(self, operators: tuple[int, ...]) -> Plan:
        """The plan that runs these operators, measured once."""
        if operators not in self._measured:
            self._measured[operators] = Plan.of(self.condensed, operators)
        return self._measured[operators]

    def _attempts(self, budget: int, found: Sequence[Plan]) -> Iterator[tuple[int, ...]]:
        """Plans of ``evict``, while those that are found of them grow."""
        for order, power, weights in self._ways(random.Random(budget), found):
            promising = _fastest(found).seconds * PROMISING if found else math.inf
            plan = evict(self.condensed, order, budget, power, weights, promising)
            if plan is not None:
                yield plan

    def _ways(self, noise: random.Random, found: Sequence[Plan]) -> Iterator[Way]:
        """Two with plain prices, then in turn led by the best so far and free; then in orders by its own."""
        for attempt in range(self.attempts):
            weights = None
            if attempt >= PLAIN:
                weights = self._noise(noise, NOISE)
                if attempt % 2 and found:
                    for operator, runs in Counter(_fastest(found).operators).items():
                        weights[operator] /= LEAD if runs > 1 else 1
            yield self.orders[attempt % len(self.orders)], DISTANCE_POWERS[attempt // 2 % 2], weights
        for _ in range(self.moves[1]):
            order = moved(self.condensed, _order_of(_fastest(found)) if found else self.orders[-1], noise)
            if order is None:
                break
            yield order, *self._drawn_prices(noise)


def _order_of(plan: Plan) -> tuple[int, ...]:
    """The order in which a plan first runs the operators."""
    return tuple(dict.fromkeys(plan.operators))


def _fastest(plans: Iterable[Plan]) -> Plan:
    return min(plans, key=lambda each: (each.seconds, each.peak_bytes))
