"""Chains: the reference schedules of a linear network, by length alone.

A chain has layers 0 .. n - 1. The forward of layer i reads the value behind layer i - 1, or the chain's
input; the gradient of layer i reads the gradient of layer i + 1 and that value (Algorithm 1), or what the
forward of layer i made besides (revolve). A schedule is a sequence of ``Step``.

Two of them are the measure of everything that works on graphs: Algorithm 1 of Chen et al. 2016 (Sec. 4.1),
and revolve (Griewank and Walther, Algorithm 799, ACM TOMS 26, 2000), which runs the fewest forwards that
any schedule with so many checkpoints can.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a chain's schedule."""

    layer: int
    is_gradient: bool


def algorithm_1(layers: int, segments: Sequence[int]) -> list[Step]:
    """Backpropagate segment by segment, each run again from its kept input to record the layers' inputs.

    Args:
        layers: How many layers there are.
        segments: The first layer of each segment, ascending, the first one 0.

    Returns:
        Every forward, then, segment by segment from the last, its forwards again but for the last layer's,
        whose output is nobody's input there, and its gradients.

    Example:
        >>> [f"{'d' * step.is_gradient}{step.layer}" for step in algorithm_1(4, [0, 2])]
        ['0', '1', '2', '3', '2', 'd3', 'd2', '0', 'd1', 'd0']
    """
    ends = (*segments[1:], layers)
    steps = [Step(layer, False) for layer in range(layers)]
    for first, end in reversed(list(zip(segments, ends, strict=True))):
        steps += [Step(layer, False) for layer in range(first, end - 1)]
        steps += [Step(layer, True) for layer in reversed(range(first, end))]
    return steps


def revolve(layers: int, checkpoints: int) -> Iterator[Step]:
    """The schedule with the fewest forwards that holds at most so many values between layers.

    Args:
        layers: How many layers there are, at least 1.
        checkpoints: How many values may be held besides the one just computed; the chain's input, which
            is always held, is one of them. At least 1.

    Yields:
        Steps. A forward directly before its gradient is the one that the gradient reads; other forwards
        only advance. ``forwards(layers, checkpoints)`` is their number.
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


def forwards(layers: int, checkpoints: int) -> int:
    """How many forwards revolve runs: the closed form, layers + r * layers - beta(s + 1, r - 1).

    >>> forwards(10, 2), forwards(100, 5)
    (30, 416)
    """
    repeats = _repeats(layers, checkpoints)
    return layers + repeats * layers - beta(checkpoints + 1, repeats - 1)


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
