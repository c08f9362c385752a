"""Facts: what Inductor sees in the operators of a graph, whatever the schedule.

They are found once for a graph, and kept as long as the graph is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxremat._torch import graphs, lowered
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind, is_channels_first, picks_offsets
from fxremat.inductor.sequences import STORED_AS, stored_as_read
from fxremat.inductor.shown import NOTHING, Shown
from fxremat.inductor.sums import SUM, gradient_sums
from fxremat.inductor.terms import Terms

WEIGHTS = 1  # which of the gradients of a convolution is that for its weights


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a graph's nodes.

    Attributes:
        kinds: How each node is lowered.
        viewed_places: For each view, which of its operands it looks at; None for others.
        picked_places: The same, but None for a ``getitem``, too.
        inputs: For each node, the graph's inputs that it reads itself.
        inputs_seen: The same, with those of which it reads views.
        bytes_of_one: Bytes of each node's buffer, or of that which a ``getitem`` picks; 0 if there is no one.
        convolutions: Indices of convolutions and their gradients.
        plain_convolutions: Indices of convolutions.
        hinting: Indices of external kernels, and of batched products that are none, whose operands get a
            buffer as soon as they are computed.
        strided_views: Indices of the views that name the strides of what they show, which therefore gets a
            buffer as soon as it is computed.
        part_views: Indices of the views that show a part of what they look at, or a view of it.
        alike: For each view, the first that shows the same of values of the same sizes.
        pooling_offsets: Indices of the nodes that pick, of the results of a maximum pooling, the offsets.
        copied_bytes: For each input of a graph with convolutions, bytes of the copy that lies channels last;
            0 where the input lies so itself.
        sequences: For each convolution over sequences, and its gradient, the places of its operands that do
            not lie in the order of their sizes, if there are any.
        stored_as_read: The strides of the values that are stored as such convolutions read them.
        images: The sizes of values that are images of several points, in graphs with convolutions.
        flattened: Indices of those that are computed in loops and have a view that is none, such as one with
            all points in a dimension: stored before that, they lie in the order of their sizes, unless
            convolutions of the same graph lead to them.
        sums: The sums of gradients that are stored, and which of their operands each takes the place of.
        weights: The inputs that convolutions have as weights, and the gradients of these that a convolution's
            gradient computes.
        works_channels_last: What Inductor has said of the convolutions of a forward or a backward, by which
            they are and by the number of its steps (``layout.py``).
        terms: What loops of any schedule compute.
        shown: What plans that were lowered have shown.
    """

    kinds: tuple[Kind, ...]
    viewed_places: tuple[int | None, ...]
    picked_places: tuple[int | None, ...]
    inputs: tuple[frozenset[int], ...]
    inputs_seen: tuple[frozenset[int], ...]
    bytes_of_one: tuple[int, ...]
    convolutions: frozenset[int]
    plain_convolutions: frozenset[int]
    hinting: frozenset[int]
    strided_views: frozenset[int]
    part_views: frozenset[int]
    alike: Mapping[int, int]
    pooling_offsets: frozenset[int]
    copied_bytes: Mapping[int, int]
    sequences: Mapping[int, Sequence[int]]
    stored_as_read: Mapping[int, tuple[int, ...]]
    images: Mapping[int, Sequence[int]]
    flattened: frozenset[int]
    sums: Mapping[int, int]
    weights: Mapping[int, int]
    works_channels_last: dict[tuple[tuple[int, ...], int], bool] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    shown: Shown = NOTHING


_known: weakref.WeakKeyDictionary[JointGraph, Facts] = weakref.WeakKeyDictionary()


def facts(graph: JointGraph) -> Facts:
    """The facts of a graph that was traced."""
    found = _known.get(graph)
    if found is None:
        found = _known[graph] = _facts(graph)
    return found


def informed(graph: JointGraph, shown: Shown, scratch_bytes: tuple[int, ...]) -> JointGraph:
    """The graph, known as it was shown to be, the scratch memory of its operators included."""
    taught = replace(graph, scratch_bytes=scratch_bytes)
    _known[taught] = replace(facts(graph), shown=shown)
    return taught


def like(graph: JointGraph, other: JointGraph) -> JointGraph:
    """The graph with what is known of another trace of it."""
    return informed(graph, facts(other).shown, other.scratch_bytes)


def mark(graph: JointGraph) -> None:
    """Have whatever is made of a graph know how values of it are to be stored."""
    for index, strides in facts(graph).stored_as_read.items():
        graph.fx_nodes[index].meta[STORED_AS] = strides
    for index, place in facts(graph).sums.items():
        graph.fx_nodes[index].meta[SUM] = place


def as_usual(graph: JointGraph) -> JointGraph:
    """The graph as it is compiled without a budget: Inductor decides which sums are stored."""
    known = facts(graph)
    if not known.sums:
        return graph
    usual = copy.copy(graph)  # with all that is known of it
    _known[usual] = replace(known, sums={})
    return usual


def _facts(graph: JointGraph) -> Facts:
    kinds = tuple(loop.kind for loop in graph.loops)
    places = zip(graph.shared_places, kinds, strict=True)
    viewed = tuple(place if kind is Kind.VIEW else None for place, kind in places)
    each = tuple(enumerate(graph.fx_nodes))
    convolutions = frozenset(index for index, node in each if ops.has_convolution(node))
    inputs = range(graph.num_inputs) if convolutions else ()
    images = dict(_images(graph)) if convolutions else {}
    stored = stored_as_read(graph, convolutions)
    return Facts(
        kinds,
        viewed,
        tuple(None if node.leader is not None else at for at, node in zip(viewed, graph.nodes, strict=True)),
        tuple(frozenset(read for read in node.operands if read < graph.num_inputs) for node in graph.nodes),
        tuple(_inputs_seen(graph, viewed)),
        tuple(graph.storage_bytes[each.views[0]] if len(each.views) == 1 else 0 for each in graph.nodes),
        convolutions,
        frozenset(index for index in convolutions if ops.is_convolution(graph.fx_nodes[index])),
        frozenset(at for at, node in each if _is_hinting(node, kinds[at])),
        frozenset(at for at, node in each if ops.packet(node) is ops.aten.as_strided),
        _part_views(graph, viewed),
        _alike(graph, viewed),
        frozenset(index for index, node in each if picks_offsets(node)),
        {index: _copied_bytes(graph, index) for index in inputs},
        {index: copied for index in convolutions if (copied := _sequences(graph, index, stored))},
        stored,
        images,
        frozenset(_flattened(graph, viewed, images)),
        dict(gradient_sums(graph, images)),
        _weights(graph) if convolutions else {},
    )


def _is_hinting(node: fx.Node, kind: Kind) -> bool:
    is_product = kind is Kind.KERNEL or ops.packet(node) is ops.aten.bmm
    return is_product and lowered.wants_buffers(node)


def _inputs_seen(graph: JointGraph, viewed: Sequence[int | None]) -> Iterable[frozenset[int]]:
    shown = {index: index for index in range(graph.num_inputs)}  # what views show of the caller's
    for index, (place, node) in enumerate(zip(viewed, graph.nodes, strict=True)):
        if place is not None and node.operands[place] in shown:
            shown[index] = shown[node.operands[place]]
        yield frozenset(shown[operand] for operand in node.operands if operand in shown)


def _part_views(graph: JointGraph, viewed: Sequence[int | None]) -> frozenset[int]:
    found: set[int] = set()
    for index, place in enumerate(viewed):
        if place is not None:
            shown = graph.nodes[index].operands[place]
            if shown in found or graph.loops[index].elements < graph.loops[shown].elements:
                found.add(index)
    return frozenset(found)


def _alike(graph: JointGraph, viewed: Sequence[int | None]) -> dict[int, int]:
    found: dict[int, int] = {}
    first: dict[tuple[object, ...], int] = {}
    for index, place in enumerate(viewed):
        if place is None:
            continue
        node = graph.fx_nodes[index]
        shown = graph.fx_nodes[graph.nodes[index].operands[place]]
        sizes = (each.shape for each in ops.tensors([node.meta.get("val"), shown.meta.get("val")]))
        given = [each for each in (*node.args, *node.kwargs.items()) if each is not shown]
        found[index] = first.setdefault((node.target, str(given), *map(str, sizes)), index)
    return found


def _images(graph: JointGraph) -> Iterable[tuple[int, Sequence[int]]]:
    for place, node in enumerate(graph.fx_nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            sizes = [graphs.hint(size) or 1 for size in value.shape]
            if sizes[2] * sizes[3] > 1:
                yield place, sizes


def _flattened(
    graph: JointGraph, viewed: Sequence[int | None], images: Mapping[int, Sequence[int]]
) -> Iterable[int]:
    for index, place in enumerate(viewed) if images else ():
        if place is None or index in images:
            continue
        shown = graph.nodes[index].operands[place]
        if shown in images and graph.loops[shown].kind is Kind.POINTWISE:
            yield shown


def _weights(graph: JointGraph) -> dict[int, int]:
    gradients = enumerate(graph.backward_outputs)
    return {place: node for place, node in gradients if node is not None and _is_weight_gradient(graph, node)}


def _is_weight_gradient(graph: JointGraph, node: int) -> bool:
    """Whether a value is a convolution's gradient for its weights, converted or not."""
    while graph.loops[node].kind is Kind.POINTWISE and len(graph.nodes[node].operands) == 1:
        (node,) = graph.nodes[node].operands
    leader = graph.nodes[node].leader
    if leader is None or not ops.is_convolution_gradient(graph.fx_nodes[leader]):
        return False
    return bool(graph.fx_nodes[node].args[1] == WEIGHTS)


def _sequences(graph: JointGraph, index: int, stored: Container[int]) -> list[int]:
    """The places of a convolution's operands that are sequences and lie in another order than their sizes."""
    return [
        place
        for place, operand in enumerate(graph.nodes[index].operands)
        if any(map(_is_unordered, ops.tensors(graph.fx_nodes[operand].meta.get("val"))))
        and graph.index[[*ops.looked_through(graph.fx_nodes[operand])][-1].name] not in stored
    ]


def copied_bytes(graph: JointGraph, index: int, places: Iterable[int]) -> int:
    """Bytes of copies of the values that an operator reads in these places."""
    operands = {graph.nodes[index].operands[place] for place in places}
    return sum(ops.value_bytes(graph.fx_nodes[operand]) for operand in operands)


def _is_unordered(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 3 and not tensor.is_contiguous()


def _copied_bytes(graph: JointGraph, index: int) -> int:
    """Bytes of a copy of a node's value that lies channels last; 0 where the value lies so itself."""
    value = graph.fx_nodes[index].meta.get("val")
    is_copied = any(map(is_channels_first, ops.tensors(value)))
    return ops.value_bytes(graph.fx_nodes[index]) if is_copied else 0
