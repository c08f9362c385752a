"""What is known of a graph's code goes with that graph."""

from __future__ import annotations

from fxremat import JointGraph
from fxremat.driver.correction import Correction
from fxremat.driver.policy import WithinBudget


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
