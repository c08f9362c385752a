"""Allocation: every byte of a schedule placed before it runs (Chen et al. 2016, Sec. 3).

An *arena* is one piece of memory. A *placement* gives a storage instance its bytes there, from ``offset``
on. Instances that are live at the same time do not overlap, save where a result is written over the operand
that dies: those two have the same bytes. The paper's three strategies build on each other:

- ``none``: every instance has bytes of its own, as if nothing were ever freed.
- ``in-place``: a result is written over an operand that dies there, where that is safe
  (``memory/inplace.py``).
- ``sharing``: and bytes whose instances are dead are given to later ones. ``packing.py`` decides which:
  ``"pool"`` by the paper's pool of free buffers, ``"best"`` by what came closest to the lower bound.

The lower bound of an arena is the liveness peak of the same instances. Only storages of the schedule have a
place: inputs, tangents and what is none of the schedule's are the caller's, and scratch memory is the
operators' own. Offsets are not aligned to anything. Without a compiler that runs from the arena, this is a
figure and a plan: the fx graphs themselves allocate as they run.

Linear in steps but for the packing: O(n log n) for the pool, bounded for the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxremat import given
from fxremat.arena.packing import Blocks, apart, best, pool
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import bind
from fxremat.memory.inplace import Overwrite
from fxremat.memory.liveness import Interval, profile_of
from fxremat.predict.models import EVERY_VALUE, IN_PLACE

STRATEGIES = ("none", "in-place", "sharing")
FITS = {"best": best, "pool": pool}


@dataclass(frozen=True, slots=True)
class Placement:
    """The bytes of one storage instance.

    Attributes:
        name: The node that allocates it.
        storage: Index of the storage.
        bytes: Its size.
        birth: The step of the schedule that allocates it, or writes it over an operand.
        death: The last step that uses it.
        offset: Where it begins in the arena, in bytes.
        over: Position among the placements of the instance that it is written over; None if of none.
    """

    name: str
    storage: int
    bytes: int
    birth: int
    death: int
    offset: int
    over: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where each storage instance of a schedule lies.

    Attributes:
        placements: All instances that have bytes, in order of birth.
        arena_bytes: What the arena needs.
        lower_bound_bytes: The most bytes that are live at one step, those of a result and of the operand
            that it is written over once. No arena is smaller.
        strategy: ``"none"``, ``"in-place"`` or ``"sharing"``.
        fit: ``"best"`` or ``"pool"``; it matters under ``"sharing"`` alone.
    """

    placements: tuple[Placement, ...]
    arena_bytes: int
    lower_bound_bytes: int
    strategy: str
    fit: str


def allocate(
    graph: JointGraph, schedule: Sequence[str], strategy: str = "sharing", fit: str = "best"
) -> Allocation:
    """Place all storage instances of a schedule in one arena.

    Args:
        graph: The graph.
        schedule: Names of its nodes, in execution order.
        strategy: ``"none"``, ``"in-place"`` or ``"sharing"``; each needs at most what the one before needs.
        fit: How bytes are shared: ``"best"``, or ``"pool"``, the paper's heuristic.

    Raises:
        InvalidOptionError: There is no such strategy or fit.
        ScheduleError: The schedule reads a value before it is there.

    Example:
        >>> g = JointGraph.from_mappings(
        ...     {"x": (), "a": ["x"], "b": ["a"], "c": ["b"]}, {"a": 8, "b": 4, "c": 6},
        ...     forward_outputs=["c"])
        >>> [(each.name, each.offset) for each in allocate(g, ("a", "b", "c")).placements]
        [('a', 0), ('b', 8), ('c', 0)]
        >>> [allocate(g, ("a", "b", "c"), strategy).arena_bytes for strategy in ("none", "sharing")]
        [18, 12]
    """
    strategy, fit = given.choice("strategy", strategy, STRATEGIES), given.choice("fit", fit, FITS)
    binding = bind(graph, schedule)
    lowering = (EVERY_VALUE if strategy == "none" else IN_PLACE).lower(graph, binding)
    intervals = profile_of(graph, binding, lowering).intervals
    over = _written_over(intervals, lowering.overwrites)
    buffer_of, blocks = _buffers(intervals, over)
    offsets = FITS[fit](blocks) if strategy == "sharing" else apart(blocks)
    placements = tuple(
        Placement(
            life.name,
            life.storage,
            life.bytes,
            life.birth,
            life.death,
            int(offsets[buffer_of[position]]),
            over.get(position),
        )
        for position, life in enumerate(intervals)
    )
    peak = int(blocks.live_bytes().max(initial=0))
    return Allocation(placements, blocks.height(offsets), peak, strategy, fit)


def _written_over(intervals: Sequence[Interval], overwrites: Mapping[int, Overwrite]) -> dict[int, int]:
    """For each interval whose bytes were an operand's, that operand's interval; both by position."""
    position = {(life.birth, life.storage): index for index, life in enumerate(intervals)}
    found = {}
    for index, life in enumerate(intervals):
        overwrite = overwrites.get(life.birth)
        if overwrite is not None:
            found[index] = position[overwrite.birth, overwrite.storage]
    return found


def _buffers(intervals: Sequence[Interval], over: Mapping[int, int]) -> tuple[list[int], Blocks]:
    """For each interval its buffer, and the buffers: one for each chain of results written over operands."""
    buffer_of: list[int] = []
    lives: list[tuple[int, int, int]] = []
    for index, life in enumerate(intervals):
        if index not in over:
            buffer_of.append(len(lives))
            lives.append((life.bytes, life.birth, life.death))
            continue
        buffer = buffer_of[over[index]]
        buffer_of.append(buffer)
        size, birth, death = lives[buffer]
        lives[buffer] = (size, birth, max(death, life.death))
    return buffer_of, Blocks.of(lives)
