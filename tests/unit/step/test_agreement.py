"""Ranks that agree on plans, and what becomes of it where one fails. They share a store in this process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from fxremat._torch.processes import Group
from fxremat.episode.learnt import Learnt
from fxremat.episode.trace import Trace
from fxremat.errors import InfeasibleBudgetError
from fxremat.step import agreement
from fxremat.step.agreement import MAX_LOOKS, Agreed, Post, Round
from fxremat.step.settling import Settled


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for long, and none changes how long others do."""
    monkeypatch.setattr(Round, "patience_seconds", 0.01)
    monkeypatch.setattr(agreement, "SETTLING_SECONDS", 0.05)


def learnt(peak_bytes: int) -> Learnt:
    """What is known of a step without calls."""
    return Learnt(Trace((), (), 0), peak_bytes, 1.0)


def posted(group: Group, digest: str = "a step", peak_bytes: int = 1) -> Round:
    """A round in which a rank has told of a step."""
    return Round(group, "a round", Post(digest, is_measured=True, learnt=learnt(peak_bytes)), ())


def settled(known: Learnt) -> Settled:
    """Plans whose figures show what they were chosen by."""
    assert known.measured_bytes is not None
    return Settled((), "min", None, known.measured_bytes, 0.0, known.measured_bytes, 0.0)


def never(_: Learnt) -> Settled:
    """What a rank must not call."""
    raise AssertionError("chosen twice")


def groups(store: Any = None) -> tuple[Group, Group]:
    """Two ranks."""
    store = distributed.HashStore() if store is None else store
    return Group(0, 2, store), Group(1, 2, store)


def outcome(found: Agreed | None) -> int:
    """By which peak plans were chosen."""
    assert found is not None and isinstance(found.settled, Settled)
    return found.settled.baseline_peak_bytes


def test_one_of_all_chooses_by_what_all_know() -> None:
    """The other takes that."""
    first, second = (posted(group, peak_bytes=size) for group, size in zip(groups(), (3, 5), strict=True))
    mine, others = first.agreed(settled), second.agreed(never)
    assert outcome(mine) == outcome(others) == 5
    assert mine is not None and not mine.is_partial and "same on all 2 ranks" in mine.note


def test_an_error_is_that_of_all() -> None:
    """None has plans then."""
    first, second = map(posted, groups())

    def infeasible(known: Learnt) -> Settled:
        raise InfeasibleBudgetError(1, 2, "the step")

    for found in (first.agreed(infeasible), second.agreed(never)):
        assert found is not None and isinstance(found.settled, InfeasibleBudgetError)


def test_ranks_with_other_steps_choose_for_themselves() -> None:
    """And say so."""
    first, second = groups()
    one, other = posted(first, "a step", 3), posted(second, "another", 5)
    for each, peak_bytes in ((one, 3), (other, 5)):
        with pytest.warns(UserWarning, match="others run another step"):
            assert outcome(each.agreed(settled)) == peak_bytes


def test_a_rank_that_never_tells_is_waited_for_a_while() -> None:
    """One look before each step, with patience before the first; then the other has plans of its own."""
    first, _ = groups()
    mine = posted(first)
    for _ in range(MAX_LOOKS - 1):
        assert mine.agreed(never) is None
    with pytest.warns(UserWarning, match="not all ranks have told of such a step"):
        assert outcome(mine.agreed(settled)) == 1
    assert Round.patience_seconds == 0.0


def test_a_rank_that_comes_late_finds_the_round_off() -> None:
    """What one has given up is over for all."""
    first, second = groups()
    mine = posted(first)
    mine.call_off()
    with pytest.warns(UserWarning, match="rank 1 has plans of its own"):
        assert outcome(posted(second, peak_bytes=5).agreed(settled)) == 5


def test_a_rank_that_is_interrupted_while_it_chooses_lets_others_go() -> None:
    """At once: it tells that there is nothing to come."""
    first, second = map(posted, groups())

    def interrupted(known: Learnt) -> Settled:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.agreed(interrupted)
    with pytest.warns(UserWarning, match="has not told them"):
        assert outcome(second.agreed(settled)) == 1


def test_a_rank_that_dies_while_it_chooses_is_waited_for_so_long() -> None:
    """A process that was killed tells nothing; the other goes on with plans of its own."""
    store = distributed.HashStore()
    _, second = map(posted, groups(store))
    assert Group(0, 2, store).first("a round/decided", agreement.ON) == agreement.ON
    assert Group(0, 2, store).first("a round/a step/settles", "0") == "0"  # and nothing more
    with pytest.warns(UserWarning, match="rank 1 has plans of its own: the rank that was to choose"):
        assert outcome(second.agreed(settled)) == 1


class Broken:
    """A store whose server is gone after some uses."""

    def __init__(self, uses: int) -> None:
        self._store = distributed.HashStore()
        self._uses = uses

    def __getattr__(self, name: str) -> Any:
        self._uses -= 1
        if self._uses < 0:
            raise RuntimeError("connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("uses", range(4, 10))
def test_a_store_that_breaks_leaves_each_rank_by_itself(uses: int) -> None:
    """Wherever it breaks: behind the two uses of each rank's post, and before the last of the first's."""
    first, _ = map(posted, groups(Broken(uses)))
    with pytest.warns(UserWarning, match="can't be used: connection reset by peer"):
        assert outcome(first.agreed(settled)) == 1
