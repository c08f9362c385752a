"""Cost: how many seconds a schedule takes.

The roofline model: a kernel takes the longer of its arithmetic and its traffic, plus what launching it
costs. Where a compiler fuses, a value in registers is neither written nor read, so recomputing it next to
its reader costs its arithmetic alone. Costs may also be measured on the machine, or given.

A plan is chosen by ratios of these seconds, not by their sizes. The rates of the roofline are those of the
node's own device (``device/rates.py``). Measured are the seconds of each operator alone; where that can't be
had, the roofline's stand in for them, and ``Costs.untimed`` counts such nodes. Under a compiler that fuses,
loops are not run alone: theirs are the roofline's, and the external kernels' are measured.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import given
from fxremat._torch import graphs
from fxremat.device import calibrate
from fxremat.device.arithmetic import flops
from fxremat.device.rates import Rates, rates
from fxremat.errors import InvalidOptionError, near_matches, shown
from fxremat.graph import loops, ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.memory.lowering import Lowering

COSTS = ("roofline", "measured")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each node, split by what fusion can save.

    Attributes:
        fixed: Seconds that every run of the node takes: its arithmetic beyond its traffic, and the launch of
            an external kernel.
        write: Seconds to write its result, and to launch a loop that does; saved where the result is not
            materialised.
        read: Seconds to read its result once; saved where the result is not materialised.
        is_view: Nodes that run no kernel.
        untimed: Nodes whose seconds are the roofline's although measured ones were asked for.
    """

    fixed: tuple[float, ...]
    write: tuple[float, ...]
    read: tuple[float, ...]
    is_view: tuple[bool, ...]
    untimed: int = 0

    def of_node(self, graph: JointGraph, index: int) -> float:
        """Seconds of one run of a node with nothing fused."""
        if self.is_view[index]:
            return 0.0
        reads = sum(self.read[operand] for operand in graph.nodes[index].operands)
        return self.fixed[index] + self.write[index] + reads


def costs(graph: JointGraph, cost: str | Mapping[str, float] = "roofline", fuses: bool = False) -> Costs:
    """The costs of a graph's nodes.

    Args:
        graph: The graph.
        cost: ``"roofline"``, ``"measured"``, or seconds by node name (absent names take none).
        fuses: Whether loops are fused by a compiler, so that no measurement of one alone says what it takes.

    Raises:
        InvalidOptionError: Another cost is named, a node that the graph does not have, or no seconds.
    """
    cost = check_cost(cost)
    if isinstance(cost, Mapping):
        return _given(graph, _of_nodes(graph, cost))
    if graph.module is None:
        return _given(graph, graph.given_seconds)
    return _measured(graph, fuses) if cost == "measured" else roofline(graph)


def check_cost(cost: object) -> str | dict[str, float]:
    """A cost that ``costs`` understands for a graph with these nodes, in Python's own types.

    Raises:
        InvalidOptionError: It is none.
    """
    if not isinstance(cost, Mapping):
        return given.choice("cost", cost, COSTS, "seconds by node name")
    found = {}
    for name, value in cost.items():
        taken = given.amount(value)
        if not isinstance(name, str) or taken is None:
            expected = "seconds from 0 by a node's name"
            raise InvalidOptionError("cost", f"got {shown({name: value})}, expected {expected}.")
        found[str(name)] = taken
    return found


def _of_nodes(graph: JointGraph, seconds_of: Mapping[str, float]) -> Mapping[str, float]:
    """The seconds, found to be those of nodes that the graph has."""
    for name in seconds_of:
        if name not in graph.index:
            problem = f"there is no node {shown(name)} in {graph.name}."
            raise InvalidOptionError("cost", problem, near_matches(name, graph.index))
    return seconds_of


def seconds(graph: JointGraph, binding: Binding, lowering: Lowering, costs: Costs) -> float:
    """Seconds of one run of a resolved and lowered schedule; the same for the same work in another order."""
    found, _ = _parts(graph, binding, lowering, costs)
    return math.fsum(found)


def seconds_by_step(graph: JointGraph, binding: Binding, lowering: Lowering, costs: Costs) -> list[float]:
    """The seconds of each step of a resolved and lowered schedule."""
    found, ends = _parts(graph, binding, lowering, costs)
    return [math.fsum(found[begin:end]) for begin, end in itertools.pairwise((0, *ends))]


def _parts(
    graph: JointGraph, binding: Binding, lowering: Lowering, costs: Costs
) -> tuple[list[float], list[int]]:
    """The seconds that steps take, in parts, and for each step where its own end."""
    found: list[float] = []
    ends: list[int] = []
    materialised, nodes = lowering.materialised, graph.nodes
    fixed, write, read_seconds, is_view = costs.fixed, costs.write, costs.read, costs.is_view
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        if not is_view[position]:
            found.append(fixed[position])
            if materialised[step]:
                found.append(write[position])
            for operand, read in zip(nodes[position].operands, reads, strict=True):
                if read is None or materialised[read]:
                    found.append(read_seconds[operand])
        ends.append(len(found))
    return found, ends


def _given(graph: JointGraph, seconds_of: Mapping[str, float]) -> Costs:
    fixed = tuple(seconds_of.get(node.name, 0.0) for node in graph.nodes)
    none = (0.0,) * len(fixed)
    return Costs(fixed, none, none, (False,) * len(fixed))


def _measured(graph: JointGraph, fuses: bool) -> Costs:
    estimated = roofline(graph)
    wanted = [
        index
        for index, loop in enumerate(graph.loops)
        if not estimated.is_view[index] and not (fuses and loop.kind in loops.LOOPS)
    ]
    timed = calibrate.seconds(graph, wanted)
    untimed = sum(graph.nodes[index].name not in timed for index in wanted)
    whole = [timed.get(node.name, estimated.of_node(graph, index)) for index, node in enumerate(graph.nodes)]
    if not fuses:
        seconds_of = {node.name: taken for node, taken in zip(graph.nodes, whole, strict=True)}
        return replace(_given(graph, seconds_of), untimed=untimed)
    fixed = list(estimated.fixed)
    for index in wanted:
        traffic = estimated.of_node(graph, index) - estimated.fixed[index]
        fixed[index] = max(0.0, whole[index] - traffic)
    return replace(estimated, fixed=tuple(fixed), untimed=untimed)


def roofline(graph: JointGraph, known: Rates | None = None) -> Costs:
    """The costs of a traced graph's nodes by the roofline model, at given rates or their own device's."""
    rates_of = functools.cache(rates)
    fixed, write, read, is_view = [], [], [], []
    for index, node in enumerate(graph.fx_nodes):
        own = known or rates_of(_device(node))
        traffic = ops.value_bytes(node) / own.bytes_per_second
        is_number = graphs.is_symbolic(node)
        view = index < graph.num_inputs or is_number or graph.loops[index].kind is loops.Kind.VIEW
        is_view.append(view)
        read.append(traffic)
        is_loop = graph.loops[index].kind in loops.LOOPS
        write.append(0.0 if view else traffic + is_loop * own.launch_seconds)
        fixed.append(0.0 if view else _arithmetic(node, own) + (not is_loop) * own.launch_seconds)
    return Costs(tuple(fixed), tuple(write), tuple(read), tuple(is_view))


def _arithmetic(node: fx.Node, own: Rates) -> float:
    """Seconds of a node's arithmetic beyond those of its traffic."""
    count = flops(node)
    if count == 0:
        return 0.0
    traffic = loops.moved_bytes(node) / own.bytes_per_second
    return max(0.0, count / _flops_per_second(node, own) - traffic)


def _flops_per_second(node: fx.Node, own: Rates) -> float:
    """The rate of products whose first result is as wide as the node's."""
    tensor = next(ops.tensors(node.meta.get("val")), None)
    width = tensor.dtype.itemsize if tensor is not None else 4
    if width == 2:
        return own.half_flops_per_second
    return own.double_flops_per_second if width == 8 else own.flops_per_second


def _device(node: fx.Node) -> torch.device:
    tensor = next(ops.tensors(node.meta.get("val")), None)
    return torch.device("cpu") if tensor is None else tensor.device
