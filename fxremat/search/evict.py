"""Evict: one run through the operators under a budget, dropping what is cheapest to have again.

The run is simulated. Where an operator's results do not fit, buffers are *evicted*, cheapest first; where an
operator reads an evicted buffer, it is computed again, with what that needs. The price of a buffer is

    (own seconds + seconds of the evicted buffers around it) / (bytes * distance to its next use ^ p)

The evicted buffers around it, connected by reads through nothing but evicted buffers, are what makes it dear
to have it again or makes others dear (Kirisame et al. 2021, *Dynamic Tensor Rematerialization*, whose
neighbourhood, kept in disjoint sets, this is). Unlike a runtime, a plan knows the next use. Buffers that
nothing but the recomputation of others needs stay until they are evicted as well.

It takes any graph, finds several recomputations of one value and recursion by itself, and needs
O(n log n) steps unless it thrashes, in which case it gives up.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

from fxremat.search.condensed import Condensed, Operator

MAX_RUNS = 4  # of an operator, on average, before a run is given up


def evict(
    condensed: Condensed,
    order: Sequence[int],
    budget: int,
    distance_power: float,
    weights: Sequence[float] | None = None,
    max_seconds: float = math.inf,
    anew: bool = False,
) -> tuple[int, ...] | None:
    """A plan whose peak is at most the budget, as the condensed graph counts it; None if the run fails.

    Args:
        condensed: The graph.
        order: All operators once, each behind what it reads, the forward first.
        budget: Bytes, tangents included.
        distance_power: p; 0 takes no account of when a buffer is needed next.
        weights: Factors of the operators' seconds in prices; 1 by default.
        max_seconds: The run is given up when the plan is going to take more.
        anew: Whether what the backward may write over is made again there: what the forward made stays.
    """
    if budget < condensed.after_bytes:
        return None
    return _Simulation(condensed, order, budget, distance_power, weights).plan(max_seconds, anew)


class _Simulation:
    """A simulated run. A buffer is resident, evicted, or neither: not made yet, or of no more use."""

    def __init__(
        self,
        condensed: Condensed,
        order: Sequence[int],
        budget: int,
        distance_power: float,
        weights: Sequence[float] | None,
    ) -> None:
        self.operators = condensed.operators
        self.reads, self.runs_at_most = condensed.reads, condensed.runs_at_most
        self.seconds, self.prices = condensed.each_seconds, condensed.worths
        if weights:
            self.prices = tuple(price * weight for price, weight in zip(self.prices, weights, strict=True))
        self.size, self.maker, self.pinned = condensed.size, condensed.maker, condensed.pinned
        self.is_once = condensed.is_once
        self.behind = condensed.behind
        self.order, self.boundary = order, condensed.boundary_of(order)
        self.budget, self.power = budget, distance_power
        self.tangent_bytes = condensed.graph.tangent_bytes
        count = len(self.size)
        self.resident = [False] * count
        self.evicted = [False] * count
        self.made_in_backward = [False] * count
        self.locks = [0] * count  # running operators that need it
        self.waiting = [0] * count  # evicted buffers whose computation reads it
        self.uses = list(map(list, condensed.uses(tuple(order))))  # places in the order, the next one last
        self.needed_at = [0] * count  # when the recomputation of others needs it, as far as is known
        self.runs = [0] * len(self.operators)
        self.around = _DisjointSets(count)
        self.queue: list[tuple[float, int]] = []
        self.parked: dict[int, list[float]] = {}  # prices of buffers in use, out of the queue for so long
        self.parked_queue: list[tuple[float, int]] = []  # the same by price, some of them not parked any more
        self.made_bytes, self.remade_bytes = condensed.made_bytes
        self.live = self.place = 0
        self.call: list[int] = []  # buffers that loops of the call under way have read
        self.in_call: set[int] = set()  # the same, each once
        self.longest = MAX_RUNS * len(order)  # what has run by now, if all that is left runs once
        self.order_run: list[int] = []
        self.seconds_left = math.inf  # for recomputations

    def plan(self, max_seconds: float, anew: bool = False) -> tuple[int, ...] | None:
        self.seconds_left = max_seconds - sum(self.seconds)
        self.longest -= len(self.order)
        for place, operator in enumerate(self.order):
            self.place = place
            self.longest += 1
            if self.place == self.boundary:
                self._begin_backward(anew)
            if not self._run_with_operands(operator) or len(self.order_run) > self.longest:
                return None
            if self.seconds_left < 0:
                return None
        return tuple(self.order_run)

    def _begin_backward(self, anew: bool) -> None:
        self.live += self.tangent_bytes
        later = self.order[self.place :] if anew else ()
        overwritten = {buffer for index in later for buffer in self.operators[index].overwrites}
        for buffer, maker in enumerate(self.maker):
            is_held = self.resident[buffer] and not self.pinned[buffer]
            is_made_again = self.operators[maker].must_repeat or buffer in overwritten
            if is_made_again and is_held and self._seconds_again(buffer) is not None:
                self._evict(buffer)

    # -- running

    def _run_with_operands(self, operator: int) -> bool:
        """Run an operator behind those whose results it needs and are not there."""
        resident, reads = self.resident, self.reads
        if self._lock(operator):
            return self._run(operator)
        tasks = [operator]
        while tasks:
            task = tasks[-1]
            for missing in reads[task]:
                if not resident[missing]:
                    break
            else:
                tasks.pop()
                if not self._run(task):
                    return False
                continue
            maker = self.maker[missing]
            if self.runs[maker] >= self.runs_at_most[maker] or len(tasks) > len(self.operators):
                return False
            tasks.append(maker)
            self._lock(maker)
        return True

    def _lock(self, operator: int) -> bool:
        """Hold what an operator reads until it has run; say whether it is there."""
        locks, resident, is_there = self.locks, self.resident, True
        for buffer in self.reads[operator]:
            locks[buffer] += 1
            is_there = is_there and resident[buffer]
        return is_there

    def _run(self, index: int) -> bool:
        operator = self.operators[index]
        is_again = self.runs[index] > 0
        made = operator.remakes if is_again else operator.makes
        if self.call and not operator.is_loop:
            self._end_call()
        needed = operator.scratch_bytes + (self.remade_bytes if is_again else self.made_bytes)[index]
        if operator.overwrites:
            needed -= self._overwritten_bytes(operator, is_again)
        if self.live + needed > self.budget and not self._make_room(needed, operator.reads):
            return False
        if len(self.order_run) > self.longest:
            return False
        self.runs[index] += 1
        self.order_run.append(index)
        uses, resident = self.uses, self.resident
        for buffer in made:
            if not resident[buffer] and (uses[buffer] or self._is_wanted(buffer)):
                self._make_resident(buffer)
        if is_again:
            self.seconds_left -= operator.seconds
        else:  # the run that the order asks for
            for buffer in operator.reads:
                uses[buffer].pop()
        self.call += operator.reads
        if operator.is_loop:
            self.in_call.update(operator.reads)
        else:
            self._end_call()
        return True

    def _overwritten_bytes(self, operator: Operator, is_again: bool) -> int:
        """Bytes of a buffer whose place the result takes: of this part, and needed by nobody else."""
        in_backward = self.place >= self.boundary
        own = sum(map(self.evicted.__getitem__, operator.makes))  # its results that wait for it
        for buffer in operator.overwrites:
            uses_left = len(self.uses[buffer]) - (not is_again)
            is_needed = (
                uses_left or self.waiting[buffer] > own or self.locks[buffer] > 1 or self.pinned[buffer]
            )
            if not is_needed and self.made_in_backward[buffer] == in_backward:
                return self.size[buffer]
        return 0

    def _end_call(self) -> None:
        locks, uses, parked = self.locks, self.uses, self.parked
        for buffer in self.call:
            locks[buffer] -= 1
            if locks[buffer]:
                continue
            if buffer in parked:
                self._unpark(buffer)
            if not uses[buffer]:
                self._release(buffer)
        self.call.clear()
        self.in_call.clear()

    def _is_wanted(self, buffer: int) -> bool:
        return bool(self.uses[buffer] or self.waiting[buffer] or self.locks[buffer] or self.pinned[buffer])

    def _make_resident(self, buffer: int) -> None:
        self.resident[buffer] = True
        self.made_in_backward[buffer] = self.place >= self.boundary
        self.live += self.size[buffer]
        if self.evicted[buffer]:
            self.evicted[buffer] = False
            self.around.leave(buffer, self._seconds(buffer))
            for operand in self.reads[self.maker[buffer]]:
                self.waiting[operand] -= 1
                if not self.uses[operand]:
                    self._release(operand)
        if not self.pinned[buffer] and not self.is_once[buffer] and self.size[buffer]:
            heapq.heappush(self.queue, (0.0, buffer))

    def _release(self, buffer: int) -> None:
        """Free a buffer of which nothing is known that needs it."""
        if self.resident[buffer] and not self._is_wanted(buffer):
            self.resident[buffer] = False
            self.live -= self.size[buffer]

    # -- evicting

    def _make_room(self, needed: int, reads: Sequence[int]) -> bool:
        """Evict until so many bytes are free; what waits for a recomputation if nothing else is left."""
        queue, resident, locks = self.queue, self.resident, self.locks
        while self.live + needed > self.budget and queue:
            price, buffer = queue[0]
            if resident[buffer] and not locks[buffer]:
                now = self._price(buffer)
                if now is not None and now > price:
                    heapq.heapreplace(queue, (now, buffer))
                    continue
                heapq.heappop(queue)
                if now is not None:
                    self._evict(buffer)
                continue
            heapq.heappop(queue)
            if resident[buffer]:
                self._park(buffer, price)
        if self.live + needed > self.budget:
            self._evict_parked(needed, reads)
        return self.live + needed <= self.budget

    def _evict_parked(self, needed: int, reads: Sequence[int]) -> None:
        """Evict, of what waits for a recomputation, the cheapest until so many bytes are free."""
        stays = []
        while self.live + needed > self.budget and self.parked_queue:
            entry = price, buffer = heapq.heappop(self.parked_queue)
            if price not in self.parked.get(buffer, ()):
                continue  # it was queued again since
            if buffer in reads or buffer in self.in_call or self._price(buffer) is None:
                stays.append(entry)
                continue
            self.parked[buffer].remove(price)
            self._evict(buffer)
        for entry in dict.fromkeys(stays):
            heapq.heappush(self.parked_queue, entry)

    def _park(self, buffer: int, price: float) -> None:
        """Take a buffer in use out of the queue."""
        self.parked.setdefault(buffer, []).append(price)
        heapq.heappush(self.parked_queue, (price, buffer))

    def _unpark(self, buffer: int) -> None:
        """Queue a buffer again that is in use no more, or gone."""
        for price in self.parked.pop(buffer):
            heapq.heappush(self.queue, (price, buffer))

    def _price(self, buffer: int) -> float | None:
        """What evicting a buffer that has a size costs per byte; None if it could not be had again."""
        seconds = self._seconds_again(buffer)
        if seconds is None:
            return None
        distance = max(1, self._next_use(buffer) - self.place)
        return float(seconds / (self.size[buffer] * distance**self.power))

    def _seconds_again(self, buffer: int) -> float | None:
        """What it takes to have a buffer once more when it is evicted; None if it could not be had."""
        maker, evicted, resident, find = self.maker[buffer], self.evicted, self.resident, self.around.find
        if self.runs[maker] >= self.runs_at_most[maker]:
            return None
        seconds = self.prices[maker]
        around: dict[int, None] = {}
        for operand in self.reads[maker]:
            if evicted[operand]:
                around[find(operand)] = None
            elif not resident[operand]:
                lost = self._lost(operand)
                if lost is None:
                    return None
                seconds += sum(map(self._seconds, lost))
        for made in self.behind[buffer]:
            if evicted[made]:
                around[find(made)] = None
        if around:
            seconds += sum(map(self.around.seconds.__getitem__, around))
        return seconds

    def _seconds(self, buffer: int) -> float:
        return self.prices[self.maker[buffer]]

    def _next_use(self, buffer: int) -> int:
        uses, needed_at, first = self.uses[buffer], self.needed_at[buffer], len(self.order)
        if uses and uses[-1] > self.place:
            first = uses[-1]
        return needed_at if self.place < needed_at < first else first

    def _lost(self, buffer: int) -> list[int] | None:
        """A buffer that is gone and was not evicted, with those that it needs; None if it can't be had."""
        resident, evicted = self.resident, self.evicted
        found: dict[int, None] = {}
        stack = [buffer]
        while stack:
            each = stack.pop()
            if resident[each] or evicted[each] or each in found:
                continue
            maker = self.maker[each]
            if self.runs[maker] >= self.runs_at_most[maker]:
                return None
            found[each] = None
            stack.extend(self.reads[maker])
        return list(found)

    def _evict(self, buffer: int) -> None:
        if buffer in self.parked:
            self._unpark(buffer)
        self.resident[buffer] = False
        self.live -= self.size[buffer]
        needed_at = self._next_use(buffer)
        evicted, resident, waiting = self.evicted, self.resident, self.waiting
        stack = [buffer]
        while stack:
            each = stack.pop()
            if evicted[each]:
                continue
            evicted[each] = True
            operands = self.reads[self.maker[each]]
            near = (*operands, *self.behind[each])
            neighbours = list(itertools.compress(near, map(evicted.__getitem__, near)))
            self.around.enter(each, self._seconds(each), neighbours)
            for operand in operands:
                waiting[operand] += 1
                self.needed_at[operand] = needed_at
                if not resident[operand]:
                    stack.append(operand)


class _DisjointSets:
    """Connected evicted buffers with their seconds. Sets are never split, as Kirisame et al. have it."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))
        self.seconds = [0.0] * count

    def find(self, element: int) -> int:
        parent = self.parent
        while (above := parent[element]) != element:
            parent[element] = element = parent[above]
        return element

    def enter(self, element: int, seconds: float, neighbours: Iterable[int]) -> None:
        """An element becomes part of its neighbours' set."""
        root = self.find(element)
        self.seconds[root] += seconds
        for neighbour in neighbours:
            other = self.find(neighbour)
            if other != root:
                self.parent[other] = root
                self.seconds[root] += self.seconds[other]

    def leave(self, element: int, seconds: float) -> None:
        """An element counts no more; its set stays what it is."""
        root = self.find(element)
        self.seconds[root] = max(0.0, self.seconds[root] - seconds)
