"""Buffers: which values get one, where one takes the place of another, and what is copied besides.

Rules 4 to 7 of ``fusion.py``, for kernels whose place in time is known. Linear in steps and reads.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from fxremat.graph.loops import Kind, is_channels_first
from fxremat.inductor.concatenation import held_operands, in_order_of_sizes, is_in_slices
from fxremat.inductor.facts import copied_bytes, facts
from fxremat.inductor.grouping import Grouping
from fxremat.inductor.kernels import Kernel
from fxremat.inductor.layout import after_bytes, channels_last, input_copies, works_channels_last
from fxremat.inductor.pooling import scatter_buffers
from fxremat.inductor.segments import depends_on
from fxremat.inductor.shown import State
from fxremat.inductor.timing import Timing
from fxremat.memory.lowering import Lowering


def buffers(grouping: Grouping, timing: Timing) -> Lowering:
    """The lowering of a schedule whose kernels are known, and when they run."""
    return Buffers(grouping, timing).lowering()


def _place(kernel: Kernel) -> int:
    return kernel.runs_at


class Buffers:
    """The buffers of one schedule."""

    def __init__(self, grouping: Grouping, timing: Timing) -> None:
        self.graph = grouping.graph
        self.binding = grouping.binding
        self.inlining = grouping.inlining
        self.grouping = grouping
        self.kernels = grouping.kernels
        self.timing = timing

    def lowering(self) -> Lowering:
        """What has a buffer, less what is held in others or takes their place, and the copies."""
        timing = self.timing
        held_in = self._held_in_cats()
        is_stored = [step not in held_in and self._has_buffer(step) for step in range(len(self.kernels))]
        replaces = self.replaced(is_stored)
        found = self.grouping.scatters
        at = list(timing.runs_at)
        for step, cat in held_in.items():  # it is there with the first that it holds, however far before
            at[cat] = min(at[cat], at[step])
        copied = input_copies(self.graph, self.binding)
        extra = [
            *self._reuses(replaces),
            *((first and at[first], self._read_until(readers), size) for first, readers, size in copied),
            *self._copies_shown(),
            *self._copied_images(held_in),
            *self._sequences(),
            *self._parts(),
            *scatter_buffers(self.graph, self.binding, found, self.inlining.bases, at),
        ]
        return Lowering(
            is_stored,
            at,
            timing.read_until,
            extra,
            held_in,
            timing.read_later,
            replaces,
            after_bytes=after_bytes(self.graph, self.binding),
        )

    def _read_until(self, readers: Iterable[int]) -> int:
        """The last step at which any of these steps, or what it is computed inside of, reads."""
        return max(self.timing.read_until[step] for step in readers)

    # -- what gets a buffer

    def _has_buffer(self, step: int) -> bool:
        """Whether a step's value is stored: where it leaves its kernel. What views read is."""
        kind = self.inlining.kinds[step]
        if kind is Kind.VIEW:
            return True
        if not self.inlining.realized[step]:
            return False
        if kind is Kind.KERNEL or self.inlining.pinned[step] or step in self.grouping.feeders:
            return True
        if step in self.inlining.states:
            return self.inlining.states[step] is State.STORED
        kernel = self.kernels[step]
        is_draw = self.inlining.loops[step].is_draw and step not in self.grouping.drawn_in_rows
        if is_draw and kernel is not None and self._reduces_rows(kernel):
            return True
        readers = self.inlining.realized_readers[step]
        return any(self.kernels[each] is not kernel and not self._feeds(step, each) for each in readers)

    def _feeds(self, step: int, reader: int) -> bool:
        """Whether a step concatenates, and the kernel of another writes all to it that reads the value."""
        fed, inlining = self.grouping.feeders.get(reader), self.inlining
        if fed is None or not self._may_run_alike(step, reader):
            return False
        bases = {inlining.bases[read] for read in self.binding.reads[reader] if read is not None}
        computed = [base for base in bases if not inlining.realized[base] and step in inlining.leaves[base]]
        return step not in bases and all(fed.get(base) is self.kernels[step] for base in computed)

    def _may_run_alike(self, step: int, cat: int) -> bool:
        """Whether a loop that writes to a concatenation of images may run in the order of what it reads."""
        if not self._works_channels_last or self.binding.nodes[cat] not in facts(self.graph).images:
            return True
        return step in self._stored_last or cat in self._cats_in_order

    def _reduces_rows(self, kernel: Kernel) -> bool:
        """Whether, on a CPU, a kernel goes over rows; numbers are drawn in a loop over all elements."""
        return self.graph.is_on_cpu and kernel.reduction is not None and kernel.reduction.written > 1

    # -- what takes the place of another

    def _reuses(self, replaces: Iterable[int]) -> Iterable[tuple[int, int, int]]:
        """What is saved by the steps whose buffers take the place of others."""
        for step in replaces:
            place = self.timing.runs_at[step]
            yield place, place, -self.graph.node_bytes(self.binding.nodes[step])

    def replaced(self, is_stored: Sequence[bool]) -> dict[int, int]:
        """A buffer of a loop may take the place of one of equal size that its kernel reads last.

        Args:
            is_stored: For each step, whether it has a buffer.

        Returns:
            For the steps of such buffers, the steps of those whose place they take.
        """
        outputs = {self.inlining.bases[step] for step in self.binding.outputs}
        never = facts(self.graph).shown.never_of(self.binding, self.inlining.readers)
        sizes = facts(self.graph).bytes_of_one
        found: dict[int, int] = {}
        taken: set[int] = set()
        for step, kernel in enumerate(self.kernels):
            if kernel is None or not kernel.is_fusible or not is_stored[step]:
                continue
            is_made_before = self.inlining.loops[step].is_put  # the copy that it writes to
            if is_made_before or is_in_slices(self.graph, self.binding.nodes[step]):
                continue
            size = self.graph.node_bytes(self.binding.nodes[step])
            for leaf in self.inlining.leaves[step] if size else ():
                if not is_stored[leaf] or sizes[self.binding.nodes[leaf]] != size:
                    continue
                is_fixed = leaf in taken or leaf in outputs or leaf in self.grouping.feeders
                is_fixed = is_fixed or not self._may_lie_alike(step, leaf)
                if is_fixed or not self._reads_last(step, kernel, leaf):
                    continue
                is_own = self.timing.read_until[step] == kernel.runs_at
                if is_own and self.binding.nodes[leaf] not in never.get(step, ()):
                    taken.add(leaf)
                    found[step] = leaf
                    break
        return found

    def _may_lie_alike(self, step: int, leaf: int) -> bool:
        """Whether the elements of two values of one size may lie in the same order.

        Where images lie channels last, those of several images do not that are the channels of one in the
        other value, nor do two of which one lies in the order of its sizes, nor does what was added at places
        that are computed.
        """
        images, nodes, inlining = facts(self.graph).images, self.binding.nodes, self.inlining
        first, second = (images.get(nodes[inlining.stored_as(each)]) for each in (step, leaf))
        if first is None or not self._works_channels_last:
            return True
        is_added = inlining.loops[leaf].is_put or inlining.loops[leaf].is_scatter
        is_ordered_alike = second is None or self._is_in_order(step) == self._is_in_order(leaf)
        return second in (None, first) and is_ordered_alike and not is_added

    def _is_in_order(self, step: int) -> bool:
        """Whether an image is stored in the order of its sizes, and not as convolutions of its graph work."""
        if step in self._channels_last or self.inlining.kinds[step] is Kind.KERNEL:
            return False
        node = self.binding.nodes[step]
        if self.inlining.pinned[step] and step < self.binding.boundary:
            return is_channels_first(self.graph.fx_nodes[node].meta["val"])
        is_own = self.inlining.is_dear[step] and self.inlining.realized_at[step] == step
        return is_own and node in facts(self.graph).flattened

    @functools.cached_property
    def _channels_last(self) -> frozenset[int]:
        return channels_last(self.graph, self.binding, self.grouping.recomputation.waiting)

    def _reads_last(self, step: int, kernel: Kernel, leaf: int) -> bool:
        """Whether the other loops that read a buffer run before: in earlier kernels, or for this step."""
        for reader in self.inlining.realized_readers[leaf]:
            other = self.kernels[reader]
            if other is None or other.rank < kernel.rank:
                continue
            if other is not kernel or not depends_on(step, reader, self.inlining.leaves.__getitem__):
                return False
        return True

    # -- what is held in another, or copied

    def _held_in_cats(self) -> dict[int, int]:
        """The operands that are held in concatenations, and these."""
        feeders = self.grouping.feeders
        if not feeders:
            return {}
        channels = self._channels_last
        reads = {read for step in feeders for read in self.binding.reads[step] if read is not None}
        free = frozenset(read for read in reads if self._has_free_layout(read, read in channels))
        return held_operands(self.graph, self.binding, feeders, free, self.inlining.readers)

    def _has_free_layout(self, step: int, is_channels_last: bool) -> bool:
        """Whether nothing fixes how a stored value lies: no other graph, no kernel that reads it."""
        is_fixed = self.inlining.pinned[step] or (self.inlining.is_dear[step] and is_channels_last)
        return self.inlining.realized[step] and not is_fixed and not self._feeds_kernel(step)

    def _feeds_kernel(self, step: int) -> bool:
        """Whether an external kernel reads a value."""
        return any(map(self.inlining.is_external, self.inlining.readers[step]))

    def _copies_shown(self) -> Iterable[tuple[int, int, int]]:
        """The copies that external kernels are known to get, from the loops right before them on."""
        runs_at = self.timing.runs_at
        for step, reader, size in self._shown_copies:
            yield max(runs_at[step], self._loop_before(reader)), runs_at[reader], size

    def _loop_before(self, kernel: int) -> int:
        """When the loop runs that an external kernel runs right behind; when that does, if it is no loop."""
        runs_at = self.timing.runs_at[kernel]
        before = self._in_order[bisect_left(self._in_order, runs_at, key=_place) - 1]
        return before.runs_at if before.is_loop else runs_at

    @functools.cached_property
    def _in_order(self) -> Sequence[Kernel]:
        return sorted({each for each in self.kernels if each is not None}, key=_place)

    @functools.cached_property
    def _shown_copies(self) -> Sequence[tuple[int, int, int]]:
        return [*facts(self.graph).shown.copies_of(self.binding, self.inlining.readers)]

    def _copied_images(self, held_in: Mapping[int, int]) -> Iterable[tuple[int, int, int]]:
        """The copies that convolutions get of images that were stored as the channels of one, or in order.

        What is copied is freed before a convolution's results are there, unless it is read again. What is to
        be stored channels last is copied where it is made, and the copy read from there on; but not what is
        held in it.
        """
        known, nodes, runs_at = facts(self.graph), self.binding.nodes, self.timing.runs_at
        steps = [step for step, node in enumerate(nodes) if node in known.convolutions]
        if not steps or not self._works_channels_last:
            return
        last, cats, in_order = self._stored_last, self.grouping.feeders, self._cats_in_order
        for cat in in_order & last:
            made_at = max((kernel.runs_at for kernel in cats[cat].values()), default=runs_at[cat])
            held = (self.inlining.readers[step] for step, holder in held_in.items() if holder == cat)
            yield made_at, max([made_at, *map(self._read_until, held)]), self.graph.node_bytes(nodes[cat])
        copied, shown = in_order - last, {reader for _, reader, _ in self._shown_copies}
        for step in steps:
            reads = () if step in shown else dict.fromkeys(self.binding.reads[step])
            for read in (each for each in reads if each is not None):
                base = self.inlining.bases[read]
                if not self.inlining.realized[base] or self.inlining.stored_as(base) != base:
                    continue
                stored, wanted = known.images.get(nodes[base]), known.images.get(nodes[read])
                if stored and wanted and (stored != wanted or base in copied):
                    size, place = self.graph.node_bytes(nodes[base]), runs_at[step]
                    yield max(runs_at[base], self._loop_before(step)), place, size
                    if self.inlining.readers[base][-1] == step and not self.inlining.pinned[base]:
                        yield place, place, -size

    @functools.cached_property
    def _works_channels_last(self) -> bool:
        return works_channels_last(self.graph, self.binding, range(self.binding.boundary))

    @functools.cached_property
    def _cats_in_order(self) -> frozenset[int]:
        """The concatenations of images that lie in the order of their sizes; convolutions work otherwise."""
        cats = self.grouping.feeders
        return in_order_of_sizes(self.graph, self.binding, cats, self.inlining, self._stored_last)

    @functools.cached_property
    def _stored_last(self) -> frozenset[int]:
        """The steps whose values are stored channels last when they are computed."""
        pinned, is_dear = self.inlining.pinned, self.inlining.is_dear
        return frozenset(each for each in self._channels_last if pinned[each] or is_dear[each])

    def _sequences(self) -> Iterable[tuple[int, int, int]]:
        """The copies that convolutions over sequences get, but for those of which it was shown.

        They are made before the results are allocated, and what was copied and is not read again is freed
        between; on a CPU, where one call makes them all, behind the last of them.
        """
        known = facts(self.graph)
        if not known.sequences:
            return
        shown = {reader for _, reader, _ in self._shown_copies}
        returned = {self.inlining.bases[step] for step in self.binding.outputs}
        for step, node in enumerate(self.binding.nodes):
            if node in known.sequences and step not in shown:
                reads = self.binding.reads[step]
                places = known.sequences[node]
                size = copied_bytes(self.graph, node, places)
                copied = (reads[place] for place in places)
                bases = {self.inlining.bases[read] for read in copied if read is not None}
                freed = [
                    self.graph.node_bytes(self.binding.nodes[base])
                    for base in bases - returned
                    if self.inlining.readers[base][-1] == step
                ]
                beside = sum(freed) if self.graph.is_on_cpu else max(freed, default=0)
                place = self.timing.runs_at[step]
                yield place, place, size - sum(freed) + max(0, beside - self.graph.node_bytes(node))

    def _parts(self) -> Iterable[tuple[int, int, int]]:
        """The copies of parts of inlined values that convolutions read."""
        loops = self.inlining.loops
        for reader, parts in self.inlining.parts_read.items():
            for part in parts:
                base = self.inlining.bases[part]
                if not self.inlining.realized[base]:
                    whole = self.graph.node_bytes(self.binding.nodes[base])
                    size = whole * loops[part].elements // loops[base].elements
                    yield part, self.timing.runs_at[reader], size
