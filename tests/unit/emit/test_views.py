"""Views in graphs that run as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


class Dropped(nn.Module):
    """A dropout whose gradient lies otherwise than PyTorch's tracing has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """A loss of (4, 5, 6)."""
        return self.dropout(self.linear(x)).transpose(0, 1).reshape(5, -1).tanh().sum()


def trained(**compiled: object) -> list[Tensor]:
    """The gradients of a step."""
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(4, 5, 6)
    (torch.compile(model, **compiled) if compiled else model)(x).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("budget", [None, "min"])
def test_views_of_what_lies_otherwise_than_it_was_traced(budget: str | None) -> None:
    """PyTorch's own backend "aot_eager" refuses it: "view size is not compatible with ..."."""
    expected = trained()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        trained(backend="aot_eager")
    torch._dynamo.reset()
    found = trained(backend="fxremat", options={"compiler": "eager", "budget": budget})
    assert len(found) == len(expected) == 2
    assert all(map(torch.equal, found, expected))
