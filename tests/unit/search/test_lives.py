"""profile: when the buffers of a plan are made and read last, on graphs drawn by hand."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import problem

from fxremat.graph.joint import JointGraph
from fxremat.predict import models
from fxremat.search.condensed import Condensed, condense
from fxremat.search.profile import live_bytes, lives, peak_bytes, profile
from fxremat.search.replay import without_unread

A, B, DB, DA = range(4)


def chain_of_two() -> Condensed:
    """x -> a -> b, the gradient of b from b, and that of a from the latter and a."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "db": ["b"], "da": ["db", "a"]},
        {"a": 1, "b": 2, "db": 4, "da": 8},
        backward=["db", "da"],
        backward_outputs=["da"],
    )
    return condense(graph, problem(graph).costs)


def test_lives_end_with_the_last_read_before_the_next_making() -> None:
    """A buffer that is made again has a life for each making; one that nothing reads ends where it begins."""
    found = lives(chain_of_two(), (A, B, DB, A, DA))
    assert found.buffer.tolist() == [A, A, B, DB, DA]
    assert found.run.tolist() == [0, 3, 1, 2, 4]
    assert found.last.tolist() == [1, 4, 2, 4, 4]
    assert found.is_read.tolist() == [True, True, True, True, False]
    assert found.is_again.tolist() == [False, False, False, True, False]


def test_lives_of_nothing() -> None:
    """An empty plan has no lives, and takes nothing."""
    assert lives(chain_of_two(), ()).run.tolist() == []
    assert peak_bytes(chain_of_two(), ()) == 0


def test_peak_of_a_plan() -> None:
    """What is kept counts up to its last read: a, db and da at the end; a, b and db before, if a is kept."""
    assert peak_bytes(chain_of_two(), (A, B, DB, DA)) == 1 + 4 + 8
    assert peak_bytes(chain_of_two(), (A, B, DB, A, DA)) == 1 + 4 + 8
    assert peak_bytes(chain_of_two(), (A, B, DB)) == 1 + 2 + 4 - 1


def test_a_run_goes_with_what_it_served() -> None:
    """A repetition that nothing reads is dropped, and then the one that only it reads."""
    assert without_unread(chain_of_two(), (A, B, A, B, A, B, DB, DA)) == [A, B, A, B, DB, DA]
    assert without_unread(chain_of_two(), (A, B, DB, A, B, DA)) == [A, B, DB, A, DA]


def test_live_bytes() -> None:
    """Each life counts from its first run to its last, both included."""
    live = live_bytes(4, np.array([1, 10, 100]), np.array([0, 1, 3]), np.array([1, 3, 3]))
    assert live.tolist() == [1, 11, 10, 110]


def returning() -> Condensed:
    """x -> a -> b, where the forward returns a, and the gradient reads both."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "t": ["b"], "db": ["t", "b"], "da": ["db", "a"]},
        {"a": 1, "b": 2, "t": 4, "db": 8, "da": 16},
        forward_outputs=["a", "t"],
        backward=["db", "da"],
        backward_outputs=["da"],
    )
    return condense(graph, problem(graph).costs)


@pytest.mark.parametrize("again", [(), (0,), (0, 1, 0)], ids=str)
def test_the_last_making_of_the_forward_is_returned(again: tuple[int, ...]) -> None:
    """As in the memory model: what is made again in the backward dies there, or at its last reader."""
    condensed = returning()
    graph = condensed.graph
    for plan in ((0, 1, *again, 2, 3, 4), (0, 1, 2, *again, 3, 4), (0, 1, 2, 3, *again, 4)):
        schedule = condensed.schedule(plan)
        assert profile(condensed, plan).live.tolist() == models.profile(graph, schedule).live_bytes.tolist()
