"""Facts per operator: what a node of an fx graph does, judged from its target and arguments alone.

Terms:
    view: the result shares the storage of an operand.
    random: two runs on equal operands may give different numbers.
    effect: running it changes something besides its result; it runs once, in the program's order.
    kind: how Inductor would lower it: a view, a fusible pointwise or reduction loop, or a kernel of
        its own.

The sources are the operator's schema and tags. Where they are silent the answer is the cautious one:
an operator that is not known to be pure is not computed twice.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fxremat import _torch
from fxremat.generators import random_state, state_of

aten = torch.ops.aten
prims = torch.ops.prims

# Return their operand's storage although their schemas do not say so.
_UNDECLARED_VIEWS = frozenset(
    {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
)

# Namespaces whose operators are pure where their tags and schemas say nothing to the contrary.
PURE_NAMESPACES = frozenset({"aten", "prims"})

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

# Loops that read windows of their operands.
_WINDOWS = frozenset(
    {
        aten.avg_pool2d,
        aten.avg_pool2d_backward,
        aten.max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward,
        prims._low_memory_max_pool_offsets_to_indices,
        prims._low_memory_max_pool_with_offsets,
    }
)

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

_DEAR = _torch.dear_functions()


class Kind(enum.Enum):
    """How a node is lowered, which decides whether its value can stay in registers."""

    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    KERNEL = "kernel"


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
        is_window: Whether it reads windows of its operands, so that they and it get buffers.
        is_product: Whether it is a product of matrices, to which a sum that alone reads it can be fused.
        is_sum: Whether it is a plain sum of two values.
        is_cat: Whether it is a concatenation, whose buffer its operands' loops write to on a CPU.
        is_draw: Whether it draws random numbers, which Inductor never does inside of a reader.
        is_scatter: Whether it adds to its first operand at the places that its second names.
    """

    kind: Kind
    elements: int
    reduction: Reduction | None = None
    is_expensive: bool = False
    is_window: bool = False
    is_product: bool = False
    is_sum: bool = False
    is_cat: bool = False
    is_draw: bool = False
    is_scatter: bool = False


def picks_offsets(node: fx.Node) -> bool:
    """Whether the node picks the offsets that a maximum pooling returns besides the largest elements."""
    is_second = is_getitem(node) and bool(node.args[1] == 1)
    return is_second and packet(node.all_input_nodes[0]) is prims._low_memory_max_pool_with_offsets


def loop(node: fx.Node) -> Loop:
    """The loop that Inductor would make of the node."""
    elements, lowered = _elements(node), kind(node)
    if lowered is Kind.REDUCTION:
        read = max(map(_elements, node.all_input_nodes), default=elements)
        return Loop(Kind.REDUCTION, read, Reduction(read, elements, _reduces_innermost(node)))
    operator = packet(node)
    return Loop(
        lowered,
        elements,
        is_expensive=operator in _DEAR,
        is_window=operator in _WINDOWS,
        is_product=operator is aten.mm,
        is_sum=operator is aten.add and argument(node, "alpha") == 1,
        is_cat=operator is aten.cat,
        is_draw=operator is prims.inductor_random,
        is_scatter=operator is aten.scatter_add,
    )


def _reduces_innermost(node: fx.Node) -> bool:
    """Whether the dimensions that a reduction goes through are the last ones, or all."""
    dims, operand = argument(node, "dim"), next(iter(node.all_input_nodes), None)
    tensor = None if operand is None else next(tensors(operand.meta.get("val")), None)
    if dims is None or tensor is None:
        return True
    reduced = {dim % max(tensor.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims)}
    return not reduced or reduced == set(range(tensor.dim() - len(reduced), tensor.dim()))


def _elements(node: fx.Node) -> int:
    tensor = next(tensors(node.meta.get("val")), None)
    if tensor is None:
        return 1
    return math.prod(_torch.hint(size) or 1 for size in tensor.shape)


def packet(node: fx.Node) -> Any:
    """The operator without its overload; the target itself where it has none."""
    return getattr(node.target, "overloadpacket", node.target)


def title(node: fx.Node) -> str:
    """A short stable text for the operator, such as ``aten.mm.default``."""
    if isinstance(node.target, str):
        return node.op
    return (
        str(node.target)
        if hasattr(node.target, "_schema")
        else getattr(node.target, "__name__", str(node.target))
    )


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one output of an operator with several."""
    return node.target is operator.getitem


def viewed_operand(node: fx.Node) -> fx.Node | None:
    """The operand whose storage the result shares; None where the result is a new storage."""
    if is_getitem(node):
        return None
    if node.target in _UNDECLARED_VIEWS:
        return _as_node(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(returned.alias_info is None for returned in schema.returns):
        return None
    shared = [
        position for position, argument in enumerate(schema.arguments) if argument.alias_info is not None
    ]
    return _as_node(node.args[shared[0]]) if shared and shared[0] < len(node.args) else None


def _as_node(argument: object) -> fx.Node | None:
    return argument if isinstance(argument, fx.Node) else None


def kind(node: fx.Node) -> Kind:
    """How Inductor would lower the node."""
    if is_getitem(node) or viewed_operand(node) is not None:
        return Kind.VIEW
    if packet(node) in _REDUCTIONS:
        return Kind.REDUCTION
    if packet(node) in _COPYING | _WINDOWS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return Kind.POINTWISE
    return Kind.KERNEL


def is_convolution(node: fx.Node) -> bool:
    """Whether the node is a convolution, not its gradient."""
    return packet(node) is aten.convolution


def is_convolution_gradient(node: fx.Node) -> bool:
    """Whether the node is the gradient of a convolution."""
    return packet(node) is aten.convolution_backward


def is_channels_first(tensor: torch.Tensor) -> bool:
    """Whether an image's tensor would have to be copied to lie channels last.

    Sizes of 1 have no order, so the weights of a convolution over single points need no copy.
    """
    return tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last)


def argument(node: fx.Node, name: str) -> Any:
    """The value of a named argument of the node, its default where it is not given, else None."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = getattr(node.target, "_schema", None)
    for position, declared in enumerate(schema.arguments if schema is not None else ()):
        if declared.name == name:
            return node.args[position] if position < len(node.args) else declared.default_value
    return None


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers; attention and dropout with probability 0 do not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return bool(argument(node, "dropout_p") != 0.0)


def is_collective(node: fx.Node) -> bool:
    """Whether the node communicates with other ranks."""
    return getattr(node.target, "namespace", "").startswith(("_c10d_functional", "c10d"))


def has_effect(node: fx.Node) -> bool:
    """Whether the node must run exactly once and in the program's order."""
    if node.op != "call_function":
        return False
    return _torch.is_effectful(node.target) or is_collective(node) or node.is_impure(impure_random=False)


def keep_reason(node: fx.Node, is_declared_pure: bool = False) -> str | None:
    """Why the node may not be computed a second time; None if it may.

    Args:
        node: The node.
        is_declared_pure: Whether its user says that a second run gives the same and does nothing else, which
            is believed of a custom operator whose schema and tags do not say otherwise.
    """
    if node.op != "call_function":
        return "it is an input"
    if _torch.is_symbolic(node):
        return "it is a number, which takes no memory"  # again, it would need the tensor whose size it is
    if is_getitem(node):
        return None
    if node.target is random_state:
        return "it is a state of random numbers"
    if has_effect(node):
        return "it has an effect"
    if is_random(node):
        return "it draws random numbers" if state_of(node) is None else None
    if _torch.is_higher_order(node.target):
        return "it is a higher-order operator"
    if not _torch.is_operator(node.target):
        return "it is a call of which nothing is known"
    if node.target._schema.is_mutable:
        return "it writes to an operand"
    if node.target.namespace not in PURE_NAMESPACES and not is_declared_pure:
        return "it is a custom operator, not known to be pure"
    if torch.Tag.data_dependent_output in node.target.tags:
        return "its value becomes a number of the program"
    return None


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors of a node's value: itself, or those of its outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage that an operator allocates for this result; 0 where a size is unknown.

    Computed from sizes and strides, since a traced result may share a fake storage with a view.
    """
    sizes = [_torch.hint(size) for size in tensor.shape]
    if None in sizes or 0 in sizes or tensor.layout is not torch.strided:
        return 0
    strides = [_torch.hint(stride) or 0 for stride in tensor.stride()]
    return extent([size or 0 for size in sizes], strides) * tensor.dtype.itemsize


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the smallest storage that holds a tensor of these sizes, none of them 0."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def value_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of the node's value."""
    return sum(storage_bytes(tensor) for tensor in tensors(node.meta.get("val")))


def moved_bytes(node: fx.Node) -> int:
    """Bytes read and written by the node's kernel: its operands and results; none for a view."""
    if kind(node) is Kind.VIEW:
        return 0
    return value_bytes(node) + sum(map(value_bytes, node.all_input_nodes))
