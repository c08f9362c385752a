"""Tailor: what a step leaves to a plan, and plans that fit there."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from episodes import Offers, candidate, chosen, drawn
from graphs import few, networks
from hypothesis import given
from hypothesis import strategies as st
from programs import Network, traced
from torch import nn

import fxremat
from fxremat.driver.pipeline import make_problem, solve
from fxremat.episode.candidates import candidates
from fxremat.episode.room import Room, room
from fxremat.episode.settle import settle
from fxremat.episode.tailor import plans_for, tailored
from fxremat.episode.trace import Call, Candidate, Event, Trace, peak_bytes
from fxremat.errors import InfeasibleBudgetError
from fxremat.graph.schedule import Schedule
from fxremat.planners import auto
from fxremat.predict.models import FUSIONS

BUDGET = 1000
COMPILERS = {"inplace": "eager", "inductor": "inductor"}


def peak(plan: Candidate) -> int:
    """The higher peak of a plan's two parts."""
    return max(plan.forward_bytes, plan.backward_bytes)


@given(st.integers(0, 10_000), st.integers(0, 12))
def test_a_plan_that_fits_the_room_keeps_the_budget(seed: int, more: int) -> None:
    """Whatever the order of events, how many calls have the plan, and what they hold of the caller's."""
    trace, offers = drawn(seed, calls=6)
    draw = random.Random(seed)
    plans = [draw.choice(offers[call.graph]) for call in trace.calls]
    graph, plan = trace.calls[0].graph, plans[0]
    members = {index for index, call in enumerate(trace.calls) if call.graph == graph}
    plans = [plan if index in members else each for index, each in enumerate(plans)]
    budget = peak_bytes(trace, plans) + more
    wanted = room(trace, plans, members, budget)
    for _ in range(20):
        other = replace(candidate(draw), holds=plan.holds)
        if wanted.has(other):
            replaced = [other if index in members else each for index, each in enumerate(plans)]
            assert peak_bytes(trace, replaced) <= budget


def test_room_of_nested_calls() -> None:
    """What the waiting calls of a plan hold is not there for the one that runs."""
    plan = Candidate(Schedule(), 1.0, 100, 150, 200)
    events = [Event(0, False, 0, 0), Event(1, False, 0, 0), Event(1, True, 10, 30), Event(0, True, 20, 20)]
    trace = Trace((Call(0), Call(0)), tuple(events))
    assert room(trace, [plan, plan], {0, 1}, BUDGET) == Room(BUDGET - 100 - 10 - 345, 445)
    assert room(trace, [plan, plan], {1}, BUDGET) == Room(BUDGET - 100 - 10, BUDGET - 100 - 30)
    assert room(trace, [plan, plan], {0}, BUDGET) == Room(BUDGET - 20, BUDGET - 10 - 200)


def coarse_and_fine(graphs: Sequence[int]) -> tuple[Trace, Offers, Offers]:
    """An episode with few candidates, and all plans that there are."""
    order = [(call, False) for call in range(len(graphs))]
    order += [(call, True) for call in reversed(range(len(graphs)))]
    trace = Trace(tuple(map(Call, graphs)), tuple(Event(*each, 0, 0) for each in order))
    plans = {
        graph: [
            Candidate(Schedule((str(held),)), (graph + 2) / (held + 20), held, held + 2, held + 8)
            for held in range(0, 100, 3)
        ]
        for graph in set(graphs)
    }
    return trace, {graph: each[3::8] for graph, each in plans.items()}, plans


@pytest.mark.parametrize("graphs", [(0,), (0, 1), (0, 1, 2), (0, 0, 1)])
def test_a_step_takes_what_graphs_find_for_it(graphs: tuple[int, ...]) -> None:
    """Faster than by the candidates alone, within the budget; and lower for the least memory."""
    trace, offers, plans = coarse_and_fine(graphs)

    def tailor(graph: int, plan: Candidate, wanted: Room) -> list[Candidate]:
        return [each for each in plans[graph] if wanted.has(each)][-3:]

    lowest, highest = (settle(trace, offers, size).peak_bytes for size in (None, 10**9))
    for budget in range(lowest, highest, (highest - lowest) // 5):
        found, settlement = tailored(trace, offers, budget, tailor)
        before = settle(trace, offers, budget)
        assert settlement.peak_bytes == peak_bytes(trace, found) <= budget
        assert settlement.seconds == pytest.approx(sum(each.seconds for each in found))
        assert settlement.seconds <= before.seconds
        assert settlement.seconds <= 1.03 * settle(trace, plans, budget).seconds
    least = tailored(trace, offers, None, tailor)[1].peak_bytes
    assert settle(trace, plans, None).peak_bytes <= least < lowest
    found, settlement = tailored(trace, offers, least, tailor)
    assert settlement.peak_bytes == peak_bytes(trace, found) <= least
    with pytest.raises(InfeasibleBudgetError):
        tailored(trace, offers, 2, tailor)


def test_a_step_keeps_candidates_where_graphs_find_nothing() -> None:
    """As it settles by itself."""
    trace, offers, _ = coarse_and_fine((0, 1))
    for budget in (None, 10**9):
        found, settlement = tailored(trace, offers, budget, lambda graph, plan, wanted: ())
        assert settlement == settle(trace, offers, budget)
        assert list(found) == chosen(trace, offers, settlement.plans)


@few(6)
@given(networks(max_steps=10), st.sampled_from(FUSIONS))
def test_plans_for_a_room_are_plans_of_the_graph(network: Network, fusion: str) -> None:
    """They are valid, and none is known."""
    problem = make_problem(traced(network), fusion=fusion)
    known = candidates(problem, functools.partial(solve, planner="auto"))
    for plan in known[:: max(1, len(known) // 3)]:
        for wanted in (Room(peak(plan), plan.held_bytes), Room(peak(plan), plan.held_bytes // 2)):
            found = plans_for(problem, known, plan, wanted, auto.improved)
            for each in found:
                problem.check(problem.evaluate(each.schedule, "auto"))
            assert not {each.schedule for each in found} & {each.schedule for each in known}


@pytest.mark.parametrize("fusion", ["inplace", "inductor"])
def test_rooms_between_coarse_candidates_are_used(fusion: str) -> None:
    """Of three plans of a deep chain of layers the second is left out: others take what it leaves."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)]
    graph = fxremat.capture(nn.Sequential(*layers), torch.randn(256, 32), compiler=COMPILERS[fusion])
    problem = make_problem(graph, fusion=fusion)
    known = candidates(problem, functools.partial(solve, planner="auto"))
    coarse = [known[0], known[-1]]
    low, high = peak(known[-1]), peak(known[0])
    assert low < 0.7 * high
    for part in (0.3, 0.5, 0.7):
        size = round(low + (high - low) * part)
        found = plans_for(problem, coarse, known[-1], Room(size, size), auto.improved)
        fitting = [each.seconds for each in found if Room(size, size).has(each)]
        assert min(fitting) < known[-1].seconds
        slower = 1.08 if (fusion, part) == ("inplace", 0.3) else 1.02  # nothing just below this room
        assert min(fitting) <= slower * min(each.seconds for each in known if peak(each) <= size)
