"""milp: beyond the search a programme proves plans; its memory and its optima are held against other ways."""

from __future__ import annotations

import itertools
import math
import random
import re
from pathlib import Path

import pytest
import torch
from graphs import chain, problem, unread_bytes
from optima import DRAWN, advancing, forwards, within
from programs import Network, traced
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack, vstack
from torch import nn

import fxremat
from fxremat.cli import command
from fxremat.driver.pipeline import make_problem
from fxremat.errors import InfeasibleBudgetError, InvalidOptionError, ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.planners import auto, exact
from fxremat.predict.problem import Problem, pareto
from fxremat.proof import milp, search
from fxremat.proof.programme import Programme, programme
from fxremat.search.condensed import Condensed, condense

SECONDS = 30.0  # far more than any programme here needs that is to be solved


def condensed(planning: Problem) -> Condensed:
    """The graph as the programme takes it."""
    return condense(planning.graph, planning.costs)


def solved(planning: Problem, budget: int) -> float:
    """The least seconds of the programme in the graph's own order; infinite if nothing fits."""
    answer = milp.least_seconds(programme(condensed(planning)), budget, math.inf, SECONDS)
    assert answer.is_proved
    if answer.plan is None:
        return math.inf
    small = condensed(planning)
    assert answer.bound == pytest.approx(small.seconds(answer.plan))
    assert planning.evaluate(small.schedule(answer.plan), "stages").peak_bytes <= budget
    return small.seconds(answer.plan)


def training_step(seed: int, operators: int) -> JointGraph:
    """A forward with skips and the backward of it, of so many operators."""
    draw = random.Random(seed)
    forward = [f"f{i}" for i in range(operators // 2)]
    operands: dict[str, list[str]] = {"x": []}
    for i, name in enumerate(forward):
        skips = draw.sample(forward[max(0, i - 6) : i], min(i, draw.choice((0, 0, 1))))
        operands[name] = list(dict.fromkeys([*forward[i - 1 : i], *skips])) if i else ["x"]
    for name in reversed(forward):
        above = [f"g{each[1:]}" for each in forward if name in operands[each]]
        saved = [each for each in (*operands[name], name) if each != "x" and draw.random() < 0.7]
        operands[f"g{name[1:]}"] = [*above, *saved] or [name]
    body = [name for name in operands if name != "x"]
    return JointGraph.from_mappings(
        operands,
        {name: draw.choice((1, 1, 2, 3, 5, 8)) for name in body},
        forward_outputs=forward[-1:],
        backward=body[len(forward) :],
        backward_outputs=body[-1:],
        seconds={name: float(draw.choice((1, 1, 2, 4, 9))) for name in body},
    )


# --- Memory ---------------------------------------------------------------------------------------------


def counted_bytes(stages: Programme, plan: tuple[int, ...]) -> int:
    """The peak that the programme's rows give a plan: the least over all claims, given its mirrors."""
    chosen: set[tuple[int, int]] = set()
    stage = 0
    for step, operator in enumerate(plan):
        if operator in plan[:step]:
            chosen.add((stage, operator))
        else:
            stage += 1
    count = len(stages.seconds)
    limits = [(0.0, 1.0)] * count + [(0.0, None)]
    for own, operator, variable in stages.mirrors:
        limits[variable] = (float((own, operator) in chosen),) * 2
    peak = csr_array([[-1.0]] * stages.sizes.shape[0])
    rows = vstack([hstack([stages.rows, csr_array((stages.rows.shape[0], 1))]), hstack([stages.sizes, peak])])
    found = linprog([0.0] * count + [1.0], rows, [*stages.limits, *-stages.least_bytes], bounds=limits)
    assert found.status == 0
    return round(found.fun)


def assert_counts_what_is_predicted(planning: Problem) -> int:
    """Over a row of budgets the programme's peak is the memory model's; returns how many plans repeat."""
    small = condensed(planning)
    stages = programme(small)
    lowest = milp.least_peak(stages, 2 * planning.identity("all").peak_bytes, SECONDS)
    assert lowest.is_proved and lowest.plan is not None
    plans = {lowest.plan}
    least, unread = round(lowest.bound), unread_bytes(planning.graph)
    assert 0 <= least - planning.evaluate(small.schedule(lowest.plan), "stages").peak_bytes <= unread
    for share in (0.0, 0.1, 0.3, 0.6):
        budget = round(least + share * (planning.identity("all").peak_bytes + unread - least))
        answer = milp.least_seconds(stages, budget, math.inf, SECONDS)
        assert answer.plan is not None
        plans.add(answer.plan)
    for plan in sorted(plans):
        solution = planning.evaluate(small.schedule(plan), "stages")
        assert 0 <= counted_bytes(stages, plan) - solution.peak_bytes <= unread
    return sum(len(set(plan)) < len(plan) for plan in plans)


@pytest.mark.parametrize("kind", DRAWN)
def test_it_counts_what_the_memory_model_counts(kind: str) -> None:
    """On random DAGs, at the lowest peak and at others."""
    assert sum(assert_counts_what_is_predicted(problem(DRAWN[kind](seed))) for seed in range(12)) > 6


NETWORKS = {
    "norms": [("layer_norm", -1, -1), ("linear", -1, -1), ("gelu", -1, -1), ("layer_norm", -1, -1)],
    "views": [("gate", -1, -1), ("linear", -1, -1), ("max", -1, -1), ("tanh", -1, -1)],
    "statistics": [("batch_norm", -1, -1), ("tanh", -1, -1), ("dropout", -1, -1), ("gelu", -1, -1)],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_it_counts_what_is_predicted_of_traced_graphs(name: str) -> None:
    """Views, operators with several outputs, random numbers, running statistics, tangents."""
    torch.manual_seed(0)
    assert_counts_what_is_predicted(problem(traced(Network(NETWORKS[name]))))


# --- Optima ---------------------------------------------------------------------------------------------


def brute_force(planning: Problem) -> list[tuple[int, float]]:
    """Peak and seconds of every plan of the programme's kind: any operators again in each stage."""
    small = condensed(planning)
    count = len(small.operators)
    repeatable = [i for i, each in enumerate(small.operators) if each.runs_at_most > 1]
    stages = [[i for i in repeatable if i < own] for own in range(count)]
    choices = [
        [chosen for size in range(len(stage) + 1) for chosen in itertools.combinations(stage, size)]
        for stage in stages
    ]
    points = []
    for chosen in itertools.product(*choices):
        plan = [run for own, again in enumerate(chosen) for run in (*again, own)]
        try:
            solution = planning.evaluate(small.schedule(plan), "brute force")
        except ScheduleError:
            continue
        points.append((solution.peak_bytes, solution.seconds))
    return points


def tiny(seed: int) -> JointGraph:
    """Three operators in the forward and three in the backward, one of which reads all."""
    draw = random.Random(seed)
    operands: dict[str, list[str]] = {"x": [], "a": ["x"]}
    operands |= {"b": ["a"], "c": draw.choice((["b"], ["a", "b"], ["a"]))}
    operands |= {"dc": ["c"], "db": ["dc", *draw.sample(("a", "b"), 1)], "da": ["db", *draw.sample("abc", 2)]}
    body = [name for name in operands if name != "x"]
    return JointGraph.from_mappings(
        operands,
        {name: draw.randint(1, 6) for name in body},
        forward_outputs=draw.choice((["c"], ["c", "b"])),
        backward=body[3:],
        backward_outputs=["da"],
        keep=draw.choice(([], [], ["a"])),
        seconds={name: float(draw.randint(0, 4)) for name in body},
    )


@pytest.mark.parametrize("seed", range(6))
def test_brute_force_over_stages_finds_the_same(seed: int) -> None:
    """At every peak that a plan of stages has, and a byte below."""
    planning = problem(tiny(seed))
    points = brute_force(planning)
    for budget in sorted({peak - less for peak, _ in points for less in (0, 1)}):
        assert solved(planning, budget) == within(points, budget)


@pytest.mark.parametrize("kind", DRAWN)
def test_the_free_order_is_never_worse(kind: str) -> None:
    """On small graphs: what is proved over all orders bounds what is proved for one."""
    equal = budgets = 0
    for seed in range(4):
        planning = problem(DRAWN[kind](seed))
        for solution in search.plan(planning):
            found = solved(planning, solution.peak_bytes)
            assert found >= solution.seconds
            budgets += 1
            equal += found == solution.seconds
    assert 0 < equal <= budgets


def test_chains_are_planned_as_by_the_search() -> None:
    """A chain leaves no choice of order: every point of the frontier is the same."""
    planning = problem(chain(8))
    for solution in search.plan(planning):
        assert solved(planning, solution.peak_bytes) == solution.seconds


@pytest.mark.parametrize("checkpoints", [7, 9])
def test_a_chain_of_twenty_layers_takes_as_many_forwards_as_revolve(checkpoints: int) -> None:
    """A graph of 41 operators, through the public function."""
    solution = fxremat.plan(
        advancing(20), checkpoints + 2, "exact", fusion="none", time_limit_seconds=SECONDS
    )
    assert solution.seconds == forwards(20, checkpoints) - 20
    assert solution.planner == "exact"


# --- What is said of a plan -----------------------------------------------------------------------------


def test_forty_operators_are_proved() -> None:
    """Auto is beaten or met at a budget, and the note says what is proved."""
    graph = training_step(0, 40)
    others = [(each.peak_bytes, each.seconds) for each in auto.plan(problem(graph))]
    budget = (others[0][0] + others[-1][0]) // 2
    solution = fxremat.plan(graph, budget, "exact", fusion="none", time_limit_seconds=SECONDS)
    assert solution.peak_bytes <= budget and solution.seconds <= within(others, budget)
    assert solution.note == "optimal for this order of the operators"
    assert fxremat.Solution.from_json(solution.to_json()) == solution


def test_without_time_the_gap_is_told() -> None:
    """The plan is auto's then, and the bound the one of any schedule."""
    graph, budget = advancing(32), 6
    solution = fxremat.plan(graph, budget, "exact", fusion="none", time_limit_seconds=1e-3)
    others = [(each.peak_bytes, each.seconds) for each in auto.plan(problem(graph))]
    assert solution.seconds == within(others, budget)
    told = re.fullmatch(r"feasible, at most (.*)% from optimal for .* \(bound (.*) ms\)", solution.note)
    assert told is not None
    assert float(told[2]) >= solution.lower_bound_seconds * 1e3
    gap = solution.seconds / (float(told[2]) / 1e3) - 1
    assert gap - 1e-3 <= float(told[1]) / 100 <= gap + 2e-3


def test_what_the_bound_of_any_schedule_proves_needs_no_programme() -> None:
    """With room for everything no order takes less."""
    solution = fxremat.plan(training_step(0, 40), 1.0, "exact", fusion="none")
    assert solution.note == "optimal for any order of the operators"
    assert not solution.mirror_counts


def test_a_budget_below_all_plans_is_refused() -> None:
    """The error says that it is proved, and for what."""
    with pytest.raises(InfeasibleBudgetError, match=r"infeasible \(proved\) in any order") as caught:
        fxremat.plan(training_step(0, 40), 3, "exact", fusion="none")
    assert caught.value.lowest_peak_bytes > 3


def test_too_large_a_graph_is_refused() -> None:
    """With the advice to take auto."""
    with pytest.raises(InvalidOptionError, match=rf"{exact.MAX_OPERATORS} are the most. Take 'auto'"):
        fxremat.plan(chain(exact.MAX_OPERATORS), planner="exact", fusion="none")


def test_the_frontier_has_points_that_are_no_worse_than_autos() -> None:
    """At each peak of auto's; the lowest is no higher."""
    graph = training_step(1, 30)
    front = [
        (each.peak_bytes, each.seconds)
        for each in fxremat.frontier(graph, "exact", fusion="none", time_limit_seconds=SECONDS)
    ]
    others = pareto(auto.plan(problem(graph)))
    assert front[-1][0] <= others[-1].peak_bytes
    assert all(within(front, each.peak_bytes) <= each.seconds for each in others)


# --- Traced models --------------------------------------------------------------------------------------


class Ordered(nn.Module):
    """Twelve layers: values to be computed again, kept, and with a single mirror."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            with fxremat.region(recompute=True):
                x = torch.tanh(x)
            with fxremat.region(keep=True):
                x = torch.sigmoid(x)
            with fxremat.region(mirror=1):
                x = torch.sin(x)
        return x.sum()


def test_orders_are_obeyed() -> None:
    """By a plan of the programme."""
    graph = fxremat.capture(Ordered(), torch.randn(4, 8, requires_grad=True))
    planning = make_problem(graph, fusion="none")
    assert len(condensed(planning).operators) > exact.MAX_SEARCHED
    solution = fxremat.plan(graph, "min", "exact", fusion="none", time_limit_seconds=SECONDS)
    planning.check(solution)
    counts = solution.mirror_counts
    assert not any("sigmoid" in name for name in counts)
    assert all(
        counts[name] >= 1 for name in graph.names if name.startswith("tanh") and "backward" not in name
    )
    assert all(counts.get(name, 0) <= 1 for name in graph.names if name.startswith("sin"))


SOURCE = """
import torch
from torch import nn

def build():
    layers = (layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.GELU()))
    return nn.Sequential(*layers), (torch.randn(512, 16),), lambda y: y.square().mean()
"""


def test_plan_prints_what_is_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a note of the report."""
    path = tmp_path / "net.py"
    path.write_text(SOURCE)
    options = ["--planner", "exact", "--compiler", "eager", "--no-inplace", "--budget", "0.7"]
    assert command.main(["plan", f"{path}:build", *options]) == 0
    assert re.search(r"^note +optimal for this order", capsys.readouterr().out, re.MULTILINE)
