"""Out of memory on long sequences, as in https://github.com/huggingface/transformers/issues/11388.

python examples/long_sequences.py

The scores of attention grow with the square of a sequence. Here a budget stands for the memory of the device.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import nn

from fxremat.errors import InfeasibleBudgetError
from fxremat.measure import measure_peak

ROOM = 48 * 2**20  # bytes


class Block(nn.Module):
    """Attention by its formula, without a fused kernel, and a perceptron."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.read(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT / 32**0.5).softmax(-1)
        x = x + self.write((scores @ value).transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


def measured(network: nn.Module, run: nn.Module, batch: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step, and the peak of another."""
    network.zero_grad()
    run(batch).square().mean().backward()
    gradients = [each.grad.clone() for each in network.parameters()]
    network.zero_grad()
    return gradients, measure_peak(lambda: run(batch).square().mean().backward()).peak_bytes


if __name__ == "__main__":
    torch.manual_seed(0)
    network, rows = nn.Sequential(*(Block() for _ in range(6))), []
    headers = ("tokens", "eager, MiB", f"fits {ROOM / 2**20:.0f} MiB", "fxremat, MiB", "fits")
    for length in (256, 512, 1024, 2048):
        torch.compiler.reset()
        batch, options = torch.randn(1, length, 64), {"budget": ROOM, "compiler": "eager"}
        expected, eager = measured(network, network, batch)
        row = [length, eager / 2**20, "yes" if eager <= ROOM else "no"]
        try:
            found, peak = measured(network, torch.compile(network, backend="fxremat", options=options), batch)
            assert all(map(torch.equal, found, expected)) and peak <= ROOM
            rows.append([*row, peak / 2**20, "yes"])
        except InfeasibleBudgetError as error:
            rows.append([*row, error.lowest_peak_bytes / 2**20, "no, that is the least"])
    print(tabulate(rows, headers, floatfmt=".1f"))
