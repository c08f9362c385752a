"""Chains: kernels of a CPU with the same outermost ranges, one of which reads what another computes.

Inductor fuses their outer loops once there is nothing else to fuse, as those of the sums over each image of a
normalisation, of the sums of these, and of what is computed with both. All that they work on is then held
until the last has run. Linear in kernels and what they read, but for the searches for paths, which are
bounded.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from fxremat.inductor.kernels import MAX_VISITED, Kernel
from fxremat.inductor.ranges import Ranges


def link(kernels: Iterable[Kernel], shared_bytes: Callable[[Kernel, Kernel], int]) -> None:
    """Let kernels know the first of their chain.

    Args:
        kernels: All kernels, in order.
        shared_bytes: How much of memory two of them read or write that the other one does as well; 0 where
            Inductor may not fuse them wherever they stand. Reductions are fused with each other first, and
            other loops with each other; of these those that share most.
    """
    pairs = [
        (_is_reduction(first) is _is_reduction(second), shared, depth, first, second)
        for second in kernels
        for first in dict.fromkeys(second.producers)
        if first.is_fusible and second.is_fusible
        if (depth := _depth(first.ranges, second.ranges)) and (shared := shared_bytes(first, second))
    ]
    members: dict[Kernel, list[Kernel]] = {}  # of each chain, by its first
    depths: dict[Kernel, int] = {}
    for *_, depth, first, second in sorted(pairs, key=operator.itemgetter(0, 1), reverse=True):
        before, behind = (_chain(each, members) for each in (first, second))
        is_end = before[-1] is first and behind[0] is second and before is not behind
        known = {depths[each[0]] for each in (before, behind) if len(each) > 1}
        if not is_end or not known <= {depth} or not _reads_all(before, behind):
            continue
        both = [*before, *behind]
        if not _has_others_between(both, members):
            members[both[0]], depths[both[0]] = both, depth
            for each in behind:
                each.chain = both[0]
            _have_wait(both, members)


def _is_reduction(kernel: Kernel) -> bool:
    return kernel.reduction is not None


def _has_others_between(both: Sequence[Kernel], members: Mapping[Kernel, Sequence[Kernel]]) -> bool:
    """Whether another kernel, or chain, needs one of these and is needed by one; True after a long search."""
    first, seen = min(each.steps[0] for each in both), set(both)
    stack = [producer for each in both for producer in each.producers if producer not in seen]
    while stack:
        kernel = stack.pop()
        if kernel in seen or kernel.newest < first:
            continue
        if len(seen) > MAX_VISITED + len(both):
            return True
        chain = _chain(kernel, members)
        seen.update(chain)
        read = [producer for each in chain for producer in each.producers]
        if any(producer in both for producer in read):
            return True
        stack += read
    return False


def _have_wait(both: Sequence[Kernel], members: Mapping[Kernel, Sequence[Kernel]]) -> None:
    """Have the kernels of a chain, and all behind, wait for what any of these waits for."""
    newest, stack = max(each.newest for each in both), [*both]
    while stack:
        kernel = stack.pop()
        if kernel.newest < newest:
            kernel.newest = newest
            stack += _chain(kernel, members)
            stack += kernel.consumers


def _chain(kernel: Kernel, members: Mapping[Kernel, Sequence[Kernel]]) -> Sequence[Kernel]:
    return members.get(kernel.head, [kernel])


def _reads_all(before: Sequence[Kernel], behind: Sequence[Kernel]) -> bool:
    """Whether loops read what others write along their outermost dimensions."""
    return all(
        _written(producer) in itertools.accumulate(_sizes(each), operator.mul, initial=1)
        for each in behind
        for producer in each.producers
        if producer in before
    )


def _written(kernel: Kernel) -> int:
    return kernel.elements if kernel.reduction is None else kernel.reduction.written


def _sizes(kernel: Kernel) -> tuple[int, ...]:
    return () if kernel.ranges is None else kernel.ranges.kept + kernel.ranges.reduced


def _depth(first: Ranges | None, second: Ranges | None) -> int:
    """How many outer ranges two loops have in common: all of one of them, or none."""
    if first is None or second is None:
        return 0
    depth = min(len(first.kept), len(second.kept))
    return depth if first.kept[:depth] == second.kept[:depth] else 0
