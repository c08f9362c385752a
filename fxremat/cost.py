"""Cost: how many seconds a schedule takes.

The roofline model: a kernel takes the longer of its arithmetic and its traffic, plus what launching it
costs. Where a compiler fuses, a value in registers is neither written nor read, so recomputing it next to
its reader costs its arithmetic alone. Costs may also be measured on the machine, or given.

A plan is chosen by ratios of these seconds, not by their sizes. The rates are those of one CPU and one GPU,
measured by hand (large float32 matrix product; copy of 128 MiB; call of a four-element operator):
2-core AMD EPYC of the Zen 4 line, 66 GFLOP/s, 16.6 GB/s, 3.3 us. The GPU's are the data sheet's of an H100
SXM at half of their peak: 33 TFLOP/s in float32, 495 in half precision, 1.7 TB/s; launching takes 4 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxremat import calibrate, ops
from fxremat.errors import InvalidOptionError
from fxremat.fusion import Lowering
from fxremat.graph import JointGraph
from fxremat.schedule import Binding

COSTS = ("roofline", "measured")


@dataclass(frozen=True, slots=True)
class Device:
    """The rates of a kind of device."""

    flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float


CPU = Device(66e9, 66e9, 16.6e9, 3.3e-6)
CUDA = Device(33e12, 495e12, 1.7e12, 4e-6)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each node, split by what fusion can save.

    Attributes:
        fixed: Seconds that every run of the node takes: its arithmetic beyond its traffic, and the launch.
        write: Seconds to write its result; saved where the result is not materialised.
        read: Seconds to read its result once; saved where the result is not materialised.
        is_view: Nodes that run no kernel.
    """

    fixed: tuple[float, ...]
    write: tuple[float, ...]
    read: tuple[float, ...]
    is_view: tuple[bool, ...]

    def of_node(self, graph: JointGraph, index: int) -> float:
        """Seconds of one run of a node with nothing fused."""
        if self.is_view[index]:
            return 0.0
        reads = sum(self.read[operand] for operand in graph.nodes[index].operands)
        return self.fixed[index] + self.write[index] + reads


def costs(graph: JointGraph, cost: str | Mapping[str, float] = "roofline") -> Costs:
    """The costs of a graph's nodes.

    Args:
        graph: The graph.
        cost: ``"roofline"``, ``"measured"``, or seconds by node name (absent names take none).

    Raises:
        InvalidOptionError: Another cost is named.
    """
    if isinstance(cost, Mapping):
        return _given(graph, cost)
    if cost not in COSTS:
        raise InvalidOptionError.bad_value("cost", cost, COSTS)
    if graph.module is None:
        return _given(graph, graph.given_seconds)
    return _given(graph, calibrate.seconds(graph)) if cost == "measured" else roofline(graph)


def seconds(graph: JointGraph, binding: Binding, lowering: Lowering, costs: Costs) -> float:
    """Seconds of one run of a resolved and lowered schedule."""
    total = 0.0
    materialised, read_seconds = lowering.materialised, costs.read
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        if costs.is_view[position]:
            continue
        total += costs.fixed[position]
        if materialised[step]:
            total += costs.write[position]
        for operand, read in zip(graph.nodes[position].operands, reads, strict=True):
            if read is None or materialised[read]:
                total += read_seconds[operand]
    return total


def _given(graph: JointGraph, given: Mapping[str, float]) -> Costs:
    fixed = tuple(float(given.get(node.name, 0.0)) for node in graph.nodes)
    none = (0.0,) * len(fixed)
    return Costs(fixed, none, none, (False,) * len(fixed))


def roofline(graph: JointGraph, device: Device | None = None) -> Costs:
    """The costs of a traced graph's nodes by the roofline model, on their own device or a given one."""
    fixed, write, read, is_view = [], [], [], []
    for index, node in enumerate(graph.fx_nodes):
        rates = device or _device(node)
        traffic = ops.value_bytes(node) / rates.bytes_per_second
        view = index < graph.num_inputs or graph.loops[index].kind is ops.Kind.VIEW
        is_view.append(view)
        read.append(traffic)
        write.append(0.0 if view else traffic)
        fixed.append(0.0 if view else _fixed_seconds(node, rates))
    return Costs(tuple(fixed), tuple(write), tuple(read), tuple(is_view))


def _fixed_seconds(node: fx.Node, device: Device) -> float:
    count = ops.flops(node)
    if count == 0:
        return device.launch_seconds
    is_half = any(tensor.dtype.itemsize == 2 for tensor in ops.tensors(node.meta.get("val")))
    rate = device.half_flops_per_second if is_half else device.flops_per_second
    traffic = ops.moved_bytes(node) / device.bytes_per_second
    return device.launch_seconds + max(0.0, count / rate - traffic)


def _device(node: fx.Node) -> Device:
    tensor = next(ops.tensors(node.meta.get("val")), None)
    return (
        CUDA if tensor is not None and tensor.device.type != "cpu" and tensor.device.type != "meta" else CPU
    )
