"""Arrangement: how the images of a schedule lie once they are stored, where convolutions work channels last.

What of it does not depend on the schedule is in ``layout.py``. Linear in steps and reads.
"""

from __future__ import annotations

import functools

from fxremat.graph.loops import is_channels_first
from fxremat.inductor.facts import facts
from fxremat.inductor.grouping import Grouping


class Arrangement:
    """How the stored images of one schedule lie."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping
        self._orders = grouping.orders
        self._inlining = grouping.inlining
        self._binding = grouping.binding
        self._graph = grouping.graph
        self._facts = facts(grouping.graph)

    @functools.cached_property
    def cats_in_order(self) -> frozenset[int]:
        """Concatenations of images in the forward that lie in the order of their sizes.

        Inductor makes one channels last only where an operand is known to lie so by then: a convolution has
        made it or read it, or it was stored so; or where none is stored by then, and one was traced so.
        """
        found = set[int]()
        for cat in self._grouping.feeders:
            if cat >= self._binding.boundary or self._binding.nodes[cat] not in self._facts.images:
                continue
            reads = self._binding.reads[cat]
            bases, realized = self._inlining.bases, self._inlining.realized
            stored = [read for read in reads if read is None or realized[bases[read]]]
            if stored:
                is_last = any(read is not None and self._lies_last(read, cat, found) for read in stored)
            else:
                operands = self._graph.nodes[self._binding.nodes[cat]].operands
                traced = (self._graph.fx_nodes[operand].meta["val"] for operand in operands)
                is_last = not all(map(is_channels_first, traced))
            if not is_last:
                found.add(cat)
        return frozenset(found)

    def _lies_last(self, read: int, cat: int, in_order: set[int]) -> bool:
        """Whether an operand of a concatenation is known to lie channels last by then."""
        base, nodes = self._inlining.bases[read], self._binding.nodes
        if self._facts.images.get(nodes[base]) != self._facts.images.get(nodes[read]):
            return False
        if base in self._orders.stored_last or self._graph.loops[nodes[base]].is_cat:
            return base in self._orders.stored_last or base not in in_order
        by_then = (base, *(each for each in self._inlining.readers[base] if each < cat))
        return any(nodes[each] in self._facts.convolutions for each in by_then)

    def held_in_cats(self) -> dict[int, int]:
        """The operands that are held in concatenations, and these.

        Where convolutions work channels last, a concatenation of the backward that one of them reads is made
        of copies that lie so (``images.py``), and what a kernel reads lies as that wants it.
        """
        held = self._inlining.slices.held_in
        if not held or not self._orders.works_channels_last:
            return held
        convolutions, boundary = self._facts.convolutions, self._binding.boundary
        readers, nodes = self._inlining.readers, self._binding.nodes
        late = {cat for cat in held.values() if cat >= boundary}
        copied = {cat for cat in late if any(nodes[each] in convolutions for each in readers[cat])}
        pairs = ((step, cat) for step, cat in held.items() if cat not in copied)
        return {step: cat for step, cat in pairs if self._has_free_layout(step)}

    def _has_free_layout(self, step: int) -> bool:
        """Whether no kernel that reads an image wants it in its own order."""
        is_fixed = self._inlining.is_dear[step] and step in self._orders.channels_last
        return not is_fixed and not any(map(self._inlining.is_external, self._inlining.readers[step]))

    def may_run_alike(self, step: int, cat: int) -> bool:
        """Whether a loop that writes to a concatenation of images may run in the order of what it reads."""
        if not self._orders.works_channels_last or self._binding.nodes[cat] not in self._facts.images:
            return True
        return step in self._orders.stored_last or cat in self.cats_in_order

    def may_lie_alike(self, step: int, read: int) -> bool:
        """Whether the elements of a value, and of one of its size that it is computed of, may lie alike.

        Where images lie channels last, those of several images do not that are the channels of one in the
        other value, nor do two of which one lies in the order of its sizes, nor does what was added at places
        that are computed.
        """
        images, nodes, inlining = self._facts.images, self._binding.nodes, self._inlining
        if nodes[step] not in images or not self._orders.works_channels_last:
            return True
        leaf = inlining.bases[read]
        is_added = inlining.loops[leaf].is_put or inlining.loops[leaf].is_scatter
        is_image = nodes[read] in images
        return not is_added and (not is_image or self._orders.of(step) == self._orders.of(read))
