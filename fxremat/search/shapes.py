"""Shapes: what a block of operators needs in bytes and seconds, by itself, for each choice of what it keeps.

A block is run forward from its input, once or several times, and backward once. Buffers and operators are
numbered within the block; what lives elsewhere costs nothing here. See ``blocks.py`` for the terms.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxremat.predict.problem import pareto

MAX_OPTIONS = 12  # of each block
MAX_STEPS = 2_000_000  # buffers times operators of all shapes together: some 20 times as many steps are taken


@dataclass(frozen=True, slots=True)
class Local:
    """A block by itself. Operators are numbered through forward and backward, buffers as they are met.

    Attributes:
        forward: How many operators the forward has.
        reads: The buffers that each operator reads, of those that are counted here.
        makes: The buffers that the first run of each operator allocates.
        remakes: The buffers that further runs allocate.
        seconds: What each operator takes.
        worth: The weight of seconds of a repetition.
        scratch: Bytes that each operator allocates and frees while it runs.
        must_repeat: Whether what the first run of an operator makes may not be kept.
        sizes: Bytes of each buffer.
        spans: For each buffer that the forward makes, for how many blocks behind this one it is held; for one
            of the backward, 1 if it outlives the block; for one of an earlier block that dies in this
            forward, how many blocks before this one it was made.
        own: How many of the buffers are made here; the others die here.
        released: Bytes of held buffers that are free when the backward has run.
        is_last: Whether no block follows.
    """

    forward: int
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    remakes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    worth: tuple[float, ...]
    scratch: tuple[int, ...]
    must_repeat: tuple[bool, ...]
    sizes: tuple[int, ...]
    spans: tuple[int, ...]
    own: int
    released: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Option:
    """What a block costs if certain buffers are kept from its forward to its backward.

    Attributes:
        kept_bytes: Bytes that are held between, what the next block reads included.
        forward_bytes: The highest live bytes of its forward.
        backward_bytes: The highest live bytes of its backward, recomputation included.
        again_seconds: What the forward takes if it is not the first; weighted.
        backward_seconds: What the backward takes, recomputation included; weighted.
        again: The operators of a forward that is not the first.
        backward: The operators of the backward, recomputation included.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    again_seconds: float
    backward_seconds: float
    again: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What blocks of one shape cost.

    Attributes:
        options: By rising bytes and falling seconds of the backward, nothing kept first.
        alone: The backward with nothing at hand but the input, not even what the next block reads.
        advance: A forward of which nothing is kept but what later blocks read.
        seconds: What the first forward takes.
        forward: How many operators the forward has.
        dying_bytes: By how much ``advance`` needs less if the input may be freed as soon as it was read.
        reach: How many blocks before this one the oldest input was made that dies in this forward.
        grown_bytes: By how much the backward changes what is live; may be negative.
        leaving: Bytes and spans of what later blocks read.
    """

    options: tuple[Option, ...]
    alone: Option
    advance: Option
    seconds: float
    forward: int
    dying_bytes: int
    reach: int
    grown_bytes: int
    leaving: tuple[tuple[int, int], ...]


def analyse(local: Local, max_steps: int = MAX_STEPS) -> Shape:
    """The shape of a block.

    Args:
        local: The block.
        max_steps: Choices are made for neighbouring buffers together where a block has so many of both
            buffers and operators that their product is larger.
    """
    return _Analysis(local, max_steps).shape()


class _Part(NamedTuple):
    """Buffers that are kept together or not at all: one, unless the block is large.

    Attributes:
        first: The first of them.
        mask: Their set.
        size: Their bytes.
    """

    first: int
    mask: int
    size: int


class _Analysis:
    """A block, its operators looked at from every side.

    Sets of buffers that the forward makes are whole numbers, a bit for each in the order of making: so the
    highest bit of what is needed is made last, and what a choice costs is found without searching.
    """

    def __init__(self, local: Local, max_steps: int) -> None:
        self.local = local
        self.max_parts = max(1, max_steps // max(1, local.forward))
        self.count = len(local.reads)
        self.maker = {buffer: index for index in range(self.count) for buffer in local.makes[index]}
        self.is_forward = [
            buffer < local.own and self.maker[buffer] < local.forward for buffer in range(len(local.sizes))
        ]
        self.leaving = frozenset(
            buffer for buffer in range(local.own) if self.is_forward[buffer] and local.spans[buffer] > 0
        )
        backward = range(local.forward, self.count)
        self.read_late = [
            buffer
            for buffer in dict.fromkeys(buffer for index in backward for buffer in local.reads[index])
            if self.is_forward[buffer]
        ]
        self.weighted = [seconds * worth for seconds, worth in zip(local.seconds, local.worth, strict=True)]
        made = [buffer for index in range(local.forward) for buffer in local.makes[index]]
        self.bit = {buffer: 1 << place for place, buffer in enumerate(made)}
        self.maker_of_bit = [self.maker[buffer] for buffer in made]
        self.others = [~self._mask(buffers) for buffers in local.makes]  # all that an operator does not make
        self.remakes = [self._mask(buffers) for buffers in local.remakes]
        self.feeds = [self._mask(buffers) for buffers in local.reads]
        self.wanted_late = self._mask(self.read_late)
        self.left = self._mask(self.leaving)
        self._known: dict[int, float] = {}

    def _mask(self, buffers: Iterable[int]) -> int:
        """The set of those of some buffers that the forward makes."""
        found = 0
        for buffer in buffers:
            found |= self.bit.get(buffer, 0)
        return found

    def shape(self) -> Shape:
        local = self.local
        options = [self._option(kept | self.left) for kept in self._choices()]
        held = self._forward_bytes(self.leaving)
        dying = [buffer for buffer in range(local.own, len(local.sizes)) if local.spans[buffer] > 0]
        input_bytes = sum(local.sizes[buffer] for buffer in dying)
        freed = self._peak(range(local.forward), dying, self.leaving)
        made_late = [buffer for buffer in range(local.own) if not self.is_forward[buffer]]
        grown = sum(local.sizes[buffer] for buffer in made_late if local.spans[buffer])
        gone = [b for b in range(local.own, len(local.sizes)) if local.spans[b] == 0]
        grown -= sum(local.sizes[buffer] for buffer in gone) + local.released
        return Shape(
            tuple(options),
            self._option(0),
            self._option(self.left),
            sum(local.seconds[: local.forward]),
            local.forward,
            input_bytes + held - freed,
            max((local.spans[buffer] for buffer in dying), default=0),
            grown,
            tuple((local.sizes[buffer], local.spans[buffer]) for buffer in sorted(self.leaving)),
        )

    # -- what is run

    def _needed(self, wanted: int, at_hand: int) -> list[int]:
        """The operators that make the wanted buffers from those at hand, in order."""
        return self._making(wanted, ~at_hand)

    def _making(self, wanted: int, absent: int) -> list[int]:
        """The operators that make those of the wanted buffers that are absent, in order."""
        maker, others, feeds = self.maker_of_bit, self.others, self.feeds
        found = []
        missing = wanted & absent
        while missing:
            index = maker[missing.bit_length() - 1]
            found.append(index)
            missing = missing & others[index] | feeds[index] & absent
        found.reverse()
        return found

    def _backward(self, at_hand: int) -> list[int]:
        """The backward's operators, each behind those that make what it misses."""
        order = []
        absent = ~at_hand
        for index in range(self.local.forward, self.count):
            for each in self._making(self.feeds[index], absent):
                order.append(each)
                absent &= ~self.remakes[each]
            order.append(index)
        return order

    def _option(self, kept: int) -> Option:
        """The option to hold certain buffers between forward and backward."""
        local = self.local
        at_hand = [buffer for buffer in sorted(self.bit) if self.bit[buffer] & kept]
        again = tuple(self._needed(kept, 0))
        backward = tuple(self._backward(kept))
        late = sum(local.seconds[local.forward :])
        gone = [b for b in range(local.own, len(local.sizes)) if local.spans[b] == 0]
        outlive = [b for b in range(local.own) if not self.is_forward[b] and local.spans[b]]
        credit = sum(local.sizes[buffer] for buffer in gone)
        return Option(
            sum(local.sizes[buffer] for buffer in at_hand),
            self._forward_bytes(at_hand),
            self._peak(backward, [*at_hand, *gone], outlive) - credit,
            sum(self.weighted[index] for index in again),
            late + sum(self.weighted[index] for index in backward if index < local.forward),
            again,
            backward,
        )

    # -- what is live

    def _forward_bytes(self, kept: Iterable[int]) -> int:
        return self._peak(range(self.local.forward), (), kept)

    def _peak(self, order: Sequence[int], at_hand: Iterable[int], kept: Iterable[int]) -> int:
        """The highest live bytes of a sequence of operators.

        Args:
            order: The operators.
            at_hand: Buffers that are there before; each is freed behind its last read.
            kept: Buffers that are there afterwards.
        """
        local, sizes = self.local, self.local.sizes
        latest = dict.fromkeys(at_hand, -1)  # the life of each buffer: the step at which it begins
        ends = dict.fromkeys(latest, -1)  # of these lives
        change = [0] * (len(order) + 2)
        has_run = set()
        is_backward = bool(order) and order[-1] >= local.forward

        def end(buffer: int) -> None:
            if ends[buffer] >= 0:
                change[max(latest[buffer], 0)] += sizes[buffer]
                change[ends[buffer] + 1] -= sizes[buffer]

        for step, index in enumerate(order):
            for buffer in local.reads[index]:
                if buffer in latest:
                    ends[buffer] = step
            again = index < local.forward and (is_backward or index in has_run)
            for buffer in local.remakes[index] if again else local.makes[index]:
                if buffer in latest:
                    end(buffer)
                latest[buffer] = ends[buffer] = step
            has_run.add(index)
        for buffer in kept:
            if buffer in latest:
                ends[buffer] = len(order)
        for buffer in latest:
            end(buffer)
        highest = live = 0
        for step, index in enumerate(order):
            live += change[step]
            highest = max(highest, live + local.scratch[index])
        return highest

    # -- what is kept

    def _choices(self) -> list[int]:
        """What may be kept: nothing, then more and more by seconds saved per byte, from below and above.

        Of choices that no other beats in bytes and seconds some, evenly chosen if there are many.
        """
        local = self.local
        banned = self._mask(b for i in range(local.forward) if local.must_repeat[i] for b in local.makes[i])
        useful = [
            buffer
            for index in self._needed(self.wanted_late, self.left)
            for buffer in local.remakes[index]
            if not self.bit[buffer] & (banned | self.left)
        ]
        free = self._mask(buffer for buffer in useful if local.sizes[buffer] == 0)
        parts = self._parts([buffer for buffer in useful if local.sizes[buffer]])
        found = {free: self._recomputation(free)}
        found |= self._grow(free, parts)
        found |= self._shrink(free, parts)
        taken = {kept: sum(each.size for each in _of(kept, parts)) for kept in found}
        best = pareto(found, lambda kept: (taken[kept], found[kept]))
        return _evenly(best[::-1])

    def _parts(self, buffers: Sequence[int]) -> list[_Part]:
        """Buffers, neighbours together where they are too many to choose one by one."""
        count = -(-len(buffers) // self.max_parts)
        groups = (buffers[each : each + count] for each in range(0, len(buffers), max(1, count)))
        return [
            _Part(group[0], self._mask(group), sum(self.local.sizes[buffer] for buffer in group))
            for group in groups
        ]

    def _recomputation(self, kept: int) -> float:
        """Weighted seconds of what is computed again."""
        found = self._known.get(kept)
        if found is None:
            again = self._needed(self.wanted_late, self.left | kept)
            found = self._known[kept] = sum(map(self.weighted.__getitem__, again))
        return found

    def _grow(self, free: int, parts: Sequence[_Part]) -> dict[int, float]:
        """From nothing on, keep what saves most per byte, without what saves nothing any more."""
        kept, now = free, self._recomputation(free)
        grown: list[int] = []

        def worth(part: _Part) -> float:
            return (self._recomputation(kept | part.mask) - now) / part.size

        for part in _lazily(parts, worth):
            if worth(part) >= 0:
                break
            kept |= part.mask
            now = self._recomputation(kept)
            grown.append(kept)
        lean = [self._without_useless(each, parts) for each in _evenly(grown)]
        return {each: self._recomputation(each) for each in lean}

    def _without_useless(self, kept: int, parts: Sequence[_Part]) -> int:
        """What is kept, without what saves nothing."""
        now = self._recomputation(kept)
        for part in sorted(_of(kept, parts)):
            if self._recomputation(kept & ~part.mask) <= now:
                kept &= ~part.mask
        return kept

    def _shrink(self, free: int, parts: Sequence[_Part]) -> dict[int, float]:
        """From everything that the backward reads on, drop what costs least per byte."""
        everything = functools.reduce(operator.or_, (part.mask for part in parts), free)
        kept = self._without_useless(everything, parts)
        now = self._recomputation(kept)
        found = {kept: now}

        def loss(part: _Part) -> float:
            return (self._recomputation(kept & ~part.mask) - now) / part.size

        for part in _lazily(sorted(_of(kept, parts)), loss):
            kept &= ~part.mask
            now = self._recomputation(kept)
            found[kept] = now
        return found


def _of(kept: int, parts: Iterable[_Part]) -> list[_Part]:
    """Those of some parts that are kept."""
    return [part for part in parts if part.mask & kept]


def _lazily(parts: Iterable[_Part], price: Callable[[_Part], float]) -> Iterator[_Part]:
    """The parts, the one of least price first; a price is found anew only where it may be the least."""
    heap = [(price(part), part) for part in parts]
    heapq.heapify(heap)
    while heap:
        _, part = heap[0]
        now = (price(part), part)
        if len(heap) == 1 or now <= min(heap[1:3]):
            heapq.heappop(heap)
            yield part
        else:
            heapq.heapreplace(heap, now)


def _evenly(choices: list[int]) -> list[int]:
    """At most ``MAX_OPTIONS`` of the choices, the first and the last among them."""
    if len(choices) <= MAX_OPTIONS:
        return choices
    places = (round(each * (len(choices) - 1) / (MAX_OPTIONS - 1)) for each in range(MAX_OPTIONS))
    return [choices[place] for place in places]
