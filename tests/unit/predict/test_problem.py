"""What planners share: the solutions that are at hand lowered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import chain, problem

from fxremat.predict import problem as problems


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
