"""The door to private torch names of graphs: what a node of a joint graph stands for, and its sizes.

The other doors are ``partitioners.py`` to the steps of PyTorch's partitioners, ``compilers.py`` to
AOTAutograd and Inductor, ``lowered.py`` to what Inductor has made of a graph, ``autograd.py`` to the autograd
engine, and ``profilers.py``. What is changed of torch stands in ``patches.py``. Supported: torch 2.11 to
2.15. A keyword that a version lacks is filtered by its signature, so the rest of the package never asks for a
version.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeGuard, TypeVar

import torch
from torch import fx
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import ShortenTraceback as PassedThrough
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
)
from torch._guards import active_fake_mode
from torch._higher_order_ops.effects import has_effects, with_effects
from torch._library import opaque_object
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "SYMBOLIC_TYPES",
    "CheckpointPolicy",
    "PassedThrough",
    "annotate",
    "at_sizes",
    "call",
    "copy_of",
    "dear_functions",
    "has_registered_effect",
    "hint",
    "is_effectful",
    "is_higher_order",
    "is_opaque",
    "is_operator",
    "is_symbolic",
    "is_tangent",
    "is_tracing",
    "leaves",
    "must_be_in_backward",
    "mutated_input_of",
    "namespace",
    "pin_to_backward",
    "place_at_caller",
    "same_sizes",
    "scatters_apart",
    "traced_with_callers",
    "was_traced_in_forward",
]


_Function = TypeVar("_Function", bound=Callable[..., Any])
_sizes: ContextVar[Mapping[Any, int] | None] = ContextVar("fxremat_sizes", default=None)


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module with nodes of its own, the output's facts included."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy


def leaves(value: object) -> list[Any]:
    """The leaves of nested tuples, lists and dictionaries; None is a leaf."""
    return pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)


SYMBOLIC_TYPES: tuple[type, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with only those keywords that this torch version's ``function`` takes."""
    known = inspect.signature(function).parameters
    return function(*args, **{key: value for key, value in kwargs.items() if key in known})


def dear_functions() -> frozenset[Any]:
    """The operators whose results Inductor stores, on a CPU, rather than compute them twice."""
    aten = torch.ops.aten
    if torch.__version__ < "2.13":
        return frozenset({aten.exp, aten.sigmoid})
    return frozenset({aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh})


def scatters_apart(target: torch.Tensor, summands: torch.Tensor) -> bool:
    """Whether Inductor calls PyTorch's operator for a ``scatter_add``, and makes no loop of it.

    So it does on a CPU of several threads, and where a GPU can't add numbers of a type atomically.
    """
    from torch._inductor.utils import use_scatter_fallback

    operator, device = torch.ops.aten.scatter_reduce_.two, summands.device.type
    return bool(use_scatter_fallback(operator, "sum", target.dtype, summands.dtype, device, True))


def is_tangent(node: fx.Node) -> bool:
    """A placeholder that only exists when the backward runs: a tangent, or the backward's own seed."""
    if node.op != "placeholder":
        return False
    target = str(node.target)
    return "tangents" in target or "bwd_seed" in target or "bwd_base_offset" in target


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node's value is a symbolic number rather than a tensor."""
    return isinstance(node.meta.get("val"), SYMBOLIC_TYPES)


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is an opaque object such as a process group."""
    # With torch 2.15 the older name warns each time that it is called.
    found = getattr(opaque_object, "is_custom_class_obj", None) or opaque_object.is_opaque_value
    return bool(found(node.meta.get("val")))


def is_higher_order(target: object) -> bool:
    """Whether a node's target is a higher-order operator."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_operator(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a node's target is an operator of the dispatcher's, with a schema and tags."""
    return isinstance(target, torch._ops.OpOverload)


def is_effectful(target: object) -> bool:
    """Whether a node's target threads an effect token."""
    return target is with_effects


def has_registered_effect(target: object) -> bool:
    """Whether a call's target is an operator that is registered as one with an effect."""
    return bool(has_effects(target))


def namespace(target: object) -> str | None:
    """The namespace of an operator of the dispatcher's, with or without its overload; None for others."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name.partition("::")[0])
    return target.namespace if is_operator(target) else None


def must_be_in_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd placed this (mutating) node in the backward."""
    return bool(partitioners._must_be_in_backward(node))


def was_traced_in_forward(node: fx.Node) -> bool:
    """Whether AOTAutograd says that it traced this node while the forward ran."""
    return bool(partitioners._has_tag_is_forward(node))


def pin_to_backward(node: fx.Node) -> None:
    """Have PyTorch's helpers, and `must_be_in_backward`, take the node for one of the backward."""
    node.meta["partitioner_tag"] = "must_be_in_backward"


def mutated_input_of(description: object) -> object | None:
    """The description of the input that a graph output is written back to by the runtime, if any."""
    return getattr(description, "mutated_input", None)


def place_at_caller(description: object) -> tuple[str, int | str] | None:
    """Which tensor of the caller's a graph input or output is, or is a part or the base of, if any.

    Returns:
        ``("inputs", position)``, ``("outputs", position)``, or ``("attributes", name)`` for a parameter or a
        buffer of the traced module's own.
    """
    while (whole := getattr(description, "base_of", getattr(description, "base", None))) is not None:
        description = whole
    if isinstance(description, (ParamAOTInput, BufferAOTInput)):
        return "attributes", description.target
    if isinstance(description, PlainAOTInput):
        return "inputs", description.idx
    return ("outputs", description.idx) if isinstance(description, PlainAOTOutput) else None


def annotate(annotation: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Leave an annotation on the nodes that are traced inside, through Dynamo and AOTAutograd."""
    return fx.traceback.annotate(annotation)


def traced_with_callers(function: _Function) -> _Function:
    """The function, which Dynamo traces as a part of what calls it, and never compiles by itself.

    Where a graph break leaves the caller uncompiled it would, and knows not how to return an annotation.
    """
    python: Any = function
    skip_code(python.__code__)
    return function


def is_tracing() -> bool:
    """Whether operators run for the sake of a graph, on fake tensors, outside of Dynamo."""
    return active_fake_mode() is not None


@contextlib.contextmanager
def at_sizes(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Have ``hint`` take other numbers for symbols than those that a graph was traced with."""
    token = _sizes.set(sizes)
    try:
        yield
    finally:
        _sizes.reset(token)


def hint(size: int | torch.SymInt) -> int | None:
    """The number that a size stands for without installing a guard; None for unbacked and for ragged ones."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.is_nested_int() or free_unbacked_symbols(size):
        return None
    others = _sizes.get()
    if others:
        value = size.node.expr.subs(others)
        if value.is_number:
            return int(value)
    node_hint = getattr(size.node, "_hint", None)
    if node_hint is not None:
        return int(node_hint)
    shape_env = size.node.shape_env
    if hasattr(shape_env, "optimization_hint"):
        return int(call(shape_env.optimization_hint, size.node.expr, fallback=4096))
    return int(shape_env.size_hint(size.node.expr))


def same_sizes(some: Sequence[int | torch.SymInt], others: Sequence[int | torch.SymInt]) -> bool:
    """Whether sizes are the same whatever their symbols stand for, without installing a guard."""

    def text(size: int | torch.SymInt) -> object:
        return size.node.expr if isinstance(size, torch.SymInt) else int(size)

    return [*map(text, some)] == [*map(text, others)]
