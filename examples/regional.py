"""Accelerate, for which fxremat takes the place of Inductor: the whole model, or block by block.

python examples/regional.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import TorchDynamoPlugin
from transformers import GPT2Config, GPT2LMHeadModel

import fxremat
from fxremat.measure import measure_peak

OPTIONS = {"budget": 0.6, "compiler": "eager"}  # in place of "eager", leave it out and code is generated
TOKENS = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0))


def trained(backend: str, regional: bool) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config)
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
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
    losses, peak = trained("no", regional=False)
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    for regional in (False, True):
        torch.compiler.reset()
        with fxremat.enabled(**OPTIONS):
            found, peak = trained("inductor", regional)
        way = "block by block" if regional else "the whole model"
        graphs = len(fxremat.reports())
        print(
            f"{way:17} peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}, {graphs} graphs so far"
        )
        assert found == losses
