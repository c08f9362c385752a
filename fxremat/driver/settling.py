"""Settling: which plan each call of a step gets, so that the step keeps the budgets of its graphs.

A budget is that of the step. Where graphs of one step have budgets of their own, each bounds the step's peak
as far as the plans of its own graphs can: they are chosen in turn, the tightest budget last, with the plans
of the others as they are by then.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fxremat.driver.options import Budget, Options, resolve_budget
from fxremat.driver.stored import Figures
from fxremat.episode.settle import settle
from fxremat.episode.trace import Call, Candidate, Trace, peak_bytes, timeline
from fxremat.errors import InfeasibleBudgetError

SLACK_BYTES = 512  # that a step may take beyond its budget, to which CUDA's allocator rounds every block
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
    def cautious_plan(self) -> Candidate:
        """The plan of a call about whose step nothing is known."""

    @property
    def baseline(self) -> Candidate:
        """What runs without fxremat."""

    @property
    def margin(self) -> float:
        """The part of a budget that is left free because the memory model is not exact."""

    def candidates(self, within_bytes: int | None) -> Sequence[Candidate]:
        """The plans to choose from, with that for a peak of its own if one is given and there is one."""

    def policy_of(self, plan: Candidate) -> str:
        """The text of the policy that a plan was compiled under."""


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
    graphs: Sequence[Graph], plans: Sequence[Candidate], trace: Trace, excess: float = 1.0
) -> Settled:
    """The plans of the calls of a step.

    Args:
        graphs: What each call runs.
        plans: And with which plan up to now.
        trace: The step.
        excess: How many times more than predicted was measured.

    Raises:
        InfeasibleBudgetError: No plans fit a budget, unless the graphs' options say ``on_error="fallback"``.
    """
    baselines = tuple(graph.baseline for graph in graphs)
    baseline_bytes = peak_bytes(trace, baselines)
    seconds = sum(each.seconds for each in baselines)
    found = Settled(baselines, None, None, baseline_bytes, seconds, baseline_bytes, seconds)
    if len(graphs) == 1 and _serves(graphs[0], plans[0], trace, baseline_bytes, excess):
        (graph,) = graphs
        size = resolve_budget(graph.options.budget, baseline_bytes)
        lowest = peak_bytes(trace, plans)
        least = plans[0].seconds
        return Settled(tuple(plans), graph.options.budget, size, baseline_bytes, seconds, lowest, least)
    for budget in _by_tightness({graph.options.budget for graph in graphs}, baseline_bytes):
        found = _within(budget, graphs, trace, found, excess)
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


def _serves(graph: Graph, plan: Candidate, trace: Trace, baseline_bytes: int, excess: float) -> bool:
    """Whether the plan that a graph has for itself is as good for its step, where nothing else runs."""
    if plan != graph.own_plan:
        return False
    budget_bytes = resolve_budget(graph.options.budget, baseline_bytes)
    if budget_bytes is not None:
        return excess * peak_bytes(trace, [plan]) <= budget_bytes + SLACK_BYTES
    moments = timeline(trace, [plan])  # its peak can't be lower; and that of the step, if it is at no other
    return all(
        each.peak_bytes <= SLACK_BYTES + max(m.peak_bytes for m in moments if m.call is not None)
        for each in moments
    )


def _by_tightness(budgets: set[Budget], baseline_bytes: int) -> list[Budget]:
    """Budgets, the tightest last."""
    sizes = {budget: resolve_budget(budget, baseline_bytes) for budget in budgets}
    return sorted(budgets, key=lambda each: (-(sizes[each] or 0), str(each)))


def _within(budget: Budget, graphs: Sequence[Graph], trace: Trace, before: Settled, excess: float) -> Settled:
    """The plans with those of a budget's graphs chosen; the others stay."""
    own = [graph for graph in graphs if graph.options.budget == budget]
    budget_bytes = allowed = resolve_budget(budget, before.baseline_peak_bytes)
    if allowed is not None:
        exact = min(1 / excess, 1 - max(graph.margin for graph in own))
        allowed = int(allowed * exact) + SLACK_BYTES
    choices = {each.number: each.candidates(allowed if len(graphs) == 1 else None) for each in own}
    calls = []
    for position, (graph, call) in enumerate(zip(graphs, trace.calls, strict=True)):
        number = graph.number
        if graph.options.budget != budget:
            number = OTHERS - position
            choices[number] = (before.plans[position],)
        calls.append(Call(number, call.charges))
    try:
        found = settle(Trace(tuple(calls), trace.events, trace.after_bytes), choices, allowed)
    except InfeasibleBudgetError as error:
        if any(graph.options.on_error == "raise" for graph in own):
            raise
        warnings.warn(f"fxremat leaves a step to PyTorch's partitioner: {error}", stacklevel=2)
        return before
    return Settled(
        tuple(choices[call.graph][choice] for call, choice in zip(calls, found.plans, strict=True)),
        budget,
        budget_bytes,
        before.baseline_peak_bytes,
        before.baseline_seconds,
        found.lowest_peak_bytes,
        found.lower_bound_seconds,
    )
