"""Stored steps on disk: what is written is read, and whatever else is found is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxremat._torch import compilers
from fxremat.episode.trace import Candidate
from fxremat.graph.schedule import Schedule
from fxremat.step import stored
from fxremat.step.stored import Figures

FIGURES = Figures(0.5, 100, 90, 0.25)
LOW = Candidate(Schedule(("a", "b", "a")), 3.0, 1, 4, 5, frozenset({("inputs", 0), ("outputs", "x")}))
FAST = Candidate(Schedule(("a", "b")), 2.0, 3, 4, 5)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where steps are stored."""
    monkeypatch.setattr(stored, "folder", lambda: tmp_path / "steps")
    return tmp_path / "steps"


def keep() -> None:
    """Store steps in which the second call is either of two."""
    stored.keep([(-1, "one", LOW, "p"), (0, "one", FAST, "q"), (0, "two", FAST, "q")], FIGURES)


def test_what_is_kept_is_found() -> None:
    """By the graph that is called first, and by no other."""
    keep()
    found = stored.find("one")
    assert found is not None and found.figures == FIGURES
    assert (found.first.plan, found.first.policy) == (LOW, "p")
    assert {key: (each.plan, each.policy, each.next) for key, each in found.first.next.items()} == {
        "one": (FAST, "q", {}),
        "two": (FAST, "q", {}),
    }
    assert stored.find("two") is None


def test_many_calls_are_kept() -> None:
    """A step with a few thousand in a row, whose structure is as deep."""
    stored.keep([(before, "one", FAST, "q") for before in range(-1, 4999)], FIGURES)
    found = stored.find("one")
    assert found is not None
    call, count = found.first, 1
    while call.next:
        call, count = call.next["one"], count + 1
    assert count == 5000


OF_NO_USE = (
    "",
    "{",
    "[]",
    "{}",
    "[1]",
    '{"calls": [[0]]}',
    '{"calls": [], "plans": [], "figures": {}}',
    "\0",
)


@pytest.mark.parametrize("text", OF_NO_USE)
def test_a_file_of_no_use_is_none(place: Path, text: str) -> None:
    """Whatever is in it; and it can be written anew."""
    keep()
    (file,) = place.iterdir()
    file.write_text(text)
    assert stored.find("one") is None
    keep()
    assert stored.find("one") is not None
    assert list(place.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_is_no_error(place: Path) -> None:
    """Nothing is stored then."""
    place.write_text("")
    keep()
    assert stored.find("one") is None


def test_nothing_is_stored_where_caches_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own setting."""
    assert compilers.cache_folder() is not None
    with torch.compiler.config.patch(force_disable_caches=True):
        assert compilers.cache_folder() is None
    monkeypatch.setattr(stored, "folder", lambda: None)
    keep()
    assert stored.find("one") is None
