"""options: what is accepted, what is refused, and which name was probably meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.errors import InvalidOptionError
from fxremat.options.options import Options, check_budget, resolve_budget
from fxremat.planners import PLANNERS

GIB = 2**30


# --- Budgets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        ("  8gib ", 8 * GIB),
        ("1.5 MiB", 3 * 2**19),
        ("2KiB", 2048),
        ("1TiB", 2**40),
        ("8GB", 8 * 10**9),
        ("3MB", 3 * 10**6),
        ("7kB", 7000),
        ("1TB", 10**12),
        ("8G", 8 * 10**9),
        ("8Gi", 8 * GIB),
        ("12B", 12),
        ("12 bytes", 12),
        ("8 byte", 8),
        ("8 MiByte", 8 << 20),
        ("8kbytes", 8000),
        ("1.5 gibibytes", 3 * 2**29),
        ("2 kilobyte", 2000),
        ("9007199254740993", 2**53 + 1),
        ("4096", 4096),
    ],
)
def test_a_text_is_a_number_of_bytes(text: str, expected: int) -> None:
    """GiB are powers of two, GB powers of ten; blanks and case do not matter."""
    assert resolve_budget(text, 0) == expected


@pytest.mark.parametrize(("fraction", "expected"), [(0.4, 400), (1.0, 1000), (0.0, 0)])
def test_a_float_is_a_fraction_of_the_peak(fraction: float, expected: int) -> None:
    """A float from 0 to 1 is taken of the peak without fxremat."""
    assert resolve_budget(fraction, 1000) == expected


def test_an_int_is_bytes() -> None:
    """An int means itself, however the peak is without fxremat."""
    assert resolve_budget(8 << 30, 1000) == 8 * GIB
    assert resolve_budget(1, 1000) == 1
    assert resolve_budget(0, 1000) == 0


@pytest.mark.parametrize("budget", [None, "min"])
def test_none_and_min_are_no_numbers(budget: str | None) -> None:
    """Both are budgets, and neither is a number of bytes."""
    assert resolve_budget(budget, 1000) is None


@pytest.mark.parametrize(
    "budget",
    [
        -1,
        -0.5,
        2.5,
        True,
        False,
        float("nan"),
        float("inf"),
        [8],
        {},
        "",
        "GiB",
        "8XiB",
        "-8GiB",
        "8 8",
        "most",
        "8 ytes",
        "8bb",
        "8 gibi",
        "1e999",
        "9" * 5000,
        "9" * 400 + "GiB",
        "9" * 5000 + "GiB",
        10**400,
        10**5000,
        2**63,
        1e308,
        np.array([1, 2]),
        np.array(["min"]),
        torch.tensor(8),
        torch.tensor([1, 2]),
        np.True_,
    ],
    ids=lambda budget: type(budget).__name__,
)
def test_other_budgets_are_refused(budget: Any) -> None:
    """What is no budget is an InvalidOptionError of the option budget."""
    with pytest.raises(InvalidOptionError) as caught:
        check_budget(budget)
    assert caught.value.option == "budget"
    with pytest.raises(InvalidOptionError):
        resolve_budget(budget, 1000)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (np.int64(8), 8),
        (np.uint8(8), 8),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.str_("8B"), "8B"),
    ],
)
def test_a_budget_of_numpys_is_one_of_pythons(budget: Any, expected: object) -> None:
    """What caches are keyed by is the same for both."""
    parsed = Options.parse({"budget": budget})
    assert (type(parsed.budget), parsed.budget) == (type(expected), expected)
    assert repr(parsed) == repr(Options.parse({"budget": expected}))


def test_a_fraction_above_one_is_probably_bytes() -> None:
    """The message shows the int to write."""
    with pytest.raises(InvalidOptionError, match="such as 8000000000"):
        check_budget(8e9)


def test_a_fraction_written_as_a_text_is_refused() -> None:
    """'0.4' would be 0 bytes; the message shows the accepted forms."""
    with pytest.raises(InvalidOptionError, match=r"a fraction of the peak such as 0\.4"):
        check_budget("0.4")


@given(st.integers(0, 2**50))
def test_an_int_and_its_text_agree(budget: int) -> None:
    """A number of bytes may be written as an int or as a text."""
    assert resolve_budget(str(budget), 0) == resolve_budget(budget, 0) == budget


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**40))
def test_a_smaller_fraction_is_no_larger_budget(one: float, other: float, peak: int) -> None:
    """Fractions keep their order, and 1.0 is the whole peak."""
    low, high = sorted((one, other))
    resolved = [resolve_budget(each, peak) for each in (low, high, 1.0)]
    assert resolved == sorted(resolved)
    assert resolved[-1] == peak


# --- The other options ----------------------------------------------------------------------------------


def test_the_defaults() -> None:
    """No options: no budget, the auto planner, Inductor, the roofline, and errors raised."""
    expected = Options(None, "auto", "inductor", "roofline", "raise", {})
    assert Options.parse() == Options.parse({}) == Options.parse(None, None) == expected


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_is_accepted_by_name(planner: str) -> None:
    """The planners' names are the registry's."""
    assert Options.parse({"planner": planner}).planner == planner


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compiler", "inductor"),
        ("compiler", "eager"),
        ("cost", "roofline"),
        ("cost", "measured"),
        ("cost", {"mm": 1.0}),
        ("on_error", "raise"),
        ("on_error", "fallback"),
        ("planner", len),
        ("budget", None),
        ("budget", "min"),
        ("budget", "8GiB"),
        ("budget", 0.4),
    ],
    ids=str,
)
def test_every_documented_value_is_accepted(name: str, value: Any) -> None:
    """A value that an option takes is kept as it was given."""
    assert getattr(Options.parse({name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("planner", "sublinaer", "sublinear"),
        ("planner", "atuo", "auto"),
        ("compiler", "indcutor", "inductor"),
        ("cost", "rofline", "roofline"),
        ("on_error", "fall_back", "fallback"),
    ],
)
def test_a_misspelt_value_is_named(name: str, value: str, near: str) -> None:
    """An unknown value is refused with the one that resembles it."""
    with pytest.raises(InvalidOptionError) as caught:
        Options.parse({name: value})
    assert caught.value.option == name
    assert near in caught.value.near_matches


@pytest.mark.parametrize("name", ["planner", "compiler", "cost", "on_error"])
@pytest.mark.parametrize("value", [None, 3, ["auto"], True, np.array([1, 2]), torch.tensor([1, 2])], ids=repr)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    """What is neither a known name nor a callable or mapping is an InvalidOptionError."""
    with pytest.raises(InvalidOptionError):
        Options.parse({name: value})


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("budgte", "budget"),
        ("planer", "planner"),
        ("max_autotun", "max_autotune"),
        ("epilog_fusion", "epilogue_fusion"),
    ],
)
def test_a_misspelt_name_is_named(given_name: str, meant: str) -> None:
    """A name that neither fxremat nor Inductor knows is refused, the nearest of both first."""
    with pytest.raises(InvalidOptionError) as caught:
        Options.parse({given_name: 1})
    assert caught.value.option == given_name
    assert caught.value.near_matches[0] == meant


def test_options_of_inductor_are_handed_on() -> None:
    """Names of Inductor are accepted, with dashes too, and kept apart from ours."""
    parsed = Options.parse({"max-autotune": True, "epilogue_fusion": False, "budget": 0.5})
    assert parsed.inductor == {"max_autotune": True, "epilogue_fusion": False}
    assert parsed.budget == 0.5


def test_a_mode_is_its_options() -> None:
    """A mode stands for options of Inductor, which options given beside it override."""
    parsed = Options.parse({"max_autotune": False}, mode="max-autotune")
    assert parsed.inductor["coordinate_descent_tuning"] is True
    assert parsed.inductor["max_autotune"] is False


def test_an_unknown_mode_is_refused() -> None:
    """A misspelt mode is named."""
    with pytest.raises(InvalidOptionError) as caught:
        Options.parse({}, mode="max-autotun")
    assert caught.value.option == "mode"
    assert caught.value.near_matches[0] == "max-autotune"


def test_what_was_given_is_left_alone() -> None:
    """Parsing does not empty the caller's dictionary."""
    options = {"budget": 0.5, "max_autotune": True}
    Options.parse(options)
    assert options == {"budget": 0.5, "max_autotune": True}


@pytest.mark.parametrize("value", [0, -1, 1e308, 10**400, float("nan"), "5", True, torch.tensor(1.0)])
def test_other_time_limits_are_refused(value: Any) -> None:
    """Among them one that no number of steps stands for."""
    with pytest.raises(InvalidOptionError) as caught:
        Options.parse({"time_limit_seconds": value})
    assert caught.value.option == "time_limit_seconds"


def test_a_time_limit_of_numpys_is_one_of_pythons() -> None:
    """As a budget is."""
    assert repr(Options.parse({"time_limit_seconds": np.int64(3)}).time_limit_seconds) == "3.0"


@pytest.mark.parametrize("mode", [["default"], {"default": 1}, 3, np.array([1, 2])])
def test_a_mode_of_another_type_is_refused(mode: Any) -> None:
    """Unhashable or not, as an option and as the argument."""
    for arguments in ({"options": {"mode": mode}}, {"mode": mode}):
        with pytest.raises(InvalidOptionError) as caught:
            Options.parse(**arguments)
        assert caught.value.option == "mode"


@pytest.mark.parametrize("name", ["ignore_checkpoints", "inplace"])
@pytest.mark.parametrize("value", [0, 1, "no", np.True_])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    """And nothing that counts as one of them."""
    with pytest.raises(InvalidOptionError, match="expected True, False"):
        Options.parse({name: value, "compiler": "eager"})


@pytest.mark.parametrize("options", [["budget"], [("budget", 1)], "budget", 3, set(), ()])
def test_options_are_a_mapping(options: Any) -> None:
    """Pairs are none, and neither is what is empty."""
    with pytest.raises(InvalidOptionError, match="expected a mapping from names to values"):
        Options.parse(options)


@pytest.mark.parametrize("name", [1, None, ("budget",)])
def test_the_name_of_an_option_is_a_text(name: Any) -> None:
    """Whatever else it is, it is shown."""
    with pytest.raises(InvalidOptionError, match="where the name of an option belongs"):
        Options.parse({name: 1})


def test_names_of_ours_are_taken_with_dashes() -> None:
    """As Inductor's are; a misspelt one suggests ours."""
    parsed = Options.parse({"on-error": "fallback", "time-limit-seconds": 3})
    assert (parsed.on_error, parsed.time_limit_seconds) == ("fallback", 3)
    with pytest.raises(InvalidOptionError) as caught:
        Options.parse({"on-eror": "fallback"})
    assert (caught.value.option, caught.value.near_matches[0]) == ("on-eror", "on_error")


def test_a_name_is_given_once() -> None:
    """With dashes and with underscores it is the same name."""
    with pytest.raises(InvalidOptionError, match="is given twice"):
        Options.parse({"max-autotune": True, "max_autotune": False})


def test_another_partitioner_is_refused() -> None:
    """It would be ignored: fxremat is the partitioner. That there is none is no contradiction."""
    with pytest.raises(InvalidOptionError, match="Give planner=") as caught:
        Options.parse({"custom_partitioner_fn": len})
    assert caught.value.option == "custom_partitioner_fn"
    assert Options.parse({"custom_partitioner_fn": None}).inductor == {"custom_partitioner_fn": None}


@pytest.mark.parametrize(
    "cost", [{1: 2.0}, {"a": -1}, {"a": float("nan")}, {"a": "1"}, {"a": None}, {"a": 1e308}, {"a": True}]
)
def test_a_cost_is_seconds_by_name(cost: Any) -> None:
    """Before there is a graph to look the names up in."""
    with pytest.raises(InvalidOptionError, match=r"option 'cost': got .*expected seconds from 0 by"):
        Options.parse({"cost": cost})


def test_seconds_of_numpys_are_those_of_pythons() -> None:
    """So that keys of caches are the same."""
    assert repr(Options.parse({"cost": {"mm": np.float32(1)}}).cost) == "{'mm': 1.0}"


def test_options_are_frozen() -> None:
    """Options are a value."""
    with pytest.raises(AttributeError):
        Options.parse().budget = 1  # type: ignore[misc]
