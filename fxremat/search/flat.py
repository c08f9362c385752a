"""Flat: the facts of a condensed graph as arrays, for what is computed of whole plans at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Ragged(NamedTuple):
    """Rows of different lengths: row i is ``items[starts[i] : starts[i + 1]]``."""

    starts: Integers
    items: Integers

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """The rows, flat."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.append(0, np.cumsum(lengths)), np.array([*itertools.chain(*rows)], dtype=np.int64))

    def take(self, rows: Integers) -> tuple[Integers, Integers]:
        """For each item of some rows which of these rows it is in, and the items.

        >>> [each.tolist() for each in Ragged.of_rows([(5,), (), (6, 7)]).take(np.array([2, 1, 2, 0]))]
        [[0, 0, 2, 2, 3], [6, 7, 6, 7, 5]]
        """
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        place = np.repeat(np.arange(len(rows)), lengths)
        shift = starts - (np.cumsum(lengths) - lengths)
        return place, self.items[np.arange(len(place)) + shift[place]]


class Flat(NamedTuple):
    """A condensed graph as arrays.

    Attributes:
        reads: For each operator, the buffers that it reads.
        makings: For operator i, what its first run makes in row 2 i and what each further one makes in
            row 2 i + 1.
        size: Bytes of each buffer.
        is_pinned: For each buffer, whether a value in it is returned.
        overwrites: For each operator, the buffers that its result may take the place of.
        runs_at_most: How often each operator may run.
        scratch_bytes: What each operator allocates and frees again while it runs.
        ends_forward: For each operator, whether the backward begins behind it at the earliest.
        is_loop: For each operator, whether it runs in one call with the loops around it.
    """

    reads: Ragged
    makings: Ragged
    size: Integers
    is_pinned: Flags
    overwrites: Ragged
    runs_at_most: Integers
    scratch_bytes: Integers
    ends_forward: Flags
    is_loop: Flags
