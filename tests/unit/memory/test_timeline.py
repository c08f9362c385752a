"""timeline: lives by hand, and their sum against the live bytes that liveness counts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from graphs import (
    Sketch,
    chain,
    few,
    graphs_and_schedules,
    networks,
    problem,
    random_schedule,
    with_outputs,
)
from hypothesis import given
from hypothesis import strategies as st
from models import NAMES, case, fresh
from programs import Network, traced

import fxremat
from fxremat.driver.pipeline import make_problem, solve
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, bind
from fxremat.memory.timeline import HELD, KINDS, Timeline, timeline_of
from fxremat.predict.models import FUSIONS, model, profile
from fxremat.search.baseline import baseline_plan

aten = torch.ops.aten


def timeline(graph: JointGraph, schedule: Sequence[str], fusion: str = "none") -> Timeline:
    """The timeline of a schedule under a memory model."""
    binding = bind(graph, schedule)
    return timeline_of(graph, binding, model(fusion).lower(graph, binding))


def lives(found: Timeline) -> list[tuple[str, str, int, int, int]]:
    """The lives as tuples."""
    return [(life.origin.name, life.kind, life.bytes, life.first, life.last) for life in found.lives]


# --- By hand --------------------------------------------------------------------------------------------


def test_each_kind_of_life() -> None:
    """What the forward drops, keeps and returns; what runs again, and what the backward makes."""
    schedule = ["f1", "f2", "f3", "f4", "g4", "f2", "g3", "g2", "g1"]
    found = timeline(chain(4), schedule)
    assert lives(found) == [
        ("f1", "saved", 1, 0, 7),
        ("f2", "forward", 1, 1, 2),
        ("f3", "saved", 1, 2, 4),
        ("f4", "output", 1, 3, 8),
        ("g4", "backward", 1, 4, 6),
        ("f2", "recomputed", 1, 5, 6),
        ("g3", "backward", 1, 6, 7),
        ("g2", "backward", 1, 7, 8),
        ("g1", "gradient", 1, 8, 8),
    ]
    assert found.live_bytes == tuple(profile(chain(4), schedule).live_bytes)
    assert [step.is_mirror for step in found.steps] == [False] * 5 + [True] + [False] * 3
    assert found.seconds == 0.0  # where no times are known


def test_tangents_and_scratch_have_lives() -> None:
    """Tangents from the boundary to the end, scratch memory at its own step."""
    graph = chain(2)
    scratch = tuple(100 if node.name == "f1" else 0 for node in graph.nodes)
    found = timeline(replace(graph, scratch_bytes=scratch, tangent_bytes=7), graph.names)
    assert [life for life in lives(found) if life[1] == "scratch"] == [("f1", "scratch", 100, 0, 0)]
    assert ("tangents", "tangents", 7, 2, 3) in lives(found)
    assert (found.peak_bytes, found.peak_step) == (101, 0)
    assert found.live_bytes_of("scratch", "tangents") == (100, 0, 7, 7)


def test_an_operand_that_is_written_over_hands_its_bytes_on() -> None:
    """exp's buffer becomes sin's: it ends where that begins."""
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    exp = sketch.call("exp", aten.exp.default, x)
    graph = sketch.joint([sketch.call("sin", aten.sin.default, exp)])
    assert lives(timeline(graph, graph.names)) == [("exp", "forward", 16, 0, 1), ("sin", "output", 16, 1, 1)]
    found = timeline(graph, graph.names, "inplace")
    assert lives(found) == [("exp", "forward", 16, 0, 0), ("sin", "output", 16, 1, 1)]
    assert [(life.origin.name, life.kind, life.bytes) for life in found.held] == [("primals_1", HELD, 16)]


def test_the_output_that_is_written_over_hands_its_bytes_on() -> None:
    """Of an operator's outputs that are read last together it is the one of the result's size."""
    graph = JointGraph.from_mappings(
        {"x": (), "s": ["x"], "s_0": ["s"], "s_1": ["s"], "a": ["s_0", "s_1"]},
        {"s": 0, "s_0": 0, "s_1": 0, "a": 4},
        forward_outputs=["a"],
    )
    graph = with_outputs(graph, "s", [1, 4])
    binding = bind(graph, graph.names)
    over = replace(model("none").lower(graph, binding), replaces={3: 0}, extra_bytes=[(3, 3, -4)])
    found = timeline_of(graph, binding, over)
    assert lives(found) == [("s", "forward", 1, 0, 3), ("s", "forward", 4, 0, 2), ("a", "output", 4, 3, 3)]


def test_copies_have_lives() -> None:
    """They are those of the step that reads them last; what is written over an operand is no copy."""
    graph = chain(2)
    binding = bind(graph, graph.names)
    plain = model("none").lower(graph, binding)
    found = timeline_of(graph, binding, replace(plain, extra_bytes=[(1, 2, 1), (3, 3, 5), (0, 0, 0)]))
    assert [life for life in lives(found) if life[1] == "copy"] == [
        ("g2", "copy", 1, 1, 2),
        ("g1", "copy", 5, 3, 3),
    ]


def test_the_caller_holds_inputs_all_the_time() -> None:
    """Tangents count from the boundary on instead, and an input without bytes is not listed."""
    sketch = Sketch()
    x, _, t = sketch.input("primals_1", 4), sketch.input("primals_2", 0), sketch.input("tangents_1", 4)
    exp = sketch.call("exp", aten.exp.default, x)
    graph = sketch.joint(
        [sketch.call("sin", aten.sin.default, exp)], [sketch.call("mul", aten.mul.Tensor, t, exp)]
    )
    found = timeline(graph, graph.names)
    assert [(life.origin.name, life.first, life.last) for life in found.held] == [("primals_1", 0, 2)]
    assert {("tangents", "tangents", 16, 2, 2), ("mul", "gradient", 16, 2, 2)} <= set(lives(found))


def test_what_is_live_at_a_step() -> None:
    """The largest first."""
    found = timeline(chain(3, sizes={"f1": 5, "g2": 2}), chain(3).names)
    assert [life.origin.name for life in found.live_at(4)] == ["f1", "g2", "f3", "g3"]
    assert (found.peak_bytes, found.peak_step) == (9, 4)


def test_the_timeline_of_nothing() -> None:
    """It has no peak."""
    found = timeline(chain(1), ())
    assert (found.live_bytes, found.peak_bytes, found.peak_step, found.seconds) == ((), 0, 0, 0.0)


def test_lives_say_where_they_come_from() -> None:
    """The operator, the module and the line of the node."""
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    stack = {"block": ("L['self'].blocks.0", torch.nn.Linear)}
    trace = 'File "a/b/net.py", line 7, in forward'
    exp = sketch.call("exp", aten.exp.default, x, stack_trace=trace, nn_module_stack=stack)
    graph = sketch.joint([exp])
    (life,) = timeline(graph, graph.names).lives
    origin = life.origin
    assert (origin.operator, origin.module, origin.source) == ("aten.exp.default", "blocks.0", "a/b/net.py:7")


def test_seconds_are_those_of_the_solution() -> None:
    """The seconds of the steps sum to the schedule's."""
    planning = problem(chain(3, seconds={"f1": 1.0, "g1": 2.5}))
    solution = planning.evaluate(["f1", "f2", "f3", "f1", "g3", "g2", "g1"], "mine")
    found = planning.timeline(solution)
    assert [step.seconds for step in found.steps] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.5]
    assert found.seconds == solution.seconds == 4.5


# --- Against liveness -----------------------------------------------------------------------------------


def assert_agrees(graph: JointGraph, schedule: Schedule, fusion: str) -> None:
    """The lives sum to what liveness counts, each of a known kind and inside of the schedule."""
    found, expected = timeline(graph, schedule, fusion), profile(graph, schedule, fusion)
    assert found.live_bytes == tuple(expected.live_bytes.tolist())
    assert found.peak_bytes == expected.peak_bytes
    assert all(life.kind in KINDS and life.bytes > 0 for life in found.lives)
    assert all(0 <= life.first <= life.last < len(schedule) for life in found.lives)
    assert [life.first for life in found.lives] == sorted(life.first for life in found.lives)
    sums = zip(*(found.live_bytes_of(kind) for kind in KINDS), strict=True)
    assert tuple(map(sum, sums)) == found.live_bytes


@given(graphs_and_schedules())
def test_random_graphs(drawn: tuple[JointGraph, Schedule]) -> None:
    """Any graph, any schedule."""
    graph, schedule = drawn
    assert_agrees(graph, schedule, "none")


@given(networks(), st.integers(0, 99))
@few(20)
def test_random_networks(network: Network, seed: int) -> None:
    """Traced graphs, under each model of memory, buffers written over included."""
    graph = traced(network)
    for fusion in FUSIONS:
        known = make_problem(graph, fusion=fusion).graph
        assert_agrees(known, random_schedule(known, seed), fusion)


# --- Real models ----------------------------------------------------------------------------------------

IN_TIME = ("transformer", "unet")  # the others are slow


@pytest.mark.parametrize(
    "name", [name if name in IN_TIME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_real_models(name: str) -> None:
    """The peak of the timeline is the predicted one, of a plan and of the baseline, under each model."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs)
    for fusion in FUSIONS:
        problem = make_problem(graph, fusion=fusion)
        for solution in (solve(problem, "recursive")[-1], baseline_plan(problem)):
            evaluated = problem.evaluate(solution.schedule, "mine")
            found = problem.timeline(evaluated)
            assert found.peak_bytes == evaluated.peak_bytes > 0
            assert {life.kind for life in found.lives} >= {"saved", "gradient"}


def test_a_timeline_is_pickled_as_it_is() -> None:
    """What was computed from the lives does not go along."""
    found = timeline(chain(4), chain(4).names)
    text = pickle.dumps(found)
    assert found.live_bytes
    assert pickle.dumps(found) == text
    assert pickle.loads(text) == found
