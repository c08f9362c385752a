"""Models of memory: what becomes of a schedule's values under each, and so what it takes.

There are three, which users name by an option, ``fusion``:

1. ``"none"``, ``EveryValue``: every value has a buffer of its own.
2. ``"inplace"``, ``InPlace``: results are written over operands that die (``memory/inplace.py``).
3. ``"inductor"``, ``Inductor``: kernels are fused, and what stays inside of one has no buffer
   (``inductor/fusion.py``).

The text becomes a model in ``model``, and is not looked at anywhere else. A graph made of mappings has no
operators that could be fused or could write over an operand: there all three say the same (``on``).
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from fxremat import given
from fxremat.device import calibrate
from fxremat.device.results import as_run
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import LOOPS
from fxremat.graph.schedule import Binding, bind
from fxremat.inductor import fusion as inductor
from fxremat.inductor.facts import as_usual
from fxremat.inductor.layout import after_bytes, arranged_convolutions, input_copies, is_settled, layouts
from fxremat.memory.inplace import overwrites
from fxremat.memory.instances import storage_instances
from fxremat.memory.liveness import MemoryProfile, profile_of
from fxremat.memory.lowering import Copies, Lowering
from fxremat.predict.cost import Costs

# Of a budget under Inductor, where no code is held against it: the error that predictions mostly keep to.
INDUCTOR_MARGIN = 0.03


class MemoryModel(abc.ABC):
    """What is made of a schedule, as far as its bytes and seconds depend on it.

    Attributes:
        name: What users call it.
        overwrites: Whether a result may take the place of an operand that dies.
        fuses: Whether several operators may be one kernel, inside of which a value has no buffer and is
            neither written nor read.
    """

    name: ClassVar[str]
    overwrites: ClassVar[bool] = False
    fuses: ClassVar[bool] = False

    @abc.abstractmethod
    def lower(self, graph: JointGraph, binding: Binding) -> Lowering:
        """Decide for each step of a resolved schedule whether its value gets a buffer, and when."""

    def on(self, graph: JointGraph) -> MemoryModel:
        """The model that holds for a graph: the first one where there are no operators."""
        return self if graph.fx_nodes else EVERY_VALUE

    @property
    def baseline(self) -> MemoryModel:
        """The model of what runs without fxremat."""
        return self

    def as_usual(self, graph: JointGraph) -> JointGraph:
        """The graph as it runs where no budget is given."""
        return graph

    def profile(self, graph: JointGraph, schedule: Sequence[str]) -> MemoryProfile:
        """The memory of a schedule; ScheduleError if it reads a value before it is there."""
        binding = bind(graph, schedule)
        return profile_of(graph, binding, self.lower(graph, binding))

    def margin(self, graph: JointGraph) -> float:
        """The part of a budget that is left free because the prediction is not exact."""
        return 0.0

    def as_run(self, graph: JointGraph) -> JointGraph:
        """The graph with values as they lie, and the scratch bytes of its operators, when it runs."""
        return as_run(graph)

    def copies(self, graph: JointGraph, binding: Binding) -> Copies:
        """The copies that all schedules of a graph have in common, as far as one of them shows."""
        return Copies()

    def least_seconds(self, graph: JointGraph, costs: Costs, node: int) -> float:
        """Seconds that a run of a node takes at least, whatever the schedule."""
        return costs.of_node(graph, node)

    def layouts(self, graph: JointGraph) -> Mapping[int, Hashable]:
        """How nodes' values lie, if it is known: nothing is written over one that lies otherwise."""
        return {}

    def may_overwrite(self, graph: JointGraph, node: int) -> bool:
        """Whether a node's result takes the place of an operand in some schedule."""
        return False


class EveryValue(MemoryModel):
    """Every value has a buffer of its own."""

    name = "none"

    def lower(self, graph: JointGraph, binding: Binding) -> Lowering:
        """Every step is a kernel that runs where it stands."""
        steps = range(len(binding.nodes))
        return Lowering([True] * len(steps), steps, steps)


class InPlace(MemoryModel):
    """The graphs run as they are, with the twins of operators that may write over an operand."""

    name = "inplace"
    overwrites = True

    @property
    def baseline(self) -> MemoryModel:
        """Without fxremat nothing is written in place that the program does not write in place."""
        return EVERY_VALUE

    def lower(self, graph: JointGraph, binding: Binding) -> Lowering:
        """Where a result is written over an operand, the two count once."""
        steps = range(len(binding.nodes))
        instances = storage_instances(graph, binding)
        found = overwrites(graph, binding, instances)
        saved = [(step, step, -each.bytes) for step, each in found.items()]
        over = {step: each.birth for step, each in found.items()}
        stored = [True] * len(steps)
        return Lowering(stored, steps, steps, saved, replaces=over, overwrites=found, instances=instances)

    def may_overwrite(self, graph: JointGraph, node: int) -> bool:
        """Whether the operator has a twin for operands laid out as these are."""
        return bool(graph.writable_operands[node])


class Inductor(MemoryModel):
    """The graphs are compiled: an approximation of what Inductor makes of them."""

    name = "inductor"
    overwrites = True
    fuses = True

    def lower(self, graph: JointGraph, binding: Binding) -> Lowering:
        """Only what leaves its kernel has a buffer."""
        if not graph.fx_nodes:
            return EVERY_VALUE.lower(graph, binding)
        return inductor.lower(graph, binding)

    def margin(self, graph: JointGraph) -> float:
        """The same on all devices."""
        return INDUCTOR_MARGIN

    def as_usual(self, graph: JointGraph) -> JointGraph:
        """Inductor decides which sums are stored."""
        return as_usual(graph)

    def as_run(self, graph: JointGraph) -> JointGraph:
        """Loops need none, for they run in registers, and what convolutions read is arranged for them."""
        arranged = arranged_convolutions(graph)
        settled = is_settled(graph, arranged)
        scratch = calibrate.scratch_bytes(graph, in_registers=LOOPS, arranged=arranged, settled=settled)
        return replace(graph, scratch_bytes=scratch)

    def copies(self, graph: JointGraph, binding: Binding) -> Copies:
        """Those of inputs that lie channels last, and of gradients."""
        nodes = binding.nodes
        of_inputs = [
            ([nodes[step] for step in readers], size)
            for _, readers, size in input_copies(graph, binding)
            if len(readers) > 1
        ]
        return Copies(of_inputs, after_bytes(graph, binding))

    def least_seconds(self, graph: JointGraph, costs: Costs, node: int) -> float:
        """All that it reads and writes may stay in registers."""
        return costs.fixed[node]

    def layouts(self, graph: JointGraph) -> Mapping[int, Hashable]:
        """Those of images."""
        return layouts(graph)

    def may_overwrite(self, graph: JointGraph, node: int) -> bool:
        """A loop writes over what it reads last; an external kernel doesn't, nor loops that write slices."""
        loop = graph.loops[node]
        return loop.kind in LOOPS and not (loop.is_cat and graph.is_on_cpu)


EVERY_VALUE = EveryValue()
IN_PLACE = InPlace()
INDUCTOR = Inductor()

_BY_NAME: dict[str, MemoryModel] = {each.name: each for each in (EVERY_VALUE, IN_PLACE, INDUCTOR)}
FUSIONS = tuple(_BY_NAME)


def model(fusion: str) -> MemoryModel:
    """The model that the option ``fusion`` names.

    Raises:
        InvalidOptionError: There is no such model.
    """
    return _BY_NAME[given.choice("fusion", fusion, FUSIONS)]


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
    return model(fusion).profile(graph, schedule)
