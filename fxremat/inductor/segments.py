"""Segments: which recomputed nodes Inductor may fuse, and which wait."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts

OWN_BUFFER = (Kind.KERNEL, Kind.REDUCTION)  # what gets a buffer in any case


class Recomputation(NamedTuple):
    """Where the steps of a schedule stand in what is recomputed.

    Attributes:
        segments: For each step its segment of recomputation, -1 in the forward.
        stretches: For each step its stretch between external kernels that run again, -1 in the forward.
        kernels: For each step how many external kernels stand before it in the backward, 0 in the forward.
        waiting: The steps that are made to wait.
    """

    segments: Sequence[int]
    stretches: Sequence[int]
    kernels: Sequence[int]
    waiting: frozenset[int]


def recomputation(graph: JointGraph, binding: Binding) -> Recomputation:
    """The segments and stretches of a resolved schedule."""
    boundary, nodes, mirrors = binding.boundary, binding.nodes, binding.is_mirror
    of_node = facts(graph).kinds
    kinds = [of_node[position] for position in nodes]
    steps = [
        (nodes[step] if mirrors[step] else None, kinds[step] in OWN_BUFFER)
        for step in range(boundary, len(nodes))
    ]
    numbers = segments(steps)
    external = [kind is Kind.KERNEL for kind in kinds[boundary:]]
    again = [mirror and kernel for mirror, kernel in zip(mirrors[boundary:], external, strict=True)]
    reads = binding.reads[boundary:]
    waits = waiting(
        steps, numbers, lambda step: [read - boundary for read in reads[step] if read is not None]
    )
    forward = [-1] * boundary
    return Recomputation(
        forward + numbers,
        forward + stretches(numbers, again),
        [0] * boundary + [*accumulate(external)],
        frozenset(boundary + step for step in waits),
    )


def segments(steps: Sequence[tuple[Hashable | None, bool]]) -> list[int]:
    """The segment of recomputation that each step of a backward belongs to.

    A segment begins with a mirror behind an operator that is none, or with a second mirror of a value that
    the segment has mirrored already; it ends where the next one begins. Operators are what gets a buffer of
    its own in any case: loops that run for the first time end no segment.

    Args:
        steps: For each step what it computes again, None if it runs for the first time, and whether it gets
            a buffer of its own in any case.

    >>> segments([("a", True), ("b", True), (None, True), ("c", False), ("a", True), ("a", True)])
    [1, 1, 1, 2, 2, 3]
    """
    numbers = []
    number, is_open = 0, False
    mirrored: set[Hashable] = set()
    for mirror, has_own_buffer in steps:
        if mirror is None:
            is_open = is_open and not has_own_buffer
        elif not is_open or mirror in mirrored:
            number, is_open, mirrored = number + 1, True, {mirror}
        else:
            mirrored.add(mirror)
        numbers.append(number)
    return numbers


def stretches(numbers: Sequence[int], runs_again: Sequence[bool]) -> list[int]:
    """The stretch between recomputed external kernels that each step of a backward belongs to.

    A loop that were run behind such kernels instead of before them would hold what it reads all the while.

    Args:
        numbers: The segment of each step; they ascend.
        runs_again: For each step, whether it is an external kernel that runs again.

    Returns:
        For each step the segment of the last such kernel up to it; -1 if there is none.

    >>> stretches([0, 1, 1, 2, 3, 3], [False, True, False, False, False, True])
    [-1, 1, 1, 1, 1, 3]
    """
    found, last = [], -1
    for number, again in zip(numbers, runs_again, strict=True):
        last = number if again else last
        found.append(last)
    return found


def waiting(
    steps: Sequence[tuple[Hashable | None, bool]],
    numbers: Sequence[int],
    reads: Callable[[int], Iterable[int]],
) -> list[int]:
    """Which steps of a backward are made to wait for what stands before them.

    These are the first mirror of each segment that gets a buffer of its own in any case. One that reads what
    the last such operator before it has made, or what was made of that, runs behind it anyway, and would only
    keep it from being written over.

    Args:
        steps: As for ``segments``.
        numbers: What ``segments`` makes of them.
        reads: The steps that a step reads, negative ones of the forward.

    >>> steps = [(None, True), ("a", False), ("b", True), ("c", True), ("a", False), ("d", True)]
    >>> waiting(steps, segments(steps), [[], [], [1], [2], [], [4]].__getitem__)
    [2, 5]
    >>> waiting(steps, segments(steps), [[], [], [1], [2], [3], [4]].__getitem__)
    [2]
    """
    first: dict[int, int] = {}
    owning = [index for index, (_, has_own_buffer) in enumerate(steps) if has_own_buffer]
    for index in owning:
        if steps[index][0] is not None:
            first.setdefault(numbers[index], index)
    found = []
    for index in first.values():
        place = bisect_left(owning, index)
        if place and not depends_on(index, owning[place - 1], reads):
            found.append(index)
    return found


def depends_on(step: int, earlier: int, reads: Callable[[int], Iterable[int]]) -> bool:
    """Whether a step is an earlier one, or reads what is computed from it.

    Args:
        step: The step.
        earlier: The earlier one.
        reads: Gives the steps that a step reads, all before it.

    >>> reads = [(), (0,), (0,), (1,)].__getitem__
    >>> [depends_on(3, earlier, reads) for earlier in range(4)]
    [True, True, False, True]
    """
    seen, stack = {step}, [step]
    while stack:
        for read in reads(stack.pop()):
            if read >= earlier and read not in seen:
                seen.add(read)
                stack.append(read)
    return earlier in seen


def waited_for(waits: Collection[int], may_be: Sequence[bool]) -> dict[int, int]:
    """What each of the steps waits for that are made to wait: the last before it that may be.

    Args:
        waits: These steps.
        may_be: For each step of a backward, whether it may be waited for.

    >>> waited_for({0, 2, 4}, [True, False, True, True, False])
    {2: 0, 4: 3}
    """
    found: dict[int, int] = {}
    before: int | None = None
    for index, is_one in enumerate(may_be):
        if index in waits and before is not None:
            found[index] = before
        if is_one:
            before = index
    return found
