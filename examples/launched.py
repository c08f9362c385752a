"""A script for `accelerate launch`, which says in the environment what compiles: fxremat in Inductor's place.

FXREMAT_BUDGET=0.6 FXREMAT_COMPILER=eager \\
    accelerate launch --cpu --dynamo_backend inductor examples/launched.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import GPT2Config, GPT2LMHeadModel

import fxremat
from fxremat.measure import measure_peak

TOKENS = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0))


def trained(backend: str | None) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one; None for what the launcher says."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config)
    accelerator = Accelerator(dynamo_backend=backend)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> float:
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        accelerator.backward(loss)
        return loss.item()

    losses = []
    for _ in range(3):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses, measure_peak(step).peak_bytes


if __name__ == "__main__":
    losses, peak = trained("no")
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    fxremat.install()  # the only line of fxremat's in a script of yours
    found, peak = trained(None)
    print(f"with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
    print(*(f"{each.name}={each.value!r} from {each.source}" for each in fxremat.settings()[:1]))
    assert found == losses
