"""The largest batch that fits into so much memory, found by running training steps.

A batch *fits* if a step of it runs, and what is held before the step (parameters, buffers, the batch) and the
step's measured peak are together not above the memory. A batch that runs out of memory, or for which there is
no plan, does not fit. That every smaller batch fits as well is taken for granted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxremat import InfeasibleBudgetError, measure

__all__ = ["Build", "fits", "held_bytes", "largest", "take_step"]

Build = Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]  # of a batch: network and batch on their device

FINENESS = 32  # the search ends when the answer is known to one part in so many


def largest(fits: Callable[[int], bool], first: int = 1, most: int = 1 << 16) -> int:
    """The largest batch that fits, or one smaller by less than a part in ``FINENESS``; 0 if none does.

    >>> largest(lambda batch: batch <= 21)
    21

    Args:
        fits: Whether a batch fits.
        first: Where the search begins.
        most: No larger batch is tried.
    """
    fitting, failing = 0, min(first, most)
    while fits(failing):
        fitting, failing = failing, 2 * failing
        if failing > most:
            return fitting
    while failing - fitting > 1 + fitting // FINENESS:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


def fits(
    build: Build, batch: int, memory_bytes: int, device: str, options: Mapping[str, Any] | None = None
) -> bool:
    """Whether a training step of a batch fits.

    Args:
        build: Makes the network, whose forward returns its loss.
        batch: How many examples.
        memory_bytes: The memory.
        device: Where it is trained.
        options: fxremat's, but for the budget, which is what the memory leaves; None trains in eager.
    """
    try:
        return _needed_bytes(build, batch, memory_bytes, device, options) <= memory_bytes
    except (InfeasibleBudgetError, torch.OutOfMemoryError):
        return False
    finally:
        _clear()


def _needed_bytes(
    build: Build, batch: int, memory_bytes: int, device: str, options: Mapping[str, Any] | None
) -> int:
    """What is held before a step and the step's peak."""
    module, inputs = build(batch)
    held = held_bytes(module, inputs)
    subject: Any = module
    if options is not None:
        if held >= memory_bytes:
            return held
        given = {**options, "budget": memory_bytes - held}
        subject = torch.compile(module, backend="fxremat", options=given)
    take_step(module, subject, inputs)  # compiles it
    module.zero_grad(set_to_none=True)
    return held + measure.measure_peak(lambda: take_step(module, subject, inputs), device=device).peak_bytes


def take_step(module: nn.Module, subject: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """A forward and a backward that starts without gradients; the gradients stay behind."""
    module.zero_grad(set_to_none=True)
    subject(*inputs).backward()


def held_bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes of parameters, buffers and batch."""
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers(), *inputs))


def _clear() -> None:
    """Forget what was compiled, and give the memory back."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
