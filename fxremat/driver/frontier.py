"""What a model can be trained for: its frontier, as a table and as JSON.

A *point* is a plan that no other of the planner's beats in both predicted peak and predicted time. The
*baseline* is the step without fxremat, as the same cost and memory models predict it. Every budget is
served by a point; the least budget that a point serves lies above its peak where a margin is left free
(``pipeline.least_budget``).

Linear in the points' schedules, besides the planner's own time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from fxremat.driver.pipeline import choose, least_budget, make_problem, solve
from fxremat.graph.joint import JointGraph
from fxremat.options.options import Budget, GivenPlanner, memory_model, resolve_budget
from fxremat.predict.problem import Problem, Solution, pareto
from fxremat.report.values import mib
from fxremat.search.baseline import baseline_plan

__all__ = ["Frontier", "Point", "make_frontier"]


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of the frontier, or the baseline; all figures are predicted.

    Attributes:
        peak_bytes: The peak.
        budget_bytes: The least budget that this plan serves.
        seconds: The time of a step.
        saved_bytes: Bytes held from the forward to the backward.
        recomputed_nodes: How many nodes run again, each time counted.
        planner: Which planner made it.
        is_asked_for: Whether it serves the budget that was asked for.
    """

    peak_bytes: int
    budget_bytes: int
    seconds: float
    saved_bytes: int
    recomputed_nodes: int
    planner: str
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True)
class Frontier:
    """The points of one graph beside its baseline.

    Attributes:
        graph_name: Which graph.
        compiler: ``"inductor"`` or ``"eager"``.
        num_nodes: Nodes of the joint graph.
        planning_seconds: How long planning took.
        baseline: The step without fxremat.
        points: Peak strictly falls, time strictly rises.
    """

    graph_name: str
    compiler: str
    num_nodes: int
    planning_seconds: float
    baseline: Point
    points: tuple[Point, ...]

    def time_ratio(self, point: Point) -> float:
        """The time of a point against that of the baseline."""
        return point.seconds / self.baseline.seconds if self.baseline.seconds else 1.0

    def peak_ratio(self, point: Point) -> float:
        """The peak of a point against that of the baseline."""
        return point.peak_bytes / self.baseline.peak_bytes if self.baseline.peak_bytes else 1.0

    def to_json(self) -> str:
        """The frontier as JSON, with the ratios to the baseline."""
        fields = asdict(self)
        points: Iterable[tuple[Point, dict[str, Any]]] = zip(self.points, fields["points"], strict=True)
        for point, own in [(self.baseline, fields["baseline"]), *points]:
            own |= {"time_ratio": self.time_ratio(point), "peak_ratio": self.peak_ratio(point)}
        return json.dumps(fields)

    def table(self, limit: int | None = None) -> str:
        """The baseline and the points, highest peak first; a ``*`` marks the one that was asked for.

        Args:
            limit: Points to print, from all of the frontier; None for all. Its ends and the point that was
                asked for are always among them.
        """
        shown = _spread(self.points, limit)
        rows = [self._row("without fxremat", self.baseline, "-")]
        for number in shown:
            point = self.points[number]
            mark = " *" if point.is_asked_for else ""
            rows.append(self._row(f"{number + 1}{mark}", point, mib(point.budget_bytes)))
        headers = "point, peak, of peak, budget, time ms, extra, saved, recomputed nodes, planner"
        aligned = ("left", *["right"] * 7, "left")
        table = tabulate(rows, headers.split(", "), colalign=aligned, disable_numparse=True)
        hidden = len(self.points) - len(shown)
        return table + (f"\n... and {hidden} more points between them" if hidden else "")

    def _row(self, title: str, point: Point, budget: str) -> tuple[str, ...]:
        return (
            title,
            mib(point.peak_bytes),
            f"{self.peak_ratio(point):.1%}",
            budget,
            f"{point.seconds * 1e3:.2f}",
            f"{self.time_ratio(point) - 1:+.1%}",
            mib(point.saved_bytes),
            str(point.recomputed_nodes),
            point.planner,
        )

    def summary(self, limit: int | None = None) -> str:
        """The graph, how many points there are, and the table of ``limit`` of them."""
        points = "1 point" if len(self.points) == 1 else f"{len(self.points)} points"
        counts = f"{points} for {self.num_nodes} nodes, in {self.planning_seconds:.2f} s"
        return f"{self.graph_name} ({self.compiler}): {counts}\n\n{self.table(limit)}"

    def __str__(self) -> str:
        return self.summary()


def make_frontier(
    graph: JointGraph,
    *,
    planner: GivenPlanner = "auto",
    cost: str = "roofline",
    compiler: str = "inductor",
    budget: Budget = None,
    inplace: bool = True,
) -> Frontier:
    """The frontier of a graph that was captured for the compiler.

    >>> graph = JointGraph.from_mappings(
    ...     {"x": (), "a": ["x"], "b": ["a"], "c": ["b"], "dc": ["c"], "db": ["dc", "b"], "da": ["db", "a"]},
    ...     bytes={"a": 8, "b": 8, "c": 1, "dc": 1, "db": 1, "da": 1},
    ...     seconds={"a": 5.0, "b": 1.0, "c": 1.0, "dc": 1.0, "db": 1.0, "da": 1.0},
    ...     backward=["dc", "db", "da"], forward_outputs=["c"], backward_outputs=["da"])
    >>> [(point.peak_bytes, point.seconds) for point in make_frontier(graph, compiler="eager").points]
    [(19, 10.0), (16, 15.0)]

    Args:
        graph: The joint graph.
        planner: As for ``fxremat.plan``.
        cost: As for ``fxremat.plan``.
        compiler: ``"inductor"`` or ``"eager"``.
        budget: The point that serves it is marked; None marks none.
        inplace: Whether ``"eager"`` writes results over operands.

    Raises:
        InvalidOptionError: An option has no such value.
        InfeasibleBudgetError: No point serves the budget.
    """
    fusion = memory_model(compiler, inplace)
    problem = make_problem(graph, cost, fusion)
    start = time.perf_counter()
    solutions = pareto(solve(problem, planner))
    seconds = time.perf_counter() - start
    baseline = baseline_plan(problem)
    asked = None
    if budget is not None:
        asked = choose(problem, solutions, budget, resolve_budget(budget, baseline.peak_bytes))
    return Frontier(
        graph.name,
        compiler,
        len(graph.nodes) - graph.num_inputs,
        seconds,
        _point(problem.without, baseline),
        tuple(_point(problem, each, each is asked) for each in solutions),
    )


def _point(problem: Problem, solution: Solution, is_asked_for: bool = False) -> Point:
    return Point(
        solution.peak_bytes,
        least_budget(problem, solution.peak_bytes),
        solution.seconds,
        problem.model.profile(problem.graph, solution.schedule).saved_bytes,
        sum(solution.mirror_counts.values()),
        solution.planner,
        is_asked_for,
    )


def _spread(points: tuple[Point, ...], limit: int | None) -> list[int]:
    """Positions of at most so many points, evenly spread, and of the one that was asked for."""
    last = len(points) - 1
    if limit is None or limit > last:
        return list(range(last + 1))
    steps = max(1, limit - 1)
    spread = {step * last // steps for step in range(steps + 1)}
    return sorted(spread | {number for number, point in enumerate(points) if point.is_asked_for})
