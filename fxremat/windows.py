"""Windows: where Inductor computes the offsets of a maximum pooling again, inside of what reads them.

Pooling has two results: the largest elements, and at which offset of its window each stands. Over a small
window the second is a loop like any other: unless it is saved or returned it gets no buffer, and what was
pooled is held until the offsets have been read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxremat import ops
from fxremat.graph import JointGraph
from fxremat.schedule import Binding

# Inductor's defaults on a CPU: config.realize_cpu_acc_reads_threshold, realize_reads_threshold.
MAX_ELEMENTS = 12
MAX_ELEMENTS_WHEN_REUSED = 4


def inlined_offsets(graph: JointGraph, binding: Binding) -> Iterable[tuple[int, list[int]]]:
    """The poolings whose offsets get no buffer.

    Yields:
        The step of a pooling, and the steps that read its offsets.
    """
    offsets = graph.pooling_offsets
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
