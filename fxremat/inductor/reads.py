"""Reads: which steps read which values, views looked through.

Facts about a resolved schedule, for the fusion model. Linear in steps and reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding


def viewed(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at; itself if it is no view, or views an input."""
    return _followed(binding, graph.viewed_places)


def looked_at(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at, where an operator's outputs are told apart.

    Such an output is the step of its ``getitem``.
    """
    nodes = zip(graph.viewed_places, graph.nodes, strict=True)
    return _followed(binding, [place if node.leader is None else None for place, node in nodes])


def _followed(binding: Binding, places: Sequence[int | None]) -> list[int]:
    """For each step, where the operands in these places lead, from one to the next."""
    found: list[int] = []
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        place = places[position]
        source = None if place is None else reads[place]
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
    is_view = [kind is Kind.VIEW for kind in graph.kinds]
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        if is_view[position]:
            continue
        for base in dict.fromkeys([bases[read] for read in reads if read is not None]):
            found[base].append(step)
    return found
