"""Fusion: which values of a schedule get a buffer, and when the kernel that makes them runs.

Without fusion every step is a kernel and every value has a buffer, or takes over that of an operand
(``memory/inplace.py``). Under Inductor these things differ:

1. *Inlining* (``inlining.py``). A pointwise value with few reads is not computed where it stands but inside
   each of its readers; what it reads is then held until the last of those has run. It is realized all the
   same if the backward or the caller needs it, if an external kernel reads it, if it draws random numbers, if
   windows of it are read and it reads more than one buffer, or if it is read more than once and expensive
   (more than 4 buffers read, or transcendental, on a CPU).
2. *Fusion.* Realized loops over the same elements become one kernel where no path between them leaves it:
   a loop with what it reads, and loops near each other that read the same buffer or input. A value that only
   its own kernel reads needs no buffer. Reductions over different dimensions do not fuse, nor one of outer
   dimensions and a loop over what it reads. The kernel runs where the first of its loops stands, or as soon
   as all that it reads is there.
3. *Products.* A product of two matrices that a sum of the same size alone reads is computed with the sum,
   by ``addmm``, where the sum stands (``products.py``).
4. *In place.* A loop writes over an operand of the same size that no later kernel reads, nor a loop of its
   own kernel that it does not depend on.
5. *Layout.* Convolutions work channels last. What they read of the caller's (weights, images) is copied at
   the forward's start, and the copy is held as long as a convolution or its gradient reads it. Parts of
   inlined values that they read are copied alone.

On a CPU three more:

6. *Calls.* All loops between two external kernels are one call: their buffers are allocated before it, and
   what they read is freed after it.
7. *Concatenation.* The operands' loops write to slices of the result, so that its buffer is allocated with
   the first of them (``concatenation.py``). An operand that is copied there by a near kernel is read by
   that kernel, not where the concatenation stands.
8. *Rows.* Numbers that are drawn for a kernel that reduces rows have a buffer: they are drawn in a loop over
   all elements.

A value of pooling may be computed again where it is read, and its gradient may be a scatter (``pooling.py``).

This is a model of Inductor's defaults, not Inductor: it sees operators and sizes, not loop indices. How far
it is off is a tested figure (docs/limits). Linear in steps and reads.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.concatenation import convolution_copies, held_operands
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.kernels import Kernel, depends_on, in_order, join_calls, leads_to, spread
from fxremat.inductor.layout import channels_last, input_copies
from fxremat.inductor.pooling import inlined_offsets, scatter_buffers, scatters
from fxremat.inductor.segments import segments, stretches, waiting
from fxremat.memory.lowering import Lowering

# Inductor's defaults: the distance in its scheduler's are_long_distant_nodes, and
# config.score_fusion_memory_threshold.
MAX_DISTANCE = 64
MIN_SHARED_BYTES = 10

MAX_SIBLINGS = 4  # that share a read, among which a loop looks for a kernel to join

OWN_BUFFER = (Kind.KERNEL, Kind.REDUCTION)  # what gets a buffer in any case


class Inductor:
    """One pass of the model over a schedule."""

    def __init__(self, graph: JointGraph, binding: Binding) -> None:
        self.graph = graph
        self.binding = binding
        self.segments, self.stretches, self.waiting = self._segments()
        self.inlining = inlining = Inlining(graph, binding, self.waiting)
        self.loops, self.kinds = inlining.loops, inlining.kinds
        self.bases, self.readers = inlining.bases, inlining.readers
        self.leaves, self.realized = inlining.leaves, inlining.realized
        self.realized_readers, self.pinned = inlining.realized_readers, inlining.pinned
        self.is_on_cpu = graph.is_on_cpu
        self.kernels: list[Kernel | None] = []
        self.latest_readers: dict[int, deque[Kernel]] = {}  # of what is shareable, among loops
        self.feeders: dict[int, dict[int, Kernel]] = {}  # of each concatenation, the loops that copy operands
        self.realized_count = 0
        self.scatters = scatters(graph, binding, self.bases)
        views = itertools.chain(*self.scatters.values())
        self.scattered = frozenset(self.bases[view] for view in views)

    def lower(self) -> Lowering:
        """Fuse, time, and reuse, in this order."""
        steps = range(len(self.binding.nodes))
        for step in steps:
            self.kernels.append(self._fuse(step) if self.realized[step] else None)
        kernels = in_order(dict.fromkeys(kernel for kernel in self.kernels if kernel is not None))
        spread(kernels, self.binding.boundary, len(steps))
        if self.is_on_cpu:
            join_calls(kernels, self.binding.boundary)
        runs_at, read_until, read_later = self._times()
        materialised = [self._materialised(step) for step in steps]
        held_in, copies = self._cats(runs_at)
        for step in held_in:
            materialised[step] = False
        reuses = self._reuses(materialised, read_until)
        extra = [*reuses, *input_copies(self.graph, self.binding), *copies, *self._parts(runs_at)]
        extra += scatter_buffers(self.graph, self.binding, self.scatters, self.bases, runs_at)
        return Lowering(materialised, runs_at, read_until, extra, held_in, read_later)

    # -- what becomes one kernel

    def _segments(self) -> tuple[list[int], list[int], frozenset[int]]:
        """The segment and the stretch of each step, -1 in the forward, and what is made to wait."""
        boundary, nodes, mirrors = self.binding.boundary, self.binding.nodes, self.binding.is_mirror
        kinds = [self.graph.kinds[position] for position in nodes]
        steps = [
            (nodes[step] if mirrors[step] else None, kinds[step] in OWN_BUFFER)
            for step in range(boundary, len(nodes))
        ]
        numbers = segments(steps)
        kernels = (kind is Kind.KERNEL for kind in kinds[boundary:])
        again = [mirror and kernel for mirror, kernel in zip(mirrors[boundary:], kernels, strict=True)]
        waits = frozenset(boundary + step for step in waiting(steps, numbers))
        return [-1] * boundary + numbers, [-1] * boundary + stretches(numbers, again), waits

    def _fuse(self, step: int) -> Kernel:
        self.realized_count += 1
        loop = self.loops[step]
        found = [self.kernels[leaf] for leaf in self._near(step)]
        producers = list(dict.fromkeys([kernel for kernel in found if kernel is not None]))
        is_loop = self.kinds[step] is not Kind.KERNEL
        kernel = self._joinable(step, producers) if is_loop and step not in self.scattered else None
        if loop.is_cat and self.is_on_cpu:
            self.feeders[step] = dict(self._feeders(step))
        place = self.inlining.realized_at(step)
        if kernel is None:
            kernel = Kernel(loop.elements, loop.reduction, is_loop=is_loop, runs_at=place)
        kernel.runs_at = min(kernel.runs_at, place)
        kernel.reduction = kernel.reduction or loop.reduction
        kernel.elements = max(kernel.elements, loop.elements)
        kernel.steps.append(step)
        kernel.producers.extend(producer for producer in producers if producer is not kernel)
        kernel.ordinal = self.realized_count
        if kernel.is_loop:
            for read in self._shareable(step):
                readers = self.latest_readers.setdefault(read, deque(maxlen=MAX_SIBLINGS))
                if not readers or readers[0] is not kernel:
                    readers.appendleft(kernel)
        return kernel

    def _feeders(self, step: int) -> Iterable[tuple[int, Kernel]]:
        """Operands of a concatenation, and the near loops that have them at hand and can write them to it."""
        for read in self.binding.reads[step]:
            if read is None:
                continue
            base = self.bases[read]
            elements = self.loops[base].elements
            for leaf in (base,) if self.realized[base] else self.leaves[base]:
                kernel = self.kernels[leaf]
                if kernel is not None and kernel.admits(elements, None) and self._is_open(kernel, step):
                    yield base, kernel

    def _is_open(self, kernel: Kernel, step: int) -> bool:
        """Whether a kernel is near a loop, and of its segment, or of its stretch if neither recomputes."""
        steps = (*kernel.steps, step)
        is_same_part = (kernel.steps[0] >= self.binding.boundary) == (step >= self.binding.boundary)
        if not is_same_part or self.realized_count - kernel.ordinal > MAX_DISTANCE:
            return False
        is_again = any(self.binding.is_mirror[each] for each in steps)
        parts = self.segments if is_again else self.stretches
        return len({parts[each] for each in steps}) == 1

    def _joinable(self, step: int, producers: Sequence[Kernel]) -> Kernel | None:
        """The kernel that a loop becomes a part of: one that it reads, or a near one with a common read."""
        loop = self.loops[step]
        siblings = itertools.chain(*(self.latest_readers.get(read, ()) for read in self._shareable(step)))
        for kernel in dict.fromkeys((*producers, *siblings)):
            is_open = kernel.admits(loop.elements, loop.reduction) and self._is_open(kernel, step)
            if is_open and not leads_to(kernel, producers):
                return kernel
        return None

    def _shareable(self, step: int) -> Iterable[int]:
        """What is read of steps, and of inputs (numbered below 0), and is enough to fuse with other readers.

        Of its seeds a draw reads one.
        """
        if self.loops[step].is_draw:
            return
        nodes, node_bytes = self.binding.nodes, self.graph.node_bytes
        yield from (leaf for leaf in self.leaves[step] if node_bytes(nodes[leaf]) >= MIN_SHARED_BYTES)
        inputs = sorted(self.inlining.inputs_read[step])
        yield from (-1 - each for each in inputs if self.graph.loops[each].elements >= MIN_SHARED_BYTES)

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
        if self.loops[step].is_draw and kernel is not None and self._reduces_rows(kernel):
            return True
        return any(self.kernels[reader] is not kernel for reader in self.realized_readers[step])

    def _reduces_rows(self, kernel: Kernel) -> bool:
        """Whether, on a CPU, a kernel goes over rows; numbers are drawn in a loop over all elements."""
        return self.is_on_cpu and kernel.reduction is not None and kernel.reduction.written > 1

    # -- when things happen

    def _times(self) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """When each step's kernel runs, until when its operands are read, and which are read later."""
        runs_at = [step if kernel is None else kernel.runs_at for step, kernel in enumerate(self.kernels)]
        read_until = list(runs_at)
        copied_at = {
            (step, operand): kernel.runs_at
            for step, feeders in self.feeders.items()
            for operand, kernel in feeders.items()
        }
        for step in range(len(runs_at) - 1, -1, -1):
            if self.kinds[step] is Kind.VIEW:
                read_until[step] = step
            elif self.kernels[step] is None:
                ends = [copied_at.get((reader, step), read_until[reader]) for reader in self.readers[step]]
                read_until[step] = max(ends, default=step)
        for pooling, found in inlined_offsets(self.graph, self.binding):
            read_until[pooling] = max(read_until[pooling], *(read_until[reader] for reader in found))
        read_later = []
        for step, feeders in self.feeders.items():
            reads = [read for read in self.binding.reads[step] if read is not None]
            read_later += [(read, copied_at.get((step, self.bases[read]), runs_at[step])) for read in reads]
            runs_at[step] = min((kernel.runs_at for kernel in feeders.values()), default=runs_at[step])
            read_until[step] = runs_at[step]
        return runs_at, read_until, read_later

    def _reads_last(self, step: int, leaf: int) -> bool:
        """Whether the other loops that read a buffer run before: in earlier kernels, or for this step."""
        kernel = self.kernels[step]
        found = ((reader, self.kernels[reader]) for reader in self.realized_readers[leaf])
        return kernel is not None and all(
            other is None
            or other.rank < kernel.rank
            or (other is kernel and depends_on(step, reader, self.leaves))
            for reader, other in found
        )

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
                fits = materialised[leaf] and self._bytes_of_one(leaf) == size > 0
                is_fixed = leaf in taken or leaf in outputs or leaf in self.feeders
                if not fits or is_fixed or not self._reads_last(step, leaf):
                    continue
                if read_until[step] == kernel.runs_at:
                    taken.add(leaf)
                    yield kernel.runs_at, kernel.runs_at, -size
                    break

    def _bytes_of_one(self, step: int) -> int:
        """Bytes of a step's buffer; 0 if it has several or none."""
        node = self.binding.nodes[step]
        return self.graph.node_bytes(node) if len(self.graph.nodes[node].creates) == 1 else 0

    def _cats(self, runs_at: Sequence[int]) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """The operands that are held in concatenations, and the copies that are made of these."""
        if not self.feeders:
            return {}, []
        channels = channels_last(self.graph, self.binding, self.waiting)
        reads = {read for step in self.feeders for read in self.binding.reads[step] if read is not None}
        free = frozenset(read for read in reads if self._has_free_layout(read, read in channels))
        held_in = held_operands(self.graph, self.binding, self.feeders, free)
        kernels = ((step, self.kernels[step]) for step in self.feeders)
        complete = {step: kernel.runs_at for step, kernel in kernels if kernel is not None}
        holders = frozenset(held_in.values())
        copies = convolution_copies(self.graph, self.binding, complete, runs_at, self.readers, holders)
        return held_in, list(copies)

    def _parts(self, runs_at: Sequence[int]) -> Iterable[tuple[int, int, int]]:
        """The copies of parts of inlined values that convolutions read."""
        for reader, parts in self.inlining.parts_read.items():
            for part in parts:
                base = self.bases[part]
                if not self.realized[base]:
                    whole = self.graph.node_bytes(self.binding.nodes[base])
                    size = whole * self.loops[part].elements // self.loops[base].elements
                    yield part, runs_at[reader], size

    def _has_free_layout(self, step: int, is_channels_last: bool) -> bool:
        is_fixed = self.pinned[step] or (self.inlining.is_dear[step] and is_channels_last)
        return self.realized[step] and not is_fixed and not self._feeds_kernel(step)

    def _feeds_kernel(self, step: int) -> bool:
        return any(self.kinds[reader] is Kind.KERNEL for reader in self.readers[step])
