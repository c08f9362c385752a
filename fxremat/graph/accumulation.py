"""Accumulation: gradients of concatenations that share operands are added up whole.

Where each layer reads a concatenation of all before it, as in a DenseNet, the gradient of each operand is the
sum of a slice of each concatenation's gradient: as many sums as there are pairs of layers. A compiler that
fuses computes such a chain of sums inside of its last reader, and holds each gradient until then. But the
slices of two gradients lie side by side, and so do their sums: as slices of one sum of the two, which is
computed with the second gradient and leaves one tensor to hold. Each element is the same sum as before, in
the same order. Linear in nodes and reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from fxremat._torch import graphs
from fxremat.graph import ops
from fxremat.graph.loops import is_loop


class _Slice(NamedTuple):
    """Indices from ``start`` to ``end`` of a dimension of a value."""

    whole: fx.Node
    dim: int
    start: int
    end: int


class _Sum(NamedTuple):
    """A node that adds two slices along one dimension."""

    node: fx.Node
    slices: tuple[_Slice, _Slice]


def add_up_whole(module: fx.GraphModule) -> int:
    """Put slices of one sum in the place of sums of slices, where that sum is computed with what it is of.

    For compilers that fuse: elsewhere no value is computed inside of another. What nothing reads any more is
    left in the graph.

    Args:
        module: A joint graph without equal nodes; its nodes know their values.

    Returns:
        How many sums gave way.
    """
    count, tried = 0, set()
    for node in module.graph.nodes:
        own = _sum(node)
        if own is None or _distance(own) in tried:
            continue
        tried.add(_distance(own))
        group = _group(own)
        if len(group) > 1:
            _add_up(group, node)
            count += len(group)
    if count:
        module.recompile()
    return count


def _group(own: _Sum) -> Sequence[_Sum]:
    """The sums beside one that add slices of the same two values, if they are all that reads one of them.

    That one is a loop's, and what is read of it is read once: no buffer of its own is needed any more.
    """
    for place in (0, 1):
        group = sorted(_beside(own, place), key=lambda each: each.slices[place].start)
        slices = [each.slices[place] for each in group]
        is_in_row = all(before.end == after.start for before, after in itertools.pairwise(slices))
        if is_in_row and _is_computed_inside(own.slices[place].whole, len(group)):
            return group
    return ()


def _is_computed_inside(whole: fx.Node, reads: int) -> bool:
    """Whether a value is a loop's, or a view of that, and read so many times in all."""
    *views, base = ops.looked_through(whole)
    users = [len(each.users) for each in (*views, base)]
    return is_loop(base) and users == [reads, *(1 for _ in views)]


def _beside(own: _Sum, place: int) -> Iterator[_Sum]:
    """The sums that add slices of the same values, as far from each other, which nothing else reads."""
    for user in own.slices[place].whole.users:
        each = _sum(next(iter(user.users))) if len(user.users) == 1 else None
        if each is not None and _distance(each) == _distance(own):
            yield each


def _distance(each: _Sum) -> tuple[Any, ...]:
    """What is the same of sums that lie side by side."""
    first, second = each.slices
    return first.whole, second.whole, first.dim, second.start - first.start


def _sum(node: fx.Node) -> _Sum | None:
    """The node as a sum of slices of two values of one type; None if it is none, or the forward's."""
    if not ops.is_sum_of_two(node) or graphs.was_traced_in_forward(node):
        return None
    first, second = map(_slice, node.all_input_nodes)
    if first is None or second is None or first.whole is second.whole or first.dim != second.dim:
        return None
    return _Sum(node, (first, second))


def _slice(node: fx.Node) -> _Slice | None:
    """What a node shows of a value, if it is a slice with bounds that are numbers; None if it is none."""
    if ops.packet(node) is not ops.aten.slice or ops.argument(node, "step") != 1:
        return None
    whole, dim = node.all_input_nodes[0], ops.argument(node, "dim")
    start, end, size = ops.argument(node, "start"), ops.argument(node, "end"), whole.meta["val"].shape[dim]
    start, end = 0 if start is None else start, size if end is None else end
    if not all(isinstance(each, int) and each >= 0 for each in (start, end, size)):
        return None
    return _Slice(whole, dim, start, min(end, size))


def _add_up(group: Sequence[_Sum], first: fx.Node) -> None:
    """Have a group's sums be slices of one, computed where its first stands.

    What is more than a loop reads a copy, as it read the sum: a slice is no tensor as kernels like it.
    """
    bounds = zip(group[0].slices, group[-1].slices, strict=True)
    with first.graph.inserting_before(first):
        operands = [_shown(low.whole, low.dim, low.start, high.end, first) for low, high in bounds]
        total = _call(ops.aten.add.Tensor, (*operands,), first)
    start = 0
    for node, (own, _) in group:
        end = start + own.end - own.start
        with node.graph.inserting_before(node):
            found = _shown(total, own.dim, start, end, node)
            if not all(map(is_loop, node.users)):
                found = _call(ops.aten.clone.default, (found,), node)
        node.replace_all_uses_with(found)
        node.graph.erase_node(node)
        start = end


def _shown(whole: fx.Node, dim: int, start: int, end: int, like: fx.Node) -> fx.Node:
    """A value's indices from ``start`` to ``end``: a slice, or itself where these are all."""
    if (start, end) == (0, whole.meta["val"].shape[dim]):
        return whole
    return _call(ops.aten.slice.Tensor, (whole, dim, start, end), like)


def _call(operator: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A node of what another is of, where nodes are inserted."""
    made = like.graph.call_function(operator, args)
    values = (each.meta["val"] if isinstance(each, fx.Node) else each for each in args)
    made.meta = {**like.meta, "val": operator(*values)}
    return made
