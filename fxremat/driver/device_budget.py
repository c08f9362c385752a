"""The budgets ``"device"`` and ``"90%"``: what a device has free for a training step, and a part of that.

When the first graph is compiled for a device under such a budget, the device is asked once:

    what this process can still allocate there (``device/capacity.py``)
    less what is reserved for libraries and the allocator, a part of all its memory
    less the states that optimizers will make in their first step

rounded down to a part of all its memory, so that a run that differs by little finds its graphs in caches. Of
ranks that train together the least counts for all. What is live then (parameters, the batch, states that are
there already) is not free, and no part of the step's peak; what other processes take later is not known.

The figure holds for the process: graphs that share a step share it, and so does what is compiled later. Where
another model is trained in the same process, bytes are the better budget.

States of an optimizer that exists are found by stepping a copy of it on fake tensors. Where none exists yet,
``ASSUMED_STATES`` of each parameter's size are left room for: Adam's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxremat._torch import optimizers
from fxremat.device.capacity import capacity_bytes, free_bytes, reserved_bytes
from fxremat.errors import InvalidOptionError
from fxremat.options.options import Budget, Options, share_of_device
from fxremat.step import agreement

__all__ = ["ASSUMED_STATES", "forget", "part", "resolved"]

ASSUMED_STATES = 2  # of each parameter's size, where the optimizer is not known
GRAINS = 256  # that all memory of a device is divided into, to round down to

_known: dict[torch.device, int] = {}  # what devices had free for a step


def resolved(options: Options, inputs: Sequence[Any]) -> Options:
    """The options with a number of bytes for their budget, where that is a part of what the device has free.

    Args:
        options: The options.
        inputs: What a graph is compiled for, or called with.

    Raises:
        InvalidOptionError: The device does not say what is free, or nothing is.
    """
    share = share_of_device(options.budget)
    if share is None:
        return options
    devices = [each.device for each in inputs if isinstance(each, torch.Tensor)]
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    return replace(options, budget=part(options.budget, share, _free_for_a_step(device, options.budget)))


def forget() -> None:
    """Ask devices again when the next graph is compiled."""
    _known.clear()


def part(budget: Budget, share: float, size: int) -> int:
    """That part of so many bytes; InvalidOptionError if it is of none."""
    if size <= 0:
        problem = (
            f"{budget!r} is nothing: what is held and what is left free take all of the device's memory."
        )
        raise InvalidOptionError("budget", problem)
    return int(share * size)


def _free_for_a_step(device: torch.device, budget: Budget) -> int:
    """What the device had free for a step when it was asked first."""
    if device not in _known:
        free = free_bytes(device)
        if free is None:
            problem = (
                f"{budget!r} is of what a CUDA device has free; the memory of a CPU belongs to all that runs "
                f"there. Give bytes such as '8GiB', or a number such as 0.4: of the peak without fxremat."
            )
            raise InvalidOptionError("budget", problem)
        memory = capacity_bytes(device)
        states = optimizers.states_to_come(device, ASSUMED_STATES)
        grain = max(1, memory // GRAINS)
        own = max(0, free - reserved_bytes(memory) - states) // grain * grain
        _known[device] = agreement.least(f"device/{len(_known)}", own)
    return _known[device]
