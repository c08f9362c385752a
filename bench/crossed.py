"""Small networks of images, for ``unseen.py``: each normalisation with each activation, in three ways.

A network is named by the three: ``groups4.silu.residual``. Its values are of 0.5 MiB, and so few that what
the code of a plan takes can be followed value by value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from networks import Residual, Scored
from torch import Tensor, nn

CHANNELS, LAYERS = 16, 4
BATCH = (8, CHANNELS, 32, 32)

NORMS: dict[str, Callable[[], nn.Module]] = {
    "groups4": lambda: nn.GroupNorm(4, CHANNELS),
    "groups1": lambda: nn.GroupNorm(1, CHANNELS),
    "instances": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "instances_plain": lambda: nn.InstanceNorm2d(CHANNELS),
    "batches": lambda: nn.BatchNorm2d(CHANNELS),
    "none": nn.Identity,
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
}
WAYS = ("row", "residual", "before")  # one behind the other; around; around, with the convolution last

NAMES = tuple(".".join(each) for each in itertools.product(NORMS, ACTIVATIONS, WAYS))


def network(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network of a name, and a batch for it."""
    norm, activation, way = name.split(".")
    torch.manual_seed(0)
    layers = [_layer(norm, activation, way) for _ in range(LAYERS)]
    return Scored(nn.Sequential(*layers)), (torch.randn(BATCH),)


def _layer(norm: str, activation: str, way: str) -> nn.Module:
    convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    around = NORMS[norm](), ACTIVATIONS[activation]()
    layers = (*around, convolution) if way == "before" else (convolution, *around)
    return nn.Sequential(*layers) if way == "row" else Residual(*layers)
