"""Blocks: the forward of a condensed graph in pieces, and what running each piece costs.

Terms:
    block: the forward operators between two cuts, with the backward operators that need what they make.
    input of a block: the buffers that earlier blocks made and that it or a later one reads. The plan holds
        them until the block's backward has run, so within the block they cost nothing.
    held: a buffer that stays from its first run on, because it may not be made again, is returned, or is
        read by the backward of an earlier block.
    option: a choice of what is kept of a block from its forward to its backward; the rest is computed again
        from there and from the input, each value just before its first reader.
    shape: what two blocks have in common that differ by their place only. It is analysed once.

The idea of solving each distinct block once, with several options, and of combining the blocks by a dynamic
programme is that of Rockmate (Zhao et al., 2023). Linear in operators, but for the options, which take the
square of a block's size up to a bound for all blocks together.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxremat.graph.nodes import Phase
from fxremat.search.condensed import Condensed
from fxremat.search.shapes import MAX_STEPS, Local, Shape, analyse

WIDER = 1.5  # a cut may be so much wider than the narrowest one in its neighbourhood
NEIGHBOURHOOD = 8  # the part of the forward that is a neighbourhood


@dataclass(frozen=True, eq=False)
class Division:
    """A condensed graph in blocks.

    Attributes:
        condensed: The graph.
        firsts: The first operator of each block.
        gradients: The backward operators of each block, in order.
        kinds: For each block, the index of its shape.
        locals: For each shape, a block by itself.
        base_bytes: What is held throughout: tangents and held buffers.
    """

    condensed: Condensed
    firsts: tuple[int, ...]
    gradients: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]
    locals: tuple[Local, ...]
    base_bytes: int

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes, analysed when they are first asked for."""
        return tuple(analyse(each, MAX_STEPS // len(self.locals)) for each in self.locals)

    def operators(self, block: int, local: Iterable[int]) -> list[int]:
        """The operators of a block by their local numbers: the forward's, then the backward's."""
        first, gradients = self.firsts[block], self.gradients[block]
        end = self.firsts[block + 1] if block + 1 < len(self.firsts) else self.condensed.boundary
        count = end - first
        return [first + each if each < count else gradients[each - count] for each in local]


def cuts(condensed: Condensed) -> list[tuple[int, int]]:
    """Where the forward may be cut because few bytes cross, compared with nearby.

    Returns:
        The operators in front of which it is cut, each with the bytes that cross.
    """
    boundary = condensed.boundary
    last = list(condensed.maker)
    for index in range(boundary):
        for buffer in condensed.operators[index].reads:
            last[buffer] = index
    change = [0] * (boundary + 1)
    for buffer, maker in enumerate(condensed.maker):
        if maker < last[buffer] and not condensed.is_once[buffer]:
            change[maker] += condensed.size[buffer]
            change[last[buffer]] -= condensed.size[buffer]
    widths, width = [], 0
    for index in range(boundary):
        width += change[index]
        widths.append(width)
    alters = {maker for buffer, maker in enumerate(condensed.maker) if condensed.size[buffer]} | set(last)
    minima = [
        index
        for index in range(boundary - 1)
        if index in alters
        and widths[max(index - 1, 0)] >= widths[index]
        and (index == boundary - 2 or widths[index] <= widths[index + 1])
    ]
    return [(index + 1, widths[index]) for index in _narrow(minima, widths)]


def narrowest(cuts: Sequence[tuple[int, int]], stride: int) -> list[int]:
    """The first operators of blocks: of each so many cuts the narrowest, and the start."""
    groups = (cuts[each : each + stride] for each in range(0, len(cuts), stride))
    return [0, *(min(group, key=lambda cut: cut[1])[0] for group in groups)]


def _narrow(minima: Sequence[int], widths: Sequence[int]) -> list[int]:
    """The minima that are hardly wider than the narrowest in their neighbourhood."""
    reach = max(1, len(widths) // (2 * NEIGHBOURHOOD))
    slack = max(widths, default=0) / 100
    found = []
    for index in minima:
        near = minima[bisect.bisect_left(minima, index - reach) : bisect.bisect_right(minima, index + reach)]
        if widths[index] <= WIDER * min(widths[other] for other in near) + slack:
            found.append(index)
    return found


def divide(condensed: Condensed, firsts: Sequence[int]) -> Division:
    """The graph in blocks.

    Args:
        condensed: The graph.
        firsts: The first operator of each block, ascending, the first one 0.
    """
    return _Divider(condensed, firsts).divide()


class _Divider:
    """One pass over the operators, block by block."""

    def __init__(self, condensed: Condensed, firsts: Sequence[int]) -> None:
        self.condensed = condensed
        self.firsts = tuple(firsts)
        self.block = [bisect.bisect_right(firsts, index) - 1 for index in range(condensed.boundary)]
        self.block += self._assign()
        self.ends = self._ends()
        self.is_held = [
            maker < condensed.boundary
            and (
                condensed.pinned[buffer]
                or condensed.is_once[buffer]
                or self.until[buffer] < self.block[maker]
            )
            for buffer, maker in enumerate(condensed.maker)
        ]

    def divide(self) -> Division:
        condensed = self.condensed
        gradients: list[list[int]] = [[] for _ in self.firsts]
        for index in range(condensed.boundary, len(condensed.operators)):
            gradients[self.block[index]].append(index)
        kinds = []
        known: dict[Local, int] = {}
        held_bytes = 0
        made = self._made()
        for block, first in enumerate(self.firsts):
            end = (*self.firsts, condensed.boundary)[block + 1]
            local, kept_bytes = self._local(block, range(first, end), gradients[block], made[block])
            held_bytes += kept_bytes
            kinds.append(known.setdefault(local, len(known)))
        base_bytes = condensed.graph.tangent_bytes + held_bytes
        return Division(
            condensed, self.firsts, tuple(map(tuple, gradients)), tuple(kinds), tuple(known), base_bytes
        )

    def _assign(self) -> list[int]:
        """For each backward operator its block: as late a one as its operands in the backward allow.

        It has its forward operands at hand there: none is made later, and one is read by the block's forward.
        An operator that needs no tangent runs with the first of its readers.
        """
        condensed, boundary = self.condensed, self.condensed.boundary
        ends = [self.block[maker] if maker < boundary else 0 for maker in condensed.maker]
        for index in range(boundary):
            for buffer in condensed.operators[index].reads:
                ends[buffer] = self.block[index]
        nodes = condensed.graph.nodes
        is_deferred = [nodes[each.members[0]].phase is Phase.DEFERRED for each in condensed.operators]
        found: dict[int, int] = {}
        latest = latest_ordered = len(self.firsts) - 1
        for index in range(boundary, len(condensed.operators)):
            operator = condensed.operators[index]
            is_ordered = any(nodes[node].ordered for node in operator.members)
            if is_deferred[index] and not is_ordered:
                continue
            early = [buffer for buffer in operator.reads if condensed.maker[buffer] < boundary]
            late = [
                found[maker] for maker in map(condensed.maker.__getitem__, operator.reads) if maker in found
            ]
            block = min(late, default=len(self.firsts) - 1 if early else latest)
            if early:
                made = max(self.block[condensed.maker[buffer]] for buffer in early)
                block = min(block, max(made, min(ends[buffer] for buffer in early)))
            if is_ordered:
                block = latest_ordered = min(block, latest_ordered)
            found[index] = latest = block
        return self._with_deferred(found)

    def _with_deferred(self, found: dict[int, int]) -> list[int]:
        condensed = self.condensed
        backward = range(condensed.boundary, len(condensed.operators))
        needed: dict[int, int] = {}
        for index in reversed(backward):
            block = found.setdefault(index, needed.get(index, 0))
            for buffer in condensed.operators[index].reads:
                maker = condensed.maker[buffer]
                needed[maker] = max(needed.get(maker, 0), block)
        return [found[index] for index in backward]

    def _ends(self) -> list[int]:
        """For each buffer the last block whose forward or backward reads it.

        ``until`` is, of each buffer, the block whose backward is the last in time to read it.
        """
        ends = [self.block[maker] for maker in self.condensed.maker]
        self.until = list(ends)
        for index, operator in enumerate(self.condensed.operators):
            for buffer in operator.reads:
                ends[buffer] = max(ends[buffer], self.block[index])
                if index >= self.condensed.boundary:
                    self.until[buffer] = min(self.until[buffer], self.block[index])
        return ends

    def _made(self) -> list[list[int]]:
        """The buffers that the first runs of each block's operators make."""
        made: list[list[int]] = [[] for _ in self.firsts]
        for block, operator in zip(self.block, self.condensed.operators, strict=True):
            made[block] += operator.makes
        return made

    def _local(
        self, block: int, forward: Sequence[int], backward: Sequence[int], made: Sequence[int]
    ) -> tuple[Local, int]:
        """A block by itself, and the bytes of its held buffers."""
        condensed, boundary = self.condensed, self.condensed.boundary
        number: dict[int, int] = {}
        sizes: list[int] = []
        spans: list[int] = []
        held_bytes = released = 0

        def add(buffer: int, span: int) -> None:
            number[buffer] = len(sizes)
            sizes.append(condensed.size[buffer])
            spans.append(span)

        for buffer in made:
            size, is_late = condensed.size[buffer], condensed.maker[buffer] >= boundary
            if is_late:
                add(buffer, 1 if condensed.pinned[buffer] or self.until[buffer] < block else 0)
            elif not self.is_held[buffer]:
                add(buffer, self.ends[buffer] - block)
            elif condensed.pinned[buffer] or self._is_read_again(buffer):
                held_bytes += size
                released += 0 if condensed.pinned[buffer] or self.until[buffer] < block else size
        own = len(sizes)
        for index in (*forward, *backward):
            for buffer in condensed.operators[index].reads:
                maker = condensed.maker[buffer]
                if buffer in number or self.block[maker] == block:
                    continue
                if index < boundary and not self.is_held[buffer] and self.ends[buffer] == block:
                    add(buffer, block - self.block[maker])
                elif maker >= boundary and not condensed.pinned[buffer] and self.until[buffer] == block:
                    add(buffer, 0)
        operators = [condensed.operators[index] for index in (*forward, *backward)]

        def known(buffers: Iterable[int]) -> tuple[int, ...]:
            return tuple(number[buffer] for buffer in buffers if buffer in number)

        local = Local(
            len(forward),
            tuple(known(each.reads) for each in operators),
            tuple(known(each.makes) for each in operators),
            tuple(known(each.remakes) for each in operators),
            tuple(each.seconds for each in operators),
            tuple(each.worth for each in operators),
            tuple(each.scratch_bytes for each in operators),
            tuple(each.must_repeat for each in operators),
            tuple(sizes),
            tuple(spans),
            own,
            released,
            block == len(self.firsts) - 1,
        )
        return local, held_bytes

    def _is_read_again(self, buffer: int) -> bool:
        """Whether an operator of the backward, or one of the forward that may run again, reads a buffer."""
        return buffer in self._read_again

    @functools.cached_property
    def _read_again(self) -> frozenset[int]:
        return frozenset(
            buffer
            for index, operator in enumerate(self.condensed.operators)
            if index >= self.condensed.boundary or operator.runs_at_most > 1
            for buffer in operator.reads
        )
