"""Replay: what a plan of operators amounts to, see ``condensed.py``. Linear in its runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fxremat.planners.condensed import Condensed


def followed(condensed: Condensed, schedule: Iterable[str]) -> tuple[int, ...]:
    """The plan that a schedule stands for: its operators in its order, free nodes left out."""
    place = {operator.members[0]: index for index, operator in enumerate(condensed.operators)}
    nodes = map(condensed.graph.index.__getitem__, schedule)
    plan = obedient(condensed, [place[node] for node in nodes if node in place])
    return tuple(without_unread(condensed, plan))


def obedient(condensed: Condensed, plan: Iterable[int]) -> list[int]:
    """The plan without runs that are too many, and with those that must be repeated in the backward."""
    operators = condensed.operators
    runs = [0] * len(operators)
    must_repeat = any(each.must_repeat for each in operators)
    order: list[int] = []
    started = 0

    def run(index: int) -> None:
        runs[index] += 1
        order.append(index)

    def repeat(index: int) -> None:
        """Run again what an operator of the backward may not read from the forward."""
        stack = [index]
        while stack:
            top = stack[-1]
            makers = (condensed.maker[buffer] for buffer in operators[top].reads)
            missing = [maker for maker in makers if operators[maker].must_repeat and runs[maker] == 1]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            if top != index:
                run(top)

    for index in plan:
        if runs[index] >= operators[index].runs_at_most:
            continue
        if must_repeat and started == condensed.boundary:
            repeat(index)
        started += index < condensed.boundary and runs[index] == 0
        run(index)
    return order


def without_unread(condensed: Condensed, plan: Sequence[int]) -> list[int]:
    """The plan without repetitions that nothing reads."""
    operators = condensed.operators
    seen = [False] * len(operators)
    is_again = []
    for index in plan:
        is_again.append(seen[index])
        seen[index] = True
    needed = [False] * len(condensed.size)
    order = []
    for index, again in zip(reversed(plan), reversed(is_again), strict=True):
        operator = operators[index]
        if again and not any(needed[buffer] for buffer in operator.remakes):
            continue
        for buffer in operator.remakes if again else operator.makes:
            needed[buffer] = False
        for buffer in operator.reads:
            needed[buffer] = True
        order.append(index)
    return order[::-1]


def peak_bytes(condensed: Condensed, plan: Sequence[int]) -> int:
    """The highest live bytes of a plan if every value has a buffer: ``memory.py``'s rules on operators."""
    operators, size, boundary = condensed.operators, condensed.size, condensed.boundary
    change = [0] * (len(plan) + 1)
    last_use = [-1] * len(size)
    seen = [False] * len(operators)
    started, backward = 0, len(plan) if boundary else 0
    for step, index in enumerate(plan):
        operator = operators[index]
        again = seen[index]
        seen[index] = True
        for buffer in operator.reads:
            last_use[buffer] = step
        for buffer in operator.remakes if again else operator.makes:
            if last_use[buffer] >= 0 and not (condensed.pinned[buffer] and index < boundary):
                change[last_use[buffer] + 1] -= size[buffer]
            change[step] += size[buffer]
            last_use[buffer] = step
        if operator.scratch_bytes:
            change[step] += operator.scratch_bytes
            change[step + 1] -= operator.scratch_bytes
        if not again and index < boundary:
            started += 1
            backward = step + 1 if started == boundary else backward
    for buffer, step in enumerate(last_use):
        if step >= 0 and not condensed.pinned[buffer]:
            change[step + 1] -= size[buffer]
    if backward < len(plan):
        change[backward] += condensed.graph.tangent_bytes
    return max(itertools.accumulate(change[:-1]), default=0)
