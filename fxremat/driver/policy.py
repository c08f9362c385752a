"""Policy: which plan a graph gets when it is compiled.

By itself a graph gets the plan that its budget is served by (``WithinBudget``). As one of several in a step
it first gets a plan that takes little from the others (``Cautious``), for it is not known yet how many there
are; and then the one that the step settles for (``Given``). Where the user gives a file of
plans, it gets that of the file (``FromFile``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fxremat.driver.pipeline import Choice, bounded, bounds_of, decide, solve
from fxremat.episode.candidates import candidate, candidates
from fxremat.episode.trace import Candidate, Prospects
from fxremat.errors import InfeasibleBudgetError, ScheduleError
from fxremat.graph.schedule import Schedule
from fxremat.options.options import Budget, GivenPlanner, Options, is_size, resolve_budget
from fxremat.planfile.contents import PlanFile
from fxremat.planners import auto
from fxremat.predict.problem import Problem, Solution, margin
from fxremat.search.baseline import baseline_plan

MAY_RISE = 2  # how many times the least peak of its plans a cautious plan may take


class Policy(Protocol):
    """How a plan is chosen; its ``repr`` tells it from others in the keys of caches."""

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """The choice; ``within_bytes`` is a predicted peak that the plan is to keep besides."""
        ...


@dataclass(frozen=True, slots=True)
class WithinBudget:
    """The plan that serves a budget which the graph has for itself.

    Attributes:
        budget: The budget.
        planner: Which planner makes the plans.
        reads_code: Whether the code of the plan is held against the budget before it runs. Then nothing is
            left free for the error of a prediction.
    """

    budget: Budget
    planner: GivenPlanner
    reads_code: bool = False

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """The least time within the budget."""
        return decide(problem, self.budget, self.planner, within_bytes, is_exact=self.reads_code)


@dataclass(frozen=True, slots=True)
class MaybeAlone:
    """The plan that serves a budget if the graph is all of its step; else a cautious one.

    A part of the graph's own peak may be too little for it where the same part of the step's peak is not.

    Attributes:
        alone: The policy of a graph that is all of its step.
    """

    alone: WithinBudget

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """The least time within the budget, if that is possible.

        Raises:
            InfeasibleBudgetError: The budget is a number of bytes, and no plan fits it.
        """
        try:
            return self.alone.choose(problem, within_bytes)
        except InfeasibleBudgetError as error:
            return refused(self, problem, error)


def refused(policy: Policy, problem: Problem, error: InfeasibleBudgetError) -> Choice:
    """The plan of a graph that can't keep its budget: a cautious one, if the step around it may.

    Raises:
        InfeasibleBudgetError: It is all of its step, or the budget is a number of bytes.
    """
    if isinstance(policy, MaybeAlone) and not is_size(policy.alone.budget):
        return Cautious(policy.alone.planner).choose(problem, None)
    raise error


def least(policy: Policy) -> WithinBudget | None:
    """The policy of the least memory, whose code may keep a budget that nothing is predicted to keep.

    None where code is not read, or where the step around a graph may keep what the graph can't.
    """
    if isinstance(policy, MaybeAlone) and is_size(policy.alone.budget):
        policy = policy.alone
    if isinstance(policy, WithinBudget) and policy.reads_code:
        return replace(policy, budget="min")
    return None


def unread(policy: Policy) -> Policy:
    """The same where the code of a plan can't be held against the budget."""
    if isinstance(policy, MaybeAlone):
        return replace(policy, alone=replace(policy.alone, reads_code=False))
    return replace(policy, reads_code=False) if isinstance(policy, WithinBudget) else policy


@dataclass(frozen=True, slots=True, repr=False)
class Given:
    """A plan that is settled.

    Attributes:
        schedule: Its schedule.
        known_as: The text of the policy that it was once compiled under, whose code a cache may have.
        otherwise: What chooses where the schedule is none of the graph.
    """

    schedule: Schedule
    known_as: str = ""
    otherwise: Policy | None = None

    def __repr__(self) -> str:
        return self.known_as or f"Given({self.schedule!r})"

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """That plan.

        Raises:
            ScheduleError: It is none of the graph, and nothing is to be done otherwise.
        """
        try:
            return _choice(problem, problem.evaluate(self.schedule, "auto"))
        except ScheduleError:
            if self.otherwise is None:
                raise
        return self.otherwise.choose(problem, within_bytes)


@dataclass(frozen=True, slots=True)
class FromFile:
    """The plan that a file has for the graph.

    Attributes:
        plans: The file.
        budget: What the peak of the plan is held against.
        compiler: What compiles the graph.
    """

    plans: PlanFile
    budget: Budget
    compiler: str

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """That plan, with the figures of this process.

        Raises:
            PlanMismatchError: The file has none for the graph.
            ScheduleError: It is no execution of the graph, or one that its regions rule out.
            InfeasibleBudgetError: Its predicted peak is above the budget.
        """
        plan = self.plans.find(problem.graph, self.compiler)
        found = problem.check(problem.evaluate(plan.schedule_of(problem.graph), plan.solution.planner))
        note = f"the plan is one of {self.plans.title}, made for {plan.device or 'a graph without a device'}"
        choice = _choice(problem, replace(found, note=note))
        budget_bytes = resolve_budget(self.budget, choice.baseline.peak_bytes)
        if budget_bytes is not None and found.peak_bytes > budget_bytes:
            raise self.exceeded(budget_bytes, found.peak_bytes, problem.graph.name)
        return replace(choice, budget_bytes=budget_bytes)

    def exceeded(self, budget_bytes: int, peak_bytes: int, name: str) -> InfeasibleBudgetError:
        """The error of a plan that takes more than the budget."""
        note = (
            f"that is what the plan takes, one of {self.plans.title}; without option 'plan' another is made"
        )
        return InfeasibleBudgetError(budget_bytes, peak_bytes, name, note=note)


def alone(options: Options, reads_code: bool = False) -> WithinBudget | FromFile:
    """The policy of a graph that shares its budget with no other; ``reads_code`` as of ``WithinBudget``."""
    if options.plan is not None:
        return FromFile(options.plan, options.budget, options.compiler)
    return WithinBudget(options.budget, options.planner, reads_code)


@dataclass(frozen=True, slots=True)
class Cautious:
    """The plan that holds the least from the forward to the backward, and whose peak is not high.

    Attributes:
        planner: Which planner makes the plans.
        budget_bytes: The budget of the step; None where that is no number of bytes yet.
        waiting_bytes: What calls hold whose backward is to come. With other plans they may hold less, so that
            a plan which is too high beside them is none that the step can't have.
    """

    planner: GivenPlanner
    budget_bytes: int | None = None
    waiting_bytes: int = 0

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """That plan.

        Raises:
            InfeasibleBudgetError: No plan fits the budget, even if nothing else ran.
        """
        plans = candidates_of(problem, self.planner)
        least = min(map(peak_bytes, plans))
        if self.budget_bytes is not None and least > self.budget_bytes:
            raise InfeasibleBudgetError(self.budget_bytes, least, problem.graph.name, least)
        room_bytes = None if self.budget_bytes is None else self.budget_bytes - self.waiting_bytes
        chosen = problem.evaluate(cautious(plans, room_bytes).schedule, "auto")
        return replace(_choice(problem, chosen), candidates=plans)


def cautious(plans: Sequence[Candidate], room_bytes: int | None) -> Candidate:
    """The plan that holds the least, of those whose peak is not high."""
    least = min(map(peak_bytes, plans))
    room = MAY_RISE * least if room_bytes is None else max(least, min(MAY_RISE * least, room_bytes))
    low = [each for each in plans if peak_bytes(each) <= room]
    return min(low, key=lambda each: (each.held_bytes, peak_bytes(each), each.seconds))


def candidates_of(problem: Problem, planner: GivenPlanner) -> tuple[Candidate, ...]:
    """The plans of a graph that a step chooses from, improved like the planner's own."""
    improve = auto.improved if planner == "auto" else None
    return candidates(problem, lambda each: solve(each, planner), improve)


def prospects(choice: Choice) -> Prospects:
    """A plan as a step sees it, beside what else there is."""
    problem = choice.problem
    return Prospects(
        candidate(choice.as_run, choice.solution),
        candidate(problem.without, choice.baseline),
        choice.candidates,
        margin(problem),
    )


@dataclass(frozen=True, slots=True)
class Asking:
    """No plan at all: only the problem is wanted."""

    def choose(self, problem: Problem, within_bytes: int | None) -> Choice:
        """Raise Asked."""
        raise Asked(problem)


class Asked(BaseException):
    """The problem of a graph; no ``Exception``, since compilers wrap those."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def peak_bytes(plan: Candidate) -> int:
    """The higher peak of a plan's two parts."""
    return max(plan.forward_bytes, plan.backward_bytes)


def _choice(problem: Problem, solution: Solution) -> Choice:
    bounds = bounds_of(problem)
    baseline = baseline_plan(problem)
    return Choice(problem, baseline, None, (solution,), bounds, bounded(problem, bounds, solution))
