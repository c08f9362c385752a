"""Grouping: which loops become one kernel.

The second rule of ``fusion.py``: the realized steps are gone through in order, and each becomes a part of a
kernel before it, or the first of one of its own. Linear in steps and reads, but for the searches for paths,
which are bounded.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from fxremat._torch import graphs
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.chains import link
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.kernels import Kernel, leads_to
from fxremat.inductor.nests import nests
from fxremat.inductor.orders import Order, Orders
from fxremat.inductor.pooling import scatters
from fxremat.inductor.ranges import Ranges, may_share
from fxremat.inductor.segments import Recomputation, recomputation
from fxremat.inductor.terms import Place

# Inductor's defaults: the distance in its scheduler's are_long_distant_nodes, and
# config.score_fusion_memory_threshold.
MAX_DISTANCE = 64
MIN_SHARED_BYTES = 10

Shared: TypeAlias = tuple[int, Place]  # a step, or an input, and which part of its value

MAX_SIBLINGS = 4  # that share a read, among which a loop looks for a kernel to join


class _Stands(NamedTuple):
    """For each step where it stands in what is recomputed, and if it runs again, or stays there all the same.

    See ``Recomputation``.
    """

    segments: list[int]
    stretches: list[int]
    kernels: list[int]
    is_again: list[bool]


def group(graph: JointGraph, binding: Binding) -> Grouping:
    """The kernels of a resolved schedule of a traced graph."""
    again = recomputation(graph, binding)
    return Grouping(graph, binding, Inlining(graph, binding, again.waiting), again)


class Grouping:
    """The kernels of a schedule.

    Attributes:
        kernels: For each step, the kernel that computes it; None for what is not realized.
        feeders: For each concatenation to which loops write, the operands that a near loop can write to it,
            and the kernels of these loops.
        scatters: What ``pooling.scatters`` says.
        orders: In which order images are stored.
        drawn_in_rows: Draws of numbers for loops over rows, which are computed there.
        ranges: On a CPU, for each step, the ranges of a loop that computes it; None if they are not known.
        split: Of these, those of loops over all elements that were split for another.
    """

    def __init__(
        self, graph: JointGraph, binding: Binding, inlining: Inlining, recomputation: Recomputation
    ) -> None:
        self.graph = graph
        self.binding = binding
        self.inlining = inlining
        self.recomputation = recomputation
        self.kernels: list[Kernel | None] = [None] * len(inlining.realized)
        self.feeders: dict[int, dict[int, Kernel]] = {}
        self.scatters = scatters(graph, binding, inlining.bases)
        views = itertools.chain(*self.scatters.values())
        self._scattered = frozenset(inlining.bases[view] for view in views)
        self.drawn_in_rows: set[int] = set()
        self._latest_readers: dict[Shared, deque[Kernel]] = {}  # of what is shareable, among loops
        self._realized_count = 0
        self.orders = Orders(graph, inlining, recomputation)
        self.ranges: list[Ranges | None] = [None] * len(inlining.realized)
        self.split: set[int] = set()
        self._paired: dict[int, int] = {}
        realized = [step for step, is_realized in enumerate(inlining.realized) if is_realized]
        self._stands = self._found_standing(realized)
        if graph.is_on_cpu:
            self.ranges = nests(graph, inlining, self.orders)
            pairs = ((step, self._partner(step)) for step in realized)
            self._paired = {step: reader for step, reader in pairs if reader is not None}
            self.split = {step for step, reader in self._paired.items() if not self._is_flat(reader)}
            for step in sorted(self.split, reverse=True):
                self.ranges[step] = self.ranges[self._paired[step]]
        for step in sorted(realized, key=inlining.realized_at.__getitem__):
            self.kernels[step] = self._kernel_of(step)
        kernels = dict.fromkeys(kernel for kernel in self.kernels if kernel is not None)
        if graph.is_on_cpu:
            link(kernels, self._shared_bytes)
        for kernel in kernels:
            kernel.consumers.clear()  # so that none is in a cycle, which would stay until it was collected

    def _kernel_of(self, step: int) -> Kernel:
        """The kernel that computes a realized step, which is a part of it from now on.

        An external kernel is one of its own, and on a CPU a loop that writes to places which are computed.
        So is a loop that finds none to join: none that computes what it reads, and no near one that reads the
        same. Later loops may then find this kernel through what the step reads.
        """
        self._realized_count += 1
        loop = self.inlining.loops[step]
        is_loop = self.inlining.kinds[step] is not Kind.KERNEL
        is_fusible = is_loop or (loop.is_put and not self.graph.is_on_cpu)
        producers = self._producers(step)
        shareable = self._shareable(step) if is_fusible else []
        is_joining = is_fusible and step not in self._scattered
        joined = self._joinable(step, producers, shareable) if is_joining else None
        rows = self._rows_with_draw(joined, step, producers)
        if rows is not None:
            joined, producers = rows, self._producers(step)
        if step in self.inlining.slices.cats:
            self.feeders[step] = dict(self._find_feeders(step))
        place = self.inlining.realized_at[step]
        kernel = joined or Kernel(
            loop.elements,
            loop.reduction,
            is_loop=is_loop or loop.is_put,
            is_fusible=is_fusible,
            runs_at=place,
            made_for=self.inlining.made_for(step) if self.graph.is_on_cpu else None,
        )
        before = [*producers, *self._waited_for(step)]
        kernel.take(step, loop, place, before, self._realized_count, self.ranges[step])
        for read in shareable:
            readers = self._latest_readers.get(read)
            if readers is None:
                self._latest_readers[read] = deque((kernel,), MAX_SIBLINGS)
            elif readers[0] is not kernel:
                readers.appendleft(kernel)
        return kernel

    def _producers(self, step: int) -> Sequence[Kernel]:
        """The kernels that compute what a step reads; what was saved is there when the backward begins."""
        boundary = self.binding.boundary
        first = boundary if step >= boundary else 0
        found = dict.fromkeys([self.kernels[leaf] for leaf in self.inlining.leaves[step] if leaf >= first])
        return [kernel for kernel in found if kernel is not None]

    def _waited_for(self, step: int) -> Sequence[Kernel]:
        """The kernel that a step is made to wait for, if there is one."""
        before = self.inlining.waits_for.get(step)
        kernel = None if before is None else self.kernels[before]
        return () if kernel is None else (kernel,)

    def _joinable(self, step: int, producers: Sequence[Kernel], shareable: Iterable[Shared]) -> Kernel | None:
        """The kernel that a loop becomes a part of: one that it reads, or a near one with a common read.

        No path may lead from it to the loop through another kernel, which would have to run inside of it.
        """
        loop = self.inlining.loops[step]
        siblings = itertools.chain(*[self._latest_readers.get(read, ()) for read in shareable])
        waited_for = self._waited_for(step)
        closed = {*self._unfinished(step), *waited_for}
        for kernel in dict.fromkeys((*producers, *siblings)):
            fits = kernel.admits(loop.elements, loop.reduction) and self._is_nested(kernel, step, producers)
            is_open = fits and kernel not in closed and self._is_open(kernel, step)
            is_open = is_open and not self._is_put_off(kernel, step)
            if is_open and not leads_to(kernel, (*producers, *waited_for)):
                return kernel
        return None

    def _rows_with_draw(self, kernel: Kernel | None, step: int, producers: Sequence[Kernel]) -> Kernel | None:
        """The kernel over rows of which a loop becomes a part, along with numbers drawn for it alone.

        On a CPU numbers are drawn in a loop over all elements, unless the first that reads them goes over
        rows: then they are drawn there, and a kernel that reduces these rows computes both.
        """
        ranges = self.ranges[step]
        if kernel is None or ranges is None or ranges.is_flat or len(kernel.steps) > 1:
            return None
        (draw,) = kernel.steps
        is_alone = self.inlining.loops[draw].is_draw and not self.inlining.pinned[draw]
        if not is_alone or list(self.inlining.realized_readers[draw]) != [step]:
            return None
        rows = self._joinable(step, [each for each in producers if each is not kernel], ())
        if rows is None or rows.reduction is None:
            return None
        loop, place = self.inlining.loops[draw], self.inlining.realized_at[draw]
        rows.take(draw, loop, place, (), self._realized_count)
        self.kernels[draw] = rows
        self.drawn_in_rows.add(draw)
        return rows

    def _is_nested(self, kernel: Kernel, step: int, producers: Sequence[Kernel]) -> bool:
        """Whether the ranges of a loop are those of a kernel, or lie in them, as far as they are known.

        Those of one of its loops will do: Inductor makes one of these two first.
        """
        first, second = kernel.ranges, self.ranges[step]
        if first is None or second is None:
            return True
        if may_share(first, second, kernel in producers):
            is_split = first.is_flat != second.is_flat and not (first.reduced or second.reduced)
            if not is_split:
                return True
            # and can't be split any more
            is_whole = len(kernel.steps) > 1 if first.is_flat else step in self._paired
            return not is_whole and {self._sizes(step)} == {*map(self._sizes, kernel.steps)}
        loops = [self.ranges[each] for each in kernel.steps]
        return second in loops or any(
            each is not None and not each.reduced and may_share(each, second, kernel in producers)
            for each in loops
        )

    def _is_flat(self, step: int) -> bool:
        """Whether a step is known to be computed by a loop over all elements."""
        ranges = self.ranges[step]
        return ranges is not None and ranges.is_flat

    def _partner(self, step: int) -> int | None:
        """The reader of a loop over all elements that shares more with it than what it reads, if one does.

        It reads the value, and all that this is computed of. Inductor makes one of the two first.
        """
        inlining, segments, kernels = self.inlining, self.recomputation.segments, self.recomputation.kernels
        if not self._is_flat(step):
            return None
        leaves, inputs = inlining.leaves, inlining.inputs_read
        for reader in inlining.realized_readers[step]:
            other = self.ranges[reader]
            if other is None or other.reduced or inlining.is_external(reader):
                continue
            is_near = segments[step] == segments[reader] and kernels[step] == kernels[reader]
            is_all = {*leaves[step]} <= {*leaves[reader]} and inputs[step] <= inputs[reader]
            if is_near and is_all and self._sizes(step) == self._sizes(reader):
                return reader
        return None

    def _sizes(self, step: int) -> tuple[Order | None, tuple[int | None, ...]]:
        """The sizes of a value as it is stored, of the view of it if for that, and how it lies if merged.

        A loop over all elements is split like another only if both were made for the same.
        """
        shown = self.inlining.shown_as(step)
        values = ops.tensors(self.graph.fx_nodes[self.binding.nodes[shown]].meta.get("val"))
        return self.orders.merged(step), tuple(map(graphs.hint, next(values).shape))

    def _shared_bytes(self, first: Kernel, second: Kernel) -> int:
        """Bytes of what two kernels both read, or the second one of the first; 0 if they may not be fused."""
        if not self._is_of_one_part(first, second.steps[0]):
            return 0
        leaves, inputs, sizes = self.inlining.leaves, self.inlining.inputs_read, self.graph.bytes_of_nodes
        known, read = ({leaf for step in each.steps for leaf in leaves[step]} for each in (first, second))
        given = [frozenset[int]().union(*(inputs[step] for step in each.steps)) for each in (first, second)]
        nodes = [self.binding.nodes[step] for step in read & (known | {*first.steps})]
        return sum(map(sizes.__getitem__, (*nodes, *(given[0] & given[1]))))

    def _unfinished(self, step: int) -> Collection[Kernel | None]:
        """The kernels that write to places of what a step reads: it is complete when they have run."""
        leaves, loops, in_slices = self.inlining.leaves[step], self.inlining.loops, self.inlining.slices.cats
        written = (leaf for leaf in leaves if loops[leaf].is_put or leaf in in_slices)
        return [self.kernels[leaf] for leaf in written]

    def _is_open(self, kernel: Kernel, step: int) -> bool:
        """Whether a kernel is near a loop, with nothing between that ``order.may_fuse`` keeps apart."""
        is_near = self._realized_count - kernel.ordinal <= MAX_DISTANCE
        return is_near and self._is_of_one_part(kernel, step)

    def _is_of_one_part(self, kernel: Kernel, step: int) -> bool:
        """Whether ``order.may_fuse`` lets a kernel and a loop be fused."""
        first, boundary = kernel.steps[0], self.binding.boundary
        if first < boundary <= step:
            return False
        segments, stretches, kernels, is_again = self._stands
        is_of_segment, is_of_stretch = segments[first] == segments[step], stretches[first] == stretches[step]
        if not (is_of_segment or is_of_stretch):
            return False
        if any(is_again[each] for each in (*kernel.steps, step)):
            return is_of_segment and all(kernels[each] == kernels[step] for each in kernel.steps)
        return is_of_stretch

    def _found_standing(self, realized: Iterable[int]) -> _Stands:
        """Where steps count as standing: right before a convolution what it reads a copy of a view of.

        To Inductor such a copy stands for all that is computed right before the convolution.
        """
        inlining, is_mirror = self.inlining, self.binding.is_mirror
        segments, stretches, kernels, _ = self.recomputation
        found = _Stands(list(segments), list(stretches), list(kernels), list(is_mirror))
        for step in realized:
            found.is_again[step] |= inlining.is_sum(step)
            kernel = inlining.realized_at[step]
            if kernel == step or inlining.shown_as(step) == step:
                continue
            found.segments[step], found.stretches[step] = segments[kernel], stretches[kernel]
            found.kernels[step] = kernels[kernel] - 1
            found.is_again[step] = is_mirror[kernel] or self._computes_again(kernel)
        return found

    def _computes_again(self, kernel: int) -> bool:
        """Whether loops that are made for an external kernel compute mirrors of its segment."""
        inlining, segments, bases = self.inlining, self.recomputation.segments, self.inlining.bases
        stack, seen = [kernel], {kernel}
        while stack:
            reads = {read for read in self.binding.reads[stack.pop()] if read is not None} - seen
            inside = {
                read
                for read in reads
                if not inlining.realized[bases[read]] or inlining.realized_at[bases[read]] == kernel
            }
            for each in inside:
                is_view = inlining.kinds[each] is Kind.VIEW
                if self.binding.is_mirror[each] and not is_view and segments[each] == segments[kernel]:
                    return True
            seen |= inside
            stack += inside
        return False

    def _is_put_off(self, kernel: Kernel, step: int) -> bool:
        """Whether a kernel's reductions would wait, past an external kernel, for a loop over what they write.

        As it does where gradients of a parameter are added that is used several times.
        """
        loop, kernels = self.inlining.loops[step], self.recomputation.kernels
        is_like = kernel.reduction is not None and kernel.reduction.written == loop.elements
        return is_like and loop.reduction is None and kernels[kernel.steps[-1]] < kernels[step]

    def _shareable(self, step: int) -> list[Shared]:
        """What is read of steps, and of inputs (numbered below 0), and is enough to fuse with other readers.

        Of its seeds a draw reads one. Readers of two parts of a value share nothing.
        """
        if self.inlining.loops[step].is_draw:
            return []
        nodes, sizes = self.binding.nodes, self.graph.bytes_of_nodes
        parts, inputs = self.inlining.parts_of(step), sorted(self.inlining.inputs_read[step])
        found = [each for each in parts if sizes[nodes[each[0]]] >= MIN_SHARED_BYTES]
        return found + [(~each, ()) for each in inputs if self.graph.loops[each].elements >= MIN_SHARED_BYTES]

    def _find_feeders(self, step: int) -> Iterable[tuple[int, Kernel]]:
        """Operands of a concatenation, and the near loops that have them at hand and can write them to it."""
        inlining = self.inlining
        for read in self.binding.reads[step]:
            if read is None:
                continue
            base = inlining.bases[read]
            elements = inlining.loops[base].elements
            for leaf in (base,) if inlining.realized[base] else inlining.leaves[base]:
                kernel = self.kernels[leaf]
                if kernel is None or not kernel.admits(elements, None) or not self._is_open(kernel, step):
                    continue
                if self._is_nested(kernel, base, (kernel,)):
                    yield base, kernel
