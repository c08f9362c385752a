"""Settling: which plan each call of a step gets, so that the step keeps the budgets of its graphs.

A budget is that of the step. Where graphs of one step have budgets of their own, each bounds the step's peak
as far as the plans of its own graphs can: they are chosen in turn, the tightest budget last, with the plans
of the others as they are by then; where these leave too little, with those of all larger budgets.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from fxremat.episode.room import Room
from fxremat.episode.settle import Settlement, settle
from fxremat.episode.tailor import Candidates, tailored
from fxremat.episode.trace import Call, Candidate, Trace, peak_bytes, timeline
from fxremat.errors import InfeasibleBudgetError
from fxremat.options.options import Budget, Options, resolve_budget
from fxremat.report.report import Report
from fxremat.step.stored import Figures

Found = TypeVar("Found")

USED = 0.95  # of what is allowed: a plan with a lower peak than that is taken if it costs no time
SLACK_BYTES = 512  # that a step may take beyond its budget, to which CUDA's allocator rounds every block
ALIKE = 0.01  # by how much better, in parts, others are that take the place of plans which are settled for
OTHERS = -1  # the number of the first graph whose plan stays as it is; that of the next is one less


class Graph(Protocol):
    """A graph of a step."""

    number: int
    key: str | None  # the same in another process that runs it under the same options; None if there is none
    name: str
    options: Options
    device: torch.device

    @property
    def first_plan(self) -> Candidate:
        """The plan that it was compiled with first."""

    @property
    def own_plan(self) -> Candidate | None:
        """The plan that it has for itself; None if it was compiled as a part of a step."""

    @property
    def is_corrected(self) -> bool:
        """Whether that plan is another than predictions ask for, because of what its code takes."""

    @property
    def overestimate_bytes(self) -> int:
        """By how much its own plan was predicted higher than its code is."""

    @property
    def cautious_plan(self) -> Candidate:
        """The plan of a call about whose step nothing is known."""

    @property
    def baseline(self) -> Candidate:
        """What runs without fxremat."""

    @property
    def margin(self) -> float:
        """The part of a budget that is left free because the memory model is not exact."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The plans to choose from."""

    def tailor(self, plan: Candidate, wanted: Room) -> Sequence[Candidate]:
        """Plans that fit into a room, or near to it, which ``candidates`` has from then on.

        Args:
            plan: The one in whose place another is wanted.
            wanted: The room.
        """

    def seen(self, plan: Candidate) -> Candidate:
        """A plan with what is known of it since the code of plans has shown more than was predicted."""

    def plan_within(self, allowed_bytes: int, peak: Callable[[Candidate], int]) -> Candidate:
        """The plan for a step in which nothing else is planned.

        Args:
            allowed_bytes: What the step's peak is to keep; that of the plan may be higher where none does.
            peak: The step's peak with a plan.
        """

    def policy_of(self, plan: Candidate) -> str:
        """The text of the policy that a plan was compiled under."""

    def report_of(self, plan: Candidate) -> Report | None:
        """What was done to the graph with a plan; None where that is not compiled."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step has settled for.

    Attributes:
        plans: The plan of each call.
        budget: The tightest budget, as it was given.
        budget_bytes: The same in bytes; None where it is no number.
        baseline_peak_bytes: The step's predicted peak without fxremat.
        baseline_seconds: And the time of its graphs.
        lowest_peak_bytes: The least peak that plans at hand can have.
        lower_bound_seconds: No choice among them takes less within the budget.
    """

    plans: tuple[Candidate, ...]
    budget: Budget
    budget_bytes: int | None
    baseline_peak_bytes: int
    baseline_seconds: float
    lowest_peak_bytes: int
    lower_bound_seconds: float


def settled(
    graphs: Sequence[Graph],
    plans: Sequence[Candidate],
    trace: Trace,
    excess: float = 1.0,
    has_settled: bool = False,
) -> Settled:
    """The plans of the calls of a step.

    Args:
        graphs: What each call runs.
        plans: And with which plan up to now.
        trace: The step.
        excess: How many times more than predicted was measured.
        has_settled: Whether these plans were settled for, and stay if there are hardly better ones.

    Raises:
        InfeasibleBudgetError: No plans fit a budget, unless the graphs' options say ``on_error="fallback"``.
    """
    baselines = tuple(graph.baseline for graph in graphs)
    baseline_bytes = peak_bytes(trace, baselines)
    seconds = sum(each.seconds for each in baselines)
    found = Settled(baselines, None, None, baseline_bytes, seconds, baseline_bytes, seconds)
    if len(graphs) == 1:
        (graph,) = graphs
        plan = _alone(graph, plans[0], trace, baseline_bytes, excess)
        if plan is not None:
            budget = graph.options.budget
            size, lowest = resolve_budget(budget, baseline_bytes), peak_bytes(trace, [plan])
            return Settled((plan,), budget, size, baseline_bytes, seconds, lowest, plan.seconds)
    step = _Step(graphs, trace, excess, plans if has_settled else None)
    budgets = _by_tightness({graph.options.budget for graph in graphs}, baseline_bytes)
    for place, budget in enumerate(budgets):
        found = _bounded(step, budget, budgets[:place], found)
    return found


def as_stored(
    graphs: Sequence[Graph], plans: Sequence[Candidate], trace: Trace, excess: float, figures: Figures
) -> Settled | None:
    """The plans of the calls as they are, which were stored; None if a step takes more with them than it may.

    Args:
        graphs: As of ``settled``.
        plans: As of ``settled``.
        trace: As of ``settled``.
        excess: As of ``settled``.
        figures: What was stored of them.
    """
    baselines = [graph.baseline for graph in graphs]
    baseline_bytes = peak_bytes(trace, baselines)
    seconds = sum(each.seconds for each in baselines)
    size = resolve_budget(figures.budget, baseline_bytes)
    allowed = figures.peak_bytes if size is None else size
    if excess * peak_bytes(trace, plans) > allowed + SLACK_BYTES:
        return None
    lowest, bound = figures.lowest_peak_bytes, figures.lower_bound_seconds
    return Settled(tuple(plans), figures.budget, size, baseline_bytes, seconds, lowest, bound)


def _alone(
    graph: Graph, plan: Candidate, trace: Trace, baseline_bytes: int, excess: float
) -> Candidate | None:
    """A plan for a graph that is all of its step but for what is outside; None where that is not so simple.

    If the one that it has is as good for the step, then this.
    """
    if graph.own_plan is None:
        return None
    budget_bytes = resolve_budget(graph.options.budget, baseline_bytes)
    if budget_bytes is None:
        return plan if plan == graph.own_plan and _is_highest(trace, plan) else None
    allowed = _allowed(budget_bytes, [graph], excess)

    def peak(candidate: Candidate) -> int:
        return peak_bytes(trace, [candidate])

    def fits(candidate: Candidate) -> bool:
        known = graph.overestimate_bytes if candidate == graph.own_plan else 0
        return excess * (peak(candidate) - known) <= budget_bytes + SLACK_BYTES

    is_used = peak(plan) > USED * allowed or plan.seconds <= graph.baseline.seconds or graph.is_corrected
    is_kept = fits(plan)
    if is_kept and is_used:
        return plan
    found = graph.plan_within(allowed, peak)
    if is_kept and plan.seconds <= found.seconds:
        return plan
    return found if fits(found) and _is_highest(trace, found) else None


def _is_highest(trace: Trace, plan: Candidate) -> bool:
    """Whether the peak of a step is where its only plan runs, and not around it."""
    moments = timeline(trace, [plan])
    highest = max(each.peak_bytes for each in moments if each.call is not None)
    return all(each.peak_bytes <= SLACK_BYTES + highest for each in moments)


def _allowed(budget_bytes: int, graphs: Iterable[Graph], excess: float) -> int:
    """The predicted peak that a step may have."""
    return int(budget_bytes * _part(graphs, excess))


def _part(graphs: Iterable[Graph], excess: float) -> float:
    """The part of a budget that a predicted peak may take."""
    return min(1 / excess, 1 - max(graph.margin for graph in graphs))


def _sizes(budget_bytes: int | None, graphs: Collection[Graph], excess: float) -> tuple[int | None, ...]:
    """The predicted peaks that a step may have, in the order in which they are tried; None for the least.

    What is allowed for rounding comes last where nothing of a budget is left free for errors of predictions.
    """
    if budget_bytes is None:
        return (None,)
    allowed = _allowed(budget_bytes, graphs, excess)
    is_exact = all(graph.margin == 0 for graph in graphs)
    return (allowed, allowed + SLACK_BYTES) if is_exact else (allowed + SLACK_BYTES,)


def _least_budget(peak: int, graphs: Collection[Graph], excess: float) -> int:
    """The budget under which a predicted peak is just allowed."""
    if _allowed(peak, graphs, excess) + SLACK_BYTES >= peak:
        return peak
    return math.ceil((peak - SLACK_BYTES + 1) / _part(graphs, excess))


def _first(find: Callable[[int | None], Found], sizes: Sequence[int | None]) -> Found:
    """What is found for the first of some sizes for which there is anything.

    Raises:
        InfeasibleBudgetError: There is nothing for the last.
    """
    *before, last = sizes
    for size in before:
        with contextlib.suppress(InfeasibleBudgetError):
            return find(size)
    return find(last)


def _by_tightness(budgets: set[Budget], baseline_bytes: int) -> list[Budget]:
    """Budgets, the tightest last."""
    sizes = {budget: resolve_budget(budget, baseline_bytes) for budget in budgets}
    return sorted(budgets, key=lambda each: (-(sizes[each] or 0), str(each)))


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose plans are chosen.

    Attributes:
        graphs: What each call runs.
        trace: Its model.
        excess: How many times more than predicted was measured.
        kept: The plans that were settled for before; None if none were.
    """

    graphs: Sequence[Graph]
    trace: Trace
    excess: float
    kept: Sequence[Candidate] | None


def _bounded(step: _Step, budget: Budget, larger: Sequence[Budget], before: Settled) -> Settled:
    """The plans with those of a budget's graphs chosen; with those of larger budgets, where they must."""
    try:
        return _within(step, budget, (budget,), before)
    except InfeasibleBudgetError as error:
        if larger:
            with contextlib.suppress(InfeasibleBudgetError):
                return _within(step, budget, (budget, *larger), before)
        if any(each.options.on_error == "raise" for each in step.graphs if each.options.budget == budget):
            raise
        warnings.warn(f"fxremat leaves a step to PyTorch's partitioner: {error}", stacklevel=2)
        return before


def _within(step: _Step, budget: Budget, chosen: Collection[Budget], before: Settled) -> Settled:
    """The plans with those of some budgets' graphs chosen; the others stay.

    Raises:
        InfeasibleBudgetError: None fit the budget.
    """
    own = {graph.number: graph for graph in step.graphs if graph.options.budget in chosen}
    budget_bytes = resolve_budget(budget, before.baseline_peak_bytes)
    sizes = _sizes(budget_bytes, own.values(), step.excess)
    choices = {number: each.candidates for number, each in own.items()}
    calls = []
    for position, (graph, call) in enumerate(zip(step.graphs, step.trace.calls, strict=True)):
        number = graph.number
        if number not in own:
            number = OTHERS - position
            choices[number] = (before.plans[position],)
        calls.append(Call(number, call.charges))
    trace = Trace(tuple(calls), step.trace.events, step.trace.after_bytes)
    found = None
    if step.kept is not None:
        at_most = math.inf if budget_bytes is None else budget_bytes / step.excess + SLACK_BYTES
        pairs = zip(calls, step.kept, strict=True)
        plans = tuple(each if call.graph in own else choices[call.graph][0] for call, each in pairs)
        found = _kept(plans, trace, choices, sizes, at_most)
    if found is None:

        def tailor(number: int, plan: Candidate, wanted: Room) -> Sequence[Candidate]:
            return own[number].tailor(plan, wanted)

        try:
            plans, found = _first(lambda size: tailored(trace, choices, size, tailor), sizes)
        except InfeasibleBudgetError as error:
            lowest = _least_budget(error.lowest_peak_bytes, own.values(), step.excess)
            raise InfeasibleBudgetError(budget_bytes or 0, lowest, "the step") from None
    return replace(
        before,
        plans=plans,
        budget=budget,
        budget_bytes=budget_bytes,
        lowest_peak_bytes=found.lowest_peak_bytes,
        lower_bound_seconds=found.lower_bound_seconds,
    )


def _kept(
    plans: tuple[Candidate, ...],
    trace: Trace,
    choices: Candidates,
    sizes: Sequence[int | None],
    at_most: float,
) -> Settlement | None:
    """What is to be said of plans that are settled for and stay; None if they don't.

    Args:
        plans: The plan of each call.
        trace: The step, as it was seen since.
        choices: The candidates of each graph.
        sizes: The predicted peaks that other plans may have.
        at_most: That which these may have.
    """
    peak, seconds = peak_bytes(trace, plans), sum(each.seconds for each in plans)
    if peak > at_most:
        return None
    try:
        found = _first(lambda size: settle(trace, choices, size), sizes)
    except InfeasibleBudgetError:
        return None
    is_better = found.seconds < seconds * (1 - ALIKE)
    if None in sizes:
        is_better = found.peak_bytes < peak * (1 - ALIKE)
    return None if is_better else replace(found, peak_bytes=peak, seconds=seconds)
