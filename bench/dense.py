"""Random densely connected networks, for ``unseen.py``: each layer reads a concatenation of all before it.

As in a DenseNet, whose layers normalise what they read, and in networks for higher resolution, whose layers
do not. Depth, growth, the order in a layer, normalisation, activation, bottlenecks and residuals are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = (8, 3, 32, 32)
ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh)


class Block(nn.Module):
    """Layers that each read all before them."""

    def __init__(self, choose: random.Random, width: int, order: str) -> None:
        super().__init__()
        growth, layers = choose.choice([4, 8, 12]), choose.randint(3, 12)
        activation, is_narrow = choose.choice(ACTIVATIONS), choose.random() < 0.5
        norm = choose.choice([nn.BatchNorm2d, nn.BatchNorm2d, lambda width: nn.GroupNorm(4, width)])
        self.layers = nn.ModuleList()
        for inside in range(width, width + layers * growth, growth):
            if is_narrow:
                narrow = _layer(order, inside, 4 * growth, 1, norm, activation)
                self.layers.append(
                    nn.Sequential(*narrow, *_layer(order, 4 * growth, growth, 3, norm, activation))
                )
            else:
                self.layers.append(nn.Sequential(*_layer(order, inside, growth, 3, norm, activation)))
        self.width = width + layers * growth

    def forward(self, x: Tensor) -> Tensor:
        """All of it."""
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def _layer(
    order: str,
    inside: int,
    outside: int,
    size: int,
    norm: Callable[[int], nn.Module],
    activation: type[nn.Module],
) -> list[nn.Module]:
    """A convolution, with what is before and behind it: c, n and a in some order."""
    is_behind = order.find("c") < order.find("n")
    made = {
        "c": nn.Conv2d(inside, outside, size, padding=size // 2, bias="n" not in order),
        "n": norm(outside if is_behind else inside),
        "a": activation(),
    }
    return [made[each] for each in order]


class Dense(nn.Module):
    """A stem and blocks, with what halves image and width between them, and a mean square."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        width = choose.choice([8, 16])
        order, is_residual = choose.choice(["nac", "nac", "cna", "ca", "ac"]), choose.random() < 0.3
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks, self.between, self.around = nn.ModuleList(), nn.ModuleList(), is_residual
        for _ in range(choose.randint(1, 3)):
            block = Block(choose, width, order)
            outside = width if is_residual else -(-block.width // 8) * 4
            self.blocks.append(block)
            self.between.append(nn.Conv2d(block.width, outside, 1))
            width = outside

    def forward(self, x: Tensor) -> Tensor:
        """A loss of a batch."""
        x = self.stem(x)
        for block, between in zip(self.blocks, self.between, strict=True):
            inner = between(block(x))
            x = x + inner if self.around else functional.avg_pool2d(inner, 2)
        return x.square().mean()


def network(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network of a seed, and a batch for it."""
    torch.manual_seed(0)
    return Dense(seed), (torch.randn(BATCH),)
