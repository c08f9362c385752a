"""Rewriting: transcribe a schedule into a new joint graph that computes the same.

Every occurrence of a name becomes a node; the first keeps the name, a mirror is called
``name_mirror1``, ``name_mirror2``, ... Uses are redirected to the latest earlier occurrence. Nothing is
decided here. Linear in steps and edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxremat.errors import GraphError
from fxremat.graph.collector import collector_paused
from fxremat.graph.generators import STATE
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import MIRROR, STEP
from fxremat.graph.replays import replay
from fxremat.graph.schedule import Binding, validate
from fxremat.memory.liveness import mirror_scratch_bytes


@collector_paused()
def rewrite(graph: JointGraph, schedule: Sequence[str]) -> JointGraph:
    """The graph whose own order is the schedule.

    Args:
        graph: A graph made from fx.
        schedule: Names of its nodes, in execution order.

    Raises:
        ScheduleError: The schedule is not an execution of the graph.
        GraphError: The graph has no fx graph to rewrite.
    """
    binding = validate(graph, schedule)
    if graph.module is None:
        raise GraphError(graph.name, "a graph made of mappings cannot be rewritten; give it to plan() only")
    module = _transcribe(graph, graph.module, binding)
    new = JointGraph.from_fx(module, len(graph.forward_outputs), name=graph.name)
    _check_same_interface(graph, new)
    return replace(new, scratch_bytes=_scratch_bytes(graph, new))


def _scratch_bytes(old: JointGraph, new: JointGraph) -> tuple[int, ...]:
    """Those of the original nodes, and of their mirrors."""
    if not old.scratch_bytes:
        return ()
    return tuple(
        mirror_scratch_bytes(old, old.index[node.meta[MIRROR]])
        if MIRROR in node.meta
        else old.scratch_bytes[old.index[node.name]]
        for node in new.fx_nodes
    )


def _transcribe(graph: JointGraph, module: fx.GraphModule, binding: Binding) -> fx.GraphModule:
    new = fx.Graph()
    latest: dict[fx.Node, fx.Node] = {}
    for node in graph.fx_nodes[: graph.num_inputs]:
        latest[node] = new.node_copy(node, latest.__getitem__)
    forward_values: dict[fx.Node, fx.Node] = {}
    copies = [0] * len(graph.nodes)
    taken = set(graph.index)
    for step, position in enumerate(binding.nodes):
        if step == binding.boundary:
            forward_values = dict(latest)
        node = graph.fx_nodes[position]
        if binding.is_mirror[step]:
            copies[position] += 1
            name = _free_name(f"{node.name}_mirror{copies[position]}", taken)
            latest[node] = _mirror(new, node, latest, name)
        else:
            latest[node] = new.node_copy(node, latest.__getitem__)
        latest[node].meta[STEP] = step
    _copy_output(graph, module, new, forward_values or latest, latest)
    rewritten = fx.GraphModule(module, new)
    rewritten.meta.update(module.meta)
    return rewritten


def _mirror(graph: fx.Graph, node: fx.Node, latest: dict[fx.Node, fx.Node], name: str) -> fx.Node:
    target, args, kwargs, outputs = replay(node)
    args, kwargs = fx.node.map_arg((args, dict(kwargs)), latest.__getitem__)
    copy = graph.create_node(node.op, target, args, kwargs, name=name, type_expr=node.type)
    copy.meta = dict(node.meta)
    if outputs is not None:
        copy.meta["val"] = node.meta["val"][:outputs]
    copy.meta.pop("recompute", None)
    copy.meta.pop(STATE, None)
    copy.meta[MIRROR] = node.name
    return copy


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _copy_output(
    graph: JointGraph,
    module: fx.GraphModule,
    new: fx.Graph,
    forward_values: dict[fx.Node, fx.Node],
    values: dict[fx.Node, fx.Node],
) -> None:
    """Forward outputs are what the forward had computed, gradients the last occurrences."""
    old = next(iter(module.graph.find_nodes(op="output")))
    count = len(graph.forward_outputs)
    (leaves,) = old.args
    flat = list(leaves)
    forward = fx.node.map_arg(flat[:count], forward_values.__getitem__)
    backward = fx.node.map_arg(flat[count:], values.__getitem__)
    output = new.output((*forward, *backward))
    output.meta = dict(old.meta)


def _check_same_interface(old: JointGraph, new: JointGraph) -> None:
    def inputs(graph: JointGraph) -> list[str]:
        return [node.name for node in graph.nodes[: graph.num_inputs]]

    assert inputs(old) == inputs(new), "rewriting lost an input"
    assert len(old.forward_outputs) == len(new.forward_outputs), "rewriting lost a forward output"
    assert len(old.backward_outputs) == len(new.backward_outputs), "rewriting lost a gradient"
