"""Images: what the convolutions of a backward read lies as their kernels work.

Inductor stores a value that a gradient of a convolution reads in the order that was traced. A kernel that
works channels last then copies it, and both are held. The value of a loop can as well be stored channels
last at once, if nothing reads it that asks for another order: so it is told here.

Later versions of torch store what a view shows before they see that such a gradient reads the view, and ask
for the order of the weights' gradient. For weights of one channel that is (N, H, C, W), which suits no
kernel: images are copied to it and back. On a CPU such gradients are run as they are, on what lies as it is
told: channels last, which is fast. Those that need more memory so than on copies get the order of the sizes
where the plan has no room for it. One run on fake tensors, for backwards with convolutions alone; O(n)
besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat._torch import compilers, lowered
from fxremat._torch.fakes import propagate_layouts
from fxremat.device.calibrate import less_in_order_bytes, may_lie_in_order
from fxremat.graph import ops
from fxremat.graph.loops import LOOPS, Kind, is_channels_first, is_loop, kind, loop, readers
from fxremat.graph.nodes import MIRROR, STEP
from fxremat.inductor.order import STAYS, lays_out_channels_last
from fxremat.inductor.sums import SUM


def arrange_images(
    backward: fx.GraphModule, inputs: Sequence[Any], spare_bytes: Callable[[], Sequence[int]] = tuple
) -> int:
    """Have images stored as the convolutions and gradients of convolutions work that read them.

    Args:
        backward: A backward; its nodes get the values that they have for these inputs.
        inputs: Fake tensors, as the forward hands them over.
        spare_bytes: Says for each step of the plan how much less than its peak is live when it runs, or
            nothing; asked if it matters.

    Returns:
        How many values are stored in another order than was traced.
    """
    convolutions = list(filter(_has_convolution, backward.graph.nodes))
    if not convolutions:
        return 0
    propagate_layouts(backward, inputs)
    stores_views = lowered.stores_for_gradients() and lays_out_channels_last(backward)
    alone = list(filter(may_lie_in_order, convolutions))
    in_order = _without_room(alone, spare_bytes)
    found = dict.fromkeys(
        image
        for node in convolutions
        if node not in in_order and _works_channels_last(node)
        for image in _images(node)
        if _is_copied(image, stores_views) and _may_lie_otherwise(image)
    )
    for image in found:
        _store_channels_last(image)
    shared = sum(map(_store_for_all, filter(_waits, convolutions)))
    copied = sum(map(_read_in_order, in_order))
    for node in alone:
        _run_as_it_is(node)
    if found or alone or shared:
        backward.recompile()
    return len(found) + copied


def _without_room(
    gradients: Sequence[fx.Node], spare_bytes: Callable[[], Sequence[int]]
) -> Sequence[fx.Node]:
    """Those that need less memory in the order of the sizes, and by more than the plan has room for."""
    needing = [(node, size) for node in gradients if (size := less_in_order_bytes(node))]
    spare = spare_bytes() if needing else ()
    return [
        node for node, size in needing if not spare or STEP not in node.meta or size > spare[node.meta[STEP]]
    ]


def store_sums(backward: fx.GraphModule) -> int:
    """Have the marked sums of a backward stored where they stand, as what they are written over.

    Args:
        backward: A backward whose nodes have the values that they will have (``arrange_images``).

    Returns:
        How many there are.
    """
    found = [node for node in backward.graph.nodes if SUM in node.meta and node.users]
    for node in found:
        node.meta[STAYS] = True
        over = node.args[node.meta[SUM]]
        assert isinstance(over, fx.Node)
        compilers.read_as(min(node.users), node, over.meta["val"])
    if found:
        backward.recompile()
    return len(found)


def work_alike(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Have the convolutions of a backward work channels last where those of its forward do.

    Weights of one channel or one point lie in either order, and what is computed again from a value that was
    traced in the order of its sizes would stay so. Gradients that Inductor lays out for are left alone.
    """
    if not compilers.lays_out_channels_last(list(forward.graph.nodes)):
        return
    for node in list(filter(ops.has_convolution, backward.graph.nodes)):
        if ops.is_convolution(node) or may_lie_in_order(node) or _weights(node).meta["val"].shape[1] > 1:
            _see(node, torch.channels_last)
    backward.recompile()


def _weights(node: fx.Node) -> fx.Node:
    """The weights of a convolution, or of the convolution that a node is the gradient of."""
    weights = node.args[2 if ops.is_convolution_gradient(node) else 1]
    assert isinstance(weights, fx.Node)
    return weights


def _images(node: fx.Node) -> Sequence[fx.Node]:
    """What a convolution or its gradient reads of a batch, its weights left out."""
    operator, operands = compilers.gated(node)
    count = 2 if ops.is_convolution_gradient(operator) else 1
    return [each for each in operands[:count] if isinstance(each, fx.Node)]


def _has_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution or the gradient of one, or waits to be."""
    return ops.has_convolution(compilers.gated(node)[0])


def _waits(node: fx.Node) -> bool:
    """Whether a convolution, or the gradient of one, is made to wait."""
    return compilers.gated(node)[0] is not node


def _waits_for(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node is made to wait for a value that it does not read."""
    return _waits(node) and value not in compilers.gated(node)[1]


def _works_channels_last(node: fx.Node) -> bool:
    """Whether a convolution or its gradient makes a tensor that can only be laid out so."""
    made = [each for each in ops.tensors(node.meta["val"]) if each.dim() == 4]
    return any(not each.is_contiguous() and not is_channels_first(each) for each in made)


def _is_copied(image: fx.Node, stores_views: bool) -> bool:
    """Whether Inductor would copy what a kernel reads that works channels last."""
    is_stored = any(_waits_for(user, image) for user in image.users)
    is_stored = is_stored or (stores_views and kind(image) is Kind.VIEW)  # before its readers are seen
    return is_channels_first(image.meta["val"]) or _is_in_slices(image) or is_stored


def _may_lie_otherwise(image: fx.Node) -> bool:
    """Whether a value is, or is a view of, that of a loop which loops and convolutions alone read."""
    *_, base = ops.looked_through(image)
    reading = (each for each in readers(base) if not _waits_for(each, base))
    return is_loop(base) and all(kind(each) in LOOPS or _has_convolution(each) for each in reading)


def _is_in_slices(image: fx.Node) -> bool:
    """Whether a value is a concatenation on a CPU: loops write to its slices, from which others may read."""
    return loop(image).is_cat and bool(image.meta["val"].is_cpu)


def _store_channels_last(image: fx.Node) -> None:
    """Have all read a copy that lies channels last, and that Inductor computes inside of the loop."""
    if _is_in_slices(image):
        _concatenate_channels_last(image)
    elif not is_channels_first(image.meta["val"]):  # a copy that lies as its source would be left out
        compilers.read_as(min(image.users), image, image.meta["val"])
    else:
        with image.graph.inserting_after(image):
            copy = _copied(image, image)
        image.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _store_for_all(waiting: fx.Node) -> int:
    """Have those behind a convolution that waits read the images that are stored for it; how many there are.

    Inductor does not see that a convolution will read them, copies them for it, and has others compute them
    once more.
    """
    own = dict.fromkeys(_images(waiting))
    images = [image for image in own if is_loop(image) and max(image.users) > waiting]
    for image in images:
        compilers.read_as(waiting, image, image.meta["val"])
    return len(images)


def _concatenate_channels_last(cat: fx.Node) -> None:
    """Have a concatenation on a CPU lie channels last, to whose buffer the loops of its operands write.

    So it lies if it is given copies that do and that nobody else reads, which are computed inside of these
    loops. A convolution then reads it as it lies; Inductor would copy it to the order that was traced, and
    back. A copy that lies as its source Inductor leaves out: such a source is copied by way of another.
    Copies belong to where the concatenation is computed, and not to where their sources are.
    """
    for operand in filter(is_loop, cat.all_input_nodes):
        with cat.graph.inserting_before(cat):
            is_other = is_channels_first(operand.meta["val"])
            source = operand if is_other else _copied(operand, cat, torch.contiguous_format)
            cat.replace_input_with(operand, _copied(source, cat))
    first = min(filter(_has_convolution, cat.users))
    compilers.read_as(first, cat, cat.meta["val"].to(memory_format=torch.channels_last))


def _copied(image: fx.Node, like: fx.Node, layout: torch.memory_format = torch.channels_last) -> fx.Node:
    """A copy of a value in this layout, of the same step as another node; nobody reads it yet."""
    copy = image.graph.call_function(torch.ops.aten.clone.default, (image,), {"memory_format": layout})
    copy.meta = {**like.meta, "val": image.meta["val"].clone(memory_format=layout)}
    return copy


def _read_in_order(gradient: fx.Node) -> int:
    """Have a gradient read all in the order of the sizes; how many images lay otherwise."""
    found = [each for each in _images(gradient) if not each.meta["val"].is_contiguous()]
    for image in found:
        compilers.read_as(gradient, image, image.meta["val"].contiguous(), alone=True)
    _see(gradient, torch.contiguous_format)
    return len(found)


def _see(node: fx.Node, layout: torch.memory_format) -> None:
    """Have weights that lie in either order look as the kernel is to work: strides of sizes of 1 say so.

    Args:
        node: A convolution, or the gradient of one.
        layout: How it is to work.
    """
    weights = _weights(node)
    value = weights.meta["val"]
    lies_in_either = value.dim() == 4 and value.is_contiguous() and not is_channels_first(value)
    if not lies_in_either or not _may_be_seen_otherwise(weights):
        return
    strides = torch.empty(value.shape, device="meta", memory_format=layout).stride()
    with node.graph.inserting_before(node):
        seen = node.graph.call_function(torch.ops.aten.as_strided.default, (weights, value.shape, strides))
    seen.meta = {MIRROR: seen.name} if MIRROR in node.meta else {}  # of the same segment
    seen.meta["val"] = value.as_strided(value.shape, strides)
    node.replace_input_with(weights, seen)


def _may_be_seen_otherwise(weights: fx.Node) -> bool:
    """Whether they are of known sizes, and an input of the graph or a cast, as it is or seen otherwise.

    Inductor of torch 2.11 forgets where in its memory a view begins of which other strides are asked for.
    """
    if not all(isinstance(size, int) for size in weights.meta["val"].shape):
        return False
    if weights.target is torch.ops.aten.as_strided.default and len(weights.args) == 3:
        weights = weights.all_input_nodes[0]
    if ops.packet(weights) is ops.prims.convert_element_type:
        return bool(weights.all_input_nodes[0].meta["val"].dtype != weights.meta["val"].dtype)
    return weights.op == "placeholder"


def _run_as_it_is(gradient: fx.Node) -> None:
    """Have Inductor call the operator on images that lie as their nodes say, and ask for no other order."""
    gradient.meta["should_fallback"] = True
    for image in filter(is_loop, _images(gradient)):
        compilers.read_as(gradient, image, image.meta["val"])
