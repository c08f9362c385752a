"""bounds: no schedule takes less, found by every schedule of small graphs, and by the plans of models."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import models
import pytest
import torch
from graphs import chain, few, graphs_and_schedules, identity, networks, random_schedule, with_phases
from hypothesis import given
from hypothesis import strategies as st
from programs import Network, batch
from torch import nn

import fxremat
from fxremat.driver.pipeline import make_problem, solve
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase
from fxremat.planners import PLANNERS
from fxremat.predict.cost import costs
from fxremat.predict.models import EVERY_VALUE, FUSIONS
from fxremat.proof.bounds import Bounds

ROUNDING = 1 + 1e-9  # sums of the same seconds in another order


# --- By hand --------------------------------------------------------------------------------------------


def lowest_peak(graph: JointGraph) -> int:
    """Bytes below which no schedule has its peak, every value having a buffer."""
    return Bounds(graph, costs(graph), EVERY_VALUE).lowest_peak_bytes


def test_a_chain_is_bounded_exactly_while_one_mirror_each_suffices() -> None:
    """With room for k values of f1 ... f5 beside g6 and its operands, 5 - k of them run again."""
    bounds = Bounds(chain(6), costs(chain(6)), EVERY_VALUE)
    assert [bounds.seconds(budget) for budget in (5, 6, 7, 8)] == pytest.approx([14.0, 13.0, 12.0, 12.0])
    assert bounds.lowest_peak_bytes == 4
    assert bounds.seconds(3) == math.inf


def test_what_may_not_run_again_is_held() -> None:
    """Of five values that the backward reads, two may not be made again: the peak is theirs at least."""
    free, kept = chain(6), chain(6, sizes={"f2": 7, "f4": 7}, keep=["f2", "f4"])
    assert lowest_peak(free) == 4
    assert lowest_peak(kept) >= 14


def test_less_memory_never_bounds_less() -> None:
    """The bound falls with the budget, down to one run of each node."""
    graph = chain(30, sizes={f"f{i}": 1 + i % 5 for i in range(1, 31)})
    bounds = Bounds(graph, costs(graph), EVERY_VALUE)
    budgets = range(bounds.lowest_peak_bytes, 110)
    asked = {budget: bounds.seconds(budget) for budget in sorted(budgets, key=lambda b: b * 37 % 101)}
    found = [asked[budget] for budget in budgets]
    assert all(less >= more * (1 - 1e-4) for less, more in itertools.pairwise(found))
    assert found[-1] == 60.0 < found[0]


def test_a_dear_value_is_kept_before_a_cheap_one() -> None:
    """One byte less costs the cheapest repetition, that of f3."""
    seconds = dict.fromkeys(chain(6).names, 1.0) | {"f3": 0.25}
    graph = chain(6, seconds=seconds)
    bounds = Bounds(graph, costs(graph), EVERY_VALUE)
    assert bounds.seconds(6) - bounds.seconds(7) == pytest.approx(0.25)


def test_a_deferred_node_is_no_repetition() -> None:
    """The backward reads d, made of a; made behind the forward it costs one run, and a is held."""
    graph = JointGraph.from_mappings(
        {"x": (), "t": (), "a": ["x"], "b": ["a"], "d": ["a"], "g": ["t", "d"]},
        {"a": 1, "b": 1, "d": 8, "g": 1},
        forward_outputs=["b"],
        backward_outputs=["g"],
        seconds=dict.fromkeys("abdg", 1.0),
    )
    graph = with_phases(graph, ["t"])
    assert graph.nodes[graph.index["d"]].phase is Phase.DEFERRED
    assert Bounds(graph, costs(graph), EVERY_VALUE).seconds(10) == 4.0


def test_outputs_lie_together_at_the_end() -> None:
    """Two gradients, the output of the forward, and the tangents are live at the last step."""
    graph = JointGraph.from_mappings(
        {"x": (), "t": (), "a": ["x"], "g": ["t"], "h": ["t"]},
        {"a": 1, "g": 2, "h": 4},
        forward_outputs=["a"],
        backward_outputs=["g", "h"],
    )
    assert lowest_peak(with_phases(graph, ["t"], 8)) == 15


def test_a_graph_without_a_backward_takes_one_run_of_each_node() -> None:
    """There is no moment at which anything would be held for a backward."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"]},
        {"a": 1, "b": 1},
        forward_outputs=["b"],
        seconds={"a": 1.0, "b": 2.0},
    )
    assert Bounds(graph, costs(graph), EVERY_VALUE).seconds(2) == 3.0


# --- Against every schedule of small graphs -------------------------------------------------------------


def small_graph(seed: int) -> JointGraph:
    """A forward that reads recent values and a backward that reads it in reverse."""
    rng = random.Random(seed)
    operands: dict[str, list[str]] = {"x": [], "t": []}
    forward = [f"f{i}" for i in range(rng.randint(3, 5))]
    for i, name in enumerate(forward):
        recent = ["x", *forward[:i]][-3:]
        operands[name] = sorted({recent[-1], rng.choice(recent)})
    backward = [f"g{i}" for i in range(rng.randint(2, 4))]
    for i, name in enumerate(backward):
        above = backward[i - 1] if i else "t"
        operands[name] = sorted({above, forward[max(0, len(forward) - 1 - i)], rng.choice(forward)})
    body = [*forward, *backward]
    read = set(itertools.chain(*operands.values()))
    graph = JointGraph.from_mappings(
        operands,
        {name: rng.randint(1, 5) for name in body},
        forward_outputs=[forward[-1]],
        backward_outputs=[name for name in backward if name not in read or rng.random() < 0.2],
        keep=[name for name in body if rng.random() < 0.1],
        seconds={name: float(rng.randint(1, 5)) for name in body},
    )
    return with_phases(graph, ["t"], rng.randint(0, 2))


class Optimum:
    """The least seconds within a budget: Dijkstra over what is live and what has run."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.nodes = range(graph.num_inputs, len(graph.nodes))
        self.bytes = [graph.node_bytes(node) for node in range(len(graph.nodes))]
        self.reads = [bits(o for o in node.operands if o >= graph.num_inputs) for node in graph.nodes]
        self.forward = bits(i for i in self.nodes if graph.nodes[i].phase is Phase.FORWARD)
        self.forward_outputs = bits(o for o in graph.forward_outputs if o is not None)
        self.size = functools.cache(lambda live: sum(self.bytes[i] for i in self.nodes if live >> i & 1))

    def seconds(self, budget_bytes: int) -> float:
        """The least seconds of a schedule whose peak is within the budget; inf if there is none."""
        taken = {(0, 0): 0.0}
        heap = [(0.0, (0, 0))]
        while heap:
            seconds, state = heapq.heappop(heap)
            if seconds > taken[state]:
                continue
            if state[1] == bits(self.nodes) and not bits(self.graph.outputs) & ~state[0]:
                return seconds
            for more, after in self._moves(*state, budget_bytes):
                if seconds + more < taken.get(after, math.inf):
                    taken[after] = seconds + more
                    heapq.heappush(heap, (seconds + more, after))
        return math.inf

    def _moves(self, live: int, ran: int, budget_bytes: int) -> Iterator[tuple[float, tuple[int, int]]]:
        """Drop a value, or run a node on live operands."""
        is_behind = not self.forward & ~ran
        room = budget_bytes - (self.graph.tangent_bytes if is_behind else 0)
        for node in self.nodes:
            bit, entry = 1 << node, self.graph.nodes[node]
            if live & bit:
                if not (is_behind and self.forward_outputs & bit):
                    yield 0.0, (live & ~bit, ran)
                continue
            is_early = entry.phase is Phase.BACKWARD and not is_behind
            if self.reads[node] & ~live or is_early or (ran & bit and entry.keep is not None):
                continue
            now, after = live | bit, ran | bit
            ends = not is_behind and not self.forward & ~after
            if self.size(now) <= room and not (ends and self.forward_outputs & ~now):
                yield self.graph.given_seconds[entry.name], (now, after)


def bits(nodes: Iterable[int]) -> int:
    """A set of nodes as the bits of an integer."""
    return sum(1 << node for node in set(nodes))


def test_no_schedule_of_a_small_graph_undercuts_the_bounds() -> None:
    """At every budget the optimum is at least the bound, and at most budgets equal to it."""
    exact = beyond_one_run = 0
    budgets = 0
    for seed in range(200):
        graph = small_graph(seed)
        bounds, optimum = Bounds(graph, costs(graph), EVERY_VALUE), Optimum(graph)
        lowest = bounds.lowest_peak_bytes
        assert optimum.seconds(lowest - 1) == math.inf
        for budget in range(lowest, lowest + 6):
            bound, least = bounds.seconds(budget), optimum.seconds(budget)
            assert bound <= least * ROUNDING, (seed, budget)
            budgets += least < math.inf
            exact += least < math.inf and bound > least * (1 - 1e-3)
            beyond_one_run += bound > bounds.once * (1 + 1e-3)
    assert exact > 0.7 * budgets
    assert beyond_one_run > 50


# --- Against the schedules at hand ----------------------------------------------------------------------


def assert_bounded(graph: JointGraph, fusion: str, schedules: Iterable[fxremat.Schedule]) -> None:
    """Neither bound is above what a schedule is predicted to take."""
    planning = make_problem(graph, fusion=fusion)
    bounds = Bounds(planning.graph, planning.costs, planning.model)
    for schedule in schedules:
        solution = planning.evaluate(schedule, "mine")
        assert bounds.lowest_peak_bytes <= solution.peak_bytes
        assert bounds.seconds(solution.peak_bytes) <= solution.seconds * ROUNDING


@given(graphs_and_schedules(), st.integers(0, 2**32))
def test_drawn_schedules_are_bounded(drawn: tuple[JointGraph, fxremat.Schedule], seed: int) -> None:
    """Views, operators with several outputs, deferred nodes, effects and tangents included."""
    graph, schedule = drawn
    rng = random.Random(seed)
    graph = replace(graph, given_seconds={name: rng.random() for name in graph.names})
    assert_bounded(graph, "none", [schedule, identity(graph)])


@few(20)
@given(networks(), st.integers(0, 2**16))
def test_traced_schedules_are_bounded(network: Network, seed: int) -> None:
    """For graphs of operators and each memory model."""
    for fusion in FUSIONS:
        compiler = "inductor" if fusion == "inductor" else "eager"
        graph = fxremat.capture(network, batch(), compiler=compiler)
        assert_bounded(
            graph, fusion, [identity(graph), *(random_schedule(graph, seed + i) for i in range(3))]
        )


@pytest.mark.parametrize("fusion", ["none", "inplace"])
def test_a_first_draw_does_not_need_the_state_that_it_leaves(fusion: str) -> None:
    """The state of the generator is for mirrors: where there are none it is gone when numbers are drawn."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout())
    graph = fxremat.capture(module, torch.randn(4, 4), loss=torch.sum, compiler="eager")
    assert_bounded(graph, fusion, [identity(graph)])


QUICK = ("transformer", "unet")  # the other models are slow only because they are many


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in models.NAMES]
)
def test_no_planner_undercuts_the_bounds(name: str, fusion: str) -> None:
    """Each solution of each planner takes at least the bound for its own peak."""
    module, inputs = models.fresh(models.case(name))
    graph = fxremat.capture(module, *inputs, compiler="inductor" if fusion == "inductor" else "eager")
    planning = make_problem(graph, fusion=fusion)
    bounds = Bounds(planning.graph, planning.costs, planning.model)
    for planner in set(PLANNERS) - {"exact"}:  # it takes no graph as large
        for solution in solve(planning, planner):
            assert bounds.lowest_peak_bytes <= solution.peak_bytes
            assert bounds.seconds(solution.peak_bytes) <= solution.seconds * ROUNDING
