"""The door to private torch names of PyTorch's partitioners: the steps of theirs that ours takes over.

They are the forced saves, the minimum cut, and the extraction of the two graphs with PyTorch's contract
between them. See ``graphs.py`` for the other doors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from fxremat._torch import patches
from fxremat._torch.graphs import call, copy_of, is_opaque, is_symbolic
from fxremat._torch.mincut import minimum_cut

__all__ = [
    "CustomPartitionerFn",
    "cse",
    "default_partition",
    "extract_forward_backward",
    "finish_partition",
    "force_saves",
    "min_cut_partition",
    "min_cut_saved",
    "without_checkpoints",
]


class _Draw:
    """Stands in the place of an operator that draws random numbers, and is equal to none."""

    __name__ = "draw"  # by which PyTorch tells what writes to its operands

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)


def cse(module: fx.GraphModule) -> None:
    """Merge equal nodes, as PyTorch's partitioner does before it decides anything.

    But no draws of random numbers: PyTorch knows some of these operators alone.
    """
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        for node in module.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.target = _Draw(node.target)
        try:
            module.graph = fx_graph_cse(module.graph)
        finally:
            for node in module.graph.nodes:
                if isinstance(node.target, _Draw):
                    node.target = node.target.operator
    module.recompile()


def without_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph without the tags of ``torch.utils.checkpoint``, of whatever policy."""
    bare = copy_of(module)
    for node in bare.graph.nodes:
        for tag in ("recompute", "ac_graph_id"):
            node.meta.pop(tag, None)
    return bare


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
    for node in module.graph.nodes:
        if node.meta.get("ac_graph_id", 0) is None:  # traced without Dynamo, which numbers checkpoints
            del node.meta["ac_graph_id"]
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
    # Its own cut takes longer, or from torch 2.15 on refuses a graph whose backward reads nothing.
    saved = patches.choosing_by(minimum_cut)(module.graph, info, memory_budget=1)
    for node in wished:
        node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    return [node.name for node in saved]


def extract_forward_backward(
    module: fx.GraphModule, saved: Iterable[fx.Node], num_forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split at the saved values, by PyTorch's contract between the two graphs."""
    saved = list(saved)
    opaque = [node for node in saved if is_opaque(node)]
    symbolic = [node for node in saved if is_symbolic(node) and not _only_asserted(node)]
    tensors = [node for node in saved if not is_opaque(node) and not is_symbolic(node)]
    has_opaque = "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    forward, backward = call(
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
    return call(partitioners.default_partition, module, inputs, **kwargs)  # type: ignore[no-any-return]


def min_cut_partition(
    module: fx.GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's partitioner, for graphs that ours does not take."""
    return partitioners.min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)
