"""Operations: how many a loop takes, which decides whether Inductor still computes it inside of its readers.

An operator is one operation, or a few where it chooses what to read, none where it only copies, and so is
each number, and each place of a buffer that is read. What several operators of a loop read at the same place,
compute alike, or compare counts once, and views do nothing. Linear in steps and reads, but for loops that may
be too long, or that read elsewhere than they compute, or parts of values: these are gone through once more,
once for a graph, since what they compute in two places counts once as well, unless they compute other parts
of it. A reduction of few elements is no loop of its own, but reads and computes each of them.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from fxremat._torch import compilers
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts
from fxremat.inductor.layout import works_channels_last
from fxremat.inductor.terms import Place

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
        self._facts = facts(graph)
        self._terms = self._facts.terms
        self._numbers: list[int | None] = [None] * len(binding.nodes)  # of the terms that steps compute

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
        loop = self._graph.loops[self._binding.nodes[step]]
        count = loop.operations + len(loop.shared) + operations * loop.unrolled
        if moves or count > self.limit:
            key = self._number(step, realized), self._works_channels_last
            if key not in self._terms.counted:
                self._terms.counted[key] = self._counted(key[0])
            count, places = self._terms.counted[key]
            reads = max(reads, places)
        self.counts[step] = count
        return count, reads

    def _number(self, step: int, realized: Sequence[bool]) -> int:
        """The number of the term that a step computes, which is asked for few steps."""
        found = self._numbers[step]
        if found is None:
            position = self._binding.nodes[step]
            reads = zip(self._graph.nodes[position].operands, self._binding.reads[step], strict=True)
            term = [~operand if read is None else self._read(read, realized) for operand, read in reads]
            found = self._numbers[step] = self._terms.number((position, *term))
        return found

    def _read(self, read: int, realized: Sequence[bool]) -> int:
        """The term that a step computes whose value is read, or where in memory its value is."""
        base = self._bases[read]
        return ~self._stored[base] if realized[base] else self._number(base, realized)

    def _counted(self, number: int) -> tuple[int, int]:
        """The same, what is computed in two places once; no more operations than are too many."""
        stack: list[tuple[int, Place]] = [(number, ())]
        seen = set(stack)
        shared: set[str] = set()
        found: set[tuple[int, Place]] = set()
        count = 0
        while stack and count + len(found) + len(shared) <= MOST:
            each, place = stack.pop()
            position, *reads = self._terms.terms[each]
            loop, operands = self._graph.loops[position], self._graph.nodes[position].operands
            count += loop.operations
            shared.update(loop.shared)
            for operand, read in zip(operands, reads, strict=True):
                for inside in self._places(position, operand, place):
                    at = read, inside + self.picked(operand, read < 0)
                    if read < 0:
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
        if position in self._facts.part_views:  # of an input
            return [(*place, (self._facts.alike[position], 0))]
        if loops[operand].elements == 1:
            return [()]
        if place and loops[operand].elements < loop.elements:
            times = loop.elements // loops[operand].elements
            through = ((each, loops[each[0]]) for each in place)
            place = tuple(each for each, by in through if not by.is_gather and by.unrolled != times)
        return [place]

    @functools.cached_property
    def _stored(self) -> Sequence[int]:
        """For each step its node's index, and behind the nodes, for each time that it ran before, another."""
        counts: Counter[int] = Counter()
        found = list(self._binding.nodes)
        for step in itertools.compress(range(len(found)), self._binding.is_mirror):
            node = found[step]
            counts[node] += 1
            found[step] += counts[node] * len(self._graph.nodes)
        return found

    @functools.cached_property
    def _works_channels_last(self) -> bool:
        return works_channels_last(self._graph, self._binding, range(self._binding.boundary))

    def picked(self, position: int, is_stored: bool) -> Place:
        """The views up to a node that show parts of what they look at, the last one first.

        So do those of images that are computed, where these lie channels last, if they regroup their sizes.

        Args:
            position: The node.
            is_stored: Whether what it looks at is.
        """
        key = position, is_stored, self._works_channels_last
        found = self._terms.picked.get(key)
        if found is None:
            found = self._terms.picked[key] = tuple(self._find_picked(position, is_stored))
        return found

    def _find_picked(self, position: int, is_stored: bool) -> Iterator[tuple[int, int]]:
        loops, nodes, images = self._graph.loops, self._graph.nodes, self._facts.images
        while (place := self._facts.viewed_places[position]) is not None:
            shown = nodes[position].operands[place]
            if shown < self._graph.num_inputs:
                return
            is_picked = nodes[position].leader == shown and position in self._facts.part_views
            is_part = is_picked or loops[position].elements < loops[shown].elements
            is_regrouped = not is_stored and shown in images and images.get(position) != images[shown]
            if is_part or (is_regrouped and self._works_channels_last):
                yield self._facts.alike[position], 0
            position = shown
