"""Layout: where Inductor copies a value because a convolution wants it channels last.

Inductor lays out channels last whatever leads to a
convolution of the same graph, and what reads that before its last convolution. Where a convolution reads a
part of a value, such as a slice of a gradient, the part is copied, and the value needs no buffer for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts


def input_copies(graph: JointGraph, binding: Binding) -> Iterable[tuple[int, int, int]]:
    """Copies of the caller's tensors (weights, images) that convolutions read.

    Yields:
        Triples (first step, last step, bytes): from the start until the last convolution has run.
    """
    known = facts(graph)
    last: dict[int, int] = {}
    for step, position in enumerate(binding.nodes):
        if position in known.convolutions:
            operands = graph.nodes[position].operands
            last.update((operand, step) for operand in operands if operand < graph.num_inputs)
    for operand, step in last.items():
        yield 0, step, known.copied_bytes[operand]


def parts_read(graph: JointGraph, binding: Binding, bases: Sequence[int]) -> dict[int, list[int]]:
    """The views through which convolutions and their gradients read less than the whole of a value.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        bases: For each step, that whose buffer its value looks at.

    Returns:
        For each step that reads such views, their steps.
    """
    convolutions = facts(graph).convolutions
    found: dict[int, list[int]] = {}
    for step, position in enumerate(binding.nodes if convolutions else ()):
        for read in binding.reads[step] if position in convolutions else ():
            if read is not None and _elements(graph, binding, read) < _elements(graph, binding, bases[read]):
                found.setdefault(step, []).append(read)
    return found


def _elements(graph: JointGraph, binding: Binding, step: int) -> int:
    return graph.loops[binding.nodes[step]].elements


def channels_last(graph: JointGraph, binding: Binding, waiting: Collection[int] = ()) -> frozenset[int]:
    """The steps whose values Inductor lays out channels last where it stores them to have them read often.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        waiting: The steps that are made to wait for others, in which Inductor sees no convolutions.
    """
    if not facts(graph).convolutions:
        return frozenset()
    parts = range(binding.boundary), range(binding.boundary, len(binding.nodes))
    return frozenset().union(*(_in_part(graph, binding, part, waiting) for part in parts))


def _in_part(graph: JointGraph, binding: Binding, part: range, waiting: Collection[int]) -> frozenset[int]:
    """What leads to a convolution, and what reads such a value of before the last convolution."""
    preferred: set[int] = set()
    last = part.start - 1
    for step in reversed(part):
        is_convolution = step not in waiting and ops.is_convolution(graph.fx_nodes[binding.nodes[step]])
        if is_convolution or step in preferred:
            last = max(last, step) if is_convolution else last
            preferred.update((step, *_operands(graph, binding, step)))
    for step in part if preferred else ():
        if any(read < last and read in preferred for read in _operands(graph, binding, step)):
            preferred.add(step)
    return frozenset(step for step in preferred if step in part)


def _operands(graph: JointGraph, binding: Binding, step: int) -> list[int]:
    """What a step reads: other steps, and inputs of the graph as negative numbers."""
    operands = graph.nodes[binding.nodes[step]].operands
    reads = binding.reads[step]
    return [~operand if read is None else read for operand, read in zip(operands, reads, strict=True)]
