"""Step reports: what a training step of several graphs takes, call by call.

A StepReport is frozen values. See ``episode/trace.py`` for its terms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from fxremat.episode.trace import Moment
from fxremat.report.values import mib, more

__all__ = ["CallReport", "StepReport"]


@dataclass(frozen=True, slots=True)
class CallReport:
    """A call of a step.

    Attributes:
        graph_name: Which graph it runs.
        plan: Which of the plans that the graph runs with in this step, from 0.
        plans: How many these are.
        seconds: Predicted time of its forward and its backward.
        held_bytes: What its plan holds from the forward to the backward.
        forward_bytes: The highest bytes of its forward, above what is live when that begins.
        backward_bytes: The highest bytes of its backward, above what is live outside when that begins.
    """

    graph_name: str
    plan: int
    plans: int
    seconds: float
    held_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """A training step that this process ran: its calls, and what is live when.

    All bytes are above what was live when the step's first graph was called.

    Attributes:
        calls: Its calls, in the order of their forwards.
        budget: The budget as it was given; the tightest, where its graphs have several.
        budget_bytes: The budget in bytes; None where it is no number.
        baseline_peak_bytes: Predicted peak without fxremat.
        peak_bytes: Predicted peak with the plans that are settled.
        lowest_peak_bytes: The least that plans at hand can have for the highest peak of all steps that begin
            like this one, since these get their plans together.
        outside_bytes: The highest bytes that no plan has a say in.
        measured_peak_bytes: The peak of the last step that was recorded; None where none could be.
        measured_plans_peak_bytes: The peak that was predicted for the plans which ran then.
        seconds: Predicted time of the graphs.
        baseline_seconds: Predicted time of the graphs without fxremat.
        lower_bound_seconds: No choice among the plans at hand takes less within the budget.
        timeline: What is live when.
        notes: What is to be known besides.
    """

    calls: tuple[CallReport, ...]
    budget: int | float | str | None
    budget_bytes: int | None
    baseline_peak_bytes: int
    peak_bytes: int
    lowest_peak_bytes: int
    outside_bytes: int
    measured_peak_bytes: int | None
    measured_plans_peak_bytes: int
    seconds: float
    baseline_seconds: float
    lower_bound_seconds: float
    timeline: tuple[Moment, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    def summary(self) -> str:
        """A few lines: budget, peaks, time."""
        ratio = more(self.seconds, self.baseline_seconds)
        bound = self.seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0
        part = self.peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 1.0
        rows = [
            ("budget", self._budget()),
            ("predicted peak", f"{mib(self.peak_bytes)}, {part:.1%} of the peak without fxremat"),
            ("measured peak", self._measured()),
            ("outside of plans", f"up to {mib(self.outside_bytes)}"),
            ("lowest peak", mib(self.lowest_peak_bytes)),
            ("predicted time", f"{self.seconds * 1e3:.2f} ms, {ratio} against the time without fxremat"),
            ("lower bound", f"at most {bound:.1%} from the best choice among the plans at hand"),
            *(("note", note) for note in self.notes),
        ]
        return f"{self._title()}\n" + tabulate(rows, tablefmt="plain")

    def line(self) -> str:
        """Calls, budget, peaks and time on one line, for a log."""
        return (
            f"{self._title()}: budget {self._budget()}, predicted peak {mib(self.peak_bytes)} of "
            f"{mib(self.baseline_peak_bytes)} without fxremat, measured {self._measured()}, predicted time "
            f"{more(self.seconds, self.baseline_seconds)}"
        )

    def _title(self) -> str:
        graphs = len({call.graph_name for call in self.calls})
        return f"step of {_count(len(self.calls), 'call')} of {_count(graphs, 'graph')}"

    def table(self, limit: int | None = 40) -> str:
        """What is live at each forward and backward, in order.

        Args:
            limit: Rows to print; None for all. The row of the peak is marked.
        """
        peak = max((moment.peak_bytes for moment in self.timeline), default=0)
        rows = list(self._rows(peak))
        shown = rows if limit is None else rows[:limit]
        headers = ("", "runs", "graph", "plan", "outside", "held", "own", "live", "")
        columns = ("right", "left", "left", "right", "right", "right", "right", "right", "left")
        text = tabulate(shown, headers=headers, disable_numparse=True, colalign=columns)
        hidden = len(rows) - len(shown)
        return text + (f"\n... and {hidden} more rows" if hidden else "")

    def _rows(self, peak: int) -> Iterable[Sequence[str]]:
        for moment in self.timeline:
            held = sum(moment.held_bytes.values())
            mark = "peak" if moment.peak_bytes == peak else ""
            if moment.call is None:
                what: Sequence[str] = ("", "between calls", "", "")
            else:
                call = self.calls[moment.call]
                part = "backward" if moment.is_backward else "forward"
                what = (f"{moment.call}", part, call.graph_name, f"{call.plan + 1} of {call.plans}")
            sizes = (moment.outside_bytes, held, moment.own_bytes, moment.peak_bytes)
            yield (*what, *map(mib, sizes), mark)

    def _budget(self) -> str:
        if self.budget_bytes is None:
            return "min: the least peak at hand"
        return f"{self.budget!r} = {mib(self.budget_bytes)} for the step"

    def _measured(self) -> str:
        if self.measured_peak_bytes is None:
            return "not known yet, or another profiler was recording"
        is_settled = self.measured_plans_peak_bytes == self.peak_bytes
        when = "" if is_settled else f" with other plans ({mib(self.measured_plans_peak_bytes)} predicted)"
        return f"{mib(self.measured_peak_bytes)}{when}"

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"


def _count(number: int, thing: str) -> str:
    """A number of things.

    >>> _count(1, "call"), _count(2, "call")
    ('1 call', '2 calls')
    """
    return f"{number} {thing}{'s' * (number != 1)}"
