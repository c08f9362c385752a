"""Concatenation: what Inductor makes of one on a CPU.

The loops of the operands write to slices of the result. An operand whose layout is still free has no other
buffer: it is held in the result. One that another concatenation made, that is read through a view, or whose
layout an external kernel has fixed is copied. The gradient of a convolution that reads a result gets a copy
of it in the backward.

Facts about a resolved schedule, for the fusion model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from fxremat import ops
from fxremat.graph import JointGraph
from fxremat.ops import Kind
from fxremat.schedule import Binding


def held_operands(
    graph: JointGraph, binding: Binding, cats: Iterable[int], free: Collection[int]
) -> dict[int, int]:
    """Operands that are computed right into a concatenation and read from there.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        cats: The steps that concatenate.
        free: The steps among those that they read for whose values nothing fixes a layout.

    Returns:
        For the step of each such operand, the first concatenation of it.
    """
    held: dict[int, int] = {}
    for step in cats:
        for read in binding.reads[step]:
            if read is None or read not in free:
                continue
            loop = graph.loops[binding.nodes[read]]
            if loop.kind in (Kind.POINTWISE, Kind.REDUCTION) and not loop.is_cat:
                held.setdefault(read, step)
    return held


def gradient_copies(
    graph: JointGraph,
    binding: Binding,
    cats: Mapping[int, int],
    readers: Sequence[Sequence[int]],
    holders: frozenset[int],
) -> Iterable[tuple[int, int, int]]:
    """What gradients of convolutions read of concatenations in the backward.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        cats: The steps that concatenate, and when the last of each one's operands is there.
        readers: For each step, those that read its value, views looked through.
        holders: The concatenations that operands are held in.

    Yields:
        Triples (first step, last step, bytes).
    """
    for step, runs_at in cats.items():
        reads = [reader for reader in readers[step] if _is_convolution_gradient(graph, binding, reader)]
        if reads and step >= binding.boundary:
            takes_over = len(reads) == len(readers[step]) and step not in holders
            yield runs_at, runs_at if takes_over else max(reads), graph.node_bytes(binding.nodes[step])


def _is_convolution_gradient(graph: JointGraph, binding: Binding, step: int) -> bool:
    return ops.is_convolution_gradient(graph.fx_nodes[binding.nodes[step]])
