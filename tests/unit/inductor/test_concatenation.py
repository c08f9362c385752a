"""Concatenations: what is computed right into them, and what their gradients take, by Inductor's code."""

from __future__ import annotations

import pytest
import torch
from concatenating import NETWORKS
from torch._inductor.utils import fresh_cache
from unseen import no_loops

import fxremat


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_least_memory_is_predicted(name: str) -> None:
    """The first plan's code takes what it was planned with, on a CPU."""
    module, inputs = NETWORKS[name]()
    with fresh_cache(), no_loops():
        torch.compile(module, backend="fxremat", options={"budget": "min"})(*inputs).backward()
    report = fxremat.reports()[-1]
    assert report.solution.peak_bytes == report.lowered_peak_bytes
