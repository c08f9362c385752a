"""Fitting: whether a model can be trained on a device, with which budget, and at what price.

All of it happens on fake tensors: the model is traced, its frontier is made, and the optimizer steps, twice,
without memory and without kernels. Of the points of the frontier that has the least time whose budget is no
larger than the room (``fit.py`` has the terms).

The largest size (a batch, a length) is found with few plans. What a step needs grows nearly linearly, so that
the next size to look at is where a line through two sizes meets the limit; where that misses, bisection.
The answer is a size that fits beside the next one, which doesn't. Where plans are few and a slowdown is
asked for, a size may be refused and a larger one not; so where the line from nothing through the answer leads
beyond it, one size there is looked at as well.

Left out: what was not traced, such as gradients that are kept from one backward to the next, copies of a
gradient for communication, and a batch that is prepared while another is trained on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

from fxremat import given
from fxremat._torch import fakes, optimizers
from fxremat.device.absent import absent
from fxremat.device.capacity import capacity_bytes
from fxremat.device.cards import CARDS
from fxremat.driver.capture import capture
from fxremat.driver.frontier import Frontier, make_frontier
from fxremat.errors import CaptureError, FxrematError, InvalidOptionError, shown, told
from fxremat.fitting.example import ON_FAKE_TENSORS, Example, returned_by
from fxremat.fitting.fit import Fit, Room
from fxremat.options.options import GivenPlanner, is_size, resolve_budget

__all__ = ["fit", "largest_fit"]

GivenOptimizer: TypeAlias = "str | Optimizer | Callable[..., Optimizer] | None"

MOST_LOOKS = 12  # at sizes along a line; bisection goes on from there
MOST_LEAPS = 2  # beyond a size that does not fit, where a line says that larger ones do
LARGEST = 1 << 40  # no size is larger


def fit(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] | Mapping[str, Any] = (),
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: GivenOptimizer = None,
    device: str | None = None,
    memory: int | str | None = None,
    slowdown: float | None = None,
    largest: str | None = None,
    planner: GivenPlanner = "auto",
    compiler: str = "inductor",
) -> Fit:
    """Whether a model can be trained on a device, with which budget, and at what price. Nothing takes memory.

    Args:
        model: The module to train, which stays as it is. Or a function that returns ``(model, args)`` or
            ``(model, args, loss)``; it runs on fake tensors, so that the model may be of any size.
        args: What the module is called with: a tuple, or a mapping of what it takes by name.
        loss: Makes a scalar of what the model returns; left out where the model returns its loss.
        optimizer: ``"adamw"`` or another name of ``torch.optim``; its class; a function that makes it of the
            parameters; or the optimizer itself. None: its states are not counted.
        device: A card by name, such as ``"h100"``, which need not be there; ``"cuda"`` or ``"cpu"`` for this
            machine's own. None for ``"cuda"``.
        memory: Bytes, or a text such as ``"20GiB"``, in place of all that the device has.
        slowdown: How many times the time of the step without fxremat a plan may take; None for any.
        largest: The name of a parameter of the function, such as ``"batch"``: look for its largest value.
        planner: As for ``fxremat.plan``.
        compiler: ``"inductor"`` or ``"eager"``.

    Returns:
        A Fit, which is true where it does fit. ``room.left_bytes`` is the budget for ``torch.compile``.

    Raises:
        InvalidOptionError: An option has no such value, the function or the optimizer's step raises an error.
        CaptureError: The model cannot be traced.
        FxrematError: The card cannot be stood in for.

    Example:
        >>> layer, batch = nn.Linear(64, 64), torch.ones(256, 64)
        >>> found = fit(layer, (batch,), loss=torch.sum, optimizer="adam", device="cpu", memory="1MiB")
        >>> found.does_fit, found.room.states_bytes
        (True, 33280)
    """
    most = _most_slowdown(slowdown)
    make, start = _maker(model, args, loss, largest)
    with _on(device, memory) as place:

        def at(size: int | None) -> Fit:
            example = place.example(make, size)
            room = _room(place, example, optimizer)
            graph = capture(
                example.model, *example.positional, loss=example.loss, compiler=compiler, **example.named
            )
            if all(gradient is None for gradient in graph.backward_outputs):
                raise CaptureError(f"{graph.name} has no gradient to compute, so there is nothing to plan")
            frontier = make_frontier(graph, planner=planner, compiler=compiler)
            found = _chosen(room, frontier, most)
            name = type(example.model).__name__
            return dataclasses.replace(
                found, model=name, size=None if largest is None or size is None else (largest, size)
            )

        return at(None) if largest is None else largest_fit(at, start)


# --- One size -------------------------------------------------------------------------------------------


def _chosen(room: Room, frontier: Frontier, most_slowdown: float | None) -> Fit:
    """The point of least time that fits; else that with the lowest peak of those that are fast enough."""
    points = frontier.points
    fast = [each for each in points if most_slowdown is None or frontier.time_ratio(each) <= most_slowdown]
    fitting = [each for each in fast if each.budget_bytes <= room.left_bytes]
    least = fast[-1] if fast else points[0]
    point = fitting[0] if fitting else least
    return Fit(
        room,
        point.peak_bytes,
        point.budget_bytes,
        least.budget_bytes,
        frontier.time_ratio(point),
        frontier.baseline.peak_bytes,
        points[-1].peak_bytes,
        most_slowdown,
    )


def _room(place: _Place, example: Example, given_optimizer: GivenOptimizer) -> Room:
    room = Room.of(place.name, place.memory_bytes, example)
    if given_optimizer is None:
        return room
    optimizer = _optimizer(given_optimizer, example.model, place)
    name = type(optimizer).__name__
    try:
        update = optimizers.update_of(optimizer, place.device)
    except Exception as error:  # a step may raise anything
        raise InvalidOptionError(
            "optimizer", f"the step of {name} on fake tensors, which have no numbers, raised {told(error)}."
        ) from error
    return dataclasses.replace(
        room,
        optimizer=name,
        states_bytes=update.states_bytes,
        update_bytes=update.gradient_bytes + update.temporary_bytes,
    )


def _optimizer(given_optimizer: GivenOptimizer, model: nn.Module, place: _Place) -> Optimizer:
    """The optimizer of a model's parameters, or the user's own."""
    if isinstance(given_optimizer, Optimizer):
        return given_optimizer
    make: Any = given_optimizer
    if isinstance(make, str):
        named = {name.lower(): each for name, each in vars(torch.optim).items() if isinstance(each, type)}
        known = [name for name, each in named.items() if issubclass(each, Optimizer) and each != Optimizer]
        make = named[given.choice("optimizer", make.lower(), known, "a class", "a function", "an optimizer")]
    if not callable(make):
        expected = ("None", "a name of torch.optim", "a class", "a function of the parameters")
        raise InvalidOptionError.bad_value("optimizer", given_optimizer, expected)
    try:
        with place.mode.making():
            found = make(list(model.parameters()))
    except Exception as error:  # the user's function may raise anything
        raise InvalidOptionError("optimizer", f"making it raised {told(error)}.") from error
    if not isinstance(found, Optimizer):
        raise InvalidOptionError("optimizer", f"making it gave {shown(found)}, not a torch.optim.Optimizer.")
    return found


def _most_slowdown(slowdown: object) -> float | None:
    if slowdown is None:
        return None
    found = given.amount(slowdown)
    if found is None or found < 1:
        raise InvalidOptionError.bad_value("slowdown", slowdown, ("None", "a number from 1, such as 1.2"))
    return found


# --- Where, and what -------------------------------------------------------------------------------------

Make: TypeAlias = "Callable[[int | None], Example]"


@dataclass(frozen=True, slots=True)
class _Place:
    """A device that models are made for, on fake tensors."""

    name: str
    memory_bytes: int
    device: torch.device
    mode: fakes.Rehearsal

    def example(self, make: Make, size: int | None) -> Example:
        """An example of a size, with fake tensors on the device."""
        with self.mode.making():
            made = make(size)
            model, args, loss = fakes.copied((made.model, made.args, made.loss), self.device)
        return Example(model, args, loss)


@contextlib.contextmanager
def _on(device: str | None, memory: int | str | None) -> Iterator[_Place]:
    """A device by name; for a card that is not there, it is stood in for."""
    own = ["cpu", *["cuda"] * torch.cuda.is_available()]
    if device is None and "cuda" not in own:
        raise InvalidOptionError(
            "device", f"this machine has no GPU: name a card, {', '.join(CARDS)}, or 'cpu'."
        )
    name = "cuda" if device is None else device
    name = given.choice("device", name.lower() if isinstance(name, str) else name, (*CARDS, *own))
    given_bytes = _memory_bytes(memory)
    if name in own:
        there = torch.device(name)
        called = "this machine's CPU" if name == "cpu" else torch.cuda.get_device_name(there)
        yield _Place(called, given_bytes or capacity_bytes(there), there, fakes.Rehearsal())
        return
    with absent(CARDS[name]) as card:
        yield _Place(card.card.name, given_bytes or card.card.memory_bytes, torch.device("cuda:0"), card.mode)


def _memory_bytes(memory: int | str | None) -> int | None:
    if memory is None:
        return None
    if is_size(memory):
        with contextlib.suppress(InvalidOptionError):
            return resolve_budget(memory, 0)
    raise InvalidOptionError.bad_value("memory", memory, ("None", "a number of bytes", "'20GiB'"))


def _maker(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    largest: str | None,
) -> tuple[Make, int]:
    """What makes an example of a size, and the size to begin with."""
    if isinstance(model, nn.Module):
        if largest is not None:
            raise InvalidOptionError(
                "largest",
                f"a module with its args has one size. Give a function in their place that has a parameter "
                f"{largest!r} and returns (model, args) or (model, args, loss).",
            )
        args = (args,) if isinstance(args, torch.Tensor) else args
        example = returned_by("fit", (model, args, loss))
        return lambda size: example, 1
    if not callable(model):
        raise InvalidOptionError.bad_value("model", model, ("an nn.Module", "a function that returns one"))
    if len(args) or loss is not None:
        problem = "are for a module; a function returns (model, args) or (model, args, loss)."
        raise InvalidOptionError("args" if len(args) else "loss", problem)
    function = model

    def make(size: int | None) -> Example:
        return _made(function, {} if size is None or largest is None else {largest: size})

    return make, 1 if largest is None else _start(function, largest)


def _made(function: Callable[..., Any], sizes: Mapping[str, int]) -> Example:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        returned = function(**sizes)
    except FxrematError:
        raise
    except Exception as error:  # the user's function may raise anything
        called = ", ".join(f"{key}={value}" for key, value in sizes.items())
        raise InvalidOptionError(
            "MODEL", f"calling {name}({called}) raised {told(error)}.{ON_FAKE_TENSORS.format('Here')}"
        ) from error
    return returned_by(name, returned)


def _start(function: Callable[..., Any], largest: str) -> int:
    """The size to begin with: what the function takes by itself, or 1."""
    parameters = inspect.signature(function).parameters
    name = given.choice("largest", largest, list(parameters))
    default = given.whole(parameters[name].default)
    return max(1, default or 1)


# --- The largest size --------------------------------------------------------------------------------------


def largest_fit(at: Callable[[int], Fit], start: int) -> Fit:
    """The fit of the largest size, with that of the next one beside; of size 1 where that does not fit.

    Args:
        at: The fit of a size.
        start: The size to look at first.

    Raises:
        InvalidOptionError: However large, it fits.
    """
    found: dict[int, Fit] = {}
    low, high, size = 0, 0, start  # high: 0 while all have fitted
    with tqdm(file=sys.stderr, disable=None, leave=False, unit="size") as bar:

        def fits(size: int) -> bool:
            bar.set_description(f"looking at {size}")
            found[size] = at(size)
            bar.update()
            return found[size].does_fit

        for _ in range(MOST_LEAPS + 1):
            while not high or high - low > 1:
                low, high = (size, high) if fits(size) else (low, size)
                if low >= LARGEST:
                    raise InvalidOptionError("largest", f"any size fits: {size} does. It takes no memory.")
                size = _next(found, low, high)
            answer = (low, high)
            size = _met(found, low, 0) if low else 0
            if size <= high or not fits(size):
                break
            low, high, size = size, 0, size + 1
    low, high = answer
    if not low:
        return dataclasses.replace(found[high], looks=len(found))
    return dataclasses.replace(found[low], beyond=found[high], looks=len(found))


def _next(found: Mapping[int, Fit], low: int, high: int) -> int:
    """The size to look at next, within what is known."""
    if high and len(found) >= MOST_LOOKS:
        return (low + high) // 2
    size = list(found)[-1]
    before = list(found)[-2] if len(found) > 1 else 0
    most = high - 1 if high else 8 * low
    return max(low + 1, min(most, _met(found, size, before)))


def _met(found: Mapping[int, Fit], size: int, before: int) -> int:
    """The last size that fits by a line through two; 0 stands for what is held without a batch."""
    fits = found[size]
    room = fits.room
    needed = room.held_bytes + fits.least_needed_bytes
    if before:
        needed_before = found[before].room.held_bytes + found[before].least_needed_bytes
    else:
        needed_before = room.held_bytes - room.batch_bytes
    growth = (needed - needed_before) / (size - before)
    if growth > 0:
        return size + int((room.memory_bytes - room.reserved_bytes - needed) // growth)
    return _met(found, size, 0) if before else LARGEST
