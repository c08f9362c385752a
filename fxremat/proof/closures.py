"""Closures: the least seconds of a choice of what to keep and what to run again, bounded from below.

A *network* has vertices for values that may be needed and for nodes that may run again. An edge says what
it takes that its head is chosen (stands on the sink's side of a cut) and its tail is not: seconds, bytes,
or that it can't be. A cut is thus a choice, with seconds and bytes of its own; the question is the least
seconds of a choice within some bytes. With a *price*, seconds per byte, in place of the limit, the answer
is a minimum cut (Dinic 1970); what it takes, less the price of the limit, is no more than the seconds
asked for, whatever the price (Lagrangian relaxation). The best price is sought by cutting planes: each cut
found bounds what the others can give (Kelley 1960).

Capacities are integers, rounded down, and what is forbidden is only dear, so the bound errs on the safe
side. At most ``MAX_CUTS`` cuts per limit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts are imported when they are first used, which takes longer than all of fxremat

SOURCE, SINK = 0, 1
MAX_CUTS = 12
NEAR = 1 - 1e-4  # of what a price can give at most: enough to stop there
# Capacities are 32-bit integers. A flow stays below FLOW, and below what is forbidden even when added to it.
FLOW = 2**29
FORBIDDEN = 2**30

Edge = tuple[int, int, float, int]  # tail, head, seconds (inf: forbidden), bytes


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """What a cut takes."""

    seconds: float
    bytes: int


class Network:
    """A network, with what the cuts found so far have shown.

    Args:
        size: How many vertices, ``SOURCE`` and ``SINK`` included.
        edges: The edges; several between the same vertices add up.
    """

    def __init__(self, size: int, edges: Iterable[Edge]) -> None:
        tails, heads, seconds, sizes = zip(*edges, (SOURCE, SINK, 0.0, 0), strict=True)
        pairs = np.array(tails, dtype=np.int64) * size + np.array(heads, dtype=np.int64)
        unique, place = np.unique(pairs, return_inverse=True)
        self.size = size
        self.tails, self.heads = np.divmod(unique, size)
        self.seconds = np.bincount(place, np.array(seconds, dtype=np.float64))
        self.bytes = np.bincount(place, np.array(sizes, dtype=np.float64))
        self.starts = np.searchsorted(self.tails, np.arange(size + 1)).astype(np.int32)
        keep_all = self.heads == SINK
        self.choices = [Choice(float(self.seconds[keep_all].sum()), int(self.bytes[keep_all].sum()))]
        self.bounds: dict[float, float] = {}  # what every choice takes at least, by the price for a byte

    @functools.cached_property
    def least_bytes(self) -> int:
        """Bytes that every choice takes."""
        capacities = np.where(np.isinf(self.seconds), np.inf, self.bytes)
        choice, bound = self._cut(capacities, self.choices[0].bytes)
        self.choices.append(choice)
        return math.ceil(bound)

    def least_seconds(self, limit: float) -> float:
        """Seconds that every choice within so many bytes takes; inf if there is none."""
        if self.least_bytes > limit:
            return math.inf
        for _ in range(MAX_CUTS):
            best = self._best_price(limit)
            if best is None or best[0] in self.bounds:
                break
            price, most = best
            choice, bound = self._cut(self.seconds + price * self.bytes, most + price * limit)
            self.choices.append(choice)
            self.bounds[price] = bound
            if bound - price * limit >= most * NEAR:
                break
        return max(0.0, *(bound - price * limit for price, bound in self.bounds.items()), 0.0)

    def _best_price(self, limit: float) -> tuple[float, float] | None:
        """The price at which the choices known allow the most beyond the limit's, and how much that is.

        None where no choice within the limit is known, so that any price would do.
        """
        price = 0.0
        current = min(self.choices, key=lambda choice: (choice.seconds, choice.bytes))
        while current.bytes > limit:
            smaller = [choice for choice in self.choices if choice.bytes < current.bytes]
            if not smaller:
                return None
            price, _, current = min(
                ((each.seconds - current.seconds) / (current.bytes - each.bytes), each.bytes, each)
                for each in smaller
            )
        return price, current.seconds + price * (current.bytes - limit)

    def _cut(self, capacities: npt.NDArray[np.float64], most: float) -> tuple[Choice, float]:
        """A cut that is least but for rounding, and what all cuts have at least; ``most`` is what one has."""
        scale = 2.0 ** math.floor(math.log2(FLOW / most)) if most > 0 else 1.0
        rounded = np.minimum(np.floor(capacities * scale), FORBIDDEN).astype(np.int32)
        shape = self.size, self.size
        matrix = scipy.sparse.csr_array((rounded, self.heads.astype(np.int32), self.starts), shape=shape)
        found = scipy.sparse.csgraph.maximum_flow(matrix, SOURCE, SINK)
        rest = matrix - found.flow
        rest.eliminate_zeros()
        is_kept = np.zeros(self.size, dtype=bool)
        reached = scipy.sparse.csgraph.breadth_first_order(rest, SOURCE, return_predecessors=False)
        is_kept[reached] = True
        is_cut = is_kept[self.tails] & ~is_kept[self.heads]
        choice = Choice(float(self.seconds[is_cut].sum()), int(self.bytes[is_cut].sum()))
        return choice, float(found.flow_value) / scale
