"""From measured candidates to verdicts: what fxremat takes where each peer stands.

A *candidate* is a program that was trained: a peer, or fxremat at a budget. All candidates of a model take
their steps in rounds, one step of each in a round, so two of them are compared by the ratios of their times
within a round: the median of the ratios, with its 95 % confidence interval by order statistics (the number
of ratios below the true median is binomial; no distribution of the times is assumed). The *noise* is what
the same comparison makes of one program that is compiled and timed twice: how far from 1 the median is.

fxremat stands where a peer does if its measured peak is not above the peer's. Of its plans there that one
counts which is predicted to be the fastest, as it does when fxremat serves a budget: to pick the one that
came out fastest would be to pick the luckiest. It is *faster* or *slower* if 1 lies outside of the interval
and the median is farther from 1 than the noise; *equal* is the rest.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

__all__ = ["AGAIN", "OURS", "Candidate", "Row", "format_rows", "format_summary", "rows", "summary"]

OURS = "fxremat"
AGAIN = "again"  # the family of the second timing of the unit

Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Candidate:
    """A program and what it took.

    Attributes:
        name: What tables call it.
        family: Whose it is.
        problem: Empty, or why it was not timed: what it raised, or what of its step was wrong.
        peak_bytes: Measured peak of a step.
        seconds: Time of a step in each round.
        rank: Of fxremat's, the order in which they count: by predicted time, Inductor's before eager's.
        details: Further figures, for the JSON only.
    """

    name: str
    family: str
    problem: str = ""
    peak_bytes: int = 0
    seconds: tuple[float, ...] = ()
    rank: tuple[float, ...] = ()
    details: dict[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """A peer, and fxremat where it stands.

    Attributes:
        peer: The peer's name.
        peak_bytes: The peer's peak.
        time_ratio: The peer's time as a ratio to the unit's.
        ours: The name of fxremat's candidate.
        ours_peak_bytes: Its peak.
        ours_time_ratio: Its time as a ratio to the unit's.
        against_peer: Interval of its time as a ratio to the peer's: low, median, high.
        verdict: ``faster``, ``equal``, ``slower``; ``not reached`` where fxremat has no such low peak; or
            what was wrong with the peer.
    """

    peer: str
    peak_bytes: int
    time_ratio: float
    ours: str
    ours_peak_bytes: int
    ours_time_ratio: float
    against_peer: Interval
    verdict: str


def interval(ratios: Sequence[float]) -> Interval:
    """The median with the ends of its 95 % confidence interval; of few ratios, the extremes.

    >>> interval([1.0, 1.2, 1.1])
    (1.0, 1.1, 1.2)
    """
    ordered = sorted(ratios)
    below = 0  # how many of the ordered ratios are outside at each end
    chance = 0.5 ** len(ordered)
    while chance <= 0.025:
        below += 1
        chance += math.comb(len(ordered), below) * 0.5 ** len(ordered)
    below = max(0, below - 1)
    return ordered[below], statistics.median(ordered), ordered[-1 - below]


def compared(candidate: Candidate, other: Candidate) -> Interval:
    """The interval of a candidate's time as a ratio to another's, round by round."""
    return interval([a / b for a, b in zip(candidate.seconds, other.seconds, strict=True)])


def noise(candidates: Sequence[Candidate]) -> float:
    """How far from 1 the unit's second timing is from its first; 0 if it was timed once."""
    twice = [each for each in candidates if each.family == AGAIN and not each.problem]
    return max((abs(time_ratio(each, candidates) - 1) for each in twice), default=0.0)


def rows(candidates: Sequence[Candidate]) -> list[Row]:
    """A row for each peer. The first candidate is the unit of the ratios."""
    ours = [each for each in candidates if each.family == OURS and not each.problem]
    others = [each for each in candidates if each.family not in (OURS, AGAIN)]
    return [_row(peer, ours, candidates) for peer in others]


def time_ratio(candidate: Candidate, candidates: Sequence[Candidate]) -> float:
    """A candidate's time as a ratio to the unit's."""
    return compared(candidate, candidates[0])[1]


def _row(peer: Candidate, ours: Sequence[Candidate], candidates: Sequence[Candidate]) -> Row:
    nothing: Interval = (math.nan, math.nan, math.nan)
    if peer.problem:
        return Row(peer.name, peer.peak_bytes, math.nan, "", 0, math.nan, nothing, peer.problem)
    ratio = time_ratio(peer, candidates)
    fitting = [each for each in ours if each.peak_bytes <= peer.peak_bytes]
    if not fitting:
        return Row(peer.name, peer.peak_bytes, ratio, "", 0, math.nan, nothing, "not reached")
    best = min(fitting, key=lambda each: each.rank)
    against = compared(best, peer)
    verdict = _verdict(against, noise(candidates))
    own = time_ratio(best, candidates)
    return Row(peer.name, peer.peak_bytes, ratio, best.name, best.peak_bytes, own, against, verdict)


def _verdict(against: Interval, unclear: float) -> str:
    low, middle, high = against
    if low <= 1 <= high or abs(middle - 1) <= unclear:
        return "equal"
    return "faster" if middle < 1 else "slower"


# --- Tables -------------------------------------------------------------------------------------------


def format_rows(found: Iterable[Row]) -> str:
    """The rows as a table, bytes in MiB."""
    cells = [
        (
            row.peer,
            _mib(row.peak_bytes),
            _number(row.time_ratio),
            row.ours or "-",
            _mib(row.ours_peak_bytes),
            _number(row.ours_time_ratio),
            "-"
            if math.isnan(row.against_peer[1])
            else "{1:.3f} [{0:.3f}, {2:.3f}]".format(*row.against_peer),
            row.verdict[:60],
        )
        for row in found
    ]
    headers = "peer, peak MiB, time, fxremat, its peak, its time, its time / peer's, verdict"
    aligned = ("left", "right", "right", "left", "right", "right", "right", "left")
    return tabulate(cells, headers.split(", "), colalign=aligned, disable_numparse=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}" if size else "-"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


VERDICTS = ("faster", "equal", "slower", "not reached")


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """How often each verdict fell, and the mean of fxremat's times as ratios to the peers'."""
    counts = Counter(row.verdict if row.verdict in VERDICTS else "no peer" for row in found)
    ratios = [row.against_peer[1] for row in found if not math.isnan(row.against_peer[1])]
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
    return {**{name: counts[name] for name in (*VERDICTS, "no peer")}, "mean_time_against_peers": mean}


def format_summary(by_model: dict[str, Sequence[Row]]) -> str:
    """A line for each model, and one for all."""
    everything = [row for found in by_model.values() for row in found]
    cells = []
    for name, found in {**by_model, "all": everything}.items():
        own = summary(found)
        mean = own.pop("mean_time_against_peers")
        cells.append((name, *own.values(), "-" if mean is None else f"{mean:.3f}"))
    headers = ("model", *VERDICTS, "no peer", "mean time / peer's")
    return tabulate(cells, headers, colalign=("left", *["right"] * 6), disable_numparse=True)
