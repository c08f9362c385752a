"""A card that is not there: a model is built, planned, compiled and run for it, without memory or kernels.

All of it happens with fake tensors of device "cuda", with the card's rates, and with the code that Inductor
generates for the card (``_torch/fake_cuda.py``). The peak is that of the storages which this code has live.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from fxremat._torch import fake_cuda, fakes
from fxremat.device.cards import CARDS, Card
from fxremat.device.rates import supposing
from fxremat.errors import FxrematError
from fxremat.given import choice

__all__ = ["AbsentCard", "absent", "card_named"]

_Made = TypeVar("_Made")


class AbsentCard:
    """What can be done with a card that is not there, inside of ``absent``.

    Attributes:
        card: The card.
        mode: In which its tensors are fake.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.mode = fakes.Rehearsal()

    def make(self, function: Callable[[], _Made]) -> _Made:
        """What a function returns, all tensors that it makes being fake."""
        with self.mode.making():
            return function()

    def hold(self, module: nn.Module, values: Any) -> Any:
        """The values with their tensors on the card; so it is done to the module's, in place."""
        return self.make(lambda: fake_cuda.moved(module, values))

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Run on fake tensors what has been compiled."""
        return self.mode

    def peak_bytes(self, step: Callable[[], object]) -> int:
        """The most bytes that a step has live on top of what was live before."""
        gc.collect()
        start = self.mode.peak_bytes = self.mode.live_bytes
        with self.running():
            step()
        return self.mode.peak_bytes - start


def card_named(name: str) -> Card:
    """The card of that name.

    Raises:
        InvalidOptionError: None is called so.
    """
    return CARDS[choice("device", name.lower(), CARDS)]


@contextlib.contextmanager
def absent(card: Card) -> Iterator[AbsentCard]:
    """Plan and compile for a card that is not there.

    Raises:
        FxrematError: The machine lacks what this takes, or has a GPU.
    """
    problem = fake_cuda.missing()
    if problem is not None:
        raise FxrematError(f"{card.name} can't be stood in for: {problem}.")
    with fake_cuda.card(card.properties), supposing("cuda", card.rates):
        yield AbsentCard(card)
