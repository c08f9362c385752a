"""Stages: the plans of a condensed graph that keep its order, as a mixed-integer programme.

Terms:
    stage: what runs from behind the first run of one operator to the first run of the next, its *own*.
    point: a run that a stage may have: of its own operator, or a mirror of one that stands before that.
    claim: whether a buffer is there at some point of a stage, for a reader behind it or for the next stage.

In each stage every operator before the stage's own may run once more, in the graph's order: the matrix R of
Jain et al. 2020 (*Checkmate*). Between two readers a buffer is there or is not, so that it has one claim for
each reader of a stage and one for the next stage. Once the runs are decided the least claims follow and are
whole numbers, and so is known what dies where: the runs alone are decisions, n^2 / 2 for n operators. The
bytes at each point are a sum of claims and runs, and those that ``memory/liveness.py`` counts.

Left out are plans in another order, with two mirrors of an operator in one stage, with mirrors of backward
operators, and with mirrors behind the boundary of what is returned. O(n^2) variables in as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import scipy  # its parts are imported when they are first used, which takes longer than all of fxremat

from fxremat.search.condensed import Condensed

Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class Sum:
    """A constant and multiples of variables."""

    constant: float = 0.0
    terms: dict[int, float] = field(default_factory=dict)

    def add(self, other: Sum, factor: float = 1.0) -> None:
        """Add a multiple of another sum."""
        self.constant += factor * other.constant
        for variable, number in other.terms.items():
            self.terms[variable] = self.terms.get(variable, 0.0) + factor * number


ONE = Sum(1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Programme:
    """Variables from 0 to 1 that stand for a plan if ``rows @ x <= limits``.

    Attributes:
        condensed: The graph.
        mirrors: For each mirror, its stage, its operator and its variable. These must be whole numbers.
        rows: What holds of runs and claims.
        limits: The right sides.
        sizes: The bytes at each point, as far as they depend on the variables.
        least_bytes: The bytes at each point that do not.
        seconds: What each variable takes.
    """

    condensed: Condensed
    mirrors: tuple[tuple[int, int, int], ...]
    rows: scipy.sparse.csr_array
    limits: Array
    sizes: scipy.sparse.csr_array
    least_bytes: Array
    seconds: Array

    def plan(self, values: Sequence[float] | Array) -> tuple[int, ...]:
        """The plan that values of the variables stand for."""
        chosen: list[list[int]] = [[] for _ in self.condensed.operators]
        for stage, operator, variable in self.mirrors:
            if values[variable] > 0.5:
                chosen[stage].append(operator)
        return tuple(run for own, again in enumerate(chosen) for run in (*sorted(again), own))


def programme(condensed: Condensed) -> Programme:
    """The programme of the plans that keep a condensed graph's order."""
    return _Builder(condensed).build()


class _Builder:
    """Makes variables and rows, stage by stage."""

    def __init__(self, condensed: Condensed) -> None:
        self.condensed = condensed
        self.operators = condensed.operators
        self.boundary = condensed.boundary_of(range(len(self.operators)))  # the first stage of the backward
        self.readers: list[list[int]] = [[] for _ in condensed.size]
        for index, operator in enumerate(self.operators):
            for buffer in operator.reads:
                self.readers[buffer].append(index)
        self.repeated: list[list[int]] = []  # of each stage, the operators that may run again
        self.needed: list[set[int]] = []  # at the start of each stage, what may still be read
        self._look_back()
        self.seconds: list[float] = []
        self.rows: list[Sum] = []  # each at most 0
        self.memory: list[Sum] = []
        self.starts: list[dict[int, Sum]] = [self._starts(stage) for stage in range(len(self.operators) + 1)]
        self.mirrors: dict[tuple[int, int], int] = {}

    def _look_back(self) -> None:
        """Find out, from the end, which mirrors may have a reader, and until when buffers may."""
        later: set[int] = set()
        self.needed.append(later)
        for stage in reversed(range(len(self.operators))):
            if stage == self.boundary - 1:
                later = later | {b for b, is_pinned in enumerate(self.condensed.pinned) if is_pinned}
            found = set(self.operators[stage].reads) | later
            repeated = []
            for index in reversed(range(stage)):
                operator = self.operators[index]
                if self._may_repeat(index, stage) and not found.isdisjoint(operator.remakes):
                    repeated.append(index)
                    found.update(operator.reads)
            self.repeated.append(repeated[::-1])
            self.needed.append(found)
            later = found
        self.repeated.reverse()
        self.needed.reverse()

    def _may_repeat(self, index: int, stage: int) -> bool:
        operator = self.operators[index]
        is_returned = any(self.condensed.pinned[buffer] for buffer in operator.makes)
        return operator.runs_at_most > 1 and not (is_returned and stage >= self.boundary)

    def _variable(self, seconds: float = 0.0) -> Sum:
        self.seconds.append(seconds)
        return Sum(terms={len(self.seconds) - 1: 1.0})

    def _at_most(self, *parts: tuple[float, Sum]) -> None:
        """Demand that a sum of multiples is not positive, unless no variable is in it."""
        row = Sum()
        for factor, part in parts:
            row.add(part, factor)
        if row.terms:
            self.rows.append(row)

    def _starts(self, stage: int) -> dict[int, Sum]:
        """The claims of what may be there when a stage begins."""
        found = {}
        for buffer, maker in enumerate(self.condensed.maker):
            if maker >= stage:
                continue
            if self.condensed.pinned[buffer] and stage >= self.boundary:
                found[buffer] = ONE
            elif buffer in self.needed[stage] and not self._is_renewed(buffer, stage):
                found[buffer] = self._variable()
        return found

    def _is_renewed(self, buffer: int, stage: int) -> bool:
        """Whether the user forbids to hold a buffer at the start of a stage."""
        maker = self.operators[self.condensed.maker[buffer]]
        return stage == self.boundary and maker.must_repeat and buffer in maker.remakes

    # -- a stage

    def build(self) -> Programme:
        """All stages."""
        for stage in range(len(self.operators)):
            self._stage(stage)
        self._limit_mirrors()
        rows, constants = self._matrix(self.rows)
        sizes, least = self._matrix(self.memory)
        mirrors = tuple((*point, variable) for point, variable in self.mirrors.items())
        seconds = np.array(self.seconds)
        return Programme(self.condensed, mirrors, rows, -constants, sizes, least, seconds)

    def _stage(self, stage: int) -> None:
        runs: dict[int, Sum] = {}
        for index in self.repeated[stage]:
            runs[index] = self._variable(self.operators[index].seconds)
            self.mirrors[stage, index] = len(self.seconds) - 1
        runs[stage] = ONE
        tangents = float(self.condensed.graph.tangent_bytes if stage >= self.boundary else 0)
        live = {point: Sum(tangents) for point in runs}
        for point, run in runs.items():
            live[point].add(run, self.operators[point].scratch_bytes)
        for buffer, maker in enumerate(self.condensed.maker):
            if maker <= stage:
                self._live_through(stage, buffer, runs, live)
        self.memory += live.values()

    def _live_through(self, stage: int, buffer: int, runs: dict[int, Sum], live: dict[int, Sum]) -> None:
        """Claim a buffer for its readers in a stage, and count it at each point."""
        maker, size = self.condensed.maker[buffer], self.condensed.size[buffer]
        start = self.starts[stage].get(buffer, Sum())
        run = runs.get(maker, Sum())
        is_made = maker == stage or buffer in self.operators[maker].remakes
        there = Sum()
        there.add(start)
        there.add(run if is_made else Sum())
        if maker < stage and is_made:
            self._at_most((1.0, there), (-1.0, ONE))  # a mirror takes the place of what is there
        claim = self.starts[stage + 1].get(buffer, Sum())
        readers = {reader for reader in self.readers[buffer] if reader in runs}
        for point in reversed(runs):
            if point > maker:
                claim = self._claim(claim, runs[point]) if point in readers else claim
                live[point].add(claim, size)
            else:
                live[point].add(there if point == maker else start, size)
        self._at_most((1.0, claim), (-1.0, there))

    def _claim(self, later: Sum, run: Sum) -> Sum:
        """What is no less than a claim further down and than the run of a reader."""
        if later is ONE or run is ONE:
            return ONE
        if not later.terms:
            return run
        claim = self._variable()
        self._at_most((1.0, later), (-1.0, claim))
        self._at_most((1.0, run), (-1.0, claim))
        return claim

    def _limit_mirrors(self) -> None:
        """As often as the user allows."""
        for index, operator in enumerate(self.operators):
            again = [variable for (_, each), variable in self.mirrors.items() if each == index]
            if len(again) >= operator.runs_at_most:
                self.rows.append(Sum(1.0 - operator.runs_at_most, dict.fromkeys(again, 1.0)))

    def _matrix(self, sums: Sequence[Sum]) -> tuple[scipy.sparse.csr_array, Array]:
        entries = [
            (row, variable, number)
            for row, each in enumerate(sums)
            for variable, number in each.terms.items()
        ]
        rows, columns, numbers = zip(*entries, strict=True) if entries else ((), (), ())
        shape = (len(sums), len(self.seconds))
        matrix = scipy.sparse.csr_array((np.array(numbers, dtype=float), (rows, columns)), shape=shape)
        return matrix, np.array([each.constant for each in sums])
