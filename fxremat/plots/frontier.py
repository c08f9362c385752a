"""The frontier as a plot: peak against time, and measured points of others upon it.

A *measured point* is the peak and the time of a step that really ran, with the time as a ratio to the step
without fxremat in the same run. Points of a *family* have a colour and a marker in common and are joined by
a thin line; what their names add to the family's stands beside them. The family "fxremat" is drawn in
fxremat's colour.

Between two plans of a frontier there is none: a budget between them is served by the lower one. So the line
has steps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxremat.driver.frontier import Frontier
from fxremat.errors import InvalidOptionError
from fxremat.plots.canvas import BLACK, COLOURS, VERMILION, canvas, check_plot, write_plot

__all__ = ["MeasuredPoint", "plot_frontier", "plot_points", "read_points"]

_MARKERS = "osD^vPX<>"
_OURS = "fxremat"


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A step that ran: what it is called, its peak, and its time as a ratio to the step without fxremat."""

    name: str
    peak_bytes: int
    time_ratio: float
    family: str = ""


def read_points(path: Path) -> list[MeasuredPoint]:
    """The measured points of a JSON file: a list of objects with the fields of `MeasuredPoint`.

    Fields of other names are ignored; ``family`` may be left out.

    Raises:
        InvalidOptionError: The file can't be read, or holds something else.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidOptionError("points", f"{str(path)!r} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidOptionError("points", f"{str(path)!r} is no JSON: {error}.") from error
    try:
        return [
            MeasuredPoint(
                str(each["name"]),
                int(each["peak_bytes"]),
                float(each["time_ratio"]),
                str(each.get("family", "")),
            )
            for each in listed
        ]
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        wanted = 'a list of {"name": ..., "peak_bytes": ..., "time_ratio": ...}'
        raise InvalidOptionError("points", f"{str(path)!r} should hold {wanted}.") from error


def plot_frontier(
    frontier: Frontier, path: Path, title: str, measured: Sequence[MeasuredPoint] = ()
) -> tuple[Path, Path]:
    """Draw a predicted frontier, its baseline, and measured points; returns the PNG and the SVG.

    Raises:
        InvalidOptionError: matplotlib is missing, or a file can't be written.
    """
    check_plot(path)
    drawn, (axes,) = canvas()
    scale, unit = _unit([frontier.baseline.peak_bytes, *(each.peak_bytes for each in measured)])
    line = sorted((point.peak_bytes / scale, frontier.time_ratio(point)) for point in frontier.points)
    style = {"color": VERMILION, "marker": ".", "drawstyle": "steps-post"}
    axes.plot(*zip(*line, strict=True), label="fxremat, predicted", **style)
    asked = [point for point in frontier.points if point.is_asked_for]
    for point in asked:
        where = (point.peak_bytes / scale, frontier.time_ratio(point))
        ring = {"color": VERMILION, "markersize": 12, "markerfacecolor": "none", "linestyle": ""}
        axes.plot(*where, marker="o", label="the budget's plan", **ring)
    baseline = frontier.baseline.peak_bytes / scale
    star = {"color": BLACK, "marker": "*", "markersize": 11, "linestyle": ""}
    axes.plot(baseline, 1.0, label="without fxremat, predicted", **star)
    axes.axhline(1.0, color="grey", linewidth=1, linestyle=":")
    axes.axvline(baseline, color="grey", linewidth=1, linestyle=":")
    _draw_families(axes, measured, scale)
    _finish(drawn, axes, title, unit, "time, as a ratio to the step without fxremat")
    return write_plot(drawn, path)


def plot_points(
    measured: Sequence[MeasuredPoint], path: Path, title: str, time_label: str
) -> tuple[Path, Path]:
    """Draw measured points alone, by family; returns the PNG and the SVG.

    Raises:
        InvalidOptionError: matplotlib is missing, or a file can't be written.
    """
    check_plot(path)
    drawn, (axes,) = canvas()
    scale, unit = _unit([each.peak_bytes for each in measured])
    axes.axhline(1.0, color="grey", linewidth=1, linestyle=":")
    _draw_families(axes, measured, scale)
    _finish(drawn, axes, title, unit, time_label)
    return write_plot(drawn, path)


def _draw_families(axes: Any, measured: Sequence[MeasuredPoint], scale: int) -> None:
    others = zip(itertools.cycle(COLOURS), itertools.cycle(_MARKERS), strict=False)
    for family in dict.fromkeys(each.family or each.name for each in measured):
        members = [each for each in measured if (each.family or each.name) == family]
        colour, marker = (VERMILION, "o") if family == _OURS else next(others)
        places = sorted((each.peak_bytes / scale, each.time_ratio) for each in members)
        thick = {"linewidth": 2} if family == _OURS else {"linewidth": 0.8, "linestyle": ":"}
        style = {"color": colour, "marker": marker, "markersize": 5, "alpha": 0.9, **thick}
        style["zorder"] = 2 if family == _OURS else 3  # fxremat's line hides no peer
        label = f"{family}, measured" if family == _OURS else family
        axes.plot(*zip(*places, strict=True), label=label, **style)
        for each in members:
            _name(axes, each, scale, colour)


def _name(axes: Any, point: MeasuredPoint, scale: int, colour: str) -> None:
    """Write what the point's name adds to its family's beside it."""
    text = point.name.removeprefix(point.family).strip(" ,") if point.family else ""
    if not text or point.family == _OURS:
        return
    where = (point.peak_bytes / scale, point.time_ratio)
    style = {"fontsize": "xx-small", "color": colour, "textcoords": "offset points"}
    axes.annotate(text, where, xytext=(4, 3), **style)


def _unit(sizes: Sequence[int]) -> tuple[int, str]:
    """The unit that suits the largest of the sizes."""
    return (2**30, "GiB") if max(sizes) >= 2**31 else (2**20, "MiB")


def _finish(drawn: Any, axes: Any, title: str, unit: str, time_label: str) -> None:
    axes.set_xlabel(f"peak ({unit})")
    axes.margins(x=0.1)  # room for names at the right
    axes.set_xlim(left=0)
    axes.set_ylabel(time_label)
    axes.set_title(title)
    axes.grid(True, which="major", alpha=0.3)
    drawn.legend(loc="outside lower center", ncols=3, fontsize="small")
