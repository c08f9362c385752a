"""Retain: hold a buffer where there is room, and drop the recomputation that had it again.

A plan that fits a budget has slack: between two runs of an operator the budget may leave room for its
buffers all the way. Then the second run is dropped, and so are the runs that only served it. Dearest first,
by seconds per byte, until nothing changes. The profile of the plan (``profile.py``) says where there is room.

O(runs) per recomputation tried, but what is looked at and changed of them are arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxremat.search.condensed import Condensed
from fxremat.search.flat import Integers
from fxremat.search.profile import profile

MAX_ROUNDS = 4
PIECE = 1024  # runs whose highest bytes are known together


def retain(condensed: Condensed, plan: Sequence[int], budget: int) -> tuple[int, ...]:
    """The plan with as few recomputations as the budget has room for.

    Args:
        condensed: The graph.
        plan: A plan.
        budget: Bytes, tangents included. Where a plan takes more nothing is held.
    """
    if len(set(plan)) == len(plan):
        return tuple(plan)
    runs = Runs(condensed, plan)
    for _ in range(MAX_ROUNDS):
        before = len(runs.plan())
        for run in runs.by_worth():
            if runs.is_there[run] and runs.fits_without(run, budget):
                runs.drop(run)
        if len(runs.plan()) == before:
            break
    return runs.plan()


class Runs:
    """A plan that can lose runs: who reads whom, and the live bytes at each run.

    A run that was dropped keeps its place, so that places mean the same throughout.
    """

    def __init__(self, condensed: Condensed, plan: Sequence[int]) -> None:
        self.condensed = condensed
        self.operators = [condensed.operators[index] for index in plan]
        self.indices = list(plan)
        self.worths = condensed.worths
        self.is_there = [True] * len(plan)
        self.previous: list[int | None] = []  # the run of the same operator before
        self.reads: list[dict[int, int]] = []  # buffer: the run that made it
        self.readers: list[dict[int, list[int]]] = []  # buffer made: the runs that read it, in order
        self.reads_of: list[int] = []  # how often runs read what a run made
        self._resolve()
        found = profile(condensed, plan)
        self.live, self.boundary, self.overwritten = Levels(found.live), found.boundary, found.overwritten
        self.first: list[int] = found.first.tolist()  # for each run, that with which its call begins
        self.last: list[int] = found.last.tolist()  # and ends
        self.returned = set(found.returned)  # runs with the buffers of theirs that last to the end
        self.obstacle = 0  # the run at which there was no room the last time

    def _resolve(self) -> None:
        latest = [0] * len(self.condensed.size)
        latest_run: dict[int, int] = {}
        readers = self.readers
        for run, operator in enumerate(self.operators):
            read = {}
            for buffer in operator.reads:
                read[buffer] = source = latest[buffer]
                readers[source][buffer].append(run)
                self.reads_of[source] += 1
            self.reads.append(read)
            before = latest_run.get(self.indices[run])
            self.previous.append(before)
            latest_run[self.indices[run]] = run
            made: dict[int, list[int]] = {}
            for buffer in operator.makes if before is None else operator.remakes:
                made[buffer] = []
                latest[buffer] = run
            readers.append(made)
            self.reads_of.append(0)

    def _taken_by(self, source: int, buffer: int) -> int | None:
        """The run that takes the place of a buffer, if any."""
        by = self.readers[source][buffer]
        return by[-1] if by and self.overwritten.get(by[-1]) == (source, buffer) else None

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes."""
        return int(self.live.values.max(initial=0))

    def plan(self) -> tuple[int, ...]:
        """The runs that are left."""
        return tuple(index for index, is_there in zip(self.indices, self.is_there, strict=True) if is_there)

    def death(self, run: int, buffer: int) -> int:
        """The last run at which a buffer of a run is live."""
        if (run, buffer) in self.returned:
            return len(self.operators) - 1
        by = self.readers[run][buffer]
        return self.last[by[-1]] if by else self.last[run]

    def by_worth(self) -> list[int]:
        """The recomputations, those that take the most seconds per byte first, what serves them included."""

        size = self.condensed.size

        def worth(run: int) -> tuple[float, int]:
            held = 0
            for buffer, by in self.readers[run].items():
                if by:
                    held += size[buffer]
            return (-self._seconds(run) / held if held else -np.inf, run)

        again = [r for r, before in enumerate(self.previous) if before is not None and self.is_there[r]]
        return sorted(again, key=worth)

    def _seconds(self, run: int) -> float:
        """Seconds of a run and of the recomputations that serve it alone."""
        total, stack = 0.0, [run]
        while stack:
            each = stack.pop()
            total += self.worths[self.indices[each]]
            for source in self.reads[each].values():
                if self.reads_of[source] == 1 and self.previous[source] is not None:
                    stack.append(source)
        return total

    def fits_without(self, run: int, budget: int) -> bool:
        """Whether what a run makes could be held since it was last made."""
        before = self._before(run)
        operator = self.operators[run]
        if operator.must_repeat and before < self.boundary <= run:
            return False
        returned = self.returned
        needed = [buffer for buffer, by in self.readers[run].items() if by or (run, buffer) in returned]
        if not needed:
            return True
        made = self.readers[before]
        for buffer in needed:
            if buffer not in made:
                return False
            taken = self._taken_by(before, buffer)
            if taken is not None:
                most = budget - self.condensed.size[buffer]
                if self.live.above(self.first[taken], self.last[taken] + 1, most) is not None:
                    return False
        if len(needed) == 1:
            first, size = self.death(before, needed[0]) + 1, self.condensed.size[needed[0]]
            return self.first[run] <= first or self._has_room(first, self.first[run], budget - size)
        gaps = sorted((self.death(before, buffer) + 1, self.condensed.size[buffer]) for buffer in needed)
        held = 0
        for (first, size), (end, _) in zip(gaps, [*gaps[1:], (run, 0)], strict=True):
            held += size
            last = max(first, min(end, self.first[run]))
            if last > first and not self._has_room(first, last, budget - held):
                return False
        return True

    def _is_needed(self, run: int, buffer: int) -> bool:
        """Whether anything reads a buffer of a run, or returns it."""
        return bool(self.readers[run][buffer]) or (run, buffer) in self.returned

    def _has_room(self, first: int, last: int, at_most: int) -> bool:
        """Whether so many bytes at most are live at the runs of a range, its end left out."""
        if first <= self.obstacle < last and self.live.values[self.obstacle] > at_most:
            return False
        found = self.live.above(first, last, at_most)
        self.obstacle = self.obstacle if found is None else found
        return found is None

    def _before(self, run: int) -> int:
        """The run of the same operator before that is still there."""
        before = self.previous[run]
        assert before is not None, "only a recomputation has a run before"
        return before if self.is_there[before] else self._before(before)

    def drop(self, run: int) -> None:
        """Leave a recomputation out, and then what nobody reads any more."""
        before = self._before(run)
        for buffer, by in self.readers[run].items():
            size, birth = self.condensed.size[buffer], self.first[run]
            if not self._is_needed(run, buffer):
                self._change(birth, self.last[run], -size)
                continue
            self._give_back(before, buffer)
            self._give_back(run, buffer)
            first, last = self.death(before, buffer) + 1, self.death(run, buffer)
            self._change(first, birth - 1, size)
            self._change(birth, min(first - 1, last), -size)  # where both were held
            if (run, buffer) in self.returned:
                self.returned.remove((run, buffer))
                self.returned.add((before, buffer))
            self.readers[before][buffer] = sorted(self.readers[before][buffer] + by)
            self.reads_of[before] += len(by)
            for reader in by:
                self.reads[reader][buffer] = before
        self._forget(run)

    def _give_back(self, source: int, buffer: int) -> None:
        """Let no run take the place of a buffer that lives longer now, or was made elsewhere."""
        taken = self._taken_by(source, buffer)
        if taken is not None:
            del self.overwritten[taken]
            self._change(self.first[taken], self.last[taken], self.condensed.size[buffer])

    def _forget(self, run: int) -> None:
        """Take a run out whose buffers are all somebody else's by now, or nobody's."""
        self.is_there[run] = False
        self._change(run, run, -self.operators[run].scratch_bytes)
        for buffer, source in self.reads[run].items():
            last = self.death(source, buffer)
            self.readers[source][buffer].remove(run)
            self.reads_of[source] -= 1
            self._change(self.death(source, buffer) + 1, last, -self.condensed.size[buffer])
            is_idle = not any(self._is_needed(source, made) for made in self.readers[source])
            if self.previous[source] is not None and is_idle and self.is_there[source]:
                for made in self.readers[source]:
                    self._change(self.first[source], self.last[source], -self.condensed.size[made])
                self._forget(source)

    def _change(self, first: int, last: int, size: int) -> None:
        if last >= first:
            self.live.change(first, last, size)


class Levels:
    """The live bytes at each run, which change by ranges. Of each piece it is known what they don't exceed.

    Attributes:
        values: The bytes.
    """

    def __init__(self, values: Integers) -> None:
        self.values = values
        self._bounds = np.array([values[at : at + PIECE].max() for at in range(0, len(values), PIECE)])

    def change(self, first: int, last: int, size: int) -> None:
        """Add bytes at the runs of a range, its last one included."""
        self.values[first : last + 1] += size
        if size > 0:
            self._bounds[first // PIECE : last // PIECE + 1] += size

    def above(self, first: int, end: int, at_most: int) -> int | None:
        """A run of a range, its end left out, with more bytes than these; None if there is none."""
        start, stop = -(-first // PIECE), end // PIECE  # the pieces that are all in it
        if start >= stop:
            return self._above(first, end, at_most)
        for piece in (start + np.flatnonzero(self._bounds[start:stop] > at_most)).tolist():
            found = self._above(piece * PIECE, (piece + 1) * PIECE, at_most)
            if found is not None:
                return found
            self._bounds[piece] = self.values[piece * PIECE : (piece + 1) * PIECE].max()
        before = self._above(first, start * PIECE, at_most)
        return self._above(stop * PIECE, end, at_most) if before is None else before

    def _above(self, first: int, end: int, at_most: int) -> int | None:
        if first >= end:
            return None
        highest = first + int(self.values[first:end].argmax())
        return highest if self.values[highest] > at_most else None
