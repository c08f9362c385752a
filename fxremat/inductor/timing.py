"""Timing: when kernels run, and until when what they read is held.

A kernel runs where the first of its steps stands, or as soon as all that it reads is there. What an inlined
step reads is held until the last of its readers has run. Linear in steps and reads, but that kernels are put
behind what they read until none moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxremat.graph.loops import Kind
from fxremat.inductor.grouping import Grouping
from fxremat.inductor.kernels import Kernel
from fxremat.inductor.pooling import inlined_offsets


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happen; the fields are those of ``Lowering``.

    Attributes:
        runs_at: For each step, when its kernel runs.
        read_until: For each step, until when its operands are read, but for those of ``read_later``.
        read_later: Pairs of an operand and a step at which it is read, too.
    """

    runs_at: Sequence[int]
    read_until: Sequence[int]
    read_later: Sequence[tuple[int, int]]


def timing(grouping: Grouping) -> Timing:
    """Put the kernels in order, and read off when each step is computed and its operands are read."""
    boundary, num_steps = grouping.binding.boundary, len(grouping.kernels)
    kernels = in_order(dict.fromkeys(kernel for kernel in grouping.kernels if kernel is not None))
    spread(kernels, boundary, num_steps)
    runs_at = [step if kernel is None else kernel.runs_at for step, kernel in enumerate(grouping.kernels)]
    for step, base in enumerate(grouping.inlining.bases):  # a view is there with what it looks at
        runs_at[step] = runs_at[base]
    copied_at = {
        (step, operand): kernel.runs_at
        for step, feeders in grouping.feeders.items()
        for operand, kernel in feeders.items()
    }
    read_until = _read_until(grouping, runs_at, copied_at)
    read_later = []
    for step, feeders in grouping.feeders.items():  # a concatenation is there with the first of its operands
        reads = [read for read in grouping.binding.reads[step] if read is not None]
        bases = grouping.inlining.bases
        read_later += [(read, copied_at.get((step, bases[read]), runs_at[step])) for read in reads]
        runs_at[step] = min((kernel.runs_at for kernel in feeders.values()), default=runs_at[step])
        read_until[step] = runs_at[step]
    return Timing(runs_at, read_until, read_later)


def _read_until(
    grouping: Grouping, runs_at: Sequence[int], copied_at: Mapping[tuple[int, int], int]
) -> list[int]:
    """For each step, until when its operands are read: for an inlined one by the last of its readers.

    Args:
        grouping: The kernels, in order.
        runs_at: For each step, when its kernel runs.
        copied_at: For a concatenation and an operand that a near loop copies there, when that loop runs.
    """
    kinds, readers, kernels = grouping.inlining.kinds, grouping.inlining.readers, grouping.kernels
    found = list(runs_at)
    early = grouping.inlining.early_readers
    for step in range(len(found) - 1, -1, -1):
        if kinds[step] is Kind.VIEW:  # it reads nothing
            continue
        if kernels[step] is not None:
            if step in early:
                found[step] = max(found[step], *(found[each] for each in early[step]))
            continue
        if copied_at:
            ends = [copied_at.get((reader, step), found[reader]) for reader in readers[step]]
            found[step] = max(ends, default=step)
        else:
            found[step] = max(map(found.__getitem__, readers[step]), default=step)
    for pooling, picks in inlined_offsets(grouping.graph, grouping.binding):
        found[pooling] = max(found[pooling], *(found[reader] for reader in picks))
    return found


def in_order(found: Iterable[Kernel]) -> list[Kernel]:
    """Time kernels where their first step stands, or when all that they read is there; in that order.

    Those of a chain are one.
    """
    kernels = list(found)
    is_settled = False
    while not is_settled:
        is_settled = True
        for kernel in kernels:
            first = kernel.head
            for producer in kernel.producers:
                before = producer.head
                if before is not first and (before.runs_at, before.rank) >= (first.runs_at, first.rank):
                    first.runs_at, first.rank = before.runs_at, before.rank + 1
                    is_settled = False
    for kernel in kernels:
        kernel.runs_at, kernel.rank = kernel.head.runs_at, kernel.head.rank
    kernels.sort(key=_place)
    for rank, kernel in enumerate(kernels):
        kernel.rank = rank
    return kernels


def _place(kernel: Kernel) -> tuple[int, int, int, int]:
    """What kernels are ordered by."""
    return kernel.runs_at, kernel.rank, kernel.head.steps[0], kernel.steps[0]


def spread(kernels: Iterable[Kernel], boundary: int, num_steps: int) -> None:
    """Let kernels that have waited for others run behind these, not at the same step.

    There are more steps than kernels, so that those put off catch up. Loops that a CPU runs for one external
    kernel are of one call, and nobody can tell which of them Inductor made for what.

    Args:
        kernels: All kernels, in order.
        boundary: The first step of the backward, which is a program of its own.
        num_steps: How many steps there are.
    """
    before: Kernel | None = None
    for kernel in kernels:
        if before is not None and kernel.runs_at <= before.runs_at:
            end = boundary if kernel.steps[0] < boundary else num_steps
            is_one_call = kernel.made_for is not None and kernel.made_for == before.made_for
            is_one_call |= kernel.head is before.head
            kernel.runs_at = min(before.runs_at + (not is_one_call), end - 1)
        before = kernel
