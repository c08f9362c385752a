"""The budgets ``"device"`` and ``"90%"`` for a card that is not there (see ``driver/device_budget.py``)."""

from __future__ import annotations

from fxremat.driver.device_budget import ASSUMED_STATES, part
from fxremat.fitting.example import Example
from fxremat.fitting.fit import Room
from fxremat.options.options import Budget, share_of_device

__all__ = ["on_card"]


def on_card(budget: Budget, card: str, memory_bytes: int, example: Example) -> Budget:
    """A number of bytes for a part of the card's memory: what is held and the assumed states are taken.

    Raises:
        InvalidOptionError: Nothing is left.
    """
    share = share_of_device(budget)
    if share is None:
        return budget
    trained = {each.untyped_storage() for each in example.model.parameters() if each.requires_grad}
    states = ASSUMED_STATES * sum(each.nbytes() for each in trained)
    return part(budget, share, Room.of(card, memory_bytes, example).left_bytes - states)
