"""exact: nothing beats its frontier: no brute force, no other planner, no random schedule, no theory."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from graphs import (
    chain,
    few,
    graphs_and_schedules,
    networks,
    problem,
    random_schedule,
    with_phases,
    with_views,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Network, traced
from torch import nn

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.errors import InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import validate
from fxremat.planners import PLANNERS
from fxremat.predict.problem import Solution
from fxremat.proof import moves, search


def assert_unbeaten(front: tuple[Solution, ...], others: list[Solution]) -> None:
    """None of the others takes less of one thing and no more of the other than all of a frontier."""
    for other in others:
        seconds = other.seconds * (1 + 1e-12)
        assert any(s.peak_bytes <= other.peak_bytes and s.seconds <= seconds for s in front), other


# --- Brute force on graphs of mappings ------------------------------------------------------------------


def random_graph(seed: int) -> JointGraph:
    """A DAG of 4 to 8 nodes of different sizes and costs, some of which may not run again."""
    draw = random.Random(seed)
    count = draw.randint(4, 8)
    names = [f"v{i}" for i in range(count)]
    first_backward = draw.randint(1, count)
    operands: dict[str, list[str]] = {"x": []}
    for i, name in enumerate(names):
        operands[name] = draw.sample(names[:i], min(i, draw.randint(1, 3))) or ["x"]
    read = {operand for reads in operands.values() for operand in reads}
    forward, backward = names[:first_backward], names[first_backward:]
    unread = [name for name in backward if name not in read]
    return JointGraph.from_mappings(
        operands,
        {name: draw.randint(0, 4) for name in names},
        forward_outputs=[forward[-1], *draw.sample(forward, draw.randint(0, 1))],
        backward_outputs=[*unread, *draw.sample(backward, min(len(backward), draw.randint(0, 1)))],
        backward=backward,
        keep=draw.sample(names, draw.randint(0, 2)),
        seconds={name: float(draw.randint(0, 5)) for name in names},
    )


def least_seconds(graph: JointGraph, budget: int) -> float:
    """Dijkstra over (which nodes have run, which are live), dropping one value or running one node."""
    first = graph.num_inputs
    size = {i: graph.node_bytes(i) for i in range(first, len(graph.nodes))}
    forward = frozenset(i for i in size if graph.nodes[i].phase.value == "forward")
    pinned = frozenset(i for i in graph.forward_outputs if i is not None)
    nothing: frozenset[int] = frozenset()
    best = {(nothing, nothing): 0.0}
    heap = [(0.0, 0, nothing, nothing)]
    number = itertools.count(1)
    while heap:
        seconds, _, ran, live = heapq.heappop(heap)
        if best[ran, live] < seconds:
            continue
        if len(ran) == len(size) and live.issuperset(graph.outputs):
            return seconds
        is_behind = ran >= forward
        following = [(seconds, ran, live - {i}) for i in live if not (is_behind and i in pinned)]
        for i, node in enumerate(graph.nodes[first:], first):
            needs = {operand for operand in node.operands if operand >= first}
            is_early = node.phase.value == "backward" and not is_behind
            if i in live or (i in ran and node.keep) or is_early or not needs <= live:
                continue
            after = live | {i}
            ends = not is_behind and ran | {i} >= forward
            if sum(map(size.__getitem__, after)) <= budget and not (ends and not pinned <= after):
                following.append((seconds + graph.given_seconds[node.name], ran | {i}, after))
        for cost, *state in following:
            if cost < best.get((state[0], state[1]), math.inf):
                best[state[0], state[1]] = cost
                heapq.heappush(heap, (cost, next(number), state[0], state[1]))
    return math.inf


@pytest.mark.parametrize("seed", range(120))
def test_brute_force_finds_nothing_better(seed: int) -> None:
    """At each peak of the frontier the seconds are the least, and a byte less takes those of the next."""
    graph = random_graph(seed)
    front = PLANNERS["exact"](problem(graph))
    seconds = [solution.seconds for solution in front]
    assert seconds[0] == least_seconds(graph, sum(graph.storage_bytes))
    for solution, following in zip(front, [*seconds[1:], math.inf], strict=True):
        validate(graph, solution.schedule)
        assert least_seconds(graph, solution.peak_bytes) == solution.seconds
        assert least_seconds(graph, solution.peak_bytes - 1) == following


# --- Every rule of a schedule: views, several outputs, effects, kept values ------------------------------


@settings(deadline=None)
@given(graphs_and_schedules(max_forward=5, max_backward=5), st.integers(0, 2**32))
def test_no_schedule_beats_it(drawn: object, seed: int) -> None:
    """Neither a random schedule nor a plan of any other planner, on graphs with everything there is."""
    graph, schedule = drawn  # type: ignore[misc]
    draw = random.Random(seed)
    seconds = {node.name: float(draw.randint(0, 5)) for node in graph.nodes if node.leader is None}
    planning = problem(graph, cost=seconds)
    front = search.plan(planning)
    others = [each for name, plan in PLANNERS.items() if name != "exact" for each in plan(planning)]
    assert_unbeaten(front, [*others, planning.evaluate(schedule, "random")])
    for solution in front:
        validate(graph, solution.schedule)


def picks_late(graph: JointGraph, order: list[str]) -> bool:
    """Whether an output is picked behind a mirror of its operator for the first time."""
    for output in graph.names:
        leader = graph.leader(output)
        if leader is not None and leader in order[order.index(leader) + 1 : order.index(output)]:
            return True
    return False


def all_schedules(graph: JointGraph, steps: int) -> Iterator[list[str]]:
    """Every sequence of so many names that is an execution as far as operands go."""

    def longer(order: list[str]) -> Iterator[list[str]]:
        yield order
        if len(order) == steps:
            return
        for node in graph.nodes[graph.num_inputs :]:
            reads = {graph.nodes[i].name for i in node.operands if i >= graph.num_inputs}
            if reads <= set(order) and not (node.keep and node.name in order):
                yield from longer([*order, node.name])

    return longer([])


@few(60)
@given(graphs_and_schedules(max_forward=2, max_backward=2), st.integers(0, 2**32))
def test_no_schedule_at_all_beats_it(drawn: object, seed: int) -> None:
    """All schedules of tiny graphs with views and several outputs, up to two mirrors, are evaluated."""
    graph, _ = drawn  # type: ignore[misc]
    if len(graph.names) > 5:
        return
    draw = random.Random(seed)
    seconds = {node.name: float(draw.randint(0, 5)) for node in graph.nodes if node.leader is None}
    planning = problem(graph, cost=seconds)
    valid = []
    for order in all_schedules(graph, len(graph.names) + 2):
        if set(order) == set(graph.names) and not picks_late(graph, order):
            try:
                validate(graph, order)
            except fxremat.ScheduleError:
                continue
            valid.append(planning.evaluate(order, "all"))
    assert valid
    assert_unbeaten(search.plan(planning), valid)


NETWORKS = {
    "layer_norm": [("layer_norm", -1, -1), ("linear", -1, -1)],
    "views": [("gate", -1, -1)],
    "max": [("max", -1, -1), ("tanh", -1, -1)],
    "dropout": [("dropout", -1, -1), ("tanh", -1, -1)],
    "dropout behind what is saved": [("linear", -1, -1), ("mul", -1, -1), ("dropout", -1, -1)],
    "batch_norm": [("batch_norm", -1, -1), ("tanh", -1, -1)],
    "sort": [("sort", -1, -1), ("layer_norm", -1, -1)],
    "two layers": [("gelu", -1, -1), ("linear", -1, -1), ("gelu", -1, -1), ("linear", -1, -1)],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_planner_beats_it_on_traced_graphs(name: str) -> None:
    """Views, operators with several outputs, random numbers; nor do random mirror counts."""
    torch.manual_seed(0)
    graph = traced(Network(NETWORKS[name]))
    planning = problem(graph)
    front = search.plan(planning)
    others = [each for other, plan in PLANNERS.items() if other != "exact" for each in plan(planning)]
    others += [planning.evaluate(random_schedule(graph, seed), "random") for seed in range(20)]
    assert_unbeaten(front, others)
    for solution in front:
        planning.check(solution)
        assert not any("dropout" in mirrored for mirrored in solution.mirror_counts)


@few(10)
@given(networks(max_steps=2))
def test_no_planner_beats_it_on_random_models(network: Network) -> None:
    """Small models of any operators."""
    planning = problem(traced(network))
    others = [each for other, plan in PLANNERS.items() if other != "exact" for each in plan(planning)]
    assert_unbeaten(search.plan(planning), others)


def test_a_first_run_needs_no_state_of_random_numbers() -> None:
    """The state may be taken and dropped while nothing else is live; a mirror that draws from it needs it."""
    planning = problem(traced(Network(NETWORKS["dropout behind what is saved"])))
    graph = planning.graph
    (state,) = (node for node in graph.nodes if node.name == "random_state")
    assert search.plan(planning)[-1].peak_bytes == sum(graph.storage_bytes[each] for each in state.creates)
    (draw,) = (each for each in moves.moves(planning).operators if each.restores)
    assert draw.restores.bit_count() == 1 and not draw.restores & (draw.reads[0] | draw.reads[1])


@pytest.mark.parametrize(("viewed", "peak_bytes"), [("a", 2), ("b", 101)])
def test_tangents_count_where_views_alone_run_behind_the_forward(viewed: str, peak_bytes: int) -> None:
    """A view of what ends the forward runs behind it; one of an earlier value may run before."""
    operands = {"x": [], "t": [], "a": ["x"], "b": ["a"], "view": [viewed]}
    graph = JointGraph.from_mappings(
        operands, {"a": 1, "b": 1}, forward_outputs=["b"], backward_outputs=["view"]
    )
    graph = with_phases(with_views(graph, {"view": viewed}), ["t"], tangent_bytes=100)
    assert [each.peak_bytes for each in search.plan(problem(graph))] == [peak_bytes]


def test_siblings_are_made_again_together() -> None:
    """A mirror of an operator with two outputs takes the place of the one that is still live."""
    graph = traced(Network([("layer_norm", -1, -1), ("linear", -1, -1)]))
    plan = moves.moves(problem(graph))
    norm = next(each for each in plan.operators if graph.nodes[each.members[0]].name == "native_layer_norm")
    assert len(norm.members) >= 4
    assert norm.makes == norm.remakes and norm.makes.bit_count() == 3


# --- What the user orders -------------------------------------------------------------------------------


class Ordered(nn.Module):
    """A value to be computed again, one to be kept, one with a single mirror."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fxremat.region(recompute=True):
            a = torch.tanh(x)
        with fxremat.region(keep=True):
            b = torch.sigmoid(a)
        with fxremat.region(mirror=1):
            c = torch.sin(b)
        return (b * c).sum()


def test_orders_are_obeyed() -> None:
    """At every point of the frontier, and no other planner finds better that obeys."""
    planning = problem(fxremat.capture(Ordered(), torch.randn(4, 8, requires_grad=True)))
    front = search.plan(planning)
    for solution in front:
        planning.check(solution)
        counts = solution.mirror_counts
        assert "sigmoid" not in counts and counts["tanh"] >= 1 and counts["sin"] == 1
    others = [each for other, plan in PLANNERS.items() if other != "exact" for each in plan(planning)]
    assert_unbeaten(front, others)


def test_an_ordered_output_has_two_instances() -> None:
    """The forward returns the first; the backward reads a second."""

    class Returned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(recompute=True):
                return torch.tanh(x)

    planning = problem(fxremat.capture(Returned(), torch.randn(4, 8, requires_grad=True)))
    (solution, *_) = search.plan(planning)
    assert planning.check(solution).mirror_counts["tanh"] == 1
    assert solution.peak_bytes == planning.mirror({"tanh": 1}, "mine").peak_bytes


def test_other_orders_on_a_view_than_on_its_value_are_refused() -> None:
    """A value to be computed again whose view is to be kept would need more instances than are modelled."""

    class Torn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(recompute=True):
                h = torch.tanh(x)
            with fxremat.region(keep=True):
                y = h.view(-1)
            return (torch.sin(y) * y).sum()

    planning = problem(fxremat.capture(Torn(), torch.randn(4, 8, requires_grad=True)))
    with pytest.raises(InvalidOptionError, match="ordered"):
        search.plan(planning)


# --- Known truths ---------------------------------------------------------------------------------------


def taped_chain(steps: int) -> JointGraph:
    """States x0 -> x1 -> ... of a byte; gi reads the tape of step i, made of x(i-1), of ten bytes."""
    operands: dict[str, list[str]] = {"x0": []}
    operands |= {f"x{i}": [f"x{i - 1}"] for i in range(1, steps)}
    operands |= {f"tape{i}": [f"x{i - 1}"] for i in range(1, steps + 1)}
    forward = list(operands)[1:]
    backward = [f"g{i}" for i in range(steps, 0, -1)]
    operands |= {f"g{i}": [f"tape{i}"] + [f"g{i + 1}"] * (i < steps) for i in range(steps, 0, -1)}
    return JointGraph.from_mappings(
        operands,
        {name: 10 if "tape" in name else 1 for name in forward} | dict.fromkeys(backward, 0),
        backward=backward,
        backward_outputs=["g1"],
        seconds=dict.fromkeys(forward, 1.0),
    )


def revolve_forwards(steps: int, checkpoints: int) -> int:
    """Forward steps of the best checkpointing, the taped ones included (Griewank and Walther 2000)."""
    repetitions = next(r for r in range(steps + 1) if math.comb(checkpoints + r, r) >= steps)
    return steps + repetitions * steps - math.comb(checkpoints + repetitions, repetitions - 1)


@pytest.mark.parametrize(("steps", "checkpoints"), [(4, 1), (5, 2), (6, 2), (6, 3), (7, 2)])
def test_it_takes_as_many_forwards_as_revolve(steps: int, checkpoints: int) -> None:
    """One tape fits beside the checkpoints; the input is one of these, and the running state is none."""
    solution = fxremat.plan(taped_chain(steps), 10 + checkpoints, "exact", fusion="none")
    assert solution.seconds == revolve_forwards(steps, checkpoints)


def unit_layers(layers: int) -> JointGraph:
    """Layers fi of a byte and a second each, and gradients gi that read g(i+1), fi and f(i-1)."""
    operands: dict[str, list[str]] = {"x": []}
    operands |= {f"f{i}": [f"f{i - 1}" if i > 1 else "x"] for i in range(1, layers + 1)}
    for i in range(layers, 0, -1):
        operands[f"g{i}"] = [f"f{i}", f"f{i - 1}" if i > 1 else "x"] + [f"g{i + 1}"] * (i < layers)
    body = [name for name in operands if name != "x"]
    return JointGraph.from_mappings(
        operands,
        dict.fromkeys(body, 1),
        backward=[name for name in body if name.startswith("g")],
        backward_outputs=["g1"],
        seconds=dict.fromkeys(body, 1.0),
    )


@pytest.mark.parametrize(("layers", "budget"), [(6, 4), (8, 5), (8, 4)])
def test_tight_budgets_of_unit_layers(layers: int, budget: int) -> None:
    """Where each value is small against the budget the brute force has few states, and agrees."""
    graph = unit_layers(layers)
    found = fxremat.plan(graph, budget, "exact", fusion="none")
    assert found.seconds == least_seconds(graph, budget)


# --- Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ["inplace", "inductor"])
def test_other_memory_models_are_refused(fusion: str) -> None:
    """The error says what to do."""
    graph = traced(Network([("tanh", -1, -1)]))
    with pytest.raises(InvalidOptionError, match="inplace=False"):
        search.plan(make_problem(graph, fusion=fusion))


def test_large_graphs_are_refused() -> None:
    """At once where there are too many operators, and when the states run out."""
    with pytest.raises(InvalidOptionError, match="operators"):
        search.plan(problem(chain(search.MAX_OPERATORS)))


def test_a_search_that_runs_out_of_states_is_given_up() -> None:
    """Nothing is returned that is not proved."""
    with pytest.raises(InvalidOptionError, match="gave up after 50 states"):
        search.plan(problem(chain(8)), max_states=50)


def test_seconds_are_added_exactly() -> None:
    """Sums of tenths that floats round differently are equal: the frontier has no point for a rounding."""
    graph = chain(6, seconds={f"{part}{i}": 0.1 * i for part in "fg" for i in range(1, 7)})
    front = search.plan(problem(graph))
    for before, after in itertools.pairwise(front):
        assert before.peak_bytes > after.peak_bytes
        assert after.seconds > before.seconds + 0.05


def test_a_budget_is_served_by_the_proved_plan() -> None:
    """By name, through plan; without a budget nothing is recomputed that needs not be."""
    graph = chain(8)
    budgets: dict[int | str | None, float] = {None: 16.0, 5: 21.0, "min": 31.0}
    for budget, seconds in budgets.items():
        solution = fxremat.plan(graph, budget, "exact", fusion="none")
        assert (solution.seconds, solution.planner) == (seconds, "exact")
