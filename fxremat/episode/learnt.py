"""Learnt: what is known of an episode once it has run, and how what several ranks know becomes one.

Ranks that train together run the same episode, each on a batch of its own. Of what they have seen the
highest counts, figure by figure: plans that keep the budget with that keep it on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.episode.trace import Call, Candidate, Event, Place, Trace, peak_bytes


@dataclass(frozen=True, slots=True)
class Learnt:
    """What is known of an episode.

    Attributes:
        trace: Its model.
        measured_bytes: The highest live bytes; None where they could not be measured.
        excess: How many times more that is than predicted for the plans that ran; 1 if it was less.
    """

    trace: Trace
    measured_bytes: int | None
    excess: float


def learnt(trace: Trace, measured_bytes: int | None, plans: Sequence[Candidate]) -> Learnt:
    """What is known of an episode, from its model, its peak, and the plans that ran."""
    predicted = peak_bytes(trace, plans)
    excess = measured_bytes / predicted if measured_bytes is not None and predicted else 1.0
    return Learnt(trace, measured_bytes, max(1.0, excess))


def merged(found: Sequence[Learnt]) -> Learnt:
    """The highest of each figure; the graphs' numbers are those of the first.

    Args:
        found: What is known of episodes with the same calls and events; at least one.
    """
    traces = [each.trace for each in found]
    calls = tuple(
        replace(of_ranks[0], charges=_highest(of_ranks))
        for of_ranks in zip(*(trace.calls for trace in traces), strict=True)
    )
    events = tuple(
        Event(
            of_ranks[0].call,
            of_ranks[0].is_backward,
            max(event.outside_bytes for event in of_ranks),
            max(event.between_bytes for event in of_ranks),
        )
        for of_ranks in zip(*(trace.events for trace in traces), strict=True)
    )
    after_bytes = max(trace.after_bytes for trace in traces)
    measured = [each.measured_bytes for each in found if each.measured_bytes is not None]
    excess = max(each.excess for each in found)
    return Learnt(Trace(calls, events, after_bytes), max(measured, default=None), excess)


def _highest(calls: Sequence[Call]) -> dict[Place, int]:
    """The charges of a call on several ranks."""
    places = dict.fromkeys(place for call in calls for place in call.charges)
    return {place: max(call.charges.get(place, 0) for call in calls) for place in places}
