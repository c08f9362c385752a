"""Images: what the convolutions of a backward read lies as their kernels work.

Inductor stores a value that a gradient of a convolution reads in the order that was traced. A kernel that
works channels last then copies it, and both are held. The value of a loop can as well be stored channels
last at once, if nothing reads it that asks for another order: so it is told here, by a copy that Inductor
computes inside of the loop. One run on fake tensors, for backwards with convolutions alone; O(n) besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat._torch.fakes import propagate_layouts
from fxremat.graph import ops
from fxremat.graph.loops import LOOPS, Kind, is_channels_first, kind


def arrange_images(backward: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Have images that loops compute stored channels last where convolutions and their gradients work so.

    Args:
        backward: A backward; its nodes get the values that they have for these inputs.
        inputs: Fake tensors, as the forward hands them over.

    Returns:
        How many values are stored in another order than was traced.
    """
    if not any(ops.has_convolution(node) for node in backward.graph.nodes):
        return 0
    propagate_layouts(backward, inputs)
    found = dict.fromkeys(
        image
        for node in backward.graph.nodes
        if ops.has_convolution(node) and _works_channels_last(node)
        for image in _images(node)
        if is_channels_first(image.meta["val"]) and _may_lie_otherwise(image)
    )
    for image in found:
        _store_channels_last(image)
    if found:
        backward.recompile()
    return len(found)


def _images(node: fx.Node) -> Sequence[fx.Node]:
    """What a convolution or its gradient reads of a batch, its weights left out."""
    count = 2 if ops.is_convolution_gradient(node) else 1
    return [each for each in node.args[:count] if isinstance(each, fx.Node)]


def _works_channels_last(node: fx.Node) -> bool:
    """Whether a convolution or its gradient makes a tensor that can only be laid out so."""
    made = [each for each in ops.tensors(node.meta["val"]) if each.dim() == 4]
    return any(not each.is_contiguous() and not is_channels_first(each) for each in made)


def _may_lie_otherwise(image: fx.Node) -> bool:
    """Whether a value is, or is a view of, that of a loop which loops and convolutions alone read."""
    base: fx.Node | None = image
    while base is not None:
        image, base = base, ops.viewed_operand(base)
    is_computed = image.op == "call_function" and kind(image) in LOOPS
    return is_computed and all(kind(each) in LOOPS or ops.has_convolution(each) for each in _readers(image))


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """Who reads a value, views looked through."""
    for user in node.users:
        is_view = user.op == "call_function" and kind(user) is Kind.VIEW
        yield from _readers(user) if is_view else (user,)


def _store_channels_last(image: fx.Node) -> None:
    """Have all read a copy that lies channels last; nothing reads the value itself then."""
    layout = torch.channels_last
    with image.graph.inserting_after(image):
        copy = image.graph.call_function(torch.ops.aten.clone.default, (image,), {"memory_format": layout})
    image.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = {**image.meta, "val": image.meta["val"].clone(memory_format=layout)}
