"""Ranges: the sizes of the dimensions that a loop of a CPU runs over, and which loops may be one by them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

Blocks: TypeAlias = frozenset[int]


class Ranges(NamedTuple):
    """The ranges of a loop.

    Attributes:
        kept: Sizes of its dimensions, the outermost first, but for those that it reduces.
        reduced: Sizes of those.
    """

    kept: tuple[int, ...]
    reduced: tuple[int, ...] = ()

    @property
    def is_flat(self) -> bool:
        """Whether the loop goes through all elements as if they had one dimension."""
        return len(self.kept) <= 1 and not self.reduced


def ranges_between(outer: int, inner: int, blocks: Blocks) -> Ranges:
    """Those of a loop with these blocks: numbers of elements inside of which it goes on differently.

    Args:
        outer: How many elements it reads.
        inner: How many of them it reduces to one.
        blocks: The blocks.
    """
    return Ranges(_sizes(outer, inner, blocks), _sizes(inner, 1, blocks))


def _sizes(outer: int, inner: int, blocks: Iterable[int]) -> tuple[int, ...]:
    """The sizes of the dimensions from a block to one inside of it."""
    edges = (outer, *sorted((each for each in blocks if inner < each < outer), reverse=True), inner)
    return tuple(a // max(1, b) for a, b in itertools.pairwise(edges) if a > b)


def may_share(first: Ranges, second: Ranges, reads: bool) -> bool:
    """Whether a loop may run in the kernel of an earlier one.

    A loop over all elements is split as another is if both were made for the same sizes (``grouping.py``); as
    one that reduces it never is.

    Args:
        first: The earlier one's ranges.
        second: The later one's.
        reads: Whether the later loop reads what the kernel computes.

    >>> rows, elements = Ranges((16, 8), (8,)), Ranges((16, 8, 8))
    >>> may_share(rows, elements, True), may_share(rows, Ranges((128, 8)), True)
    (True, False)
    >>> may_share(Ranges((1024,)), rows, True)
    False
    """
    is_same = first == second or (not first.reduced and first.kept == second.kept + second.reduced)
    if is_same:
        return True
    if first.is_flat or second.is_flat:
        return not (first.reduced or second.reduced)
    is_fused_last = first.kept == second.kept and second.reduced and not first.reduced  # ``chains.py``
    if is_fused_last:
        return False
    depth = min(len(first.kept), len(second.kept))
    return reads and depth > 0 and first.kept[:depth] == second.kept[:depth]
