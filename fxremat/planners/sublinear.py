"""The sublinear plan (Chen et al. 2016, Sec. 4.3): Algorithm 3 with Appendix A's search for its budget.

Algorithm 3 walks the forward, adds up bytes, and cuts at the first candidate behind ``segment_bytes``. What
crosses a cut is kept, everything else has mirror count 1. The paper takes its candidates from the user; here
they are the narrow places of the forward (``search/cuts.py``). Appendix A's search tries six budgets around
sqrt(x * y), x being the bytes kept and y those of the largest segment with a budget of 0; the plan with the
least *exact* peak is the best. Unlike the authors' code, y counts the trailing segment too.

O(n) per budget. Left out: the weight of an operator's time, which ``auto`` takes into account.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fxremat.graph.joint import JointGraph
from fxremat.predict.problem import Problem, Solution
from fxremat.search.cuts import ForwardLives, crossing, forward_lives, mirror_everything_but, narrow_places

GRID = 6  # points of Appendix A's search


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The plans of the search, least peak first."""
    solutions = [problem.mirror(counts, "sublinear") for counts in mirror_counts(problem.graph)]
    return tuple(sorted(solutions, key=lambda solution: (solution.peak_bytes, solution.seconds)))


def mirror_counts(graph: JointGraph) -> Iterator[dict[str, int]]:
    """The mirror counts of each segmentation that the search tries."""
    lives = forward_lives(graph)
    for cuts in segmentations(graph, lives):
        yield mirror_everything_but(graph, crossing(lives, cuts))


def segmentations(graph: JointGraph, lives: ForwardLives) -> list[tuple[int, ...]]:
    """The distinct sets of cuts that the search tries, for few narrow candidates and for many."""
    found: dict[tuple[int, ...], None] = {(): None}
    for places in narrow_places(lives):
        for segment_bytes in budgets(graph, lives, places):
            found[algorithm_3(graph, lives, places, segment_bytes)[0]] = None
    return list(found)


def budgets(graph: JointGraph, lives: ForwardLives, places: Sequence[int]) -> list[float]:
    """Appendix A's grid: 0, and six points on [B0 / sqrt 2, sqrt 2 * B0] with B0 = sqrt(x * y)."""
    _, kept_bytes, largest_bytes = algorithm_3(graph, lives, places, 0)
    centre = math.sqrt(kept_bytes * largest_bytes)
    return [0.0, *(centre * 2 ** (step / (GRID - 1) - 0.5) for step in range(GRID))]


def algorithm_3(
    graph: JointGraph, lives: ForwardLives, places: Sequence[int], segment_bytes: float
) -> tuple[tuple[int, ...], int, int]:
    """Cut greedily at the first candidate behind ``segment_bytes``.

    Returns:
        The cuts; x, the bytes that cross them; y, the bytes of the largest segment.
    """
    candidate = set(places)
    width_at = dict(zip(lives.positions, lives.widths, strict=True))
    cuts: list[int] = []
    running = kept = largest = 0
    for position in range(graph.num_inputs, graph.boundary):
        running += graph.node_bytes(position)
        if position in candidate and running > segment_bytes:
            kept += width_at[position]
            largest = max(largest, running)
            running = 0
            cuts.append(position)
    return tuple(cuts), kept, max(largest, running)
