"""Order: a better order of the operators, which costs no time.

``memory_order`` is the graph's own, but for this: an operator that frees at least what it allocates runs as
soon as all that it reads is there. Such are weight gradients, which free an activation and allocate less, and
sums of gradients, which end two lives and begin one. And, if the peak is lower so, one of the backward that
allocates more than all that it reads waits for its first reader, or for the end. Such are the gradients of
weights that are larger than the activations of a small batch. Effects and random numbers keep their order
among each other, and the backward begins where the forward has ended. O(n log n).

``moved`` is an order in which an operator that is drawn runs earlier, behind those that it needs. O(n).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

from fxremat.graph.nodes import Phase
from fxremat.search.condensed import Condensed
from fxremat.search.profile import peak_bytes

DRAWS = 30  # of an operator and how far it goes, until one may go


def memory_order(condensed: Condensed) -> tuple[int, ...]:
    """All operators once, in an order that frees early and, where that is lower, allocates late."""
    orders = (_Order(condensed, is_late).order() for is_late in (False, True))
    return min(orders, key=lambda order: peak_bytes(condensed, order))


def moved(condensed: Condensed, order: Sequence[int], chance: random.Random) -> tuple[int, ...] | None:
    """An order in which one operator runs earlier, behind those that it needs; None if none is drawn.

    Args:
        condensed: The graph.
        order: All operators once.
        chance: Draws the operator, and by how many others it goes: the more the rarer.
    """
    for _ in range(DRAWS if order else 0):
        place = chance.randrange(len(order))
        first = max(0, place - int(len(order) ** chance.random()))
        goes, passed, needed = list[int](), list[int](), {order[place]}
        for index in reversed(order[first : place + 1]):
            if index in needed:
                goes.append(index)
                needed.update(condensed.maker[buffer] for buffer in condensed.reads[index])
            else:
                passed.append(index)
        if passed and _may_pass(condensed, goes, passed):
            return (*order[:first], *reversed(goes), *reversed(passed), *order[place + 1 :])
    return None


def _may_pass(condensed: Condensed, goes: Sequence[int], passed: Sequence[int]) -> bool:
    """Whether operators may run before others, of whose results they need none."""
    operators, nodes = condensed.operators, condensed.graph.nodes
    if all(any(not operators[index].may_move for index in part) for part in (goes, passed)):
        return False
    in_backward = any(nodes[operators[index].members[0]].phase is Phase.BACKWARD for index in goes)
    return not in_backward or not any(operators[index].ends_forward for index in passed)


class _Order:
    """The growing order."""

    def __init__(self, condensed: Condensed, is_late: bool) -> None:
        self.condensed = condensed
        self.is_late = is_late  # whether what allocates waits
        self.operators = condensed.operators
        self.waits_for = [len(set(each.reads)) for each in self.operators]
        self.left: list[dict[int, None]] = [{} for _ in condensed.size]  # operators that have yet to read it
        for index, operator in enumerate(self.operators):
            for buffer in operator.reads:
                self.left[buffer][index] = None
        self.has_run = [False] * len(self.operators)
        self.found: list[int] = []
        self.gainful: list[tuple[int, int]] = []  # what frees at least what it allocates, most first

    def order(self) -> tuple[int, ...]:
        for index in range(len(self.operators)):
            if index == self.condensed.boundary:
                self.gainful.clear()
                for ready in range(index, len(self.operators)):
                    self._consider(ready)
            if not self.has_run[index] and not self._may_wait(index):
                self._run_with_operands(index)
            while self.gainful:
                _, best = heapq.heappop(self.gainful)
                if not self.has_run[best]:
                    self._run(best)
        for index in itertools.filterfalse(self.has_run.__getitem__, range(len(self.operators))):
            self._run_with_operands(index)
        return tuple(self.found)

    def _may_wait(self, index: int) -> bool:
        """Whether holding what an operator of the backward reads takes less than holding what it makes."""
        operator, size = self.operators[index], self.condensed.size
        if not self.is_late or index < self.condensed.boundary or not operator.may_move:
            return False
        held = sum(size[buffer] for buffer in operator.reads if not self.condensed.pinned[buffer])
        return sum(size[buffer] for buffer in operator.makes) > held

    def _run_with_operands(self, index: int) -> None:
        """Run an operator behind those of what it reads that wait."""
        tasks = [index]
        while tasks:
            makers = {self.condensed.maker[buffer] for buffer in self.operators[tasks[-1]].reads}
            waiting = [each for each in makers if not self.has_run[each]]
            tasks += sorted(waiting, reverse=True)
            if not waiting:
                task = tasks.pop()
                if not self.has_run[task]:
                    self._run(task)

    def _run(self, index: int) -> None:
        self.has_run[index] = True
        self.found.append(index)
        operator = self.operators[index]
        for buffer in operator.reads:
            del self.left[buffer][index]
            if len(self.left[buffer]) == 1:
                self._consider(next(iter(self.left[buffer])))
        for buffer in operator.makes:
            for reader in self.left[buffer]:
                self.waits_for[reader] -= 1
                self._consider(reader)

    def _consider(self, index: int) -> None:
        """Note an operator that is ready and gainful."""
        operator = self.operators[index]
        in_backward = len(self.found) >= self.condensed.boundary
        is_free = operator.may_move and in_backward == (index >= self.condensed.boundary)
        if self.has_run[index] or self.waits_for[index] or not is_free:
            return
        size, pinned = self.condensed.size, self.condensed.pinned
        allocated = sum(size[buffer] for buffer in operator.makes)
        last_read = [buffer for buffer in operator.reads if len(self.left[buffer]) == 1]
        freed = sum(size[buffer] for buffer in last_read if not pinned[buffer])
        if allocated <= freed:
            heapq.heappush(self.gainful, (allocated - freed, index))
