"""The canonical order of a joint fx graph, and the phase of each of its nodes.

Phases:
    INPUT: a placeholder or attribute.
    FORWARD: needed by a forward output, or has an effect or draws random numbers in the forward, or is a
        number (a symbolic size) made of such values.
    BACKWARD: depends on a tangent, draws random numbers in the backward, or was placed there by AOTAutograd.
    DEFERRED: neither: computed from forward values alone and read by the backward only, such as a
        logsumexp or the transpose of a weight. Such a node runs where it is first needed; taken for a
        root of the backward it would pull a whole forward to the backward's start.

Order: inputs, the forward, the backward, each as traced. ``getitem`` stands directly behind the operator
whose output it picks, for a tuple cannot be saved. Inner ``aten.detach`` is left out, being a view.
Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from fxremat import given
from fxremat._torch import graphs
from fxremat.errors import CaptureError, shown
from fxremat.graph import generators, ops
from fxremat.graph.nodes import Phase
from fxremat.graph.places import source_line


def canonical_copy(
    module: fx.GraphModule, num_forward_outputs: int, redraws: bool = False
) -> tuple[fx.GraphModule, tuple[Phase, ...]]:
    """A copy in canonical order without dead nodes, and the phase of each of its nodes but the output.

    Args:
        module: The joint graph.
        num_forward_outputs: How many of its outputs belong to the forward.
        redraws: Whether each random operator of the forward gets a node before it that keeps the state which
            it draws from.

    Raises:
        CaptureError: It is no fx graph, has fewer outputs than its forward shall have, or a node is needed
            by the forward and depends on a tangent.
    """
    if not isinstance(module, fx.GraphModule):
        raise CaptureError(f"got {shown(module)}, expected a joint graph as an fx.GraphModule")
    count = len(graphs.leaves(_output(module.graph).args[0]))
    if given.whole(num_forward_outputs, count) is None:
        raise CaptureError(f"got {shown(num_forward_outputs)} as the forward's part of {count} outputs")
    phases = _classify(module.graph, num_forward_outputs)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied_phases: list[Phase] = []
    for node in _canonical_order(phases):
        is_output = any(user.op == "output" for user in node.users)
        if node.target is torch.ops.aten.detach.default and not is_output:
            copies[node] = copies[node.all_input_nodes[0]]
            continue
        if redraws and _may_draw_again(node, phases):
            state = generators.add_state(graph, node)
            copied_phases.append(Phase.FORWARD)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta[generators.STATE] = state.name
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copied_phases.append(phases[node])
        if phases[node] is Phase.BACKWARD and ops.is_random(node):
            graphs.pin_to_backward(copies[node])  # its place in a rewritten graph may not tell any more
    graph.node_copy(_output(module.graph), copies.__getitem__)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy, tuple(copied_phases)


def _may_draw_again(node: fx.Node, phases: Mapping[fx.Node, Phase]) -> bool:
    """Whether the node draws random numbers that the forward reads, from a state that can be kept.

    What the backward alone reads has to be saved: its first run would be dead, and torch would not draw.
    """
    readers = [user for each in (node, *_getitems(node)) for user in each.users if not ops.is_getitem(user)]
    is_read = any(user.op == "output" or phases.get(user) is Phase.FORWARD for user in readers)
    is_drawn = phases[node] is Phase.FORWARD and ops.is_random(node)
    return is_drawn and is_read and generators.can_keep_state(node)


def _output(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    assert isinstance(output, fx.Node)
    return output


def _canonical_order(phases: Mapping[fx.Node, Phase]) -> list[fx.Node]:
    inputs = [node for node, phase in phases.items() if phase is Phase.INPUT]
    body = [node for node, phase in phases.items() if phase is not Phase.INPUT]
    first_backward = next((i for i, node in enumerate(body) if phases[node] is Phase.BACKWARD), len(body))
    late_forward = [node for node in body[first_backward:] if phases[node] is Phase.FORWARD]
    rest = [node for node in body[first_backward:] if phases[node] is not Phase.FORWARD]
    leaders = [n for n in (*body[:first_backward], *late_forward, *rest) if not ops.is_getitem(n)]
    return inputs + [node for leader in leaders for node in (leader, *_getitems(leader)) if node in phases]


def _getitems(node: fx.Node) -> Iterable[fx.Node]:
    """The node's ``getitem`` readers, nested ones behind their own."""
    for user in node.users:
        if ops.is_getitem(user):
            yield user
            yield from _getitems(user)


def _classify(graph: fx.Graph, num_forward_outputs: int) -> dict[fx.Node, Phase]:
    """The phase of every live node but the output, in the graph's order."""
    leaves = graphs.leaves(_output(graph).args[0])
    forward_outputs = {leaf for leaf in leaves[:num_forward_outputs] if isinstance(leaf, fx.Node)}
    backward = _tangent_dependent(graph, _drawn_in_backward(graph, forward_outputs))
    forward: set[fx.Node] = set()
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        effect = node.op == "output" or ops.has_effect(node) or node.is_impure()
        if effect or node.op == "placeholder" or not live.isdisjoint(node.users):
            live.add(node)
        runs_once = ops.has_effect(node) or ops.is_random(node)
        starts_forward = node in forward_outputs or (runs_once and node not in backward)
        if starts_forward or not forward.isdisjoint(node.users):
            forward.add(node)
    phases: dict[fx.Node, Phase] = {}
    for node in graph.nodes:
        if node.op == "output" or node not in live:
            continue
        if node in forward and node in backward:
            raise CaptureError(
                f"node {node.name!r} ({source_line(node)}) is needed by the forward but depends on a "
                f"tangent; use on_error='fallback' to let PyTorch's partitioner handle this graph"
            )
        is_forward = node in forward or _is_number_of(node, phases)
        phases[node] = _phase(node, is_forward, node in backward)
    return phases


def _is_number_of(node: fx.Node, phases: Mapping[fx.Node, Phase]) -> bool:
    """Whether the node's value is a number, such as a size, that is known when the forward is done.

    Saved it takes no memory; in the backward it would need the tensor that it is a size of.
    """
    known = (Phase.INPUT, Phase.FORWARD)
    return graphs.is_symbolic(node) and all(phases[operand] in known for operand in node.all_input_nodes)


def _phase(node: fx.Node, in_forward: bool, in_backward: bool) -> Phase:
    if node.op in ("placeholder", "get_attr"):
        return Phase.INPUT
    if in_backward:
        return Phase.BACKWARD
    return Phase.FORWARD if in_forward else Phase.DEFERRED


def _drawn_in_backward(graph: fx.Graph, forward_outputs: set[fx.Node]) -> set[fx.Node]:
    """Random nodes that were traced behind all of the forward, and that no forward output needs."""
    late: set[fx.Node] = set()
    needed = set(forward_outputs)
    for node in reversed(graph.nodes):
        if graphs.was_traced_in_forward(node):
            return late
        if not needed.isdisjoint(node.users):
            needed.add(node)
        if ops.is_random(node) and node not in needed:
            late.add(node)
    return set()  # nothing tells where any node was traced


def _tangent_dependent(graph: fx.Graph, drawn: set[fx.Node]) -> set[fx.Node]:
    """Nodes that read a tangent or a number drawn in the backward, or that must be there."""
    dependent = set(drawn)
    for node in graph.nodes:
        if node.op in ("output", "placeholder", "get_attr"):
            continue
        reads = any(graphs.is_tangent(operand) or operand in dependent for operand in node.all_input_nodes)
        if reads or graphs.must_be_in_backward(node):
            dependent.add(node)
    return dependent
