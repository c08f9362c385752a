"""What planners share: the pause of the collector, and the solutions that are at hand lowered."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from graphs import chain, problem

from fxremat.predict import problem as problems
from fxremat.predict.problem import collector_paused


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_it_was(is_enabled: bool) -> None:
    """It does not run inside, and runs afterwards if it ran before, whatever happens inside."""
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ValueError), collector_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_the_latest_solutions_are_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lowerings are kept, for equal ones and problems like theirs, too; of many steps fewer."""
    stated = problem(chain(3))
    first = stated.identity("a test")
    early, _ = stated.lowered(first)
    second = stated.mirror({"f1": 1}, "a test")
    binding, lowering = stated.lowered(second)
    assert stated.lowered(second) == (binding, lowering)
    assert stated.lowered(second)[0] is binding and stated.lowered(first)[0] is early
    monkeypatch.setattr(problems, "MAX_STEPS_AT_HAND", len(second.schedule) + 1)
    stated.mirror({"f2": 1}, "a test")
    assert stated.lowered(first)[0] is not early
    assert stated.lowered(first)[0] == early
    monkeypatch.undo()
    second = stated.mirror({"f1": 1}, "a test")
    binding, _ = stated.lowered(second)
    asked = replace(stated, budgets=(1,))
    again = asked.mirror({"f1": 1}, "another")
    assert asked.lowered(again)[0] is binding
    assert again == replace(second, planner="another")
