"""Chains: kernels of a CPU with the same outermost ranges, one of which reads what another computes.

Inductor fuses their outer loops once there is nothing else to fuse, as those of the sums over each image of a
normalisation, of the sums of these, and of what is computed with both. All that they work on is then held
until the last has run. Linear in kernels and what they read, but for the searches for paths, which are
bounded.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

from fxremat.inductor.kernels import Kernel, leads_to
from fxremat.inductor.ranges import Ranges


def link(kernels: Iterable[Kernel], shared_bytes: Callable[[Kernel, Kernel], int]) -> None:
    """Let kernels know the first of their chain.

    Args:
        kernels: All kernels, in order.
        shared_bytes: How much of memory two of them read or write that the other one does as well; 0 where
            Inductor may not fuse them wherever they stand. Those that share most are fused first.
    """
    pairs = [
        (-shared, first, second)
        for second in kernels
        for first in dict.fromkeys(second.producers)
        if first.is_fusible and second.is_fusible and _depth(first.ranges, second.ranges)
        if (shared := shared_bytes(first, second))
    ]
    members: dict[Kernel, list[Kernel]] = {}
    depths: dict[Kernel, int] = {}
    for _, first, second in sorted(pairs, key=operator.itemgetter(0)):
        before, behind = (members.get(each.chain or each, [each]) for each in (first, second))
        depth = _depth(first.ranges, second.ranges)
        known = {depths[each[0]] for each in (before, behind) if len(each) > 1}
        is_end = before[-1] is first and behind[0] is second and before is not behind
        if is_end and known <= {depth} and _may_follow(before, behind):
            head = before[0]
            members[head], depths[head] = [*before, *behind], depth
            for each in members[head]:
                each.chain = head


def _may_follow(before: Sequence[Kernel], behind: Sequence[Kernel]) -> bool:
    """Whether one chain may be fused with another that reads what it computes."""
    read = (producer for each in behind for producer in each.producers)
    others = [producer for producer in read if producer not in before and producer not in behind]
    is_read = all(
        _reads_all(producer, each.ranges)
        for each in behind
        for producer in each.producers
        if producer in before
    )
    return is_read and not any(leads_to(each, others) for each in before)


def _depth(first: Ranges | None, second: Ranges | None) -> int:
    """How many outer ranges two loops have in common: all of one of them, or none."""
    if first is None or second is None:
        return 0
    depth = min(len(first.kept), len(second.kept))
    return depth if first.kept[:depth] == second.kept[:depth] else 0


def _reads_all(producer: Kernel, ranges: Ranges | None) -> bool:
    """Whether a loop reads what a kernel writes along its outermost dimensions."""
    written = producer.elements if producer.reduction is None else producer.reduction.written
    sizes = () if ranges is None else ranges.kept + ranges.reduced
    return written in itertools.accumulate(sizes, operator.mul, initial=1)
