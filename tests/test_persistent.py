"""The dynamic programme over blocks: closed forms, exhaustive search, and models."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from dataclasses import replace

import models
import pytest

import fxremat
from fxremat import chain
from fxremat.cost import costs
from fxremat.graph import JointGraph
from fxremat.planners.blocks import cuts, divide, narrowest
from fxremat.planners.condensed import Condensed, condense
from fxremat.planners.persistent import plans
from fxremat.planners.replay import peak_bytes
from fxremat.planners.table import Plan, Table
from fxremat.schedule import validate


def condensed(graph: JointGraph) -> Condensed:
    """The graph as planning weighs it."""
    return condense(graph, costs(graph))


def exact(graph: Condensed, budget: int) -> list[Plan]:
    """The fastest plan for a budget of small sizes, each narrow cut being used and no size rounded."""
    return Table(divide(graph, narrowest(cuts(graph), 1)), 1, budget).fitting(budget)


def advancing(layers: int) -> Condensed:
    """Revolve's chain: x_i is made of x_(i - 1) for a second; the gradient g_i of x_(i - 1) and g_(i + 1).

    x_0 is the caller's, everything else takes one byte, but for the last value, which nobody reads and which
    costs nothing. A gradient runs the forward of its layer within itself, as revolve has it, so that a plan
    takes forwards(layers, s) - layers seconds. With s checkpoints, the input among them, s - 1 values are
    held while an advance needs two more and a gradient, or a gradient one more and two gradients.
    """
    operands: dict[str, list[str]] = {"x0": [], "seed": []}
    operands |= {f"x{i}": [f"x{i - 1}"] for i in range(1, layers + 1)}
    for i in range(layers, 0, -1):
        operands[f"g{i}"] = [f"g{i + 1}" if i < layers else "seed", f"x{i - 1}"]
    forward = [f"x{i}" for i in range(1, layers + 1)]
    backward = [name for name in operands if name[0] == "g"]
    order = {name: operands[name] for name in ("x0", *forward, "seed", *backward)}
    sizes = dict.fromkeys([*forward, "seed", *backward], 1) | {f"x{layers}": 0}
    seconds = dict.fromkeys(forward, 1.0) | {f"x{layers}": 0.0}
    return condensed(
        JointGraph.from_mappings(
            order, sizes, backward=["seed", *backward], backward_outputs=["g1"], seconds=seconds
        )
    )


@pytest.mark.parametrize(
    ("layers", "checkpoints"),
    [(10, 2), (10, 3), (16, 3), (20, 3), (32, 4), (100, 5), (1000, 10)],
)
def test_revolve(layers: int, checkpoints: int) -> None:
    """On revolve's chain the plan for its memory takes the number of forwards of its closed form."""
    (plan,) = exact(advancing(layers), checkpoints + 2)
    assert plan.peak_bytes <= checkpoints + 2
    assert plan.seconds == chain.forwards(layers, checkpoints) - layers


def taped(layers: int, record: int = 1) -> Condensed:
    """Rotor's chain: a layer makes its record of its input in a second, and its output of the record.

    x_0 is the caller's; outputs and gradients take one byte, a record, its output included, ``record``; a
    record of a single byte is the output. The gradient of a layer takes two seconds, and reads input, record
    and output. Rotor writes gradients over one another: m of its bytes are m + 1 here. Where the record is
    the output, times are those of the mixed recurrence with s checkpoints in s + 3 bytes.
    """
    operands: dict[str, list[str]] = {"x0": []}
    for i in range(1, layers + 1):
        tape = {f"t{i}": [f"x{i - 1}"]} if record > 1 else {}
        operands |= tape | {f"x{i}": list(tape) or [f"x{i - 1}"]}
    operands["seed"] = []
    for i in range(layers, 0, -1):
        tapes = [f"t{i}"] if record > 1 else []
        operands[f"g{i}"] = [f"g{i + 1}" if i < layers else "seed", f"x{i - 1}", f"x{i}", *tapes]
    sizes = {name: record - 1 if name[0] == "t" else 1 for name in operands if name != "x0"}
    backward = [name for name in operands if name[0] in "sg"]
    each = {"t": 1.0, "g": 2.0} | ({"x": 1.0} if record == 1 else {})
    seconds = {name: each.get(name[0], 0.0) for name in operands}
    graph = JointGraph.from_mappings(
        operands, sizes, backward=backward, backward_outputs=["g1"], seconds=seconds
    )
    return condensed(graph)


@functools.cache
def mixed(layers: int, checkpoints: int) -> int:
    """Maddison's recurrence: forwards where a checkpoint may hold a value or a record of the same size."""
    if layers <= checkpoints + 1:
        return layers
    if checkpoints == 1:
        return layers * (layers + 1) // 2 - 1
    held = (i + mixed(i, checkpoints) + mixed(layers - i, checkpoints - 1) for i in range(2, layers))
    return min(1 + mixed(layers - 1, checkpoints - 1), *held)


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
    expected = chain.forwards(layers, checkpoints) - layers
    assert least_seconds(advancing(layers), checkpoints + 2) == expected


@pytest.mark.parametrize(
    ("layers", "checkpoints", "forwards"), [(10, 3, 19), (16, 4, 33), (32, 4, 87), (100, 10, 237)]
)
def test_mixed_recurrence(layers: int, checkpoints: int, forwards: int) -> None:
    """Where a record is as large as a value, the forwards are those of Maddison's recurrence."""
    assert mixed(layers, checkpoints) == forwards
    (plan,) = exact(taped(layers), checkpoints + 3)
    assert plan.peak_bytes <= checkpoints + 3
    assert plan.seconds == 2 * layers + forwards


@pytest.mark.parametrize(
    ("layers", "memory", "seconds"),
    [
        *((32, *pair) for pair in ((6, 592), (8, 189), (10, 161), (16, 135), (28, 123))),
        *((100, *pair) for pair in ((6, 5250), (8, 790), (12, 545), (20, 459))),
    ],
)
def test_rotor(layers: int, memory: int, seconds: int) -> None:
    """Where a record is larger than its output, times are the known optima of rotor's chain."""
    (plan,) = exact(taped(layers, record=4), memory + 1)
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
    found = plans(small)
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
    most = peak_bytes(small, range(len(small.operators)))
    seconds = []
    for budget in (most, int(0.9 * most), int(0.8 * most), int(0.7 * most)):
        (plan,) = plans(small, [budget])
        assert plan.peak_bytes <= budget
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds)
    assert plans(small, [most // 100]) == []


def test_limits_are_obeyed() -> None:
    """What may run once runs once; the backward does not read what the forward made to be repeated."""
    layers = 8
    small = advancing(layers)
    operators = list(small.operators)
    operators[2] = replace(operators[2], runs_at_most=1)
    operators[4] = replace(operators[4], must_repeat=True)
    small = replace(small, operators=tuple(operators))
    found = plans(small)
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
    graph = advancing(1000)
    blocks = divide(graph, narrowest(cuts(graph), 1))
    assert len(blocks.kinds) == 1000
    assert len(blocks.shapes) < 6
