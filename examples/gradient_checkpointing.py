"""transformers' gradient checkpointing beside a budget, and both at once.

python examples/gradient_checkpointing.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fxremat.measure import measure_peak

SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = torch.randint(0, 128, (4, 128), generator=torch.Generator().manual_seed(0))
FREE = {"ignore_checkpoints": True}
WAYS: dict[str, tuple[bool, dict[str, Any] | None]] = {  # whether gradient checkpointing is on, the options
    "eager": (False, None),
    "checkpointing, eager": (True, None),
    "checkpointing, no budget": (True, {}),
    "checkpointing, budget min": (True, {"budget": "min"}),
    "ignored, budget 0.5": (True, {"budget": 0.5, **FREE}),
    "budget 0.5": (False, {"budget": 0.5}),
    "budget min": (False, {"budget": "min"}),
}


def trained(is_checkpointed: bool, options: dict[str, Any] | None) -> tuple[list[float], int]:
    """The losses of a few steps, and the peak bytes of a further one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **SIZES)).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    if options is not None:
        model.compile(backend="fxremat", options={"compiler": "eager", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return loss.item()

    losses = []
    for _ in range(3):
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses, measure_peak(step).peak_bytes


if __name__ == "__main__":
    expected, _ = trained(*WAYS["eager"])
    for name, way in WAYS.items():
        losses, peak = trained(*way)
        print(f"{name:26} peak {peak / 2**20:6.2f} MiB, equal losses: {losses == expected}")
        assert losses == expected
