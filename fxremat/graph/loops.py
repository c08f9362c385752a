"""Loops: what a node is to a compiler that fuses: a loop, a reduction, a kernel, a copy, a view."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.graph.ops import argument, aten, is_getitem, packet, prims, tensors, value_bytes, viewed_operand

# Loops without a reduction although not tagged pointwise: they copy, fill, gather or pad.
_COPYING = frozenset(
    {
        aten._to_copy,
        aten._unsafe_index,
        aten.arange,
        aten.cat,
        aten.clone,
        aten.constant_pad_nd,
        aten.copy,
        aten.diagonal_scatter,
        aten.embedding,
        aten.empty_like,
        aten.flip,
        aten.full,
        aten.full_like,
        aten.gather,
        aten.index,
        aten.lift_fresh_copy,
        aten.new_full,
        aten.new_zeros,
        aten.ones_like,
        aten.repeat,
        aten.roll,
        aten.scalar_tensor,
        aten.select_scatter,
        aten.slice_scatter,
        aten.tril,
        aten.triu,
        aten.zeros,
        aten.zeros_like,
        prims.convert_element_type,
        prims.inductor_lookup_seed,
        prims.inductor_random,
        prims.iota,
    }
)
# Loops that read windows of their operands; those of maxima are computed inside of no other.
AVERAGES = frozenset({aten.avg_pool2d, aten.avg_pool2d_backward})
_MAXIMA = frozenset(
    {
        aten.max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward,
        prims._low_memory_max_pool_offsets_to_indices,
        prims._low_memory_max_pool_with_offsets,
    }
)
_WINDOWS = AVERAGES | _MAXIMA
# Inductor's limit for the elements of a window that it goes through without a loop.
MAX_WINDOW = 25
# Inductor's default: config.unroll_reductions_threshold.
MAX_UNROLLED = 8
_UNROLLED = frozenset({aten.all, aten.amax, aten.amin, aten.any, aten.mean, aten.prod, aten.sum})
_REDUCTIONS = frozenset(
    {
        aten.all,
        aten.amax,
        aten.amin,
        aten.any,
        aten.argmax,
        aten.argmin,
        aten.max,
        aten.mean,
        aten.min,
        aten.prod,
        aten.sum,
        aten.var,
        aten.var_mean,
        prims.prepare_softmax_online,
    }
)
# They write to places that are computed.
_PUTS = frozenset({aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.index_put})
# They read their first operand at places that the others say.
_GATHERS = frozenset({aten._unsafe_index, aten.embedding, aten.gather, aten.index})
# They read their operands at other places than those that they compute.
_MOVING = _GATHERS.union(
    AVERAGES,
    (
        aten.cat,
        aten.constant_pad_nd,
        aten.flip,
        aten.repeat,
        aten.roll,
        aten.slice_scatter,
    ),
)
# They compute nothing: what they read is counted, or the number that they fill with.
_PLAIN = _GATHERS | frozenset(
    {
        aten.clone,
        aten.copy,
        aten.flip,
        aten.full,
        aten.lift_fresh_copy,
        aten.repeat,
        aten.roll,
        aten.scalar_tensor,
    }
)
_ATOMIC = frozenset({torch.float16, torch.float32, torch.float64})
_DEAR = graphs.dear_functions()


class Kind(enum.Enum):
    """How a node is lowered, which decides whether its value can stay in registers."""

    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    KERNEL = "kernel"


LOOPS = (Kind.POINTWISE, Kind.REDUCTION)


class Reduction(NamedTuple):
    """The sizes of a reduction.

    Attributes:
        read: Elements that it reads.
        written: Elements that it writes.
        is_inner: Whether the innermost dimensions are reduced.
    """

    read: int
    written: int
    is_inner: bool = True

    def fits(self, elements: int) -> bool:
        """Whether a loop over so many elements that reduces nothing can run in the same kernel.

        An outer reduction goes through what it reads in another order.
        """
        return elements == self.written or (self.is_inner and elements == self.read)


@dataclass(frozen=True, slots=True)
class Loop:
    """What fusion needs to know of a node.

    Attributes:
        kind: How it is lowered.
        elements: Elements that its loop runs over.
        reduction: Its sizes; None where it reduces nothing.
        is_expensive: Whether Inductor would rather store it than compute it in two places.
        is_window: Whether it reads windows of its operands, so that these get buffers.
        is_maximum: Whether it is their maxima, or the gradient of these, and so gets a buffer, too.
        is_product: Whether it is a product of matrices, to which a sum that alone reads it can be fused.
        is_sum: Whether it is a plain sum of two values.
        is_cat: Whether it is a concatenation, whose buffer its operands' loops write to on a CPU.
        is_draw: Whether it draws random numbers, which Inductor never does inside of a reader.
        is_scatter: Whether an operator of PyTorch's adds to its first operand at the places that its second
            names.
        is_put: Whether it writes to places of a copy of its first operand, in a loop of its own that computes
            what it reads.
        is_moving: Whether it reads its operands at other places than those that it computes.
        is_gather: Whether it does so of its first operand alone, and the others say where.
        is_overlay: Whether it does so of all but its first operand, a part of which they replace.
        unrolled: Of how many elements each of a reduction's is computed without a loop.
        operations: Operations that one of its elements takes, but for what it reads.
        shared: What it computes that other operators of one loop may compute as well, as texts: numbers, and
            comparisons of places.
    """

    kind: Kind
    elements: int
    reduction: Reduction | None = None
    is_expensive: bool = False
    is_window: bool = False
    is_maximum: bool = False
    is_product: bool = False
    is_sum: bool = False
    is_cat: bool = False
    is_draw: bool = False
    is_scatter: bool = False
    is_put: bool = False
    is_moving: bool = False
    is_gather: bool = False
    is_overlay: bool = False
    unrolled: int = 1
    operations: int = 1
    shared: tuple[str, ...] = ()

    @property
    def is_generated(self) -> bool:
        """Whether the compiler generates its code, whether that can be fused or not."""
        return self.kind in LOOPS or self.is_put


def picks_offsets(node: fx.Node) -> bool:
    """Whether the node picks the offsets that a maximum pooling returns besides the largest elements."""
    is_second = is_getitem(node) and bool(node.args[1] == 1)
    return is_second and packet(node.all_input_nodes[0]) is prims._low_memory_max_pool_with_offsets


def loop(node: fx.Node) -> Loop:
    """The loop that Inductor would make of the node."""
    elements, lowered = _elements(node), kind(node)
    if lowered is Kind.REDUCTION:
        read = max(map(_elements, node.all_input_nodes), default=elements)
        reduction = Reduction(read, elements, _reduces_innermost(node))
        return Loop(Kind.REDUCTION, read, reduction, is_window=packet(node) in _WINDOWS)
    operator, parts = packet(node), unrolled(node)
    is_add = operator is aten.scatter_add
    is_scatter = is_add and graphs.scatters_apart(node.meta["val"], argument(node, "src").meta["val"])
    is_put = (is_add and not is_scatter) or (operator in _PUTS and _adds_atomically(node))
    return Loop(
        lowered,
        _elements(argument(node, "src" if is_add else "values")) if is_put else elements,
        is_expensive=operator in _DEAR,
        is_window=operator in _WINDOWS,
        is_maximum=operator in _MAXIMA,
        is_product=operator is aten.mm,
        is_sum=operator is aten.add and argument(node, "alpha") == 1,
        is_cat=operator is aten.cat,
        is_draw=operator is prims.inductor_random,
        is_scatter=is_scatter,
        is_put=is_put,
        is_moving=operator in _MOVING or parts > 1,
        is_gather=operator in _GATHERS,
        is_overlay=operator is aten.slice_scatter,
        unrolled=parts,
        operations=0 if lowered is Kind.VIEW else _operations(node),
        shared=tuple(dict.fromkeys((*_numbers(node), *_comparisons(node)))),
    )


def _operations(node: fx.Node) -> int:
    """Operations that an element takes, but for those of ``_comparisons`` and ``_numbers``.

    Where parts are chosen from, several comparisons are joined, and what is read is masked and chosen.
    """
    operator = packet(node)
    if operator is aten.cat:
        return 6 * len(node.all_input_nodes)
    if operator is aten.constant_pad_nd:
        pads: Sequence[int] = argument(node, "pad")
        return 4 * sum(pad != 0 for pad in pads)
    if operator is aten.slice_scatter:
        return 1 + max(1, len(_bounds(node)))
    if operator in _PLAIN:
        return 0
    if operator is aten.bmm:
        return 2 * unrolled(node) - 1
    if operator in AVERAGES:
        return _averaging(node)
    return max(1, unrolled(node) - 1) + (operator is aten.mean)


def _averaging(node: fx.Node) -> int:
    """Operations of an average pooling, or its gradient, which says of each window whether it is there."""
    rows, columns = sizes = _window(node)
    if packet(node) is aten.avg_pool2d:
        return 6 * rows * columns + 2 if is_padded(node) else rows * columns + 1
    return 12 + 3 * (rows + columns) + max(0, max(sizes) - 2) + 4 * rows * columns


def is_padded(node: fx.Node) -> bool:
    """Whether windows of an average pooling stand out of what is pooled."""
    return any(argument(node, "padding")) or bool(argument(node, "ceil_mode"))


def strides_of(node: fx.Node) -> tuple[int, int]:
    """By how many rows and columns the windows of an average pooling lie apart."""
    return _rows_and_columns(argument(node, "stride") or argument(node, "kernel_size"))


def _rows_and_columns(given: Sequence[int]) -> tuple[int, int]:
    return given[0], given[-1]


def _window(node: fx.Node) -> tuple[int, int]:
    """Rows and columns of the window that an average is of, or of the windows that a gradient is of."""
    rows, columns = _rows_and_columns(argument(node, "kernel_size"))
    if packet(node) is aten.avg_pool2d:
        return rows, columns
    by_row, by_column = strides_of(node)
    return max(1, *_covering(rows, by_row)), max(1, *_covering(columns, by_column))


def _covering(size: int, stride: int) -> Iterator[int]:
    """How many windows of a size lie over each of the first places."""
    for place in range(2 * size):
        yield place // stride - max(0, (place - size) // stride)


def _comparisons(node: fx.Node) -> Iterator[str]:
    """What compares places, as texts: an operation for the place, one for each bound, one to compare."""
    operator = packet(node)
    bounds = {"index": argument(node, "index")} if operator is aten.select_scatter else {}
    if operator is aten.slice_scatter:
        bounds = _bounds(node)
    if bounds:
        dim = argument(node, "dim")
        yield f"place in {dim}"
        for name, bound in bounds.items():
            yield f"bound {bound}"
            yield f"{name} {bound} in {dim}"


def _bounds(node: fx.Node) -> dict[str, Any]:
    """The bounds of the slice that is scattered which are not those of what it is scattered to."""
    found = {name: argument(node, name) for name in ("start", "end", "step")}
    tensor = next(tensors(node.meta.get("val")), None)
    size = None if tensor is None or not tensor.dim() else tensor.shape[argument(node, "dim")]
    end = found["end"]
    usual = {
        "start": found["start"] in (0, None),
        "end": not (isinstance(end, int) and isinstance(size, int) and end < size),
        "step": found["step"] == 1,
    }
    return {name: bound for name, bound in found.items() if not usual[name]}


def _adds_atomically(node: fx.Node) -> bool:
    """Whether every device that Inductor knows can add to places of the node's value in a loop."""
    return all(tensor.dtype in _ATOMIC for tensor in tensors(node.meta.get("val")))


def _numbers(node: fx.Node) -> Iterator[str]:
    """The numbers that an operator computes each element with, as texts that tell their type.

    It is that of the result, or of what is compared with them.
    """
    is_computing = torch.Tag.pointwise in getattr(node.target, "tags", ())
    given = [each for each in node.args if isinstance(each, (int, float))]
    if not (given and (is_computing or packet(node) in (aten.full, aten.scalar_tensor))):
        return
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    types = [tensor.dtype for tensor in tensors(values)]
    for number in given if types else ():
        yield f"{number} {types[1] if types[0] is torch.bool and len(types) > 1 else types[0]}"


def _reduces_innermost(node: fx.Node) -> bool:
    """Whether the dimensions that a reduction goes through are the last ones, or all."""
    if packet(node) is aten.bmm:
        return all(tensor.shape[2] == 1 for tensor in tensors(node.meta.get("val")))
    found = _reduced(node)
    return found is None or found[1] == set(range(found[0].dim() - len(found[1]), found[0].dim()))


def _reduced(node: fx.Node) -> tuple[torch.Tensor, set[int]] | None:
    """What a reduction reads, if that is known, and the dimensions that it goes through."""
    dims, operand = argument(node, "dim"), next(iter(node.all_input_nodes), None)
    tensor = None if operand is None else next(tensors(operand.meta.get("val")), None)
    if tensor is None:
        return None
    every = range(tensor.dim())
    given = [dims] if isinstance(dims, int) else dims
    return tensor, {every[dim] for dim in given} if given and every else set(every)


def _elements(node: fx.Node) -> int:
    tensor = next(tensors(node.meta.get("val")), None)
    if tensor is None:
        return 1
    return math.prod(graphs.hint(size) or 1 for size in tensor.shape)


def kind(node: fx.Node) -> Kind:
    """How Inductor would lower the node."""
    if is_getitem(node) or viewed_operand(node) is not None:
        return Kind.VIEW
    if _has_complex(node):
        return Kind.KERNEL
    if packet(node) in _REDUCTIONS or _has_vector(node):
        return Kind.POINTWISE if unrolled(node) > 1 else Kind.REDUCTION
    if packet(node) in AVERAGES and math.prod(_window(node)) > MAX_WINDOW:
        return Kind.REDUCTION if _is_in_parts(node) else Kind.KERNEL
    if packet(node) in _COPYING | _WINDOWS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return Kind.POINTWISE
    return Kind.KERNEL


def _is_in_parts(node: fx.Node) -> bool:
    """Whether it is an average of windows that lie side by side."""
    return packet(node) is aten.avg_pool2d and strides_of(node) == _window(node)


def _has_complex(node: fx.Node) -> bool:
    """Whether it reads or makes complex numbers, of which Inductor generates no loops."""
    values = (each.meta.get("val") for each in (node, *node.all_input_nodes))
    return any(tensor.is_complex() for value in values for tensor in tensors(value))


def _has_vector(node: fx.Node) -> bool:
    """Whether it is a batched product with a matrix of one row or column, a loop where a CPU runs it."""
    if packet(node) is not aten.bmm:
        return False
    value = node.meta.get("val")
    return any(tensor.device.type == "cpu" and 1 in tensor.shape[1:] for tensor in tensors(value))


def unrolled(node: fx.Node) -> int:
    """Of how many elements each of a reduction's is computed without a loop; 1 where there is one."""
    if _has_vector(node):
        size = node.all_input_nodes[0].meta["val"].shape[2]
        return size if isinstance(size, int) and 0 < size < MAX_UNROLLED else 1
    if packet(node) in AVERAGES:
        size = math.prod(_window(node))
        return size if size <= MAX_WINDOW else 1
    found = _reduced(node) if packet(node) in _UNROLLED else None
    if found is None or (found[0].device.type == "cpu" and _elements(node) == 1):
        return 1
    tensor, dims = found
    sizes = [tensor.shape[dim] for dim in dims]
    is_fixed = all(isinstance(size, int) for size in sizes)
    return math.prod(sizes) if is_fixed and 0 < math.prod(sizes) < MAX_UNROLLED else 1


def is_loop(node: fx.Node) -> bool:
    """Whether Inductor would generate a loop for the node."""
    return node.op == "call_function" and kind(node) in LOOPS


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value, views looked through, but not those that go by how it lies in memory."""
    for user in node.users:
        is_view = user.op == "call_function" and kind(user) is Kind.VIEW
        is_view = is_view and packet(user) is not aten.as_strided
        yield from readers(user) if is_view else (user,)


def is_channels_first(tensor: torch.Tensor) -> bool:
    """Whether an image's tensor would have to be copied to lie channels last.

    Sizes of 1 have no order, so the weights of a convolution over single points need no copy.
    """
    return tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last)


def moved_bytes(node: fx.Node) -> int:
    """Bytes read and written by the node's kernel: its operands and results; none for a view."""
    if kind(node) is Kind.VIEW:
        return 0
    return value_bytes(node) + sum(map(value_bytes, node.all_input_nodes))
