"""What operators allocate and free again, found by running each alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat._torch import graphs
from fxremat.device.calibrate import scratch_bytes

aten = torch.ops.aten


class Factored(nn.Module):
    """A factorisation without a gradient, which looks for errors behind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.ldl_factor(x.detach()).LD.sum() * self.scale


@pytest.mark.skipif(
    not graphs.has_registered_effect(aten._linalg_check_errors.default),
    reason="this torch knows no effect of the look for errors, and leaves it out of the graph",
)
def test_a_look_for_errors_has_scratch_memory() -> None:
    """PyTorch takes it for an effect and orders it by a token; the operator itself runs alone."""
    graph = fxremat.capture(Factored(), torch.eye(4).expand(256, 4, 4))
    found = [
        scratch
        for node, scratch in zip(graph.fx_nodes, scratch_bytes(graph), strict=True)
        if graphs.is_effectful(node.target)
    ]
    assert len(found) == 1 and found[0] >= 256  # a truth value for each matrix
