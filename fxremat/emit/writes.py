"""Writes: what recomputation reads again of the caller's tensors, and whether it is as the forward left it.

Plain autograd has a value saved that the backward needs. Where it is computed again in place of that, the
backward reads what it is made of, and gradients would be wrong, with no word of it, behind a write to

    an input, a parameter or a buffer, or
    an output of the forward,

that such an operator reads, directly or through views. These are *read again*. What only gradient formulas
read is not meant: autograd as it is reads that, too, and looks after it.

Every tensor counts the writes to its memory through itself, its views and ``detach()``, whatever the mode.
The forward notes the counts, and the backward compares before it starts. Autograd has such a check of its
own, but not for all that is saved: a view of an input that Inductor's code makes has a count of its own.
A write through ``.data`` is counted nowhere; checksums find it.

Where hooks for saved tensors are at work, such as those of a checkpoint around the compiled region, nothing
is noted: what they give back need not be the caller's memory.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxremat._torch import autograd, graphs
from fxremat.errors import ModifiedInputError
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import MIRROR, Phase


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """A tensor of the caller's that recomputation reads.

    Attributes:
        kind: ``"inputs"`` or ``"outputs"`` of the graph, or its own ``"attributes"``.
        place: Its position among them, or the attribute's name.
        operator: What is computed from it in the backward; the first, where there are several.
        source: The user's file and line of that operator.
    """

    kind: str
    place: int | str
    operator: str
    source: str


def read_again(graph: JointGraph) -> tuple[ReadAgain, ...]:
    """What the recomputation of a rewritten graph reads of the caller's, in the order of its first reads."""
    roots = ops.roots(graph.fx_nodes)
    held = _held_by_caller(graph, roots)
    found: dict[fx.Node, ReadAgain] = {}
    for index in range(graph.boundary, len(graph.nodes)):
        node = graph.fx_nodes[index]
        if not _is_recomputed(node, graph.nodes[index].phase) or roots[node] is not node:
            continue
        for root in (roots[operand] for operand in node.all_input_nodes):
            if root in held:
                operator, source = graph.operator(node.name), graph.source(node.name)
                found.setdefault(root, ReadAgain(*held[root], operator, source))
    return tuple(found.values())


def _is_recomputed(node: fx.Node, phase: Phase) -> bool:
    """Whether a node of the backward computes what the program computes in its forward."""
    is_put_off = phase is Phase.DEFERRED and graphs.was_traced_in_forward(node)
    return MIRROR in node.meta or is_put_off


def _held_by_caller(
    graph: JointGraph, roots: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, tuple[str, int | str]]:
    """The nodes whose memory the caller can write to: kind and place of a tensor that shows it."""
    described = [(node, node.meta.get("desc")) for node in graph.fx_nodes[: graph.num_inputs]]
    assert graph.module is not None
    (output,) = graph.module.graph.find_nodes(op="output")
    outputs = zip(graph.forward_outputs, graphs.leaves(output.meta.get("desc")), strict=False)
    described += [(graph.fx_nodes[index], each) for index, each in outputs if index is not None]
    held: dict[fx.Node, tuple[str, int | str]] = {}
    for node, description in described:
        place = graphs.place_at_caller(description)
        if place is not None and isinstance(node.meta.get("val"), Tensor):
            held.setdefault(roots[node], place)
    return held


def guarded(
    compiled: Callable[..., Any],
    reads: Mapping[ReadAgain, str],
    attributes: Mapping[str, Tensor],
    detect_writes: bool,
) -> Callable[..., Any]:
    """The compiled graph; its backward raises ModifiedInputError before it would compute from other values.

    Args:
        compiled: Called with the graph's inputs, returns its outputs.
        reads: What it reads again, and what the user calls it; ``compiled`` is returned as it is if nothing.
        attributes: The graph's own tensors, by name.
        detect_writes: Whether checksums are compared as well.
    """
    if not reads:
        return compiled

    @functools.wraps(compiled)
    def run(*inputs: Any) -> Any:
        since = autograd.clock()
        outputs = compiled(*inputs)
        flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        # An input that the graph writes to may be all that leads to its backward.
        backward = autograd.backward_of(flat, since) or autograd.backward_of(inputs, since)
        if backward is not None and not autograd.has_saved_tensor_hooks():
            at_hand: Mapping[str, Any] = {"inputs": inputs, "outputs": flat, "attributes": attributes}
            tensors = [
                autograd.saved(at_hand[each.kind][each.place], each.kind == "outputs") for each in reads
            ]
            backward.register_prehook(_Noted(reads, tensors, detect_writes))
        return outputs

    return run


class _Noted:
    """What a forward has left to be read again, as a hook that runs right before its backward."""

    def __init__(
        self, reads: Mapping[ReadAgain, str], tensors: Sequence[Tensor], detect_writes: bool
    ) -> None:
        self.reads = reads
        self.tensors = tensors
        self.writes = [autograd.count_of_writes(tensor) for tensor in tensors]
        self.checksums = [checksum(tensor) for tensor in tensors] if detect_writes else []

    def __call__(self, gradients: object) -> None:
        if torch.compiler.is_compiling():
            return  # compiled autograd traces hooks, but not what is asked here
        for index, (tensor, (read, name)) in enumerate(zip(self.tensors, self.reads.items(), strict=False)):
            is_counted = autograd.count_of_writes(tensor) != self.writes[index]
            if is_counted or (self.checksums and checksum(tensor) != self.checksums[index]):
                raise ModifiedInputError(name, tuple(tensor.shape), read.operator, read.source)
        if not autograd.keeps_graph():
            self.tensors = ()  # as autograd lets go of what it has saved


def checksum(tensor: Tensor) -> bytes:
    """A hash of the numbers in a tensor, taken on the CPU."""
    hashed = hashlib.blake2b()
    for part in autograd.parts(tensor):
        values = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
        hashed.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.digest()
