"""Hold: the problem in which what lives between the forward and the backward is dear.

A *held problem* is that of the same graph with one more node, the *hold*, which is the last of the forward.
It reads nothing, allocates nothing, takes no time, runs once, and has so many bytes of scratch memory. A plan
whose peak there is B holds at most B less these bytes, outputs included; elsewhere in the step it may take
all of B. So planners that know of peaks alone find the plans that hold little. Were it the first of the
backward, what is computed again for that would be there by then, and be counted. Linear in nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Node, Phase
from fxremat.graph.schedule import Schedule, bind
from fxremat.predict.cost import Costs
from fxremat.predict.problem import Problem

HOLD = "fxremat_hold"  # the name of the node


def held(problem: Problem, scratch_bytes: int) -> Problem:
    """The held problem of a problem.

    Args:
        problem: The problem.
        scratch_bytes: What the hold allocates and frees again.
    """
    graph, at = problem.graph, problem.graph.boundary
    scratch = graph.scratch_bytes or (0,) * len(graph.nodes)
    gradients = (None if each is None else each + (each >= at) for each in graph.backward_outputs)
    with_hold = replace(
        graph,
        nodes=_with_hold(graph.nodes, at),
        backward_outputs=tuple(gradients),
        boundary=at + 1,
        module=None if graph.module is None else _module(graph, graph.module),
        scratch_bytes=(*scratch[:at], scratch_bytes, *scratch[at:]),
    )
    with_hold.check()
    return replace(problem, graph=with_hold, costs=_costs(problem.costs, at))


def with_hold(schedule: Sequence[str], graph: JointGraph) -> Schedule:
    """A schedule of a graph as one of its held problems, in which nothing else is between the two parts."""
    boundary = bind(graph, schedule).boundary
    return Schedule((*schedule[:boundary], HOLD, *schedule[boundary:]))


def without_hold(schedule: Iterable[str]) -> Schedule:
    """The schedule of the problem that a schedule of a held one stands for."""
    return Schedule(name for name in schedule if name != HOLD)


def _with_hold(nodes: tuple[Node, ...], at: int) -> tuple[Node, ...]:
    """The nodes with the hold at a place, all that refers to those behind it shifted."""

    def shifted(index: int) -> int:
        return index + (index >= at)

    behind = (
        replace(
            node,
            operands=tuple(map(shifted, node.operands)),
            shares=None if node.shares is None else shifted(node.shares),
            leader=None if node.leader is None else shifted(node.leader),
        )
        for node in nodes[at:]
    )
    return (*nodes[:at], Node(HOLD, Phase.FORWARD, keep="it is the hold", ordered=True), *behind)


def _module(graph: JointGraph, module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the fx graph with a call where the hold stands."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            copies[node] = new.node_copy(node, copies.__getitem__)

    copy(graph.fx_nodes[: graph.boundary])
    # A call whose value is no tensor: to a compiler that fuses, a kernel.
    new.create_node("call_function", _hold, name=HOLD).meta["val"] = None
    copy(graph.fx_nodes[graph.boundary :])
    (output,) = module.graph.find_nodes(op="output")
    new.node_copy(output, copies.__getitem__)
    return fx.GraphModule(module, new)


def _hold() -> None:
    """What the hold calls; it never runs."""


def _costs(costs: Costs, at: int) -> Costs:
    """The costs with those of the hold: none."""

    def with_none(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return (*seconds[:at], 0.0, *seconds[at:])

    return replace(
        costs,
        fixed=with_none(costs.fixed),
        write=with_none(costs.write),
        read=with_none(costs.read),
        is_view=(*costs.is_view[:at], True, *costs.is_view[at:]),
    )
