"""What planners share: the pause of the collector, and the solution that is at hand lowered."""

from __future__ import annotations

import gc

import pytest
from graphs import chain, problem

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


def test_the_latest_solution_is_at_hand() -> None:
    """The lowering of the latest solution is kept; that of an earlier one is made again, and equal."""
    stated = problem(chain(3))
    first, second = stated.identity("a test"), stated.identity("a test")
    binding, lowering = stated.lowered(second)
    assert stated.lowered(second) == (binding, lowering)
    assert stated.lowered(second)[0] is binding
    assert stated.lowered(first)[0] is not binding
    assert stated.lowered(first)[0] == binding
