"""Packing: where in one arena to put blocks whose sizes and lives are known beforehand.

A *block* has bytes and is live from its birth to its death, both included. Blocks that are live at the same
time must not overlap in the arena. Its *height* is at least the *load*, the most bytes that are live at
once. To find the least arena is NP-hard (Garey & Johnson 1979, problem SR2, dynamic storage allocation), so
these are heuristics:

- ``pool``: in order of time, a buffer that has become free is taken by a later block of about its size
  (Chen et al. 2016, Sec. 3). Buffers never overlap, so what a small block leaves of a large one is lost.
  O(n log n).
- ``best``: the lowest of several attempts; one that is close to the load ends the search. The first,
  ``in_time``, is the best fit of a list of free ranges, in order of time, O(n log n). The others,
  ``in_gaps``, take the blocks in one order and put each into the narrowest gap between those that are there
  and live at the same time. The orders are those at the fullest step first, the largest first and the
  longest-lived first; then walks lead from the better of them through orders in which two blocks are
  swapped, or what stuck out is moved forward. Such an attempt compares each block with all before it:
  n**2 / 2 comparisons, in numpy. There are fewer attempts the larger n is, so that the work is bounded,
  and none beyond some 44,000 blocks. 30,000 take about ten seconds.

Ties are broken by the blocks' own order, so the same blocks are packed alike everywhere.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

MAX_SIZE_RATIO = 16  # between a block and the pool's buffer that it takes; MXNet's planner has the same
MAX_COMPARISONS = 1_000_000_000  # of all attempts together; numpy makes about 3e8 of them in a second
MAX_PLACED = 100_000  # blocks of all attempts together; each takes some 10 us at least
MAX_ATTEMPTS = 400
WALK = 25  # changes of an order before another walk begins
GOOD_ENOUGH = 1000  # an arena within 1/1000 of the load is not bettered


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks by position: int64 arrays of equal length."""

    bytes: Array
    births: Array
    deaths: Array

    @classmethod
    def of(cls, blocks: Sequence[tuple[int, int, int]]) -> Blocks:
        """Blocks of triples (bytes, birth, death)."""
        columns = np.array(blocks, dtype=np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2])

    def __len__(self) -> int:
        return len(self.bytes)

    def live_bytes(self) -> Array:
        """The bytes live at each step."""
        change = np.zeros(int(self.deaths.max(initial=-1)) + 2, dtype=np.int64)
        np.add.at(change, self.births, self.bytes)
        np.add.at(change, self.deaths + 1, -self.bytes)
        return np.cumsum(change[:-1])

    def height(self, offsets: Array) -> int:
        """The bytes of the arena that these offsets need."""
        return int((offsets + self.bytes).max(initial=0))


def apart(blocks: Blocks) -> Array:
    """Each block has bytes of its own."""
    return np.cumsum(blocks.bytes) - blocks.bytes


# -- The pool


def pool(blocks: Blocks) -> Array:
    """The offsets that the paper's pool of free buffers gives."""
    buffer_bytes: list[int] = []
    buffer_of = [0] * len(blocks)
    free: list[tuple[int, int]] = []  # (bytes, buffer), sorted
    for block, is_birth in _events(blocks):
        if not is_birth:
            bisect.insort(free, (buffer_bytes[buffer_of[block]], buffer_of[block]))
            continue
        size = int(blocks.bytes[block])
        at = _of_about(free, size)
        if at is None:
            buffer_bytes.append(size)
            buffer_of[block] = len(buffer_bytes) - 1
            continue
        buffer_of[block] = free.pop(at)[1]
        buffer_bytes[buffer_of[block]] = max(buffer_bytes[buffer_of[block]], size)
    starts = np.cumsum(np.array(buffer_bytes, dtype=np.int64)) - np.array(buffer_bytes, dtype=np.int64)
    return starts[np.array(buffer_of, dtype=np.int64)]


def _events(blocks: Blocks) -> Iterator[tuple[int, bool]]:
    """(block, whether it is born) in order of time; a block is free at the step after its death."""
    births = [(int(step), 1, block) for block, step in enumerate(blocks.births)]
    deaths = [(int(step) + 1, 0, block) for block, step in enumerate(blocks.deaths)]
    for _, is_birth, block in sorted(births + deaths):
        yield block, bool(is_birth)


def _of_about(free: Sequence[tuple[int, int]], size: int) -> int | None:
    """The least buffer that is large enough, else the largest, which grows; neither far off in size."""
    at = bisect.bisect_left(free, (size, 0))
    if at < len(free) and free[at][0] <= size * MAX_SIZE_RATIO:
        return at
    if at > 0 and free[at - 1][0] * MAX_SIZE_RATIO >= size:
        return at - 1
    return None


# -- The best of several


def best(blocks: Blocks) -> Array:
    """The offsets with the lowest arena that was found."""
    load = int(blocks.live_bytes().max(initial=0))
    enough = load + load // GOOD_ENOUGH
    lowest = in_time(blocks)
    attempts = _attempts(len(blocks))
    tried: list[tuple[int, int, Array, Array]] = []
    for order in _orders(blocks)[:attempts]:
        if blocks.height(lowest) <= enough:
            return lowest
        offsets = in_gaps(blocks, order)
        tried.append((blocks.height(offsets), len(tried), order, offsets))
        lowest = min(lowest, offsets, key=blocks.height)
    starts = itertools.cycle(sorted(tried)) if tried else iter(())
    generator = random.Random(0)
    for _ in range(0, attempts - len(tried), WALK):
        if blocks.height(lowest) <= enough:
            break
        _, _, order, offsets = next(starts)
        lowest = min(lowest, _walk(blocks, order, offsets, enough, generator), key=blocks.height)
    return lowest


def _attempts(count: int) -> int:
    """How many attempts with so many blocks are affordable."""
    if count == 0:
        return 0
    return min(MAX_ATTEMPTS, MAX_PLACED // count, 2 * MAX_COMPARISONS // count**2)


def _walk(blocks: Blocks, order: Array, offsets: Array, enough: int, generator: random.Random) -> Array:
    """Change the order a little, again and again, taking back what makes the arena higher."""
    for attempt in range(WALK):
        if blocks.height(offsets) <= enough:
            break
        changed = _change(attempt % 3, order, (offsets + blocks.bytes > enough)[order], generator)
        found = in_gaps(blocks, changed)
        if blocks.height(found) <= blocks.height(offsets):
            order, offsets = changed, found
    return offsets


def _change(kind: int, order: Array, sticks_out: npt.NDArray[np.bool_], generator: random.Random) -> Array:
    """The order with all that stuck out first, one of them moved forward, or two blocks swapped."""
    if kind == 0:
        return np.concatenate((order[sticks_out], order[~sticks_out]))
    if kind == 1:
        at = generator.choice(np.flatnonzero(sticks_out).tolist())
        to = generator.randrange(at + 1)
        return np.concatenate((order[:to], order[at : at + 1], order[to:at], order[at + 1 :]))
    one, other = (generator.randrange(len(order)) for _ in range(2))
    changed = order.copy()
    changed[[one, other]] = order[[other, one]]
    return changed


def _orders(blocks: Blocks) -> list[Array]:
    """Orders to try, the most promising first."""
    fullest, largest, longest = _fullest_step(blocks), -blocks.bytes, blocks.births - blocks.deaths
    by_area = largest * (1 - longest)
    keys = ((fullest, longest, largest), (fullest, largest, longest), (largest, longest), (by_area, longest))
    return [np.lexsort(key[::-1]) for key in (*keys, (longest, largest))]


def _fullest_step(blocks: Blocks) -> Array:
    """For each block, the rank of the fullest step of its life, 0 being the fullest step of all.

    The least rank of any range is that of two ranges whose lengths are powers of 2.
    """
    order = np.argsort(-blocks.live_bytes(), kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    found = np.full(len(blocks), len(order), dtype=np.int64)
    lengths = blocks.deaths - blocks.births + 1
    width = 1
    while len(ranks):
        fits = (width <= lengths) & (lengths < 2 * width)
        left, right = blocks.births[fits], blocks.deaths[fits] - width + 1
        found[fits] = np.minimum(ranks[left], ranks[right])
        ranks = np.minimum(ranks[:-width], ranks[width:])
        width *= 2
    return found


def in_gaps(blocks: Blocks, order: Array) -> Array:
    """Put the blocks, in this order, into the narrowest gaps between those that live at the same time.

    The blocks that are there stand sorted by offset, so a gap begins at the highest top below it.
    """
    offsets = np.zeros(len(blocks), dtype=np.int64)
    there = np.zeros((4, len(blocks)), dtype=np.int64)  # births, deaths, offsets, tops
    for count, block in enumerate(order.tolist()):
        size, birth, death = (int(each[block]) for each in (blocks.bytes, blocks.births, blocks.deaths))
        births, deaths, starts, tops = there[:, :count]
        beside = np.flatnonzero((births <= death) & (deaths >= birth))
        offset = _narrowest_gap(starts[beside], np.maximum.accumulate(tops[beside]), size)
        at = int(np.searchsorted(starts, offset, side="right"))
        there[:, at + 1 : count + 1] = there[:, at:count]
        there[:, at] = birth, death, offset, offset + size
        offsets[block] = offset
    return offsets


def _narrowest_gap(starts: Array, tops: Array, size: int) -> int:
    """Where the least gap that is large enough begins; the highest top where there is none."""
    if not len(starts):
        return 0
    gaps = starts - np.concatenate(([0], tops[:-1]))
    fitting = np.flatnonzero(gaps >= size)
    if not len(fitting):
        return int(tops[-1])
    at = int(fitting[gaps[fitting].argmin()])
    return int(tops[at - 1]) if at else 0


def in_time(blocks: Blocks) -> Array:
    """Put each block, in order of birth, into the least free range, merging ranges as blocks die."""
    offsets = np.zeros(len(blocks), dtype=np.int64)
    free = _FreeRanges()
    for block, is_birth in _events(blocks):
        if is_birth:
            offsets[block] = free.take(int(blocks.bytes[block]))
        else:
            free.give(int(offsets[block]), int(blocks.bytes[block]))
    return offsets


class _FreeRanges:
    """The free ranges of an arena that grows at its end."""

    def __init__(self) -> None:
        self.height = 0
        self.starts: list[int] = []  # sorted; no two ranges touch
        self.bytes_at: dict[int, int] = {}
        self.by_bytes: list[tuple[int, int]] = []  # (bytes, start), sorted

    def take(self, size: int) -> int:
        """Where the least range that is large enough begins; else the arena grows."""
        at = bisect.bisect_left(self.by_bytes, (size, 0))
        if at < len(self.by_bytes):
            start = self.by_bytes[at][1]
            rest = self._remove(start) - size
            if rest:
                self._add(start + size, rest)
            return start
        start = self.height
        if self.starts and self.starts[-1] + self.bytes_at[self.starts[-1]] == self.height:
            start = self.starts[-1]
            self._remove(start)
        self.height = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Free a range, merged with the free ranges beside it."""
        at = bisect.bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == start + size:
            size += self._remove(start + size)
        if at > 0 and self.starts[at - 1] + self.bytes_at[self.starts[at - 1]] == start:
            start = self.starts[at - 1]
            size += self._remove(start)
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self.starts, start)
        bisect.insort(self.by_bytes, (size, start))
        self.bytes_at[start] = size

    def _remove(self, start: int) -> int:
        size = self.bytes_at.pop(start)
        del self.starts[bisect.bisect_left(self.starts, start)]
        del self.by_bytes[bisect.bisect_left(self.by_bytes, (size, start))]
        return size
