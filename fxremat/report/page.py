"""Page: what a plan does, as one HTML file that needs nothing else: no network, no other file.

For each graph it has the summary of the report; the timeline, with what is live at any step that one points
to (at the peak, to begin with); the frontier; and a table of what is kept and computed again. The pictures
are drawn here (``charts.py``) and the tables written here, so that without scripts, and on paper, all is
there but the pointing and the sorting. ``page.html`` is the template.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxremat.memory.timeline import KINDS, Life, Timeline
from fxremat.report.charts import Axis, Column, Frame, areas, bytes_axis, columns, line, round_axis
from fxremat.report.pictures import FilePath, Pictured, write
from fxremat.report.values import Group, by_place, mib, repeated, short

__all__ = ["page", "save_page"]

_TIMELINE = Frame(left=62, top=16, width=886, height=300)
_FRONTIER = Frame(left=62, top=16, width=640, height=240)
_ROWS = 20  # of what is live at a step; what is smaller is summed up


def save_page(path: FilePath, reports: Sequence[Pictured]) -> None:
    """Write the page of reports.

    Raises:
        InvalidOptionError: The file can't be written.
    """
    write(path, page(reports).encode())


def page(reports: Sequence[Pictured]) -> str:
    """The page of reports, as HTML."""
    import jinja2  # a moment's work, for pages alone

    template = (importlib.resources.files("fxremat.report") / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["mib"] = mib
    sections = [_Section.of(report) for report in reports]
    return environment.from_string(template).render(sections=sections, kinds=KINDS, rows=_ROWS)


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
class _Section:
    """What the page has of a graph."""

    report: Pictured
    frame: Frame
    axis: Axis
    shown: tuple[Column, ...]
    boundary: float
    areas: tuple[tuple[str, str], ...]
    baseline: str
    peak: int
    frontier: _Frontier
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, report: Pictured) -> _Section:
        timeline, baseline = report.timeline, report.baseline_timeline
        boundary = timeline.boundary / max(1, len(timeline.steps))
        shown = columns(timeline, boundary)
        lines = report.budget_bytes or 0, report.lowered_peak_bytes or 0
        axis = bytes_axis(max(timeline.peak_bytes, baseline.peak_bytes, *lines))
        peak = next((index for index, each in enumerate(shown) if each.step == timeline.peak_step), 0)
        return cls(
            report,
            _TIMELINE,
            axis,
            tuple(shown),
            boundary,
            tuple(areas(_TIMELINE, axis, timeline, shown)),
            line(_TIMELINE, axis, baseline, columns(baseline, boundary)),
            peak,
            _Frontier.of(report),
            tuple(by_place(report.values)),
        )

    @property
    def live_at_peak(self) -> list[Live]:
        """What is live at the plan's peak."""
        return _live_at(self.report.timeline)

    @property
    def live_at_baseline_peak(self) -> list[Live]:
        """What is live at the peak without fxremat."""
        return _live_at(self.report.baseline_timeline)

    @property
    def data(self) -> dict[str, Any]:
        """What the script needs to say what is live at the step of a column."""
        timeline = self.report.timeline
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
