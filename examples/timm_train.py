"""timm's training loop: a backend by its name (train.py --torchcompile NAME), the budget in the environment.

FXREMAT_BUDGET=0.6 FXREMAT_COMPILER=eager python examples/timm_train.py
"""

from __future__ import annotations

import os

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

import fxremat
from fxremat.measure import measure_peak

RANDOM = torch.Generator().manual_seed(0)
IMAGES = torch.randn(32, 3, 64, 64, generator=RANDOM)
LABELS = torch.randint(0, 10, (32,), generator=RANDOM)


def trained(name: str, backend: str) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one."""
    torch.manual_seed(0)
    sizes = {"img_size": 64} if "vit" in name else {}
    model = timm.create_model(name, num_classes=10, **sizes)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
    model = torch.compile(model, backend=backend)  # as train.py does
    loss_fn = LabelSmoothingCrossEntropy()

    def step() -> float:
        loss = loss_fn(model(IMAGES), LABELS)
        loss.backward()
        return loss.item()

    losses = []
    for _ in range(3):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses, measure_peak(step).peak_bytes


if __name__ == "__main__":
    os.environ.setdefault("FXREMAT_BUDGET", "0.6")
    os.environ.setdefault("FXREMAT_COMPILER", "eager")
    for name in ("test_vit", "test_resnet", "test_convnext"):
        losses, peak = trained(name, "eager")
        print(f"{name:14} without fxremat  peak {peak / 2**20:6.2f} MiB, losses {losses}")
        found, peak = trained(name, "fxremat")
        print(f"{name:14} with fxremat     peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
        print(fxremat.reports()[-1].summary())
        assert found == losses
