"""Operands: what products of matrices read is stored so that they read it where it lies.

Inductor stores a loop's value in the order of its sizes, or of what the loop reads. Where a product reads it
through views that this order does not allow, or with neither rows nor columns side by side, each product
that reads it gets a copy of its own. Another order of the value's dimensions often needs none, such as the
one that was traced; so it is told here. Linear in nodes, but for the orders tried, of values of at most
``MOST_DIMENSIONS``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fxremat._torch import compilers
from fxremat.graph import ops
from fxremat.graph.loops import LOOPS, Kind, is_loop, kind, readers

MOST_DIMENSIONS = 5
# Products of matrices, with the places of these among their operands.
_MATRICES = {
    ops.aten.mm: (0, 1),
    ops.aten.bmm: (0, 1),
    ops.aten.addmm: (1, 2),
    ops.aten.baddbmm: (1, 2),
}


def arrange_operands(part: fx.GraphModule) -> int:
    """Have values of loops stored in an order in which the products that read them need no copies.

    Args:
        part: A forward or a backward; its nodes know their values.

    Returns:
        How many values are stored in another order than the one of their sizes.
    """
    views: dict[fx.Node, list[Sequence[fx.Node]]] = {}
    for node in part.graph.nodes:
        for operand in _matrices(node):
            base, *through = reversed([*ops.looked_through(operand)])
            if through and _may_lie_otherwise(base):
                views.setdefault(base, []).append(through)
    found = [(base, value) for base, each in views.items() if (value := _laid_out(base, each)) is not None]
    for base, value in found:
        compilers.read_as(min(base.users), base, value)
    if found:
        part.recompile()
    return len(found)


def _matrices(node: fx.Node) -> Iterable[fx.Node]:
    """What a product reads besides what it adds to; nothing for other nodes."""
    product, operands = compilers.gated(node)
    if product.op == "call_function" and kind(product) is Kind.KERNEL:
        for place in _MATRICES.get(ops.packet(product), ()):
            operand = operands[place]
            assert isinstance(operand, fx.Node)
            yield operand


def _may_lie_otherwise(base: fx.Node) -> bool:
    """Whether a loop's value is of known sizes, and read by loops, products and perhaps a caller alone."""
    if not is_loop(base):
        return False
    value = base.meta["val"]
    is_known = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    return is_known and all(map(_takes_any_order, readers(base)))


def _takes_any_order(reader: fx.Node) -> bool:
    return reader.op == "output" or kind(reader) in LOOPS or any(_matrices(reader))


def _laid_out(base: fx.Node, views: Sequence[Sequence[fx.Node]]) -> torch.Tensor | None:
    """A tensor with the strides that a value is to be stored with; None where any order does as well.

    Args:
        base: The value's node. What leaves the graph lies as it was traced, if not in the order of its sizes.
        views: For each product's operand, the views that it is seen through.
    """
    value: torch.Tensor = base.meta["val"]
    if any(len(view.all_input_nodes) > 1 for view in itertools.chain(*views)):
        return None  # of sizes that are not known
    if value.is_contiguous() and all(_lies_in_rows(each[-1].meta["val"]) for each in views):
        return None
    traced = torch.empty_like(value, device="meta")
    sizes = torch.empty(value.shape, dtype=value.dtype, device="meta")
    is_fixed = value.dim() > MOST_DIMENSIONS or any(each.op == "output" for each in readers(base))
    for tried in (sizes, traced, *(() if is_fixed else orders(sizes))):
        if all(_is_read_in_place(tried, each) for each in views):
            return None if tried is sizes else value.as_strided(value.shape, tried.stride())
    return None


def orders(sizes: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors without gaps of these sizes, in each order of the dimensions; that of ``sizes`` first."""
    dims = range(sizes.dim())
    for order in itertools.permutations(dims):
        behind = [order.index(dim) for dim in dims]
        yield sizes.permute(order).contiguous().permute(behind)


def _is_read_in_place(base: torch.Tensor, views: Iterable[fx.Node]) -> bool:
    """Whether a product reads a tensor of these strides without a copy, rows or columns side by side."""
    found = seen(base, views)
    return found is not None and _lies_in_rows(found)


def seen(base: torch.Tensor, views: Iterable[fx.Node]) -> torch.Tensor | None:
    """What a tensor looks like through views, one after the other; None if one of them would be a copy."""
    found = base
    for view in views:
        operand = ops.viewed_operand(view)
        given = [found if each is operand else each for each in view.args]
        assert callable(view.target)
        try:
            found = view.target(*given, **view.kwargs)
        except (RuntimeError, ValueError):  # of tensors and fake tensors
            return None
    return found


def _lies_in_rows(matrices: torch.Tensor) -> bool:
    """Whether the rows or the columns of matrices lie side by side."""
    (rows, columns), (down, along) = matrices.shape[-2:], matrices.stride()[-2:]
    is_in_rows = along == 1 and (rows == 1 or down >= columns)
    return is_in_rows or (down == 1 and (columns == 1 or along >= rows))
