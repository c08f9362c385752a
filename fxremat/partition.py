"""Partitioning: cut a joint graph where its backward begins.

What the forward computes and the backward reads is saved. All decisions were made before: which side a
node runs on is its place in the graph. The contract between the two graphs (order of saved values,
symbolic sizes, opaque objects, random states) is PyTorch's own, kept by PyTorch's own helpers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from fxremat import _compilers, _torch, ops, twins
from fxremat.errors import GraphError
from fxremat.generators import random_state
from fxremat.graph import JointGraph, check_graph
from fxremat.inplace import overwrites
from fxremat.kernels import segments, stretches, summed_products, waiting
from fxremat.ops import Kind
from fxremat.rewrite import MIRROR
from fxremat.schedule import bind

# Keys in the fx meta of the backward's nodes.
SEGMENT = "fxremat_segment"  # a segment of recomputation
STRETCH = "fxremat_stretch"  # a stretch between external kernels that run again


def partition(graph: JointGraph, inplace: bool = False) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph.

    Args:
        graph: A graph made from fx, rewritten or not.
        inplace: Whether results are written over operands that die, where that is safe. For graphs that
            run as they are; a compiler that takes graphs without side effects must get them without.

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
    saved = [graph.fx_nodes[index] for index in saved_values(graph)]
    forward, backward = _torch.extract_forward_backward(graph.module, saved, len(graph.forward_outputs))
    names = [node.name for node in graph.nodes]
    _erase_random(forward, frozenset(names[graph.boundary :]))
    _erase_random(backward, frozenset(names[: graph.boundary]))
    forward, backward = _torch.finish_partition(forward, backward)
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


def saved_values(graph: JointGraph) -> list[int]:
    """Indices of what the backward needs from the forward, inputs included, in order."""
    gradients = set(graph.backward_outputs)
    saved = []
    for index, node in enumerate(graph.nodes[: graph.boundary]):
        is_read = any(user >= graph.boundary for user in graph.users[index]) or index in gradients
        if not is_read or _torch.is_tangent(graph.fx_nodes[index]) or graph.fx_nodes[index].op == "get_attr":
            continue
        if isinstance(graph.fx_nodes[index].meta.get("val"), (tuple, list, dict)):
            raise GraphError(
                node.name, "the backward reads an operator's tuple of the forward", graph.source(node.name)
            )
        saved.append(index)
    return saved


def order_recomputation(backward: fx.GraphModule) -> int:
    """Make each recomputed segment of a backward graph wait for what stands before it.

    A compiler that schedules by dependencies alone may hoist a mirror, which reads saved values only, to
    the backward's start, and the memory comes back. The first mirror of each segment (``kernels.segments``)
    is made to wait for the last value before it. Only operators that get a buffer of their own in any case
    take part, kernels and reductions: a loop that waits, or is waited for, could not be inlined any more, and
    loops alone run with their readers. A product that is computed with a sum is not waited for, or it would
    be computed by itself; the sum is. Every node is told its segment and its stretch, so that the compiler
    can be kept from fusing loops of two of them (``may_fuse``).

    Returns:
        How many dependencies were added.
    """
    nodes = list(backward.graph.nodes)
    owns = [_has_own_buffer(node) and not ops.is_getitem(node) for node in nodes]
    steps = [(node.meta.get(MIRROR), own) for node, own in zip(nodes, owns, strict=True)]
    numbers = segments(steps)
    again = [MIRROR in node.meta and ops.kind(node) is Kind.KERNEL for node in nodes]
    parts = stretches(numbers, again)
    first = frozenset(waiting(steps, numbers))
    products = _summed_products(nodes, first)
    sums = frozenset(products.values())
    waits: dict[fx.Node, fx.Node] = {}
    before: fx.Node | None = None
    for index, node in enumerate(nodes):
        node.meta[SEGMENT], node.meta[STRETCH] = numbers[index], parts[index]
        if index in first and before is not None:
            waits[node] = before
        is_computed_here = index in sums or (_has_own_buffer(node) and index not in products)
        if is_computed_here and isinstance(node.meta.get("val"), torch.Tensor):
            before = node
    _say_channels_last(backward, waits)
    _torch.order_after(backward, waits)
    return len(waits)


def _summed_products(nodes: Sequence[fx.Node], waiting: Collection[int]) -> dict[int, int]:
    """Indices of the products that are computed with a sum, and of their sums."""
    index = {node: place for place, node in enumerate(nodes)}
    calls = [node if node.op == "call_function" else None for node in nodes]
    loops = [ops.Loop(Kind.KERNEL, 0) if node is None else ops.loop(node) for node in calls]
    reads = [[index[each] for each in node.all_input_nodes] for node in nodes]
    readers = [[index[each] for each in _readers(node)] for node in nodes]
    devices = (tensor.device.type for node in nodes for tensor in ops.tensors(node.meta.get("val")))
    return summed_products(loops, reads, readers, waiting, {*devices} == {"cpu"})


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """Who reads a value, views looked through."""
    for user in node.users:
        is_view = user.op == "call_function" and ops.kind(user) is Kind.VIEW
        yield from _readers(user) if is_view else (user,)


def _say_channels_last(backward: fx.GraphModule, waiting: Iterable[fx.Node]) -> None:
    """Give convolutions that wait the layout that Inductor gives the others.

    It does not see them as convolutions, and would copy what they make to the layout that was traced.
    """
    found = [node for node in waiting if ops.is_convolution(node) and node.meta["val"].dim() == 4]
    if found and _compilers.lays_out_channels_last(backward):
        for node in found:
            node.meta["val"] = node.meta["val"].to(memory_format=torch.channels_last)


def may_fuse(first: Sequence[Sequence[fx.Node]], second: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether buffers may be made by one kernel.

    They may not where one is computed again, in a segment of its own, nor where an external kernel runs again
    between them: the kernel would run at the place of one of them and hold what the other works on meanwhile.

    Args:
        first: The nodes that each buffer of a kernel was made for, of which the last counts: the others are
            computed inside of its loop.
        second: Those of another kernel.
    """
    nodes = [max(origins, key=_segment_and_mirror) for origins in (*first, *second) if origins]
    is_again = any(MIRROR in node.meta for node in nodes)
    return len({node.meta.get(SEGMENT if is_again else STRETCH) for node in nodes}) <= 1


def _segment_and_mirror(node: fx.Node) -> tuple[int, bool]:
    """What orders the nodes that a buffer was made for: segments ascend, a mirror is the stricter case."""
    return node.meta.get(SEGMENT, -1), MIRROR in node.meta


def _has_own_buffer(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    operator = node.args[0] if ops.is_getitem(node) else node
    return isinstance(operator, fx.Node) and ops.kind(operator) in (Kind.KERNEL, Kind.REDUCTION)
