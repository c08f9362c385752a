"""report: what was kept, what is computed again and why, as values, as tables and as JSON."""

from __future__ import annotations

import json
import operator
from dataclasses import replace

import pytest
import torch
from graphs import Sketch, chain, compiled_graphs, few, networks, problem, random_schedule
from hypothesis import given
from programs import Network, traced
from torch import nn

import fxremat
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule
from fxremat.predict.models import profile
from fxremat.report.report import Report, make_report
from fxremat.report.values import Value

aten = torch.ops.aten
MIB = 2**18  # so many float32 take a MiB


def report_of(graph: JointGraph, schedule: Schedule, budget: int | float | str | None = None) -> Report:
    """The report of a schedule."""
    planning = problem(graph)
    return make_report(
        planning,
        profile(graph, schedule),
        planning.evaluate(schedule, "mine"),
        planning.identity("keep_all"),
        compiler="eager",
        budget=budget,
        budget_bytes=budget if isinstance(budget, int) else None,
        lowest_peak_bytes=2**20,
        lowest_peak_lower_bound_bytes=2**19,
        planning_seconds=0.25,
    )


def drawn() -> JointGraph:
    """x -> exp -> dropout -> sin, 1 MiB each; the backward reads the last two and the mask."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", MIB), sketch.input("tangents_1", MIB)
    exp = sketch.call("exp", aten.exp.default, x, stack_trace='File "a/b/net.py", line 7, in forward')
    drop = sketch.call("drop", aten.native_dropout.default, exp, 0.5, True)
    value = sketch.call("value", operator.getitem, drop, 0)
    mask = sketch.call("mask", operator.getitem, drop, 1)
    sin = sketch.call("sin", aten.sin.default, value)
    cos = sketch.call("cos", aten.cos.default, value)
    g = sketch.call("g", aten.mul.Tensor, t, cos)
    back = sketch.call("back", aten.native_dropout_backward.default, g, mask, 2.0)
    return sketch.joint([sin], [sketch.call("dx", aten.mul.Tensor, back, exp)])


def test_a_report_has_the_timelines_of_both() -> None:
    """Their peaks are those of the report; the frontier has the plans that none other beats."""
    graph = drawn()
    schedule = Schedule(["exp", "drop", "value", "mask", "sin", "cos", "g", "back", "exp", "dx"])
    report = report_of(graph, schedule)
    assert report.timeline.peak_bytes == report.peak_bytes
    assert report.baseline_timeline.peak_bytes == report.baseline_peak_bytes
    assert report.timeline.live_bytes_of("recomputed")[-2:] == (2**20, 2**20)
    assert not any(report.baseline_timeline.live_bytes_of("recomputed"))


# --- Values ---------------------------------------------------------------------------------------------


def test_saved_values_say_why_they_are_kept() -> None:
    """What crosses the boundary stands in the forward's order, with the reason where that was no choice."""
    graph = drawn()
    report = report_of(graph, Schedule(graph.names))
    found = [(value.name, value.saved_bytes, value.reason) for value in report.values]
    assert found == [
        ("exp", 2**20, ""),
        ("drop", 2**20 + 2**18, "it draws random numbers"),
        ("sin", 2**20, ""),
    ]
    assert report.saved_bytes == 3 * 2**20 + 2**18


def test_recomputed_values_say_what_they_take() -> None:
    """A mirror is listed with its bytes and seconds, and is not saved."""
    graph = drawn()
    schedule = Schedule(["exp", "drop", "value", "mask", "sin", "cos", "g", "back", "exp", "dx"])
    report = report_of(graph, schedule)
    exp = next(value for value in report.values if value.name == "exp")
    seconds = problem(graph).costs.of_node(graph, graph.index["exp"])
    assert exp == Value("exp", "aten.exp.default", "", "a/b/net.py:7", 0, 1, 2**20, seconds, "")


def test_a_mirror_of_batch_norm_takes_what_it_recreates() -> None:
    """Its running statistics are made once."""
    graph = traced(Network([("batch_norm", -1, -1), ("tanh", -1, -1)]))
    report = report_of(graph, fxremat.expand(graph, dict.fromkeys(graph.names, 1)))
    norm = next(value for value in report.values if value.name.startswith("_native_batch_norm"))
    assert norm.recomputed_bytes == 96 + 24 + 24


@few(8)
@given(networks())
def test_the_report_adds_up(network: Network) -> None:
    """Saved bytes are the profile's, recomputed nodes the schedule's."""
    graph = problem(traced(network)).graph  # which has scratch bytes
    schedule = random_schedule(graph, seed=0)
    report = report_of(graph, schedule)
    assert report.saved_bytes == profile(graph, schedule).saved_bytes
    assert {v.name: v.recomputed for v in report.values if v.recomputed} == schedule.mirror_counts
    assert report.peak_bytes == profile(graph, schedule).peak_bytes
    assert str(report)


def test_a_report_knows_sources_and_modules() -> None:
    """Under torch.compile each value names the user's line and module."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    (graph,) = compiled_graphs(lambda x: model(x).sum(), torch.randn(3, 4))
    report = report_of(graph, Schedule(graph.names))
    tanh = next(value for value in report.values if value.name == "tanh")
    assert tanh.module.endswith("1")
    assert tanh.source.rpartition(":")[0].endswith(".py")


# --- Tables ---------------------------------------------------------------------------------------------


def test_the_summary() -> None:
    """Budget, peak, saved bytes, time and planner, in units that a person reads."""
    graph = drawn()
    schedule = Schedule(["exp", "drop", "value", "mask", "sin", "cos", "g", "back", "exp", "dx"])
    lines = report_of(graph, schedule, budget=8 * 2**20).summary().splitlines()
    assert lines[0] == "graph (eager)"
    labels = (
        "budget",
        "predicted peak",
        "saved for the backward",
        "predicted time",
        "lower bound",
        "lowest peak",
        "recomputed nodes",
        "planner",
    )
    for line, label in zip(lines[1:], labels, strict=True):
        assert line.startswith(label)
    assert lines[1].endswith("8388608 = 8.00 MiB for this graph")
    assert "MiB, " in lines[2] and lines[2].endswith("% of the peak without fxremat")
    assert lines[3].endswith("2.25 MiB")
    assert "ms within this budget: at most " in lines[5] and lines[5].endswith("% from optimal")
    assert lines[6].endswith("1.00 MiB found, 0.50 MiB at least for any plan")
    assert lines[7].endswith("1 of 9")
    assert lines[8].endswith("mine, 0.25 s")


def test_the_gap_is_never_rounded_down() -> None:
    """What is printed is still a bound; without a budget it is that of the plan's own peak."""
    graph = drawn()
    report = report_of(graph, Schedule(graph.names))
    solution = replace(report.solution, seconds=1.00101, lower_bound_seconds=1.0)
    assert (
        replace(report, solution=solution, gap=0.00101)
        .summary()
        .splitlines()[5]
        .endswith("at least 1000.00 ms at this peak: at most 0.2% from optimal")
    )
    assert (
        report_of(graph, Schedule(graph.names)).gap
        == report.solution.seconds / report.solution.lower_bound_seconds - 1
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, "none: the least time"), ("min", "min: the least peak at hand")],
)
def test_budgets_that_are_no_number_are_words(budget: str | None, expected: str) -> None:
    """The summary says what they mean."""
    assert expected in report_of(chain(2), Schedule(chain(2).names), budget).summary()


def test_the_table_is_by_place() -> None:
    """One row for each module, operator and line; most bytes first, the reason last."""
    graph = drawn()
    header, _, *rows = report_of(graph, Schedule(graph.names)).table().splitlines()
    assert header.split("  ")[0].strip() == "module"
    assert "kept because" in header
    assert len(rows) == 3
    assert "aten.native_dropout.default" in rows[0] and rows[0].endswith("it draws random numbers")
    assert any("b/net.py:7" in row for row in rows)


def test_repeated_modules_share_a_row() -> None:
    """The layers of a stack are one row with a star for their number, their bytes added up."""
    graph = drawn()
    report = report_of(graph, Schedule(graph.names))
    value = report.values[0]
    blocks = tuple(replace(value, name=f"exp_{i}", module=f"blocks.{i}.act") for i in range(12))
    _, _, *rows = replace(report, values=blocks).table().splitlines()
    (row,) = rows
    assert row.split()[0] == "blocks.*.act"
    assert " 12 " in row and "12.00 MiB" in row


def test_a_long_table_says_what_it_leaves_out() -> None:
    """The limit cuts rows, None cuts nothing."""
    graph = drawn()
    report = report_of(graph, Schedule(graph.names))
    value = report.values[0]
    many = replace(report, values=tuple(replace(value, operator=f"op{i}") for i in range(40)))
    assert many.table().endswith("... and 10 more rows")
    assert many.table(limit=5).endswith("... and 35 more rows")
    assert "more rows" not in many.table(limit=None)
    assert len(many.table(limit=None).splitlines()) == 42


# --- Edges ----------------------------------------------------------------------------------------------


def test_a_graph_with_nothing_saved() -> None:
    """A report without values can be printed."""
    graph = fxremat.capture(nn.Identity(), torch.randn(4, requires_grad=True), loss=torch.sum)
    report = report_of(graph, Schedule(graph.names))
    assert [value.name for value in report.values] == ["sum_1"]
    empty = replace(report, values=(), baseline_seconds=0.0, baseline_peak_bytes=0)
    assert empty.saved_bytes == 0
    assert "kept because" in str(empty)
    assert "-" in empty.summary()


def test_a_graph_of_mappings_has_a_report() -> None:
    """Without operators, modules and sources it is a table of names' bytes."""
    graph = chain(4, sizes={"f1": 2**20})
    report = report_of(graph, Schedule(["f1", "f2", "f3", "f4", "g4", "f2", "g3", "g2", "g1"]))
    assert [(value.name, value.recomputed) for value in report.values] == [
        ("f1", 0),
        ("f2", 1),
        ("f3", 0),
        ("f4", 0),
    ]
    assert "1.00 MiB" in str(report)


def test_a_report_as_json() -> None:
    """All fields but the timelines are there, the solution's and the values' too, and can be read back."""
    graph = drawn()
    report = report_of(graph, Schedule(graph.names), budget="min")
    fields = json.loads(report.to_json())
    assert set(fields) == {*Report.__slots__} - {"timeline", "baseline_timeline"}
    assert fields["budget"] == "min"
    assert tuple(fields["solution"]["schedule"]) == graph.names
    assert [Value(**value) for value in fields["values"]] == list(report.values)
    rebuilt = fxremat.Solution.from_json(json.dumps(fields["solution"]))
    assert rebuilt == report.solution
