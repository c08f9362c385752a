"""refine: plans lose what they need not compute again, stay valid and within bounds, and get lower."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import models
import pytest
from graphs import chain, few, graphs_and_schedules, identity, problem, with_outputs, with_phases
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule
from fxremat.planners import sublinear
from fxremat.predict.problem import LEAST, Solution, pareto
from fxremat.search.refine import lower, refine, refine_around


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


def test_a_budget_has_a_plan_that_uses_it() -> None:
    """Between one that keeps every fourth value and one that keeps all: as high and as slow as it may be."""
    stated = problem(chain(40))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 40) if place % 4}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    budgets = range(again.peak_bytes, kept.peak_bytes + 1)
    served = [_fastest(refine_around(stated, [again, kept], budget, 50), budget) for budget in budgets]
    assert all(
        each.peak_bytes >= budget - 1 for each, budget in zip(served, budgets, strict=True)
    )  # of an operator's two buffers, one is small
    assert served[0].seconds > served[-1].seconds == kept.seconds


def _fastest(solutions: Sequence[Solution], budget: int) -> Solution:
    """What is chosen for a budget."""
    return min((each for each in solutions if each.peak_bytes <= budget), key=lambda each: each.seconds)


@given(graphs_and_schedules(), st.integers(1, 40), st.integers(0, 20))
@few(60)
def test_a_smaller_budget_has_no_higher_peak(
    drawn: tuple[JointGraph, Schedule], evaluations: int, squeezes: int
) -> None:
    """Whatever is known, and however much may be looked for; and all that is found is valid."""
    graph, schedule = drawn
    stated = problem(graph)
    known = [stated.evaluate_needed(schedule, "drawn"), stated.identity("a test")]
    least, most = (pick(each.peak_bytes for each in known) for pick in (min, max))
    served = []
    for budget in sorted({least + (most - least) * part // 12 for part in range(-6, 13)}):
        found = refine_around(stated, known, budget, evaluations, squeezes)
        assert all(stated.check(each) == each for each in found if each not in known)
        if any(each.peak_bytes <= budget for each in found):
            served.append(_fastest(found, budget))
    assert all(less.peak_bytes <= more.peak_bytes for less, more in itertools.pairwise(served))


def test_within_a_narrow_range_more_memory_takes_no_more_time() -> None:
    """Each byte between plans that lie near each other is a budget."""
    sizes = {f"f{place}": 100 + place for place in range(1, 60)}
    stated = problem(chain(60, sizes=sizes))
    parts = (range(1, 60, step) for step in (2, 3, 4, 5, 7))
    known = [stated.mirror({f"f{place}": 1 for place in part}, "a test") for part in parts]
    front = pareto(known)[::-1]
    budgets = range(front[0].peak_bytes, int(1.2 * front[0].peak_bytes), 7)
    served = [_fastest(refine_around(stated, known, budget, 60), budget) for budget in budgets]
    assert len({each.peak_bytes for each in served}) > 5
    for less, more in itertools.pairwise(served):
        assert less.peak_bytes <= more.peak_bytes and less.seconds >= more.seconds


@pytest.mark.parametrize("budget", [-1, 0])
def test_around_what_lies_in_no_gap_nothing_is_weighed(budget: int) -> None:
    """Less than the lowest plan, or all that the highest takes."""
    stated = problem(chain(12))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 12)}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    front = sorted(pareto([again, kept]), key=lambda each: each.peak_bytes)
    assert refine_around(stated, front, front[budget].peak_bytes + budget, 50) == front


def test_lower_plans_are_looked_for_where_the_budget_is_low() -> None:
    """Below what is known and in the lower half of it, and not for budgets above."""
    stated = problem(chain(40))
    again = stated.mirror({f"f{place}": 1 for place in range(1, 40) if place % 4}, "a test")
    kept = stated.evaluate(identity(stated.graph), "a test")
    known, middle = [again, kept], math.isqrt(again.peak_bytes * kept.peak_bytes)

    def lowest(budget: int) -> int:
        return min(each.peak_bytes for each in refine_around(stated, known, budget, 10, squeezes=40))

    assert lowest(LEAST) == lowest(again.peak_bytes) < again.peak_bytes
    assert lowest(middle + 1) == lowest(kept.peak_bytes) == again.peak_bytes


def test_the_lowest_plan_gets_lower() -> None:
    """From all that is kept to less than half of it; and nothing is found where nothing may be weighed."""
    stated = problem(chain(40))
    kept = stated.evaluate(identity(stated.graph), "a test")
    found = lower(stated, [kept], evaluations=40)
    lowest = min(found, key=lambda each: each.peak_bytes)
    assert lowest.peak_bytes < kept.peak_bytes / 2 and stated.check(lowest) == lowest
    assert lower(stated, [kept], evaluations=0) == [kept]


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
