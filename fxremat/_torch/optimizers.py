"""The door to private torch names of optimizers: what an optimizer's step takes, found by stepping a copy.

The copy has fake tensors in the place of all tensors, and no memory. Its parameters have gradients. It steps
twice: the states are made by the first step, and every later one is like the second. A number that it reads
from a tensor, such as how many steps were taken, is ``NUMBER``.

See ``graphs.py`` for the other doors.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import Optimizer
from torch.utils import _foreach_utils

from fxremat._torch.fakes import Rehearsal, is_fake, like, outside_of_modes, tensors

__all__ = ["Update", "states_to_come", "update_of"]

NUMBER = 1000  # steps that were taken, for one: what is special of the first is over


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer's step takes.

    Attributes:
        gradient_bytes: The gradients that it reads.
        states_bytes: What it keeps from step to step.
        temporary_bytes: The most that is live on top of both, while it steps.
    """

    gradient_bytes: int = 0
    states_bytes: int = 0
    temporary_bytes: int = 0


class _Stepping(Rehearsal):
    """A rehearsal in which numbers can be read."""

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on fake tensors; one that reads a number finds always the same."""
        if func is torch.ops.aten._local_scalar_dense.default:
            (tensor,) = args
            assert isinstance(tensor, Tensor)
            return float(NUMBER) if tensor.is_floating_point() else NUMBER
        return super().dispatch(func, types, args, kwargs)


def update_of(optimizer: Optimizer, device: torch.device | None = None) -> Update:
    """What a step of an optimizer takes, where its parameters are or on a device; it stays as it is.

    Raises:
        Exception: Whatever its step raises on fake tensors.
    """
    mode = _Stepping()
    with mode.making():
        memo = {id(each): like(each, device if each.dim() else None) for each in _tensors(optimizer)}
        copied = copy.deepcopy(optimizer, memo)
        copied._warned_capturable_if_run_uncaptured = True  # as its class has it: a copy would be without
        parameters = [each for group in copied.param_groups for each in group["params"]]
        trained = [each for each in parameters if each.requires_grad]
        gradients = [torch.empty_like(each) for each in trained]
    mode.ignore([*parameters, *gradients])
    mode.count(list(copied.state.values()))
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    with mode, _multi_tensor():
        copied.step()
        gc.collect()
        states = mode.live_bytes
        copied.step()
    read = sum(each.untyped_storage().nbytes() for each in gradients)
    return Update(read, states, mode.peak_bytes - states)


def states_to_come(device: torch.device, assumed: int) -> int:
    """Bytes of states on a device that the first steps of this process' optimizers will make.

    Where no optimizer is there yet for what is trained on the device, or one cannot step on fake tensors, so
    many states of each parameter's size are assumed.
    """
    alive = gc.get_objects()
    found = [each for each in alive if issubclass(type(each), Optimizer)]
    with outside_of_modes():
        here = {each: held for each in found if (held := _trained(tensors(each.param_groups), device))}
        if not here:
            parameters = (each for each in alive if issubclass(type(each), nn.Parameter))
            return assumed * _bytes(_trained(parameters, device))
        return sum(_to_come(each, held, assumed) for each, held in here.items())


def _to_come(optimizer: Optimizer, parameters: Sequence[Tensor], assumed: int) -> int:
    present = _bytes(tensors(list(optimizer.state.values())))
    try:
        states = update_of(optimizer).states_bytes
    except Exception:  # of the optimizer's step, which may raise anything
        states = assumed * _bytes(parameters)
    return max(0, states - present)


def _trained(values: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a device that have a gradient to come."""
    return [each for each in values if each.requires_grad and each.device == device and not is_fake(each)]


def _bytes(values: Iterable[Tensor]) -> int:
    return sum(each.nbytes() for each in {each.untyped_storage() for each in values})


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    """All tensors that an optimizer refers to."""
    held = [optimizer.defaults, optimizer.param_groups, list(optimizer.state.values())]
    return tensors(held)


@contextlib.contextmanager
def _multi_tensor() -> Iterator[None]:
    """Have optimizers take fake tensors for such as their kernels of many tensors at once can run on."""
    lists = (optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for each in lists:
        each.append(FakeTensor)
    try:
        yield
    finally:
        for each in lists:
            each.remove(FakeTensor)
