"""Shown: what graphs that were lowered have shown of their values, where the rules of ``fusion.py`` err.

What one plan has shown holds for others where a value is read by the same nodes, a *spot*. Most spots of a
plan are those of others as well; the rules hold where they are not. ``learning.py`` finds what is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fxremat.graph.schedule import Binding

NONE: frozenset[int] = frozenset()


class State(Enum):
    """What becomes of a loop."""

    INLINED = "computed inside of its readers"
    INSIDE = "computed where it stands, and read inside of its kernel alone"
    STORED = "given a buffer"


class Spot(NamedTuple):
    """A value, in whatever schedule.

    Attributes:
        node: The index of its node.
        is_mirror: Whether it is computed again.
        readers: The indices of the nodes that read it, ascending.
    """

    node: int
    is_mirror: bool
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Shown:
    """What is known of a graph's spots.

    Attributes:
        states: What becomes of values of which the rules say otherwise.
        copies: Bytes of the copies of a value that are made for an external kernel, by that one's node.
        never: Values that do not take the place of one that their loop reads last, by that one's node.
    """

    states: Mapping[Spot, State] = field(default_factory=dict)
    copies: Mapping[tuple[Spot, int], int] = field(default_factory=dict)
    never: Mapping[Spot, frozenset[int]] = field(default_factory=dict)

    def states_of(self, binding: Binding, readers: Sequence[Sequence[int]]) -> dict[int, State]:
        """What becomes of the steps of a schedule, of which it is known.

        Args:
            binding: The resolved schedule.
            readers: For each step, those that read its buffer.
        """
        found = {}
        for step, each in self._spots(binding, readers, self._stated):
            state = self.states.get(each) or self.states.get(each._replace(is_mirror=not each.is_mirror))
            if state is not None:
                found[step] = state
        return found

    def copies_of(self, binding: Binding, readers: Sequence[Sequence[int]]) -> Iterable[tuple[int, int, int]]:
        """The copies that a schedule makes, of which it is known.

        Args:
            binding: The resolved schedule.
            readers: For each step, those that read its buffer.

        Yields:
            Triples (step of the value, step of the kernel that reads its copy, bytes).
        """
        for step, each in self._spots(binding, readers, self._copied):
            for reader in readers[step]:
                size = self.copies.get((each, binding.nodes[reader]), 0)
                if size:
                    yield step, reader, size

    def never_of(self, binding: Binding, readers: Sequence[Sequence[int]]) -> dict[int, frozenset[int]]:
        """For steps of a schedule, the nodes of the values whose place theirs are known not to take.

        Args:
            binding: The resolved schedule.
            readers: For each step, those that read its buffer.
        """
        nodes = self._never
        return {step: self.never.get(each, NONE) for step, each in self._spots(binding, readers, nodes)}

    def _spots(
        self, binding: Binding, readers: Sequence[Sequence[int]], nodes: frozenset[int]
    ) -> Iterable[tuple[int, Spot]]:
        """The steps of these nodes, with their spots."""
        steps = (step for step, node in enumerate(binding.nodes) if node in nodes) if nodes else ()
        return ((step, spot(binding, readers, step)) for step in steps)

    @functools.cached_property
    def _stated(self) -> frozenset[int]:
        return frozenset(each.node for each in self.states)

    @functools.cached_property
    def _copied(self) -> frozenset[int]:
        return frozenset(each.node for each, _ in self.copies)

    @functools.cached_property
    def _never(self) -> frozenset[int]:
        return frozenset(each.node for each in self.never)


NOTHING = Shown()


def spot(binding: Binding, readers: Sequence[Sequence[int]], step: int) -> Spot:
    """The spot of a step's value.

    Args:
        binding: The resolved schedule.
        readers: For each step, those that read its buffer.
        step: The step.
    """
    nodes = {binding.nodes[reader] for reader in readers[step]}
    return Spot(binding.nodes[step], binding.is_mirror[step], tuple(sorted(nodes)))
