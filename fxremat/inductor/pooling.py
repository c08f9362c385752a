"""Pooling: what Inductor makes of the two results of maximum pooling, and of its gradient.

Pooling has two results: the largest elements, and at which offset of its window each stands. Over a small
window the second is a loop like any other: unless it is saved or returned it gets no buffer, and what was
pooled is held until the offsets have been read.

Its gradient is a scatter where a CPU runs several threads: an operator of PyTorch's that writes over its
first operand, which is computed for it. The other two, the index and the summands, are copied for it where
convolutions have them lie channels last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts

# Inductor's defaults on a CPU: config.realize_cpu_acc_reads_threshold, realize_reads_threshold.
MAX_ELEMENTS = 12
MAX_ELEMENTS_WHEN_REUSED = 4


def inlined_offsets(graph: JointGraph, binding: Binding) -> Iterable[tuple[int, list[int]]]:
    """The poolings whose offsets get no buffer.

    Yields:
        The step of a pooling, and the steps that read its offsets.
    """
    offsets = facts(graph).pooling_offsets
    steps = [step for step, position in enumerate(binding.nodes) if position in offsets] if offsets else []
    picks = {step: binding.reads[step][0] for step in steps}
    readers: dict[int, list[int]] = {step: [] for step in picks}
    for step, reads in enumerate(binding.reads if picks else ()):
        for read in reads:
            if read in readers:
                readers[read].append(step)
    for pick, found in readers.items():
        pooling = picks[pick]
        is_saved = bool(found) and pick < binding.boundary <= found[-1]
        if pooling is None or is_saved or pick in binding.outputs:
            continue
        limit = MAX_ELEMENTS if len(found) == 1 else MAX_ELEMENTS_WHEN_REUSED
        if found and _window_elements(graph, binding, pooling) <= limit:
            yield pooling, found


def _window_elements(graph: JointGraph, binding: Binding, pooling: int) -> int:
    return math.prod(ops.argument(graph.fx_nodes[binding.nodes[pooling]], "kernel_size"))


def scatters(graph: JointGraph, binding: Binding, bases: Sequence[int]) -> dict[int, list[int]]:
    """What scatters read besides their first operands.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        bases: For each step, that whose buffer its value looks at.

    Returns:
        For the step of each scatter, the steps of the views through which it reads its index and its
        summands.
    """
    steps = [step for step, position in enumerate(binding.nodes) if graph.loops[position].is_scatter]
    reads = {step: [read for read in binding.reads[step] if read is not None] for step in steps}
    return {step: [read for read in found if bases[read] != read] for step, found in reads.items()}


def scatter_buffers(
    graph: JointGraph,
    binding: Binding,
    found: Mapping[int, Sequence[int]],
    bases: Sequence[int],
    runs_at: Sequence[int],
) -> Iterable[tuple[int, int, int]]:
    """What a scatter holds from when its index is computed: copies of what it reads, and its result.

    An index that was saved for the backward has it wait for nothing.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        found: What ``scatters`` says.
        bases: For each step, that whose buffer its value looks at.
        runs_at: For each step, when its kernel runs.

    Yields:
        Triples (first step, last step, bytes).
    """
    copies_views = graph.is_on_cpu and bool(facts(graph).convolutions)
    for step, views in found.items():
        last = runs_at[step]
        start = binding.boundary if last >= binding.boundary else 0
        computed = (runs_at[bases[view]] for view in views)
        first = max((at for at in computed if at >= start), default=last)
        for view in views if copies_views else ():
            yield first, last, ops.value_bytes(graph.fx_nodes[binding.nodes[view]])
        if first < last:
            yield first, last - 1, graph.node_bytes(binding.nodes[step])
