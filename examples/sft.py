"""TRL's SFTTrainer with a tiny Llama, compiled as Inductor was to.

python examples/sft.py
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fxremat
from fxremat.measure import measure_peak

OPTIONS = {"budget": 0.9, "compiler": "eager"}  # of a small model; its head, not compiled, takes the most
WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(126))]
TEXTS = [" ".join(f"w{(first * step) % 126}" for step in range(63)) for first in range(1, 13)]


def trained(torch_compile: bool) -> tuple[list[float], int]:
    """The losses of a short training run, and the peak bytes of a step of it."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            torch_compile=torch_compile,
        )
        data = Dataset.from_dict({"text": TEXTS})
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    model.zero_grad()
    peak = measure_peak(lambda: trainer.training_step(trainer.model_wrapped, batch)).peak_bytes
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peak


if __name__ == "__main__":
    losses, peak = trained(torch_compile=False)
    print(f"without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses}")
    fxremat.install(**OPTIONS)
    found, peak = trained(torch_compile=True)
    print(f"with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
    assert found == losses
