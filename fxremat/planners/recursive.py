"""Recursion (Chen et al. 2016, Sec. 4.4): memory that grows with the logarithm of the depth.

A segment is one bulk operator whose gradient runs a graph of its own, so that the scheme applies inside it
again. k cuts split the forward into k + 1 parts of about equal bytes, k cuts split each part, and so on down
to the last candidate. What crosses a cut of level l has mirror count l: it is dropped and computed l more
times, each time for the sake of one part of the level above. Everything else has the level of the part that
it stands in. With k = 1 a chain of n layers takes log2(n) values and log2(n) forwards.

O(n) per plan and level. Left out: plans of fewer levels, between this and the one level of ``sublinear``.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.predict.problem import Problem, Solution
from fxremat.search.cuts import ForwardLives, crossing, forward_lives, narrow_places

CUTS_PER_PART = (1, 2, 3)


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The plans of 1, 2 and 3 cuts per part, for few narrow candidates and for many, least peak first."""
    found = [solution for cuts in CUTS_PER_PART for solution in with_cuts(problem, cuts)]
    return tuple(sorted(found, key=lambda solution: (solution.peak_bytes, solution.seconds)))


def with_cuts(problem: Problem, cuts_per_part: int) -> tuple[Solution, ...]:
    """The plans of so many cuts per part, least peak first; ``k`` in the paper."""
    solutions = [
        problem.mirror(counts, "recursive") for counts in mirror_counts(problem.graph, cuts_per_part)
    ]
    return tuple(sorted(solutions, key=lambda solution: (solution.peak_bytes, solution.seconds)))


def mirror_counts(graph: JointGraph, cuts_per_part: int) -> list[dict[str, int]]:
    """The distinct mirror counts of so many cuts per part, one for each set of narrow candidates."""
    lives = forward_lives(graph)
    found: list[dict[str, int]] = []
    for places in narrow_places(lives):
        counts = counts_of(graph, lives, split(graph, places, cuts_per_part))
        if counts not in found:
            found.append(counts)
    return found


def split(graph: JointGraph, places: Sequence[int], cuts_per_part: int) -> dict[int, int]:
    """The level of each place at which the forward is cut: 0 for the first cuts, 1 for those of the parts...

    Args:
        graph: The graph.
        places: Candidate positions, ascending.
        cuts_per_part: How many cuts split a part; at least 1.
    """
    bytes_made = [graph.node_bytes(position) for position in range(graph.num_inputs, graph.boundary)]
    bytes_before = [0, *itertools.accumulate(bytes_made)]
    volume = [bytes_before[place - graph.num_inputs + 1] for place in places]
    levels: dict[int, int] = {}
    parts = [(0, len(places), 0, bytes_before[-1], 0)]
    while parts:
        first, end, low, high, level = parts.pop()
        if first == end:
            continue
        chosen = _even(volume, first, end, low, high, cuts_per_part)
        levels.update((places[at], level) for at in chosen)
        firsts, ends = (first, *(at + 1 for at in chosen)), (*chosen, end)
        lows, highs = (low, *(volume[at] for at in chosen)), (*(volume[at] for at in chosen), high)
        parts.extend((*part, level + 1) for part in zip(firsts, ends, lows, highs, strict=True))
    return levels


def _even(
    volume: Sequence[int], first: int, end: int, low: int, high: int, cuts_per_part: int
) -> Sequence[int]:
    """The candidates of [first, end) nearest to where equal parts of the bytes would end."""
    chosen: dict[int, None] = {}
    for cut in range(1, cuts_per_part + 1):
        target = low + (high - low) * cut / (cuts_per_part + 1)
        behind = min(bisect.bisect_left(volume, target, first, end), end - 1)
        before = max(behind - 1, first)
        chosen[min(before, behind, key=lambda at: abs(volume[at] - target))] = None
    return sorted(chosen)


def counts_of(graph: JointGraph, lives: ForwardLives, levels: Mapping[int, int]) -> dict[str, int]:
    """Mirror counts: the lowest level of a cut that a value crosses, else one more than that of its part."""
    level_of: dict[int, int] = {}
    for level in sorted(set(levels.values()), reverse=True):
        cuts = sorted(place for place, at in levels.items() if at <= level)
        level_of.update(dict.fromkeys(crossing(lives, cuts), level))
    ordered = sorted(levels)
    counts = {}
    for position in range(graph.num_inputs, graph.boundary):
        node = graph.nodes[position]
        at = bisect.bisect_left(ordered, position)
        around = [levels[ordered[side]] for side in (at - 1, at) if 0 <= side < len(ordered)]
        kept = [level_of[storage] for storage in node.creates if storage in level_of]
        counts[node.name] = min(kept, default=max(around, default=0) + 1)
    return counts
