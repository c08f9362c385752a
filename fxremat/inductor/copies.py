"""Copies: what the code holds besides the values, since a kernel reads it in another order or in parts.

Where code has shown the copies that a kernel gets (``shown.py``), nothing is predicted for it. Linear in
steps and reads.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from fxremat.graph.loops import Kind, is_channels_first
from fxremat.inductor.arrangement import Arrangement
from fxremat.inductor.facts import copied_bytes, facts
from fxremat.inductor.grouping import Grouping
from fxremat.inductor.kernels import Kernel
from fxremat.inductor.timing import Timing

Copy = tuple[int, int, int]  # the first step at which it is there, the last, and the bytes


class Copies:
    """The copies of one schedule, but for those of inputs."""

    def __init__(self, grouping: Grouping, timing: Timing, arrangement: Arrangement) -> None:
        self._grouping = grouping
        self._timing = timing
        self._arrangement = arrangement
        self._inlining = grouping.inlining
        self._binding = grouping.binding
        self._graph = grouping.graph
        self._facts = facts(grouping.graph)

    def found(self, held_in: Mapping[int, int]) -> Iterable[Copy]:
        """All copies; negative bytes are those of what was copied, and is freed before the results are there.

        Args:
            held_in: The operands that are held in concatenations, and these.
        """
        yield from self._known()
        if self._grouping.orders.works_channels_last:
            yield from self._of_cats(held_in)
            yield from self._of_images()
        yield from self._of_sequences()
        yield from self._of_parts()

    def _known(self) -> Iterable[Copy]:
        """The copies that external kernels were seen to get, from the loops right before them on."""
        runs_at = self._timing.runs_at
        for step, reader, size in self._shown:
            yield max(runs_at[step], self._loop_before(reader)), runs_at[reader], size

    @functools.cached_property
    def _shown(self) -> Sequence[tuple[int, int, int]]:
        return [*self._facts.shown.copies_of(self._binding, self._inlining.readers)]

    def _loop_before(self, kernel: int) -> int:
        """When the loop runs that an external kernel runs right behind; when that does, if it is no loop."""
        runs_at = self._timing.runs_at[kernel]
        before = self._in_order[bisect_left(self._in_order, runs_at, key=_place) - 1]
        return before.runs_at if before.is_loop else runs_at

    @functools.cached_property
    def _in_order(self) -> Sequence[Kernel]:
        return sorted({each for each in self._grouping.kernels if each is not None}, key=_place)

    def _of_cats(self, held_in: Mapping[int, int]) -> Iterable[Copy]:
        """The copies of concatenations that are made in the order of their sizes, to be stored channels last.

        They are copied where they are made, and the copies read from there on; but not what is held in them.
        """
        cats, runs_at = self._grouping.feeders, self._timing.runs_at
        for cat in self._arrangement.cats_in_order & self._grouping.orders.stored_last:
            made_at = max((kernel.runs_at for kernel in cats[cat].values()), default=runs_at[cat])
            held = (self._inlining.readers[step] for step, holder in held_in.items() if holder == cat)
            until = (self._timing.read_until[step] for readers in held for step in readers)
            yield made_at, max([made_at, *until]), self._graph.node_bytes(self._binding.nodes[cat])

    def _of_images(self) -> Iterable[Copy]:
        """The copies that convolutions get of images that were stored as the channels of one, or in order."""
        nodes, runs_at, inlining = self._binding.nodes, self._timing.runs_at, self._inlining
        in_order = self._arrangement.cats_in_order - self._grouping.orders.stored_last
        shown = {reader for _, reader, _ in self._shown}
        for step, node in enumerate(nodes):
            if node not in self._facts.convolutions or step in shown:
                continue
            for read in (each for each in dict.fromkeys(self._binding.reads[step]) if each is not None):
                base = inlining.bases[read]
                if not inlining.realized[base] or inlining.stored_as(base) != base:
                    continue
                if base not in in_order and not self._lies_otherwise(base, read):
                    continue
                place, first = runs_at[step], max(runs_at[base], self._loop_before(step))
                yield from self._copy_of_part(read, first, step)
                if inlining.readers[base][-1] == step and not inlining.pinned[base]:
                    size, results = self._graph.node_bytes(nodes[base]), self._graph.node_bytes(node)
                    yield place, place, -(size if first < place else min(size, results))

    def _copy_of_part(self, part: int, first: int, reader: int) -> Iterable[Copy]:
        """The copy that a convolution gets of a view of an image, of all of it or a part."""
        nodes, place = self._binding.nodes, self._timing.runs_at[reader]
        whole = self._graph.node_bytes(nodes[self._inlining.bases[part]])
        size = self._inlining.loops[part].elements * self._graph.fx_nodes[nodes[part]].meta["val"].itemsize
        yield first, place, size
        scratch = self._graph.scratch_bytes
        if size < whole and scratch and scratch[nodes[reader]] >= size:
            yield place, place, -size  # it need not copy that again

    def _lies_otherwise(self, base: int, read: int) -> bool:
        """Whether a value is stored in another order than a convolution reads an image in that it shows."""
        images, nodes = self._facts.images, self._binding.nodes
        stored, wanted = images.get(nodes[base]), images.get(nodes[read])
        if stored is None and wanted is not None:
            is_viewed = base != read and self._facts.bytes_of_one[nodes[base]] > 0
            is_kernel = is_viewed and self._inlining.kinds[base] is Kind.KERNEL
            return is_kernel and is_channels_first(self._graph.fx_nodes[nodes[read]].meta["val"])
        return wanted is not None and stored != wanted

    def _of_sequences(self) -> Iterable[Copy]:
        """The copies that convolutions over sequences get, but for those of which it was shown.

        They are made before the results are allocated, and what was copied and is not read again is freed
        between; on a CPU, where one call makes them all, behind the last of them.
        """
        if not self._facts.sequences:
            return
        shown = {reader for _, reader, _ in self._shown}
        returned = {self._inlining.bases[step] for step in self._binding.outputs}
        for step, node in enumerate(self._binding.nodes):
            if node in self._facts.sequences and step not in shown:
                reads = self._binding.reads[step]
                places = self._facts.sequences[node]
                size = copied_bytes(self._graph, node, places)
                copied = (reads[place] for place in places)
                bases = {self._inlining.bases[read] for read in copied if read is not None}
                freed = [
                    self._graph.node_bytes(self._binding.nodes[base])
                    for base in bases - returned
                    if self._inlining.readers[base][-1] == step
                ]
                beside = sum(freed) if self._graph.is_on_cpu else max(freed, default=0)
                place = self._timing.runs_at[step]
                yield place, place, size - sum(freed) + max(0, beside - self._graph.node_bytes(node))

    def _of_parts(self) -> Iterable[Copy]:
        """The copies of parts of inlined values that convolutions read."""
        for reader, parts in self._inlining.parts_read.items():
            for part in parts:
                if not self._inlining.realized[self._inlining.bases[part]]:
                    yield from self._copy_of_part(part, part, reader)


def _place(kernel: Kernel) -> int:
    return kernel.runs_at
