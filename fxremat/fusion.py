"""Fusion: which values of a schedule get a buffer, and when the kernel that makes them runs.

Without fusion every step is a kernel and every value has a buffer, or takes over that of an operand
(``inplace.py``). Under Inductor these things differ:

1. *Inlining.* A pointwise value with few reads is not computed where it stands but inside each of its
   readers; what it reads is then held until the last of those has run. It is realized all the same if the
   backward or the caller needs it, if an external kernel reads it, or if it is read more than once and
   expensive (more than 4 buffers read, or a transcendental function).
2. *Fusion.* Realized loops over the same elements become one kernel where no path between them leaves it:
   a loop with what it reads, and loops near each other that read the same buffer. A value that only its own
   kernel reads needs no buffer. Reductions over different dimensions do not fuse. The kernel runs where the
   first of its loops stands, or as soon as all that it reads is there.
3. *Products.* A product of two matrices that a sum of the same size alone reads is computed with the sum,
   by ``addmm``, where the sum stands.
4. *In place.* A loop writes over an operand of the same size that no later kernel reads, nor another loop
   of its own kernel.
5. *Layout.* Convolutions work channels last. What they read of the caller's (weights, images) is copied at
   the forward's start, and the copy is held as long as a convolution or its gradient reads it.

On a CPU two more:

6. *Calls.* All loops between two external kernels are one call: their buffers are allocated before it, and
   what they read is freed after it.
7. *Concatenation.* The operands' loops write to slices of the result, so that its buffer is allocated with
   the first of them (``concatenation.py``).

A value of pooling may be computed again where it is read (``windows.py``).

This is a model of Inductor's defaults, not Inductor: it sees operators and sizes, not loop indices. How far
it is off is a tested figure (docs/limits). Linear in steps and reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fxremat.concatenation import gradient_copies, held_operands
from fxremat.errors import InvalidOptionError
from fxremat.graph import JointGraph
from fxremat.inplace import Overwrite, overwrites
from fxremat.instances import Instances, storage_instances
from fxremat.kernels import Kernel, in_order, join_calls, leads_to, segments, stretches, waiting
from fxremat.layout import channels_last, input_copies
from fxremat.ops import Kind
from fxremat.reads import looked_at, readers, viewed
from fxremat.schedule import Binding
from fxremat.windows import inlined_offsets

FUSIONS = ("none", "inplace", "inductor")

# Inductor's defaults: config.realize_reads_threshold, realize_acc_reads_threshold, that for a CPU, and the
# distance in its scheduler's are_long_distant_nodes.
MAX_READS_WHEN_REUSED = 4
MAX_READS, MAX_READS_ON_CPU = 8, 12
MAX_DISTANCE = 64

OWN_BUFFER = (Kind.KERNEL, Kind.REDUCTION)  # what gets a buffer in any case
NO_INPUTS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Lowering:
    """What a code generator makes of a schedule.

    Attributes:
        materialised: For each step, whether its value gets a buffer.
        runs_at: For each step, the step at which the kernel that computes it runs.
        read_until: For each step, the last step at which its operands are read on its behalf.
        extra_bytes: Triples (first step, last step, bytes), the steps included: copies that the code holds
            besides the values, and, negative, results that are written over an operand that dies there.
        held_in: For steps whose value is a part of a later step's buffer, that step.
        overwrites: Without fusion, the steps that write their result over an operand.
        instances: The storage instances of the schedule, where they had to be found.
    """

    materialised: Sequence[bool]
    runs_at: Sequence[int]
    read_until: Sequence[int]
    extra_bytes: Sequence[tuple[int, int, int]] = ()
    held_in: Mapping[int, int] = field(default_factory=dict)
    overwrites: Mapping[int, Overwrite] = field(default_factory=dict)
    instances: Instances | None = None


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
    return _Inductor(graph, binding).lower()


class _Inductor:
    """One pass of the model over a schedule."""

    def __init__(self, graph: JointGraph, binding: Binding) -> None:
        self.graph = graph
        self.binding = binding
        self.loops = [graph.loops[position] for position in binding.nodes]  # of each step
        self.is_on_cpu = graph.is_on_cpu
        self.kinds = [loop.kind for loop in self.loops]
        self.bases = viewed(graph, binding)
        self.looked_at = looked_at(graph, binding)
        self.readers = readers(graph, binding, self.bases)
        self.products = self._products()
        outputs = {self.bases[step] for step in binding.outputs}
        self.segments, self.stretches, self.waiting = self._segments()
        self.pinned = [step in outputs or self._crosses(step) for step in range(len(binding.nodes))]
        self.leaves: list[tuple[int, ...]] = []  # for each step, the realized steps that computing it reads
        self.buffers_read: list[tuple[int, ...]] = []  # those with an operator's outputs told apart
        self.inputs_read: list[frozenset[int]] = []  # and the inputs of the graph
        self.is_dear: list[bool] = []
        self.realized: list[bool] = []
        self.kernels: list[Kernel | None] = []
        self.latest_reader: dict[int, Kernel] = {}  # of each buffer, among loops
        self.feeders: dict[int, list[Kernel]] = {}  # the loops that write to a concatenation
        self.realized_count = 0

    def lower(self) -> Lowering:
        """Realize, fuse, time, and reuse, in this order."""
        steps = range(len(self.binding.nodes))
        for step in steps:
            self._realize(step)
        self.realized_readers = self._realized_readers()
        for step in steps:
            self.kernels.append(self._fuse(step) if self.realized[step] else None)
        kernels = in_order(dict.fromkeys(kernel for kernel in self.kernels if kernel is not None))
        if self.is_on_cpu:
            join_calls(kernels, self.binding.boundary)
        runs_at, read_until = self._times()
        materialised = [self._materialised(step) for step in steps]
        held_in, copies = self._cats(materialised)
        for step in held_in:
            materialised[step] = False
        reuses = self._reuses(materialised, read_until)
        extra = [*reuses, *input_copies(self.graph, self.binding), *copies]
        return Lowering(materialised, runs_at, read_until, extra, held_in)

    # -- before anything is decided

    def _products(self) -> frozenset[int]:
        """Products that are computed with the sum that reads them; such a sum is an external kernel."""
        found = set()
        for step, loop in enumerate(self.loops):
            if not loop.is_sum:
                continue
            reads = (read for read in self.binding.reads[step] if read is not None)
            product = next((read for read in reads if self._is_summand(read, step)), None)
            if product is not None:
                found.add(product)
                self.kinds[step] = Kind.KERNEL
        return frozenset(found)

    def _is_summand(self, product: int, step: int) -> bool:
        """Whether a step's operand is a product of its size that nothing else reads."""
        loop, own = self.loops[product], self.loops[step]
        is_alone = self.readers[product] == [step] and not self._crosses(product)
        return loop.is_product and loop.elements == own.elements and is_alone

    def _segments(self) -> tuple[list[int], list[int], frozenset[int]]:
        """The segment and the stretch of each step, -1 in the forward, and what is made to wait."""
        boundary, nodes, mirrors = self.binding.boundary, self.binding.nodes, self.binding.is_mirror
        steps = [
            (nodes[step] if mirrors[step] else None, self.loops[step].kind in OWN_BUFFER)
            for step in range(boundary, len(nodes))
        ]
        numbers = segments(steps)
        kernels = (self.loops[step].kind is Kind.KERNEL for step in range(boundary, len(nodes)))
        again = [mirror and kernel for mirror, kernel in zip(mirrors[boundary:], kernels, strict=True)]
        waits = frozenset(boundary + step for step in waiting(steps, numbers))
        return [-1] * boundary + numbers, [-1] * boundary + stretches(numbers, again), waits

    def _crosses(self, step: int) -> bool:
        boundary, readers = self.binding.boundary, self.readers[step]
        return step < boundary and bool(readers) and readers[-1] >= boundary  # they ascend

    # -- the three rules

    def _realize(self, step: int) -> None:
        realized = self.realized
        found: dict[int, None] = {}
        buffers: dict[int, None] = {}
        reads = [read for read in self.binding.reads[step] if read is not None]
        inputs = self._inputs_read(step, reads)
        for read in reads if self.bases[step] == step else ():  # who reads a view reads what it looks at
            base = self.bases[read]
            if realized[base]:
                found[base] = buffers[self.looked_at[read]] = None
            else:
                found.update(dict.fromkeys(self.leaves[base]))
                buffers.update(dict.fromkeys(self.buffers_read[base]))
        self.leaves.append(tuple(found))
        self.buffers_read.append(tuple(buffers))
        self.inputs_read.append(inputs)
        self.is_dear.append(self._is_dear(step, len(buffers) + len(inputs)))
        realized.append(self._must_realize(step))

    def _inputs_read(self, step: int, reads: Sequence[int]) -> frozenset[int]:
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
        kind, loop = self.kinds[step], self.loops[step]
        if kind is Kind.VIEW or step in self.products:
            return False
        if kind is not Kind.POINTWISE or self.pinned[step] or self.is_dear[step]:
            return True
        if loop.is_window or (loop.is_cat and self.is_on_cpu):
            return True
        for reader in self.readers[step]:
            if self.kinds[reader] is Kind.KERNEL or self.loops[reader].is_window:
                return True
        return False

    def _is_dear(self, step: int, reads: int) -> bool:
        """Whether computing a value inside of its readers would be too much work."""
        loop = self.loops[step]
        is_much = loop.is_expensive or reads > MAX_READS_WHEN_REUSED
        return reads > (MAX_READS_ON_CPU if self.is_on_cpu else MAX_READS) or (
            is_much and len(self.readers[step]) > 1
        )

    def _fuse(self, step: int) -> Kernel:
        self.realized_count += 1
        loop = self.loops[step]
        found = [self.kernels[leaf] for leaf in self._near(step)]
        producers = list(dict.fromkeys([kernel for kernel in found if kernel is not None]))
        is_loop = self.kinds[step] is not Kind.KERNEL
        kernel = self._joinable(step, producers) if is_loop else None
        if loop.is_cat and self.is_on_cpu:
            self.feeders[step] = list(self._feeders(step))
        if kernel is None:
            kernel = Kernel(loop.elements, loop.reduction, is_loop=is_loop, runs_at=step)
        kernel.reduction = kernel.reduction or loop.reduction
        kernel.elements = max(kernel.elements, loop.elements)
        kernel.steps.append(step)
        kernel.producers.extend(producer for producer in producers if producer is not kernel)
        kernel.ordinal = self.realized_count
        if kernel.is_loop:
            self.latest_reader.update(dict.fromkeys(self.leaves[step], kernel))
        return kernel

    def _feeders(self, step: int) -> Iterable[Kernel]:
        """The near loops that have an operand at hand and can write it to the concatenation."""
        for read in self.binding.reads[step]:
            if read is None:
                continue
            base = self.bases[read]
            elements = self.loops[base].elements
            for leaf in (base,) if self.realized[base] else self.leaves[base]:
                kernel = self.kernels[leaf]
                if kernel is not None and self._is_near(kernel, step) and kernel.admits(elements, None):
                    yield kernel

    def _is_near(self, kernel: Kernel, step: int) -> bool:
        is_same_part = (kernel.steps[0] >= self.binding.boundary) == (step >= self.binding.boundary)
        return is_same_part and self.realized_count - kernel.ordinal <= MAX_DISTANCE

    def _may_share(self, kernel: Kernel, step: int) -> bool:
        """Whether a kernel and a loop are of one segment, or of one stretch if neither recomputes."""
        steps = (*kernel.steps, step)
        is_again = any(self.binding.is_mirror[each] for each in steps)
        parts = self.segments if is_again else self.stretches
        return len({parts[each] for each in steps}) == 1

    def _joinable(self, step: int, producers: Sequence[Kernel]) -> Kernel | None:
        """The kernel that a loop becomes a part of: one that it reads, or a near one with a common read."""
        loop = self.loops[step]
        readers = (self.latest_reader.get(leaf) for leaf in self.leaves[step])
        siblings = [kernel for kernel in readers if kernel is not None]
        for kernel in dict.fromkeys((*producers, *siblings)):
            if not (self._is_near(kernel, step) and kernel.admits(loop.elements, loop.reduction)):
                continue
            if not self._may_share(kernel, step):
                continue
            if not leads_to(kernel, producers):
                return kernel
        return None

    def _near(self, step: int) -> Sequence[int]:
        """The leaves of a step in its own part: the backward's graph starts with what was saved."""
        boundary = self.binding.boundary
        if step < boundary:
            return self.leaves[step]
        return [leaf for leaf in self.leaves[step] if leaf >= boundary]

    def _materialised(self, step: int) -> bool:
        kind = self.kinds[step]
        if kind is Kind.VIEW:
            return True
        if not self.realized[step]:
            return False
        if kind is Kind.KERNEL or self.pinned[step] or step in self.feeders:
            return True
        kernel = self.kernels[step]
        return any(self.kernels[reader] is not kernel for reader in self.realized_readers[step])

    def _realized_readers(self) -> list[Sequence[int]]:
        """For each step, the realized ones that read its value, themselves or through inlined steps."""
        realized = self.realized
        every: list[Sequence[int]] = list(self.readers)  # these stand behind what they read
        for step in reversed(range(len(every))):
            readers = every[step]
            if readers and not all(map(realized.__getitem__, readers)):
                found = [[reader] if realized[reader] else every[reader] for reader in readers]
                every[step] = list(dict.fromkeys(itertools.chain(*found)))
        return every

    # -- when things happen

    def _times(self) -> tuple[list[int], list[int]]:
        runs_at = [step if kernel is None else kernel.runs_at for step, kernel in enumerate(self.kernels)]
        read_until = list(runs_at)
        for step in range(len(runs_at) - 1, -1, -1):
            if self.kinds[step] is Kind.VIEW:
                read_until[step] = step
            elif self.kernels[step] is None:
                read_until[step] = max([read_until[r] for r in self.readers[step]], default=step)
        for pooling, found in inlined_offsets(self.graph, self.binding):
            read_until[pooling] = max(read_until[pooling], *(read_until[reader] for reader in found))
        for step, feeders in self.feeders.items():
            runs_at[step] = min((kernel.runs_at for kernel in feeders), default=runs_at[step])
        return runs_at, read_until

    def _reads_last(self, step: int, leaf: int) -> bool:
        """Whether all other loops that read a buffer belong to kernels before this step's."""
        kernel = self.kernels[step]
        others = (self.kernels[reader] for reader in self.realized_readers[leaf] if reader != step)
        return kernel is not None and all(other is None or other.rank < kernel.rank for other in others)

    def _reuses(
        self, materialised: Sequence[bool], read_until: Sequence[int]
    ) -> Iterable[tuple[int, int, int]]:
        """A buffer of a loop may take the place of one of equal size that its kernel reads last."""
        outputs = {self.bases[step] for step in self.binding.outputs}
        taken: set[int] = set()
        for step, kernel in enumerate(self.kernels):
            if kernel is None or not kernel.is_loop or not materialised[step]:
                continue
            size = self.graph.node_bytes(self.binding.nodes[step])
            for leaf in self.leaves[step]:
                fits = materialised[leaf] and size and self._leaf_bytes(leaf) == size
                if not fits or leaf in taken or leaf in outputs or not self._reads_last(step, leaf):
                    continue
                if read_until[step] == kernel.runs_at:
                    taken.add(leaf)
                    yield kernel.runs_at, kernel.runs_at, -size
                    break

    def _cats(self, materialised: list[bool]) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """The operands that are held in concatenations, and the copies that are made of these."""
        if not self.feeders:
            return {}, []
        channels = channels_last(self.graph, self.binding, self.waiting)
        reads = {read for step in self.feeders for read in self.binding.reads[step] if read is not None}
        free = frozenset(read for read in reads if self._has_free_layout(read, read in channels))
        held_in = held_operands(self.graph, self.binding, self.feeders, free)
        kernels = ((step, self.kernels[step]) for step in self.feeders)
        runs_at = {step: kernel.runs_at for step, kernel in kernels if kernel is not None}
        holders = frozenset(held_in.values())
        return held_in, list(gradient_copies(self.graph, self.binding, runs_at, self.readers, holders))

    def _has_free_layout(self, step: int, is_channels_last: bool) -> bool:
        is_fixed = self.pinned[step] or (self.is_dear[step] and is_channels_last)
        return self.realized[step] and not is_fixed and not self._feeds_kernel(step)

    def _feeds_kernel(self, step: int) -> bool:
        return any(self.kinds[reader] is Kind.KERNEL for reader in self.readers[step])

    def _leaf_bytes(self, step: int) -> int:
        return self.graph.node_bytes(self.binding.nodes[step])
