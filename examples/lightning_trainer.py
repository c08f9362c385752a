"""Lightning's Trainer, which is given a compiled module: accumulated gradients, and validation in between.

python examples/lightning_trainer.py
"""

from __future__ import annotations

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxremat
from fxremat.measure import measure_peak

BATCHES = torch.randn(6, 1024, 64, generator=torch.Generator().manual_seed(0))


class Network(LightningModule):
    """Some layers, and how they are trained."""

    def __init__(self) -> None:
        super().__init__()
        blocks = ((nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)) for _ in range(6))
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block))
        self.losses: list[float] = []

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.layers(x).square().mean()

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Tensor, index: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, x: Tensor, index: int) -> None:
        self.losses.append(self.training_step(x, index).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(backend: object) -> tuple[list[float], int]:
    """The losses of a few batches, and the peak bytes of a further one."""
    torch.manual_seed(0)
    module = Network()
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "val_check_interval": 2, "logger": False}
    batches, others = (DataLoader(each, batch_size=None) for each in (BATCHES, BATCHES[:1]))
    compiled = torch.compile(module, backend=backend)
    Trainer(accelerator="cpu", enable_checkpointing=False, **options).fit(compiled, batches, others)
    module.zero_grad()
    step = torch.compile(module.training_step, backend=backend)
    step(BATCHES[0], 0)  # compiles
    return module.losses, measure_peak(lambda: step(BATCHES[0], 0).backward()).peak_bytes


if __name__ == "__main__":
    losses, peak = trained("eager")
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    found, peak = trained(fxremat.backend(budget=0.6, compiler="eager"))
    print(f"with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
    assert found == losses
