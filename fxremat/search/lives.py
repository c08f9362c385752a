"""Lives: which runs of a plan make each buffer, and which read it last, as arrays.

A *life* is one making of a buffer by a run of a plan (``condensed.py``): it begins with that run and is read
by the runs up to the next making of the buffer. All lives of a plan are found by one sort of its reads and
makings by buffer and run, which takes a fraction of what walking through the plan does. O(n log n) in the
plan's reads and makings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxremat.search.condensed import Condensed
from fxremat.search.flat import Flags, Integers


class Lives(NamedTuple):
    """The lives of a plan's buffers, by buffer and then by run.

    Attributes:
        buffer: The buffer of each.
        run: The run that makes it.
        last: The run that reads it last; its own if none does.
        is_read: Whether a run reads it.
        is_final: Whether the buffer is not made again.
        is_again: For each run of the plan, whether its operator ran before.
    """

    buffer: Integers
    run: Integers
    last: Integers
    is_read: Flags
    is_final: Flags
    is_again: Flags


def lives(condensed: Condensed, plan: Sequence[int]) -> Lives:
    """The lives of a plan in which every run finds what it reads."""
    operators = np.array(plan, dtype=np.int64)
    is_again = np.ones(len(operators), dtype=bool)
    is_again[np.unique(operators, return_index=True)[1]] = False
    readers, read = condensed.flat.reads.take(operators)
    makers, made = condensed.flat.makings.take(2 * operators + is_again)
    buffers = np.concatenate([read, made])
    runs = np.concatenate([readers, makers])
    order = np.argsort(buffers * (2 * len(operators)) + 2 * runs + _is_making(read, made))
    buffers, runs = buffers[order], runs[order]
    births = np.flatnonzero(order >= len(read))
    ends = np.append(births[1:], len(order))[: len(births)] - 1  # the last event of each life
    buffer = buffers[births]
    is_final = np.append(buffer[1:] != buffer[:-1], True)[: len(buffer)]
    return Lives(buffer, runs[births], runs[ends], ends > births, is_final, is_again)


def _is_making(read: Integers, made: Integers) -> Integers:
    """A run makes buffers behind what it reads."""
    return np.repeat(np.array([0, 1]), [len(read), len(made)])


def live_bytes(length: int, sizes: Integers, first: Integers, last: Integers) -> Integers:
    """The bytes that are live at each run.

    Args:
        length: How many runs there are.
        sizes: Bytes of each life.
        first: The run from which each is live.
        last: The run to which each is live, that run included.
    """
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, first, sizes)
    np.subtract.at(change, last + 1, sizes)
    return np.cumsum(change[:-1])
