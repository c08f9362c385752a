"""Concatenations: what is computed right into them, and what their gradients take, by Inductor's code."""

from __future__ import annotations

import pytest
import torch
from concatenating import NETWORKS
from known import off_with
from torch._inductor.utils import fresh_cache
from unseen import no_loops

import fxremat

OFF = {"dense": [off_with("2.15")]}


@pytest.mark.parametrize("name", [pytest.param(each, marks=OFF.get(each, ())) for each in sorted(NETWORKS)])
def test_the_least_memory_is_predicted(name: str) -> None:
    """The first plan's code takes what it was planned with, on a CPU."""
    module, inputs = NETWORKS[name]()
    with fresh_cache(), no_loops():
        torch.compile(module, backend="fxremat", options={"budget": "min"})(*inputs).backward()
    report = fxremat.reports()[-1]
    assert report.solution.peak_bytes == report.lowered_peak_bytes
