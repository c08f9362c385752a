"""Kernels: the groups of loops that Inductor runs as one, their order, and what they need of each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxremat.graph.loops import Reduction

MAX_KERNEL_NODES = 64  # Inductor's default, config.max_fusion_size
MAX_VISITED = 64  # kernels that the search for a path looks at before it takes one for found


@dataclass(slots=True, eq=False)
class Kernel:
    """A group of steps that run as one kernel; an external kernel is a group of its own."""

    elements: int
    reduction: Reduction | None
    steps: list[int] = field(default_factory=list)
    producers: list[Kernel] = field(default_factory=list)
    is_loop: bool = True
    runs_at: int = 0
    ordinal: int = 0
    rank: int = 0

    def admits(self, elements: int, reduction: Reduction | None) -> bool:
        """Whether a loop over so many elements can be fused into this kernel."""
        if not self.is_loop or len(self.steps) >= MAX_KERNEL_NODES:
            return False
        if reduction is not None and self.reduction is not None:
            return reduction == self.reduction
        if reduction is not None:
            return reduction.fits(self.elements)
        return elements == self.elements if self.reduction is None else self.reduction.fits(elements)


def in_order(found: Iterable[Kernel]) -> list[Kernel]:
    """Time kernels where their first step stands, or when all that they read is there; in that order."""
    kernels = list(found)
    is_settled = False
    while not is_settled:
        is_settled = True
        for kernel in kernels:
            for producer in kernel.producers:
                if (producer.runs_at, producer.rank) >= (kernel.runs_at, kernel.rank):
                    kernel.runs_at, kernel.rank = producer.runs_at, producer.rank + 1
                    is_settled = False
    kernels.sort(key=lambda kernel: (kernel.runs_at, kernel.rank, kernel.steps[0]))
    for rank, kernel in enumerate(kernels):
        kernel.rank = rank
    return kernels


def spread(kernels: Iterable[Kernel], boundary: int, num_steps: int) -> None:
    """Let kernels that have waited for others run behind these, not at the same step.

    Loops at one step are one call. There are more steps than kernels, so that those put off catch up.

    Args:
        kernels: All kernels, in order.
        boundary: The first step of the backward, which is a program of its own.
        num_steps: How many steps there are.
    """
    before: Kernel | None = None
    for kernel in kernels:
        if before is not None and kernel.runs_at <= before.runs_at:
            is_one_call = kernel.is_loop and before.is_loop
            end = boundary if kernel.steps[0] < boundary else num_steps
            kernel.runs_at = min(before.runs_at + (not is_one_call), end - 1)
        before = kernel


def join_calls(kernels: Sequence[Kernel], boundary: int) -> None:
    """Let loops between two external kernels run together, where the last of them stands.

    Args:
        kernels: All kernels, in order.
        boundary: The first step of the backward, which is a program of its own.
    """
    call: list[Kernel] = []
    for kernel in reversed(kernels):
        is_other_part = bool(call) and kernel.runs_at < boundary <= call[0].runs_at
        if not kernel.is_loop or is_other_part:
            call = []
        if kernel.is_loop:
            call.append(kernel)
            kernel.runs_at = call[0].runs_at


def leads_to(kernel: Kernel, producers: Sequence[Kernel]) -> bool:
    """Whether another of the producers needs the kernel, directly or not; True where the search is long."""
    seen: dict[Kernel, None] = {}
    stack = [producer for producer in producers if producer is not kernel]
    while stack:
        producer = stack.pop()
        if producer is kernel or len(seen) > MAX_VISITED:
            return True
        is_older = producer.steps[-1] < kernel.steps[0]
        if not is_older and producer not in seen:
            seen[producer] = None
            stack.extend(producer.producers)
    return False


def depends_on(step: int, earlier: int, leaves: Sequence[Sequence[int]]) -> bool:
    """Whether a step is an earlier one, or reads what is computed from it.

    Args:
        step: The step.
        earlier: The earlier one.
        leaves: For each step, the steps that it reads, all before it.

    >>> leaves = [(), (0,), (0,), (1,)]
    >>> [depends_on(3, earlier, leaves) for earlier in range(4)]
    [True, True, False, True]
    """
    seen, stack = {step}, [step]
    while stack:
        for leaf in leaves[stack.pop()]:
            if leaf >= earlier and leaf not in seen:
                seen.add(leaf)
                stack.append(leaf)
    return earlier in seen
