"""Kernel order: how the kernels of a plan are to run, as far as it matters to its memory.

Values are made where the plan has them. Loops end their group where it has no room (``kernel_groups.py``),
and so are concatenations of the forward held back. Inductor makes one loop of all that read the same, however
far apart they stand. Where layers concatenate all before them, as in a DenseNet, the loop that makes an
operand writes to each concatenation of it, and all of these are there from the first layer on. That saves
reading the operand again, and takes memory that grows with the square of the layers where the backward is
not handed all of it anyway.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, bind
from fxremat.inductor.buffers import buffers
from fxremat.inductor.grouping import Grouping, group
from fxremat.inductor.kernel_groups import kernel_groups
from fxremat.inductor.timing import timing
from fxremat.memory.liveness import MemoryProfile, profile_of
from fxremat.memory.lowering import Lowering


class KernelOrder(NamedTuple):
    """How the kernels of a plan are to run.

    Attributes:
        made_at: For each step of the plan the one at which its value is made.
        groups: On a CPU, for each of them the number of the kernel group that its loop is in.
        held_back: The steps of the concatenations that are not to be there before.
    """

    made_at: Sequence[int] = ()
    groups: Sequence[int] = ()
    held_back: Set[int] = frozenset()


def kernel_order(graph: JointGraph, schedule: Schedule) -> KernelOrder:
    """How the kernels of a schedule are to run that Inductor lowers."""
    grouping = group(graph, bind(graph, schedule))
    lowering = buffers(grouping, timing(grouping))
    profile = profile_of(graph, grouping.binding, lowering)
    groups = kernel_groups(grouping, lowering, profile) if graph.is_on_cpu else ()
    held_back = frozenset(_without_room(grouping, lowering, profile))
    return KernelOrder(grouping.inlining.realized_at, groups, held_back)


def _without_room(grouping: Grouping, lowering: Lowering, profile: MemoryProfile) -> Iterator[int]:
    """The concatenations that would take a program above its peak, were they there with an operand.

    Those that run again are not there before the external kernel in front of them.
    """
    binding, inlining, runs_at = grouping.binding, grouping.inlining, lowering.runs_at
    spare_bytes = profile.peak_bytes - profile.live_bytes
    kernels = [step for step in range(len(runs_at)) if inlining.is_external(step)]
    for cat in sorted(inlining.slices.cats):
        operands = (inlining.bases[read] for read in binding.reads[cat] if read is not None)
        starts = [min((runs_at[each] for each in operands), default=cat)]
        if cat >= binding.boundary:
            starts.append(binding.boundary)
        if binding.is_mirror[cat]:
            starts += kernels[: bisect(kernels, cat)][-1:]
        before = spare_bytes[max(starts) : runs_at[cat]]
        size = grouping.graph.node_bytes(binding.nodes[cat])
        if (before < size).any():
            yield cat
        else:
            before -= size
