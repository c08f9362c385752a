"""Inlining: which values Inductor computes inside of their readers, and which it realizes.

The first and the third rule of ``fusion.py``. Linear in steps and reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts
from fxremat.inductor.layout import parts_read
from fxremat.inductor.operations import MOST, Operations
from fxremat.inductor.products import summed_products
from fxremat.inductor.shown import State

# Inductor's defaults: config.realize_reads_threshold, realize_acc_reads_threshold, and that for a CPU.
MAX_READS_WHEN_REUSED = 4
MAX_READS, MAX_READS_ON_CPU = 8, 12

NO_INPUTS: frozenset[int] = frozenset()


class Inlining:
    """What is realized of a schedule.

    Attributes:
        loops: For each step, what its node computes.
        kinds: For each step, what it is; a sum that is computed with a product is an external kernel, and
            the product is none.
        bases: For each step, that whose buffer its value looks at.
        readers: For each step, those that read its buffer, views looked through.
        states: For steps of which it was shown, what becomes of their values.
        parts_read: For convolutions, the views through which they read parts of values.
        pinned: For each step, whether the backward or the caller needs its value.
        leaves: For each step, the realized steps that computing it reads.
        inputs_read: For each step, the nodes of the graph's inputs that computing it reads.
        is_dear: For each pointwise step, whether computing it inside of its readers would be too much work.
        realized: For each step, whether its value is computed where it stands.
        realized_readers: For each step, the realized ones that read its value, themselves or through inlined
            steps.
    """

    def __init__(self, graph: JointGraph, binding: Binding, waits: Collection[int] = ()) -> None:
        self.graph = graph
        self.binding = binding
        self.loops = [graph.loops[position] for position in binding.nodes]
        self.kinds = [loop.kind for loop in self.loops]
        self.bases = viewed(graph, binding)
        self.readers = readers(graph, binding, self.bases)
        self.states = facts(graph).shown.states_of(binding, self.readers)
        self.parts_read = parts_read(graph, binding, self.bases)
        outputs = {self.bases[step] for step in binding.outputs}
        self.pinned = [step in outputs or self._crosses(step) for step in range(len(binding.nodes))]
        self.leaves: list[tuple[int, ...]] = []
        self.inputs_read: list[frozenset[int]] = []
        self.is_dear: list[bool] = []
        self.realized: list[bool] = []
        self._looked_at = looked_at(graph, binding)
        needed = {step for step in range(len(binding.nodes)) if self.pinned[step]}.union(waits)
        products = summed_products(self.loops, binding.reads, self.readers, needed, graph.is_on_cpu)
        for product, total in products.items():
            self.kinds[product], self.kinds[total] = Kind.POINTWISE, Kind.KERNEL
        self._products = frozenset(products)
        self._buffers_read: list[tuple[int, ...]] = []  # the leaves with an operator's outputs told apart
        self._is_heavy: list[bool] = []  # whether a transcendental function is computed for it, on a CPU
        self._operations = Operations(graph, binding, self.bases)
        for step in range(len(binding.nodes)):
            self._realize(step)
        self.realized_readers = self._find_realized_readers()

    def _crosses(self, step: int) -> bool:
        """Whether the backward reads what a step of the forward computes."""
        boundary, readers = self.binding.boundary, self.readers[step]
        return step < boundary and bool(readers) and readers[-1] >= boundary  # they ascend

    def _realize(self, step: int) -> None:
        """Find what computing a step reads, inlined operands looked through, and whether it is realized."""
        realized = self.realized
        found: dict[int, None] = {}
        buffers: dict[int, None] = {}
        reads = [read for read in self.binding.reads[step] if read is not None]
        inputs = self._find_inputs(step, reads)
        for read in reads if self.bases[step] == step else ():  # who reads a view reads what it looks at
            base = self.bases[read]
            if realized[base]:
                found[base] = buffers[self._looked_at[read]] = None
            else:
                found.update(dict.fromkeys(self.leaves[base]))
                buffers.update(dict.fromkeys(self._buffers_read[base]))
        self.leaves.append(tuple(found))
        self._buffers_read.append(tuple(buffers))
        self.inputs_read.append(inputs)
        if self.kinds[step] is Kind.POINTWISE:
            bases = (self.bases[read] for read in reads if not realized[self.bases[read]])
            is_heavy = self.loops[step].is_expensive or any(self._is_heavy[base] for base in bases)
            self._is_heavy.append(is_heavy and self.graph.is_on_cpu)
            self.is_dear.append(self._costs_much(step, self._num_reads(step)))
        else:  # nothing that is computed inside of its readers
            self._is_heavy.append(False)
            self.is_dear.append(False)
            self._operations.pass_over()
        realized.append(self._must_realize(step))

    def _find_inputs(self, step: int, reads: Sequence[int]) -> frozenset[int]:
        """The graph's inputs that computing a step reads, inlined operands looked through."""
        found = NO_INPUTS
        for read in reads:
            if not self.realized[read] and self.inputs_read[read]:
                found |= self.inputs_read[read]
        return found if len(reads) == len(self.binding.reads[step]) else found | self._own_inputs(step)

    def _own_inputs(self, step: int) -> frozenset[int]:
        """The graph's inputs that a step reads itself."""
        operands = self.graph.nodes[self.binding.nodes[step]].operands
        reads = zip(operands, self.binding.reads[step], strict=True)
        return frozenset(operand for operand, read in reads if read is None)

    def _must_realize(self, step: int) -> bool:
        """Whether a value is computed where it stands: it is no loop, or its readers can't compute it."""
        kind, loop = self.kinds[step], self.loops[step]
        if kind is Kind.VIEW or step in self._products:
            return False
        if kind is not Kind.POINTWISE or self.pinned[step]:
            return True
        if step in self.states:
            return self.states[step] is not State.INLINED
        if self.is_dear[step]:
            return True
        if loop.is_window or loop.is_draw or (loop.is_cat and self.graph.is_on_cpu):
            return True
        return any(self._needs_buffer(reader, step) for reader in self.readers[step])

    def realized_at(self, step: int) -> int:
        """Where a value is realized: where it stands, or where what alone reads it does so first.

        This holds of windows and of external kernels.
        """
        kind, loop, readers = self.kinds[step], self.loops[step], self.readers[step]
        stays = self.pinned[step] or self.is_dear[step] or loop.is_window or loop.is_draw or loop.is_cat
        if kind is not Kind.POINTWISE or stays or not readers:
            return step
        is_for_windows = len(readers) == 1 and self.loops[readers[0]].is_window
        is_for_kernels = all(self.kinds[reader] is Kind.KERNEL for reader in readers)
        return readers[0] if is_for_windows or is_for_kernels else step

    def _needs_buffer(self, reader: int, step: int) -> bool:
        """Whether a reader can't compute a value itself; it may get copies of parts of it instead."""
        if self.loops[reader].is_put:
            return False
        if self.kinds[reader] is Kind.KERNEL:
            parts = self.parts_read.get(reader, ())
            own = self.binding.reads[reader][1 if self.loops[reader].is_scatter else 0 :]
            reads = (read for read in own if read is not None)
            return any(self.bases[read] == step and read not in parts for read in reads)
        return self.loops[reader].is_window and self._num_reads(step) > 1

    def _num_reads(self, step: int) -> int:
        """Buffers that computing a step reads."""
        return len(self._buffers_read[step]) + len(self.inputs_read[step])

    def _costs_much(self, step: int, reads: int) -> bool:
        """Whether computing a value inside of its readers would be too much work."""
        is_reused = len(self.readers[step]) > 1
        count = self._operations.take(step, self.realized)
        if count > self._operations.limit and (is_reused or count > MOST or self._reads_several(step)):
            return True
        is_much = self._is_heavy[step] or reads > MAX_READS_WHEN_REUSED
        return reads > (MAX_READS_ON_CPU if self.graph.is_on_cpu else MAX_READS) or (is_much and is_reused)

    def _reads_several(self, step: int) -> bool:
        """Whether computing a step reads more than one buffer of several elements."""
        loops, nodes = self.graph.loops, self.binding.nodes
        large = sum(loops[each].elements > 1 for each in self.inputs_read[step])
        return large + sum(loops[nodes[each]].elements > 1 for each in self._buffers_read[step]) > 1

    def _find_realized_readers(self) -> list[Sequence[int]]:
        """For each step, the realized ones that read its value, themselves or through inlined steps."""
        realized = self.realized
        every: list[Sequence[int]] = list(self.readers)  # these stand behind what they read
        for step in reversed(range(len(every))):
            readers = every[step]
            if readers and not all(map(realized.__getitem__, readers)):
                found = [[reader] if realized[reader] else every[reader] for reader in readers]
                every[step] = list(dict.fromkeys(itertools.chain(*found)))
        return every


# -- which steps read which values, views looked through


def viewed(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at; itself if it is no view, or views an input."""
    return _followed(binding, facts(graph).viewed_places)


def looked_at(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at, where an operator's outputs are told apart.

    Such an output is the step of its ``getitem``.
    """
    nodes = zip(facts(graph).viewed_places, graph.nodes, strict=True)
    return _followed(binding, [place if node.leader is None else None for place, node in nodes])


def _followed(binding: Binding, places: Sequence[int | None]) -> list[int]:
    """For each step, where the operands in these places lead, from one to the next."""
    found: list[int] = []
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        place = places[position]
        source = None if place is None else reads[place]
        found.append(step if source is None else found[source])
    return found


def readers(graph: JointGraph, binding: Binding, bases: Sequence[int]) -> list[list[int]]:
    """For each step that is no view, the steps other than views that read its buffer, ascending.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        bases: What ``viewed`` says.
    """
    found: list[list[int]] = [[] for _ in binding.nodes]
    is_view = [kind is Kind.VIEW for kind in facts(graph).kinds]
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        if is_view[position]:
            continue
        for base in dict.fromkeys([bases[read] for read in reads if read is not None]):
            found[base].append(step)
    return found
