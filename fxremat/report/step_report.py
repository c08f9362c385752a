"""Step reports: what a training step of several graphs takes, call by call.

A StepReport is frozen values. See ``episode/trace.py`` for its terms. As a picture it is a timeline whose
steps are the forwards and the backwards, and what is between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from tabulate import tabulate

from fxremat.episode.trace import Moment
from fxremat.graph.places import Origin
from fxremat.memory.timeline import Life, Ran, Timeline
from fxremat.report.page import CallRow, Section, rendered
from fxremat.report.pictures import FilePath, write
from fxremat.report.report import Report
from fxremat.report.values import mib, more

__all__ = ["CallReport", "StepReport", "save_step_page"]

_KINDS = {
    "outside": "inputs, outputs and gradients of graphs, and what runs around them",
    "waiting": "held by calls whose backward is to come",
    "running": "the running call's",
}
_HEADINGS = ("kind", "bytes", "calls", "graph", "plan", "")
_ABOUT = (
    "Forwards and backwards in their order, and what is between them, not to scale in time. What is outside "
    "of plans was recorded."
)


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
        report: What was done to the graph with this plan; None where that is not compiled.
    """

    graph_name: str
    plan: int
    plans: int
    seconds: float
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    report: Report | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> tuple[str, str]:
        """The graph, and which of its plans."""
        return self.graph_name, f"{self.plan + 1} of {self.plans}"


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
        baseline_timeline: The same without fxremat.
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
    baseline_timeline: tuple[Moment, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The report as JSON; those of its graphs have their own."""
        calls = tuple(replace(call, report=None) for call in self.calls)
        fields = asdict(replace(self, calls=calls))
        for call in fields["calls"]:
            del call["report"]
        return json.dumps(fields)

    def save_html(self, path: FilePath) -> None:
        """Write the report as one HTML file: the step, then its graphs with their timelines (``page.py``).

        Raises:
            InvalidOptionError: The file can't be written.
        """
        save_step_page(path, [self])

    def sections(self, number: int) -> list[Section]:
        """What a page has of the step: its own section, of that number, and its graphs'."""
        graphs: dict[tuple[str, str], Section] = {}
        for call in self.calls:
            if call.report is not None and call.place not in graphs:
                graphs[call.place] = Section.of_graph(call.report, _title(call))
        numbers = {place: position for position, place in enumerate(graphs, number + 1)}
        is_settled = self.measured_plans_peak_bytes == self.peak_bytes
        step = Section(
            self._title(),
            self.summary(),
            self._drawn(self.timeline),
            self._drawn(self.baseline_timeline),
            _KINDS,
            _HEADINGS,
            _ABOUT,
            self.budget_bytes,
            self.measured_peak_bytes if is_settled else None,
            "the measured peak",
            calls=tuple(
                CallRow(
                    position,
                    _title(call),
                    numbers.get(call.place, 0),
                    (call.seconds, call.held_bytes, call.forward_bytes, call.backward_bytes),
                )
                for position, call in enumerate(self.calls)
            ),
        )
        return [step, *graphs.values()]

    def _drawn(self, moments: Sequence[Moment]) -> Timeline:
        """Moments as the steps of a timeline."""
        lives: list[Life] = []
        waiting: dict[int, Life] = {}
        for step, moment in enumerate(moments):
            lives.append(Life(Origin(""), "outside", moment.outside_bytes, step, step))
            if moment.call is not None:
                lives.append(Life(self._origin(moment.call), "running", moment.own_bytes, step, step))
            for call, size in moment.held_bytes.items():
                first = waiting[call].first if call in waiting else step
                waiting[call] = Life(self._origin(call), "waiting", size, first, step)
        steps = tuple(Ran(self._ran(moment), False, 0.0) for moment in moments)
        boundary = next((step for step, moment in enumerate(moments) if moment.is_backward), len(moments))
        found = sorted((*lives, *waiting.values()), key=lambda life: life.first)
        return Timeline(steps, boundary, tuple(life for life in found if life.bytes))

    def _ran(self, moment: Moment) -> Origin:
        if moment.call is None:
            return Origin("between calls")
        part = "backward" if moment.is_backward else "forward"
        return replace(self._origin(moment.call), name=f"{part} of call {moment.call}")

    def _origin(self, call: int) -> Origin:
        graph, plan = self.calls[call].place
        return Origin("", graph, plan)

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
                what = (f"{moment.call}", part, *call.place)
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


def save_step_page(path: FilePath, steps: Iterable[StepReport]) -> None:
    """Write the page of steps and their graphs.

    Raises:
        InvalidOptionError: The file can't be written.
    """
    sections: list[Section] = []
    for step in steps:
        sections += step.sections(len(sections) + 1)
    write(path, rendered(sections).encode())


def _title(call: CallReport) -> str:
    """The title of a graph with a plan."""
    graph, plan = call.place
    return graph if call.plans == 1 else f"{graph}, plan {plan}"


def _count(number: int, thing: str) -> str:
    """A number of things.

    >>> _count(1, "call"), _count(2, "call")
    ('1 call', '2 calls')
    """
    return f"{number} {thing}{'s' * (number != 1)}"
