"""Operations: how many a loop takes, which decides whether Inductor still computes it inside of its readers.

An operator is one operation, or a few where it chooses what to read, none where it only copies, and so is
each number, and each place of a buffer that is read. What several operators of a loop read at the same place,
compute alike, or compare counts once, and views do nothing. Linear in steps and reads, but for loops that may
be too long, or that read elsewhere than they compute, or parts of values: these are gone through once more,
since what they compute in two places counts once as well, unless they compute other parts of it. A reduction
of few elements is no loop of its own, but reads and computes each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fxremat._torch import compilers
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts
from fxremat.inductor.layout import works_channels_last

# The nodes through which a value is read that show parts of it, or move them, and which of its parts.
Place = tuple[tuple[int, int], ...]

MOST = 100  # Inductor's own limit for loops that read no two buffers


class Operations:
    """The operations of a schedule's loops, which are gone through step by step.

    Attributes:
        counts: For each step so far, the operations that computing it takes, no less where they are few; 0
            for what is computed inside of no other.
        limit: With more than so many a loop is too long to be computed in two places.
    """

    def __init__(self, graph: JointGraph, binding: Binding, bases: Sequence[int]) -> None:
        self.counts = [0] * len(binding.nodes)
        self.limit = compilers.max_operations(graph.is_on_cpu)
        self._graph = graph
        self._binding = binding
        self._bases = bases
        self._viewed = facts(graph).viewed_places
        self._part_views = facts(graph).part_views
        self._alike = facts(graph).alike
        self._first = list(range(len(binding.nodes)))  # steps that compute the same of the same buffers
        self._known: dict[tuple[int, ...], int] = {}

    def take(
        self, step: int, operations: int, reads: int, moves: bool, realized: Sequence[bool]
    ) -> tuple[int, int]:
        """The operations of a step, and how much computing it reads: each place of a buffer counts.

        Args:
            step: The step.
            operations: Those of what it reads: one for each value that is realized or an input.
            reads: The buffers and inputs that computing it reads.
            moves: Whether any of its loop's operators reads elsewhere than it computes, or a part of a value.
            realized: For each step before it, whether its value is realized.
        """
        self._first[step] = self._known.setdefault(self._computed(step, realized), step)
        loop = self._graph.loops[self._binding.nodes[step]]
        count = loop.operations + len(loop.shared) + operations * loop.unrolled
        if moves or count > self.limit:
            count, places = self._counted(step, realized)
            reads = max(reads, places)
        self.counts[step] = count
        return count, reads

    def _computed(self, step: int, realized: Sequence[bool]) -> tuple[int, ...]:
        """What a step computes: its node, and where it finds its operands."""
        found = [self._binding.nodes[step]]
        for read in self._binding.reads[step]:
            base = -1 if read is None else self._bases[read]
            found.append(base if base < 0 or realized[base] else self._first[base])
        return tuple(found)

    def _counted(self, step: int, realized: Sequence[bool]) -> tuple[int, int]:
        """The same, what is computed in two places once; no more operations than are too many."""
        stack: list[tuple[int, Place]] = [(step, ())]
        seen = set(stack)
        shared: set[str] = set()
        found: set[tuple[int, Place]] = set()  # buffers, and inputs as negative numbers
        count = 0
        while stack and count + len(found) + len(shared) <= MOST:
            each, place = stack.pop()
            position = self._binding.nodes[each]
            loop, operands = self._graph.loops[position], self._graph.nodes[position].operands
            count += loop.operations
            shared.update(loop.shared)
            for operand, read in zip(operands, self._binding.reads[each], strict=True):
                for inside in self._places(position, operand, place):
                    if read is None:
                        found.add((~operand, inside))
                        continue
                    base = self._bases[read]
                    same = base if realized[base] else self._first[base]
                    at = same, inside + self.picked(read, realized[base])
                    if realized[base]:
                        found.add(at)
                    elif at not in seen:
                        seen.add(at)
                        stack.append(at)
        return count + len(found) + len(shared), len(found)

    def _places(self, position: int, operand: int, place: Place) -> list[Place]:
        """The places of an operand that a node reads which computes at one.

        A single number has one. What is broadcast is taken for the same wherever a gather reads, as the
        factors of an image's channels are at all of its points, and in all parts of a reduction of as many as
        it is read for.
        """
        loops = self._graph.loops
        loop, first = loops[position], next(iter(self._graph.nodes[position].operands), None)
        is_still = (loop.is_gather and operand != first) or (loop.is_overlay and operand == first)
        if loop.is_moving and not is_still:
            return [(*place, (position, part)) for part in range(loop.unrolled)]
        if position in self._part_views:  # of an input
            return [(*place, (self._alike[position], 0))]
        if loops[operand].elements == 1:
            return [()]
        if place and loops[operand].elements < loop.elements:
            times = loop.elements // loops[operand].elements
            through = ((each, loops[each[0]]) for each in place)
            place = tuple(each for each, by in through if not by.is_gather and by.unrolled != times)
        return [place]

    @functools.cached_property
    def _works_channels_last(self) -> bool:
        return works_channels_last(self._graph, self._binding, range(self._binding.boundary))

    def picked(self, step: int, is_realized: bool) -> Place:
        """The views up to a step that show parts of what they look at, the last one first.

        So do those of images that are computed, where these lie channels last, if they regroup their sizes.
        """
        images, found = facts(self._graph).images, list[tuple[int, int]]()
        while self._bases[step] != step:
            position = self._binding.nodes[step]
            source = self._binding.reads[step][self._viewed[position] or 0]
            if source is None:
                break
            shown = self._binding.nodes[source]
            is_picked = self._graph.nodes[position].leader == shown and position in self._part_views
            is_part = is_picked or self._graph.loops[position].elements < self._graph.loops[shown].elements
            is_regrouped = not is_realized and shown in images and images.get(position) != images[shown]
            if is_part or (is_regrouped and self._works_channels_last):
                found.append((self._alike[position], 0))
            step = source
        return tuple(found)
