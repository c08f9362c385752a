"""Instances: which pieces of memory the steps of a schedule allocate, and which of them each value views.

A *storage instance* is one allocation of a storage: each occurrence of a node has its own. A value views
the instances that its node creates or, where the node is a view, those of the operand's latest occurrence.
Linear in steps.
"""

from __future__ import annotations

from typing import TypeAlias

from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding

Instances: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, ...]]]


def storage_instances(graph: JointGraph, binding: Binding) -> Instances:
    """All instances as (step, storage), in order of birth, and for each step those that its value views."""
    owners: list[tuple[int, int]] = []
    values: list[tuple[int, ...]] = []
    nodes, places = graph.nodes, graph.shared_places
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        node, place = nodes[position], places[position]
        if place is None:
            created = node.recreates if binding.is_mirror[step] else node.creates
            values.append(tuple(range(len(owners), len(owners) + len(created))))
            for storage in created:
                owners.append((step, storage))
            continue
        source = reads[place]
        shared = values[source] if source is not None else ()
        if node.leader is not None:
            shared = tuple([instance for instance in shared if owners[instance][1] in node.views])
        values.append(shared)
    return owners, values
