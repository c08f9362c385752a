"""Table: the least time of a chain of blocks for each memory size, by a dynamic programme.

The forward is cut into blocks 0 .. n - 1 (``blocks.py``). C(s, t, m) is the least time that takes the input
of block s to the gradient of that input, with m bytes besides that input and what was live before. Either

    forwards to the input of a block j, which is held: C(j, t, ...), after it C(s, j - 1, ...); or
    the forward of s, of which an option keeps something: C(s + 1, t, ...), after it the backward of s.

Each case must also have room for the live bytes of what it runs itself. The recurrence is that of rotor
(Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, 2020), optimal for a chain among plans that hold what they
hold until its backward; with options as in Rockmate. Here an input may be several buffers, of which only
those count that are not held already, and gradients change what is free as the backward proceeds.

C depends on the shapes of blocks s .. t alone, so equal sequences of shapes are solved once. Bytes are
rounded to units; the plans that come out are measured exactly. O(n^3) times the sizes for n blocks, O(n^2) if
all are equal. Left out: plans that drop a held value before its backward, or change the backward's order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fxremat.search.blocks import Division
from fxremat.search.profile import Plan
from fxremat.search.replay import obedient, without_unread
from fxremat.search.shapes import Option

Bytes = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Choices = npt.NDArray[np.int16]

MAX_RUNS, MAX_RUNS_EACH = 20_000, 8  # longer plans are left out; of all operators, or on average of each


class Intervals:
    """Numbers for sequences of shapes: equal sequences have one number. To be asked by growing length."""

    def __init__(self, kinds: Sequence[int]) -> None:
        self.kinds = np.array(kinds, dtype=np.int64)
        self.base = max(kinds, default=0) + 1
        self.ids = np.zeros(len(kinds), dtype=np.int64)  # of the sequences of the length before
        self.known = 0

    def distinct(self, length: int) -> dict[int, int]:
        """For each number of a sequence of a length, the first block where it stands."""
        rows = len(self.kinds) - length + 1
        names = self.ids[:rows] * self.base + self.kinds[length - 1 :]
        _, firsts, numbers = np.unique(names, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        rank = np.empty_like(order)
        rank[order] = np.arange(self.known, self.known + len(order))
        self.ids = rank[numbers]
        self.known += len(order)
        return dict(zip(range(self.known - len(order), self.known), firsts[order].tolist(), strict=True))


class Table:
    """C and the choices behind it, for memory sizes 0 .. slots, in units.

    A size here is what is free when all of s .. t is done, so that C(s, j - 1) has the same size as C(s, t).
    """

    def __init__(self, blocks: Division, unit: float, slots: int) -> None:
        self.blocks, self.unit, self.slots = blocks, unit, slots
        self.count = len(blocks.kinds)
        self.shapes = [blocks.shapes[kind] for kind in blocks.kinds]
        self.grown = np.concatenate([[0], np.cumsum([shape.grown_bytes for shape in self.shapes])])
        self.first_seconds = np.concatenate([[0.0], np.cumsum([shape.seconds for shape in self.shapes])])
        again = [shape.advance.again_seconds for shape in self.shapes]
        self.again_seconds = np.concatenate([[0.0], np.cumsum(again)])
        self.added, self.forward = self._crossing()
        self.ids = np.zeros((self.count, self.count), dtype=np.int64)
        self.made: dict[int, Plan] = {}
        self._solve()

    def _units(self, size: float) -> int:
        """Bytes in slots, to the nearest."""
        return round(size / self.unit)

    def _crossing(self) -> tuple[Bytes, Bytes]:
        """For blocks s < j what holding the input of j adds to that of s, and what going there takes."""
        count = self.count
        made = np.zeros((count, count), dtype=np.int64)  # by a block, and crossing into another
        for block, shape in enumerate(self.shapes):
            for size, span in shape.leaving:
                made[block, block + 1 : block + span + 1] += size
        added = made[::-1].cumsum(axis=0)[::-1]  # at (s, j): made in s, s + 1, ...
        live = added + np.array([shape.advance.forward_bytes for shape in self.shapes])
        for block, shape in enumerate(self.shapes):
            live[: max(0, block - shape.reach + 1), block] -= shape.dying_bytes
            live[block, block] = shape.advance.forward_bytes
        highest = np.maximum.accumulate(np.triu(live), axis=1)
        return added, np.roll(highest, 1, axis=1)

    def _solve(self) -> None:
        """Fill the table by growing length."""
        intervals = Intervals(self.blocks.kinds)
        self.choices: list[Choices] = []
        self.size = np.arange(self.slots + 1)
        self.table = np.empty((0, self.slots + 1))
        self.wide = np.empty((0, 3 * (self.slots + 1)))  # none fits less than 0; no more than slots is used
        for length in range(1, self.count + 1):
            distinct = intervals.distinct(length)
            rows = np.arange(self.count - length + 1)
            self.ids[rows, rows + length - 1] = intervals.ids
            if intervals.known > len(self.table):
                self._enlarge(2 * intervals.known)
            for number, first in distinct.items():
                seconds, choice = self._interval(first, first + length - 1)
                self.table[number] = seconds
                self.wide[number, self.slots + 1 : 2 * (self.slots + 1)] = seconds
                self.wide[number, 2 * (self.slots + 1) :] = seconds[-1]
                self.choices.append(choice)

    def _enlarge(self, rows: int) -> None:
        more = rows - len(self.table)
        self.table = np.concatenate([self.table, np.full((more, self.slots + 1), np.inf)])
        self.wide = np.concatenate([self.wide, np.full((more, 3 * (self.slots + 1)), np.inf)])

    def _interval(self, s: int, t: int) -> tuple[Seconds, Choices]:
        """C(s, t, .) and for each size -1 - option, or how far the forward goes to the next held input."""
        best = np.full(self.slots + 1, np.inf)
        choice = np.zeros(self.slots + 1, dtype=np.int16)
        if s < t:
            best, choice = self._by_holding_input(s, t)
        for number, option in enumerate(self._options(s, t)):
            need, change, seconds = self._option(s, t, option)
            if need > self.slots:
                continue
            total: Seconds | float = seconds
            if s < t:
                start = self.slots + 1 + min(change, self.slots + 1)
                total = self.wide[self.ids[s + 1, t], start + need : start + self.slots + 1] + seconds
            better = total <= best[need:]
            np.copyto(best[need:], total, where=better)
            np.copyto(choice[need:], -1 - number, where=better)
        return best, choice

    def _options(self, s: int, t: int) -> tuple[Option, ...]:
        """The options of block s in front of the backward of the blocks behind it, up to t."""
        is_again = t < self.count - 1
        return (self.shapes[s].alone,) if s == t and is_again else self.shapes[s].options

    def _option(self, s: int, t: int, option: Option) -> tuple[int, int, float]:
        """The least size that an option needs, what it adds to the size behind it, and its own seconds."""
        shape = self.shapes[s]
        kept = option.kept_bytes if s < t else 0
        change = shape.grown_bytes - kept
        grown = int(self.grown[t + 1] - self.grown[s])
        need = max(0, -grown, -change, option.backward_bytes - shape.grown_bytes)
        forward_seconds = 0.0
        if option is not shape.alone:
            need = max(need, option.forward_bytes - grown)
            forward_seconds = shape.seconds if t == self.count - 1 else option.again_seconds
        return self._units(need), self._units(change), forward_seconds + option.backward_seconds

    def _by_holding_input(self, s: int, t: int) -> tuple[Seconds, Choices]:
        """The best block whose input is held while the blocks behind it are solved."""
        slots, ahead = self.slots, slice(s + 1, t + 1)
        change = np.rint((self.grown[ahead] - self.grown[s] - self.added[s, ahead]) / self.unit)
        start = self.ids[ahead, t] * (3 * (slots + 1)) + slots + 1
        start += np.minimum(np.maximum(change, -slots - 1), slots + 1).astype(np.int64)
        total = self.wide.ravel().take(start[:, None] + self.size)
        total += self.table.take(self.ids[s, s:t], axis=0)
        need = np.rint((self.forward[s, ahead] - (self.grown[t + 1] - self.grown[s])) / self.unit)
        highest = int(min(max(need[-1], 0), slots + 1))
        total[:, :highest][self.size[:highest] < need[:, None]] = np.inf
        prefix = self.first_seconds if t == self.count - 1 else self.again_seconds
        total += (prefix[ahead] - prefix[s])[:, None]
        best = total.argmin(axis=0)
        return total[best, self.size], (best + 1).astype(np.int16)

    # -- plans

    @functools.cached_property
    def steps(self) -> list[int]:
        """The sizes at which a faster plan begins, but for the least ones if their plans are too long."""
        seconds = self.table[self.ids[0, -1]]
        least = int(np.isinf(seconds).sum())
        steps = [
            size
            for size in range(least, self.slots + 1)
            if size == least or seconds[size] < seconds[size - 1]
        ]
        longest = max(MAX_RUNS, MAX_RUNS_EACH * len(self.blocks.condensed.operators))
        return list(itertools.dropwhile(lambda size: len(self._operators(size, longest)) > longest, steps))

    def curve(self) -> list[tuple[float, float, int]]:
        """Bytes, seconds and size of all plans: as the table has them, bytes corrected by the two ends'."""
        steps = self.steps
        if not steps:
            return []
        always = self.blocks.base_bytes + int(self.grown[-1])
        ends = steps[0], steps[-1]
        errors = [self.plan(size).peak_bytes - always - self.unit * size for size in ends]
        correction = np.interp(steps, ends, errors)
        seconds = self.table[self.ids[0, -1]]
        return [
            (always + self.unit * size + float(error), float(seconds[size]), size)
            for size, error in zip(steps, correction, strict=True)
        ]

    def fitting(self, budget: int) -> list[Plan]:
        """The fastest plan that fits a budget; the sizes are tried by bisection."""
        steps = self.steps
        low, high = 0, len(steps)
        found: list[Plan] = []
        while low < high:
            middle = (low + high) // 2
            plan = self.plan(steps[middle])
            if plan.peak_bytes <= budget:
                found.append(plan)
                low = middle + 1
            else:
                high = middle
        return sorted(found, key=lambda plan: plan.seconds)[:1]

    def plan(self, memory: int) -> Plan:
        """The plan for a memory size, measured."""
        if memory not in self.made:
            condensed = self.blocks.condensed
            operators = without_unread(condensed, obedient(condensed, self._operators(memory)))
            self.made[memory] = Plan.of(condensed, operators, apart=True)
        return self.made[memory]

    def _operators(self, memory: int, longest: float = math.inf) -> list[int]:
        """The operators of the plan for a memory size; if they are more than ``longest``, the first ones."""
        order: list[int] = []
        todo: list[tuple[int, int, int, Option | None]] = [(0, self.count - 1, memory, None)]
        while todo and len(order) <= longest:
            s, t, size, option = todo.pop()
            if option is not None:
                order += self.blocks.operators(s, option.backward)
                continue
            choice = int(self.choices[self.ids[s, t]][size])
            if choice < 0:
                option = self._options(s, t)[-1 - choice]
                if option is not self.shapes[s].alone:
                    self._forward(s, option, t == self.count - 1, order)
                todo.append((s, s, 0, option))
                if s < t:
                    todo.append((s + 1, t, min(size + self._option(s, t, option)[1], self.slots), None))
                continue
            j = s + choice
            for block in range(s, j):
                self._forward(block, self.shapes[block].advance, t == self.count - 1, order)
            change = round((self.grown[j] - self.grown[s] - self.added[s, j]) / self.unit)
            todo.append((s, j - 1, size, None))
            todo.append((j, t, min(size + change, self.slots), None))
        return order

    def _forward(self, block: int, option: Option, is_first: bool, order: list[int]) -> None:
        local = range(self.shapes[block].forward) if is_first else option.again
        order += self.blocks.operators(block, local)
