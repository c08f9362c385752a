"""Squeeze: let go of values that a plan holds, and have them again, until it fits a peak by the whole model.

``evict`` decides that on the condensed graph, whose bytes are estimates where a compiler fuses kernels. Here
a plan that has been lowered is looked at: which buffers are live where it is too high, and how long each of
them lies between two uses. It may be let go of there, and is then computed again before the second, from what
is live by then; so is what it is computed from where that isn't. Cheapest first, by seconds per byte, until
no step seems too high; what it comes to only the model knows, and whether that obeys what the user ordered
only the problem (``refine.py``). Linear in steps and reads, and for each buffer that is let go of in all that
could be.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fxremat.graph.schedule import operator_steps
from fxremat.memory.instances import storage_instances
from fxremat.memory.liveness import profile_of
from fxremat.predict.cost import seconds_by_step
from fxremat.predict.problem import Problem, Solution

MOST_AGAIN = 64  # nodes that are run to have one buffer again
NOISE = 1.0  # standard deviation of the logarithm of a price's factor


class Gap(NamedTuple):
    """Where a buffer lies between two uses.

    Attributes:
        instance: The storage instance.
        first: The first step at which it need not be live.
        end: The step before which it is computed again.
        bytes: Its size.
        use: The place among its uses of the one at ``end``.
    """

    instance: int
    first: int
    end: int
    bytes: int
    use: int


class Again(NamedTuple):
    """What is run to have a buffer again.

    Attributes:
        nodes: The nodes.
        seconds: What they take.
        reads: The storage instances that must be live for them.
    """

    nodes: frozenset[int] = frozenset()
    seconds: float = math.inf
    reads: frozenset[int] = frozenset()


NEVER = Again()  # a buffer that can't be had again, or takes too much


class Squeeze:
    """A plan, and what it could let go of.

    Args:
        problem: The problem.
        solution: The plan.
    """

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self.graph, (self.binding, self.lowering) = problem.graph, problem.lowered(solution)
        graph, binding, lowering = self.graph, self.binding, self.lowering
        self.live = profile_of(graph, binding, lowering).live_bytes
        self._spent = seconds_by_step(graph, binding, lowering, problem.costs)
        self._owners, self._values = lowering.instances or storage_instances(graph, binding)
        self._occurrences: dict[int, list[int]] = defaultdict(list)  # the steps of each node
        for step, node in enumerate(binding.nodes):
            self._occurrences[node].append(step)
        self._uses = self._all_uses()
        self._death = [max((until for _, until, _ in uses), default=0) for uses in self._uses]
        self._returned = {instance for step in binding.outputs for instance in self._values[step]}
        for instance in self._returned:
            self._death[instance] = len(binding.nodes)
        self.gaps = list(self._all_gaps())

    def within(self, limit: int, chance: random.Random | None = None) -> tuple[int, ...] | None:
        """The nodes of the plan without what seems to be too much for a peak; None if that is not found.

        Args:
            limit: Bytes, tangents included.
            chance: Draws noise for prices; None for those that they are.
        """
        noise = [chance.lognormvariate(0, NOISE) if chance else 1.0 for _ in self.gaps]
        gaps = np.array(self.gaps, dtype=np.int64).reshape(-1, len(Gap._fields))
        instance, first, end, size = gaps.T[:4]
        live, chosen = self.live.copy(), dict[int, Gap]()  # by instance
        again: dict[int, Again] = {}  # by place among the gaps
        seconds = np.full(len(gaps), -1.0)  # of these; below 0 where it isn't known
        is_open = np.ones(len(gaps), dtype=bool)
        readers: dict[int, list[int]] = defaultdict(list)  # the places of gaps that an instance is read for
        runs: dict[int, set[int]] = defaultdict(set)  # what is run before a step
        while (excess := np.maximum(live - limit, 0)).any():
            too_much = np.concatenate(([0], np.cumsum(excess)))
            too_high = np.concatenate(([0], np.cumsum(excess > 0)))
            gain = np.minimum(too_much[end] - too_much[first], size * (too_high[end] - too_high[first]))
            gain[~is_open] = 0
            for place in np.flatnonzero((gain > 0) & (seconds < 0)).tolist():
                found = again[place] = self._again(self.gaps[place], chosen)
                seconds[place] = found.seconds * noise[place]
                for read in found.reads:
                    readers[read].append(place)
            price = np.where(gain > 0, seconds, math.inf) / np.maximum(gain, 1)
            if not np.isfinite(price).any():
                return None
            best = int(price.argmin())
            gap = self.gaps[best]
            chosen[gap.instance] = gap
            live[gap.first : gap.end] -= gap.bytes
            runs[gap.end] |= again[best].nodes
            seconds[readers[gap.instance]] = -1.0  # they are to be found anew
            is_open &= instance != gap.instance
            for read in again[best].reads:
                is_open &= (instance != read) | (gap.end < first) | (end <= gap.end)
        return self._with(runs)

    def _with(self, runs: Mapping[int, set[int]]) -> tuple[int, ...]:
        """The plan's nodes in their order, with others that run before some steps."""
        nodes = self.binding.nodes
        starts = operator_steps(self.graph, nodes)
        before: dict[int, set[int]] = defaultdict(set)
        for step, more in runs.items():
            before[bisect.bisect_right(starts, step) - 1] |= more
        steps = itertools.pairwise((*starts, len(nodes)))
        return tuple(
            node
            for place, (first, end) in enumerate(steps)
            for node in (*sorted(before.get(place, ())), *nodes[first:end])
        )

    def _all_uses(self) -> list[list[tuple[int, int, int]]]:
        """For each instance who reads it: the step, until when, and the step whose value is read."""
        lowering = self.lowering
        uses: list[list[tuple[int, int, int]]] = [[] for _ in self._owners]
        for step, (until, reads) in enumerate(zip(lowering.read_until, self.binding.reads, strict=True)):
            for read in (each for each in reads if each is not None):
                for instance in self._values[read]:
                    uses[instance].append((step, until, read))
        for read, until in lowering.read_later:
            for instance in self._values[read]:
                uses[instance].append((read, until, read))
        return [sorted(each) for each in uses]

    def _all_gaps(self) -> Iterator[Gap]:
        """Between two uses of each buffer, the first of which is that it is made."""
        graph, lowering = self.graph, self.lowering
        joined = {*lowering.held_in, *lowering.held_in.values()}
        for instance, ((owner, storage), uses) in enumerate(zip(self._owners, self._uses, strict=True)):
            is_buffer = lowering.materialised[owner] and graph.storage_bytes[storage] > 0
            if not is_buffer or owner in joined or instance in self._returned:
                continue
            until = lowering.runs_at[owner]
            for place, (step, used_at, _) in enumerate(uses):
                if step > until + 1:
                    yield Gap(instance, until + 1, step, graph.storage_bytes[storage], place)
                until = max(until, used_at)

    def _again(self, gap: Gap, chosen: Mapping[int, Gap]) -> Again:
        """What is run to have a buffer again, with some that are let go of."""
        graph, nodes = self.graph, self.binding.nodes
        todo = [read for _, _, read in self._uses[gap.instance][gap.use :]]
        seen, reads, seconds = set[int](), set[int](), 0.0
        while todo:
            step = todo.pop()
            node = graph.nodes[nodes[step]]
            if nodes[step] in seen:
                continue
            if node.keep is not None or len(seen) == MOST_AGAIN:
                return NEVER
            seen.add(nodes[step])
            seconds += self._spent[step]
            for operand in node.operands:
                if operand >= graph.num_inputs:
                    source = self._latest(operand, gap.end)
                    if node.leader is None and self._is_live(source, gap, chosen):
                        reads.update(self._values[source])
                    else:
                        todo.append(source)
        return Again(frozenset(seen), seconds, frozenset(reads))

    def _latest(self, node: int, step: int) -> int:
        """The step at which a node has run before another."""
        steps = self._occurrences[node]
        return steps[bisect.bisect_left(steps, step) - 1]

    def _is_live(self, step: int, gap: Gap, chosen: Mapping[int, Gap]) -> bool:
        """Whether a value can be read where a buffer is had again."""
        for instance in self._values[step]:
            is_stored = self.lowering.materialised[self._owners[instance][0]]
            if not is_stored or self._death[instance] < gap.end or instance == gap.instance:
                return False
            other = chosen.get(instance)
            if other is not None and other.first <= gap.end < other.end:
                return False
        return bool(self._values[step])
