"""pipeline: the stages in order, from a joint fx graph to its two parts and a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import (
    Sketch,
    assert_same,
    chain,
    example_inputs,
    few,
    networks,
    output_names,
    problem,
    run,
    run_parts,
)
from hypothesis import given
from hypothesis import strategies as st
from programs import Network, traced
from torch import fx, nn

import fxremat
from fxremat._torch import partitioners
from fxremat.driver.frontier import make_frontier
from fxremat.driver.pipeline import (
    SECONDS_WITHOUT_BUDGET,
    choose,
    decide,
    least_budget,
    make_problem,
    rewritten,
    solve,
    split,
)
from fxremat.errors import FxrematError, InfeasibleBudgetError, InvalidOptionError, ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule
from fxremat.options.options import Options
from fxremat.planners import PLANNERS
from fxremat.predict.models import profile
from fxremat.predict.problem import Problem, Solution, margin

DEEP = Network(8 * [("tanh", -1, -1), ("softmax", -1, -1)])


def eager(**options: Any) -> Options:
    """Options for fx graphs that run as they are."""
    return Options.parse({"compiler": "eager", **options})


def joint(network: Network) -> tuple[Any, int]:
    """What a partitioner is handed: a joint fx graph and its number of forward outputs."""
    graph = traced(network)
    return graph.module, len(graph.forward_outputs)


def partition_joint(
    module: fx.GraphModule, count: int, options: Options, name: str
) -> tuple[fx.GraphModule, fx.GraphModule, fxremat.Report]:
    """The two halves of a joint graph and its report, as the backend makes them."""
    graph, report = rewritten(module, count, options, name)
    return *split(graph, options), report


def solutions(*points: tuple[int, float]) -> list[Solution]:
    """Solutions of these peaks and seconds."""
    return [Solution(Schedule(), peak, seconds, 0.0, "drawn") for peak, seconds in points]


class Shown(nn.Module):
    """Reads the image that a convolution makes by a view of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x).view(1, 8, 3, 3).sin().sum()


@pytest.mark.parametrize("is_as_usual", [False, True])
def test_what_runs_as_without_a_budget_saves_the_same_views(is_as_usual: bool) -> None:
    """Another plan saves images in the place of views of them."""
    graph = fxremat.capture(Shown(), torch.randn(2, 4, 3, 3), compiler="inductor")
    forward, _ = split(graph, Options.parse({}), is_as_usual)
    assert ("view" in output_names(forward)) is is_as_usual
    assert ("convolution" in output_names(forward)) is not is_as_usual


# --- Choosing -------------------------------------------------------------------------------------------

DRAWN = solutions((90, 1.5), (100, 1.0), (60, 2.0), (80, 5.0), (40, 4.0))


@pytest.mark.parametrize(
    ("budget", "budget_bytes", "expected"),
    [
        (None, None, (90, 1.5)),  # the planner's preference is its first
        ("min", None, (40, 4.0)),
        (1000, 1000, (100, 1.0)),
        (100, 100, (100, 1.0)),
        (99, 99, (90, 1.5)),
        (0.5, 89, (60, 2.0)),
        (59, 59, (40, 4.0)),
        (40, 40, (40, 4.0)),
    ],
)
def test_the_fastest_that_fits_is_chosen(
    budget: int | float | str | None, budget_bytes: int | None, expected: tuple[int, float]
) -> None:
    """(80, 5.0) never is: (60, 2.0) beats it in both."""
    chosen = choose(problem(chain(1)), DRAWN, budget, budget_bytes)
    assert (chosen.peak_bytes, chosen.seconds) == expected


def test_what_does_not_fit_is_refused() -> None:
    """The error holds the graph's name, the budget and what would work."""
    with pytest.raises(InfeasibleBudgetError, match=r"^chain: no plan fits") as caught:
        choose(problem(chain(1)), DRAWN, 39, 39)
    assert (caught.value.budget_bytes, caught.value.lowest_peak_bytes) == (39, 40)


@given(st.integers(0, 2**44), st.sampled_from(["none", "inductor"]))
def test_the_lowest_peak_works_as_a_budget(peak: int, fusion: str) -> None:
    """With the margin for Inductor or without, and one byte less does not."""
    planning = make_problem(chain(1), fusion=fusion)
    (only,) = found = solutions((peak, 1.0))
    if peak == 0:
        assert choose(planning, found, 0, 0) is only
        return
    with pytest.raises(InfeasibleBudgetError) as caught:
        choose(planning, found, 0, 0)
    lowest = caught.value.lowest_peak_bytes
    assert choose(planning, found, lowest, lowest) is only
    assert peak <= lowest <= peak / (1 - margin(planning)) + 1


def test_a_margin_is_left_where_the_prediction_is_not_exact() -> None:
    """A budget under Inductor keeps a part free, one for fx graphs as they are does not."""
    assert margin(problem(chain(1))) == 0
    planning = make_problem(chain(1), fusion="inductor")
    assert 0 < margin(planning) < 0.5
    with pytest.raises(InfeasibleBudgetError):
        choose(planning, solutions((100, 1.0)), 100, 100)


# --- Problems -------------------------------------------------------------------------------------------


def test_a_problem_has_the_costs_that_were_asked_for() -> None:
    """By name or by mapping, and a fusion that exists."""
    assert make_problem(chain(1), {"f1": 2.0}, "none").costs.fixed == (0.0, 0.0, 2.0, 0.0)
    with pytest.raises(InvalidOptionError) as caught:
        make_problem(chain(1), fusion="indcutor")
    assert (caught.value.option, caught.value.near_matches) == ("fusion", ("inductor",))
    with pytest.raises(InvalidOptionError, match="cost"):
        make_problem(chain(1), "guess", "none")


def test_the_min_cut_is_computed_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a problem does not ask PyTorch; a planner that wants to know does."""
    asked: list[int] = []
    monkeypatch.setattr(
        partitioners, "min_cut_saved", lambda module, count, static: asked.append(count) or ["tanh"]
    )
    planning = problem(traced(Network([("tanh", -1, -1)])))
    assert asked == []
    assert (planning.min_cut_saved(), asked) == (["tanh"], [1])


def test_solving_with_a_planner_of_the_users() -> None:
    """Whatever it returns becomes solutions that are named after it."""

    def mine(planning: Problem) -> dict[str, int]:
        return {}

    (solution,) = solve(problem(chain(2)), mine)
    assert (solution.planner, solution.schedule) == ("mine", Schedule(chain(2).names))


@pytest.mark.parametrize(
    "returned",
    [
        None,
        3,
        True,
        "f1",
        "",
        (),
        [],
        [1, 2],
        ["f1", None],
        [["f1"]],
        {"f1", "f2"},
        object(),
        torch.tensor(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_planner_may_not_return_is_refused(returned: object) -> None:
    """The error names the planner, what it returned, and what it may return."""

    def mine(planning: Problem) -> object:
        return returned

    with pytest.raises(InvalidOptionError, match=r"'mine' returned .*expected mirror counts") as caught:
        solve(problem(chain(2)), mine)
    assert caught.value.option == "planner"


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"f9": 1}, "'f9': the graph has no such node to mirror"),
        ({1: 1}, "1: the graph has no such node to mirror"),
        ({"f1": -1}, "0 or more, got -1"),
        ({"f1": 1.0}, "0 or more, got 1.0"),
        ({"f1": None}, "0 or more, got None"),
        (["f1"], "'f2': it never runs"),
        (Solution(Schedule(["f1"]), 0, 0.0, 0.0, "other"), "'f2': it never runs"),
    ],
    ids=str,
)
def test_a_planners_schedule_error_names_the_planner(returned: object, text: str) -> None:
    """Counts and schedules that are none of the graph's."""

    def mine(planning: Problem) -> object:
        return returned

    with pytest.raises(ScheduleError, match="schedule of planner 'mine'") as caught:
        solve(problem(chain(2)), mine)
    assert text in str(caught.value)


def test_a_count_for_a_node_is_checked_too() -> None:
    """Where the planner is a function from a node to its count."""
    with pytest.raises(ScheduleError, match=r"planner '<lambda>', 'f1': .*got 1\.5"):
        solve(problem(chain(2)), lambda node: 1.5)


def test_a_solution_of_another_problem_has_this_ones_figures() -> None:
    """Such as one that was read from a file, or was made for another memory model."""
    planning = problem(chain(2))
    true = planning.mirror({"f1": 1}, "mine")
    false = replace(true, peak_bytes=0, seconds=float("nan"), note="seen")
    (found,) = solve(planning, lambda problem: false)
    assert found == replace(true, note="seen")


@pytest.mark.parametrize("planner", [lambda: {}, lambda a, b: {}])
def test_a_planner_that_cannot_be_called_is_refused(planner: Any) -> None:
    """The error shows what it takes and what it should take."""
    with pytest.raises(InvalidOptionError, match=r"takes \(.*\), expected one argument: the Problem"):
        solve(problem(chain(2)), planner)


@pytest.mark.parametrize("planner", [None, 3, ["auto"], torch.tensor([1, 2])])
def test_a_planner_of_another_type_is_refused(planner: Any) -> None:
    """What is neither a name nor a function."""
    with pytest.raises(InvalidOptionError, match=r"expected auto, .*a function") as caught:
        fxremat.plan(chain(2), planner=planner, fusion="none")
    assert caught.value.option == "planner"


@pytest.mark.parametrize("graph", [None, torch.nn.Linear(1, 1)], ids=["None", "Linear"])
def test_what_is_no_joint_graph_is_refused(graph: Any) -> None:
    """By every stage that takes one; the error says where graphs come from."""
    stages: list[Callable[[], object]] = [
        lambda: fxremat.plan(graph),
        lambda: fxremat.frontier(graph),
        lambda: fxremat.profile(graph, ()),
        lambda: fxremat.allocate(graph, ()),
        lambda: fxremat.expand(graph, {}),
        lambda: fxremat.rewrite(graph, ()),
        lambda: fxremat.partition(graph),
    ]
    for stage in stages:
        with pytest.raises(InvalidOptionError, match=r"option 'graph'.*fxremat\.capture\(\)"):
            stage()


@pytest.mark.parametrize(("budget", "limit"), [(None, SECONDS_WITHOUT_BUDGET), (0.9, None)])
def test_the_default_plan_is_not_searched_for_long(
    monkeypatch: pytest.MonkeyPatch, budget: float | None, limit: float | None
) -> None:
    """Without a budget ``auto`` has a fraction of a second, as in a compilation."""
    limits = []

    def plan(problem: Problem) -> tuple[Solution, ...]:
        limits.append(problem.time_limit_seconds)
        return (problem.identity("auto"),)

    monkeypatch.setitem(PLANNERS, "auto", plan)
    with contextlib.suppress(InfeasibleBudgetError):
        fxremat.plan(chain(3), budget, fusion="none")
    assert limits == [limit]


def test_planning_changes_nothing() -> None:
    """A graph is planned twice alike, and is what it was."""
    graph = traced(DEEP)
    before = graph.nodes, str(graph.module.graph)
    first = fxremat.plan(graph, 0.6, fusion="none")
    assert fxremat.plan(graph, 0.6, fusion="none") == first
    assert (graph.nodes, str(graph.module.graph)) == before


# --- One plan, whoever asks -----------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Convolutions, which have scratch memory, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Linear(4 * 12 * 12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


IMAGES = torch.ones(2, 2, 16, 16)


@pytest.mark.parametrize("budget", [None, "min", 0.9])
@pytest.mark.parametrize(("compiler", "fusion"), [("eager", "inplace"), ("inductor", "inductor")])
def test_the_plan_is_the_backends(compiler: str, fusion: str, budget: float | str | None) -> None:
    """For the same joint graph and options, the scratch memory of operators included."""
    graph = fxremat.capture(Convolutions(), IMAGES, compiler=compiler)
    options = Options.parse({"compiler": compiler, "budget": budget})
    _, report = rewritten(graph.module, len(graph.forward_outputs), options, "g")
    solution = fxremat.plan(graph, budget, fusion=fusion)
    assert solution == report.solution
    assert sum(make_problem(graph, fusion=fusion).graph.scratch_bytes) > 0
    assert graph.scratch_bytes == ()


@pytest.mark.parametrize("budget", [None, "min", 0.9])
def test_the_plan_of_a_captured_model_is_that_of_the_compiled_one(budget: float | str | None) -> None:
    """Which Dynamo and AOTAutograd have traced: the same names, bytes and seconds."""
    model = Convolutions()
    solution = fxremat.plan(fxremat.capture(model, IMAGES), budget, fusion="inplace")
    torch.compile(model, backend="fxremat", options={"compiler": "eager", "budget": budget})(IMAGES)
    assert fxremat.reports()[-1].solution == solution


@pytest.mark.parametrize("fusion", ["none", "inplace", "inductor"])
def test_both_frontiers_are_of_the_same_points(fusion: str) -> None:
    """Those of the library and those that are printed; each serves the least budget that it says."""
    compiler = "inductor" if fusion == "inductor" else "eager"
    graph = fxremat.capture(Convolutions(), IMAGES, compiler=compiler)
    printed = make_frontier(graph, compiler=compiler, inplace=fusion == "inplace").points
    found = fxremat.frontier(graph, fusion=fusion)
    assert [(each.peak_bytes, each.seconds) for each in printed] == [
        (each.peak_bytes, each.seconds) for each in found
    ]
    for point in printed[:: max(1, len(printed) - 1)]:
        assert fxremat.plan(graph, point.budget_bytes, fusion=fusion).peak_bytes == point.peak_bytes


def test_scratch_bytes_that_a_graph_has_count_as_they_are() -> None:
    """Nothing is run to find others."""
    graph = fxremat.capture(Convolutions(), IMAGES)
    told = replace(graph, scratch_bytes=(1,) * len(graph.nodes))
    assert make_problem(told, fusion="none").graph is told


def test_a_choice_keeps_a_peak_besides_the_budget() -> None:
    """Or is the lowest solution if none does; the bound on seconds is that of the budget."""
    planning = make_problem(chain(8), fusion="none")
    free, lowest = decide(planning, 1.0, "auto"), decide(planning, "min", "auto").solution
    lower = decide(planning, 1.0, "auto", free.solution.peak_bytes - 1)
    assert lower.solution.peak_bytes < free.solution.peak_bytes
    assert lower.solution.lower_bound_seconds <= free.solution.lower_bound_seconds
    assert decide(planning, 1.0, "auto", 0).solution.peak_bytes == lowest.peak_bytes
    assert free.budget_bytes == least_budget(planning, free.baseline.peak_bytes)


# --- From a joint fx graph to its parts -----------------------------------------------------------------


@few(8)
@given(networks(), st.sampled_from([None, "min", 0.5, 0.8]))
def test_the_parts_compute_the_joint_graph(network: Network, budget: float | str | None) -> None:
    """Whatever the budget, forward and backward give the same bits, within the peak that was promised."""
    graph = traced(network)
    inputs = example_inputs(graph)
    expected = run(graph.module, inputs)
    count = len(graph.forward_outputs)
    try:
        forward, backward, report = partition_joint(graph.module, count, eager(budget=budget), "g")
    except InfeasibleBudgetError as error:
        assert error.budget_bytes < error.lowest_peak_bytes
        return
    assert_same(run_parts((forward, backward), graph, inputs), expected)
    assert report.budget_bytes is None or report.peak_bytes <= report.budget_bytes


def test_the_report_tells_what_was_done() -> None:
    """Name, compiler, budget as given and in bytes, the plan, and the baseline."""
    module, count = joint(DEEP)
    _, _, report = partition_joint(module, count, eager(budget=0.7), "graph 0/0")
    assert (report.graph_name, report.compiler, report.budget) == ("graph 0/0", "eager", 0.7)
    assert report.budget_bytes == int(0.7 * report.baseline_peak_bytes)
    assert report.peak_bytes <= report.budget_bytes
    assert report.solution.seconds >= report.baseline_seconds > 0
    assert report.planning_seconds > 0
    assert report.values
    assert report.num_nodes == len(JointGraph.from_fx(module, count).names)


def test_the_baseline_is_the_plan_without_us() -> None:
    """For fx graphs as they are that is to keep everything, scratch memory included."""
    module, count = joint(DEEP)
    _, _, report = partition_joint(module, count, eager(planner="keep_all"), "g")
    assert report.peak_bytes == report.baseline_peak_bytes
    graph = JointGraph.from_fx(module, count)
    assert report.baseline_peak_bytes >= profile(graph, graph.names).peak_bytes


def test_a_budget_that_nothing_fits_is_refused_with_the_graphs_name() -> None:
    """The error is raised before anything is rewritten."""
    module, count = joint(DEEP)
    before = str(module.graph)
    with pytest.raises(InfeasibleBudgetError, match=r"^graph 1/0: "):
        partition_joint(module, count, eager(budget=1), "graph 1/0")
    assert str(module.graph) == before


def test_the_planner_of_the_options_is_used() -> None:
    """A callable sees the graph that is partitioned, and its schedule is what runs."""
    module, count = joint(Network([("tanh", -1, -1), ("tanh", -1, -1)]))

    def mine(planning: Problem) -> dict[str, int]:
        return {"tanh": 1}

    _, backward, report = partition_joint(module, count, eager(planner=mine), "g")
    assert report.solution.mirror_counts == {"tanh": 1}
    assert "tanh_mirror1" in [node.name for node in backward.graph.nodes]


def test_equal_nodes_are_merged_before_planning() -> None:
    """Mirrors are made after PyTorch's merging of equal nodes, or it would undo them."""
    aten = torch.ops.aten
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a, b = sketch.call("a", aten.exp.default, x), sketch.call("b", aten.exp.default, x)
    c = sketch.call("c", aten.mul.Tensor, a, b)
    module = sketch.module([c], [sketch.call("da", aten.mul.Tensor, t, a)])
    module.graph.find_nodes(op="output")[0].meta["desc"] = [None, None]
    _, _, report = partition_joint(module, 1, eager(), "g")
    assert report.num_nodes == 3


def test_errors_are_of_the_family() -> None:
    """A graph that cannot be split is told so by an FxrematError."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a = sketch.call("a", torch.ops.aten.mul.Tensor, x, t)
    with pytest.raises(FxrematError, match="depends on a tangent"):
        partition_joint(sketch.module([a], [a]), 1, eager(), "g")


def test_the_frontier_falls_in_peak_and_rises_in_time() -> None:
    """Strictly, from the least time to the least peak; a budget is served from it."""
    graph = chain(20)
    points = fxremat.frontier(graph, fusion="none")
    peaks, seconds = [each.peak_bytes for each in points], [each.seconds for each in points]
    assert len(points) > 10
    assert peaks == sorted(set(peaks), reverse=True) and seconds == sorted(set(seconds))
    for point in points:
        assert fxremat.plan(graph, point.peak_bytes, fusion="none").seconds == point.seconds
