"""diffusers, which compiles the repeated blocks of a model and hands its arguments on.

python examples/repeated_blocks.py
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiTTransformer2DModel

import fxremat
from fxremat.measure import measure_peak

IMAGES = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(0))
TIMES, LABELS = torch.arange(4), torch.arange(4)
OPTIONS = {"budget": 0.6, "compiler": "eager"}  # in place of "eager", leave it out and code is generated


def trained(compiled: dict[str, Any] | None) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=4, sample_size=16, num_embeds_ada_norm=10
    )
    if compiled is not None:
        model._repeated_blocks = ["BasicTransformerBlock"]
        model.compile_repeated_blocks(**compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        torch.manual_seed(1)
        loss = model(IMAGES, timestep=TIMES, class_labels=LABELS).sample.square().mean()
        loss.backward()
        return loss.item()

    losses = []
    for _ in range(3):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses, measure_peak(step).peak_bytes


if __name__ == "__main__":
    losses, peak = trained(None)
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    found, peak = trained({"backend": "fxremat", "options": OPTIONS})
    print(f"with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
    print(f"{len(fxremat.reports())} graphs")
    assert found == losses
