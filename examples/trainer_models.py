"""transformers' Trainer with a model of each kind: bf16, accumulated gradients, evaluation, a resumed run.

python examples/trainer_models.py llama    (or others of MODELS; all of them without an argument)
"""

from __future__ import annotations

import sys
import tempfile

import torch
import transformers
from transformers import AutoConfig, Trainer, TrainingArguments

from fxremat.measure import measure_peak

OPTIONS = {"budget": 0.8, "compiler": "eager"}  # in place of "eager", leave it out and code is generated
WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
WORDS = {"vocab_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 2, "num_local_experts": 4}
BEGIN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
PAIR = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_heads": 4, "num_layers": 2, "decoder_layers": 2}
MODELS = {"bert": "MaskedLM", "t5": "Seq2SeqLM", "vit": "ImageClassification", "whisper": "SpeechSeq2Seq"}
MODELS |= dict.fromkeys(("gpt2", "llama", "mixtral"), "CausalLM")
OWN = {"t5": PAIR, "whisper": {**PAIR, "decoder_attention_heads": 4, "max_source_positions": 64}}
OWN["vit"] = {"image_size": 32, "patch_size": 4, "num_labels": 128}
GIVEN = {"vit": ("pixel_values", (3, 32, 32)), "whisper": ("input_features", (80, 128))}


def trained(name: str, **compiled: object) -> tuple[list[list[float]], int]:
    """The losses of a run, and of its second half resumed, evaluation's too; the peak bytes of a step."""
    config = AutoConfig.for_model(name, **{**WIDTHS, **WORDS, **BEGIN, **OWN.get(name, {})})
    torch.manual_seed(0)
    labels = torch.randint(3, 128, (16,) if name == "vit" else (16, 64))
    key, shape = GIVEN.get(name, ("input_ids", ()))
    inputs = torch.randn(16, *shape) if shape else labels
    rows = [{key: inputs[row], "labels": labels[row]} for row in range(16)]
    often = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps"}
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True}
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, report_to="none", **often, **small)
        for checkpoint in (None, f"{folder}/checkpoint-2"):
            torch.compiler.reset()  # Dynamo compiles a module's call for eight models or modes at most
            torch.manual_seed(0)
            model = getattr(transformers, f"AutoModelFor{MODELS[name]}").from_config(config)
            model.compile(**compiled)
            trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
            trainer.train(resume_from_checkpoint=checkpoint)
            losses.append([e[k] for e in trainer.state.log_history for k in ("loss", "eval_loss") if k in e])
    rows = trainer.data_collator(rows[:4])
    return losses, measure_peak(lambda: trainer.training_step(trainer.model_wrapped, rows)).peak_bytes


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        losses, peak = trained(name, backend="aot_eager")  # rounds bf16 as torch.compile does
        print(f"{name:7} without fxremat   peak {peak / 2**20:6.2f} MiB, losses {losses[0]}")
        found, peak = trained(name, backend="fxremat", options=OPTIONS)
        print(f"{name:7} with fxremat      peak {peak / 2**20:6.2f} MiB, equal losses: {found == losses}")
        assert found == losses
