"""Trace: what a training step is to its plans: calls of graphs in order, and what is live besides them.

Terms:
    call: one run of a compiled graph, its forward and its backward.
    waiting: of a call, whose forward has run and whose backward has not.
    episode: from a moment when no call is waiting to the next such moment.
    held: of bytes, what a plan keeps from its forward to its backward, but for the inputs and outputs of its
        graph, which others may hold as well.
    outside: all that is live and not held by a plan: inputs and outputs of graphs, tangents, gradients,
        and what the program around the graphs allocates.

Outside bytes do not depend on the plans, with one exception: a plan may hold an input or an output of its
graph longer than anybody else. A call's *charges* are the bytes of those that nobody else holds up to its
backward; a plan that holds one takes that many more, until its backward needs it no longer. So are tangents,
if nobody else holds them.

All bytes are above what was live when the episode began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from fxremat.graph.schedule import Schedule

Place = tuple[str, int | str]  # ``"inputs"`` or ``"outputs"`` of a graph, and the position among them
TANGENTS: Place = ("tangents", 0)  # all of them


Level = tuple[int, frozenset[Place]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of a graph, as the step around it sees it.

    Attributes:
        schedule: The execution order.
        seconds: Predicted time of the forward and the backward.
        held_bytes: What it holds between them.
        forward_bytes: The highest live bytes of the forward, its outputs and what it holds included, above
            what is live when it begins.
        backward_bytes: The highest live bytes of the backward, what it holds and the gradients included,
            above what is live outside when it begins (tangents among that), which stays.
        holds: The inputs and outputs of the graph that it holds as well.
        levels: The highest of the same in parts of the backward, each with those places whose memory is
            needed in that part or behind it; parts that can't be the highest are left out.
    """

    schedule: Schedule
    seconds: float
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    holds: frozenset[Place] = frozenset()
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True, slots=True)
class Prospects:
    """What a step may make of a graph.

    Attributes:
        plan: The plan that the graph is compiled with.
        baseline: What runs without fxremat.
        candidates: The plans to choose from; empty where they have not been looked for.
        margin: The part of a budget that is left free because the memory model is not exact.
    """

    plan: Candidate
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    margin: float


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an episode.

    Attributes:
        graph: Which graph runs, by its number.
        charges: Bytes of the inputs and outputs that nobody holds up to its backward, unless its plan does,
            and of the tangents that nobody but its backward holds.
    """

    graph: int
    charges: Mapping[Place, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """The forward or the backward of a call, and what comes before it.

    Attributes:
        call: The position of the call among the episode's.
        is_backward: Whether it is its backward.
        outside_bytes: What is live outside when it begins.
        between_bytes: The highest outside bytes since the event before it.
    """

    call: int
    is_backward: bool
    outside_bytes: int
    between_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """An episode.

    Attributes:
        calls: Its calls, in the order of their forwards.
        events: Their forwards and backwards, in order.
        after_bytes: The highest outside bytes behind the last event.
    """

    calls: tuple[Call, ...]
    events: tuple[Event, ...]
    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of an episode's timeline.

    Attributes:
        call: The call that runs; None between calls.
        is_backward: Whether its backward runs.
        outside_bytes: What is live outside.
        held_bytes: For each call that waits, what its plan holds, by the position of the call.
        own_bytes: The highest of the running call; 0 between calls.
    """

    call: int | None
    is_backward: bool
    outside_bytes: int
    held_bytes: Mapping[int, int]
    own_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes."""
        return self.outside_bytes + sum(self.held_bytes.values()) + self.own_bytes


def held_bytes(call: Call, candidate: Candidate) -> int:
    """What a plan holds between the forward and the backward of a call."""
    return candidate.held_bytes + charged_bytes(call, candidate)


def charged_bytes(call: Call, candidate: Candidate) -> int:
    """Bytes of the inputs and outputs that a plan alone holds."""
    return _bytes_of(call, candidate.holds)


def _bytes_of(call: Call, places: Set[Place]) -> int:
    return sum(size for place, size in call.charges.items() if place in places)


def own_bytes(call: Call, candidate: Candidate, is_backward: bool) -> int:
    """The highest bytes of a call's forward or backward, above what is live outside and held by others."""
    if not is_backward:
        return candidate.forward_bytes
    levels = candidate.levels or ((candidate.backward_bytes, candidate.holds | {TANGENTS}),)
    return max(highest + _bytes_of(call, needed) for highest, needed in levels)


def timeline(trace: Trace, plans: Sequence[Candidate]) -> tuple[Moment, ...]:
    """What is live when, with one plan a call; between two events the highest moment counts.

    Args:
        trace: The episode.
        plans: The plan of each call.
    """
    waiting: dict[int, int] = {}
    moments = []
    for event in trace.events:
        call, plan = trace.calls[event.call], plans[event.call]
        moments.append(Moment(None, False, event.between_bytes, dict(waiting), 0))
        waiting.pop(event.call, None)
        own = own_bytes(call, plan, event.is_backward)
        moments.append(Moment(event.call, event.is_backward, event.outside_bytes, dict(waiting), own))
        if not event.is_backward:
            waiting[event.call] = held_bytes(call, plan)
    moments.append(Moment(None, False, trace.after_bytes, dict(waiting), 0))
    return tuple(moments)


def peak_bytes(trace: Trace, plans: Sequence[Candidate]) -> int:
    """The highest live bytes of an episode, with one plan a call."""
    return max(moment.peak_bytes for moment in timeline(trace, plans))
