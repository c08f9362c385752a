"""condensed, order, evict, retain: what the search of ``auto`` counts is what the memory model counts."""

from __future__ import annotations

import itertools
import math
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from graphs import chain, few, joint_graphs, networks, problem, unread_bytes
from hypothesis import given
from hypothesis import strategies as st
from models import case, fresh
from networks import Residual
from optima import DRAWN, advancing
from programs import Network, traced
from torch import nn

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.ops import is_convolution_gradient
from fxremat.graph.schedule import bind, prune, validate
from fxremat.inductor.facts import facts
from fxremat.memory.lowering import Copies
from fxremat.planners.auto import _variants
from fxremat.predict.cost import Costs
from fxremat.predict.models import EVERY_VALUE, INDUCTOR, Inductor, profile
from fxremat.predict.problem import Problem
from fxremat.proof import search as proof
from fxremat.search import row
from fxremat.search.baseline import default_plan
from fxremat.search.condensed import Condensed, condense
from fxremat.search.evict import MAX_RUNS, _Simulation, evict
from fxremat.search.order import memory_order, moved
from fxremat.search.profile import peak_bytes
from fxremat.search.profile import profile as profile_of_plan
from fxremat.search.replay import followed, without_unread
from fxremat.search.retain import Runs, retain

MIB = 1 << 20


def condensed_of(graph: JointGraph) -> tuple[Problem, Condensed]:
    """The problem of a graph without fusion, and its condensed graph."""
    stated = problem(graph)
    return stated, condense(stated.graph, stated.costs)


def own(condensed: Condensed) -> tuple[int, ...]:
    """Every operator once, in the graph's order."""
    return tuple(range(len(condensed.operators)))


def check(stated: Problem, condensed: Condensed, plan: tuple[int, ...]) -> None:
    """A plan is a valid schedule, and takes what its runs say, once those are gone that nobody reads."""
    schedule = prune(stated.graph, condensed.schedule(without_unread(condensed, plan)))
    validate(stated.graph, schedule)
    plan = followed(condensed, bind(stated.graph, schedule).nodes)
    solution = stated.evaluate(schedule, "a test")
    counted = peak_bytes(condensed, plan)
    assert Runs(condensed, plan).peak_bytes == counted
    assert 0 <= counted - solution.peak_bytes <= unread_bytes(stated.graph)
    assert condensed.seconds(plan) == pytest.approx(solution.seconds)


def plans_under(condensed: Condensed, part: float, power: float) -> list[tuple[int, tuple[int, ...]]]:
    """Budgets, and the plans of ``evict`` for them in both orders."""
    orders = (own(condensed), memory_order(condensed))
    found = []
    for order in orders:
        budget = round(Runs(condensed, order).peak_bytes * part)
        plan = evict(condensed, order, budget, power)
        if plan is not None:
            found.append((budget, plan))
    return found


# --- The condensed graph ----------------------------------------------------------------------------------


@few(200)
@given(joint_graphs())
def test_both_orders_are_what_the_memory_model_says(graph: JointGraph) -> None:
    """The graph's own order and the one that frees early, counted twice."""
    stated, condensed = condensed_of(graph)
    check(stated, condensed, own(condensed))
    order = memory_order(condensed)
    assert sorted(order) == list(own(condensed))
    check(stated, condensed, order)
    assert Runs(condensed, own(condensed)).peak_bytes == profile(graph, graph.names).peak_bytes


@few(25)
@given(networks())
def test_a_traced_network_is_condensed(network: Network) -> None:
    """Views, several outputs, kept values: all as the memory model has them."""
    graph = traced(network)
    stated, condensed = condensed_of(graph)
    assert len(condensed.operators) < len(graph.nodes) - graph.num_inputs
    check(stated, condensed, own(condensed))
    check(stated, condensed, memory_order(condensed))


def test_views_are_free_and_results_of_several_outputs_are_one_operator() -> None:
    """An attention's operator has all its outputs, and the transposes before it are free."""
    module, inputs = fresh(case("transformer"))
    graph = fxremat.capture(module, *inputs, compiler="eager")
    _, condensed = condensed_of(graph)
    attention = [
        each
        for each in condensed.operators
        if "attention" in graph.nodes[each.members[0]].name and each.members[0] < graph.boundary
    ]
    assert len(attention) == 3  # one a block
    for each in attention:
        assert len(each.members) > 1 and len(each.makes) > 1
        assert all(not graph.nodes[node].creates for node in each.free)
        assert each.free  # the transposed query, key and value


def test_inlined_nodes_belong_to_their_readers() -> None:
    """x -> a -> b -> c: with a inlined, b reads x and takes the seconds of both."""
    graph = chain(3)
    stated = problem(graph)
    plain = condense(graph, stated.costs)
    first = graph.num_inputs
    inlined = condense(graph, stated.costs, inlined=frozenset({first}))
    assert len(inlined.operators) == len(plain.operators) - 1
    assert first in inlined.operators[0].free
    schedule = inlined.schedule(own(inlined))
    validate(graph, schedule)
    # It runs in the forward for its reader there, and again in the backward for those there.
    assert schedule.mirror_counts == {graph.nodes[first].name: 1}


def test_inlined_nodes_read_and_write_nothing_of_each_other() -> None:
    """x -> a -> b -> c: with a and b inlined, c takes all three's arithmetic, reads x and writes itself."""
    graph = chain(3)
    count = len(graph.nodes)
    costs = Costs(
        (1.0,) * count, (100.0,) * count, tuple(10.0**-each for each in range(1, count + 1)), (False,) * count
    )
    first = graph.num_inputs
    found = condense(graph, costs, inlined=frozenset({first, first + 1})).operators[0]
    assert found.members == (first + 2,) and found.free == (first, first + 1)
    (read,) = graph.nodes[first].operands
    assert found.seconds == pytest.approx(3 * 1.0 + 100.0 + costs.read[read])


@pytest.mark.parametrize("name", ["transformer", "unet"])
def test_the_seconds_of_operators_are_about_those_of_their_kernels(name: str) -> None:
    """No run takes less than none; all together a little more: what is inlined counts for each reader."""
    module, inputs = fresh(case(name))
    stated = make_problem(fxremat.capture(module, *inputs, compiler="inductor"))
    default = default_plan(stated)
    for inlined, joins_calls in _variants(stated, default):
        condensed = condense(stated.graph, stated.costs, stated.model, inlined, joins_calls)
        assert min(condensed.each_seconds) >= 0
        seconds = condensed.seconds(followed(condensed, stated.lowered(default)[0].nodes))
        assert default.seconds <= seconds <= 1.5 * default.seconds


def test_loops_of_inductor_write_over_what_they_read() -> None:
    """b = f(a) takes the place of a where nothing else reads a: a is not counted beside it."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Linear(8, 8))
    graph = fxremat.capture(module, torch.randn(64, 8), compiler="inductor")
    stated = make_problem(graph, fusion="inductor")
    apart = condense(graph, stated.costs, EVERY_VALUE)
    over = condense(graph, stated.costs, INDUCTOR)
    assert not any(each.overwrites for each in apart.operators)
    for each in over.operators:
        assert all(over.size[buffer] == over.size[each.makes[0]] for buffer in each.overwrites)
        is_loop = graph.loops[each.members[0]].kind in (Kind.POINTWISE, Kind.REDUCTION)
        assert is_loop or not each.overwrites
    saved = Runs(apart, own(apart)).live.values - Runs(over, own(over)).live.values
    assert (saved >= 0).all() and saved.max() == 64 * 8 * 4


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_copies_for_convolutions_count(name: str) -> None:
    """Weights that lie channels last are held to the last gradient, and no plan is without them.

    Images that convolutions read are copied as well.
    """
    module, inputs = fresh(case(name))
    stated = make_problem(fxremat.capture(module, *inputs), fusion="inductor")
    default = default_plan(stated)
    copies = stated.model.copies(stated.graph, stated.lowered(default)[0])
    weights = sum(size for _, size in copies.of_inputs)
    assert weights >= sum(
        each.nbytes for each in module.parameters() if each.dim() == 4 and each.shape[1] > 1
    )
    without, condensed = (
        condense(stated.graph, stated.costs, stated.model, copies=each) for each in (Copies(), copies)
    )
    plan = followed(condensed, range(stated.graph.num_inputs, len(stated.graph.nodes)))
    more = profile_of_plan(condensed, plan).live - profile_of_plan(without, plan).live
    assert more[condensed.boundary_of(plan) - 1] == weights and more[-1] < weights


@pytest.mark.parametrize("is_known", [True, False])
def test_nothing_is_written_over_what_lies_otherwise(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group normalisation's gradient lies in the order of sizes, those of convolutions channels last."""
    if not is_known:
        monkeypatch.setattr(Inductor, "layouts", lambda self, graph: {})
    blocks = (Residual(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.GELU()) for _ in range(2))
    network, images = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks), torch.randn(2, 3, 16, 16)
    captured = fxremat.capture(network, images, loss=torch.sum, compiler="inductor")
    stated = make_problem(captured, fusion="inductor").as_usual  # a sum that is stored is between the two
    graph, (inlined, _) = stated.graph, _variants(stated, default_plan(stated))[0]
    condensed, flattened = condense(graph, stated.costs, stated.model, inlined), facts(graph).flattened
    makers = (
        condensed.operators[condensed.maker[buffer]].members[0]
        for operator in condensed.operators
        if operator.members[0] in flattened
        for buffer in operator.overwrites
    )
    assert any(is_convolution_gradient(graph.fx_nodes[node]) for node in makers) != is_known


@pytest.mark.parametrize("budget", [400_000, 500_000])
def test_copies_are_not_evicted(budget: int) -> None:
    """A run under a budget keeps to it although they cannot be had again."""
    module, inputs = fresh(case("resnet"))
    stated = make_problem(fxremat.capture(module, *inputs), fusion="inductor")
    copies = stated.model.copies(stated.graph, stated.lowered(default_plan(stated))[0])
    condensed = condense(stated.graph, stated.costs, stated.model, copies=copies)
    plan = evict(condensed, own(condensed), budget, 1.0)
    assert plan is not None and len(plan) > len(condensed.operators)
    assert peak_bytes(condensed, plan) <= budget
    validate(stated.graph, condensed.schedule(plan))


# --- Eviction ---------------------------------------------------------------------------------------------


@few(300)
@given(joint_graphs(), st.floats(0.3, 1.0), st.sampled_from([0.0, 0.5, 1.0]))
def test_evicted_plans_fit_their_budget(graph: JointGraph, part: float, power: float) -> None:
    """On any graph a plan is valid, and as large as it says."""
    stated, condensed = condensed_of(graph)
    for budget, plan in plans_under(condensed, part, power):
        check(stated, condensed, plan)
        assert Runs(condensed, plan).peak_bytes <= budget


@few(25)
@given(networks(), st.floats(0.3, 1.0))
def test_evicted_plans_of_a_network_fit_their_budget(network: Network, part: float) -> None:
    """The same for traced networks."""
    stated, condensed = condensed_of(traced(network))
    for budget, plan in plans_under(condensed, part, 0.5):
        check(stated, condensed, plan)
        assert Runs(condensed, plan).peak_bytes <= budget


def test_nothing_is_evicted_where_all_fits() -> None:
    """With room for everything the plan is the order."""
    _, condensed = condensed_of(chain(12))
    order = own(condensed)
    assert evict(condensed, order, Runs(condensed, order).peak_bytes, 1.0) == order


def test_a_budget_that_no_operator_fits_fails() -> None:
    """There is no plan for a byte."""
    _, condensed = condensed_of(chain(12))
    assert evict(condensed, own(condensed), 1, 1.0) is None


def test_a_tight_chain_is_run_recursively() -> None:
    """Under a budget far below the root of its length a chain takes more than one forward."""
    _, condensed = condensed_of(chain(64))
    order = own(condensed)
    needed = min(
        budget
        for budget in range(1, Runs(condensed, order).peak_bytes)
        if evict(condensed, order, budget, 1.0)
    )
    plan = evict(condensed, order, needed, 1.0)
    assert plan is not None and max(map(plan.count, set(plan))) > 2
    assert needed < Runs(condensed, order).peak_bytes / 4


def calls_to_make_room(waiting: int) -> int:
    """Calls of functions while room is made for one byte, beside so many values in use by what waits."""
    values = [f"v{each}" for each in range(waiting)]
    graph = JointGraph.from_mappings(
        {"x": (), **dict.fromkeys(values, ("x",)), "t": values, "dx": ["t", *values]},
        dict.fromkeys((*values, "t", "dx"), 1),
        forward_outputs=["t"],
        backward=["dx"],
        backward_outputs=["dx"],
    )
    _, condensed = condensed_of(graph)
    run = _Simulation(condensed, own(condensed), waiting, 1.0, None)
    for each in range(waiting):
        run._run(each)
    run.locks = [1] * len(run.locks)
    assert run._make_room(1, ())  # takes them all out of the queue
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    has_room = run._make_room(2, ())
    sys.setprofile(None)
    assert has_room and run.live == waiting - 2
    return calls


def test_room_is_made_without_going_through_all_that_waits() -> None:
    """What it takes to evict one of many values that wait for a recomputation does not grow with these."""
    assert calls_to_make_room(512) == calls_to_make_room(32)


def test_a_run_is_given_up_once_it_must_become_too_long() -> None:
    """What has run and what is left, once each, are together no more than the limit and one run."""
    _, condensed = condensed_of(chain(64))
    run = _Simulation(condensed, own(condensed), 4, 1.0, None)
    assert run.plan(math.inf) is None
    left = len(run.order) - run.place - 1
    assert len(run.order_run) + left <= MAX_RUNS * len(run.order) + 1


# --- Retention --------------------------------------------------------------------------------------------


@few(300)
@given(joint_graphs(), st.floats(0.3, 1.0), st.floats(1.0, 1.5))
def test_retaining_costs_no_time_and_fits(graph: JointGraph, part: float, room: float) -> None:
    """With the same room or more a plan gets no slower and stays within."""
    stated, condensed = condensed_of(graph)
    for budget, plan in plans_under(condensed, part, 0.5):
        wider = round(budget * room)
        better = retain(condensed, plan, wider)
        check(stated, condensed, better)
        assert Runs(condensed, better).peak_bytes <= wider
        assert condensed.seconds(better) <= condensed.seconds(plan)


@few(300)
@given(joint_graphs(), st.floats(0.3, 0.9), st.data())
def test_the_profile_follows_dropped_runs(graph: JointGraph, part: float, data: st.DataObject) -> None:
    """After each drop the live bytes are those of the plan that is left."""
    _, condensed = condensed_of(graph)
    for _, plan in plans_under(condensed, part, 0.5):
        runs = Runs(condensed, plan)
        while again := [run for run in runs.by_worth() if runs.fits_without(run, 1 << 60)]:
            runs.drop(data.draw(st.sampled_from(again)))
            left = np.array(runs.is_there)
            assert runs.live.values[left].tolist() == Runs(condensed, runs.plan()).live.values.tolist()
        assert all(count == 1 for count in map(runs.plan().count, runs.plan())) or runs.by_worth()


def test_with_room_for_everything_nothing_is_recomputed() -> None:
    """All recomputations go."""
    _, condensed = condensed_of(chain(16))
    order = own(condensed)
    everything = Runs(condensed, order).peak_bytes
    plan = evict(condensed, order, everything // 2, 0.5)
    assert plan is not None and len(plan) > len(order)
    assert sorted(retain(condensed, plan, everything)) == list(order)


# --- The order --------------------------------------------------------------------------------------------


def test_weight_gradients_run_as_soon_as_they_free_memory() -> None:
    """b's gradient reads a large a that nothing else of the backward reads; it comes before the way back."""
    graph = JointGraph.from_mappings(
        {
            **{"x": (), "a": ["x"], "b": ["a"], "t": ["b"]},
            **{"db": ["t"], "dx": ["db"], "dw": ["db", "a"]},
        },
        {"a": 16, "b": 1, "t": 1, "db": 1, "dx": 8, "dw": 1},
        forward_outputs=["t"],
        backward=["db", "dx", "dw"],
        backward_outputs=["dw", "dx"],
    )
    _, condensed = condensed_of(graph)
    order = [graph.nodes[condensed.operators[each].members[0]].name for each in memory_order(condensed)]
    assert order == ["a", "b", "t", "db", "dw", "dx"]


def small_batch(late_bytes: int) -> JointGraph:
    """Two layers whose weights are larger than what they compute; the gradient of b's is read last."""
    return JointGraph.from_mappings(
        {
            **{"x": (), "a": ["x"], "b": ["a"], "t": ["b"]},
            **{"db": ["t"], "dw": ["db", "a"], "da": ["db", "a"], "dv": ["da"], "du": ["dw"]},
        },
        {"a": 4, "b": 1, "t": 1, "db": 1, "dw": 16, "da": late_bytes, "dv": 1, "du": 16},
        forward_outputs=["t"],
        backward=["db", "dw", "da", "dv", "du"],
        backward_outputs=["dv", "du"],
    )


def test_gradients_that_are_larger_than_what_they_read_wait_where_the_peak_is_lower() -> None:
    """dw waits for its reader, so that da, which is large, has gone before; a small da is no reason."""
    for late_bytes, expected in ((32, "db da dv dw du"), (1, "db dw da dv du")):
        graph = small_batch(late_bytes)
        stated, condensed = condensed_of(graph)
        order = memory_order(condensed)
        names = [graph.nodes[condensed.operators[each].members[0]].name for each in order]
        assert names[3:] == expected.split()
        check(stated, condensed, order)


# --- The search -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["transformer", "unet", "densenet", pytest.param("lstm", marks=pytest.mark.slow)]
)
def test_the_search_goes_below_one_recomputation_of_each_value(name: str) -> None:
    """Its lowest peak is below what mirror counts of one reach."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs, compiler="eager")
    searched, sublinear = (fxremat.plan(graph, "min", each, fusion="none") for each in ("auto", "sublinear"))
    assert searched.peak_bytes < sublinear.peak_bytes
    assert any(count > 1 for count in searched.mirror_counts.values())


def test_little_time_is_not_spent_on_budgets_below_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few tries ``evict`` is not asked for less than the known plans take: failing takes longest."""
    _, condensed = condensed_of(advancing(40))
    search = row.Row(condensed, 10)
    asked = []

    def count(*arguments: Any, **options: Any) -> tuple[int, ...] | None:
        asked.append(arguments[2])
        return evict(*arguments, **options)

    monkeypatch.setattr(row, "evict", count)
    least = min(plan.peak_bytes for plan in search.known)
    assert search._least_budget() == least
    assert not asked
    row.Row(condensed, row.ENOUGH_TRIES)._least_budget()
    assert asked


class Doubled(nn.Module):
    """A layer twice, and pointwise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.layer(self.layer(x).tanh()).sin().exp().sum()


def test_what_the_backward_makes_again_is_written_over() -> None:
    """What the forward made isn't: where all is made again, two values at a time are enough and not three."""
    rows = torch.randn(107, 4)
    graph = fxremat.capture(Doubled(), rows, compiler="eager")
    assert 2 * rows.nbytes < fxremat.plan(graph, "min", fusion="inplace").peak_bytes < 3 * rows.nbytes


@few(100)
@given(joint_graphs(), st.integers(0, 99))
def test_moved_orders_are_what_the_memory_model_says(graph: JointGraph, seed: int) -> None:
    """A few moves, one after the other: valid schedules, in which effects keep their order."""
    stated, condensed = condensed_of(graph)
    order, chance = own(condensed), random.Random(seed)
    for _ in range(4):
        other = moved(condensed, order, chance) or order
        assert sorted(other) == list(own(condensed))
        check(stated, condensed, other)
        fixed = [each for each in other if not condensed.operators[each].may_move]
        assert fixed == sorted(fixed)
        order = other


def test_a_chain_has_one_order() -> None:
    """No operator of it can go before another; nor is there another order of none at all."""
    nothing = JointGraph.from_mappings({"x": []}, {"x": 4}, forward_outputs=[], backward_outputs=[])
    for graph in (chain(6), nothing):
        _, condensed = condensed_of(graph)
        assert moved(condensed, own(condensed), random.Random(0)) is None
    assert fxremat.plan(nothing, "min", fusion="none").peak_bytes == 0


def test_orders_are_searched_for_the_least_peak() -> None:
    """Of drawn graphs: never higher than in the two orders alone, and oftener the one that is proved."""
    proved = {(0, 0): 0, (64, 8): 0}  # by moves
    for seed in range(12):
        stated, condensed = condensed_of(DRAWN["any DAG"](seed))
        least, before = min(each.peak_bytes for each in proof.plan(stated)), math.inf
        for moves in proved:
            schedules = map(condensed.schedule, row.Row(condensed, 64, moves=moves).plans())
            lowest = min(stated.evaluate(each, "a test").peak_bytes for each in schedules)
            assert least <= lowest <= before
            proved[moves] += lowest == least
            before = lowest
    assert proved[0, 0] < proved[64, 8]


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_the_frontier_has_no_wide_gaps(name: str) -> None:
    """No budget is served by a plan that wastes a third of it."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs, compiler="eager")
    points = fxremat.frontier(graph, fusion="none")
    assert len(points) >= 12
    assert all(low.peak_bytes > 0.7 * high.peak_bytes for high, low in itertools.pairwise(points))


class Split(nn.Module):
    """What returns a part of a value, and reads another."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.exp().split(3)
        return first, second.sin()


def test_what_picks_of_a_view_that_stays_in_place_runs_behind_it() -> None:
    """A view with a returned part is an operator, and so who reads the others waits for it."""
    graph = fxremat.capture(Split(), torch.randn(6, 4))
    (view,) = (name for name in graph.names if name.startswith("split"))
    _, condensed = condensed_of(graph)
    by_name = {graph.nodes[each.members[0]].name: each for each in condensed.operators}
    assert set(by_name[view].makes) & set(by_name["sin"].reads)
    assert set(by_name["exp"].makes) & set(by_name["sin"].reads)
