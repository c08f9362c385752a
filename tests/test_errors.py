"""errors: one family, builtin parents, fields kept, messages that say what to try."""

from __future__ import annotations

import pickle

import pytest

from fxremat.errors import (
    CaptureError,
    FxrematError,
    GraphError,
    InfeasibleBudgetError,
    InvalidOptionError,
    ModifiedInputError,
    ScheduleError,
)


@pytest.mark.parametrize(
    ("kind", "parent"),
    [
        (InvalidOptionError, ValueError),
        (InfeasibleBudgetError, MemoryError),
        (CaptureError, RuntimeError),
        (GraphError, ValueError),
        (ScheduleError, ValueError),
        (ModifiedInputError, RuntimeError),
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


@pytest.mark.parametrize(
    "error",
    [
        InvalidOptionError("budget", "is wrong.", ["x"]),
        InfeasibleBudgetError(1, 2),
        GraphError("mm", "it is late"),
        ScheduleError("mm", 3, "it is late"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: FxrematError) -> None:
    """An error that a worker process raises arrives with its message and its fields."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
