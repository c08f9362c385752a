"""Charts: the shapes of a page's pictures, in the units of its drawing, so that any browser shows the same.

A *column* stands for steps that follow each other, and shows the one of them with the most live bytes: a
graph of ten thousand steps has some hundred columns, and its peak is among them. Steps are equally wide, not
to scale in time. In a picture of two timelines the boundary of both is at one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxremat.memory.timeline import Timeline

__all__ = ["Axis", "Column", "Frame", "areas", "bytes_axis", "columns", "line", "round_axis"]

_MOST_COLUMNS = 480
_TICKS = 5  # about so many, at round numbers
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a picture has its curves: pixels from the left and the top."""

    left: float
    top: float
    width: float
    height: float

    def x(self, part: float) -> float:
        """The place of a part of the width, from the left."""
        return round(self.left + part * self.width, 2)

    def y(self, part: float) -> float:
        """The place of a part of the height, from the bottom."""
        return round(self.top + (1 - part) * self.height, 2)

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from 0, with round numbers on it.

    Attributes:
        most: The number at its end.
        ticks: Numbers, each with its text.
        unit: What the texts count.
    """

    most: float
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""

    def part(self, number: float) -> float:
        """Where a number is, as a part of the axis."""
        return number / self.most


def round_axis(most: float, unit: str = "", size: float = 1) -> Axis:
    """An axis to a number that is counted in units of a size.

    >>> round_axis(7.0).ticks
    ((0.0, '0'), (2.0, '2'), (4.0, '4'), (6.0, '6'))
    """
    rough = max(most, 1e-12) / size / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.8)
    count = int(most / size / step + 1e-9)
    ticks = tuple((number * step * size, f"{number * step:g}") for number in range(count + 1))
    return Axis(max(most, 1e-12) * 1.04, ticks, unit)


def bytes_axis(most: int) -> Axis:
    """An axis of bytes, in the unit that suits the most of them."""
    unit, size = next((unit, size) for unit, size in _UNITS if most >= size or size == 1)
    return round_axis(most, unit, size)


@dataclass(frozen=True, slots=True)
class Column:
    """Steps that are drawn as one.

    Attributes:
        step: The one with the most live bytes, which is shown.
        left: Where it begins, as a part of the width.
        right: Where it ends.
    """

    step: int
    left: float
    right: float


def columns(timeline: Timeline, boundary: float) -> list[Column]:
    """The columns of a timeline whose backward begins at that part of the width."""
    edges = list(_edges(timeline, boundary))
    groups: dict[int, list[int]] = {}
    for step in range(len(timeline.steps)):
        groups.setdefault(min(int(edges[step] * _MOST_COLUMNS), _MOST_COLUMNS - 1), []).append(step)
    live = timeline.live_bytes
    return [
        Column(max(group, key=lambda step: (live[step], -step)), edges[group[0]], edges[group[-1] + 1])
        for group in groups.values()
    ]


def _edges(timeline: Timeline, boundary: float) -> Iterable[float]:
    """Where each step begins, and where the last ends."""
    forward, count = timeline.boundary, len(timeline.steps)
    for step in range(count + 1):
        if step < forward:
            yield boundary * step / forward
        else:
            yield boundary + (1 - boundary) * (step - forward) / max(1, count - forward)


def line(frame: Frame, axis: Axis, timeline: Timeline, shown: Sequence[Column]) -> str:
    """The path of a timeline's live bytes."""
    live = timeline.live_bytes
    path = _steps(frame, [(each, axis.part(live[each.step])) for each in shown])
    return "M" + path[1:] if path else ""


def areas(
    frame: Frame, axis: Axis, timeline: Timeline, shown: Sequence[Column], kinds: Iterable[str]
) -> Iterable[tuple[str, str]]:
    """Those of the kinds that there are, each with the path of its bytes upon those of the kinds before."""
    below = [0] * len(timeline.steps)
    for kind in kinds:
        own = timeline.live_bytes_of(kind)
        if not any(own):
            continue
        above = [low + size for low, size in zip(below, own, strict=True)]
        upper = _steps(frame, [(each, axis.part(above[each.step])) for each in shown])
        lower = _steps(frame, [(each, axis.part(below[each.step])) for each in shown], backwards=True)
        yield kind, f"M{upper[1:]}{lower}Z"
        below = above


def _steps(frame: Frame, heights: Sequence[tuple[Column, float]], backwards: bool = False) -> str:
    """A path with a level for each column, columns at one level joined; it begins with L."""
    levels: list[tuple[float, float, float]] = []
    for column, height in heights:
        y = frame.y(height)
        if levels and levels[-1][2] == y:
            levels[-1] = (levels[-1][0], frame.x(column.right), y)
        else:
            levels.append((frame.x(column.left), frame.x(column.right), y))
    if backwards:
        levels = [(right, left, y) for left, right, y in reversed(levels)]
    return "".join(f"L{begin:g} {y:g}H{end:g}" for begin, end, y in levels)
