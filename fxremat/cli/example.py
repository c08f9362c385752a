"""What MODEL on the command line stands for: a model with what it needs for one training step.

A *reference* is ``package.module:function`` or ``path/to/file.py:function``. The function takes no
arguments and returns ``(model, args)`` or ``(model, args, loss)``. It is looked for where ``python`` would
look: beside the file, and for a module also in the working directory. Whatever goes wrong in the user's code
is told in one sentence, with the user's error chained.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxremat.device.absent import AbsentCard
from fxremat.errors import FxrematError, InvalidOptionError, near_matches, told
from fxremat.measure import measure_peak

__all__ = ["Example", "example_of", "load", "step_of"]

_WANTED = "(model, args) or (model, args, loss)"
_ON_FAKE_TENSORS = (
    " With --device the function runs on fake tensors of the CPU, which have sizes but no numbers: it may "
    "not read any, nor move anything to a device."
)


@dataclass(frozen=True, slots=True)
class Example:
    """A model, what it is called with, and what makes a scalar of its result.

    Attributes:
        model: The module to train.
        args: What it is called with.
        loss: None where the model returns its loss.
        card: The card that the tensors are on, if it is one that is not there.
    """

    model: nn.Module
    args: Sequence[Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    card: AbsentCard | None = None

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What a gradient may reach: the parameters, and the tensors among the arguments."""
        return [*self.model.parameters(), *(each for each in self.args if isinstance(each, torch.Tensor))]

    @property
    def device(self) -> str:
        """The device of the first of the leaves."""
        return next((str(leaf.device) for leaf in self.leaves), "cpu")

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters, the buffers and the tensors among the arguments."""
        storages = {each.untyped_storage() for each in (*self.leaves, *self.model.buffers())}
        return sum(each.nbytes() for each in storages)

    @property
    def loss_of(self) -> Callable[..., Any]:
        """Model and loss as one function of the model and its arguments.

        Dynamo names modules by the variable that holds them; that it is called ``self`` makes reports name
        them as the model's author does.
        """
        loss = self.loss

        def forward(self: nn.Module, *args: Any) -> Any:
            return self(*args) if loss is None else loss(self(*args))

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
        loss = loss_of(self.model, *self.args)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise InvalidOptionError(
                "MODEL",
                f"a training step needs a scalar with a gradient and got {_kind(loss)}. Return (model, args, "
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
        self.take_step(loss_of)
        self.drop_gradients()
        if self.card is None:
            peak = measure_peak(lambda: self.take_step(loss_of), device=self.device).peak_bytes
        else:
            peak = self.card.peak_bytes(lambda: self.take_step(loss_of))
        self.drop_gradients()
        return peak


def example_of(reference: str, card: AbsentCard | None = None) -> Example:
    """What the function that MODEL names returns, checked.

    Args:
        reference: The function.
        card: Where the model and its arguments are to be, if not where the function puts them.

    Raises:
        InvalidOptionError: It cannot be found or imported, raises an error, or returns something else.
    """
    function = load("MODEL", reference)
    try:
        returned = function() if card is None else card.make(function)
    except Exception as error:
        hint = "" if card is None else _ON_FAKE_TENSORS
        raise InvalidOptionError(
            "MODEL", f"calling {reference!r} raised {told(error)}; --debug shows more.{hint}"
        ) from error
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise _misfit(reference, f"got {_kind(returned)}")
    example = Example(*returned)
    if not isinstance(example.model, nn.Module):
        raise _misfit(reference, f"model is {type(example.model).__name__}, not an nn.Module")
    if not isinstance(example.args, (tuple, list)):
        got = type(example.args).__name__
        raise _misfit(reference, f"args is {got}, not a tuple; for one argument write (x,)")
    if not (example.loss is None or callable(example.loss)):
        raise _misfit(reference, f"loss is {type(example.loss).__name__}, which cannot be called")
    if card is None:
        return example
    return replace(example, args=card.hold(example.model, example.args), card=card)


def step_of(reference: str) -> Callable[[], object]:
    """What the function that STEP names returns, checked.

    Raises:
        InvalidOptionError: It cannot be found or imported, raises an error, or returns something else.
    """
    function = load("step", reference)
    try:
        step = function()
    except Exception as error:
        raise InvalidOptionError(
            "step", f"calling {reference!r} raised {told(error)}; --debug shows more."
        ) from error
    if not callable(step):
        problem = f"{reference!r} must return a function that runs a step: got {_kind(step)}."
        raise InvalidOptionError("step", problem)
    return step  # type: ignore[no-any-return]


def load(option: str, reference: str) -> Callable[..., Any]:
    """The function that a reference names.

    Args:
        option: What an error calls the option that the reference was given for.
        reference: ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        InvalidOptionError: There is no such module or function, or importing it raised an error.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        wanted = "package.module:function or path/to/file.py:function"
        raise InvalidOptionError(option, f"expected {wanted}, got {reference!r}.")
    module = _import_file(option, Path(place)) if place.endswith(".py") else _import_module(option, place)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    known = [each for each, value in vars(module).items() if callable(value)]
    raise InvalidOptionError(option, f"{place!r} has no function {name!r}.", near_matches(name, known))


def _import_file(option: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidOptionError(option, f"there is no file {str(path)!r}.")
    _search_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"fxremat_example_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidOptionError(
            option, f"importing {str(path)!r} raised {told(error)}; --debug shows more."
        ) from error
    return module


def _import_module(option: str, name: str) -> ModuleType:
    _search_in(Path())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise InvalidOptionError(
            option, f"importing {name!r} raised {told(error)}; --debug shows more."
        ) from error


def _search_in(folder: Path) -> None:
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)


def _misfit(reference: str, problem: str) -> InvalidOptionError:
    return InvalidOptionError("MODEL", f"{reference!r} must return {_WANTED}: {problem}.")


def _kind(value: object) -> str:
    """A value as an error names it."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, torch.Tensor):
        gradient = "" if value.requires_grad else ", without a gradient"
        return f"a tensor of shape {tuple(value.shape)}{gradient}"
    return type(value).__name__
