"""Sets of small numbers as the bits of an integer, which makes them fast to compare and to remember."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from operator import or_


def bits(indices: Iterable[int]) -> int:
    """The set of these numbers.

    >>> bits([0, 3])
    9
    """
    return union(1 << index for index in indices)


def union(sets: Iterable[int]) -> int:
    """The union of sets."""
    return functools.reduce(or_, sets, 0)


def indices(members: int) -> Iterator[int]:
    """The numbers in a set, ascending."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def enough(members: int, sizes: Sequence[int], needed: int) -> Iterator[int]:
    """The subsets whose sizes sum up to what is needed and that have no smaller one which does.

    Members are taken from the largest down, so that the last one taken is the smallest: without it, and so
    without any other, the sum falls short.

    Args:
        members: The set.
        sizes: Sizes by number; those of size 0 are in no subset.
        needed: The sum; where it is 0 or less the empty set is enough.

    >>> [list(indices(each)) for each in enough(0b111, [2, 1, 1], 2)]
    [[0], [1, 2]]
    """
    order = sorted((each for each in indices(members) if sizes[each]), key=lambda each: (-sizes[each], each))
    left = [0] * (len(order) + 1)
    for at in reversed(range(len(order))):
        left[at] = left[at + 1] + sizes[order[at]]
    stack = [(0, 0, needed)]
    while stack:
        at, taken, missing = stack.pop()
        if missing <= 0:
            yield taken
        elif left[at] >= missing:
            stack.append((at + 1, taken, missing))
            stack.append((at + 1, taken | 1 << order[at], missing - sizes[order[at]]))
