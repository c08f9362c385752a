"""Following the calls of a step, learning it, and settling its plans, with graphs that are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fxremat.episode.room import Room
from fxremat.episode.trace import Call, Candidate, Event, Trace
from fxremat.errors import InfeasibleBudgetError
from fxremat.graph.schedule import Schedule
from fxremat.options.options import Budget, Options
from fxremat.plots.step import plot_step
from fxremat.report.step_report import StepReport
from fxremat.step.family import MAX_RECORDINGS
from fxremat.step.settling import settled
from fxremat.step.step import Episode, Run, Steps

UNIT = 100_000  # bytes, so that what is allowed for rounding does not count


def plan(name: str, seconds: float, held: int, forward: int, backward: int) -> Candidate:
    """A plan whose sizes are in units."""
    return Candidate(Schedule((name,)), seconds, held * UNIT, forward * UNIT, backward * UNIT)


KEEPS = plan("keeps", 1.0, 10, 11, 12)
HALF = plan("half", 1.2, 5, 11, 12)
DROPS = plan("drops", 1.5, 1, 8, 13)


@dataclass(eq=False)
class Made:
    """A graph that is made up."""

    number: int
    budget: Budget
    on_error: str = "raise"
    own_plan: Candidate | None = None
    margin: float = 0.0
    key: str | None = None
    is_corrected: bool = False
    overestimate_bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("meta"))  # where nothing is recorded

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"graph {self.number}"

    @property
    def options(self) -> Options:
        """The user's options."""
        return Options(budget=self.budget, on_error=self.on_error)

    @property
    def first_plan(self) -> Candidate:
        """What it was compiled with."""
        return self.own_plan or DROPS

    cautious_plan = DROPS
    baseline = KEEPS

    def report_of(self, plan: Candidate) -> None:
        """Nothing is compiled."""

    def policy_of(self, plan: Candidate) -> str:
        """What compiled a plan."""
        return "made up"

    def plan_within(self, allowed_bytes: int, peak: Callable[[Candidate], int]) -> Candidate:
        """The fastest whose peak is low enough, or the lowest."""
        return next((each for each in self.candidates if peak(each) <= allowed_bytes), self.candidates[-1])

    def tailor(self, plan: Candidate, wanted: Room) -> Sequence[Candidate]:
        """There are no others."""
        return ()

    def seen(self, plan: Candidate) -> Candidate:
        """No code has shown anything."""
        return plan

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All its plans."""
        return KEEPS, HALF, DROPS


def run_step(steps: Steps, graphs: Sequence[Made], growth: float = 1.0) -> list[Candidate]:
    """A step in which each graph's forward runs in order, and their backwards in the reverse; the plans."""
    made: list[tuple[Episode, Run]] = []
    for graph in graphs:
        episode, run = steps.begin(graph, (), growth)
        episode.forward_begins(run, ())
        episode.forward_ends(run, is_waiting=True)
        made.append((episode, run))
    for episode, run in reversed(made):
        episode.backward_begins(run, None, ())
        episode.backward_ended(run)
    torch.ones(1, requires_grad=True).sum().backward()  # a pass ends, and with it what is recorded
    return [run.plan for _, run in made]


def test_a_step_is_learnt_with_cautious_plans_and_then_settled() -> None:
    """Four calls of one graph: what fits best, in the second step and in all that follow."""
    steps = Steps()
    graph = Made(0, 30 * UNIT)
    assert run_step(steps, [graph] * 4) == [DROPS] * 4
    second = run_step(steps, [graph] * 4)
    assert second == run_step(steps, [graph] * 4) == run_step(steps, [graph] * 4)
    held = [each.held_bytes for each in second]
    assert all(
        sum(held[:place]) + each.backward_bytes <= 30 * UNIT + 512 for place, each in enumerate(second)
    )
    assert sum(each.seconds for each in second) < 4 * DROPS.seconds
    (report,) = steps.reports()
    assert report.peak_bytes <= 30 * UNIT < report.baseline_peak_bytes == 42 * UNIT
    assert report.measured_peak_bytes is None


def test_fractions_are_of_the_steps_peak() -> None:
    """And ``"min"`` is its least peak."""
    steps = Steps()
    run_step(steps, [Made(0, 0.5)] * 4)
    (report,) = steps.reports()
    assert report.budget_bytes == 21 * UNIT
    assert report.peak_bytes <= 21 * UNIT + 512
    least = Steps()
    run_step(least, [Made(0, "min")] * 4)
    (lowest,) = least.reports()
    assert lowest.peak_bytes == lowest.lowest_peak_bytes == report.lowest_peak_bytes


@pytest.mark.parametrize("margin", [0.0, 0.03])
def test_what_can_not_be_kept_is_refused_before_the_second_step(margin: float) -> None:
    """With the least budget, which then is kept; or the graphs run as without us."""
    steps = Steps()
    run_step(steps, [Made(0, 10 * UNIT, margin=margin)] * 3)
    with pytest.raises(InfeasibleBudgetError) as caught:
        run_step(steps, [Made(0, 10 * UNIT, margin=margin)] * 3)
    assert caught.value.budget_bytes == 10 * UNIT
    lowest = caught.value.lowest_peak_bytes
    allowed = Steps()
    graphs = [Made(0, lowest, margin=margin)] * 3
    run_step(allowed, graphs)
    run_step(allowed, graphs)
    assert allowed.reports()[0].peak_bytes <= lowest + 512
    left = Steps()
    lenient = [Made(0, 10 * UNIT, on_error="fallback")] * 3
    run_step(left, lenient)
    with pytest.warns(UserWarning, match="leaves a step"):
        assert run_step(left, lenient) == [KEEPS] * 3


def test_steps_that_begin_alike_are_settled_together() -> None:
    """A short step, and a longer one: the first calls can't know which it is."""
    steps = Steps()
    graph, other = Made(0, 30 * UNIT), Made(1, 30 * UNIT)
    run_step(steps, [graph] * 2)
    assert run_step(steps, [graph] * 2) == [KEEPS, KEEPS]
    met = run_step(steps, [graph, graph, other, other])
    assert met[2:] == [DROPS, DROPS]
    run_step(steps, [graph, graph, other, other])  # learnt now
    longer = run_step(steps, [graph, graph, other, other])
    assert run_step(steps, [graph] * 2) == longer[:2]
    for report in steps.reports():
        assert report.peak_bytes <= 30 * UNIT + 512
    assert len(steps.reports()) == 2


def test_the_plan_of_a_graph_alone_stays_if_it_serves_the_step() -> None:
    """Nothing is looked for then."""
    steps = Steps()
    graph = Made(0, 12 * UNIT, own_plan=KEEPS)
    assert run_step(steps, [graph]) == run_step(steps, [graph]) == [KEEPS]
    tight = Steps()
    narrow = Made(0, 11 * UNIT + UNIT // 2, own_plan=HALF)
    run_step(tight, [narrow])
    with pytest.raises(InfeasibleBudgetError):
        run_step(tight, [narrow])


def test_the_plan_of_a_graph_alone_gives_way_to_a_faster_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leaves much of the budget, another is looked for: what is found may be slower."""
    wide = 13 * UNIT
    assert run_step(steps := Steps(), [graph := Made(0, wide, own_plan=HALF)]) == [HALF]
    assert run_step(steps, [graph]) == [KEEPS]
    monkeypatch.setattr(Made, "plan_within", lambda *_: DROPS)
    steps, graph = Steps(), Made(0, wide, own_plan=HALF)
    assert run_step(steps, [graph]) == run_step(steps, [graph]) == [HALF]


def test_each_budget_bounds_the_step_as_far_as_its_own_graphs_can() -> None:
    """One is content; the other's graph gives way."""
    steps = Steps()
    wide, narrow = Made(0, 60 * UNIT), Made(1, 24 * UNIT)
    run_step(steps, [wide, narrow])
    plans = run_step(steps, [wide, narrow])
    assert plans[0] == KEEPS
    assert plans[0].held_bytes + plans[1].backward_bytes <= 24 * UNIT + 512


def test_graphs_with_larger_budgets_give_way_where_they_must() -> None:
    """By its own budget the first keeps all, which leaves too little for the other's."""
    steps = Steps()
    graphs = [Made(0, 23 * UNIT), Made(1, 20 * UNIT)]
    run_step(steps, graphs)
    assert run_step(steps, graphs) == [HALF, KEEPS]
    (report,) = steps.reports()
    assert report.budget_bytes == 20 * UNIT >= report.peak_bytes


def test_settled_plans_stay_unless_others_are_much_better() -> None:
    """Nothing is looked for where the step's outside differs a little; too high plans don't stay."""
    asked: list[Room] = []

    class Asked(Made):
        def tailor(self, plan: Candidate, wanted: Room) -> Sequence[Candidate]:
            asked.append(wanted)
            return ()

    def step(outside: int) -> Trace:
        order = ((0, False), (1, False), (1, True), (0, True))
        return Trace((Call(0), Call(0)), tuple(Event(*each, outside, outside) for each in order))

    graphs = [Asked(0, 20 * UNIT)] * 2
    first = settled(graphs, (DROPS, DROPS), step(0))
    assert first.plans == (HALF, KEEPS) and asked
    asked.clear()
    again = settled(graphs, first.plans, step(UNIT), has_settled=True)
    assert again.plans == first.plans and not asked
    assert settled(graphs, (DROPS, KEEPS), step(0), has_settled=True).plans == first.plans and asked
    lower = settled(graphs, first.plans, step(4 * UNIT), has_settled=True)
    assert lower.plans == (DROPS, KEEPS)


def test_what_is_outside_may_grow_with_the_inputs() -> None:
    """Plans for larger inputs than those of the step leave room for it."""
    steps = Steps()
    x = torch.ones(5 * UNIT // 4, requires_grad=True) * 1
    graph = Made(0, 20 * UNIT)

    def step(growth: float) -> list[Candidate]:
        episode, run = steps.begin(graph, (x,), growth)
        episode.forward_begins(run, (x,))
        episode.forward_ends(run, is_waiting=True)
        episode.backward_begins(run, None, ())
        episode.backward_ended(run)
        torch.ones(1, requires_grad=True).sum().backward()
        return [run.plan]

    step(1.5)
    assert 0 <= steps.reports()[0].outside_bytes - 5 * UNIT <= 64  # and the loss of ``step``
    assert step(1.5)[0].backward_bytes + 1.5 * 5 * UNIT <= 20 * UNIT + 512


def test_a_call_whose_results_are_dropped_waits_no_more() -> None:
    """The next call begins a step of its own; and a graph that is retained may run its backward twice."""
    steps = Steps()
    graph = Made(0, 30 * UNIT)
    episode, run = steps.begin(graph, (), 1.0)
    episode.forward_begins(run, ())
    episode.forward_ends(run, is_waiting=True)
    assert steps.waiting == (run,)
    episode.dropped(run)
    assert not steps.waiting
    run_step(steps, [graph])
    assert steps.current is not episode
    for _ in range(2):
        episode.backward_begins(run, None, ())


def test_a_call_that_nobody_comes_back_to_does_not_keep_a_step_going() -> None:
    """Its result is a variable of the program's until the next step sets it."""
    steps = Steps()
    graph, auxiliary = Made(0, 30 * UNIT), Made(1, 30 * UNIT)
    for _ in range(3):
        episode, run = steps.begin(graph, (), 1.0)
        episode.forward_begins(run, ())
        episode.forward_ends(run, is_waiting=True)
        _, unused = steps.begin(auxiliary, (), 1.0)
        episode.forward_begins(unused, ())
        episode.forward_ends(unused, is_waiting=True)
        episode.backward_begins(run, None, ())
        episode.backward_ended(run)
        assert len(episode.runs) == 2
    episode.abandon()  # or it would watch the backward passes of other tests


def test_recordings_come_to_an_end() -> None:
    """Steps that are never alike are not learnt for ever."""
    steps = Steps()
    graphs = [Made(number, 1000 * UNIT) for number in range(MAX_RECORDINGS + 3)]
    for last in graphs[1:]:
        for _ in range(2):
            run_step(steps, [graphs[0], last])
    assert steps.families[0].recordings == MAX_RECORDINGS


def test_a_report_tells_where_the_peak_is() -> None:
    """As tables, and as JSON."""
    steps = Steps()
    run_step(steps, [Made(0, 30 * UNIT)] * 4)
    (report,) = steps.reports()
    assert isinstance(report, StepReport)
    text = str(report)
    assert "step of 4 calls of 1 graph" in text
    assert "30" in text.splitlines()[1]
    assert sum(line.rstrip().endswith("peak") for line in report.table().splitlines()) >= 1
    assert "more rows" in report.table(limit=2)
    assert '"peak_bytes"' in report.to_json()


def test_a_step_is_drawn(tmp_path: Path) -> None:
    """As PNG and as SVG, with the line of its budget."""
    pytest.importorskip("matplotlib")
    steps = Steps()
    run_step(steps, [Made(0, 30 * UNIT)] * 4)
    (report,) = steps.reports()
    bitmap, vector = plot_step(report, tmp_path / "step.png")
    assert bitmap.stat().st_size > 1000
    assert "<svg" in vector.read_text(encoding="utf-8")


def test_tensors_that_are_given_to_the_first_graph_were_allocated_in_the_step() -> None:
    """If they are results; a batch is the caller's."""
    steps = Steps()
    result: Tensor = torch.ones(UNIT // 4, requires_grad=True) * 2
    episode, _ = steps.begin(Made(0, 30 * UNIT), (result, torch.ones(UNIT)), 1.0)
    assert episode.base_bytes == UNIT
