"""Layout: where Inductor copies a value because a convolution wants it channels last.

It decides for the forward and for the backward whether their convolutions work so, for the backward as if
nothing were computed again (``order.py``); what of the caller's the forward has copied, the backward reads
as well. Then Inductor lays out channels last whatever leads to a convolution of the same graph, and what
reads that before its last convolution. Where a convolution reads a part of a value, such as a slice of a
gradient, the part is copied, and the value needs no buffer for it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import torch
from torch import fx

from fxremat._torch import compilers, graphs, lowered
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding, bind_nodes
from fxremat.inductor.facts import facts


def input_copies(graph: JointGraph, binding: Binding) -> Iterable[tuple[int, list[int], int]]:
    """Copies of the caller's tensors (weights, images) that lie channels last.

    Args:
        graph: The graph.
        binding: The resolved schedule.

    Yields:
        Triples (first step, steps that read the copy, bytes). The forward's begin with the forward: of what
        convolutions read, and of what leads to one and is saved, for the backward's readers. Those that the
        backward alone makes are held while one convolution runs.
    """
    known = facts(graph)
    if not known.convolutions:
        return
    boundary = binding.boundary
    steps = [step for step, node in enumerate(binding.nodes) if node in known.convolutions]
    reads = [(~read, step) for step in steps for read in _operands(graph, binding, step) if read < 0]
    if works_channels_last(graph, binding, range(boundary)):
        readers: dict[int, list[int]] = {}
        for operand, step in reads:
            readers.setdefault(operand, []).append(step)
        leading = inputs_leading(graph, binding)
        for step, node in enumerate(binding.nodes[boundary:] if leading else (), boundary):
            for operand in leading & known.inputs_seen[node]:
                readers.setdefault(operand, []).append(step)
        yield from ((0, found, known.copied_bytes[operand]) for operand, found in readers.items())
    elif works_channels_last(graph, binding, range(boundary, len(binding.nodes))):
        late = [(operand, step) for operand, step in reads if step >= boundary]
        yield from ((step, [step], known.copied_bytes[operand]) for operand, step in late)


def inputs_leading(graph: JointGraph, binding: Binding) -> frozenset[int]:
    """The inputs that lead to convolutions of the forward."""
    part = _in_part(graph, binding, range(binding.boundary))
    return frozenset(~read for read in part if read < 0)


def works_channels_last(graph: JointGraph, binding: Binding, part: range) -> bool:
    """Whether Inductor has the convolutions of the forward or the backward work channels last.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        part: The steps of the forward, or of the backward.
    """
    known = facts(graph)
    own = [binding.nodes[step] for step in part if not binding.is_mirror[step]]
    seen = tuple(node for node in own if node in known.convolutions)
    if not seen:
        return False
    key = seen, len(own)
    found = known.works_channels_last.get(key)
    if found is None:
        nodes = [graph.fx_nodes[node] for node in (*range(graph.num_inputs), *own)]
        found = compilers.lays_out_channels_last(nodes)
        known.works_channels_last[key] = found
    return found


def layouts(graph: JointGraph) -> Mapping[int, Hashable]:
    """How images lie that are stored: nothing is written over one that lies otherwise.

    What is known before there is a schedule, of graphs whose convolutions work channels last.
    """
    known = facts(graph)
    own = bind_nodes(graph, range(graph.num_inputs, len(graph.nodes))) if known.images else None
    if own is None or not works_channels_last(graph, own, range(own.boundary)):
        return {}
    in_order = known.flattened - known.sums.keys()
    return {node: (*sizes, node in in_order) for node, sizes in known.images.items()}


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
    found = (
        set(part) & _in_part(graph, binding, part, waiting)
        for part in parts
        if works_channels_last(graph, binding, part)
    )
    return frozenset().union(*found)


def after_bytes(graph: JointGraph, binding: Binding) -> int:
    """What is live behind the last step while autograd copies the largest gradient that it copies.

    It keeps a gradient that lies as its parameter does, and copies others, one after the other. The gradients
    of convolutions that work channels last lie so, whatever their weights do. 0 where none is copied.
    Tangents count, though those that are no caller's are gone by then.
    """
    known = facts(graph)
    if not known.weights:
        return 0
    if works_channels_last(graph, binding, range(binding.boundary, len(binding.nodes))):
        sizes = (known.copied_bytes[place] for place in known.weights)
    else:
        sizes = (ops.value_bytes(graph.fx_nodes[place]) for place in _laid_out_else(graph))
    copied = max(sizes, default=0)
    return copied and copied + graph.bytes_at_the_end


def _laid_out_else(graph: JointGraph) -> Iterable[int]:
    """The weights whose gradients were traced with other strides, those of sizes of 1 left out."""
    for place, gradient in facts(graph).weights.items():
        if not lies_as(graph.fx_nodes[place], graph.fx_nodes[gradient].meta["val"].stride()):
            yield place


def lies_as(node: fx.Node, strides: Sequence[int]) -> bool:
    """Whether a node's tensor has these strides, those of sizes of 1 left out."""
    tensor: torch.Tensor = node.meta["val"]
    each = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(graphs.hint(size) == 1 or graphs.hint(own) == graphs.hint(step) for size, own, step in each)


def arranged_convolutions(graph: JointGraph) -> frozenset[fx.Node]:
    """The convolutions, and gradients of such, that work channels last as long as nothing is computed again.

    A gradient gets the weights of the forward as they lie then, and works so, too. On a GPU many do not.
    """
    forward, backward = graph.fx_nodes[: graph.boundary], graph.fx_nodes[graph.boundary :]
    inputs = graph.fx_nodes[: graph.num_inputs]
    found: list[fx.Node] = []
    works_so = False
    for nodes, before in ((forward, ()), (backward, inputs)):
        works_so |= compilers.lays_out_channels_last([*before, *nodes])
        found += filter(ops.has_convolution, nodes if works_so else ())
    return frozenset(found)


def is_settled(graph: JointGraph, arranged: Collection[fx.Node]) -> bool:
    """Whether what gradients of convolutions read lies as they work, be it not for the code to show.

    So it is where they work channels last, and where it lies as it lay before.

    Args:
        graph: The graph.
        arranged: Its ``arranged_convolutions``.
    """
    gradients = filter(ops.is_convolution_gradient, graph.fx_nodes)
    return lowered.gradients_keep_layouts() or all(each in arranged for each in gradients)


def _in_part(graph: JointGraph, binding: Binding, part: range, waiting: Collection[int] = ()) -> set[int]:
    """What leads to a convolution, and what reads such a value before the last convolution.

    These are steps of the part and of others, and inputs of the graph as negative numbers.
    """
    convolutions = facts(graph).plain_convolutions
    preferred: set[int] = set()
    last = part.start - 1
    for step in reversed(part):
        is_convolution = binding.nodes[step] in convolutions and step not in waiting
        if is_convolution or step in preferred:
            last = max(last, step) if is_convolution else last
            preferred.update((step, *_operands(graph, binding, step)))
    for step in part if preferred else ():
        operands = _operands(graph, binding, step)
        if not preferred.isdisjoint(operands if step <= last else [read for read in operands if read < last]):
            preferred.add(step)
    return preferred


def _operands(graph: JointGraph, binding: Binding, step: int) -> list[int]:
    """What a step reads: other steps, and inputs of the graph as negative numbers."""
    operands = graph.nodes[binding.nodes[step]].operands
    reads = binding.reads[step]
    return [~operand if read is None else read for operand, read in zip(operands, reads, strict=True)]
