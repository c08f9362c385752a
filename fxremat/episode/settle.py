"""Settle: which of its candidates each call of an episode gets, so that the episode keeps its budget.

Terms:
    choice: a candidate for each call, and so a peak and a sum of seconds.
    variants: of a graph, the different candidates that its calls have in a choice. Each is code of its own.
    row: a moment at which live bytes may be highest; linear in what calls hold and what one runs with.

The least seconds within a budget are a knapsack with one row for each event; identical calls make it
symmetric, and the limit on variants is a choice of medians. Three things make it small:

1. *Propagation*. What calls hold only adds up. Each call holds at least the least of what fits beside the
   least of all others; that drops candidates, which raises what is held least, up to a fixed point. If
   candidates are left for all calls, the choice that holds least among them fits. So whether any choice fits
   is known exactly and in polynomial time, in any order of events, and also once some calls are decided.
2. *Relaxation*. The linear programme has few candidates with a share, found by column generation. Its prices
   of bytes are a bound for whole candidates too (Lagrangian relaxation; it holds whatever the prices are).
   While a graph has too many variants, the one with the least share is dropped and the rest solved again.
3. *Dive*. Calls take the candidate of their greatest share that propagation lets pass, those that are sure
   first. It never runs into a dead end. Then single calls are changed while that saves time, to any candidate
   that the limit on variants lets them have: one off the convex hull has no share in the relaxation, but may
   be what a call has room for, and the fewer calls there are the more that is worth.

HiGHS's own branch and bound on the same programme was closer by less than a hundredth where it was tried,
and took up to tens of seconds at tight budgets, where each call's own row makes the relaxation weak. A
dynamic programme over calls would be exact, but needs events like a stack and sizes that are round.

Budgets are halved between the lowest peak and that of the fastest choice (in ratio), down to the one asked
for. What is chosen in between has to lie between the choices on both sides in bytes and in seconds. Budgets
that part ways get choices from the two sides of one choice, so a larger budget never takes longer, nor has
a smaller one a higher peak, whatever is asked for. Work is limited in steps, not in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import scipy  # its parts are imported when they are first used, which takes longer than all of fxremat

from fxremat.episode.trace import Candidate, Trace, held_bytes, own_bytes, peak_bytes
from fxremat.errors import InfeasibleBudgetError

Array: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]  # for each call and each candidate of its graph
Plans: TypeAlias = npt.NDArray[np.intp]  # for each call its candidate

Number = TypeVar("Number", bound=np.generic)

SCALE = 1000.0  # of bytes in the linear programme: HiGHS keeps to a ten-millionth, whatever the unit
STEP = 2.0**-8  # of a budget: closer ones are not told apart
NEAR = 5e-4  # of the time: choices that are closer have none between them
BRANCHES = 2000  # for the lowest peak with few variants
EXCHANGES = 50  # of calls, for each budget


@dataclass(frozen=True, slots=True)
class Settlement:
    """The choice for a budget.

    Attributes:
        plans: For each call the index of its candidate among those of its graph.
        peak_bytes: The episode's peak.
        seconds: The sum over calls.
        lower_bound_seconds: No choice within the budget takes less, however many variants it has.
        lowest_peak_bytes: The least peak of any choice with so many variants.
    """

    plans: tuple[int, ...]
    peak_bytes: int
    seconds: float
    lower_bound_seconds: float
    lowest_peak_bytes: int


def settle(
    trace: Trace,
    candidates: Mapping[int, Sequence[Candidate]],
    budget_bytes: int | None,
    max_variants: int = 4,
) -> Settlement:
    """Choose a candidate for each call, for the least time within a budget.

    Args:
        trace: The episode.
        candidates: Those of each graph, by its number.
        budget_bytes: What the peak must not exceed; None for the lowest peak.
        max_variants: How many different candidates calls of one graph may have.

    Raises:
        InfeasibleBudgetError: No choice fits.
    """
    search = _Search(trace, candidates, max_variants)
    lowest = search.lowest()
    budget = lowest.peak_bytes if budget_bytes is None else budget_bytes
    if budget < lowest.peak_bytes:
        raise InfeasibleBudgetError(budget, lowest.peak_bytes, "the step")
    found = _descend(search, lowest, budget)
    bound = min(found.seconds, search.relax(budget, search.exists, found).bound)
    plans = tuple(found.plans.tolist())
    return Settlement(plans, found.peak_bytes, found.seconds, bound, lowest.peak_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    plans: Plans
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxed:
    """The linear programme: shares of candidates, and a bound for whole ones."""

    shares: Array
    bound: float


def _descend(search: _Search, lowest: _Choice, budget: int) -> _Choice:
    """The choice for a budget that some choice fits; see the module."""
    upper = search.fastest()
    if budget >= upper.peak_bytes:
        return upper
    low, high = lowest.peak_bytes, upper.peak_bytes
    lower = search.best(low, lowest, upper)
    while high - low > max(1.0, low * STEP) and lower.seconds > upper.seconds * (1 + NEAR):
        middle = max(low + 1, math.isqrt((low + 1) * high))
        between = search.best(middle, lower, upper)
        if between.seconds < upper.seconds or between.peak_bytes < lower.peak_bytes:
            between = lower
        if budget >= middle:
            low, lower = middle, between
        elif budget < between.peak_bytes:
            high, upper = between.peak_bytes, between
        else:
            return between
    return lower


class _Search:
    """An episode as arrays: calls by candidates, and rows by calls."""

    def __init__(
        self, trace: Trace, candidates: Mapping[int, Sequence[Candidate]], max_variants: int
    ) -> None:
        self.trace = trace
        self.max_variants = max_variants
        self.offered = [candidates[call.graph] for call in trace.calls]
        graphs = [call.graph for call in trace.calls]
        self.groups = [np.flatnonzero(np.equal(graphs, graph)) for graph in dict.fromkeys(graphs)]
        self.exists: Mask = self._table(lambda index, each: 1.0) > 0
        self.seconds = self._table(lambda index, each: each.seconds)
        self.held = self._table(lambda index, each: held_bytes(trace.calls[index], each))
        self.own = [self._table(partial(self._own, is_backward)) for is_backward in (False, True)]
        self._look_along()

    def _table(self, number: Callable[[int, Candidate], float]) -> Array:
        table = np.zeros((len(self.offered), max(map(len, self.offered), default=1)))
        for index, offered in enumerate(self.offered):
            table[index, : len(offered)] = [number(index, each) for each in offered]
        return table

    def _own(self, is_backward: bool, index: int, each: Candidate) -> float:
        return own_bytes(self.trace.calls[index], each, is_backward)

    def _look_along(self) -> None:
        """Make the rows: before each event, at each event, and behind the last."""
        waiting = np.zeros(len(self.offered))
        outside: list[int] = []
        waits: list[Array] = []
        self.at = np.full((2, len(self.offered)), -1)  # the row of each call's forward and backward
        for event in self.trace.events:
            for size in (event.between_bytes, event.outside_bytes):
                outside.append(size)
                waits.append(waiting.copy())
            waits[-1][event.call] = 0.0
            self.at[int(event.is_backward), event.call] = len(outside) - 1
            waiting[event.call] = float(not event.is_backward)
        self.outside = np.array([*outside, self.trace.after_bytes], dtype=float)
        self.waits = np.array([*waits, waiting])
        for own, at in zip(self.own, self.at, strict=True):
            own[at < 0] = 0.0  # an event that does not happen takes nothing, in whichever row

    def choice(self, plans: Plans) -> _Choice:
        """Plans, with what they take."""
        chosen = [offered[plan] for offered, plan in zip(self.offered, plans, strict=True)]
        return _Choice(plans, peak_bytes(self.trace, chosen), sum(each.seconds for each in chosen))

    def fastest(self) -> _Choice:
        """The choice of least time, without a budget."""
        return self.choice(np.where(self.exists, self.seconds, np.inf).argmin(axis=1))

    def least(self, allowed: Mask) -> Plans:
        """Of what is allowed, the plans that hold least."""
        plans: Plans = np.where(allowed, self.held, np.inf).argmin(axis=1)
        return plans

    def taken(self, plans: Plans, table: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The entries of a table for plans."""
        return table[np.arange(len(plans)), plans]

    # -- propagation

    def fit(self, budget: int, allowed: Mask) -> Mask | None:
        """What can be part of a choice that fits, beside what is held least; None if no choice fits."""
        while allowed.any(axis=1).all():
            least = np.where(allowed, self.held, np.inf).min(axis=1)
            room = budget - self.outside - self.waits @ least
            if room.min() < 0:
                return None
            fitting = allowed & (self.held <= (least + self._spare(room))[:, None])
            for own, at in zip(self.own, self.at, strict=True):
                fitting &= own <= room[at][:, None]
            if (fitting == allowed).all():
                return allowed
            allowed = fitting
        return None

    def _spare(self, room: Array) -> Array:
        """How much more each call may hold."""
        spare: Array = np.where(self.waits > 0, room[:, None], np.inf).min(axis=0, initial=np.inf)
        return spare

    # -- variants

    def variants(self, used: Mask) -> Mask:
        """What the calls of each graph use together."""
        found = np.zeros_like(self.exists)
        for calls in self.groups:
            found[calls] = used[calls].any(axis=0)
        return found

    def used(self, plans: Plans) -> Mask:
        """The variants of plans."""
        return self.variants(np.arange(self.exists.shape[1]) == plans[:, None])

    def crowded(self, variants: Mask) -> Iterator[tuple[Plans, Plans]]:
        """Graphs with more variants than allowed: their calls, and the variants."""
        for calls in self.groups:
            found = np.flatnonzero(variants[calls[0]])
            if len(found) > self.max_variants:
                yield calls, found

    def lowest(self) -> _Choice:
        """The choice of least peak, by halves."""
        self.branches = BRANCHES
        plans = np.zeros(len(self.offered), dtype=np.intp)
        for calls in self.groups:
            plans[calls] = np.where(self.exists[calls], self.held[calls], np.inf).sum(axis=0).argmin()
        best = self.choice(plans)
        low, high = 0, best.peak_bytes
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fit(middle, self.exists) is not None else (middle + 1, high)
        middle = low  # what is lowest without a limit on variants is mostly so with it
        while low < best.peak_bytes:
            found = self._limited(middle, self.exists, np.zeros_like(self.exists))
            low, best = (middle + 1, best) if found is None else (low, self.choice(found))
            middle = (low + best.peak_bytes) // 2
        return best

    def _limited(self, budget: int, allowed: Mask, kept: Mask) -> Plans | None:
        """Plans within a budget and the limit on variants.

        If the plans that hold least have too many variants, some other choice does without one of them.
        """
        self.branches -= 1
        fitting = self.fit(budget, allowed) if self.branches >= 0 else None
        if fitting is None:
            return None
        plans = self.least(fitting)
        calls, found = next(self.crowded(self.used(plans)), (None, None))
        if calls is None or found is None:
            return plans
        for each in found[~kept[calls[0], found]]:
            rest = allowed.copy()
            rest[calls, each] = False
            others = self._limited(budget, rest, kept)
            if others is not None:
                return others
            kept = kept.copy()
            kept[calls, each] = True
            if kept[calls[0]].sum() == self.max_variants:
                allowed = allowed.copy()
                allowed[calls] &= kept[calls]
                return self._limited(budget, allowed, kept)
        return None

    # -- relaxation

    def relax(self, budget: int, among: Mask, *starts: _Choice) -> _Relaxed:
        """The linear programme among candidates, of which some choice must fit.

        Args:
            budget: Bytes.
            among: The candidates.
            starts: Choices whose variants are likely to have shares.
        """
        allowed = self.fit(budget, among)
        assert allowed is not None
        columns = np.any(
            [self.used(plans) for plans in (self.least(allowed), *(s.plans for s in starts))], axis=0
        )
        columns &= allowed
        while True:
            shares, prices = self._programme(budget, columns)
            costs = self.seconds + self.held * (prices @ self.waits)[:, None]
            for own, at in zip(self.own, self.at, strict=True):
                costs += own * prices[at][:, None]
            least = np.where(allowed, costs, np.inf).min(axis=1)
            gains = np.where(columns, costs, np.inf).min(axis=1) - least
            cheaper = allowed & (costs <= least[:, None]) & (gains > 1e-7 * least)[:, None]
            wider = columns | (self.variants(cheaper) & allowed)
            if (wider == columns).all():
                bound = float(least.sum() - prices @ (budget - self.outside))
                return _Relaxed(shares, bound - 1e-9 * abs(bound))
            columns = wider

    def _programme(self, budget: int, columns: Mask) -> tuple[Array, Array]:
        """Shares of the columns, and the prices of the rows in seconds for each byte.

        Besides the shares there is a variable for what each call holds.
        """
        call, candidate = np.nonzero(columns)
        count, calls = len(call), len(columns)
        unit, time = max(1, budget) / SCALE, float(self.seconds.mean()) or 1.0
        most = np.where(columns, self.held, 0.0).max(axis=1)
        top = self.outside + self.waits @ most
        for own, at in zip(self.own, self.at, strict=True):
            np.maximum.at(top, at, top[at] + np.where(columns, own, 0.0).max(axis=1))
        rows = np.flatnonzero(top > budget)
        if not len(rows):
            fastest = np.where(columns, self.seconds, np.inf).argmin(axis=1)
            return np.eye(columns.shape[1])[fastest], np.zeros(len(self.outside))
        place = np.full(len(self.outside), -1)
        place[rows] = np.arange(len(rows))
        memory = np.zeros((len(rows), count + calls))
        memory[:, count:] = self.waits[rows]
        for own, at in zip(self.own, self.at, strict=True):
            here = np.flatnonzero(place[at[call]] >= 0)
            memory[place[at[call[here]]], here] += own[call[here], candidate[here]] / unit
        sums = np.zeros((2 * calls, count + calls))
        sums[call, np.arange(count)] = 1.0
        sums[calls + call, np.arange(count)] = self.held[call, candidate] / unit
        sums[calls + np.arange(calls), count + np.arange(calls)] = -1.0
        found = scipy.optimize.linprog(
            np.r_[self.seconds[call, candidate] / time, np.zeros(calls)],
            A_ub=scipy.sparse.csr_array(memory),
            b_ub=(budget - self.outside[rows]) / unit,
            A_eq=scipy.sparse.csr_array(sums),
            b_eq=np.repeat([1.0, 0.0], calls),
            method="highs",
            options={"presolve": False},  # it takes most of the time here
        )
        shares, prices = np.zeros_like(self.held), np.zeros(len(self.outside))
        if found.x is not None:
            shares[call, candidate] = found.x[:count]
            prices[rows] = np.maximum(0.0, -found.ineqlin.marginals) * time / unit
        return shares, prices

    # -- a budget

    def best(self, budget: int, known: _Choice, above: _Choice) -> _Choice:
        """The best choice found for a budget, between one that fits and one for a larger budget."""
        shares = self.relax(budget, self.exists, known, above).shares
        among = self.variants(shares > 1e-6) | self.used(known.plans)
        while (crowd := next(self.crowded(among), None)) is not None:
            smaller = self._without_one(budget, among, shares, *crowd)
            among = self.used(known.plans) if smaller is None else smaller
            shares = self.relax(budget, among, known).shares
        starts = (self._dive(budget, among, shares), known.plans)
        found = [known, *(self.choice(self._improve(budget, plans)) for plans in starts)]
        return min(found, key=lambda choice: choice.seconds)

    def _without_one(
        self, budget: int, among: Mask, shares: Array, calls: Plans, variants: Plans
    ) -> Mask | None:
        """The candidates without the one of least share that can be missed, if any can."""
        for each in variants[shares[np.ix_(calls, variants)].sum(axis=0).argsort(kind="stable")]:
            rest = among.copy()
            rest[calls, each] = False
            if self.fit(budget, rest) is not None:
                return rest
        return None

    def _dive(self, budget: int, among: Mask, shares: Array) -> Plans:
        """Plans after the shares of candidates."""
        allowed = self.fit(budget, among)
        assert allowed is not None
        sure = shares > 1 - 1e-6
        decided = self.fit(budget, allowed & (sure | ~sure.any(axis=1, keepdims=True)))
        allowed = allowed if decided is None else decided
        for call in shares.max(axis=1).argsort(kind="stable")[::-1]:
            for each in np.lexsort((self.seconds[call], -shares[call])):
                if not allowed[call, each] or allowed[call].sum() == 1:
                    continue
                only = allowed.copy()
                only[call] = np.arange(len(only[call])) == each
                fitting = self.fit(budget, only)
                if fitting is not None:
                    allowed = fitting
                    break
        return self.least(allowed)

    def _improve(self, budget: int, plans: Plans) -> Plans:
        """Plans that no change of a call, with what becomes possible then, makes faster, as far as tried."""
        plans = self._climb(budget, plans)
        seconds = self.taken(plans, self.seconds)
        lost = np.where(self.exists, self.seconds - seconds[:, None], 0.0)
        slower = np.argwhere(lost > 0.0)
        for call, each in slower[lost[tuple(slower.T)].argsort(kind="stable")][:EXCHANGES]:
            if not self._open(plans)[call, each]:
                continue
            other = plans.copy()
            other[call] = each
            if self._moves(budget, other) is None:
                continue
            other = self._climb(budget, other)
            if self.taken(other, self.seconds).sum() < self.taken(plans, self.seconds).sum() * (1 - 1e-9):
                plans = other
        return plans

    def _climb(self, budget: int, plans: Plans) -> Plans:
        """Plans that fit, one call after the other with the candidate that saves most."""
        while (moves := self._moves(budget, plans)) is not None:
            gains = np.where(moves, self.taken(plans, self.seconds)[:, None] - self.seconds, 0.0)
            call, each = divmod(int(gains.argmax()), gains.shape[1])
            if gains[call, each] <= 0.0:
                break
            plans = plans.copy()
            plans[call] = each
        return plans

    def _moves(self, budget: int, plans: Plans) -> Mask | None:
        """The candidates that a single call can change to; None where the plans don't fit themselves."""
        held = self.taken(plans, self.held)
        free = budget - self.outside - self.waits @ held
        room = free.copy()
        for own, at in zip(self.own, self.at, strict=True):
            room[at] -= self.taken(plans, own)
        if room.min() < 0:
            return None
        moves = self._open(plans) & (self.held <= (held + self._spare(room))[:, None])
        for own, at in zip(self.own, self.at, strict=True):
            moves &= own <= free[at][:, None]
        return moves

    def _open(self, plans: Plans) -> Mask:
        """The candidates that a single call can change to without too many variants of its graph."""
        found = self.exists.copy()
        used = self.used(plans)
        for calls in self.groups:
            variants = used[calls[0]]
            if variants.sum() == self.max_variants:
                own = plans[calls]
                shared = calls[(own == own[:, None]).sum(axis=1) > 1]  # else the call's variant is free
                found[shared] &= variants
        return found
