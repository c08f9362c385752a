"""errors: one family, builtin parents, fields kept, messages that say what to try."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from fxremat.errors import (
    CaptureError,
    FxrematError,
    GraphError,
    InfeasibleBudgetError,
    InvalidOptionError,
    ModifiedInputError,
    PlanFileError,
    PlanMismatchError,
    RatesError,
    ScheduleError,
    VerificationError,
    told,
)


@pytest.mark.parametrize(
    ("kind", "parent"),
    [
        (InvalidOptionError, ValueError),
        (InfeasibleBudgetError, MemoryError),
        (RatesError, ValueError),
        (CaptureError, RuntimeError),
        (GraphError, ValueError),
        (ScheduleError, ValueError),
        (ModifiedInputError, RuntimeError),
        (VerificationError, ArithmeticError),
        (PlanFileError, ValueError),
        (PlanMismatchError, ValueError),
    ],
)
def test_each_kind_has_a_builtin_parent(kind: type[Exception], parent: type[Exception]) -> None:
    """A caller who does not know fxremat catches each kind by the builtin that fits it."""
    assert issubclass(kind, FxrematError)
    assert issubclass(kind, parent)


def test_an_unknown_option_names_its_near_matches() -> None:
    """The known names that resemble the given one are a field and part of the message."""
    error = InvalidOptionError.unknown("budgte", ["budget", "planner", "compiler"])
    assert error.option == "budgte"
    assert error.near_matches == ("budget",)
    assert "Did you mean 'budget'?" in str(error)


def test_an_option_that_resembles_nothing_has_no_hint() -> None:
    """Without a near match the message asks nothing."""
    error = InvalidOptionError.unknown("xyzzy", ["budget"])
    assert error.near_matches == ()
    assert "Did you mean" not in str(error)


def test_a_bad_value_lists_what_is_allowed() -> None:
    """The message holds the value, the allowed ones, and the one that was probably meant."""
    error = InvalidOptionError.bad_value("planner", "sublinaer", ["auto", "sublinear"])
    assert error.option == "planner"
    assert error.near_matches == ("sublinear",)
    assert "got 'sublinaer', expected auto, sublinear." in str(error)


def test_an_infeasible_budget_says_what_works() -> None:
    """Both numbers are fields, and the message holds the budget to use instead."""
    error = InfeasibleBudgetError(1000, 2048, "graph 0/0")
    assert (error.budget_bytes, error.lowest_peak_bytes) == (1000, 2048)
    assert str(error).startswith("graph 0/0: no plan fits a budget of 1,000 bytes")
    assert "budget=2048" in str(error)


def test_a_graph_error_names_the_node_and_its_source() -> None:
    """The user's line follows the node's name where it is known."""
    assert GraphError("mm", "it is late", "model.py:7").node == "mm"
    assert str(GraphError("mm", "it is late", "model.py:7")) == "node 'mm' (model.py:7): it is late"
    assert str(GraphError("mm", "it is late")) == "node 'mm': it is late"


def test_a_schedule_error_names_the_node_and_its_step() -> None:
    """The step is None where something is absent."""
    error = ScheduleError("mm", 3, "it may not run again")
    assert (error.node, error.step) == ("mm", 3)
    assert str(error) == "schedule, 'mm' at step 3: it may not run again"
    assert str(ScheduleError("mm", None, "it never runs")) == "schedule, 'mm': it never runs"


def test_a_schedule_error_names_the_planner_that_made_the_schedule() -> None:
    """Where a planner of the user's is at fault."""
    error = ScheduleError("mm", 3, "it may not run again", "mine")
    assert str(error) == "schedule of planner 'mine', 'mm' at step 3: it may not run again"


@pytest.mark.parametrize(
    "value",
    ["9" * 5000, 10**5000, [10**5000], list(range(5000)), object()],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_any_size_is_shown_on_a_piece_of_a_line(value: object) -> None:
    """Numbers, too, that Python refuses to print."""
    error = InvalidOptionError.bad_value("budget", value, ["8GiB"])
    assert len(str(error)) < 200
    assert isinstance(InvalidOptionError.bad_value("n", 10**5000, ["1"]), ValueError)
    assert "got a number of 16610 bits" in str(InvalidOptionError.bad_value("n", 10**5000, ["1"]))


def test_an_error_of_the_users_is_told_with_its_line(tmp_path: Path) -> None:
    """That of the innermost frame that is neither Python's nor torch's: here of two, in a call of json."""
    path = tmp_path / "user.py"
    path.write_text("import json\n\ndef inner():\n    json.loads('[')\n\ndef outer():\n    inner()\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    with pytest.raises(ValueError) as caught:
        space["outer"]()
    assert told(caught.value).startswith("JSONDecodeError: Expecting value")
    assert told(caught.value).endswith(f"({path}:4)")


@pytest.mark.parametrize(
    "error",
    [
        InvalidOptionError("budget", "is wrong.", ["x"]),
        InfeasibleBudgetError(1, 2),
        RatesError(Path("pinned.json"), "it is late", "{}"),
        GraphError("mm", "it is late"),
        ScheduleError("mm", 3, "it is late"),
        VerificationError("graph 0/0", "output 0", 0.5, 0.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: FxrematError) -> None:
    """An error that a worker process raises arrives with its message and its fields."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
