"""Partitioning: cut a joint graph where its backward begins.

What the forward computes and the backward reads is saved. All decisions were made before: which side a
node runs on is its place in the graph. The contract between the two graphs (order of saved values,
symbolic sizes, opaque objects, random states) is PyTorch's own, kept by PyTorch's own helpers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from fxremat._torch import graphs, partitioners
from fxremat.errors import GraphError
from fxremat.graph import ops, twins
from fxremat.graph.collector import collector_paused
from fxremat.graph.generators import random_state
from fxremat.graph.joint import JointGraph, check_graph
from fxremat.graph.nodes import Node
from fxremat.graph.schedule import bind
from fxremat.memory.inplace import overwrites

IMAGE = 4  # dimensions of one


@collector_paused()
def partition(
    graph: JointGraph, inplace: bool = False, views_again: bool = False, images_whole: bool = False
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph.

    Args:
        graph: A graph made from fx, rewritten or not.
        inplace: Whether results are written over operands that die, where that is safe. For graphs that
            run as they are; a compiler that takes graphs without side effects must get them without.
        views_again: Whether the backward takes its own views of values that are saved themselves. For
            compilers that choose layouts: where a view does not fit the layout of its value, the forward
            would save a copy besides.
        images_whole: Whether the images that convolutions make, and those of the caller's, are saved in the
            place of views of them. For the same compilers, which lay these out as convolutions work: of a
            view the forward would save a copy.

    Returns:
        ``(forward, backward)``: the forward takes the primals and returns its outputs and the saved
        values; the backward takes the saved values and the tangents and returns the gradients.

    Raises:
        GraphError: The graph has no fx graph or no gradient, or an operator's tuple would have to be saved.
    """
    check_graph(graph)
    if graph.module is None:
        raise GraphError(graph.name, "a graph made of mappings cannot be partitioned")
    if all(gradient is None for gradient in graph.backward_outputs):
        raise GraphError(graph.name, "it computes no gradient, so that it has no backward")
    saved = [graph.fx_nodes[index] for index in saved_values(graph, views_again, images_whole)]
    forward, backward = partitioners.extract_forward_backward(graph.module, saved, len(graph.forward_outputs))
    names = [node.name for node in graph.nodes]
    _erase_random(forward, frozenset(names[graph.boundary :]))
    _erase_random(backward, frozenset(names[: graph.boundary]))
    forward, backward = partitioners.finish_partition(forward, backward)
    if inplace:
        _write_in_place(graph, (forward, backward))
    return forward, backward


def _write_in_place(graph: JointGraph, modules: Iterable[fx.GraphModule]) -> None:
    """Turn into their twins the nodes that write over an operand in the graph's own order."""
    written = {}
    for step, overwrite in overwrites(graph, bind(graph, graph.names)).items():
        node = graph.nodes[graph.num_inputs + step]
        written[node.name] = graph.nodes[node.operands[overwrite.operand]].name
    for module in modules:
        for node in module.graph.nodes:
            if node.op == "call_function" and node.name in written:
                (operand,) = (each for each in node.all_input_nodes if each.name == written[node.name])
                twins.write_over(node, operand)
        module.recompile()


def _erase_random(module: fx.GraphModule, others: frozenset[str]) -> None:
    """Erase the other side's random operators and their states, with what only they read.

    PyTorch's extraction copies every node whose operands are there, and outside of torch.compile the random
    ones survive although dead. They would draw again, and change every later random number of the program.
    """

    def has_effect(node: fx.Node) -> bool:
        is_others = node.name in others
        return node.is_impure(impure_random=not is_others) and not (is_others and node.target is random_state)

    module.graph.eliminate_dead_code(has_effect)
    module.recompile()


def saved_values(graph: JointGraph, views_again: bool = False, images_whole: bool = False) -> list[int]:
    """Indices of what the backward needs from the forward, inputs included, in order.

    Args:
        graph: The graph.
        views_again: As for ``partition``.
        images_whole: As for ``partition``.
    """
    gradients = set(graph.backward_outputs)
    saved: dict[int, None] = {}
    for index, node in enumerate(graph.nodes[: graph.boundary]):
        is_read = any(user >= graph.boundary for user in graph.users[index]) or index in gradients
        if not is_read or graphs.is_tangent(graph.fx_nodes[index]) or graph.fx_nodes[index].op == "get_attr":
            continue
        if isinstance(graph.fx_nodes[index].meta.get("val"), (tuple, list, dict)):
            raise GraphError(
                node.name, "the backward reads an operator's tuple of the forward", graph.source(node.name)
            )
        if not (views_again and _is_view_of(graph, index, saved)):
            saved[_image_shown(graph, index) if images_whole else index] = None
    return list(saved)


def _image_shown(graph: JointGraph, index: int) -> int:
    """The image that a value is a view of, if a convolution made it or the caller has it; else the value."""
    node, base = graph.nodes[index], index
    while _may_be_taken_again(node):
        assert node.shares is not None
        base, node = node.shares, graph.nodes[node.shares]
    is_fixed = base < graph.num_inputs or ops.is_convolution(graph.fx_nodes[base])
    value = graph.fx_nodes[base].meta.get("val")
    return base if is_fixed and isinstance(value, torch.Tensor) and value.dim() == IMAGE else index


def _may_be_taken_again(node: Node) -> bool:
    """Whether a node is a view that may run again, and needs nothing but what it looks at."""
    return node.keep is None and node.leader is None and node.operands == (node.shares,)


def _is_view_of(graph: JointGraph, index: int, saved: Collection[int]) -> bool:
    """Whether a value is a view of one of these, through views that may run again and need nothing else."""
    node = graph.nodes[index]
    while _may_be_taken_again(node):
        assert node.shares is not None
        if node.shares in saved:
            return True
        node = graph.nodes[node.shares]
    return False
