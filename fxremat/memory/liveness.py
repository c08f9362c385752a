"""Liveness: which bytes are live at each step of a schedule, and how high they rise.

Definitions, for a step t of a schedule:

1. A *storage instance* is born at the step that allocates it. Each occurrence of a node has its own.
2. A value dies at its last use; a value without a use dies at its own step.
3. An instance dies with the last value that views it. Operands are still live while their last reader
   runs, for its result is allocated before they are freed.
4. Forward outputs and gradients never die. Saved values need no rule: their last use is in the backward.
5. Tangents are the caller's but arrive with the backward: they count from the boundary to the end, and so
   does nothing else that the caller holds.
6. An operator's scratch memory, where it is known, is live at its own step. What is live behind the last
   step, where it is known, counts as live at it.
7. *Live bytes* at t are those of all instances born at or before t and dead at or after t, and of 5 and 6;
   the *peak* is their maximum.

This is what boxed fx graphs do to the allocator, byte for byte, apart from its rounding. A result that is
written over an operand (``inplace.py``) is allocated by nobody: the two count once at the step where one
takes the place of the other. Under fusion (``inductor/fusion.py``) values that stay in registers hold no
bytes, and their operands live until the fused kernel has run. Linear in steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.memory.instances import storage_instances
from fxremat.memory.lowering import Lowering


@dataclass(frozen=True, slots=True)
class Interval:
    """The life of one storage instance: live from step ``birth`` to step ``death``, both included."""

    name: str
    storage: int
    bytes: int
    birth: int
    death: int


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """The memory of one execution.

    Attributes:
        live_bytes: int64 array with the live bytes at each step.
        boundary: The first step of the backward.
        lives: The fields of each interval.
    """

    live_bytes: npt.NDArray[np.int64]
    boundary: int
    lives: Sequence[tuple[str, int, int, int, int]]

    @functools.cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """The life of every instance with bytes, in order of birth."""
        return tuple(itertools.starmap(Interval, self.lives))

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes; 0 for an empty schedule."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_step(self) -> int:
        """The first step at the peak."""
        return int(self.live_bytes.argmax()) if len(self.live_bytes) else 0

    @property
    def saved(self) -> tuple[Interval, ...]:
        """What the forward computed and the backward holds: born before the boundary, dead behind it."""
        return tuple(life for life in self.intervals if life.birth < self.boundary <= life.death)

    @property
    def saved_bytes(self) -> int:
        """Bytes of ``saved``, forward outputs included."""
        return sum(life.bytes for life in self.saved)

    def live_at(self, step: int) -> tuple[Interval, ...]:
        """Who is live at a step, largest first."""
        alive = [life for life in self.intervals if life.birth <= step <= life.death]
        return tuple(sorted(alive, key=lambda life: (-life.bytes, life.birth)))


def profile_of(graph: JointGraph, binding: Binding, lowering: Lowering) -> MemoryProfile:
    """The memory of a resolved and lowered schedule."""
    owners, values = lowering.instances or storage_instances(graph, binding)
    deaths = _deaths(graph, binding, lowering, owners, values)
    nodes, runs_at, materialised = binding.nodes, lowering.runs_at, lowering.materialised
    change = [0] * (len(nodes) + 1)
    lives = []
    for (step, storage), death in zip(owners, deaths, strict=True):
        size = graph.storage_bytes[storage]
        if size == 0 or not materialised[step]:
            continue
        birth = runs_at[step]
        change[birth] += size
        change[death + 1] -= size
        lives.append((graph.nodes[nodes[step]].name, storage, size, birth, death))
    for first, last, size in lowering.extra_bytes:
        change[first] += size
        change[last + 1] -= size
    live = np.cumsum(np.array(change[:-1], dtype=np.int64))
    live[binding.boundary :] += graph.tangent_bytes
    if graph.scratch_bytes:
        np.add.at(live, runs_at, np.array(scratch_bytes(graph, binding), dtype=np.int64))
    live[-1:] = np.maximum(live[-1:], max(lowering.after_bytes, graph.bytes_without_backward))
    return MemoryProfile(live, binding.boundary, lives)


def scratch_bytes(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step its scratch memory; empty where none is known."""
    if not graph.scratch_bytes:
        return []
    return [
        mirror_scratch_bytes(graph, node) if is_mirror else graph.scratch_bytes[node]
        for node, is_mirror in zip(binding.nodes, binding.is_mirror, strict=True)
    ]


def mirror_scratch_bytes(graph: JointGraph, index: int) -> int:
    """The scratch memory of a node's mirror; what draws numbers again first copies the generator's state."""
    scratch = graph.scratch_bytes[index]
    if index not in graph.redrawn:
        return scratch
    node = graph.nodes[index]
    made = sum(graph.storage_bytes[storage] for storage in node.recreates)
    return max(scratch, graph.node_bytes(node.operands[-1]) - made)


def _reads(graph: JointGraph, binding: Binding) -> Sequence[Sequence[int | None]]:
    """For each step, the steps whose values it reads; a first run reads no state that it draws from."""
    if not graph.redrawn:
        return binding.reads
    steps = zip(binding.nodes, binding.is_mirror, binding.reads, strict=True)
    return [
        reads[:-1] if node in graph.redrawn and not is_mirror else reads for node, is_mirror, reads in steps
    ]


def _deaths(
    graph: JointGraph,
    binding: Binding,
    lowering: Lowering,
    owners: Sequence[tuple[int, int]],
    values: Sequence[tuple[int, ...]],
) -> list[int]:
    """The last step of each instance."""
    runs_at = lowering.runs_at
    last_use = list(runs_at)
    for used_at, reads in zip(lowering.read_until, _reads(graph, binding), strict=True):
        for read in reads:
            if read is not None and last_use[read] < used_at:
                last_use[read] = used_at
    for read, used_at in lowering.read_later:
        last_use[read] = max(last_use[read], used_at)
    for step in binding.outputs:
        last_use[step] = len(binding.nodes) - 1
    deaths = [runs_at[step] for step, _ in owners]
    for used_at, viewed in zip(last_use, values, strict=True):
        for instance in viewed:
            if deaths[instance] < used_at:
                deaths[instance] = used_at
    first = {step: values[step][0] for pair in lowering.held_in.items() for step in pair}
    for step, holder in lowering.held_in.items():
        deaths[first[holder]] = max(deaths[first[holder]], deaths[first[step]])
    return deaths
