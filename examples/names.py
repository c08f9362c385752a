"""The backend by its name alone, as timm and torchtune take it, and the options in the environment.

FXREMAT_BUDGET=0.6 FXREMAT_COMPILER=eager python examples/names.py
"""

from __future__ import annotations

import os

import torch
from transformers import ViTConfig, ViTForImageClassification

import fxremat
from fxremat.measure import measure_peak

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def trained(backend: str) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)  # timm's train.py --torchcompile NAME

    def step() -> float:
        loss = compiled(IMAGES).logits.square().mean()
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
    losses, peak = trained("eager")
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    found, peak = trained("fxremat")
    print(f"with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
    print(fxremat.reports()[-1].summary())
    assert found == losses
