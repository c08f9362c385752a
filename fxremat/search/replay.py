"""Replay: plans that others made, as the condensed graph has them: obedient, and without what nobody reads.

Linear in runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fxremat.search.condensed import Condensed
from fxremat.search.profile import lives


def followed(condensed: Condensed, nodes: Iterable[int]) -> tuple[int, ...]:
    """The plan that a schedule of nodes stands for: its operators in its order, free nodes left out."""
    place = {operator.members[0]: index for index, operator in enumerate(condensed.operators)}
    plan = obedient(condensed, [place[node] for node in nodes if node in place])
    return tuple(without_unread(condensed, plan))


def obedient(condensed: Condensed, plan: Iterable[int]) -> list[int]:
    """The plan without runs that are too many, and with those that must be repeated in the backward."""
    operators, must_repeat = condensed.operators, condensed.must_repeat
    plan = list(plan)
    if not must_repeat and (np.bincount(plan, minlength=len(operators)) <= condensed.flat.runs_at_most).all():
        return plan
    runs = [0] * len(operators)
    order: list[int] = []
    boundary = condensed.boundary_of(plan)

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

    for place, index in enumerate(plan):
        if runs[index] >= operators[index].runs_at_most:
            continue
        if must_repeat and place >= boundary:
            repeat(index)
        run(index)
    return order


def without_unread(condensed: Condensed, plan: Sequence[int]) -> list[int]:
    """The plan without repetitions that nothing reads."""
    operators, found = condensed.operators, lives(condensed, plan)
    is_needed = ~found.is_again
    is_needed[found.run[found.is_read]] = True
    if is_needed.all():
        return list(plan)
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
