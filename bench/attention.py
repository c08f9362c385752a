"""Networks of the zoo that attend; `models` lists them with their sizes."""

from __future__ import annotations

import torch
from networks import Built, Classified, GatedUnit, Scored
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # the vocabulary of a byte-level language model


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = False) -> Tensor:
    """Scaled dot product attention of (batch, time, width) tensors, by heads."""
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return attended.transpose(1, 2).flatten(-2)


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The attended sequence."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(attend(q, k, v, self.heads, self.causal))


class CrossAttention(nn.Module):
    """Multi-head attention of a sequence to another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x, attended to the memory."""
        k, v = self.kv(memory).chunk(2, dim=-1)
        return self.out(attend(self.q(x), k, v, self.heads))


class Block(nn.Module):
    """A pre-norm transformer block with a GELU MLP of four times the width."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream behind the block."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


def transformer(blocks: int, width: int, heads: int, batch: int, time: int) -> Built:
    """Causal pre-norm blocks and a linear layer on a sequence of vectors."""
    layers = [Block(width, heads, causal=True) for _ in range(blocks)]
    network = nn.Sequential(*layers, nn.Linear(width, width))
    return Scored(network), (torch.randn(batch, time, width),)


class TiedLanguageModel(nn.Module):
    """A byte-level language model whose embedding is its output layer too."""

    def __init__(self, blocks: int, width: int, heads: int, time: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(time, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next byte."""
        x = self.blocks(self.embedding(tokens) + self.position)
        return functional.linear(self.norm(x), self.embedding.weight)


def language_model(blocks: int, width: int, heads: int, batch: int, time: int) -> Built:
    """A byte-level language model with tied embeddings."""
    text = torch.randint(BYTES, (batch, time + 1))
    network = TiedLanguageModel(blocks, width, heads, time)
    return Classified(network), (text[:, :-1], text[:, 1:])


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions and no biases."""

    def __init__(self, width: int, heads: int, time: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(time), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos().repeat(1, 2 * heads))
        self.register_buffer("sin", angles.sin().repeat(1, 2 * heads))

    def rotate(self, x: Tensor) -> Tensor:
        """x with each head's pairs of numbers turned by their position's angles."""
        first, second = x.unflatten(-1, (self.heads, 2, -1)).unbind(-2)
        turned = torch.stack([-second, first], dim=-2).flatten(-3)
        return x * self.cos + turned * self.sin

    def forward(self, x: Tensor) -> Tensor:
        """The attended sequence."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(attend(self.rotate(q), self.rotate(k), v, self.heads, causal=True))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int, heads: int, time: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(width)
        self.attention = RotaryAttention(width, heads, time)
        self.norm_mlp = nn.RMSNorm(width)
        self.mlp = GatedUnit(width, 8 * width // 3)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream behind the block."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


def llama(blocks: int, width: int, heads: int, batch: int, time: int) -> Built:
    """A byte-level language model in the style of Llama."""
    network = nn.Sequential(
        nn.Embedding(BYTES, width),
        *(LlamaBlock(width, heads, time) for _ in range(blocks)),
        nn.RMSNorm(width),
        nn.Linear(width, BYTES, bias=False),
    )
    text = torch.randint(BYTES, (batch, time + 1))
    return Classified(network), (text[:, :-1], text[:, 1:])


class EncoderDecoder(nn.Module):
    """An encoder whose output every decoder block attends to: one value, used early and late."""

    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(blocks)))
        self.norm_memory = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(Block(width, heads, causal=True) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.crosses = nn.ModuleList(CrossAttention(width, heads) for _ in range(blocks))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The decoder's output."""
        memory = self.norm_memory(self.encoder(source))
        for norm, cross, block in zip(self.norms, self.crosses, self.decoder, strict=True):
            target = block(target + cross(norm(target), memory))
        return target


def encoder_decoder(blocks: int, width: int, heads: int, batch: int, time: int) -> Built:
    """A sequence to sequence transformer with cross-attention."""
    source, target = torch.randn(batch, time, width), torch.randn(batch, time // 2, width)
    return Scored(EncoderDecoder(blocks, width, heads)), (source, target)


class VisionTransformer(nn.Module):
    """Patches of 4x4 pixels and a class token, attended by blocks."""

    def __init__(self, blocks: int, width: int, heads: int, patches: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(patches + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """The logits of each image."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(images), -1, -1)
        x = self.blocks(torch.cat([token, patches], dim=1) + self.position)
        return self.head(x[:, 0])


def vision_transformer(blocks: int, width: int, heads: int, batch: int, size: int) -> Built:
    """A ViT on square images."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Classified(VisionTransformer(blocks, width, heads, (size // 4) ** 2)), (images, labels)
