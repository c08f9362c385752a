"""given: which values are numbers, truth values and choices, and what is returned of them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fxremat import given
from fxremat.errors import InvalidOptionError

NO_NUMBERS = [True, np.True_, "1", b"1", [1], {}, 1j, torch.tensor(1), np.array(1), np.array([1, 2]), object]


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_is_an_int_whoever_made_it(value: Any) -> None:
    """NumPy's too."""
    read = given.whole(value)
    assert (type(read), read) == (int, 3)


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), np.float32(0.5), Fraction(1, 2)])
def test_an_amount_is_a_float_whoever_made_it(value: Any) -> None:
    """NumPy's too."""
    read = given.amount(value)
    assert (type(read), read) == (float, 0.5)


@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, -1, 10**400, -(10**400)], ids=lambda value: type(value).__name__
)
def test_what_is_no_number_in_the_range_is_none(value: Any) -> None:
    """Truth values, texts, tensors, arrays, and numbers that nothing can be counted in."""
    assert given.whole(value) is None
    assert given.amount(value) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, np.float32("nan"), -0.5])
def test_an_amount_is_finite_and_from_zero(value: Any) -> None:
    """Sums of amounts are numbers, too."""
    assert given.amount(value) is None


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}, np.array(["a", "b"]), torch.tensor([1, 2]), "A"])
def test_a_choice_is_one_of_the_texts(value: Any) -> None:
    """Of another type it is refused as a wrong text is, unhashable or not."""
    assert given.choice("letter", "a", ("a", "b")) == "a"
    with pytest.raises(InvalidOptionError, match=r"option 'letter': got .*expected a, b, a number\."):
        given.choice("letter", value, ("a", "b"), "a number")


@pytest.mark.parametrize("value", [None, 0, 1, "no", "True", np.True_, torch.tensor([1, 2])])
def test_a_flag_is_true_or_false(value: Any) -> None:
    """What only counts as one of them is refused."""
    assert given.flag("light", True) and not given.flag("light", False)
    with pytest.raises(InvalidOptionError, match=r"option 'light': got .*expected True, False"):
        given.flag("light", value)
