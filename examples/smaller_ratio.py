"""A smaller ratio that takes more memory, https://github.com/pytorch/pytorch/issues/197838, and budgets.

python examples/smaller_ratio.py

PyTorch's partitioner runs without generated code. Its ratio leaves out what the backward computes again.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import nn
from torch._functorch import config

from fxremat.measure import measure_peak

PYTORCH = "aot_eager_decomp_partition"


class Block(nn.Module):
    """A residual block, gated as in Llama."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def measured(run: nn.Module) -> tuple[list[torch.Tensor], float]:
    """The gradients of a step, and the peak of another in MiB."""
    run(BATCH).square().mean().backward()
    gradients = [each.grad.clone() for each in NETWORK.parameters()]
    NETWORK.zero_grad()
    peak = measure_peak(lambda: run(BATCH).square().mean().backward()).peak_bytes / 2**20
    NETWORK.zero_grad()
    return gradients, peak


if __name__ == "__main__":
    torch.manual_seed(0)
    BATCH, NETWORK = torch.randn(1024, 64), nn.Sequential(*(Block() for _ in range(8)))
    expected, eager = measured(NETWORK)
    rows = [("eager", eager)]
    for ratio in (0.3, 0.15, 0.05, 0.0):
        torch.compiler.reset()
        with config.patch(activation_memory_budget=ratio):
            rows.append((f"ratio {ratio}", measured(torch.compile(NETWORK, backend=PYTORCH))[1]))
    for budget in (0.5, 0.25, "min"):
        torch.compiler.reset()
        options = {"budget": budget, "compiler": "eager"}
        found, peak = measured(torch.compile(NETWORK, backend="fxremat", options=options))
        assert all(map(torch.equal, found, expected))
        rows.append((f"fxremat {budget}", peak))
    assert rows[5:] == sorted(rows[5:], key=lambda row: -row[1])
    print(tabulate(rows, ("asked for", "measured peak, MiB"), floatfmt=".1f"))
