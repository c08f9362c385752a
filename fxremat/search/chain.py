"""Chains: the schedule of a linear network that runs the fewest forwards, by length alone.

A chain has layers 0 .. n - 1. The forward of layer i reads the value behind layer i - 1, or the chain's
input; the gradient of layer i reads the gradient of layer i + 1 and what the forward of layer i made besides.
A schedule is a sequence of ``Step``. It is that of revolve (Griewank and Walther, Algorithm 799, ACM TOMS 26,
2000), which runs the fewest forwards that any schedule with so many checkpoints can.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a chain's schedule."""

    layer: int
    is_gradient: bool


def revolve(layers: int, checkpoints: int) -> Iterator[Step]:
    """The schedule with the fewest forwards that holds at most so many values between layers.

    Args:
        layers: How many layers there are, at least 1.
        checkpoints: How many values may be held besides the one just computed; the chain's input, which
            is always held, is one of them. At least 1.

    Yields:
        Steps. A forward directly before its gradient is the one that the gradient reads; other forwards
        only advance.
    """
    stack = [(0, layers, checkpoints)]
    while stack:
        first, end, slots = stack.pop()
        if end - first == 1:
            yield Step(first, False)
            yield Step(first, True)
            continue
        advance = _advance(end - first, slots)
        yield from (Step(layer, False) for layer in range(first, first + advance))
        stack.append((first, first + advance, slots))
        stack.append((first + advance, end, slots - 1 if slots > 1 else 1))


def beta(checkpoints: int, repeats: int) -> int:
    """The longest chain that so many checkpoints serve if no layer runs more than repeats + 1 times."""
    return math.comb(checkpoints + repeats, checkpoints) if repeats >= 0 else 0


def _repeats(layers: int, checkpoints: int) -> int:
    repeats = 0
    while beta(checkpoints, repeats) < layers:
        repeats += 1
    return repeats


def _advance(layers: int, checkpoints: int) -> int:
    """Where the next checkpoint stands; the largest of the positions that are optimal."""
    if checkpoints == 1:
        return layers - 1
    repeats = _repeats(layers, checkpoints)
    furthest = beta(checkpoints, repeats - 1)
    return min(furthest, layers - beta(checkpoints - 1, repeats - 1))
