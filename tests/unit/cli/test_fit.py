"""fit: whether a step has room on a card."""

from __future__ import annotations

from fxremat.cli.fit import Fit

MIB = 1 << 20


def test_a_step_that_fits_says_what_is_left() -> None:
    """To the last byte."""
    fit = Fit("a card", 100 * MIB, 30 * MIB, 70 * MIB)
    assert fit.does_fit
    assert "it fits" in fit.table() and "0.00 MiB are left" in fit.table()


def test_a_step_that_does_not_fit_says_what_to_do() -> None:
    """And by how much it is too large."""
    fit = Fit("a card", 100 * MIB, 30 * MIB, 72 * MIB)
    assert not fit.does_fit
    assert "2.00 MiB too much. Ask for a lower --budget" in fit.table()
