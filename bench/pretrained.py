"""Architectures of the library transformers, small, with weights drawn at random: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]

WIDTH, LAYERS, HEADS, VOCABULARY = 128, 4, 4, 512
BATCH, LENGTH, SIZE, CLASSES = 4, 96, 64, 10


class WithLoss(nn.Module):
    """A model that is called with its inputs in order, and returns its loss alone."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model.train(), names

    def forward(self, *inputs: Tensor) -> Tensor:
        """A scalar."""
        loss: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).loss
        return loss


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def _text(model: nn.Module) -> Built:
    return WithLoss(model, "input_ids", "labels"), (_tokens(), _tokens())


def _images(model: nn.Module) -> Built:
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH,))
    return WithLoss(model, "pixel_values", "labels"), (images, labels)


def gpt2() -> Built:
    """A decoder with learnt places, GELU and dropout."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else there is a warning in the forward, which breaks the graph
    return _text(model)


def llama() -> Built:
    """A decoder with rotated places, gates and fewer heads of keys."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        use_cache=False,
    )
    return _text(transformers.LlamaForCausalLM(config))


def bert() -> Built:
    """An encoder that predicts masked words."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    return _text(transformers.BertForMaskedLM(config))


def t5() -> Built:
    """An encoder and a decoder with relative places."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS // 2,
        num_heads=HEADS,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return _text(transformers.T5ForConditionalGeneration(config))


def vit() -> Built:
    """An encoder of patches."""
    config = transformers.ViTConfig(
        image_size=SIZE,
        patch_size=SIZE // 8,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_labels=CLASSES,
    )
    return _images(transformers.ViTForImageClassification(config))


def convnext() -> Built:
    """Convolutions of single channels, and normalisations over channels."""
    config = transformers.ConvNextConfig(
        depths=[1, 1, 2, 1], hidden_sizes=[32, 64, WIDTH, 2 * WIDTH], image_size=SIZE, num_labels=CLASSES
    )
    return _images(transformers.ConvNextForImageClassification(config))


def whisper() -> Built:
    """An encoder of spectra, whose first layers are convolutions, and a decoder."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS // 2,
        decoder_layers=LAYERS // 2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        num_mel_bins=40,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = WithLoss(transformers.WhisperForConditionalGeneration(config), "input_features", "labels")
    return model, (torch.randn(BATCH, 40, 2 * LENGTH), _tokens())


ARCHITECTURES: dict[str, Callable[[], Built]] = {
    each.__name__: each for each in (gpt2, llama, bert, t5, vit, convnext, whisper)
}
