"""refine: plans lose what they need not compute again, stay valid, and take no more than they may."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
from graphs import chain, few, graphs_and_schedules, identity, problem, with_outputs, with_phases
from hypothesis import given

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule
from fxremat.planners import sublinear
from fxremat.predict.problem import pareto
from fxremat.search.refine import refine, refine_around


@given(graphs_and_schedules())
@few(100)
def test_what_is_found_is_valid_and_pays(drawn: tuple[JointGraph, Schedule]) -> None:
    """Each is an execution of the graph that obeys it, as fast as told, and faster than the only start."""
    graph, schedule = drawn
    stated = problem(graph)
    known = stated.evaluate_needed(schedule, "drawn")
    for found in refine(stated, [known], evaluations=20):
        assert stated.check(found) == found
        assert found == replace(stated.evaluate(found.schedule, "auto"))
        assert found.seconds < known.seconds
        assert found.peak_bytes <= known.peak_bytes


def test_what_costs_no_memory_is_not_computed_again() -> None:
    """A chain whose end computes all again, when all is held already."""
    stated = problem(chain(12))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 12)}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    assert (again.peak_bytes, again.seconds) == (kept.peak_bytes, kept.seconds + 11)
    found = refine(stated, [again], evaluations=1)
    assert [(each.peak_bytes, each.seconds) for each in found] == [(kept.peak_bytes, kept.seconds)]


def test_what_there_is_room_for_is_not_computed_again() -> None:
    """Between a plan that keeps every fourth value and one that keeps all are others."""
    stated = problem(chain(40))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 40) if place % 4}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    found = refine(stated, [again, kept], evaluations=50)
    assert any(
        again.peak_bytes < each.peak_bytes < kept.peak_bytes and kept.seconds < each.seconds < again.seconds
        for each in found
    )


def test_the_gap_around_a_budget_is_filled() -> None:
    """With plans that are as high and as slow as may be between its neighbours, for each budget the same."""
    stated = problem(chain(40))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 40) if place % 4}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    budgets = range(again.peak_bytes, kept.peak_bytes)
    (found,) = {tuple(refine_around(stated, [again, kept], budget, 50)) for budget in budgets}
    peaks = {each.peak_bytes for each in found}
    assert min(peaks) >= again.peak_bytes and len(peaks & {*budgets}) > 8
    assert all(kept.seconds <= each.seconds < again.seconds for each in found)


@pytest.mark.parametrize("budget", [-1, 0])
def test_around_what_lies_in_no_gap_nothing_is_weighed(budget: int) -> None:
    """Less than the lowest plan, or all that the highest takes."""
    stated = problem(chain(12))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 12)}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    front = sorted(pareto([again, kept]), key=lambda each: each.peak_bytes)
    assert refine_around(stated, front, front[budget].peak_bytes + budget, 50) == []


def test_a_result_that_only_the_second_run_picks_is_picked_by_the_first() -> None:
    """Of an operator with two outputs the forward reads one, and the backward the other."""
    nodes = {"x": (), "t": (), "f1": ["x"], "f1_0": ["f1"], "f1_1": ["f1"], "f2": ["f1_0"]}
    graph = JointGraph.from_mappings(
        nodes | {"g2": ["t", "f1_0"], "g1": ["g2", "f1_1"]},
        dict.fromkeys(["f1", "f2", "g2", "g1"], 1) | {"f1_0": 0, "f1_1": 0},
        forward_outputs=["f2"],
        backward_outputs=["g1"],
        backward=["g2", "g1"],
        seconds=dict.fromkeys(["f1", "f2", "g2", "g1"], 1.0),
    )
    graph = with_phases(with_outputs(graph, "f1", [1, 1]), ["t"])
    schedule = Schedule(("f1", "f1_0", "f2", "g2", "f1", "f1_1", "g1"))
    stated = problem(graph)
    known, kept = stated.evaluate(schedule, "a test"), stated.identity("a test")
    assert known.peak_bytes == kept.peak_bytes
    found = refine(stated, [known], evaluations=10)
    assert known.seconds > found[-1].seconds == kept.seconds
    assert stated.check(found[-1]).schedule.mirror_counts == {}


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_of_a_network_it_pays(name: str) -> None:
    """Paper plans under Inductor's model: some peaks have a faster one, and all are valid."""
    module, inputs = models.fresh(models.case(name))
    stated = make_problem(fxremat.capture(module, *inputs))
    known = sublinear.plan(stated)
    found = refine(stated, known, evaluations=60)
    faster = 0
    for each in known:
        better = [other for other in found if other.peak_bytes <= each.peak_bytes]
        faster += any(other.seconds < 0.99 * each.seconds for other in better)
    assert faster
    assert all(stated.check(each) for each in found)


def test_a_higher_budget_finds_the_same_and_what_lies_above() -> None:
    """So what serves a budget is no slower than what serves a lower one, and not lower either."""
    stated = problem(chain(60))
    parts = (range(1, end) for end in range(10, 60, 4))
    known = [stated.mirror({f"f{place}": 1 for place in part if place % 3}, "a test") for part in parts]
    everything = refine(stated, known, 60)
    for budget in (0, *(each.peak_bytes for each in known)):
        found = refine(stated, known, 60, budget)
        assert found == everything[: len(found)]
        assert all(each.peak_bytes > budget for each in everything[len(found) :])
    assert len(refine(stated, known, 60, 0)) < len(everything)
