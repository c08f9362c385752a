"""Buffers: which values get one, and where one takes the place of another.

Rules 4 to 7 of ``fusion.py``, for kernels whose place in time is known. Linear in steps and reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fxremat.graph.loops import Kind
from fxremat.inductor.arrangement import Arrangement
from fxremat.inductor.copies import Copies
from fxremat.inductor.facts import facts
from fxremat.inductor.grouping import Grouping
from fxremat.inductor.kernels import Kernel
from fxremat.inductor.layout import after_bytes, input_copies
from fxremat.inductor.pooling import scatter_buffers
from fxremat.inductor.segments import depends_on
from fxremat.inductor.shown import State
from fxremat.inductor.timing import Timing
from fxremat.memory.lowering import Lowering


def buffers(grouping: Grouping, timing: Timing) -> Lowering:
    """The lowering of a schedule whose kernels are known, and when they run."""
    return Buffers(grouping, timing).lowering()


class Buffers:
    """The buffers of one schedule."""

    def __init__(self, grouping: Grouping, timing: Timing) -> None:
        self.graph = grouping.graph
        self.binding = grouping.binding
        self.inlining = grouping.inlining
        self.grouping = grouping
        self.kernels = grouping.kernels
        self.timing = timing
        self.arrangement = Arrangement(grouping)

    def lowering(self) -> Lowering:
        """What has a buffer, less what is held in others or takes their place, and the copies."""
        timing = self.timing
        held_in = self.arrangement.held_in_cats()
        is_stored = [step not in held_in and self._has_buffer(step) for step in range(len(self.kernels))]
        replaces = self.replaced(is_stored, held_in)
        found = self.grouping.scatters
        at = list(timing.runs_at)
        for step, cat in held_in.items():  # it is there with the first that it holds, however far before
            at[cat] = min(at[cat], at[step])
        copied = input_copies(self.graph, self.binding)
        extra = [
            *self._reuses(replaces),
            *((first and at[first], self._read_until(readers), size) for first, readers, size in copied),
            *Copies(self.grouping, timing, self.arrangement).found(held_in),
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
        if fed is None or not self.arrangement.may_run_alike(step, reader):
            return False
        bases = {inlining.bases[read] for read in self.binding.reads[reader] if read is not None}
        computed = [base for base in bases if not inlining.realized[base] and step in inlining.leaves[base]]
        return step not in bases and all(fed.get(base) is self.kernels[step] for base in computed)

    def _reduces_rows(self, kernel: Kernel) -> bool:
        """Whether, on a CPU, a kernel goes over rows; numbers are drawn in a loop over all elements."""
        return self.graph.is_on_cpu and kernel.reduction is not None and kernel.reduction.written > 1

    # -- what takes the place of another

    def _reuses(self, replaces: Iterable[int]) -> Iterable[tuple[int, int, int]]:
        """What is saved by the steps whose buffers take the place of others."""
        for step in replaces:
            place = self.timing.runs_at[step]
            yield place, place, -self.graph.node_bytes(self.binding.nodes[step])

    def replaced(self, is_stored: Sequence[bool], held_in: Collection[int]) -> dict[int, int]:
        """A buffer of a loop may take the place of one of equal size that its kernel reads last.

        Args:
            is_stored: For each step, whether it has a buffer.
            held_in: The steps of what is held in others.

        Returns:
            For the steps of such buffers, the steps of those whose place they take.
        """
        bases = self.inlining.bases
        outputs = {self.inlining.looked_at[step] for step in self.binding.outputs}
        never = facts(self.graph).shown.never_of(self.binding, self.inlining.readers)
        sizes = facts(self.graph).bytes_of_one
        found: dict[int, int] = {}
        inside: dict[int, int] = {}  # likewise, of what is used inside of its kernel alone
        taken: set[int] = set()
        for step, kernel in enumerate(self.kernels):
            if kernel is None or not kernel.is_fusible:
                continue
            is_made_before = self.inlining.loops[step].is_put  # the copy that it writes to
            if is_made_before or step in held_in or step in self.inlining.slices.cats:
                continue
            size = self.graph.node_bytes(self.binding.nodes[step])
            for read in self.inlining.buffers_read[step] if size else ():
                leaf = bases[read]
                is_there = is_stored[leaf] or self.kernels[leaf] is kernel
                if not is_there or sizes[self.binding.nodes[read]] != size:
                    continue
                if not is_stored[leaf] and self._is_local(kernel):
                    continue
                is_fixed = read in taken or read in outputs or leaf in self.grouping.feeders
                is_fixed = is_fixed or not self.arrangement.may_lie_alike(step, read)
                if is_fixed or not self._reads_last(step, kernel, read):
                    continue
                is_own = self.timing.read_until[step] == kernel.runs_at
                if is_own and self.binding.nodes[leaf] not in never.get(step, ()):
                    if is_stored[leaf] or leaf in inside:
                        taken.add(read)
                        (found if is_stored[step] else inside)[step] = inside.get(leaf, leaf)
                    break
        return found

    def _is_local(self, kernel: Kernel) -> bool:
        """Whether what a kernel alone uses has no more than a row, in a buffer of the kernel's own.

        So it is on a CPU where loops go through each row one after the other, since they read what others
        reduce it to, as in a softmax: and none goes over the rows alone.
        """
        ranges = [each for each in map(self.grouping.ranges.__getitem__, kernel.steps) if each is not None]
        if kernel.reduction is None or len(ranges) < len(kernel.steps):
            return False
        dims = {len(each.kept) + len(each.reduced) for each in ranges}
        reduced = {step for step in kernel.steps if self.inlining.loops[step].reduction is not None}
        is_again = any(reduced.intersection(self.inlining.leaves[step]) for step in kernel.steps)
        return is_again and dims == {1 + min(len(each.kept) for each in ranges)}

    def _reads_last(self, step: int, kernel: Kernel, read: int) -> bool:
        """Whether all others that read a buffer, or wait for it, run before: earlier, or for this."""
        leaf = self.inlining.bases[read]
        for reader in (*self.inlining.realized_readers[leaf], *self.inlining.waited_by(leaf)):
            other = self.kernels[reader]
            if other is None or reader == step:
                continue
            if other.rank < kernel.rank and not self._is_tied(other, kernel, read):
                continue
            if other is not kernel or reader in self.grouping.split:
                return False
            if not depends_on(step, reader, self.inlining.leaves.__getitem__):
                return False
        return True

    def _is_tied(self, other: Kernel, kernel: Kernel, read: int) -> bool:
        """Whether an earlier kernel of a chain goes through a buffer in another order than it lies in."""
        is_chain = kernel is not other and kernel.head is other.head
        is_image = self.binding.nodes[read] in facts(self.graph).images
        is_last = is_image and self.grouping.orders.of(read) is not None
        return is_chain and is_last and other.reduction is not None
