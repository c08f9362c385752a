"""Compiled checkpoints that take more than eager ones, https://github.com/pytorch/pytorch/issues/193193.

python examples/twice_through.py

The same blocks run twice in one graph, once with a context that they attend to, a checkpoint around each.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from fxremat.measure import measure_peak

OURS, HALF = {"compiler": "eager"}, {"compiler": "eager", "budget": 0.5}


class Block(nn.Module):
    """Attention to itself, or to a context, and a perceptron."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.read, self.ask, self.context = (nn.Linear(width, n * width) for n in (3, 1, 2))
        self.inner = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = x + attention(*self.read(self.norms[0](x)).chunk(3, -1))
        if context is not None:
            x = x + attention(self.ask(self.norms[1](x)), *self.context(context).chunk(2, -1))
        return x + self.inner(self.norms[2](x))


def loss(blocks: nn.ModuleList, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Of what comes out of the blocks without the context and with it."""
    y = x
    for block in blocks:
        y = checkpoint(block, y, use_reentrant=False)
    for block in blocks:
        x = checkpoint(block, x, context, use_reentrant=False)
    return y.square().mean() + x.square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    blocks, given = nn.ModuleList(Block() for _ in range(3)), torch.randn(2, 4, 1, 512, 64).unbind()
    rows, expected = [], None
    for backend, options in (("eager", None), ("inductor", None), ("fxremat", OURS), ("fxremat", HALF)):
        torch.compiler.reset()
        run = loss if backend == "eager" else torch.compile(loss, backend=backend, options=options)
        for _ in range(2):
            blocks.zero_grad()
            peak = measure_peak(lambda: run(blocks, *given).backward()).peak_bytes  # noqa: B023
        expected = expected or [each.grad.clone() for each in blocks.parameters()]
        torch.testing.assert_close([each.grad for each in blocks.parameters()], expected)
        rows.append((backend, (options or {}).get("budget"), peak / 2**20))
    print(tabulate(rows, ("checkpoints, run by", "budget", "measured peak, MiB"), floatfmt=("", "", ".1f")))
