"""The scripts of bench/ start: what they take from the package by name is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(each.stem for each in BENCH.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports(name: str) -> None:
    """All but one do so with nothing but the packages of the tests."""
    if name == "pretrained":
        pytest.importorskip("transformers")
    assert importlib.import_module(name)


def test_every_part_of_the_ablation_is_there() -> None:
    """Each names something that auto has."""
    ablation = importlib.import_module("ablation")
    for part, owners in ablation.PARTS.items():
        for owner, name, _ in owners:
            assert hasattr(owner, name), (part, name)
