"""Tests in this folder run Inductor's CUDA code on fake tensors, and are skipped where that can't be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxremat._torch import fake_cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder, with the reason."""
    problem = fake_cuda.missing()
    for item in items if problem is not None else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=problem))
