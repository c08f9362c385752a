"""The door to private torch names of graphs, and the place where torch versions differ.

Everything that PyTorch's partitioners know and do not publish is called from here: what a placeholder
stands for, symbolic sizes' hints, the forced saves, the min-cut, the extraction of the two graphs. The other
doors are ``compilers.py``, to AOTAutograd and Inductor, and ``autograd.py``, to the autograd engine.
Supported: torch 2.11 to 2.15. A keyword that a version lacks is filtered by its signature, so the rest of the
package never asks for a version.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import networkx as nx
import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback as PassedThrough
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
)
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import active_fake_mode
from torch._higher_order_ops.effects import with_effects
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._library.opaque_object import is_opaque_value
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from fxremat._torch.mincut import minimum_cut

__all__ = [
    "SYMBOLIC_TYPES",
    "CheckpointPolicy",
    "CustomPartitionerFn",
    "PassedThrough",
    "annotate",
    "cse",
    "dear_functions",
    "default_partition",
    "extract_forward_backward",
    "finish_partition",
    "force_saves",
    "hint",
    "is_effectful",
    "is_forward_seed",
    "is_higher_order",
    "is_opaque",
    "is_operator",
    "is_symbolic",
    "is_tangent",
    "is_tracing",
    "leaves",
    "min_cut_partition",
    "min_cut_saved",
    "must_be_in_backward",
    "must_be_in_forward",
    "mutated_input_of",
    "order_after",
    "pin_to_backward",
    "place_at_caller",
    "same_sizes",
    "wait_tensor_target",
    "was_traced_in_forward",
]


def leaves(value: object) -> list[Any]:
    """The leaves of nested tuples, lists and dictionaries; None is a leaf."""
    return pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)


SYMBOLIC_TYPES: tuple[type, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with only those keywords that this torch version's ``function`` takes."""
    known = inspect.signature(function).parameters
    return function(*args, **{key: value for key, value in kwargs.items() if key in known})


def dear_functions() -> frozenset[Any]:
    """The operators whose results Inductor stores, on a CPU, rather than compute them twice."""
    aten = torch.ops.aten
    if torch.__version__ < "2.13":
        return frozenset({aten.exp, aten.sigmoid})
    return frozenset({aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh})


# --- What a node of a joint graph stands for -------------------------------------------------------


def is_tangent(node: fx.Node) -> bool:
    """A placeholder that only exists when the backward runs: a tangent, or the backward's own seed."""
    if node.op != "placeholder":
        return False
    target = str(node.target)
    return "tangents" in target or "bwd_seed" in target or "bwd_base_offset" in target


def is_forward_seed(node: fx.Node) -> bool:
    """A placeholder with the seed or offset of the forward's random numbers."""
    target = str(node.target)
    return node.op == "placeholder" and ("fwd_seed" in target or "fwd_base_offset" in target)


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node's value is a symbolic number rather than a tensor."""
    return isinstance(node.meta.get("val"), SYMBOLIC_TYPES)


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is an opaque object such as a process group."""
    return is_opaque_value(node.meta.get("val"))


def is_higher_order(target: object) -> bool:
    """Whether a node's target is a higher-order operator."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_operator(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a node's target is an operator of the dispatcher's, with a schema and tags."""
    return isinstance(target, torch._ops.OpOverload)


def is_effectful(target: object) -> bool:
    """Whether a node's target threads an effect token."""
    return target is with_effects


def wait_tensor_target() -> object | None:
    """The operator that waits for a collective, where torch was built with distributed."""
    if not torch.distributed.is_available():
        return None
    return torch.ops._c10d_functional.wait_tensor.default


def must_be_in_forward(node: fx.Node) -> bool:
    """Whether AOTAutograd placed this (mutating) node in the forward."""
    return bool(partitioners._must_be_in_forward(node))


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


def is_tracing() -> bool:
    """Whether operators run for the sake of a graph, on fake tensors, outside of Dynamo."""
    return active_fake_mode() is not None


def hint(size: int | torch.SymInt) -> int | None:
    """The number that a size stands for without installing a guard; None for unbacked and for ragged ones."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.is_nested_int() or free_unbacked_symbols(size):
        return None
    node_hint = getattr(size.node, "_hint", None)
    if node_hint is not None:
        return int(node_hint)
    shape_env = size.node.shape_env
    if hasattr(shape_env, "optimization_hint"):
        return int(_call(shape_env.optimization_hint, size.node.expr, fallback=4096))
    return int(shape_env.size_hint(size.node.expr))


def same_sizes(some: Sequence[int | torch.SymInt], others: Sequence[int | torch.SymInt]) -> bool:
    """Whether sizes are the same whatever their symbols stand for, without installing a guard."""

    def text(size: int | torch.SymInt) -> object:
        return size.node.expr if isinstance(size, torch.SymInt) else int(size)

    return [*map(text, some)] == [*map(text, others)]


# --- Steps of PyTorch's partitioners ----------------------------------------------------------------


def cse(module: fx.GraphModule) -> None:
    """Merge equal nodes, as PyTorch's partitioner does before it decides anything."""
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    module.recompile()


def force_saves(module: fx.GraphModule) -> None:
    """Tag what PyTorch orders to be saved: collectives, effects and sources of backward mutations."""
    if partitioners.has_recomputable_ops(module):
        _keep_between_checkpoints(module)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(module)
    partitioners.force_save_effectful_ops(module)
    partitioners.force_save_bw_mutation_src(module)


def _keep_between_checkpoints(module: fx.GraphModule) -> None:
    """Let PyTorch tag what it saves between checkpointed parts; only hooks need it in any case."""
    wished = [n for n in module.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE]
    partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    for node in wished:
        is_saved = node.meta["recompute"] is CheckpointPolicy.MUST_SAVE
        if is_saved and not node.meta.get("has_backward_hook", False):
            node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE


def min_cut_saved(
    module: fx.GraphModule, num_forward_outputs: int, static_inputs: Sequence[int]
) -> list[str]:
    """Names of the values that PyTorch's min-cut keeps when memory is no constraint (budget 1)."""
    wished = [n for n in module.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.PREFER_SAVE]
    for node in wished:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # the min-cut knows no wish to save
    info = partitioners.classify_nodes(module, list(static_inputs), num_forward_outputs)
    for node in reversed(module.graph.nodes):
        near = min((user.dist_from_bw + 1 for user in node.users), default=10**9)
        if node.op == "output":
            node.dist_from_bw = 10**9
        elif not info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min(near, 10**9)
    with _fast_minimum_cut():
        saved = partitioners.choose_saved_values_set(module.graph, info, memory_budget=1)
    for node in wished:
        node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    return [node.name for node in saved]


@contextlib.contextmanager
def _fast_minimum_cut() -> Iterator[None]:
    """Let PyTorch find the same cut in less time, also where the backward reads nothing.

    Up to torch 2.14 it asks networkx, by networkx's own name: whoever else does meanwhile gets the same
    answer. From then on its own search is as fast, but refuses a graph without a sink.
    """
    owner: Any = partitioners if hasattr(partitioners, "minimum_cut") else nx
    original = owner.minimum_cut

    def cut(graph: Any, source: Any, sink: Any, *args: Any, **kwargs: Any) -> Any:
        is_plain = not args and not kwargs and isinstance(graph, nx.DiGraph) and not graph.is_multigraph()
        return (minimum_cut if is_plain else original)(graph, source, sink, *args, **kwargs)

    owner.minimum_cut = cut
    try:
        yield
    finally:
        owner.minimum_cut = original


def extract_forward_backward(
    module: fx.GraphModule, saved: Iterable[fx.Node], num_forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split at the saved values, by PyTorch's contract between the two graphs."""
    saved = list(saved)
    opaque = [node for node in saved if is_opaque(node)]
    symbolic = [node for node in saved if is_symbolic(node) and not _only_asserted(node)]
    tensors = [node for node in saved if not is_opaque(node) and not is_symbolic(node)]
    has_opaque = "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    forward, backward = _call(
        partitioners._extract_fwd_bwd_modules,
        module,
        tensors if has_opaque else tensors + opaque,
        symbolic,
        saved_opaque_nodes=opaque,
        num_fwd_outputs=num_forward_outputs,
        static_lifetime_input_nodes=OrderedSet(),
    )
    return forward, backward


def _only_asserted(node: fx.Node) -> bool:
    """A symbolic truth value that is read by runtime assertions alone."""
    asserting = torch.ops.aten._assert_scalar.default
    return (
        isinstance(node.meta.get("val"), torch.SymBool)
        and len(node.users) > 0
        and all(user.target is asserting for user in node.users)
    )


def finish_partition(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's last steps: thread the random states of nested graphs through both graphs."""
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def default_partition(
    module: fx.GraphModule, inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's partitioner that recomputes nothing; it takes graphs without a backward."""
    return _call(partitioners.default_partition, module, inputs, **kwargs)  # type: ignore[no-any-return]


def min_cut_partition(
    module: fx.GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's partitioner, for graphs that ours does not take."""
    return partitioners.min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)


def _run_dependent(dependencies: object, subgraph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an operator with control dependencies computes."""
    return subgraph(*args, **kwargs)


def order_after(module: fx.GraphModule, waits: Mapping[fx.Node, fx.Node]) -> None:
    """Make each key run after its value, as a dependency that Inductor's scheduler honours."""
    from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering

    if not waits:
        return
    if torch._C.DispatchKey.Autograd not in control_deps.py_kernels:  # torch 2.11: operands are parameters
        control_deps.py_impl(torch._C.DispatchKey.Autograd)(_run_dependent)
    preserve_node_ordering(module.graph, {node: OrderedSet([dep]) for node, dep in waits.items()})
    module.graph.lint()
    module.recompile()
