"""Several processes, by DDP and by FSDP2: each rank keeps its budget, with the plans of all the others.

torchrun --nproc-per-node 2 examples/ranks.py
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from fxremat.measure import measure_peak

COMPILED = {"backend": "fxremat", "options": {"budget": 0.7, "compiler": "eager"}}


class Block(nn.Sequential):
    """A normalised pair of products with a residual."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def trained(way: str, is_compiled: bool) -> tuple[list[float], int]:
    """The losses of a few steps on this rank, and the peak bytes of a further one."""
    torch.manual_seed(0)
    layers = ((nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    model = nn.Sequential(*(Block(*each) for each in layers))
    for block in model:
        if is_compiled:
            block.compile(**COMPILED)
        if way == "FSDP2":
            fully_shard(block)
    model = fully_shard(model) if way == "FSDP2" else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(1024, 64, generator=torch.Generator().manual_seed(distributed.get_rank()))

    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.item()

    losses = []
    for _ in range(4):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses, measure_peak(step).peak_bytes


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    for way in ("DDP", "FSDP2"):
        rank = f"{way:5} on rank {distributed.get_rank()}"
        losses, peak = trained(way, is_compiled=False)
        print(f"{rank} without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
        found, peak = trained(way, is_compiled=True)
        print(f"{rank} with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
        assert found == losses
    distributed.destroy_process_group()
