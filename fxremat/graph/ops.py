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

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.graph.generators import random_state, state_of

aten = torch.ops.aten
prims = torch.ops.prims

# Return their operand's storage although their schemas do not say so.
_UNDECLARED_VIEWS = frozenset(
    {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
)

# Namespaces whose operators are pure where their tags and schemas say nothing to the contrary.
PURE_NAMESPACES = frozenset({"aten", "prims"})


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


def looked_through(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what it is a view of, one after the other."""
    viewed: fx.Node | None = node
    while viewed is not None:
        yield viewed
        viewed = viewed_operand(viewed)


def roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory it shows: itself, but for views, and for the parts of a view."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        viewed = viewed_operand(node)
        if is_getitem(node):
            whole = node.all_input_nodes[0]
            viewed = whole if found[whole] is not whole else None
        found[node] = node if viewed is None else found[viewed]
    return found


def _as_node(argument: object) -> fx.Node | None:
    return argument if isinstance(argument, fx.Node) else None


def is_convolution(node: fx.Node) -> bool:
    """Whether the node is a convolution, not its gradient."""
    return packet(node) is aten.convolution


def is_convolution_gradient(node: fx.Node) -> bool:
    """Whether the node is the gradient of a convolution."""
    return packet(node) is aten.convolution_backward


def has_convolution(node: fx.Node) -> bool:
    """Whether the node is a convolution, or the gradient of one."""
    return is_convolution(node) or is_convolution_gradient(node)


def argument(node: fx.Node, name: str) -> Any:
    """The value of a named argument of the node, its default where it is not given, else None."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = getattr(node.target, "_schema", None)
    for position, declared in enumerate(schema.arguments if schema is not None else ()):
        if declared.name == name:
            return node.args[position] if position < len(node.args) else declared.default_value
    return None


def is_sum_of_two(node: fx.Node) -> bool:
    """Whether the node adds two values of its own sizes and type."""
    operands = node.all_input_nodes
    if packet(node) is not aten.add or len(operands) != 2 or node.kwargs:
        return False
    values = [each.meta.get("val") for each in (node, *operands)]
    alike = {(each.dtype, *map(graphs.hint, each.shape)) for each in values if isinstance(each, torch.Tensor)}
    return len(alike) == 1 and all(isinstance(each, torch.Tensor) for each in values)


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
    return graphs.is_effectful(node.target) or is_collective(node) or node.is_impure(impure_random=False)


def keep_reason(node: fx.Node, is_declared_pure: bool = False) -> str | None:
    """Why the node may not be computed a second time; None if it may.

    Args:
        node: The node.
        is_declared_pure: Whether its user says that a second run gives the same and does nothing else, which
            is believed of a custom operator whose schema and tags do not say otherwise.
    """
    if node.op != "call_function":
        return "it is an input"
    if graphs.is_symbolic(node):
        return "it is a number, which takes no memory"  # again, it would need the tensor whose size it is
    if is_getitem(node):
        return None
    if node.target is random_state:
        return "it is a state of random numbers"
    if has_effect(node):
        return "it has an effect"
    if is_random(node):
        return "it draws random numbers" if state_of(node) is None else None
    if graphs.is_higher_order(node.target):
        return "it is a higher-order operator"
    if not graphs.is_operator(node.target):
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
    sizes = [graphs.hint(size) for size in tensor.shape]
    if None in sizes or 0 in sizes or tensor.layout is not torch.strided:
        return 0
    strides = [graphs.hint(stride) or 0 for stride in tensor.stride()]
    return extent([size or 0 for size in sizes], strides) * tensor.dtype.itemsize


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the smallest storage that holds a tensor of these sizes, none of them 0."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def value_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of the node's value."""
    return sum(storage_bytes(tensor) for tensor in tensors(node.meta.get("val")))
