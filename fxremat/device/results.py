"""Results as they are: what the operators of a graph return that runs as it is.

A graph is traced with a rule for the sizes, strides and dtype of each operator's results. Not every kernel
keeps to it: PyTorch traces the gradient of a batch normalisation as its image lies, and the kernel's lies in
the order of its sizes; it traces the statistics of a layer normalisation in 16 bits where its weights are in
32, and so are the kernel's; and an image of one pixel may lie in either order, after which kernels choose how
they work: which it is, is traced otherwise than some have it. What results take, what may be written over
them, what operators allocate besides and what their readers return depend on what they really are. So each
distinct operator of a graph, which runs once alone in any case for its scratch memory (``calibrate.py``),
tells it.

An operator that can't run alone is believed, unless what it reads is otherwise than it was traced: then its
result and all that is computed of it have an ``UNKNOWN_LAYOUT``. So have results of symbolic sizes that lie
otherwise.

Linear in nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.device.calibrate import UNSEEN, Form, Forms, Seen, forms_of, run_alone
from fxremat.device.rates import REFUSALS
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import TRACED, analyse
from fxremat.graph.twins import UNKNOWN_LAYOUT


def as_run(graph: JointGraph) -> JointGraph:
    """The graph with values as its operators make them, and with the scratch bytes of those."""
    seen = run_alone(graph.fx_nodes)
    is_traced = all(_is_like(node, each.forms) for node, each in zip(graph.fx_nodes, seen, strict=True))
    if graph.module is not None and not is_traced:
        module = graphs.copy_of(graph.module)
        graph = replace(graph, module=module)
        _correct(graph.fx_nodes, seen)
        (output,) = module.graph.find_nodes(op="output")
        phases = [node.phase for node in graph.nodes]
        graph = replace(graph, storage_bytes=analyse(graph.fx_nodes, output, phases, frozenset())[1])
    return replace(graph, scratch_bytes=tuple(each.scratch_bytes for each in seen))


def _correct(nodes: Sequence[fx.Node], seen: list[Seen]) -> None:
    """Give nodes the values that were seen on operands as they were traced, and those that follow.

    Args:
        nodes: All nodes, in order.
        seen: What they did alone; what they do on operands as they really are takes its place.
    """
    changed: set[fx.Node] = set()
    for index, node in enumerate(nodes):
        operands = node.all_input_nodes
        is_known = all(UNKNOWN_LAYOUT not in each.meta for each in operands)
        if is_known and not changed.isdisjoint(operands):
            seen[index] = _seen_again(node)
            is_known = seen[index].forms is not None
        forms = seen[index].forms
        if is_known and _is_like(node, forms):
            continue
        if is_known and forms and all(map(_can_be_like, graphs.leaves(node.meta["val"]), forms)):
            node.meta[TRACED] = node.meta["val"]
            node.meta["val"] = _value_like(node.meta["val"], forms)
            changed.add(node)
        else:
            node.meta[UNKNOWN_LAYOUT] = True


def _seen_again(node: fx.Node) -> Seen:
    """What a node does on operands as they were found to be."""
    if not ops.is_getitem(node) and ops.viewed_operand(node) is None:
        return run_alone([node])[0]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
    target: Any = node.target
    with contextlib.suppress(*REFUSALS):
        return Seen(0, forms_of(target(*args, **kwargs)))
    return UNSEEN  # a view that copies


def _is_like(node: fx.Node, forms: Forms | None) -> bool:
    """Whether a node's value is so; True where nothing is known."""
    leaves = graphs.leaves(node.meta.get("val"))
    return forms is None or all(map(_is_tensor_like, leaves, forms))


def _is_tensor_like(value: object, form: Form | None) -> bool:
    if not isinstance(value, torch.Tensor) or form is None:
        return True  # a kernel may leave out what was traced
    return value.dtype == form.dtype and _lies_like(value, form)


def _lies_like(value: torch.Tensor, form: Form) -> bool:
    sizes = list(map(graphs.hint, value.shape))
    if None in sizes:
        return True  # the numbers decide
    is_laid = 0 in sizes or list(map(graphs.hint, value.stride())) == list(form.strides)
    return is_laid and sizes == list(form.sizes)


def _can_be_like(value: object, form: Form | None) -> bool:
    """Whether a value can be corrected: strides of symbolic sizes would be numbers."""
    if not isinstance(value, torch.Tensor) or form is None:
        return True
    is_symbolic = any(isinstance(each, torch.SymInt) for each in (*value.shape, *value.stride()))
    return not is_symbolic or _lies_like(value, form)


def _value_like(value: Any, forms: Forms) -> Any:
    """A fake value that is so."""
    given = iter(forms)

    def corrected(leaf: Any) -> Any:
        form = next(given)
        if form is None or _is_tensor_like(leaf, form):
            return leaf
        sizes, strides, dtype = form
        if _lies_like(leaf, form):
            sizes, strides = leaf.shape, leaf.stride()  # which may be symbolic
        return leaf.new_empty_strided(sizes, strides, dtype=dtype)

    return fx.node.map_aggregate(value, corrected)
