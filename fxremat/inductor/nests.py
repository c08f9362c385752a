"""Nests: over which ranges the loops of a CPU run, without which of them are one.

Inductor merges the dimensions of a loop that all of its reads go through as if they were one: the sum of two
images is one loop over all elements; times a number for each channel it is two, over points and channels.
On a CPU loops are fused that have the same ranges, or one inside of the other; a mask that attention reads
for each of several heads is enough to keep two loops over the same elements apart.

A loop over images runs in the order of most that it reads and writes; where one of these is stored in the
other order, it goes through examples, channels and points apart. One that reads and writes images as those
of one example, and nothing else, goes through all elements. What is not known keeps nothing apart.
"""

from __future__ import annotations

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.inductor.frames import NONE, Frame, frames
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.orders import Orders
from fxremat.inductor.ranges import Blocks, Ranges


def nests(graph: JointGraph, inlining: Inlining, orders: Orders) -> list[Ranges | None]:
    """For each step of a graph on a CPU, the ranges of a loop that computes it; None if they are not known.

    Args:
        graph: The graph.
        inlining: What is realized of a schedule of it.
        orders: In which order it stores images.
    """
    known = frames(graph)
    found = [_in_frame(graph, inlining, frame, orders) for frame in known]
    if len(found) == 1:
        return found[0]
    chosen = [
        last if first != last and inlining.realized[step] and orders.runs_last(step) else first
        for step, (first, last) in enumerate(zip(*found, strict=True))
    ]
    for step in filter(orders.is_copied, orders.of_images):
        chosen[step] = Ranges((inlining.loops[step].elements,))
    return chosen


def _in_frame(graph: JointGraph, inlining: Inlining, frame: Frame, orders: Orders) -> list[Ranges | None]:
    """The same, for loops that go through images in the order of a frame."""
    binding, kinds, bases, realized = inlining.binding, inlining.kinds, inlining.bases, inlining.realized
    found: list[Ranges | None] = []
    shown: list[Blocks | None] = []  # of each step, as its readers see them
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        own, given = frame.indices[position], frame.given.get(position)
        operands = [NONE if read is None else shown[read] for read in reads]
        for place, node in given or ():
            if reads[place] is None:
                operands[place] = frame.stored(node, orders.is_given_in_order(node))
        if own is not None and own.is_plain and len(operands) == 1:  # most are
            blocks = operands[0]
        else:
            blocks = None if own is None else own.blocks(operands)
        is_stored = realized[step] and kinds[step] is not Kind.VIEW
        if not is_stored and inlining.looked_at[step] == step:  # of what an operator returns
            is_stored = kinds[bases[step]] is Kind.KERNEL
        written = frame.stored(position, orders.is_in_order(step)) if is_stored else NONE
        blocks = None if blocks is None else blocks | written
        found.append(None if own is None else own.ranges(graph.loops[position], blocks))
        shown.append(written if is_stored else blocks)
    return found
