"""Plans of least time for all memory sizes at once, by a dynamic programme over blocks.

The forward is cut into blocks 0 .. n - 1 (``blocks.py``). C(s, t, m) is the least time that takes the input of
block s to the gradient of that input, with m bytes besides that input and what was live before. Either

    forwards to the input of a block j, which is held: C(j, t, ...), after it C(s, j - 1, ...); or
    the forward of s, of which an option keeps something: C(s + 1, t, ...), after it the backward of s.

Each case must also have room for the live bytes of what it runs itself. The recurrence is that of rotor
(Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, 2020), optimal for a chain among plans that hold what they
hold until its backward; with options as in Rockmate. Here an input may be several buffers, of which only
those count that are not held already, and gradients change what is free as the backward proceeds.

C depends on the shapes of blocks s .. t alone, so equal sequences of shapes are solved once. Bytes are rounded
to at most ``SLOTS`` sizes; the plans that come out are measured exactly. O(n^3 SLOTS), O(n^2 SLOTS) where all
blocks are equal. Left out: plans that drop a held value before its backward, or change the backward's order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.planners.blocks import Blocks, cuts, divide
from fxremat.planners.condensed import Condensed
from fxremat.planners.shapes import Option

SLOTS = 320  # memory sizes that are told apart, unless a few more make all bytes whole numbers of them
EXACT_SLOTS = 1200
FINER = 6  # a second table serves budgets below this part of the first one's, for which its units are coarse
MAX_WORK = 60e6  # additions in a table; bounds the planner's time
POINTS = 24  # plans that are made if no budgets are given
Bytes = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


class Plan(NamedTuple):
    """A plan with what it takes.

    Attributes:
        peak_bytes: Its highest live bytes, every value having a buffer.
        seconds: What its operators take.
        operators: The operators in execution order.
    """

    peak_bytes: int
    seconds: float
    operators: tuple[int, ...]


def plans(condensed: Condensed, budgets: Sequence[int] | None = None) -> list[Plan]:
    """Plans of little time for their memory.

    Args:
        condensed: The graph.
        budgets: Bytes that plans are wanted for; None: about ``POINTS`` between the least and the most that
            plans can use.

    Returns:
        By falling peak and rising time; for each budget that some plan fits, the fastest of those found.
    """
    if condensed.boundary == 0:
        return []
    tables = _tables(condensed)
    if budgets is not None:
        found = [plan for budget in budgets for table in tables for plan in table.fitting(budget)]
    else:
        found = [plan for table in tables for plan in table.spread(POINTS // len(tables))]
    return _undominated(found)


def _undominated(found: Iterable[Plan]) -> list[Plan]:
    best: list[Plan] = []
    for plan in sorted(found):
        if not best or plan.seconds < best[-1].seconds:
            best.append(plan)
    return best[::-1]


def _tables(condensed: Condensed) -> list[_Table]:
    blocks = _few_blocks(condensed)
    most = _keep_all_bytes(blocks)
    unit, slots = _unit(blocks, most)
    tables = [_Table(blocks, unit, slots)]
    if unit > _divisor(blocks):
        tables.append(_Table(blocks, *_unit(blocks, most // FINER)))
    return tables


def _few_blocks(condensed: Condensed) -> Blocks:
    """The graph in blocks, every so many of the narrow cuts being used that the table stays small."""
    firsts = cuts(condensed)
    for stride in itertools.count(1):
        blocks = divide(condensed, firsts[::stride])
        if len(blocks.kinds) == 1 or _work(blocks.kinds) * SLOTS <= MAX_WORK:
            return blocks
    raise AssertionError


def _work(kinds: Sequence[int]) -> int:
    """The summed lengths of all distinct sequences of shapes; stops where that is far too much."""
    total, ids = 0, _Intervals(kinds)
    for length in range(1, len(kinds) + 1):
        total += length * len(ids.distinct(length))
        if total * SLOTS > MAX_WORK:
            break
    return total


class _Intervals:
    """Numbers for sequences of shapes: equal sequences have one number. To be asked by growing length."""

    def __init__(self, kinds: Sequence[int]) -> None:
        self.kinds = kinds
        self.ids = [0] * len(kinds)  # of the sequences of the length before, by their first block
        self.known = 0

    def distinct(self, length: int) -> dict[int, int]:
        """For each number of a sequence of a length, the first block where it stands."""
        names: dict[tuple[int, int], int] = {}
        found: dict[int, int] = {}
        for first in range(len(self.kinds) - length + 1):
            name = (self.ids[first], self.kinds[first + length - 1])
            number = names.setdefault(name, self.known + len(names))
            self.ids[first] = number
            found.setdefault(number, first)
        self.known += len(names)
        return found


def _keep_all_bytes(blocks: Blocks) -> int:
    """What is free at the end, at most, if a plan recomputes nothing from some block on."""
    need = grown = most = 0
    for kind in reversed(blocks.kinds):
        shape = blocks.shapes[kind]
        option = shape.options[-1]
        need = max(need + option.kept_bytes, option.forward_bytes, option.backward_bytes + grown)
        grown += shape.grown_bytes
        most = max(most, need - grown)
    return most


def _sizes(blocks: Blocks) -> Bytes:
    """All bytes that are rounded, each as often as it counts."""
    found: list[int] = []
    for kind in blocks.kinds:
        shape = blocks.shapes[kind]
        found += [size for size, _ in shape.leaving]
        found += [abs(shape.grown_bytes), shape.advance.forward_bytes, shape.alone.backward_bytes]
        for option in shape.options:
            found += [option.kept_bytes, option.forward_bytes, option.backward_bytes]
    return np.array([size for size in found if size], dtype=np.int64)


def _divisor(blocks: Blocks) -> int:
    return math.gcd(*map(int, _sizes(blocks))) or 1


def _unit(blocks: Blocks, most: int) -> tuple[float, int]:
    """Bytes of a slot and their number: those between SLOTS / 2 and SLOTS that round best."""
    divisor = _divisor(blocks)
    if most <= divisor * EXACT_SLOTS:
        return divisor, most // divisor + 1
    sizes = _sizes(blocks)
    sizes = sizes[sizes <= most]
    coarsest = 2 * most / SLOTS
    large = sizes[sizes >= coarsest / 2]
    common = np.unique(large, return_counts=True)
    wholes = common[0][np.argsort(-common[1], kind="stable")[:8]]
    parts = [size / count for size in wholes for count in range(1, 65)]
    tried = [unit for unit in (*parts, *np.linspace(coarsest / 2, coarsest, 64))]
    tried = [float(unit) for unit in tried if coarsest / 2 <= unit <= coarsest]
    errors = [np.abs(np.rint(sizes / unit) * unit - sizes).sum() for unit in tried]
    unit = tried[int(np.argmin(errors))]
    return unit, int(most / unit) + 1


class _Table:
    """C and the choices behind it, for memory sizes 0 .. slots, in units.

    A size here is what is free when all of s .. t is done, so that C(s, j - 1) has the same size as C(s, t).
    """

    def __init__(self, blocks: Blocks, unit: float, slots: int) -> None:
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
        intervals = _Intervals(self.blocks.kinds)
        self.choices: list[npt.NDArray[np.int16]] = []
        self.size = np.arange(self.slots + 1)
        self.table = np.empty((0, self.slots + 1))
        self.wide = np.empty((0, 3 * (self.slots + 1)))  # none fits less than 0; no more than slots is used
        for length in range(1, self.count + 1):
            distinct = intervals.distinct(length)
            rows = np.arange(self.count - length + 1)
            self.ids[rows, rows + length - 1] = intervals.ids[: len(rows)]
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

    def _interval(self, s: int, t: int) -> tuple[Seconds, npt.NDArray[np.int16]]:
        """C(s, t, .) and for each size -1 - option, or how far the forward goes to the next held input."""
        best = np.full(self.slots + 1, np.inf)
        choice = np.zeros(self.slots + 1, dtype=np.int16)
        if s < t:
            best, choice = self._by_holding_input(s, t)
        for number, option in enumerate(self._options(s, t)):
            need, change, seconds = self._option(s, t, option)
            if need > self.slots:
                continue
            total = np.full(self.slots + 1 - need, seconds)
            if s < t:
                start = self.slots + 1 + min(change, self.slots + 1)
                total += self.wide[self.ids[s + 1, t], start + need : start + self.slots + 1]
            better = total <= best[need:]
            best[need:][better] = total[better]
            choice[need:][better] = -1 - number
        return best, choice

    def _options(self, s: int, t: int) -> tuple[Option, ...]:
        """The options of block s in front of the backward of the blocks behind it, up to t."""
        is_again = t < self.count - 1
        return (self.shapes[s].alone,) if s == t and is_again else self.shapes[s].options

    def _option(self, s: int, t: int, option: Option) -> tuple[int, int, float]:
        """The least size that an option needs, what it adds to the size for s + 1 .. t, and its own seconds."""
        shape = self.shapes[s]
        kept = option.kept_bytes if s < t else 0
        change = int(shape.grown_bytes) - kept
        grown = int(self.grown[t + 1] - self.grown[s])
        need = max(0, -grown, -change, option.backward_bytes - shape.grown_bytes)
        forward_seconds = 0.0
        if option is not shape.alone:
            need = max(need, option.forward_bytes - grown)
            forward_seconds = shape.seconds if t == self.count - 1 else option.again_seconds
        return self._units(need), self._units(change), forward_seconds + option.backward_seconds

    def _by_holding_input(self, s: int, t: int) -> tuple[Seconds, npt.NDArray[np.int16]]:
        """The best block whose input is held while the blocks behind it are solved."""
        slots, ahead = self.slots, slice(s + 1, t + 1)
        change = np.rint((self.grown[ahead] - self.grown[s] - self.added[s, ahead]) / self.unit)
        start = self.ids[ahead, t] * (3 * (slots + 1)) + slots + 1
        start += np.clip(change, -slots - 1, slots + 1).astype(np.int64)
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

    def _steps(self) -> list[int]:
        """The sizes at which a faster plan begins."""
        seconds = self.table[self.ids[0, -1]]
        least = int(np.isinf(seconds).sum())
        return [size for size in range(least, self.slots + 1) if size == least or seconds[size] < seconds[size - 1]]

    def spread(self, points: int) -> list[Plan]:
        """Plans that lie evenly on the curve of log seconds over log bytes."""
        steps = self._steps()
        if len(steps) > points:
            always = self.blocks.base_bytes + int(self.grown[-1])
            x = np.log(always + self.unit * (1 + np.array(steps)))
            y = np.log(self.table[self.ids[0, -1]][steps])
            spans = (x[-1] - x[0] or 1.0), (y[0] - y[-1] or 1.0)
            way = np.cumsum(np.hypot(np.diff(x, prepend=x[0]) / spans[0], np.diff(y, prepend=y[0]) / spans[1]))
            wanted = np.linspace(0.0, way[-1], points)
            steps = [steps[place] for place in dict.fromkeys(np.searchsorted(way, wanted).tolist())]
        return [self.plan(step) for step in steps]

    def fitting(self, budget: int) -> list[Plan]:
        """The fastest plan that fits a budget; the sizes are tried by bisection."""
        steps = self._steps()
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
            operators = tuple(_without_unread(condensed, _obedient(condensed, self._operators(memory))))
            self.made[memory] = Plan(peak_bytes(condensed, operators), condensed.seconds(operators), operators)
        return self.made[memory]

    def _operators(self, memory: int) -> list[int]:
        """The operators of the plan for a memory size."""
        order: list[int] = []
        todo: list[tuple[int, int, int, Option | None]] = [(0, self.count - 1, memory, None)]
        while todo:
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


def _obedient(condensed: Condensed, plan: Iterable[int]) -> list[int]:
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


def _without_unread(condensed: Condensed, plan: Sequence[int]) -> list[int]:
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
