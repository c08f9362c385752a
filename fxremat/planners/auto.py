"""The plan with the least time that fits the budget, among all at hand.

A *skeleton* is a set of mirror counts with a low peak: each plan of ``sublinear``. Between a skeleton and
keeping everything lies a road: the mirrored values ordered by the seconds that keeping one saves per byte
that it holds, dearest first, later ones first among equals because their bytes are freed first. A point on
the road keeps the first k of them. Peak rises and time falls along it, nearly monotonically, so bisecting
the largest gaps in peak draws the curve with few evaluations. The plans of ``drop_cheap``, ``recursive`` and
``revolve`` are points besides, the last two where the curve ends in the least memory.

The frontier of all evaluated points is independent of any budget, hence a smaller budget never gives a
higher peak. Work is bounded in steps, not in seconds, so the same graph gives the same plan everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fxremat.planners import drop_cheap, min_cut, recursive, revolve, sublinear
from fxremat.planners.base import Problem, Solution
from fxremat.planners.cuts import crossing, forward_lives, mirror_everything_but

SKELETONS = 3  # skeletons of lowest peak from which roads start
MAX_STEPS = 300_000  # schedule steps evaluated on all roads together; bounds the planner's time
MIN_POINTS, MAX_POINTS = 6, 24  # points on a road, however large or small the graph is


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The default, which serves no budget at all, then the frontier by falling peak."""
    default = _default_plan(problem)
    found = [default, problem.identity("auto"), *drop_cheap.plan(problem)]
    found += (*recursive.plan(problem), *revolve.plan(problem))
    skeletons = _skeletons(problem)
    found += [solution for _, solution in skeletons]
    points = max(MIN_POINTS, MAX_STEPS // (len(skeletons[:SKELETONS]) * max(1, len(problem.graph.nodes))))
    for counts, solution in skeletons[:SKELETONS]:
        found += _road(problem, counts, solution, min(points, MAX_POINTS))
    return (default, *pareto(found))


def baseline_plan(problem: Problem) -> Solution:
    """What the user has without us: under Inductor PyTorch's min-cut, else what a checkpoint policy says.

    Without us nothing is written in place that the program does not write in place.
    """
    return _default_plan(replace(problem, fusion="none") if problem.fusion == "inplace" else problem)


def _default_plan(problem: Problem) -> Solution:
    if problem.fusion == "inductor":
        return min_cut.plan(problem)[0]
    wished = {node.name: 1 for node in problem.graph.nodes if node.wish == "recompute"}
    return problem.mirror(wished, "keep_all")


def pareto(solutions: Iterable[Solution]) -> list[Solution]:
    """Those that no other beats in both peak and time: peak strictly falling, time strictly rising."""
    best: list[Solution] = []
    for solution in sorted(solutions, key=lambda s: (s.peak_bytes, s.seconds)):
        if not best or solution.seconds < best[-1].seconds:
            best.append(solution)
    return best[::-1]


def _skeletons(problem: Problem) -> list[tuple[Mapping[str, int], Solution]]:
    """Mirror counts of the sublinear plans with their solutions, lowest peak first."""
    lives = forward_lives(problem.graph)
    found = []
    for cuts in sublinear.segmentations(problem.graph, lives):
        counts = mirror_everything_but(problem.graph, crossing(lives, cuts))
        found.append((counts, problem.mirror(counts, "auto")))
    return sorted(found, key=lambda pair: (pair[1].peak_bytes, pair[1].seconds))


def _road(problem: Problem, counts: Mapping[str, int], start: Solution, points: int) -> list[Solution]:
    """Solutions between a skeleton and keeping everything, by bisecting the largest gap in peak."""
    order = _worth_keeping(problem, counts)

    def at(kept: int) -> Solution:
        dropped = order[kept:]
        return problem.mirror(dict.fromkeys(dropped, 1), "auto")

    solved = {0: start, len(order): at(len(order))}
    for _ in range(points):
        gap = _largest_gap(solved)
        if gap is None:
            break
        solved[gap] = at(gap)
    return list(solved.values())


def _largest_gap(solved: Mapping[int, Solution]) -> int | None:
    """The middle of the two neighbours that differ most in peak; None when no gap is left."""
    kept = sorted(solved)
    gaps = [
        (abs(solved[low].peak_bytes - solved[high].peak_bytes), high - low, (low + high) // 2)
        for low, high in itertools.pairwise(kept)
        if high - low > 1
    ]
    return max(gaps)[2] if gaps else None


def _worth_keeping(problem: Problem, counts: Mapping[str, int]) -> list[str]:
    """The mirrored values: as the user wishes, then those whose keeping saves the most seconds per byte."""
    graph = problem.graph
    wishes = ("save", "", "recompute")

    def worth(name: str) -> tuple[int, float, int]:
        index = graph.index[name]
        size = graph.node_bytes(index)
        seconds = problem.costs.of_node(graph, index)
        return wishes.index(graph.nodes[index].wish), -seconds / size if size else 0.0, -index

    mirrored = [
        name for name, count in counts.items() if count and graph.nodes[graph.index[name]].leader is None
    ]
    return sorted((name for name in mirrored if graph.node_bytes(graph.index[name])), key=worth) + [
        name for name in mirrored if not graph.node_bytes(graph.index[name])
    ]
