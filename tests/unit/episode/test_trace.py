"""The model of an episode: what is live when, given a plan for each call."""

from fxremat.episode.trace import TANGENTS, Call, Candidate, Event, Trace, own_bytes, peak_bytes, timeline
from fxremat.graph.schedule import Schedule

KEEPS = Candidate(Schedule(("a", "b")), 1.0, 10, 14, 12, frozenset({("inputs", 0)}))
DROPS = Candidate(Schedule(("a", "b", "a")), 1.5, 1, 8, 13, frozenset({("outputs", 0)}))


def trace(charges: int = 0) -> Trace:
    """Two calls of a graph, the second inside of the first, and a loss between."""
    call = Call(0, {("outputs", 0): charges})
    events = (
        Event(0, False, 2, 3),
        Event(1, False, 4, 4),
        Event(1, True, 6, 30),
        Event(0, True, 8, 7),
    )
    return Trace((call, call), events, after_bytes=9)


def test_a_call_is_live_beside_what_others_hold() -> None:
    """Outside bytes, what waiting calls hold, and the running call's own."""
    lives = [moment.peak_bytes for moment in timeline(trace(), (KEEPS, DROPS))]
    assert lives == [3, 2 + 14, 4 + 10, 4 + 10 + 8, 30 + 10 + 1, 6 + 10 + 13, 7 + 10, 8 + 12, 9]
    assert peak_bytes(trace(), (KEEPS, DROPS)) == 41


def test_an_output_that_a_plan_alone_holds_is_charged() -> None:
    """From the forward of the call to its backward, and only for a plan that holds it."""
    assert peak_bytes(trace(charges=5), (KEEPS, KEEPS)) == peak_bytes(trace(), (KEEPS, KEEPS)) == 50
    moments = timeline(trace(charges=5), (DROPS, DROPS))
    assert [moment.peak_bytes for moment in moments][4:8] == [30 + 6 + 6, 6 + 6 + 13 + 5, 7 + 6, 8 + 13 + 5]


def test_a_call_without_a_backward_holds_to_the_end() -> None:
    """Nothing tells that it has let go."""
    alone = Trace((Call(0),), (Event(0, False, 1, 1),), after_bytes=2)
    assert [moment.peak_bytes for moment in timeline(alone, (KEEPS,))] == [1, 15, 12]


def test_a_backward_lets_go_of_what_it_needs_no_more() -> None:
    """What nobody else holds counts in those parts of the backward that need it, or come before."""
    levels = ((4, frozenset({("inputs", 0), TANGENTS})), (7, frozenset({("inputs", 0)})), (9, frozenset()))
    plan = Candidate(Schedule(("a",)), 1.0, 10, 14, 9, frozenset({("inputs", 0)}), levels)
    for charges, highest in (
        ({}, 9),
        ({TANGENTS: 4}, 9),
        ({TANGENTS: 6}, 10),
        ({("inputs", 0): 3}, 10),
        ({("inputs", 0): 3, TANGENTS: 6}, 13),
        ({("outputs", 0): 50}, 9),
    ):
        assert own_bytes(Call(0, charges), plan, is_backward=True) == highest
        assert own_bytes(Call(0, charges), plan, is_backward=False) == 14
