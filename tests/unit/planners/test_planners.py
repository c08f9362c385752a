"""planners: each on chains worked out by hand, on random graphs, and against PyTorch's own choices."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from graphs import chain, few, identity, joint_graphs, networks, placeholders, problem
from hypothesis import given, settings
from models import NAMES, case, fresh
from programs import Network, traced

import fxremat
from fxremat.device.arithmetic import flops
from fxremat.driver.pipeline import make_problem
from fxremat.emit.partition import saved_values
from fxremat.errors import InfeasibleBudgetError, InvalidOptionError, ScheduleError
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, validate
from fxremat.planners import PLANNERS, auto, revolve
from fxremat.planners.recursive import counts_of, split, with_cuts
from fxremat.planners.sublinear import algorithm_3, budgets
from fxremat.predict.models import profile
from fxremat.predict.problem import LEAST, Problem, Solution, pareto
from fxremat.search.cuts import candidates, crossing, forward_lives, mirror_everything_but
from fxremat.search.row import Row

OF_ANY_SIZE = [name for name in PLANNERS if name != "exact"]  # that one proves plans of small graphs


def skip_connection() -> JointGraph:
    """s -> a -> b -> c -> d, where d reads s as well; the backward reads everything."""
    operands = {
        **{"x": (), "t": (), "s": ["x"], "a": ["s"], "b": ["a"], "c": ["b"], "d": ["c", "s"]},
        **{"dd": ["t", "c", "s"], "dc": ["dd", "b"], "db": ["dc", "a"], "da": ["db", "s"]},
    }
    body = [name for name, reads in operands.items() if reads]
    return JointGraph.from_mappings(
        operands,
        {**dict.fromkeys(body, 1), "a": 8, "c": 8},
        forward_outputs=["d"],
        backward_outputs=["da"],
        backward=[name for name in body if len(name) == 2],
        seconds=dict.fromkeys(body, 1.0),
    )


def names(graph: JointGraph, positions: object) -> list[str]:
    """Names of nodes by their positions."""
    return [graph.nodes[position].name for position in positions]  # type: ignore[attr-defined]


# --- Every planner --------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", PLANNERS)
@settings(deadline=None)
@given(graph=joint_graphs())
def test_every_planner_makes_valid_solutions(planner: str, graph: JointGraph) -> None:
    """Any graph is planned; each solution is an execution whose peak is the memory model's."""
    for solution in PLANNERS[planner](problem(graph)):
        validate(graph, solution.schedule)
        assert solution.peak_bytes == profile(graph, solution.schedule).peak_bytes
        assert solution.seconds >= solution.lower_bound_seconds


@pytest.mark.parametrize("planner", OF_ANY_SIZE)
@few(4)
@given(network=networks())
def test_every_planner_plans_a_model(planner: str, network: Network) -> None:
    """The schedule of a traced model can be rewritten and has the peak that was promised."""
    graph = make_problem(traced(network), fusion="none").graph  # which has scratch bytes
    solution = fxremat.plan(graph, "min", planner, fusion="none")
    new = fxremat.rewrite(graph, solution.schedule)
    assert profile(new, new.names).peak_bytes == solution.peak_bytes


@pytest.mark.parametrize("planner", PLANNERS)
@settings(deadline=None)
@given(graph=joint_graphs())
def test_planning_is_deterministic(planner: str, graph: JointGraph) -> None:
    """The same graph gives the same solutions."""
    assert PLANNERS[planner](problem(graph)) == PLANNERS[planner](problem(graph))


def all_plans() -> str:
    """Every solution of every planner for one model, a line each."""
    steps = [("gelu", -1, -1), ("layer_norm", -1, -1), ("linear", -1, -1), ("add", -1, -3), ("gate", -1, -2)]
    planning = problem(traced(Network(3 * steps)))
    return "\n".join(each.to_json() for name in OF_ANY_SIZE for each in PLANNERS[name](planning))


def test_planning_does_not_depend_on_hashes() -> None:
    """A process that hashes names differently makes the same plans."""
    paths = os.pathsep.join(path for path in [str(Path(__file__).parent), *sys.path] if path)
    printed = subprocess.run(
        [sys.executable, "-c", "import test_planners; print(test_planners.all_plans())"],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == all_plans()


# --- Solutions and problems -----------------------------------------------------------------------------


def test_a_solution_survives_json() -> None:
    """What to_json writes from_json reads, the schedule being a Schedule again."""
    solution = Solution(Schedule(("f1", "f2", "f1")), 12, 0.1 + 0.2, 0.25, "mine")
    again = Solution.from_json(solution.to_json())
    assert again == solution
    assert again.mirror_counts == {"f1": 1}
    assert json.loads(solution.to_json())["peak_bytes"] == 12


def test_a_problem_evaluates_schedules_and_counts() -> None:
    """Peak, seconds and their lower bound of a chain of four, by hand."""
    planning = problem(chain(4))
    assert planning.lower_bound_seconds == 8.0
    plain = planning.identity("mine")
    assert plain == Solution(Schedule(["f1", "f2", "f3", "f4", "g4", "g3", "g2", "g1"]), 5, 8.0, 8.0, "mine")
    mirrored = planning.mirror({"f1": 1, "f3": 1}, "mine")
    assert mirrored == planning.evaluate(["f1", "f2", "f3", "f4", "f3", "g4", "g3", "f1", "g2", "g1"], "mine")
    assert (mirrored.peak_bytes, mirrored.seconds) == (4, 10.0)
    assert planning.check(mirrored) is mirrored
    with pytest.raises(ScheduleError):
        planning.check(planning.evaluate(["f1", "f2"], "mine"))


# --- keep_all, drop_cheap, min_cut ----------------------------------------------------------------------


@given(joint_graphs())
def test_keep_all_is_the_identity(graph: JointGraph) -> None:
    """Every node once, in the graph's order."""
    (solution,) = PLANNERS["keep_all"](problem(graph))
    assert solution.schedule == identity(graph)
    assert (solution.mirror_counts, solution.planner) == ({}, "keep_all")


def test_drop_cheap_recomputes_no_dense_operator() -> None:
    """Products and attention run once; norms and activations that the backward reads run again."""
    module, inputs = fresh(case("transformer"))
    graph = fxremat.capture(module, *inputs)
    (solution,) = PLANNERS["drop_cheap"](problem(graph))
    mirrored = [graph.fx_nodes[graph.index[name]] for name in solution.mirror_counts]
    assert [node.name for node in mirrored if flops(node)] == []
    operators = Counter(ops.title(node) for node in mirrored)
    assert operators["aten.gelu.default"] == operators["aten.native_layer_norm.default"] / 2 == 3


def test_drop_cheap_of_mappings_drops_what_is_below_the_mean() -> None:
    """Without operators a node is cheap by its seconds: here f1 and f3 against f2."""
    graph = chain(4, seconds={"f1": 1.0, "f2": 9.0, "f3": 1.0, "f4": 9.0, "g1": 100.0})
    (solution,) = PLANNERS["drop_cheap"](problem(graph))
    assert solution.schedule == Schedule(["f1", "f2", "f3", "f4", "f3", "g4", "g3", "f1", "g2", "g1"])


@pytest.mark.parametrize("name", ["dropout_mlp", "resnet", "transformer"])
def test_min_cut_saves_what_pytorch_saves(name: str) -> None:
    """The oracle is PyTorch's own partitioner: the same storages cross from forward to backward."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs)
    (solution,) = PLANNERS["min_cut"](problem(graph))
    new = fxremat.rewrite(graph, solution.schedule)
    ours = {new.nodes[position].name for position in saved_values(new)}
    count = len(graph.forward_outputs)
    _, backward = min_cut_rematerialization_partition(copy.deepcopy(graph.module), [], num_fwd_outputs=count)
    theirs = {name for name in placeholders(backward) if "tangents" not in name}
    assert held_storages(graph, ours) == held_storages(graph, theirs)


def held_storages(graph: JointGraph, saved: set[str]) -> set[int]:
    """The storages that saved values keep alive, inputs apart."""
    return {storage for name in saved for storage in graph.nodes[graph.index[name]].views}


def test_min_cut_of_mappings_keeps_everything() -> None:
    """Without an fx graph PyTorch cannot be asked."""
    (solution,) = PLANNERS["min_cut"](problem(chain(4)))
    assert solution.schedule == identity(chain(4))


# --- Cuts -----------------------------------------------------------------------------------------------


def test_the_widths_of_a_chain() -> None:
    """Behind each layer its value crosses; behind the last there is nothing to cut."""
    graph = chain(4, sizes={"f2": 5})
    lives = forward_lives(graph)
    assert names(graph, lives.positions) == ["f1", "f2", "f3"]
    assert lives.widths == (1, 5, 1)
    assert names(graph, candidates(lives, widest=9)) == ["f1", "f3"]


def test_a_cut_may_be_crossed_by_two_tensors() -> None:
    """A skip connection crosses every cut beside the main path, and is kept once."""
    graph = skip_connection()
    lives = forward_lives(graph)
    assert names(graph, lives.positions) == ["s", "a", "b", "c"]
    assert lives.widths == (1, 9, 2, 9)
    assert names(graph, candidates(lives, widest=9)) == ["s", "b"]
    assert names(graph, candidates(lives, widest=1)) == ["s"]
    b, c = graph.index["b"], graph.index["c"]
    kept = crossing(lives, [b])
    assert kept == [graph.nodes[graph.index["s"]].creates[0], graph.nodes[b].creates[0]]
    assert len(crossing(lives, [b, c])) == 3
    assert mirror_everything_but(graph, kept) == {"a": 1, "c": 1, "d": 1}


def test_neighbours_that_the_same_storages_cross_are_one_candidate() -> None:
    """Of several places of equal width without a birth or death between them the first counts."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "nothing": ["x"], "b": ["a"], "c": ["b"]},
        {"a": 1, "nothing": 0, "b": 4, "c": 1},
        forward_outputs=["c"],
    )
    lives = forward_lives(graph)
    assert lives.widths == (1, 1, 4)
    assert names(graph, candidates(lives, widest=4))[0] == "a"


def test_what_runs_once_asks_no_cut_to_keep_what_it_reads() -> None:
    """The running mean is written at the forward's end, of what the first layers made."""
    operands = {
        **{"x": (), "mean": (), "a": ["x"], "batch_mean": ["a"], "b": ["a"], "c": ["b"]},
        "write": ["mean", "batch_mean"],
    }
    sizes = {name: 1 for name, reads in operands.items() if reads}
    of_once, of_again = (
        forward_lives(JointGraph.from_mappings(operands, sizes, forward_outputs=["c"], keep=keep))
        for keep in (["write"], [])
    )
    assert of_once.widths == (1, 1, 1, 0)  # a, a, b, nothing
    assert of_again.widths == (1, 2, 2, 1)  # and the batch's mean until it is written


def test_a_cut_does_not_tear_outputs_from_their_operator() -> None:
    """There is no position between an operator and its getitem."""
    graph = traced(Network([("sort", -1, -1), ("layer_norm", -1, -1)]))
    lives = forward_lives(graph)
    assert not any(graph.nodes[position + 1].leader is not None for position in lives.positions)


# --- Algorithm 3 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "segment_bytes", "cuts", "kept", "largest"),
    [
        ({}, 0, ["f1", "f2", "f3", "f4", "f5"], 5, 1),
        ({}, 1, ["f2", "f4"], 2, 2),
        ({}, 2, ["f3"], 1, 3),
        ({}, 6, [], 0, 6),
        # layers of different sizes: a large one fills a segment by itself
        ({"f3": 7}, 2, ["f3"], 7, 9),
        # the trailing segment is the largest one
        ({"f6": 50}, 2, ["f3"], 1, 52),
    ],
)
def test_algorithm_3_on_a_chain(
    sizes: dict[str, int], segment_bytes: int, cuts: list[str], kept: int, largest: int
) -> None:
    """Cuts, x and y of six layers of one byte, all of them candidates, worked out by hand."""
    graph = chain(6, sizes=sizes)
    lives = forward_lives(graph)
    found = algorithm_3(graph, lives, lives.positions, segment_bytes)
    assert (names(graph, found[0]), *found[1:]) == (cuts, kept, largest)


def test_the_grid_of_appendix_a() -> None:
    """0, and six points from B0 / sqrt 2 to B0 * sqrt 2 with B0 = sqrt(x * y)."""
    graph = chain(10, sizes={"f10": 4})
    lives = forward_lives(graph)
    zero, *points = budgets(graph, lives, lives.positions)
    centre = (9 * 4) ** 0.5
    assert zero == 0
    assert len(points) == 6
    assert points[0] == pytest.approx(centre / 2**0.5)
    assert points[-1] == pytest.approx(centre * 2**0.5)
    assert [b / a for a, b in pairwise(points)] == pytest.approx([2**0.2] * 5)


@pytest.mark.parametrize(("layers", "peak"), [(16, 8), (64, 16), (256, 33)])
def test_the_sublinear_plan_takes_the_root(layers: int, peak: int) -> None:
    """n layers of one byte take 2 sqrt(n) bytes, and one forward more at the most."""
    best, *others = PLANNERS["sublinear"](problem(chain(layers)))
    assert best.peak_bytes == peak <= 2 * layers**0.5 + 1
    assert all(best.peak_bytes <= other.peak_bytes for other in others)
    assert best.seconds <= 3 * layers
    assert max(best.mirror_counts.values()) == 1


def test_the_levels_of_a_recursion() -> None:
    """One cut halves 7 places of equal bytes, the next halve the halves; with 3 cuts two levels do."""
    graph = chain(8)
    places = [graph.index[f"f{layer}"] for layer in range(1, 8)]
    halved = split(graph, places, 1)
    assert [halved[place] for place in places] == [2, 1, 2, 0, 2, 1, 2]
    assert [split(graph, places, 3)[place] for place in places] == [1, 0, 1, 0, 1, 0, 1]
    counts = counts_of(graph, forward_lives(graph), halved)
    assert [counts[f"f{layer}"] for layer in range(1, 9)] == [2, 1, 2, 0, 2, 1, 2, 3]


@pytest.mark.parametrize("doublings", range(3, 10))
def test_recursion_takes_the_logarithm(doublings: int) -> None:
    """A value per level, the output, and the gradient; as many more forwards as there are levels at most."""
    graph = chain(2**doublings)
    best = with_cuts(problem(graph), 1)[0]
    assert best.peak_bytes <= doublings + 3
    forwards = sum(best.mirror_counts.values())
    assert forwards <= doublings * 2**doublings


@pytest.mark.parametrize("checkpoints", [2, 3, 5])
def test_revolve_on_a_graph_holds_its_checkpoints(checkpoints: int) -> None:
    """The input costs nothing here; the output, the running value and the gradient come on top."""
    graph = chain(64)
    places = [graph.index[f"f{layer}"] for layer in range(1, 64)]
    order = revolve.schedule(graph, places, checkpoints)
    validate(graph, order)
    assert profile(graph, order).peak_bytes <= (checkpoints - 1) + 4


def test_revolve_keeps_what_may_not_run_again() -> None:
    """Such values are held, and the rest of their segment runs again without them."""
    graph = chain(16, keep=["f4", "f9"])
    places = [graph.index[f"f{layer}"] for layer in range(1, 16)]
    order = revolve.schedule(graph, places, 2)
    validate(graph, order)
    assert order.count("f4") == order.count("f9") == 1 and order.count("f5") > 1


@pytest.mark.parametrize(("reach", "weighed"), [(1.0, 1), (1.25, 2), (math.inf, 3)])
def test_what_seems_far_above_the_least_is_not_weighed(reach: float, weighed: int) -> None:
    """Of three plans, the others a fifth and three tenths above the lowest."""
    stated = problem(chain(6))
    own = identity(stated.graph)
    peak = stated.evaluate(own, "a test").peak_bytes
    others = [stated.mirror({f"f{at}": 1}, "a test").schedule for at in (1, 2)]
    seeming = {own: peak, others[0]: round(1.2 * peak), others[1]: round(1.3 * peak)}
    assert len(list(auto._weighed(stated, seeming, reach))) == weighed


@pytest.mark.parametrize(
    ("tries", "asked", "reach"),
    [(0, (LEAST,), auto.MAY_BE_LEAST), (0, (400,), math.inf), (0, None, math.inf), (9, (LEAST,), math.inf)],
)
def test_high_plans_are_left_out_where_there_is_no_time(
    tries: int, asked: tuple[int, ...] | None, reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where the least memory alone is asked for; the row looks no further up, and finds as little."""
    made: list[Row] = []

    def row(*given: Any) -> Row:
        made.append(Row(*given))
        return made[-1]

    monkeypatch.setattr(auto, "MAX_TRIES", tries)
    monkeypatch.setattr(auto, "Row", row)
    solutions = auto.plan(replace(problem(chain(40)), budgets=asked))
    for each in made:
        least = min(known.peak_bytes for known in each.known)
        assert each.highest == reach * least and max(each.best) <= max(reach * least, each.everything)
        assert (len(each.best) > 1) == (reach == math.inf)
    monkeypatch.setattr(auto, "MAY_BE_LEAST", math.inf)
    assert (
        min(solutions, key=lambda each: each.peak_bytes).peak_bytes
        == min(
            auto.plan(replace(problem(chain(40)), budgets=asked)), key=lambda each: each.peak_bytes
        ).peak_bytes
    )


def test_the_sublinear_plan_of_a_network() -> None:
    """A chain of 64 real layers holds a fifth of what it held, gradients apart."""
    graph = traced(Network([(name, -1, -1) for name in 32 * ["tanh", "softmax"]]))
    plain, best = (PLANNERS[name](problem(graph))[0].peak_bytes for name in ("keep_all", "sublinear"))
    assert best < plain / 3


def test_running_statistics_do_not_make_the_sublinear_plan_keep_the_network() -> None:
    """A chain of 24 convolutions with BatchNorm; the statistics of all of them are written at the end."""
    layer = (torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    network = torch.nn.Sequential(*(copy.deepcopy(module) for _ in range(24) for module in layer))
    graph = fxremat.capture(network, torch.randn(4, 4, 16, 16))
    plain, *reduced = (
        PLANNERS[name](problem(graph))[0].peak_bytes for name in ("keep_all", "sublinear", "recursive")
    )
    assert max(reduced) < plain / 2


# --- auto -----------------------------------------------------------------------------------------------

GRAPHS = {
    "chain": lambda: chain(48),
    "uneven": lambda: chain(24, sizes={f"f{layer}": layer % 5 for layer in range(1, 25)}),
    "skip": skip_connection,
    "network": lambda: traced(Network(8 * [("gelu", -1, -1), ("linear", -1, -1), ("add", -1, -2)])),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_frontier_is_strictly_ordered(name: str) -> None:
    """Behind the baseline, less memory always takes more time."""
    _, *front = PLANNERS["auto"](problem(GRAPHS[name]()))
    for before, after in pairwise(front):
        assert before.peak_bytes > after.peak_bytes
        assert before.seconds < after.seconds


@pytest.mark.parametrize(
    ("budgets", "tries", "shares"),
    [(None, 256, [128, 128]), (None, 100, [100, 0]), ((), 100, [100]), (None, 3, [3]), ((), 256, [128, 128])],
)
def test_variants_of_a_large_graph_share_the_tries(
    budgets: tuple[int, ...] | None, tries: int, shares: list[int]
) -> None:
    """The second has some plans where there is time for few, if plans are asked for at all."""
    asked = replace(problem(chain(4)), budgets=budgets)
    assert auto._shares(asked, tries, 2) == shares
    assert auto._shares(asked, tries, 1) == [tries]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_budget_is_honoured_and_a_smaller_one_never_costs_memory(name: str) -> None:
    """Over eight budgets from the least to the most: within each, peaks fall and seconds rise with it."""
    graph = GRAPHS[name]()
    lowest = fxremat.plan(graph, "min", fusion="none").peak_bytes
    highest = fxremat.plan(graph, planner="keep_all", fusion="none").peak_bytes
    peaks, seconds = [], []
    for step in range(8):
        budget = lowest + (highest - lowest) * step // 7
        solution = fxremat.plan(graph, budget, fusion="none")
        assert solution.peak_bytes <= budget
        peaks.append(solution.peak_bytes)
        seconds.append(solution.seconds)
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("seconds", [None, 0.0], ids=["with time", "without"])
@pytest.mark.parametrize("name", GRAPHS)
def test_auto_is_no_worse_than_any_other_planner(name: str, seconds: float | None) -> None:
    """No plan of theirs takes both less time and less memory than all of its own, even if it has no time."""
    planning = replace(problem(GRAPHS[name]()), time_limit_seconds=seconds)
    front = PLANNERS["auto"](planning)
    for other in ("keep_all", "drop_cheap", "sublinear", "recursive"):
        for solution in PLANNERS[other](planning):
            assert any(
                ours.peak_bytes <= solution.peak_bytes and ours.seconds <= solution.seconds for ours in front
            ), other


SLOW = ["none", "inplace"]
LARGE = ("unet", "lstm", "encoder_decoder", "densenet", "resnet", "language_model")


@pytest.mark.parametrize(
    "fusion", ["inductor", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each in LARGE else each for each in NAMES],
)
def test_auto_is_no_worse_than_any_other_planner_on_models(name: str, fusion: str) -> None:
    """Neither at the least peak that any of them reaches, nor at that of any of their plans."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs, compiler="inductor" if fusion == "inductor" else "eager")
    planning = make_problem(graph, fusion=fusion)
    front = PLANNERS["auto"](planning)
    for other in OF_ANY_SIZE:
        for solution in PLANNERS[other](planning):
            assert any(
                ours.peak_bytes <= solution.peak_bytes and ours.seconds <= solution.seconds for ours in front
            ), (other, solution.peak_bytes)


def test_without_a_budget_nothing_is_recomputed_for_it() -> None:
    """None is served by the baseline: the graph's own order where nothing is fused."""
    graph = chain(16)
    assert fxremat.plan(graph, fusion="none").schedule == identity(graph)


def test_a_budget_that_nothing_fits() -> None:
    """The error holds the budget and the lowest peak, which given as the budget works."""
    graph = chain(16)
    with pytest.raises(InfeasibleBudgetError) as caught:
        fxremat.plan(graph, 3, fusion="none")
    assert (caught.value.budget_bytes, caught.value.lowest_peak_bytes) == (3, 4)
    assert fxremat.plan(graph, caught.value.lowest_peak_bytes, fusion="none").peak_bytes == 4
    with pytest.raises(InfeasibleBudgetError):
        fxremat.plan(graph, caught.value.lowest_peak_bytes - 1, fusion="none")


def test_the_budgets_of_a_chain() -> None:
    """Bytes as int or text, fractions of the plain peak of 17, and the least at hand."""
    graph = chain(16)
    peaks = {
        budget: fxremat.plan(graph, budget, fusion="none").peak_bytes for budget in (17, "12B", 0.5, "min")
    }
    assert peaks[17] == 17
    assert 8 <= peaks["12B"] <= 12
    assert peaks[0.5] == 8 and peaks["min"] == 4


def test_pareto_keeps_what_nothing_beats() -> None:
    """Of equal peaks the fastest, of equal seconds the lowest; peak falls and time rises."""

    def solution(peak: int, seconds: float) -> Solution:
        return Solution(Schedule(), peak, seconds, 0.0, "")

    drawn = [
        solution(*each) for each in [(9, 1.0), (9, 2.0), (7, 1.0), (5, 3.0), (5, 3.0), (6, 4.0), (2, 9.0)]
    ]
    assert [(each.peak_bytes, each.seconds) for each in pareto(drawn)] == [(7, 1.0), (5, 3.0), (2, 9.0)]
    assert pareto([]) == []


# --- Planners of the user's -----------------------------------------------------------------------------


def test_a_planner_may_return_mirror_counts() -> None:
    """They become a schedule by Algorithm 2; the solution is called after the function."""

    def mine(planning: Problem) -> dict[str, int]:
        return {"f1": 1, "f3": 1}

    solution = fxremat.plan(chain(4), planner=mine, fusion="none")
    assert solution.schedule == Schedule(["f1", "f2", "f3", "f4", "f3", "g4", "g3", "f1", "g2", "g1"])
    assert solution.planner == "mine"


def test_a_planner_may_return_a_schedule() -> None:
    """Any sequence of names is one; it is validated."""
    expected = ["f1", "f2", "f3", "f4", "g4", "f2", "g3", "g2", "g1"]
    assert fxremat.plan(chain(4), planner=lambda _: expected, fusion="none").schedule == Schedule(expected)
    with pytest.raises(ScheduleError, match="never runs"):
        fxremat.plan(chain(4), planner=lambda _: expected[:-1], fusion="none")
    with pytest.raises(InvalidOptionError, match="returned"):
        fxremat.plan(chain(4), planner=lambda _: [], fusion="none")


def test_a_planner_may_return_solutions() -> None:
    """One, or several of which the budget chooses."""

    class Mine:
        def __call__(self, planning: Problem) -> list[Solution]:
            return [planning.identity("a"), planning.mirror({"f1": 1, "f3": 1}, "b")]

    graph = chain(4)
    assert fxremat.plan(graph, planner=Mine(), fusion="none").planner == "a"
    assert fxremat.plan(graph, "min", Mine(), fusion="none").planner == "b"
    assert fxremat.plan(graph, 4, Mine(), fusion="none").peak_bytes == 4
    assert fxremat.plan(graph, planner=lambda p: p.identity("c"), fusion="none").planner == "c"


def test_an_unknown_planner_is_refused() -> None:
    """The error names the planner that was probably meant."""
    with pytest.raises(InvalidOptionError) as caught:
        fxremat.plan(chain(2), planner="sublinaer", fusion="none")
    assert caught.value.near_matches == ("sublinear",)


def test_a_planner_sees_the_costs() -> None:
    """Given seconds reach the planner by its problem."""
    seen: list[float] = []

    def mine(planning: Problem) -> Solution:
        seen.extend(planning.costs.fixed)
        return planning.identity("mine")

    fxremat.plan(chain(1), planner=mine, cost={"f1": 2.0, "g1": 3.0}, fusion="none")
    assert seen == [0.0, 0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"schedule": 3}', None, '{"schedule": [], "x": 1}']
)
def test_what_to_json_did_not_write_is_refused(text: Any) -> None:
    """Whatever is wrong with it."""
    with pytest.raises(InvalidOptionError, match="is no solution that to_json wrote"):
        Solution.from_json(text)
