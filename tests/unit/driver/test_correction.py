"""What is known of a graph's code goes with that graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fxremat import JointGraph
from fxremat.driver.correction import Correction
from fxremat.driver.pipeline import make_problem
from fxremat.driver.policy import Given, WithinBudget


def graph_of(*names: str) -> JointGraph:
    """A chain of these values, and a gradient."""
    nodes = {"x": (), **{name: ["x"] for name in names}, "dx": names}
    return JointGraph.from_mappings(
        nodes, dict.fromkeys([*names, "dx"], 4), backward=["dx"], backward_outputs=["dx"]
    )


def test_a_graph_that_has_become_another_is_corrected_from_the_start() -> None:
    """The code that was read is none of it, nor are the plans; how often it was planned goes on."""
    correction = Correction(WithinBudget("min", "auto", reads_code=True), "min", "graph", 2)
    assert correction.renewed(graph_of("a", "b")) is correction
    assert correction.renewed(graph_of("a", "b")) is correction
    other = correction.renewed(graph_of("a", "c"))
    assert other is not correction
    assert (other.policy, other.budget, other.name, other.count) == (correction.policy, "min", "graph", 2)
    assert other.renewed(graph_of("a", "c")) is other


@pytest.mark.parametrize(("part", "is_surprise"), [(1.2, True), (1.005, False), (0.5, False)])
def test_code_of_a_settled_plan_is_looked_at_if_it_holds_more_than_predicted(
    part: float, is_surprise: bool
) -> None:
    """Such a plan stays, whatever its code holds: the step is to know of it."""
    problem = make_problem(graph_of("a", "b"), fusion="none")
    plan = problem.identity("a test")
    correction = Correction(Given(plan.schedule), "min", "graph")
    assert correction.surprises == ()
    correction.choose(problem)
    codes = [SimpleNamespace(is_backward=False), SimpleNamespace(is_backward=True)]
    memory: Any = SimpleNamespace(peak_bytes=round(part * 1000 * plan.peak_bytes) / 1000)
    for code in codes:
        correction.take(cast("Any", code), memory)
    expected = tuple((code, memory) for code in codes)
    assert correction.surprises == (expected if is_surprise else ())
