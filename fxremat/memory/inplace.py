"""In place: which steps of a schedule write their result over an operand (Chen et al. 2016, Sec. 3).

A step takes over the storage of an operand if all of this holds:

1. The operator has a twin that writes over that operand (``graph/twins.py``), and the result is laid out as
   the operand is and fills the operand's whole storage.
2. The step is the last to read any value in that storage, reads it through this operand alone, and no value
   in it is returned.
3. The storage is not the caller's, and it was allocated in the same part: what the forward saves is never
   written to by the backward, which may run a second time on it; nor are inputs and tangents.
4. Who allocated it and who read it are operators of torch that are done with it when they return; a
   collective may still be sending it, and a custom operator may have kept it.
5. If the forward returns the result, the operand is not a view: a caller may write to a tensor that a
   custom function of autograd returned, but not to a view.

The result is the same, bit for bit: a twin does the same arithmetic in the same order. Linear in reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.memory.instances import Instances, storage_instances


@dataclass(frozen=True, slots=True)
class Overwrite:
    """What a step writes its result over.

    Attributes:
        operand: Which of the node's operands it is.
        birth: The step that allocated the operand's storage instance.
        storage: The storage of that instance.
        bytes: Its size, and the result's.
    """

    operand: int
    birth: int
    storage: int
    bytes: int


def overwrites(
    graph: JointGraph, binding: Binding, instances: Instances | None = None
) -> dict[int, Overwrite]:
    """The steps that write over an operand, in order; none in a graph made of mappings.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        instances: Its storage instances, where they are known.

    Example:
        >>> import torch, fxremat; from fxremat.graph.schedule import bind
        >>> g = fxremat.capture(torch.nn.Linear(4, 2), torch.randn(3, 4), loss=lambda y: y.exp().sum())
        >>> [g.names[step] for step in overwrites(g, bind(g, g.names))]
        ['exp']
    """
    return _Decision(graph, binding, instances).take() if graph.fx_nodes else {}


class _Decision:
    """The rules, applied step by step."""

    def __init__(self, graph: JointGraph, binding: Binding, instances: Instances | None) -> None:
        self.graph = graph
        self.binding = binding
        self.owners, self.values = instances or storage_instances(graph, binding)
        forward = [step for step in binding.outputs if step < binding.boundary]
        self.returned = {instance for step in binding.outputs for instance in self.values[step]}
        self.returned_by_forward = {instance for step in forward for instance in self.values[step]}
        self.last_read = self._last_reads()
        self.held = self._held()
        self.found: dict[int, Overwrite] = {}

    def take(self) -> dict[int, Overwrite]:
        """Each step takes the first operand that it may write over."""
        writable = self.graph.writable_operands
        for step, position in enumerate(self.binding.nodes):
            for operand in writable[position]:
                if self._may_write(step, operand):
                    self.found[step] = self._overwrite(step, operand)
                    break
        return self.found

    def _last_reads(self) -> list[int]:
        """For each instance, the step that reads it last."""
        last = [-1] * len(self.owners)
        values = self.values
        for step, reads in enumerate(self.binding.reads):
            for read in reads:
                if read is not None:
                    for instance in values[read]:
                        last[instance] = step
        return last

    def _held(self) -> set[int]:
        """The instances that an operator which made or read them may hold on to."""
        is_plain = self.graph.is_plain
        held: set[int] = set()
        for step, position in enumerate(self.binding.nodes):
            if not is_plain[position]:
                reads = self.binding.reads[step]
                held.update(self.values[step], *(self.values[read] for read in reads if read is not None))
        return held

    def _may_write(self, step: int, operand: int) -> bool:
        """Whether clauses 2 to 5 hold for an operand of which the first does."""
        reads, boundary = self.binding.reads[step], self.binding.boundary
        read = reads[operand]
        if read is None or len(self.values[read]) != 1 or len(self.values[step]) != 1:
            return False
        (instance,), (result,) = self.values[read], self.values[step]
        if self.last_read[instance] != step or instance in self.held or instance in self.returned:
            return False
        size = self.graph.storage_bytes[self.owners[result][1]]
        birth, storage = self.owners[instance]
        if size == 0 or size != self.graph.storage_bytes[storage] or (birth < boundary <= step):
            return False
        if any(instance in self.values[other] for other in reads if other is not None and other != read):
            return False
        return result not in self.returned_by_forward or not self._is_view(read)

    def _overwrite(self, step: int, operand: int) -> Overwrite:
        read = self.binding.reads[step][operand]
        assert read is not None, "an input is written to"
        birth, storage = self.owners[self.values[read][0]]
        return Overwrite(operand, birth, storage, self.graph.storage_bytes[storage])

    def _is_view(self, step: int) -> bool:
        """Whether a step's tensor is a view at run time: it views one, or is what was written over one."""
        while True:
            node = self.graph.nodes[self.binding.nodes[step]]
            if step in self.found:
                source = self.binding.reads[step][self.found[step].operand]
            elif node.leader is not None:
                source = self.binding.reads[step][node.operands.index(node.leader)]
            else:
                return node.shares is not None
            assert source is not None, "an input is written to"
            step = source
