"""squeeze: what a plan lets go of is had again, in valid plans that are lower."""

from __future__ import annotations

import models
import pytest
from graphs import few, graphs_and_schedules, problem
from hypothesis import assume, given
from hypothesis import strategies as st

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule
from fxremat.search.squeeze import Squeeze


@given(graphs_and_schedules(), st.floats(0.3, 0.99))
@few(100)
def test_what_is_found_is_valid(drawn: tuple[JointGraph, Schedule], part: float) -> None:
    """An execution of the graph, in which nothing runs again that may not."""
    graph, schedule = drawn
    stated = problem(graph)
    known = stated.evaluate_needed(schedule, "drawn")
    assume(known.peak_bytes > 1)
    nodes = Squeeze(stated, known).within(int(part * known.peak_bytes))
    if nodes is not None:
        found = stated.evaluate_nodes(nodes, "a test")
        assert stated.check(found) == found
        assert len(nodes) > len(known.schedule)


def test_a_value_between_two_uses_is_let_go_of() -> None:
    """The one of three that is cheapest to have again, when one has to go."""
    nodes = {"x": (), "a": ["x"], "b": ["x"], "c": ["x"], "m": ["a", "b", "c"], "t": ["m"]}
    sizes = {"a": 4, "b": 4, "c": 4, "m": 1, "t": 7, "ga": 1, "gb": 1, "gc": 1, "gm": 1}
    seconds = {"a": 3.0, "b": 1.0, "c": 2.0, "m": 1.0, "t": 1.0, "ga": 1.0, "gb": 1.0, "gc": 1.0, "gm": 1.0}
    backward = {"gm": ["t"], "ga": ["gm", "a"], "gb": ["ga", "b"], "gc": ["gb", "c"]}
    graph = JointGraph.from_mappings(
        nodes | backward, sizes, backward=list(backward), backward_outputs=["gc"], seconds=seconds
    )
    stated = problem(graph)
    kept = stated.identity("a test")
    assert kept.peak_bytes == 4 + 4 + 4 + 1 + 7
    squeeze = Squeeze(stated, kept)
    for limit, again in ((19, {"b": 1}), (16, {"b": 1}), (15, {"b": 1, "c": 1}), (13, {"b": 1, "c": 1})):
        nodes = squeeze.within(limit)
        assert nodes is not None
        found = stated.evaluate_nodes(nodes, "a test")
        assert found.mirror_counts == again and found.peak_bytes <= limit
    assert squeeze.within(12) is None  # what is summed is there at once


@pytest.mark.parametrize(("last_reads", "again"), [("b", {"a": 1, "b": 1}), ("a", {"b": 1})])
def test_what_a_value_is_computed_from_is_had_again_with_it(last_reads: str, again: dict[str, int]) -> None:
    """Unless it is there all the same, for the last step reads it."""
    forward = {"x": (), "a": ["x"], "b": ["a"], "t": ["b"], "u": ["t"]}
    backward = {"gu": ["u"], "gb": ["gu", "b"], "ga": ["gb", last_reads]}
    sizes = dict.fromkeys([*forward, *backward][1:], 1) | {"b": 4, "t": 7, "u": 9}
    graph = JointGraph.from_mappings(
        forward | backward,
        sizes,
        backward=[*backward],
        backward_outputs=["ga"],
        seconds=dict.fromkeys(sizes, 1.0),
    )
    stated = problem(graph)
    nodes = Squeeze(stated, stated.identity("a test")).within(7 + 9 + 1)
    assert nodes is not None
    found = stated.check(stated.evaluate_nodes(nodes, "a test"))
    assert found.mirror_counts == again and found.peak_bytes <= 7 + 9 + 1


@pytest.mark.parametrize("name", ["transformer", "resnet", "densenet"])
def test_of_a_network_it_pays(name: str) -> None:
    """Under Inductor's model: a tenth less memory, for less time than computing all again that is cheap."""
    module, inputs = models.fresh(models.case(name))
    stated = make_problem(fxremat.capture(module, *inputs))
    kept = stated.identity("a test")
    nodes = Squeeze(stated, kept).within(int(0.9 * kept.peak_bytes))
    assert nodes is not None
    found = stated.check(stated.evaluate_nodes(nodes, "a test"))
    assert found.peak_bytes < 0.95 * kept.peak_bytes
    assert kept.seconds < found.seconds < 1.3 * kept.seconds
