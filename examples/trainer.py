"""transformers' Trainer: compiled as Inductor was to, and compiled in place before the Trainer is made.

python examples/trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fxremat
from fxremat.measure import measure_peak

OPTIONS = {"budget": 0.6, "compiler": "eager"}  # in place of "eager", leave it out and code is generated
TOKENS = torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": each, "labels": each} for each in TOKENS]


def trained(torch_compile: bool, in_place: bool) -> tuple[list[float], int]:
    """The losses of a short training run, and the peak bytes of a step of it."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    if in_place:
        model.compile(backend="fxremat", options=OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            torch_compile=torch_compile,
        )
        trainer = Trainer(model, arguments, train_dataset=DATA)
        trainer.train()
    batch = {"input_ids": TOKENS[:4], "labels": TOKENS[:4]}
    model.zero_grad()
    peak = measure_peak(lambda: trainer.training_step(trainer.model_wrapped, batch)).peak_bytes
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peak


if __name__ == "__main__":
    losses, peak = trained(torch_compile=False, in_place=False)
    print(f"without fxremat     peak {peak / 2**20:6.2f} MiB, losses {losses}")
    for way in ("fxremat.install()", "model.compile()"):
        torch.compiler.reset()
        in_place = way == "model.compile()"
        if not in_place:
            fxremat.install(**OPTIONS)
        found, peak = trained(torch_compile=not in_place, in_place=in_place)
        fxremat.uninstall()
        graphs = len(fxremat.reports())
        print(
            f"{way:19} peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}, {graphs} graphs so far"
        )
        assert found == losses
