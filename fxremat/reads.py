"""Reads: which steps read which values, views looked through.

Facts about a resolved schedule, for the fusion model. Linear in steps and reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.graph import JointGraph
from fxremat.ops import Kind
from fxremat.schedule import Binding


def viewed(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at; itself if it is no view, or views an input."""
    bases: list[int] = []
    for step, position in enumerate(binding.nodes):
        node = graph.nodes[position]
        source = None
        if graph.loops[position].kind is Kind.VIEW and node.shares is not None:
            source = binding.reads[step][node.operands.index(node.shares)]
        bases.append(step if source is None else bases[source])
    return bases


def looked_at(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at, where an operator's outputs are told apart.

    Such an output is the step of its ``getitem``.
    """
    found: list[int] = []
    for step, position in enumerate(binding.nodes):
        node = graph.nodes[position]
        source = None
        if graph.loops[position].kind is Kind.VIEW and node.shares is not None and node.leader is None:
            source = binding.reads[step][node.operands.index(node.shares)]
        found.append(step if source is None else found[source])
    return found


def readers(graph: JointGraph, binding: Binding, bases: Sequence[int]) -> list[list[int]]:
    """For each step that is no view, the steps other than views that read its buffer, ascending.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        bases: What ``viewed`` says.
    """
    found: list[list[int]] = [[] for _ in binding.nodes]
    for step, reads in enumerate(binding.reads):
        if graph.loops[binding.nodes[step]].kind is Kind.VIEW:
            continue
        for base in dict.fromkeys([bases[read] for read in reads if read is not None]):
            found[base].append(step)
    return found
