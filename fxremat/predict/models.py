"""Models of memory: what a schedule takes under each."""

from __future__ import annotations

from collections.abc import Sequence

from fxremat import given
from fxremat.errors import InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding, bind
from fxremat.inductor.fusion import Inductor
from fxremat.memory.inplace import overwrites
from fxremat.memory.instances import storage_instances
from fxremat.memory.liveness import MemoryProfile, measure
from fxremat.memory.lowering import Lowering

FUSIONS = ("none", "inplace", "inductor")


def lower(graph: JointGraph, binding: Binding, fusion: str) -> Lowering:
    """Decide for each step whether its value gets a buffer.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        fusion: ``"none"``, ``"inplace"`` or ``"inductor"``.

    Raises:
        InvalidOptionError: Another fusion is named.
    """
    steps = range(len(binding.nodes))
    if fusion == "none" or not graph.fx_nodes:
        return Lowering([True] * len(steps), steps, steps)
    if fusion == "inplace":
        instances = storage_instances(graph, binding)
        found = overwrites(graph, binding, instances)
        saved = [(step, step, -each.bytes) for step, each in found.items()]
        return Lowering([True] * len(steps), steps, steps, saved, overwrites=found, instances=instances)
    if fusion != "inductor":
        raise InvalidOptionError.bad_value("fusion", fusion, FUSIONS)
    return Inductor(graph, binding).lower()


def profile(graph: JointGraph, schedule: Sequence[str], fusion: str = "none") -> MemoryProfile:
    """The memory of a schedule.

    Args:
        graph: The graph.
        schedule: Names of its nodes, in execution order.
        fusion: ``"none"``: every value has a buffer; ``"inplace"``: or takes over an operand's;
            ``"inductor"``: those that Inductor materialises have one.

    Raises:
        InvalidOptionError: There is no such fusion.
        ScheduleError: The schedule reads a value before it is there.

    Example:
        >>> g = JointGraph.from_mappings(
        ...     {"x": (), "a": ["x"], "b": ["a"], "da": ["b", "a"]}, {"a": 4, "b": 2, "da": 4},
        ...     backward=["da"], backward_outputs=["da"])
        >>> profile(g, ("a", "b", "da")).live_bytes.tolist()
        [4, 6, 10]
    """
    binding = bind(graph, schedule)
    return measure(graph, binding, lower(graph, binding, given.choice("fusion", fusion, FUSIONS)))
