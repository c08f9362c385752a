"""Layouts: how the values of a graph lie that runs as it is.

A graph is traced with a rule for the strides of each operator's result. Not every kernel keeps to it: PyTorch
traces the gradient of a batch normalisation as its image lies, and the kernel's lies in the order of its
sizes. What may be written in place, what operators allocate besides and how their readers' results lie depend
on where the numbers really are. So each distinct operator of a graph, which runs once alone in any case for
its scratch memory (``calibrate.py``), tells how its results lie.

An operator that can't run alone is believed, unless what it reads lies otherwise than it was traced: then its
result and all that is computed of it have an ``UNKNOWN_LAYOUT``. So have such results of symbolic sizes.

Linear in nodes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.device.calibrate import UNSEEN, Layout, Seen, Strides, layout_of, run_alone
from fxremat.device.rates import REFUSALS
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.twins import UNKNOWN_LAYOUT


def as_run(graph: JointGraph) -> JointGraph:
    """The graph with values that lie as its operators lay them, and with the scratch bytes of those."""
    seen = run_alone(graph.fx_nodes)
    is_traced = all(_lies(node, each.layout) for node, each in zip(graph.fx_nodes, seen, strict=True))
    if graph.module is not None and not is_traced:
        graph = replace(graph, module=_copy(graph.module))
        _lay(graph.fx_nodes, seen)
    return replace(graph, scratch_bytes=tuple(each.scratch_bytes for each in seen))


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """The module with nodes of its own."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy


def _lay(nodes: Sequence[fx.Node], seen: list[Seen]) -> None:
    """Give nodes the layouts that were seen on operands as they were traced, and those that follow.

    Args:
        nodes: All nodes, in order.
        seen: What they did alone; what they do on operands as they really lie takes its place.
    """
    changed: set[fx.Node] = set()
    for index, node in enumerate(nodes):
        operands = node.all_input_nodes
        is_known = all(UNKNOWN_LAYOUT not in each.meta for each in operands)
        if is_known and not changed.isdisjoint(operands):
            seen[index] = _seen_again(node)
            is_known = seen[index].layout is not None
        if is_known and _lies(node, seen[index].layout):
            continue
        if is_known and not any(map(_is_symbolic, ops.tensors(node.meta["val"]))):
            node.meta["val"] = _value_with(node.meta["val"], seen[index].layout or ())
            changed.add(node)
        else:
            node.meta[UNKNOWN_LAYOUT] = True


def _seen_again(node: fx.Node) -> Seen:
    """What a node does on operands that lie as they were found to."""
    if not ops.is_getitem(node) and ops.viewed_operand(node) is None:
        return run_alone([node])[0]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
    target: Any = node.target
    with contextlib.suppress(*REFUSALS):
        return Seen(0, layout_of(target(*args, **kwargs)))
    return UNSEEN  # a view that copies


def _lies(node: fx.Node, layout: Layout | None) -> bool:
    """Whether a node's value lies so; True where nothing is known."""
    values = graphs.leaves(node.meta.get("val"))
    return layout is None or all(itertools.starmap(_has_strides, zip(values, layout, strict=False)))


def _has_strides(value: object, strides: Strides | None) -> bool:
    if not isinstance(value, torch.Tensor) or strides is None or len(strides) != value.dim():
        return True  # a kernel may leave out what was traced
    sizes = list(map(graphs.hint, value.shape))
    steps = zip(sizes, map(graphs.hint, value.stride()), strides, strict=True)
    return 0 in sizes or all(size == 1 or step == real for size, step, real in steps)


def _value_with(value: Any, layout: Layout) -> Any:
    """A fake value that lies so."""
    strides = iter(layout)

    def laid(leaf: Any) -> Any:
        found = next(strides)
        return leaf if _has_strides(leaf, found) else leaf.new_empty_strided(leaf.shape, found)

    return fx.node.map_aggregate(value, laid)


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(isinstance(each, torch.SymInt) for each in (*value.shape, *value.stride()))
