"""candidates: what a step sees of a plan, and which plans it chooses among."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from graphs import chain, example_inputs, few, graphs_and_schedules, identity, networks, placeholders, run
from hypothesis import assume, given
from programs import Network, traced
from torch import Tensor, nn

import fxremat
from fxremat.driver.pipeline import make_problem, solve
from fxremat.emit.partition import partition
from fxremat.emit.rewrite import rewrite
from fxremat.episode import candidates as module
from fxremat.episode.candidates import candidate, candidates
from fxremat.episode.hold import HOLD, held, without_hold
from fxremat.episode.trace import Candidate, Place
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import Schedule, bind
from fxremat.predict.models import FUSIONS, profile
from fxremat.predict.problem import Problem, Solution

planned = functools.partial(solve, planner="auto")


class Block(nn.Module):
    """A small transformer block with normalisation first; its output has a tangent."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inward(self.norm(x)).chunk(3, -1)
        heads = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.outward(mixed))
        return x + self.dropout(self.narrow(nn.functional.gelu(self.widen(self.other_norm(x)))))


class Ordered(nn.Module):
    """A block of which the user keeps and recomputes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        with fxremat.region(recompute=True):
            x = x.exp().tanh()
        with fxremat.region(keep=True):
            x = x.sin().exp()
        return self.block(x)


class Gated(nn.Module):
    """Its backward reads its input, one of its outputs, and a view of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.gelu(self.first(x))
        return self.second(hidden * hidden.sigmoid()).tanh(), hidden.t().exp().sum(0)


def block_problem(fusion: str, net: nn.Module | None = None) -> Problem:
    """The problem of a block under a memory model."""
    torch.manual_seed(0)
    compiler = "inductor" if fusion == "inductor" else "eager"
    x = torch.randn(8, 64, 64, requires_grad=True)
    graph = fxremat.capture(Block() if net is None else net, x, compiler=compiler)
    return make_problem(graph, fusion=fusion, time_limit_seconds=0.02)


def figures(plan: Candidate) -> tuple[float, ...]:
    """What plans are compared by."""
    return plan.seconds, plan.held_bytes, plan.forward_bytes, plan.backward_bytes


# --- The facts of a plan ----------------------------------------------------------------------------------


def test_the_facts_of_a_chain() -> None:
    """f3 is returned: it counts in the forward, is not held, and does not count in the backward."""
    stated = make_problem(chain(3), fusion="none")
    #  the backward: f1 f2 (f3) g3, then f1 g3 g2 without f2
    plan = candidate(stated, stated.identity("a test"))
    schedule = Schedule(("f1", "f2", "f3", "g3", "g2", "g1"))
    assert plan == Candidate(schedule, 6.0, 2, 3, 3, levels=((3, frozenset()),))
    again = candidate(stated, stated.mirror({"f1": 1, "f2": 1}, "a test"))
    assert (again.held_bytes, again.seconds) == (0, 8.0)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_facts_are_those_of_the_profile(fusion: str) -> None:
    """The highest of the two parts is the peak, once what others hold is added to the backward."""
    stated = block_problem(fusion)
    graph = stated.graph
    returned = sum(graph.node_bytes(output) for output in graph.forward_outputs if output is not None)
    assert graph.tangent_bytes == returned > 0
    for plan in candidates(stated, planned):
        found = profile(graph, plan.schedule, fusion)
        assert plan.held_bytes == found.saved_bytes - returned
        assert plan.forward_bytes == found.live_bytes[: found.boundary].max()
        assert (
            plan.backward_bytes + returned + graph.tangent_bytes == found.live_bytes[found.boundary :].max()
        )
        assert plan.seconds == stated.evaluate(plan.schedule, "a test").seconds


@pytest.mark.parametrize("fusion", ["none", "inplace"])
def test_held_is_what_the_parts_of_the_graph_save(fusion: str) -> None:
    """Counted in the tensors that the forward really hands to the backward."""
    torch.manual_seed(0)
    graph = fxremat.capture(Gated(), torch.randn(3, 4))
    stated = make_problem(graph, fusion=fusion, time_limit_seconds=0.02)
    plans = candidates(stated, planned)
    assert len({plan.held_bytes for plan in plans}) > 2
    assert len({plan.holds for plan in plans}) > 1
    for plan in plans:
        rewritten = rewrite(graph, plan.schedule)
        forward, _ = partition(rewritten, inplace=fusion == "inplace")
        assert (plan.held_bytes, plan.holds) == saved_by(rewritten, forward)


def saved_by(graph: JointGraph, forward: torch.fx.GraphModule) -> tuple[int, frozenset[Place]]:
    """Bytes that a forward saves besides inputs and outputs, and which of these; parameters are left out."""
    assert graph.module is not None
    names = [node.name for node in graph.module.graph.find_nodes(op="placeholder")]
    inputs = dict(zip(names, example_inputs(graph), strict=True))
    results = run(forward, [inputs[name] for name in placeholders(forward)])
    count = len(graph.forward_outputs)
    places = {pointer(inputs[name]): None for name in names}
    places |= {pointer(each): ("outputs", at) for at, each in enumerate(results[:count])}
    (x,) = (name for name in names if inputs[name].shape == (3, 4))
    places[pointer(inputs[x])] = ("inputs", 0)
    saved = {pointer(each): each.untyped_storage().nbytes() for each in results[count:]}
    shared = (places[each] for each in saved if each in places)
    return (
        sum(size for each, size in saved.items() if each not in places),
        frozenset(place for place in shared if place is not None),
    )


def pointer(tensor: Tensor) -> int:
    """Where a tensor's storage lies."""
    return tensor.untyped_storage().data_ptr()


# --- Held problems ----------------------------------------------------------------------------------------


@few(100)
@given(graphs_and_schedules())
def test_the_hold_weighs_on_what_is_held(drawn: tuple[JointGraph, Schedule]) -> None:
    """With the hold last in its forward a schedule takes as long, and what it holds counts there."""
    graph, schedule = drawn
    assume(graph.boundary < len(graph.nodes))
    stated = make_problem(graph, fusion="none")
    dear = held(stated, 1 << 40)
    boundary = bind(graph, schedule).boundary
    with_hold = (*schedule[:boundary], HOLD, *schedule[boundary:])
    assert bind(dear.graph, with_hold).boundary == boundary + 1
    assert without_hold(with_hold) == schedule
    solution, plain = dear.check(dear.evaluate(with_hold, "a test")), stated.evaluate(schedule, "a test")
    saved = profile(graph, schedule).saved_bytes
    assert solution.seconds == pytest.approx(plain.seconds)
    assert solution.peak_bytes == (1 << 40) + saved


@few(10)
@given(networks())
def test_the_hold_is_no_loop_and_no_memory(network: Network) -> None:
    """All that is known of the other nodes stays."""
    graph = traced(network)
    for fusion in FUSIONS:
        stated = make_problem(graph, fusion=fusion)
        dear = held(stated, 7)
        rest = [index for index, node in enumerate(dear.graph.nodes) if node.name != HOLD]
        assert [dear.graph.nodes[index].name for index in rest] == [node.name for node in graph.nodes]
        assert [dear.graph.loops[index] for index in rest] == [*graph.loops]
        for index, node in zip(rest, graph.nodes, strict=True):
            names = [dear.graph.nodes[operand].name for operand in dear.graph.nodes[index].operands]
            assert names == [graph.nodes[operand].name for operand in node.operands]
        hold = dear.graph.index[HOLD]
        assert dear.graph.loops[hold].kind is Kind.KERNEL
        assert dear.costs.of_node(dear.graph, hold) == dear.graph.node_bytes(hold) == 0
        assert sum(dear.graph.scratch_bytes) == sum(stated.graph.scratch_bytes) + 7


# --- Which plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", FUSIONS)
def test_plans_of_held_problems_hold_less(fusion: str) -> None:
    """Less than every plan that the planner has for peaks, and a third less where 5 % more time is taken."""
    stated = block_problem(fusion)
    plain = [candidate(stated, each) for each in planned(replace(stated, budgets=None))]
    found = candidates(stated, planned)
    assert min(each.held_bytes for each in found) < min(each.held_bytes for each in plain)
    assert all(least_in_time(found, each) <= each.held_bytes for each in plain)
    slowest = max(plain, key=attrgetter("seconds"))
    least = min(each.held_bytes for each in plain)
    assert least_in_time(found, replace(slowest, seconds=1.05 * slowest.seconds)) < 0.7 * least


def least_in_time(plans: Sequence[Candidate], plan: Candidate) -> int:
    """The least that plans hold that take no longer than one."""
    return min(each.held_bytes for each in plans if each.seconds <= plan.seconds)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_candidates_are_valid_and_unbeaten(fusion: str) -> None:
    """Random numbers are drawn and regions obeyed; each plan takes less than each other of something."""
    stated = block_problem(fusion, Ordered())
    found = candidates(stated, planned)
    assert len(found) > 3
    for plan in found:
        stated.check(stated.evaluate(plan.schedule, "a test"))
    for plan, other in itertools.permutations(found, 2):
        pairs = zip(figures(plan), figures(other), strict=True)
        assert not (plan.holds <= other.holds and all(own <= its for own, its in pairs))
    assert list(found) == sorted(found, key=figures)
    assert {place for plan in found for place in plan.holds} <= {("inputs", 0), ("outputs", 0)}


def test_candidates_are_the_same_each_time() -> None:
    """They depend on nothing but the problem."""
    assert candidates(block_problem("inplace"), planned) == candidates(block_problem("inplace"), planned)


def test_a_graph_of_mappings_has_candidates() -> None:
    """From everything held to nothing; no inputs or outputs of the caller's are known."""
    found = candidates(make_problem(chain(8), fusion="none"), planned)
    assert (found[0].held_bytes, found[0].seconds) == (7, 16.0)
    assert min(each.held_bytes for each in found) == 0
    assert all(each.holds == frozenset() for each in found)


@pytest.mark.parametrize("improves", [True, False])
def test_the_holds_are_parts_of_the_highest_peak(improves: bool) -> None:
    """The planner is asked without budgets; what is known is improved for other holds."""
    asked: list[Problem] = []
    others: list[Problem] = []

    def keep_all(problem: Problem) -> Sequence[Solution]:
        asked.append(problem)
        return (problem.identity("a test"),)

    def improve(problem: Problem, known: Sequence[Solution], budget: int | None) -> Sequence[Solution]:
        others.append(problem)
        assert budget is None and all(HOLD in each.schedule for each in known)
        return known

    stated = make_problem(chain(4), fusion="none")
    highest = stated.identity("a test").peak_bytes
    found = candidates(replace(stated, budgets=(3,)), keep_all, improve if improves else None)
    sizes = [[sum(each.graph.scratch_bytes) for each in some] for some in (asked, others)]
    searched = [round(part * highest) for part in module.SEARCHED]
    improved = [round(part * highest) for part in module.IMPROVED]
    assert [each.budgets for each in (*asked, *others)] == [None] * len([*asked, *others])
    if improves:
        assert sizes[0] == [0, *searched] and sizes[1][:-1] == improved
    else:
        assert sizes[0][:-1] == [0, *searched, *improved] and not others
    assert [each.held_bytes for each in found] == [3, 0]
    assert found[0].schedule == identity(stated.graph)


def test_many_candidates_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest stays, and that which holds least."""
    stated = make_problem(chain(12), fusion="none", time_limit_seconds=0.02)
    every = candidates(stated, planned)
    monkeypatch.setattr(module, "MAX_CANDIDATES", 6)
    found = candidates(stated, planned)
    assert len(found) <= 6 < len(every)
    assert set(found) <= set(every)
    assert found[0] == every[0]
    for extreme in ("held_bytes", "seconds"):
        least = [min(getattr(each, extreme) for each in some) for some in (found, every)]
        assert least[0] == least[1]
    peaks = [min(max(each.forward_bytes, each.backward_bytes) for each in some) for some in (found, every)]
    assert peaks[0] == peaks[1]
