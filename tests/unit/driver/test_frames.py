"""Where in a program a graph is compiled."""

import torch
from torch import Tensor, nn

from fxremat.driver.frames import is_inside_of_module


class Asks(nn.Module):
    """Notes whether something would be compiled inside of a module here."""

    def forward(self, x: Tensor) -> Tensor:
        """The same, whatever it is called."""
        self.is_inside = is_inside_of_module()
        return x


class Holder(nn.Module):
    """A module with another name for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = Asks()

    def forward(this, x: Tensor) -> Tensor:
        """What is compiled is a block."""
        this.is_inside = is_inside_of_module()
        return x


def test_outside_of_any_forward_nothing_is_inside() -> None:
    """Neither is a function of that name that belongs to no module."""

    def forward(x: Tensor) -> bool:
        return is_inside_of_module()

    assert not is_inside_of_module()
    assert not forward(torch.ones(1))


def test_a_block_of_a_module_is_inside() -> None:
    """Also of a container, and of one that calls itself otherwise."""
    for block in (Asks(), Holder()):
        nn.Sequential(block)(torch.ones(1))
        assert block.is_inside
