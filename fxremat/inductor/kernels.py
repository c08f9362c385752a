"""Kernels: the groups of loops that Inductor runs as one, and what they need of each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxremat.graph.loops import Loop, Reduction
from fxremat.inductor.ranges import Ranges

MAX_KERNEL_NODES = 64  # Inductor's default, config.max_fusion_size
MAX_VISITED = 64  # kernels that the search for a path looks at before it takes one for found


@dataclass(slots=True, eq=False)
class Kernel:
    """A group of steps that run as one kernel; an external kernel is a group of its own.

    Attributes:
        elements: The most elements that one of its loops runs over.
        reduction: The sizes of its reductions, which are all alike; None where it reduces nothing.
        ranges: On a CPU the ranges of its loops, those of a reduction if it has one; None where they are not
            known.
        steps: What it computes, in order.
        producers: The kernels that compute what it reads, each time that one of its steps reads of it.
        consumers: The kernels whose producer it is; none when all kernels are known.
        newest: The latest step of all that must have run when it has: its own, its producers' and so on.
        is_loop: Whether it is no external kernel.
        is_fusible: Whether it is a loop that others can become a part of.
        runs_at: The step at which it runs.
        made_for: The external kernel that its first loop is computed for, right before it, if there is one.
        chain: The first of those with whose outer loops its own are fused; None if it is that, or of none.
        ordinal: The number of its latest step, among those that are realized.
        rank: Its place among the kernels that run at one step, in the end among all.
    """

    elements: int
    reduction: Reduction | None
    ranges: Ranges | None = None
    steps: list[int] = field(default_factory=list)
    producers: list[Kernel] = field(default_factory=list)
    consumers: list[Kernel] = field(default_factory=list)
    newest: int = -1
    is_loop: bool = True
    is_fusible: bool = True
    runs_at: int = 0
    made_for: int | None = None
    chain: Kernel | None = None
    ordinal: int = 0
    rank: int = 0

    @property
    def head(self) -> Kernel:
        """The first of its chain; itself if it is of none."""
        return self.chain or self

    def admits(self, elements: int, reduction: Reduction | None) -> bool:
        """Whether a loop over so many elements can be fused into this kernel."""
        if not self.is_fusible or len(self.steps) >= MAX_KERNEL_NODES:
            return False
        if reduction is not None and self.reduction is not None:
            return reduction == self.reduction
        if reduction is not None:
            return reduction.fits(self.elements)
        return elements == self.elements if self.reduction is None else self.reduction.fits(elements)

    def take(
        self,
        step: int,
        loop: Loop,
        place: int,
        producers: Iterable[Kernel],
        ordinal: int,
        ranges: Ranges | None = None,
    ) -> None:
        """Compute a step, too, where it is realized or earlier."""
        self.runs_at = min(self.runs_at, place)
        is_first = self.ranges is None or self.ranges.is_flat
        self.ranges = ranges if ranges and (is_first or loop.reduction) else self.ranges
        self.reduction = self.reduction or loop.reduction
        self.elements = max(self.elements, loop.elements)
        self.steps.append(step)
        self.ordinal = ordinal
        for producer in producers:
            if producer is not self:
                self.producers.append(producer)
                producer.consumers.append(self)
        waiting = [self]  # also those that have read an earlier step of it, and now have to wait for this one
        while waiting:
            each = waiting.pop()
            if each.newest < step:
                each.newest = step
                waiting += each.consumers


def leads_to(kernel: Kernel, producers: Sequence[Kernel]) -> bool:
    """Whether another of the producers needs the kernel, directly or not; True where the search is long."""
    seen: dict[Kernel, None] = {}
    stack = [producer for producer in producers if producer is not kernel]
    while stack:
        producer = stack.pop()
        if producer is kernel or len(seen) > MAX_VISITED:
            return True
        is_older = producer.newest < kernel.steps[0]
        if not is_older and producer not in seen:
            seen[producer] = None
            stack.extend(producer.producers)
    return False
