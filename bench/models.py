"""The model zoo of tests and benches: networks whose forward returns their loss, in three scales.

A *case* names a network and builds it with its inputs. The loss is computed inside of the module,
so that compiling the module compiles the loss as well; a training step is `train_step`. Everything
is drawn from torch's generator: the same seed gives the same weights and inputs.

``small`` is for tests (well below a second for a step in eager), ``full`` for benches on a CPU and tests on a
GPU, ``gpu`` for benches there: gigabytes for a step. ``DEEP`` are networks for benches only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import attention
import networks
import torch
from networks import Built
from torch import Tensor, nn

__all__ = ["DEEP", "NAMES", "SCALES", "Case", "case", "cases", "fresh", "train_step"]


@dataclass(frozen=True, slots=True)
class Case:
    """A network of the zoo at one scale."""

    name: str
    build: Callable[[], Built]


def case(name: str, scale: str = "small") -> Case:
    """The case of that name, at a scale of ``SCALES``."""
    build, *sizes = {**_SIZES, **_DEEP_SIZES}[name]
    keywords = dict(zip(SCALES, sizes, strict=True))[scale]
    return Case(name, lambda: build(**keywords))


def cases(scale: str = "small") -> tuple[Case, ...]:
    """All cases of a scale."""
    return tuple(case(name, scale) for name in NAMES)


def fresh(case: Case, seed: int = 0) -> Built:
    """The module and inputs that the seed gives; the generator stands at the seed again after."""
    torch.manual_seed(seed)
    built = case.build()
    torch.manual_seed(seed)
    return built


def train_step(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward from no gradients; return the loss and the gradients by name.

    An input that requires a gradient has its own under ``inputs.<position>``. Names are those of
    the plain module, also where a compiled one is given.
    """
    leaves = {name.removeprefix("_orig_mod."): each for name, each in module.named_parameters()}
    leaves |= {f"inputs.{i}": each for i, each in enumerate(inputs) if each.requires_grad}
    for leaf in leaves.values():
        leaf.grad = None
    loss = module(*inputs)
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return loss.detach(), gradients


SCALES = ("small", "full", "gpu")
Sizes = dict[str, int]

# Builder, and the sizes of each scale. The full transformer is the one whose peaks are published for
# many systems: eager 395 MiB, with gradients of 36 MiB. The language model for GPUs is of GPT-2's size.
_SIZES: dict[str, tuple[Callable[..., Built], Sizes, Sizes, Sizes]] = {
    "tanh_mlp": (
        networks.tanh_mlp,
        {"layers": 16, "width": 32, "batch": 64},
        {"layers": 64, "width": 256, "batch": 2048},
        {"layers": 64, "width": 1024, "batch": 8192},
    ),
    "gated_mlp": (
        networks.gated_mlp,
        {"blocks": 4, "width": 32, "batch": 64},
        {"blocks": 12, "width": 256, "batch": 2048},
        {"blocks": 12, "width": 1024, "batch": 8192},
    ),
    "dropout_mlp": (
        networks.dropout_mlp,
        {"blocks": 6, "width": 32, "batch": 64},
        {"blocks": 24, "width": 256, "batch": 2048},
        {"blocks": 24, "width": 1024, "batch": 8192},
    ),
    "homogeneous": (
        networks.homogeneous,
        {"layers": 8, "width": 32, "batch": 64},
        {"layers": 32, "width": 256, "batch": 2048},
        {"layers": 32, "width": 1024, "batch": 8192},
    ),
    "lstm": (
        networks.lstm,
        {"layers": 3, "steps": 4, "hidden": 16, "batch": 8},
        {"layers": 4, "steps": 32, "hidden": 128, "batch": 128},
        {"layers": 4, "steps": 32, "hidden": 1024, "batch": 64},
    ),
    "resnet": (
        networks.resnet,
        {"blocks": 2, "width": 8, "batch": 4, "size": 16},
        {"blocks": 6, "width": 32, "batch": 32, "size": 32},
        {"blocks": 18, "width": 64, "batch": 256, "size": 32},
    ),
    "densenet": (
        networks.densenet,
        {"layers": 4, "growth": 8, "batch": 4, "size": 16},
        {"layers": 12, "growth": 12, "batch": 32, "size": 32},
        {"layers": 12, "growth": 32, "batch": 64, "size": 64},
    ),
    "unet": (
        networks.unet,
        {"levels": 3, "width": 8, "batch": 2, "size": 32},
        {"levels": 3, "width": 32, "batch": 8, "size": 96},
        {"levels": 5, "width": 64, "batch": 16, "size": 256},
    ),
    "transformer": (
        attention.transformer,
        {"blocks": 3, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 12, "width": 256, "heads": 4, "batch": 8, "time": 256},
        {"blocks": 12, "width": 1024, "heads": 16, "batch": 8, "time": 1024},
    ),
    "language_model": (
        attention.language_model,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 6, "width": 256, "heads": 4, "batch": 8, "time": 256},
        {"blocks": 12, "width": 768, "heads": 12, "batch": 8, "time": 1024},
    ),
    "llama": (
        attention.llama,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 6, "width": 256, "heads": 4, "batch": 8, "time": 256},
        {"blocks": 12, "width": 1024, "heads": 16, "batch": 8, "time": 1024},
    ),
    "encoder_decoder": (
        attention.encoder_decoder,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 4, "width": 256, "heads": 4, "batch": 8, "time": 256},
        {"blocks": 6, "width": 768, "heads": 12, "batch": 8, "time": 1024},
    ),
    "vision_transformer": (
        attention.vision_transformer,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "size": 16},
        {"blocks": 6, "width": 192, "heads": 3, "batch": 16, "size": 64},
        {"blocks": 12, "width": 768, "heads": 12, "batch": 32, "size": 64},
    ),
}

_DEEP_SIZES: dict[str, tuple[Callable[..., Built], Sizes, Sizes, Sizes]] = {
    "resnet50": (
        networks.bottleneck_resnet,
        {"depth": 14, "width": 4, "batch": 2, "size": 32, "classes": 10},
        {"depth": 50, "width": 16, "batch": 8, "size": 64, "classes": 10},
        {"depth": 50, "width": 64, "batch": 64, "size": 224, "classes": 1000},
    ),
    "resnet152": (
        networks.bottleneck_resnet,
        {"depth": 26, "width": 4, "batch": 2, "size": 32, "classes": 10},
        {"depth": 152, "width": 16, "batch": 8, "size": 64, "classes": 10},
        {"depth": 152, "width": 64, "batch": 32, "size": 224, "classes": 1000},
    ),
}

NAMES: tuple[str, ...] = tuple(_SIZES)
DEEP: tuple[str, ...] = tuple(_DEEP_SIZES)
