"""The pause of Python's collector."""

from __future__ import annotations

import gc

import pytest

from fxremat.graph.collector import collector_paused


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
