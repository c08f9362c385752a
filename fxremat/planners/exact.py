"""Proved plans: an exact search where it ends, else a mixed-integer programme for each budget.

The search (``proof/search.py``) proves the whole frontier over all orders. Where it does not end, the
programme (``proof/milp.py``) has plans that keep an order: that in which auto's plan for the same budget
first runs the operators. What auto takes is a limit for the programme, and where nothing is below it auto's
plan is the proved one. So no plan is worse than auto's.

Without a budget of its own the programme is solved for the least peak, and for the peaks of auto's frontier.
The time limit is one of seconds, shared by the budgets: what is proved is the same everywhere, but a plan
that is not proved may depend on the machine. Each solution's ``note`` says which of the two it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tqdm import tqdm

from fxremat.errors import InfeasibleBudgetError, InvalidOptionError
from fxremat.planners import auto
from fxremat.predict.problem import LEAST, Problem, Solution
from fxremat.proof import search
from fxremat.proof.bounds import Bounds
from fxremat.proof.milp import Answer, least_peak, least_seconds
from fxremat.proof.programme import Programme, programme
from fxremat.search.condensed import Condensed, condense

MAX_SEARCHED = 24  # operators; larger graphs that the search ends on are few
MAX_OPERATORS = 120  # the programme grows with their square, and the time with a higher power
TIME_LIMIT_SECONDS = 60.0
ROUNDING = 1e-9  # between sums of the same seconds


def plan(problem: Problem) -> tuple[Solution, ...]:
    """Proved solutions, or with a proof of how far they are from the best; auto's for budgets not asked for.

    Raises:
        InvalidOptionError: The graph is too large, its memory is not that of graphs that run as they are, or
            its orders are not planned for.
        InfeasibleBudgetError: No plan was found for the budget; the message says whether there is one.
    """
    condensed = condense(problem.graph, problem.costs)
    count = len(condensed.operators)
    try:
        return search.plan(problem, search.MAX_STATES if count <= MAX_SEARCHED else 0)
    except search.TooLargeError:
        if count > MAX_OPERATORS:
            reason = f"this graph has {count} operators, and {MAX_OPERATORS} are the most"
            raise search.TooLargeError(reason) from None
    _refuse(condensed)
    return _Proofs(problem, condensed).solutions()


def _refuse(condensed: Condensed) -> None:
    """Raise InvalidOptionError where the programme would hold one instance of a value that needs two."""
    for operator in condensed.operators:
        if operator.must_repeat and any(condensed.pinned[buffer] for buffer in operator.makes):
            node = condensed.graph.nodes[operator.members[0]].name
            problem = f"'exact' cannot plan what is ordered for {node!r}, which is returned; take 'auto'."
            raise InvalidOptionError("planner", problem)


class _Proofs:
    """Solutions for the budgets of a problem, within a time limit."""

    def __init__(self, problem: Problem, condensed: Condensed) -> None:
        self.problem = problem
        self.condensed = condensed
        self.bounds = Bounds(problem.graph, problem.costs, problem.model)
        self.known = auto.plan(replace(problem, time_limit_seconds=None))
        limit = problem.time_limit_seconds
        self.end = time.monotonic() + (TIME_LIMIT_SECONDS if limit is None else limit)
        self.programmes: dict[tuple[int, ...], Programme] = {}

    def solutions(self) -> tuple[Solution, ...]:
        """The default, then a proof for each budget, then auto's."""
        default = replace(self.known[0], planner="exact")
        if math.isclose(default.seconds, self.problem.lower_bound_seconds, rel_tol=ROUNDING):
            default = replace(default, note=_note(default.seconds, default.seconds, True, "any order"))
        budgets = self.problem.budgets
        if budgets is not None:
            found = [self._proved(budget, 1) if budget != LEAST else self._least() for budget in budgets]
            return (default, *found, *self.known)
        lowest = self._lowest()
        row = dict.fromkeys([*(each.peak_bytes for each in self.known), lowest.peak_bytes])
        found = [lowest]
        for left, budget in _countdown(sorted(row)):
            found.append(self._proved(budget, left, found))
        return (default, *found)

    def _proved(self, budget: int, shares: int, others: Iterable[Solution] = ()) -> Solution:
        """The best solution for a budget, with what is proved of it."""
        known = [each for each in (*self.known, *others) if each.peak_bytes <= budget]
        best = min(known, key=lambda each: (each.seconds, each.peak_bytes), default=None)
        seconds, least = best.seconds if best is not None else math.inf, self.bounds.seconds(budget)
        if seconds == least or math.isclose(seconds, least, rel_tol=ROUNDING):
            answer, order = Answer(None, least, is_proved=True), "any order"
        else:
            stages, order = self._programme(best or self.known[-1]), "this order"
            answer = least_seconds(stages, budget, seconds, self._share(shares))
        found = self._solution(stages, answer.plan) if answer.plan is not None else None
        if found is not None and found.peak_bytes <= budget and found.seconds < seconds:
            best = found
        if best is None:
            raise self._infeasible(budget, answer, order)
        is_proved = answer.is_proved and (answer.plan is None or best is found)
        note = _note(best.seconds, max(least, answer.bound), is_proved, order)
        return replace(best, planner="exact", note=note)

    def _least(self) -> Solution:
        """The best solution for the lowest peak."""
        lowest = self._lowest()
        return self._proved(lowest.peak_bytes, 1, [lowest])

    def _lowest(self) -> Solution:
        """The solution with the lowest peak, with as much proof as half of the time allows."""
        best = min(self.known, key=lambda each: (each.peak_bytes, each.seconds))
        stages = self._programme(best)
        if best.peak_bytes == 0:
            return best
        answer = least_peak(stages, best.peak_bytes, self._share(2))
        found = self._solution(stages, answer.plan)
        return found if found is not None and found.peak_bytes < best.peak_bytes else best

    def _solution(self, stages: Programme, plan: Sequence[int] | None) -> Solution | None:
        """What a plan is as a schedule; None for no plan, and for one that breaks the user's orders."""
        if plan is None:
            return None
        solution = self.problem.evaluate_needed(stages.condensed.schedule(plan), "exact")
        return solution if self.problem.allows(solution.schedule) else None

    def _share(self, shares: int) -> float:
        return max(0.0, self.end - time.monotonic()) / shares

    def _programme(self, solution: Solution) -> Programme:
        """The programme of the order in which a solution first runs the operators."""
        place = {name: step for step, name in reversed(list(enumerate(solution.schedule)))}
        nodes = self.problem.graph.nodes
        first = [place.get(nodes[operator.members[0]].name) for operator in self.condensed.operators]
        order = tuple(index for _, index in sorted((at, i) for i, at in enumerate(first) if at is not None))
        if order not in self.programmes:
            self.programmes[order] = programme(self.condensed.reordered(order))
        return self.programmes[order]

    def _infeasible(self, budget: int, answer: Answer, order: str) -> InfeasibleBudgetError:
        lowest = min(each.peak_bytes for each in self.known)
        note = "no plan found in the time: a longer time_limit_seconds may find one"
        if answer.is_proved and answer.plan is None:
            note = f"infeasible (proved) in {order} of the operators"
        least = self.bounds.lowest_peak_bytes
        return InfeasibleBudgetError(budget, lowest, self.problem.graph.name, least, note)


def _countdown(budgets: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The budgets with the number of those that are left, and a bar if it takes long."""
    bar = tqdm(budgets, "proofs", disable=None, leave=False, delay=1.0)
    return ((len(budgets) - done, budget) for done, budget in enumerate(bar))


def _note(seconds: float, bound: float, is_proved: bool, order: str) -> str:
    """What is proved, in words."""
    if is_proved:
        return f"optimal for {order} of the operators"
    gap = f"{math.ceil((seconds / bound - 1) * 1000) / 1000:.1%}" if bound > 0 else "any share"
    return f"feasible, at most {gap} from optimal for {order} of the operators (bound {bound * 1e3:.4g} ms)"
