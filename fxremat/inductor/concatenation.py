"""Concatenation: what Inductor makes of one on a CPU.

The loops of the operands write to slices of the result. An operand whose layout is still free has no other
buffer: it is held in the result. One that another concatenation made, that is read through a view, or whose
layout an external kernel has fixed is copied. So is each of a result that convolutions of the backward read,
which lies as these work (``images.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts


def is_in_slices(graph: JointGraph, node: int) -> bool:
    """Whether a node is a concatenation to which its operands' loops write: it takes no buffer's place."""
    return graph.loops[node].is_cat and graph.is_on_cpu


def held_operands(
    graph: JointGraph,
    binding: Binding,
    cats: Iterable[int],
    free: Collection[int],
    readers: Sequence[Sequence[int]],
) -> dict[int, int]:
    """Operands that are computed right into a concatenation and read from there.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        cats: The steps that concatenate.
        free: The steps among those that they read for whose values nothing fixes a layout.
        readers: For each step, those that read its value, views looked through.

    Returns:
        For the step of each such operand, the first concatenation of it.
    """
    convolutions = facts(graph).convolutions
    held: dict[int, int] = {}
    for step in cats:
        if step >= binding.boundary and any(binding.nodes[each] in convolutions for each in readers[step]):
            continue
        for read in binding.reads[step]:
            if read is None or read not in free:
                continue
            loop = graph.loops[binding.nodes[read]]
            if loop.kind in (Kind.POINTWISE, Kind.REDUCTION) and not loop.is_cat:
                held.setdefault(read, step)
    return held
