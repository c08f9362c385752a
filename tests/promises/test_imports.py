"""``import fxremat``: it takes next to nothing beside torch, and all that is public can be had of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fxremat

LISTING = """
import json, sys
import torch
before = set(sys.modules)
import fxremat
added = sorted(set(sys.modules) - before)
fxremat.region
print(json.dumps([added, "fxremat.public" in sys.modules]))
"""


def test_torch_and_fxremat_are_all_that_is_imported() -> None:
    """What takes seconds, such as PyTorch's compiler and SciPy, comes with the first public name."""
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    added, is_loaded = json.loads(done.stdout)
    assert added == ["fxremat"] and is_loaded


def test_every_public_name_is_there() -> None:
    """By name, in ``dir()`` and for a star import."""
    assert "plan" in fxremat.__all__ and set(fxremat.__all__) <= set(dir(fxremat))
    assert [name for name in fxremat.__all__ if not hasattr(fxremat, name)] == []


def test_modules_are_there_unasked() -> None:
    """As attributes, whether somebody has imported them or not."""
    assert fxremat.measure.__name__ == "fxremat.measure"


@pytest.mark.parametrize("name", ["plam", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match=f"'fxremat' has no attribute '{name}'"):
        getattr(fxremat, name)
