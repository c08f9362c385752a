"""Lightning's Fabric, which copies what a model was compiled with.

python examples/fabric.py
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn

import fxremat
from fxremat.measure import measure_peak

BATCH = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def trained(backend: object) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    network = torch.compile(Network(), backend=backend)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))

    def step() -> float:
        loss = model(BATCH)
        fabric.backward(loss)
        return loss.item()

    losses = []
    for _ in range(3):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses, measure_peak(step).peak_bytes


if __name__ == "__main__":
    losses, peak = trained("eager")
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    found, peak = trained(fxremat.backend(budget=0.6, compiler="eager"))
    print(f"with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
    assert found == losses
