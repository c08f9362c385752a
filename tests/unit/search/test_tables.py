"""The dynamic programme over blocks: closed forms, exhaustive search, and models."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import models
import pytest
from optima import REVOLVE, advancing, forwards, mixed, taped

import fxremat
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import validate
from fxremat.predict.cost import costs
from fxremat.search import tables
from fxremat.search.blocks import Division, cuts, divide, narrowest
from fxremat.search.condensed import Condensed, condense
from fxremat.search.profile import Plan, peak_bytes
from fxremat.search.table import Table


def condensed(graph: JointGraph) -> Condensed:
    """The graph as planning weighs it."""
    return condense(graph, costs(graph))


def exact(graph: Condensed, budget: int) -> list[Plan]:
    """The fastest plan for a budget of small sizes, each narrow cut being used and no size rounded."""
    return Table(divide(graph, narrowest(cuts(graph), 1)), 1, budget).fitting(budget)


@pytest.mark.parametrize(
    ("layers", "checkpoints"),
    REVOLVE,
)
def test_revolve(layers: int, checkpoints: int) -> None:
    """On revolve's chain the plan for its memory takes the number of forwards of its closed form."""
    (plan,) = exact(condensed(advancing(layers)), checkpoints + 2)
    assert plan.peak_bytes <= checkpoints + 2
    assert plan.seconds == forwards(layers, checkpoints) - layers


def test_a_thousand_layers() -> None:
    """Revolve's optimum is among the plans made without a budget, for the finest blocks are used."""
    graph = advancing(1000)
    small = condensed(graph)
    fitting = [plan for plan in tables.spread(tables.solve(small)) if plan.peak_bytes <= 12]
    best = min(fitting, key=lambda plan: plan.seconds)
    assert best.seconds == forwards(1000, 10) - 1000
    assert fxremat.profile(graph, small.schedule(best.operators), "none").peak_bytes <= 12


def test_the_graph_is_divided_once_for_each_set_of_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of finer and coarser blocks look for theirs among the same divisions."""
    asked: list[tuple[int, ...]] = []

    def count(graph: Condensed, firsts: Sequence[int]) -> Division:
        asked.append(tuple(firsts))
        return divide(graph, firsts)

    monkeypatch.setattr(tables, "divide", count)
    assert len(tables.solve(condensed(advancing(1000)))) > 2
    assert len(asked) == len(set(asked)) > 2


def test_no_plan_is_endless() -> None:
    """Plans that run a layer hundreds of times on average are left out: a thousand layers in three bytes."""
    small = condensed(advancing(1000))
    (plan,) = exact(small, 6)
    assert plan.seconds == forwards(1000, 4) - 1000
    assert exact(small, 3) == []


def least_seconds(graph: Condensed, budget: int) -> float:
    """The least time of any plan that fits, by Dijkstra's algorithm over what is done and what is held."""
    boundary = graph.boundary
    start = (0, frozenset[int]())
    best = {start: 0.0}
    tie = itertools.count()
    queue: list[tuple[float, int, tuple[int, frozenset[int]]]] = [(0.0, next(tie), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        done, live = state
        if done == len(graph.operators):
            return seconds
        if seconds > best[state]:
            continue
        for index in (*range(min(done, boundary)), done):
            operator = graph.operators[index]
            made = frozenset(operator.makes)
            if not live.issuperset(operator.reads) or (index < done and live & made):
                continue
            if sum(graph.size[buffer] for buffer in live | made) > budget:
                continue
            after = live | made
            pinned = frozenset(buffer for buffer in after if graph.pinned[buffer])
            for count in range(len(after) + 1):
                for kept in itertools.combinations(sorted(after), count):
                    if not pinned.issubset(kept):
                        continue
                    found = (done + (index == done), frozenset(kept))
                    total = seconds + operator.seconds
                    if total < best.get(found, float("inf")):
                        best[found] = total
                        heapq.heappush(queue, (total, next(tie), found))
    return float("inf")


@pytest.mark.parametrize(("layers", "checkpoints"), [(5, 2), (6, 2), (7, 2), (7, 3)])
def test_revolve_is_the_least_of_all_plans(layers: int, checkpoints: int) -> None:
    """The memory that stands for revolve's checkpoints is the right one: no plan at all takes less time."""
    expected = forwards(layers, checkpoints) - layers
    assert least_seconds(condensed(advancing(layers)), checkpoints + 2) == expected


@pytest.mark.parametrize(
    ("layers", "checkpoints", "expected"), [(10, 3, 19), (16, 4, 33), (32, 4, 87), (100, 10, 237)]
)
def test_mixed_recurrence(layers: int, checkpoints: int, expected: int) -> None:
    """Where a record is as large as a value, the forwards are those of Maddison's recurrence."""
    assert mixed(layers, checkpoints) == expected
    (plan,) = exact(condensed(taped(layers)), checkpoints + 3)
    assert plan.peak_bytes <= checkpoints + 3
    assert plan.seconds == 2 * layers + expected


@pytest.mark.parametrize(
    ("layers", "memory", "seconds"),
    [
        *((32, *pair) for pair in ((6, 592), (8, 189), (10, 161), (16, 135), (28, 123))),
        *((100, *pair) for pair in ((6, 5250), (8, 790), (12, 545), (20, 459))),
    ],
)
def test_rotor(layers: int, memory: int, seconds: int) -> None:
    """Where a record is larger than its output, times are the known optima of rotor's chain."""
    (plan,) = exact(condensed(taped(layers, record=4)), memory + 1)
    assert plan.peak_bytes <= memory + 1
    assert plan.seconds == seconds


def uneven(layers: int, seed: int) -> Condensed:
    """A chain with a record of four sizes and seconds of three, gradients of input, output and record."""
    draw = random.Random(seed)
    operands: dict[str, list[str]] = {"x0": []}
    for i in range(1, layers + 1):
        operands[f"x{i}"] = [f"x{i - 1}"]
    for i in range(layers, 0, -1):
        above = [f"g{i + 1}"] if i < layers else []
        operands[f"g{i}"] = [*above, f"x{i - 1}", *draw.choice(([], [f"x{i}"]))]
    sizes = {name: draw.randint(1, 4) for name in operands if name != "x0"}
    seconds = {name: float(draw.randint(1, 3)) for name in operands}
    backward = [name for name in operands if name[0] == "g"]
    graph = JointGraph.from_mappings(
        operands, sizes, backward=backward, backward_outputs=["g1"], seconds=seconds
    )
    return condensed(graph)


def test_uneven_chains() -> None:
    """No plan is better than the best of all, nor does it exceed its budget; most are as good."""
    excess = []
    for seed in range(12):
        graph = uneven(5, seed)
        most = peak_bytes(graph, range(len(graph.operators)))
        for budget in range(most, 0, -1):
            least = least_seconds(graph, budget)
            found = exact(graph, budget)
            assert not found or found[0].peak_bytes <= budget
            assert not found or found[0].seconds >= least
            excess += [plan.seconds / least - 1 for plan in found]
    assert sum(excess) / len(excess) < 0.05
    assert sum(each == 0 for each in excess) / len(excess) > 0.5


@pytest.mark.parametrize("name", ["transformer", "encoder_decoder", "resnet", "lstm", "unet", "dropout_mlp"])
def test_models(name: str) -> None:
    """On real graphs the plans are valid, and what they are said to take is what they take."""
    module, inputs = models.fresh(models.case(name))
    graph = fxremat.capture(module, *inputs, compiler="eager")
    small = condensed(graph)
    found = tables.spread(tables.solve(small))
    identity = peak_bytes(small, range(len(small.operators)))
    assert identity == fxremat.profile(graph, graph.names, "none").peak_bytes
    assert found[-1].peak_bytes < 0.8 * identity
    for more, less in itertools.pairwise(found):
        assert more.peak_bytes > less.peak_bytes
        assert more.seconds < less.seconds
    for plan in found:
        schedule = small.schedule(plan.operators)
        validate(graph, schedule)
        assert fxremat.profile(graph, schedule, "none").peak_bytes == plan.peak_bytes
        assert plan.seconds == pytest.approx(small.seconds(plan.operators))


def test_budgets() -> None:
    """Each budget is served with a plan within it, or with none; more memory never takes more time."""
    module, inputs = models.fresh(models.case("transformer"))
    small = condensed(fxremat.capture(module, *inputs, compiler="eager"))
    most, solved = peak_bytes(small, range(len(small.operators))), tables.solve(small)
    seconds = []
    for budget in (most, int(0.9 * most), int(0.8 * most), int(0.7 * most)):
        plan = min(tables.fitting(solved, budget), key=lambda plan: plan.seconds)
        assert plan.peak_bytes <= budget
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds)
    assert tables.fitting(solved, most // 100) == []


def test_limits_are_obeyed() -> None:
    """What may run once runs once; the backward does not read what the forward made to be repeated."""
    layers = 8
    small = condensed(advancing(layers))
    operators = list(small.operators)
    operators[2] = replace(operators[2], runs_at_most=1)
    operators[4] = replace(operators[4], must_repeat=True)
    operators[small.boundary - 1] = replace(operators[small.boundary - 1], ends_forward=True)
    small = replace(small, operators=tuple(operators))
    found = tables.spread(tables.solve(small))
    assert any(len(plan.operators) > len(operators) + 1 for plan in found)
    for plan in found:
        assert set(plan.operators) == set(range(len(operators)))
        assert plan.operators.count(2) == 1
        reader = next(
            i for i, each in enumerate(plan.operators) if 4 in operators_read(small, each) and each != 5
        )
        assert 4 in plan.operators[plan.operators.index(small.boundary - 1) : reader]


def operators_read(graph: Condensed, index: int) -> list[int]:
    """The operators whose buffers an operator reads."""
    return [graph.maker[buffer] for buffer in graph.operators[index].reads]


def test_equal_blocks_are_analysed_once() -> None:
    """A thousand equal layers have a handful of shapes."""
    graph = condensed(advancing(1000))
    blocks = divide(graph, narrowest(cuts(graph), 1))
    assert len(blocks.kinds) == 1000
    assert len(blocks.shapes) < 6
