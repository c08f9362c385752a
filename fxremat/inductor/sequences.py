"""Sequences: what convolutions over sequences read is stored so that they read it where it lies.

Networks that keep channels in the last place show a convolution a sequence through a view that exchanges two
dimensions. Inductor has it read the order of sizes, and stores the value in another: so the convolution gets
a copy, and its gradient two, one of each operand. Where the value of a loop is read by such convolutions and
their gradients, and otherwise at most by loops through the same views, it is stored in their order instead.
Linear in nodes, but for the orders tried, of values of at most ``MOST_DIMENSIONS``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import fx

from fxremat._torch import compilers
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind, is_loop, kind
from fxremat.graph.ops import aten
from fxremat.inductor.operands import MOST_DIMENSIONS, orders, seen

STORED_AS = "fxremat_stored_as"  # key in the fx meta of a value that is stored so: its strides


def stored_as_read(graph: JointGraph, convolutions: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
    """The strides of the values that are stored as convolutions over sequences read them, by their indices.

    Args:
        graph: A traced graph.
        convolutions: Indices of its convolutions and their gradients.
    """
    shown: dict[fx.Node, list[list[fx.Node]]] = {}
    for index in convolutions:
        for operand in _sequences(graph.fx_nodes[index]):
            base, *through = reversed([*ops.looked_through(operand)])
            shown.setdefault(base, []).append(through)
    found = ((base, _strides(base, views)) for base, views in shown.items() if _is_theirs(base, views))
    return {graph.index[base.name]: strides for base, strides in found if strides is not None}


def store_as_read(part: fx.GraphModule) -> int:
    """Have marked values stored so, in a forward or a backward; returns how many there are."""
    found = [node for node in part.graph.nodes if STORED_AS in node.meta and is_loop(node) and node.users]
    for node in found:
        value: torch.Tensor = node.meta["val"]
        compilers.read_as(min(node.users), node, value.as_strided(value.shape, node.meta[STORED_AS]))
    if found:
        part.recompile()
    return len(found)


def _sequences(node: fx.Node) -> Iterator[fx.Node]:
    """What a convolution over sequences, or the gradient of one, reads of a batch, its weights left out."""
    for operand in node.args[: 2 if ops.is_convolution_gradient(node) else 1]:
        if isinstance(operand, fx.Node) and operand.meta["val"].dim() == 3:
            yield operand


def _is_theirs(base: fx.Node, views: Iterable[list[fx.Node]]) -> bool:
    """Whether a value is that of a loop, of known sizes, and read as convolutions over sequences read it."""
    value = base.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_loop(base) or value.dim() > MOST_DIMENSIONS:
        return False
    operands = {through[-1] for through in views if through}
    return all(isinstance(size, int) for size in value.shape) and _is_read_as(operands, base)


def _is_read_as(operands: Container[fx.Node], node: fx.Node) -> bool:
    """Whether loops and convolutions are all that reads a value, through these operands of theirs."""
    return all(
        _is_read_as(operands, user)
        if user.op == "call_function" and kind(user) is Kind.VIEW and ops.packet(user) is not aten.as_strided
        else node in operands and (is_loop(user) or ops.has_convolution(user))
        for user in node.users
    )


def _strides(base: fx.Node, views: Iterable[list[fx.Node]]) -> tuple[int, ...] | None:
    """The strides with which a value is read in the order of sizes through each of the views.

    None where there are none, or the value's own sizes are in that order.
    """
    if any(len(view.all_input_nodes) > 1 for through in views for view in through):
        return None  # of sizes that are not known
    value = base.meta["val"]
    for tried in orders(torch.empty(value.shape, dtype=value.dtype, device="meta")):
        found = [seen(tried, through) for through in views]
        if all(each is not None and each.is_contiguous() for each in found):
            return None if tried.is_contiguous() else tuple(tried.stride())
    return None
