"""Operations: how many a loop takes, which decides whether Inductor still computes it inside of its readers.

An operator is one operation, or a few where it chooses what to read, and so is each buffer and each number
that is read; what several operators of a loop read at the same place counts once, and views do nothing.
Linear in steps and reads, but for loops that may be too long: these are gone through once more, since what
they compute in two places counts once as well, unless they compute other parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat._torch import compilers
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts

Place = tuple[int, ...]  # the nodes through which a value is read that show parts of it, or move them

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

    def take(self, step: int, read: int, realized: Sequence[bool]) -> int:
        """The operations of a step.

        Args:
            step: The step.
            read: Those of what it reads: one for each value that is realized or an input.
            realized: For each step before it, whether its value is realized.
        """
        loop = self._graph.loops[self._binding.nodes[step]]
        count = loop.operations + len(loop.numbers) + read
        self.counts[step] = count if count <= self.limit else self._counted(step, realized)
        return self.counts[step]

    def _counted(self, step: int, realized: Sequence[bool]) -> int:
        """The operations of a step, what is computed in two places once; no more than are too many."""
        stack: list[tuple[int, Place]] = [(step, ())]
        seen = set(stack)
        found: set[object] = set()  # buffers as numbers, inputs as negative ones, each with its place; texts
        count = 0
        while stack and count + len(found) <= MOST:
            each, place = stack.pop()
            position = self._binding.nodes[each]
            loop, operands = self._graph.loops[position], self._graph.nodes[position].operands
            count += loop.operations
            found.update(loop.numbers)
            inside = (*place, position) if loop.is_moving else place
            for operand, read in zip(operands, self._binding.reads[each], strict=True):
                if loop.is_gather and operand != operands[0]:
                    inside = place
                if read is None:
                    found.add((~operand, inside))
                    continue
                base, at = self._bases[read], inside + self._picked(read)
                if realized[base]:
                    found.add((base, at))
                elif (base, at) not in seen:
                    seen.add((base, at))
                    stack.append((base, at))
        return count + len(found)

    def _picked(self, step: int) -> Place:
        """The views up to a step that show parts of what they look at, the last one first."""
        found: list[int] = []
        while self._bases[step] != step:
            position = self._binding.nodes[step]
            source = self._binding.reads[step][self._viewed[position] or 0]
            if source is None:
                break
            if self._graph.loops[position].elements < self._graph.loops[self._binding.nodes[source]].elements:
                found.append(position)
            step = source
        return tuple(found)
