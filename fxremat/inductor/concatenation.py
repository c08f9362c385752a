"""Concatenation: what Inductor makes of one on a CPU.

The loops of the operands write to slices of the result. An operand whose layout is still free has no other
buffer: it is held in the result. One that another concatenation made, that is read through a view, or whose
layout an external kernel has fixed is copied. In the backward convolutions and their gradients get copies of
the results that they read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts


def is_in_slices(graph: JointGraph, node: int) -> bool:
    """Whether a node is a concatenation to which its operands' loops write: it takes no buffer's place."""
    return graph.loops[node].is_cat and graph.is_on_cpu


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


def is_copied_for(graph: JointGraph, binding: Binding, cat: int, reader: int) -> bool:
    """Whether a step gets a copy of a concatenation that it reads, on a CPU."""
    return cat >= binding.boundary and binding.nodes[reader] in facts(graph).convolutions


def copied_cats(graph: JointGraph) -> dict[int, int]:
    """The bytes of the concatenations of which a convolution gets a copy where they run in the backward."""
    if not graph.is_on_cpu or not facts(graph).convolutions:
        return {}
    cats = (node for node, loop in enumerate(graph.loops) if loop.is_cat)
    convolutions = facts(graph).convolutions
    return {cat: graph.node_bytes(cat) for cat in cats if not convolutions.isdisjoint(_readers(graph, cat))}


def _readers(graph: JointGraph, node: int) -> Iterator[int]:
    """The nodes that read a value, views looked through."""
    for user in graph.users[node]:
        if graph.loops[user].kind is Kind.VIEW:
            yield from _readers(graph, user)
        else:
            yield user


def convolution_copies(
    graph: JointGraph,
    binding: Binding,
    cats: Mapping[int, int],
    runs_at: Sequence[int],
    readers: Sequence[Sequence[int]],
    holders: frozenset[int],
) -> Iterable[tuple[int, int, int]]:
    """What convolutions and their gradients read of concatenations in the backward: each a copy of its own.

    The concatenation itself is gone once they are made, unless something else needs it.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        cats: The steps that concatenate, and when the last of each one's operands is there.
        runs_at: For each step, when its kernel runs.
        readers: For each step, those that read its value, views looked through.
        holders: The concatenations that operands are held in.

    Yields:
        Triples (first step, last step, bytes).
    """
    for step, first in cats.items():
        copies = [runs_at[reader] for reader in readers[step] if is_copied_for(graph, binding, step, reader)]
        if copies:
            takes_over = len(copies) == len(readers[step]) and step not in holders
            ends = [*copies[:-1], first] if takes_over else copies  # the last one takes its place
            yield from ((first, end, graph.node_bytes(binding.nodes[step])) for end in ends)
