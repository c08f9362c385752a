"""Simplify: what is done to a joint graph before it is looked at, and changes no value that it returns."""

from __future__ import annotations

from torch import fx

from fxremat._torch import partitioners
from fxremat.graph.accumulation import add_up_whole
from fxremat.graph.contents import forget_contents


def simplify(module: fx.GraphModule, fuses: bool) -> None:
    """Put less in the place of what is there several times, or for nothing.

    Args:
        module: A joint graph; its nodes know their values.
        fuses: Whether a compiler takes it that keeps constants in registers, and computes values inside of
            those that read them.
    """
    if fuses:
        forget_contents(module)
    partitioners.cse(module)
    if fuses:
        add_up_whole(module)
    partitioners.force_saves(module)
