"""Values: what of the forward is saved or computed again, by place, and how bytes and places are spelt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Group", "Value", "by_place", "mib", "more", "repeated", "short"]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the forward that the backward needs.

    Attributes:
        name: The node's name.
        operator: What computes it.
        module: The user's module that it comes from.
        source: The user's file and line.
        saved_bytes: Bytes held from the forward to the backward; 0 if it is not saved.
        recomputed: How often it is computed again.
        recomputed_bytes: Bytes that computing it again allocates, each time.
        extra_seconds: Predicted seconds of computing it again, all times together.
        reason: Why it was kept, where that was no choice.
    """

    name: str
    operator: str
    module: str
    source: str
    saved_bytes: int
    recomputed: int
    recomputed_bytes: int
    extra_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    """Values of one operator on one source line, in modules that repeat.

    Attributes:
        module: The module, the numbers of repeated ones left open.
        operator: What computes them.
        source: The user's file and line.
        count: How many values these are.
        saved_bytes: Bytes held from the forward to the backward.
        recomputed_bytes: Bytes that computing them again allocates, all times together.
        extra_seconds: Predicted seconds of that.
        reason: Why one was kept, where that was no choice.
    """

    module: str
    operator: str
    source: str
    count: int
    saved_bytes: int
    recomputed_bytes: int
    extra_seconds: float
    reason: str


def by_place(values: Iterable[Value]) -> list[Group]:
    """The values by module, operator and source line, those with most bytes first."""
    groups: dict[tuple[str, str, str], list[Value]] = {}
    for value in values:
        groups.setdefault((repeated(value.module), value.operator, short(value.source)), []).append(value)
    found = [
        Group(
            *place,
            len(group),
            sum(value.saved_bytes for value in group),
            sum(value.recomputed * value.recomputed_bytes for value in group),
            sum(value.extra_seconds for value in group),
            next((value.reason for value in group if value.reason), ""),
        )
        for place, group in groups.items()
    ]
    found = [group for group in found if group.saved_bytes or group.recomputed_bytes or group.extra_seconds]
    return sorted(
        found,
        key=lambda group: (
            -group.saved_bytes - group.recomputed_bytes,
            (group.module, group.operator, group.source, group.count),
        ),
    )


def repeated(module: str) -> str:
    """The path with the numbers of repeated modules left open.

    >>> repeated("blocks.11.mlp.0")
    'blocks.*.mlp.*'
    """
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def short(source: str) -> str:
    """``file:line`` without the directories above the file's own."""
    return "/".join(source.split("/")[-2:])


def mib(size: int) -> str:
    """Bytes as MiB for a person.

    >>> mib(3 << 19)
    '1.50 MiB'
    """
    return f"{size / 2**20:.2f} MiB"


def more(seconds: float, baseline_seconds: float) -> str:
    """How much longer a time is than another, in per cent.

    >>> more(1.5, 1.0), more(0.0, 0.0)
    ('+50.0%', '+0.0%')
    """
    return f"{seconds / baseline_seconds - 1 if baseline_seconds else 0.0:+.1%}"
