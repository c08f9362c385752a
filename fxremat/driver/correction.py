"""Correction: other plans for a graph, by what the code of its plans has shown.

Where the code of a plan holds more than the budget, the graph is planned again (``PlanAgain``), lower by the
excess. Where it holds much less than was predicted, a plan that is higher by what is left is tried, if that
saves time; and given up again, if its code holds more than the budget. Where the least memory is asked for,
and the code holds more than was predicted, other plans are looked at, and the one whose code holds the least
stays. What the code has shown (``inductor/learning.py``) is known to each plan that follows. A plan that is
preferred without a budget is first compiled as it would be without one, in Inductor's own order.

A budget in bytes that no plan is predicted to fit, or whose plans' code does not, is served like ``"min"``,
from the beginning: so it is refused only where ``"min"`` takes more, and what the error says works. Where the
least leaves much of it, one plan between is tried.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NoReturn

from fxremat._torch.lowered import GeneratedCode
from fxremat.driver.pipeline import Choice
from fxremat.driver.policy import FromFile, Given, Policy, least, refused, unread
from fxremat.errors import InfeasibleBudgetError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, bind
from fxremat.inductor.facts import like
from fxremat.inductor.generated import CodeMemory
from fxremat.inductor.learning import learn
from fxremat.options.options import Budget
from fxremat.predict.problem import Problem

MAX_CORRECTIONS = 3  # times that a graph is planned again, for a budget or for the least; each lowers it
LEFT = 0.03  # of a budget: what the code must leave of it for a faster plan to be tried
OFF = 0.01  # of a budget: by how much the code must be lower than was predicted for that
GAIN = 0.005  # of a step's time: what such a plan must save

_READ = "as read from the code that Inductor generates for its plan"

_log = logging.getLogger(__name__)


class PlanAgain(BaseException):
    """The code of a graph asks for another plan, which its correction has by now.

    No ``Exception``: the compilers on the way up wrap those in errors of their own.
    """


class Correction:
    """The plans of one graph, each chosen with what the code of those before has shown.

    Attributes:
        policy: How a plan is chosen that nothing has asked for.
        budget: The user's budget.
        name: What reports call the graph.
        choice: The plan that was chosen last, and what it was chosen from; None before, and where a cache had
            the graph.
        count: How often the graph was planned again.
    """

    def __init__(self, policy: Policy, budget: Budget, name: str, count: int = 0) -> None:
        self.policy = policy
        self.budget = budget
        self.name = name
        self.choice: Choice | None = None
        self.count = count
        self._names: tuple[str, ...] = ()  # of the graph's nodes, as it was traced last
        self._may_be_as_usual = True  # whether a plan that is preferred without a budget runs as without one
        self._most = count + MAX_CORRECTIONS  # how often it may be
        self._next: Choice | None = None  # what is to be compiled, if not what the policy chooses
        self._tried: set[Schedule] = set()  # what was compiled
        self._codes: list[tuple[GeneratedCode, CodeMemory]] = []  # of the plan that was chosen last
        self._taught: JointGraph | None = None  # with all that code has shown
        self._lowest: tuple[int, Choice, bool] | None = None  # any code's least peak, its plan, is_as_usual
        self._proven: Choice | None = None  # whose code keeps the budget, while a faster plan is tried
        self._short_bytes: int | None = None  # a budget that was too little: the least memory is looked for
        self._refused: InfeasibleBudgetError | None = None

    def renewed(self, graph: JointGraph) -> Correction:
        """What corrects a graph that was traced again; from the start if it has become another.

        A compiler may have settled a size that was dynamic, and then plans are none of the graph any more.
        """
        correction = self
        if self._names and self._names != graph.names:
            correction = Correction(self.policy, self.budget, self.name, self.count)
            correction._may_be_as_usual = self._may_be_as_usual
        correction._names = graph.names
        return correction

    def choose(self, problem: Problem) -> Choice:
        """The plan that the policy takes, or that the code has asked for.

        Raises:
            FxrematError: One of the family: there is none.
        """
        if self._taught is not None:
            problem = _informed(problem, self._taught)
        if self._refused is not None:
            choice = refused(self.policy, problem, self._refused)
        elif self._next is not None:
            choice = _again(self._next, problem)
        else:
            choice = self._first(problem)
        self.choice = choice
        self._tried.add(choice.solution.schedule)
        return choice

    def _first(self, problem: Problem) -> Choice:
        """The plan that the policy takes, or the one to begin with where it has none within the budget."""
        if self._short_bytes is None:
            try:
                return self.policy.choose(problem, None)
            except InfeasibleBudgetError as error:
                if least(self.policy) is None:
                    raise
                self._look_for_least(error.budget_bytes, self.count)
        return self._lowest_of(problem)

    @property
    def is_for_least(self) -> bool:
        """Whether the least memory is looked for: asked for, or since the budget was too little."""
        return self.budget == "min" or self._short_bytes is not None

    @property
    def is_as_usual(self) -> bool:
        """Whether the plan runs as it would without a budget, in Inductor's own order."""
        return self.choice is not None and self.choice.is_default and self._may_be_as_usual

    @property
    def peak_bytes(self) -> int:
        """What the code of the plan holds, as far as it was read."""
        return max(memory.peak_bytes for _, memory in self._codes)

    @property
    def surprises(self) -> tuple[tuple[GeneratedCode, CodeMemory], ...]:
        """The code of a plan that a step has settled for, if it holds more than was predicted."""
        if self.choice is None or not self._codes or not isinstance(self.policy, Given):
            return ()
        is_higher = self.peak_bytes > (1 + OFF) * self.choice.solution.peak_bytes
        return tuple(self._codes) if is_higher else ()

    def take(self, code: GeneratedCode, memory: CodeMemory) -> None:
        """Hold what the code of one of the two graphs says of its memory against the budget.

        Raises:
            PlanAgain: Another plan is to be compiled.
        """
        self._codes.append((code, memory))
        which = "backward" if code.is_backward else "forward"
        _log.debug("%s: the code up to the %s holds %d bytes", self.name, which, self.peak_bytes)
        if self.choice is not None and not isinstance(self.policy, Given):
            self._compare(self.choice, self.peak_bytes, code.is_backward)

    def go_unread(self) -> None:
        """Leave a part of the budget free where the code can't be held against it.

        Raises:
            PlanAgain: None was left so far.
        """
        policy = unread(self.policy)
        if policy != self.policy:
            self.policy = policy
            self._may_be_as_usual = False
            self._start_over(None)

    def _compare(self, choice: Choice, peak_bytes: int, is_whole: bool) -> None:
        """Go on with another plan, where the code asks for it."""
        is_higher = peak_bytes > (1 + OFF) * choice.solution.peak_bytes
        if isinstance(self.policy, FromFile):
            self._hold_against(self.policy, choice, peak_bytes)
        elif choice.candidates:
            is_new = is_whole and is_higher and self._taught is None
            if is_new and self._learn(choice) is not choice:
                self._start_over(None)
        elif self.is_for_least and is_whole:
            self._look_lower(choice, peak_bytes, is_higher)
        elif not self.is_for_least and choice.budget_bytes is not None:
            left = choice.budget_bytes - peak_bytes
            if left < 0:
                self._lower(choice, peak_bytes, choice.budget_bytes)
            elif is_whole and left > LEFT * choice.budget_bytes:
                self._raise(choice, peak_bytes, choice.budget_bytes)

    def _hold_against(self, policy: FromFile, choice: Choice, peak_bytes: int) -> None:
        """Refuse a given plan whose code holds more than the budget: there is no other."""
        if choice.budget_bytes is not None and peak_bytes > choice.budget_bytes:
            self._refused = policy.exceeded(choice.budget_bytes, peak_bytes, self.name)
            self._start_over(None)

    def _learn(self, choice: Choice) -> Choice:
        """The same plan, as it is predicted with what its code has shown; itself if that is nothing."""
        graph, problem = choice.as_run.graph, choice.problem
        taught = learn(graph, bind(graph, choice.solution.schedule), self._codes)
        if taught is graph:
            return choice
        self._taught = taught if graph is problem.graph else like(problem.graph, taught)
        return _again(choice, replace(problem, graph=self._taught, _latest={}))

    def _lower(self, choice: Choice, peak_bytes: int, budget_bytes: int) -> None:
        """Go on with a plan that is lower by what the code holds beyond the budget."""
        if self._proven is not None:
            self._most = self.count + 1  # no other is tried behind it
            self._start_over(self._proven)
        if self.is_as_usual:
            self._may_be_as_usual = False
            self._start_over(replace(choice, is_default=False))
        taught = self._learn(choice)
        predicted = taught.solution.peak_bytes
        found = self._found(taught, budget_bytes - max(0, peak_bytes - predicted))
        if found.solution.schedule in self._tried:
            found = self._found(taught, predicted - (peak_bytes - budget_bytes))
        if self.count == self._most or found.solution.schedule in self._tried:
            if least(self.policy) is None:
                self._refuse(budget_bytes, peak_bytes)
            self._look_for_least(budget_bytes, self.count + 1)
            self._start_over(None)
        self._start_over(found)

    def _found(self, choice: Choice, within_bytes: int | None) -> Choice:
        """Another plan for the same budget."""
        found = self.policy.choose(choice.problem, within_bytes)
        return replace(found, budget_bytes=choice.budget_bytes)

    def _refuse(self, budget_bytes: int, peak_bytes: int) -> NoReturn:
        """Go on with the error that the code of the best plan has such a peak."""
        self._refused = InfeasibleBudgetError(budget_bytes, peak_bytes, self.name, note=_READ)
        self._start_over(None)

    def _look_for_least(self, budget_bytes: int, count: int) -> None:
        """From the plan with this number on, do as for ``"min"``, as if nothing had been learnt before."""
        self._short_bytes = budget_bytes
        self._may_be_as_usual = True
        self._most = count + MAX_CORRECTIONS
        self._taught = None
        self._tried.clear()

    def _lowest_of(self, problem: Problem, within_bytes: int | None = None) -> Choice:
        """The plan that is predicted to take the least; where 0 is given, none is looked for beside it."""
        found = (least(self.policy) or self.policy).choose(problem, within_bytes)
        return replace(found, budget_bytes=self._short_bytes)

    def _look_lower(self, choice: Choice, peak_bytes: int, is_higher: bool) -> None:
        """Look for a plan whose code holds less, if this one's holds more than was predicted."""
        if self._short_bytes is not None and peak_bytes <= self._short_bytes:
            self._go_halfway(choice, peak_bytes, self._short_bytes)
            return
        is_as_usual, is_first = self.is_as_usual, self._lowest is None
        if self._lowest is None or peak_bytes < self._lowest[0]:
            self._lowest = peak_bytes, choice, is_as_usual
        if is_first and is_as_usual and is_higher:
            self._may_be_as_usual = False
            self._start_over(replace(choice, is_default=False))
        least_bytes, lowest, was_as_usual = self._lowest
        if is_higher and not is_as_usual and self.count < self._most:
            found = self._lowest_taught(choice)
            is_lower = found.solution.peak_bytes < (1 - OFF) * least_bytes
            if is_lower and found.solution.schedule not in self._tried:
                self._start_over(found)
        if self._short_bytes is not None:
            self._refuse(self._short_bytes, least_bytes)
        if lowest.solution.schedule != choice.solution.schedule or was_as_usual != is_as_usual:
            self._may_be_as_usual = was_as_usual
            self._start_over(lowest)

    def _go_halfway(self, choice: Choice, peak_bytes: int, budget_bytes: int) -> None:
        """Try a plan that is higher by half of what the least leaves of a budget that others exceed."""
        left = budget_bytes - peak_bytes
        if left <= LEFT * budget_bytes or self.count == self._most:
            return
        taught = self._learn(choice)
        found = self._found(taught, taught.solution.peak_bytes + left // 2)
        if found.solution.seconds < (1 - GAIN) * choice.solution.seconds:
            self._short_bytes = None
            self._proven = choice
            self._start_over(found)

    def _lowest_taught(self, choice: Choice) -> Choice:
        """The lowest plan by what the code has shown, new or known before; itself where that is nothing."""
        taught = self._learn(choice)
        if taught is choice:
            return choice
        others = (replace(taught, solution=each, is_default=False) for each in choice.solutions)
        known = (_again(other, taught.problem) for other in others)
        return min((self._lowest_of(taught.problem, 0), *known), key=_predicted_bytes)

    def _raise(self, choice: Choice, peak_bytes: int, budget_bytes: int) -> None:
        """Try a plan that is higher by what the code leaves of the budget, if that saves time.

        Unless less was predicted than it takes: all of the budget was planned with then.
        """
        seconds = choice.solution.seconds
        is_cheap = seconds <= (1 + GAIN) * choice.baseline.seconds
        is_as_told = choice.solution.peak_bytes - peak_bytes < OFF * budget_bytes
        if is_cheap or is_as_told or self.count == self._most:
            return
        taught = self._learn(choice)
        found = self._found(taught, taught.solution.peak_bytes + budget_bytes - peak_bytes)
        is_known = found.solution.schedule in self._tried
        if found.solution.seconds < (1 - GAIN) * seconds and not is_known:
            self._proven = choice
            self._start_over(found)

    def _start_over(self, choice: Choice | None) -> NoReturn:
        """Go on with another choice."""
        self._codes.clear()
        self.choice = None
        self._next = choice
        self.count += 1
        _log.debug("%s: planned again, correction %d", self.name, self.count)
        raise PlanAgain(f"{self.name} is planned again")


def _predicted_bytes(choice: Choice) -> int:
    return choice.solution.peak_bytes


def _informed(problem: Problem, taught: JointGraph) -> Problem:
    """The problem of a graph that was traced again, with what is known of it."""
    return replace(problem, graph=like(problem.graph, taught), _latest={})


def _again(choice: Choice, problem: Problem) -> Choice:
    """The same plan for a problem that may be known better."""
    choice = replace(choice, problem=problem)
    baseline = problem.without.evaluate(choice.baseline.schedule, choice.baseline.planner)
    found = choice.as_run.evaluate(choice.solution.schedule, choice.solution.planner)
    bound = min(choice.solution.lower_bound_seconds, found.seconds)
    solution = replace(
        choice.solution, peak_bytes=found.peak_bytes, seconds=found.seconds, lower_bound_seconds=bound
    )
    return replace(choice, baseline=baseline, solution=solution)
