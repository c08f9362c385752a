"""Concatenation: what Inductor makes of one on a CPU.

The loops of the operands write to slices of the result. An operand whose layout is still free has no other
buffer: it is held in the result. One that another concatenation made, that is read through a view, or whose
layout an external kernel has fixed is copied. So is each of a result that convolutions of the backward read,
which lies as these work (``images.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind, is_channels_first
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts
from fxremat.inductor.inlining import Inlining


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


def in_order_of_sizes(
    graph: JointGraph, binding: Binding, cats: Iterable[int], inlining: Inlining, last: Collection[int]
) -> frozenset[int]:
    """Concatenations of images in the forward that lie in the order of their sizes.

    Inductor makes one channels last only where an operand is known to lie so by then: a convolution has made
    it or read it, or it was stored so; or where none is stored by then, and one was traced so.

    Args:
        graph: The graph, with convolutions that work channels last.
        binding: The resolved schedule.
        cats: The steps that concatenate, in order.
        inlining: Which values are stored, and who reads them.
        last: The steps whose values are stored channels last.
    """
    known, nodes, found = facts(graph), binding.nodes, set[int]()

    def lies_last(read: int, cat: int) -> bool:
        base = inlining.bases[read]
        if known.images.get(nodes[base]) != known.images.get(nodes[read]):
            return False
        if base in last or graph.loops[nodes[base]].is_cat:
            return base in last or base not in found
        by_then = (base, *(each for each in inlining.readers[base] if each < cat))
        return any(nodes[each] in known.convolutions for each in by_then)

    for cat in cats:
        if cat >= binding.boundary or nodes[cat] not in known.images:
            continue
        reads = binding.reads[cat]
        stored = [each for each in reads if each is None or inlining.realized[inlining.bases[each]]]
        if stored:
            is_last = any(each is not None and lies_last(each, cat) for each in stored)
        else:
            traced = (graph.fx_nodes[operand].meta["val"] for operand in graph.nodes[nodes[cat]].operands)
            is_last = not all(map(is_channels_first, traced))
        if not is_last:
            found.add(cat)
    return frozenset(found)
