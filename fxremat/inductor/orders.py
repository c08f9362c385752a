"""Orders: which images a schedule stores in the order of their sizes, and not channels last.

Where convolutions work channels last most images lie so: those that they make and read, and those that lead
to them. Others lie as they were traced if the forward hands them over, in the order of their sizes if a view
regroups those by then, or others wait for them that no convolution reads, and else as most of what they are
computed of. Linear in steps and reads.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind, is_channels_first
from fxremat.inductor.facts import facts
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.layout import channels_last, inputs_leading, works_channels_last
from fxremat.inductor.segments import Recomputation

Order: TypeAlias = tuple[int, int]  # channels last: of how many examples, and how many channels of each


class Orders:
    """The orders of the images of one schedule."""

    def __init__(self, graph: JointGraph, inlining: Inlining, recomputation: Recomputation) -> None:
        self._graph = graph
        self._inlining = inlining
        self._binding = inlining.binding
        self._waiting = recomputation.waiting
        self._facts = facts(graph)

    @functools.cached_property
    def works_channels_last(self) -> bool:
        """Whether the convolutions of the forward do; else nothing here is of weight."""
        return works_channels_last(self._graph, self._binding, range(self._binding.boundary))

    @functools.cached_property
    def channels_last(self) -> frozenset[int]:
        """The steps whose values lie channels last, as convolutions lead to them."""
        return channels_last(self._graph, self._binding, self._waiting)

    @functools.cached_property
    def stored_last(self) -> frozenset[int]:
        """Those of them that are stored so when they are computed."""
        pinned, is_dear = self._inlining.pinned, self._inlining.is_dear
        return frozenset(each for each in self.channels_last if pinned[each] or is_dear[each])

    @functools.cached_property
    def of_images(self) -> Mapping[int, Order | None]:
        """How the stored images lie that loops compute; None where that is in the order of their sizes."""
        found: dict[int, Order | None] = {}
        if self.works_channels_last:
            inlining, nodes, images = self._inlining, self._binding.nodes, self._facts.images
            for step, is_realized in enumerate(inlining.realized):
                if is_realized and nodes[step] in images and inlining.kinds[step] is Kind.POINTWISE:
                    found[step] = self._order(step, found)
        return found

    def of(self, step: int) -> Order | None:
        """How the value of a step lies that is an image, if it is stored, as the view of it that is read."""
        if step in self.of_images:
            return self.of_images[step]
        if self._inlining.bases[step] in self.of_images:
            return self.of_images[self._inlining.bases[step]]
        return self._last(self._binding.nodes[step])

    def is_in_order(self, step: int) -> bool:
        """Whether an image is stored in the order of its sizes."""
        return step in self.of_images and self.of_images[step] is None

    def _last(self, node: int) -> Order:
        """The order of a node's image if it lies channels last."""
        examples, channels, *_ = self._facts.images[node]
        return examples, channels

    def _order(self, step: int, known: Mapping[int, Order | None]) -> Order | None:
        """The order of a stored image; those that it is computed of are known."""
        inlining, node = self._inlining, self._binding.nodes[step]
        if step in self.stored_last or inlining.is_sum(step):
            return self._last(node)
        if inlining.pinned[step] and step < self._binding.boundary:
            return None if self._is_channels_first(node) else self._last(node)
        if inlining.made_for(step) is not None:
            return self._last(self._binding.nodes[inlining.stored_as(step)])
        if inlining.waited_by(step) and self._is_for_convolutions(step):
            return self._last(node)
        is_stored_at_once = (
            inlining.is_dear[step] and inlining.realized_at[step] == step and self._users[step] > 1
        )
        if inlining.waited_by(step) or (is_stored_at_once and node in self._facts.flattened):
            return None
        return self._voted(step, known)

    def _is_for_convolutions(self, step: int) -> bool:
        """Whether a convolution reads an image itself, and beside such loops alone (``images.py``)."""
        binding, kinds = self._binding, self._inlining.kinds
        readers = self._inlining.readers[step]
        found = [each for each in readers if binding.nodes[each] in self._facts.convolutions]
        is_read = any(step in binding.reads[each] for each in found)
        return is_read and all(each in found or kinds[each] is not Kind.KERNEL for each in readers)

    def runs_last(self, step: int) -> bool:
        """Whether a loop goes through images channels last, as most do that it reads and writes."""
        read = self._read(step, self.of_images)
        if step in self.of_images:
            read.append(self.of_images[step])
        return 2 * read.count(None) < len(read)

    def merged(self, step: int) -> Order | None:
        """How a stored image lies, if with the channels of all examples as those of one."""
        order = self.of_images.get(step)
        return None if order is None or order == self._last(self._binding.nodes[step]) else order

    def is_copied(self, step: int) -> bool:
        """Whether a merged image is computed of such images alone: element by element, as they lie."""
        order, inlining = self.merged(step), self._inlining
        if order is None:
            return False
        read, count = self._read(step, self.of_images), len(inlining.buffers_read[step])
        return {*read} == {order} and len(read) == count + len(inlining.inputs_read[step])

    def _voted(self, step: int, known: Mapping[int, Order | None]) -> Order | None:
        """The order of most of the images that one is computed of: Inductor's where none is asked for."""
        read = self._read(step, known)
        if 2 * read.count(None) >= len(read):
            return None
        examples, channels = self._last(self._binding.nodes[step])
        merged = 1, examples * channels
        return merged if 2 * read.count(merged) > len(read) else (examples, channels)

    def _read(self, step: int, known: Mapping[int, Order | None]) -> list[Order | None]:
        """The orders of the images that computing a step reads, each as often as a window goes through it.

        What is broadcast lies in either.
        """
        images, nodes, inlining = self._facts.images, self._binding.nodes, self._inlining
        loop, loops = inlining.loops[step], self._graph.loops
        leaves = [leaf for leaf in inlining.buffers_read[step] if nodes[leaf] in images]
        leaves = [leaf for leaf in leaves if loops[nodes[leaf]].elements >= loop.elements or loop.is_window]
        found = [known.get(inlining.bases[leaf], self._last(nodes[leaf])) for leaf in leaves]
        for each in inlining.inputs_read[step]:
            if each in images and loops[each].elements >= loop.elements:
                found.append(None if self.is_given_in_order(each) else self._last(each))
        return found * (loop.unrolled if loop.is_window else 1)

    @functools.cached_property
    def _users(self) -> Counter[int | None]:
        """How many steps read each, views as well."""
        return Counter(itertools.chain.from_iterable(map(set, self._binding.reads)))

    @functools.cached_property
    def _arranged(self) -> frozenset[int]:
        """The inputs that lead to convolutions and are handed over: all read copies, channels last."""
        behind = self._binding.nodes[self._binding.boundary :]
        handed_over = frozenset[int]().union(*map(self._facts.inputs_seen.__getitem__, behind))
        return inputs_leading(self._graph, self._binding) & handed_over

    def is_given_in_order(self, node: int) -> bool:
        """Whether an input is an image that is read in the order of its sizes."""
        return node not in self._arranged and self._is_channels_first(node)

    def _is_channels_first(self, node: int) -> bool:
        return is_channels_first(self._graph.fx_nodes[node].meta["val"])
