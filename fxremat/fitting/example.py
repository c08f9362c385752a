"""Example: a model with what it needs for one training step, as a function of the user's returns it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxremat._torch import fakes
from fxremat.device.absent import AbsentCard
from fxremat.errors import FxrematError, InvalidOptionError, told
from fxremat.measure import Recording, measure_peak, record

__all__ = ["ON_FAKE_TENSORS", "Example", "kind", "returned_by"]

ON_FAKE_TENSORS = (
    " {} the function runs on fake tensors of the CPU, which have sizes but no numbers: it may not read any, "
    "nor move anything to a device."
)
_WANTED = "(model, args) or (model, args, loss)"


@dataclass(frozen=True, slots=True)
class Example:
    """A model, what it is called with, and what makes a scalar of its result.

    Attributes:
        model: The module to train.
        args: What it is called with, by position or, a mapping, by name.
        loss: None where the model returns its loss.
        card: The card that the tensors are on, if it is one that is not there.
    """

    model: nn.Module
    args: Sequence[Any] | Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    card: AbsentCard | None = None

    @property
    def positional(self) -> Sequence[Any]:
        """What the model is called with by position."""
        return () if isinstance(self.args, Mapping) else self.args

    @property
    def named(self) -> Mapping[str, Any]:
        """What the model is called with by name."""
        return self.args if isinstance(self.args, Mapping) else {}

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What a gradient may reach: the parameters, and the tensors among the arguments."""
        given = (*self.positional, *self.named.values())
        return [*self.model.parameters(), *(each for each in given if isinstance(each, torch.Tensor))]

    @property
    def device(self) -> str:
        """The device of the first of the leaves."""
        return next((str(leaf.device) for leaf in self.leaves), "cpu")

    @property
    def parameters_bytes(self) -> int:
        """Bytes of the parameters and the buffers."""
        return _storage_bytes((*self.model.parameters(), *self.model.buffers()))

    @property
    def batch_bytes(self) -> int:
        """Bytes of the tensors among the arguments."""
        return _storage_bytes(fakes.tensors((self.positional, dict(self.named))))

    @property
    def loss_of(self) -> Callable[..., Any]:
        """Model and loss as one function of the model and its arguments.

        Dynamo names modules by the variable that holds them; that it is called ``self`` makes reports name
        them as the model's author does.
        """
        loss = self.loss

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs) if loss is None else loss(self(*args, **kwargs))

        return forward

    def drop_gradients(self) -> None:
        """Leave no gradient from an earlier step."""
        for leaf in self.leaves:
            leaf.grad = None

    def take_step(self, loss_of: Callable[..., Any]) -> None:
        """Run a forward and a backward, from no gradients.

        Args:
            loss_of: ``self.loss_of``, compiled or not.

        Raises:
            InvalidOptionError: What it returns is no scalar with a gradient.
        """
        self.drop_gradients()
        with contextlib.nullcontext() if self.card is None else self.card.running():
            self._take_step(loss_of)

    def _take_step(self, loss_of: Callable[..., Any]) -> None:
        loss = loss_of(self.model, *self.positional, **self.named)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise InvalidOptionError(
                "MODEL",
                f"a training step needs a scalar with a gradient and got {kind(loss)}. Return (model, args, "
                f"loss), where loss makes a scalar of what the model returns.",
            )
        loss.backward()

    def check(self) -> None:
        """Raise InvalidOptionError unless a training step runs by itself, without any compiler."""
        try:
            self.take_step(self.loss_of)
        except FxrematError:
            raise
        except Exception as error:
            raise InvalidOptionError("MODEL", f"a step raised {told(error)}; --debug shows more.") from error

    def peak_bytes(self, loss_of: Callable[..., Any]) -> int:
        """The peak of a training step that follows another: measured, or that of its fake tensors."""
        with self._second_step(loss_of) as step:
            if self.card is None:
                return measure_peak(step, device=self.device).peak_bytes
            return self.card.peak_bytes(step)

    def recording(self, loss_of: Callable[..., Any]) -> Recording | None:
        """What the allocator did in a step that follows another; None on a card that is not there."""
        if self.card is not None:
            return None
        with self._second_step(loss_of) as step:
            return record(step, device=self.device)

    @contextlib.contextmanager
    def _second_step(self, loss_of: Callable[..., Any]) -> Iterator[Callable[[], None]]:
        """A training step that follows another; no gradient is left of either."""
        self.take_step(loss_of)
        self.drop_gradients()
        yield lambda: self.take_step(loss_of)
        self.drop_gradients()


def returned_by(name: str, returned: object) -> Example:
    """What a function returned, as the example that it is.

    Args:
        name: What an error calls the function.
        returned: What it returned.

    Raises:
        InvalidOptionError: It is none.
    """
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise _misfit(name, f"got {kind(returned)}")
    example = Example(*returned)
    if not isinstance(example.model, nn.Module):
        raise _misfit(name, f"model is {type(example.model).__name__}, not an nn.Module")
    if not isinstance(example.args, (tuple, list, Mapping)):
        got = type(example.args).__name__
        raise _misfit(name, f"args is {got}, not a tuple; for one argument write (x,)")
    if not (example.loss is None or callable(example.loss)):
        raise _misfit(name, f"loss is {type(example.loss).__name__}, which cannot be called")
    return example


def _misfit(name: str, problem: str) -> InvalidOptionError:
    return InvalidOptionError("MODEL", f"{name!r} must return {_WANTED}: {problem}.")


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.nbytes() for each in {each.untyped_storage() for each in tensors})


def kind(value: object) -> str:
    """A value as an error names it."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, torch.Tensor):
        gradient = "" if value.requires_grad else ", without a gradient"
        return f"a tensor of shape {tuple(value.shape)}{gradient}"
    return type(value).__name__
