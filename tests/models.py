"""The model zoo of tests and benches: networks whose forward returns their loss, in two scales.

A *case* names a network and builds it with its inputs. The loss is computed inside of the module,
so that compiling the module compiles the loss as well; a training step is `train_step`. Everything
is drawn from torch's generator: the same seed gives the same weights and inputs.

``small`` is for tests (well below a second for a step in eager), ``full`` for benches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import attention
import networks
import torch
from networks import Built
from torch import Tensor, nn

__all__ = ["NAMES", "Case", "case", "cases", "fresh", "train_step"]


@dataclass(frozen=True, slots=True)
class Case:
    """A network of the zoo at one scale."""

    name: str
    build: Callable[[], Built]


def case(name: str, scale: str = "small") -> Case:
    """The case of that name, at the scale ``"small"`` or ``"full"``."""
    build, *sizes = _SIZES[name]
    keywords = dict(zip(("small", "full"), sizes, strict=True))[scale]
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


# Builder, small sizes, full sizes. The full transformer is the one whose peaks are published for
# many systems: eager 395 MiB, with gradients of 36 MiB.
_SIZES: dict[str, tuple[Callable[..., Built], dict[str, int], dict[str, int]]] = {
    "tanh_mlp": (
        networks.tanh_mlp,
        {"layers": 16, "width": 32, "batch": 64},
        {"layers": 64, "width": 256, "batch": 2048},
    ),
    "gated_mlp": (
        networks.gated_mlp,
        {"blocks": 4, "width": 32, "batch": 64},
        {"blocks": 12, "width": 256, "batch": 2048},
    ),
    "dropout_mlp": (
        networks.dropout_mlp,
        {"blocks": 6, "width": 32, "batch": 64},
        {"blocks": 24, "width": 256, "batch": 2048},
    ),
    "homogeneous": (
        networks.homogeneous,
        {"layers": 8, "width": 32, "batch": 64},
        {"layers": 32, "width": 256, "batch": 2048},
    ),
    "lstm": (
        networks.lstm,
        {"layers": 4, "steps": 6, "hidden": 16, "batch": 8},
        {"layers": 4, "steps": 32, "hidden": 128, "batch": 128},
    ),
    "resnet": (
        networks.resnet,
        {"blocks": 2, "width": 8, "batch": 4, "size": 16},
        {"blocks": 6, "width": 32, "batch": 32, "size": 32},
    ),
    "densenet": (
        networks.densenet,
        {"layers": 4, "growth": 8, "batch": 4, "size": 16},
        {"layers": 12, "growth": 12, "batch": 32, "size": 32},
    ),
    "unet": (
        networks.unet,
        {"levels": 3, "width": 8, "batch": 2, "size": 32},
        {"levels": 3, "width": 32, "batch": 8, "size": 96},
    ),
    "transformer": (
        attention.transformer,
        {"blocks": 3, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 12, "width": 256, "heads": 4, "batch": 8, "time": 256},
    ),
    "language_model": (
        attention.language_model,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 6, "width": 256, "heads": 4, "batch": 8, "time": 256},
    ),
    "llama": (
        attention.llama,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 6, "width": 256, "heads": 4, "batch": 8, "time": 256},
    ),
    "encoder_decoder": (
        attention.encoder_decoder,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "time": 32},
        {"blocks": 4, "width": 256, "heads": 4, "batch": 8, "time": 256},
    ),
    "vision_transformer": (
        attention.vision_transformer,
        {"blocks": 2, "width": 32, "heads": 2, "batch": 4, "size": 16},
        {"blocks": 6, "width": 192, "heads": 3, "batch": 16, "size": 64},
    ),
}

NAMES: tuple[str, ...] = tuple(_SIZES)
