"""Page: what a plan does, as one HTML file that needs nothing else: no network, no other file.

A page is *sections*, each with a timeline, and what is live at any step that one points to (at the peak, to
begin with). That of a graph has the summary of the report, too, the frontier, and a table of what is kept and
computed again; that of a training step (``step_report.py``) its calls, which link to their graphs. The
pictures are drawn here (``charts.py``) and the tables written here, so that without scripts, and on paper,
all is there but the pointing and the sorting. ``page.html`` is the template.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxremat.memory.timeline import KINDS, Life, Timeline
from fxremat.report.charts import Axis, Column, Frame, areas, bytes_axis, columns, line, round_axis
from fxremat.report.pictures import FilePath, Pictured, write
from fxremat.report.values import Group, by_place, mib, repeated, short

__all__ = ["CallRow", "Section", "page", "rendered", "save_page"]

_TIMELINE = Frame(left=62, top=16, width=886, height=300)
_FRONTIER = Frame(left=62, top=16, width=640, height=240)
_ROWS = 20  # of what is live at a step; what is smaller is summed up
_NODES = ("kind", "bytes", "values", "operator", "module", "source")
_ABOUT = "Steps in their order, not to scale in time; the backward of both begins at the same place."
_CODE = "the peak of the generated code"


def save_page(path: FilePath, reports: Sequence[Pictured]) -> None:
    """Write the page of reports.

    Raises:
        InvalidOptionError: The file can't be written.
    """
    write(path, page(reports).encode())


def page(reports: Sequence[Pictured]) -> str:
    """The page of reports, as HTML."""
    return rendered([Section.of_graph(report) for report in reports])


def rendered(sections: Sequence[Section]) -> str:
    """The page of sections, as HTML."""
    import jinja2  # a moment's work, for pages alone

    template = (importlib.resources.files("fxremat.report") / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["mib"] = mib
    return environment.from_string(template).render(sections=sections, rows=_ROWS)


@dataclass(frozen=True, slots=True)
class Live:
    """Lives of one kind at one place in the program, at a step."""

    kind: str
    operator: str
    module: str
    source: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A plan in the picture of the frontier."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The picture of the frontier."""

    frame: Frame
    x_axis: Axis
    y_axis: Axis
    path: str
    points: tuple[Mark, ...]
    plan: Mark
    baseline: Mark

    @classmethod
    def of(cls, report: Pictured) -> _Frontier:
        plan = report.timeline.peak_bytes, report.timeline.seconds
        baseline = report.baseline_timeline.peak_bytes, report.baseline_timeline.seconds
        points = sorted(report.frontier)
        every = [*points, plan, baseline]
        x_axis = bytes_axis(max(size for size, _ in every))
        y_axis = round_axis(max(seconds for _, seconds in every), "ms", 1e-3)

        def mark(size: int, seconds: float) -> Mark:
            text = f"{mib(size)}, {seconds * 1e3:.3f} ms"
            x, y = _FRONTIER.x(x_axis.part(size)), _FRONTIER.y(y_axis.part(seconds))
            return Mark(x, y, text)

        marks = tuple(mark(*point) for point in points)
        path = "".join(
            f"{'H' if index else 'M'}{each.x:g}{'V' if index else ' '}{each.y:g}"
            for index, each in enumerate(marks)
        )
        return cls(_FRONTIER, x_axis, y_axis, path, marks, mark(*plan), mark(*baseline))


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call of a training step in the table of its section.

    Attributes:
        number: Which call, from 0.
        graph: The title of its graph.
        target: The number of that graph's section, from 1; 0 where there is none.
        figures: Seconds, and bytes that it holds, at the peak of its forward, and at that of its backward.
    """

    number: int
    graph: str
    target: int
    figures: tuple[float, int, int, int]


@dataclass(frozen=True)
class Section:
    """What a page has of a graph or of a training step.

    Attributes:
        title: What stands above.
        summary: A few lines.
        timeline: What is live when.
        without: The same without fxremat.
        kinds: The kinds of lives, in the order in which they are stacked, and what they are.
        headings: Of the table of what is live: its kind, bytes and number, and three that tell its place.
        about: What the picture shows.
        budget_bytes: The line of dashes.
        dots_bytes: The line of dots.
        dots: What that is.
        frontier: The picture of the frontier, of a graph.
        groups: What is kept and computed again, of a graph.
        calls: The calls, of a step.
    """

    title: str
    summary: str
    timeline: Timeline
    without: Timeline
    kinds: Mapping[str, str] = field(default_factory=lambda: KINDS)
    headings: tuple[str, ...] = _NODES
    about: str = _ABOUT
    budget_bytes: int | None = None
    dots_bytes: int | None = None
    dots: str = _CODE
    frontier: _Frontier | None = None
    groups: tuple[Group, ...] = ()
    calls: tuple[CallRow, ...] = ()
    frame: Frame = _TIMELINE

    @classmethod
    def of_graph(cls, report: Pictured, title: str | None = None) -> Section:
        """That of a graph, whose title is its name if none is given."""
        return cls(
            report.graph_name if title is None else title,
            report.summary(),
            report.timeline,
            report.baseline_timeline,
            budget_bytes=report.budget_bytes,
            dots_bytes=report.lowered_peak_bytes,
            frontier=_Frontier.of(report),
            groups=tuple(by_place(report.values)),
        )

    @property
    def boundary(self) -> float:
        """Where the backward begins, as a part of the width."""
        return self.timeline.boundary / max(1, len(self.timeline.steps))

    @functools.cached_property
    def shown(self) -> list[Column]:
        """The columns."""
        return columns(self.timeline, self.boundary)

    @functools.cached_property
    def axis(self) -> Axis:
        """The axis of bytes."""
        lines = self.budget_bytes or 0, self.dots_bytes or 0
        return bytes_axis(max(self.timeline.peak_bytes, self.without.peak_bytes, *lines))

    @property
    def areas(self) -> list[tuple[str, str]]:
        """The kinds that there are, and their paths."""
        return list(areas(self.frame, self.axis, self.timeline, self.shown, self.kinds))

    @property
    def baseline(self) -> str:
        """The path of the step without fxremat."""
        return line(self.frame, self.axis, self.without, columns(self.without, self.boundary))

    @property
    def peak(self) -> int:
        """The column of the peak."""
        at = self.timeline.peak_step
        return next((index for index, each in enumerate(self.shown) if each.step == at), 0)

    @property
    def live_at_peak(self) -> list[Live]:
        """What is live at the plan's peak."""
        return _live_at(self.timeline)

    @property
    def live_at_baseline_peak(self) -> list[Live]:
        """What is live at the peak without fxremat."""
        return _live_at(self.without)

    @property
    def data(self) -> dict[str, Any]:
        """What the script needs to say what is live at the step of a column."""
        timeline = self.timeline
        places: dict[tuple[str, ...], int] = {}
        lives = [
            (places.setdefault(_place(life), len(places)), life.bytes, life.first, life.last)
            for life in timeline.lives
        ]
        steps = []
        for column in self.shown:
            ran = timeline.steps[column.step]
            words = (ran.origin.operator, ran.origin.name, ran.origin.module, short(ran.origin.source))
            steps.append((column.step, " · ".join(word for word in words if word)))
        return {
            "steps": steps,
            "places": list(places),
            "lives": lives,
            "left": [self.frame.x(column.left) for column in self.shown],
            "right": [self.frame.x(column.right) for column in self.shown],
            "live": [timeline.live_bytes[column.step] for column in self.shown],
        }


def _place(life: Life) -> tuple[str, str, str, str]:
    origin = life.origin
    return life.kind, origin.operator or origin.name, repeated(origin.module), short(origin.source)


def _live_at(timeline: Timeline) -> list[Live]:
    """What is live at the peak, by kind and place, the most bytes first."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for life in timeline.live_at(timeline.peak_step):
        groups.setdefault(_place(life), []).append(life.bytes)
    found = [Live(*place, len(sizes), sum(sizes)) for place, sizes in groups.items()]
    return sorted(found, key=lambda each: -each.bytes)
