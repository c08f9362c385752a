"""planfile, planjson, plandiff: what is written is read back, and what else a file holds is refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import few, joint_graphs
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import fxremat
from fxremat.driver.pipeline import make_problem, planned
from fxremat.driver.policy import FromFile
from fxremat.errors import (
    FxrematError,
    InfeasibleBudgetError,
    InvalidOptionError,
    PlanFileError,
    PlanMismatchError,
    ScheduleError,
)
from fxremat.graph.joint import JointGraph
from fxremat.options.options import Options
from fxremat.planfile.contents import PlanFile
from fxremat.planfile.text import VERSION, from_json, to_json


def network(width: int = 16, layers: int = 3) -> nn.Module:
    """A chain of layers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def graph_of(width: int = 16, layers: int = 3) -> JointGraph:
    """The graph of a step of it."""
    return fxremat.capture(network(width, layers), torch.randn(32, width), loss=torch.sum)


GRAPH = graph_of()
COST = dict.fromkeys(GRAPH.names, 1.0)  # no machine's rates
PLANS = fxremat.make_plan(GRAPH, budget="min", compiler="eager", cost=COST)
TEXT = to_json(PLANS)


def fields() -> dict[str, Any]:
    """A file, to be changed."""
    found: dict[str, Any] = json.loads(TEXT)
    return found


# --- Writing and reading --------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """All of it; and its key is that of the plans, wherever they lie."""
    path = tmp_path / "plan.json"
    assert fxremat.save_plan(path, PLANS) is PLANS
    loaded = fxremat.load_plan(path)
    assert loaded == PLANS
    assert (loaded.key, loaded.path) == (PLANS.key, str(path))
    assert repr(loaded) == repr(PLANS)
    assert to_json(loaded) == TEXT == path.read_text("utf-8")
    assert pickle.loads(pickle.dumps(loaded)) == PLANS
    assert pickle.dumps(loaded) == pickle.dumps(replace(loaded, path="elsewhere.json"))


def test_the_plan_is_the_reports() -> None:
    """Schedule, peak and what is computed again are those of the report."""
    report = planned(GRAPH, Options(budget="min", compiler="eager", cost=COST))
    (plan,) = PlanFile.of(report).graphs
    assert plan.solution.schedule == report.solution.schedule
    assert plan.solution.peak_bytes == report.peak_bytes
    assert plan.solution.seconds == pytest.approx(report.solution.seconds, rel=1e-5)
    assert [each.name for each in plan.values] == [each.name for each in report.values]
    assert dict(plan.options)["budget"] == "min"
    assert plan.device == "cpu"


def test_runs_of_the_schedule_stand_in_one_line() -> None:
    """The file is much shorter than the schedule, and has a line for each node."""
    (graph,) = fields()["graphs"]
    (plan,) = PLANS.graphs
    assert len(graph["schedule"]) < len(plan.solution.schedule) / 2
    lines = [line.strip().rstrip(",") for line in TEXT.splitlines()]
    assert all(json.dumps(row) in lines for row in graph["nodes"])


@few(15)
@given(joint_graphs(), st.integers(0, 2))
def test_any_schedule_survives(graph: JointGraph, mirrors: int) -> None:
    """Of any graph, with mirrors wherever they may be."""

    def planner(problem: fxremat.Problem) -> dict[str, int]:
        return {node.name: mirrors for node in problem.graph.nodes if node.keep is None}

    assume(len(graph.nodes) > graph.num_inputs)
    made = fxremat.make_plan(graph, planner=planner, compiler="eager")
    assert from_json(to_json(made)) == made
    solution = FromFile(made, None, "eager").choose(make_problem(graph, fusion="none"), None).solution
    assert solution.schedule == made.graphs[0].solution.schedule


def test_texts_of_users_are_made_printable() -> None:
    """What a planner says of its plan may be anything."""
    report = planned(GRAPH, Options(compiler="eager"))
    noted = replace(report, solution=replace(report.solution, note="a\n\x1b[31m" + "b" * 9999))
    made = PlanFile.of(noted)
    assert made.graphs[0].solution.note.startswith("a??[31mbb")
    assert from_json(to_json(made)) == made


def test_one_plan_for_each_graph() -> None:
    """Equal ones are one; two for the same graph are refused."""
    first, second = (planned(GRAPH, Options(budget=budget, compiler="eager")) for budget in (None, "min"))
    assert len(PlanFile.of([first, first]).graphs) == 1
    assert len(PlanFile.of([first, planned(graph_of(8), Options(compiler="eager"))]).graphs) == 2
    with pytest.raises(InvalidOptionError, match="same graph with different plans"):
        PlanFile.of([first, second])


@pytest.mark.parametrize("reports", [None, 3, "plan.json", [], [None]])
def test_only_reports_have_plans(reports: Any) -> None:
    """Everything else is said to be none."""
    with pytest.raises(InvalidOptionError, match="expected a Report"):
        PlanFile.of(reports)


def test_a_file_that_can_not_be_written_or_read(tmp_path: Path) -> None:
    """Says which."""
    with pytest.raises(PlanFileError, match="can't be written"):
        fxremat.save_plan(tmp_path / "none" / "plan.json", PLANS)
    with pytest.raises(PlanFileError, match="can't be read") as caught:
        fxremat.load_plan(tmp_path / "plan.json")
    assert caught.value.path == str(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFileError, match="UTF-8"):
        fxremat.load_plan(tmp_path / "plan.json")
    with pytest.raises(InvalidOptionError):
        fxremat.load_plan(3)  # type: ignore[arg-type]


# --- The form -------------------------------------------------------------------------------------------

SCHEMA = json.loads(files("fxremat.planfile").joinpath("plan.schema.json").read_text("utf-8"))


def test_what_is_saved_has_the_form_of_the_schema() -> None:
    """The schema is one, and what is written keeps it."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(fields(), SCHEMA)


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the value at a path."""
    *places, last, value = path

    def change(found: Any) -> None:
        for place in places:
            found = found[place]
        found[last] = value

    return change


CHANGES: list[tuple[Callable[[dict[str, Any]], None], str, str]] = [
    (_set("format", "other"), "", "format is 'fxremat plan'"),
    (_set("version", VERSION + 1), "version", "Install a newer fxremat"),
    (_set("version", "1"), "version", "expected 1"),
    (_set("version", True), "version", "expected 1"),
    (_set("extra", 1), "", "'extra' is unknown"),
    (_set("made_by", "torch", 3), "made_by.torch", "expected a text"),
    (_set("graphs", []), "graphs", "no plan"),
    (_set("graphs", {}), "graphs", "expected a list"),
    (_set("graphs", 0, "peak_bites", 1), "graphs[0]", "Did you mean 'peak_bytes'"),
    (_set("graphs", 0, "peak_bytes", -1), "graphs[0].peak_bytes", "whole number"),
    (_set("graphs", 0, "peak_bytes", 1.5), "graphs[0].peak_bytes", "whole number"),
    (_set("graphs", 0, "seconds", "1"), "graphs[0].seconds", "number from 0"),
    (_set("graphs", 0, "seconds", 1e300), "graphs[0].seconds", "number from 0"),
    (_set("graphs", 0, "name", "\x1b[2J"), "graphs[0].name", "printable"),
    (_set("graphs", 0, "name", "x" * 5000), "graphs[0].name", "printable"),
    (_set("graphs", 0, "fingerprint", "0" * 64), "graphs[0].fingerprint", "changed by hand"),
    (_set("graphs", 0, "inputs", 0, "float64[1]"), "graphs[0].fingerprint", "changed by hand"),
    (_set("graphs", 0, "options", "inplace", 1), "graphs[0].options.inplace", "got 1"),
    (_set("graphs", 0, "options", "budget", [1]), "graphs[0].options.budget", "got"),
    (_set("graphs", 0, "options", "budget", -1), "graphs[0].options.budget", "number from 0"),
    (_set("graphs", 0, "schedule", 0, "nobody"), "graphs[0].schedule[0]", "name of a node"),
    (_set("graphs", 0, "schedule", 0, 3), "graphs[0].schedule[0]", "name of a node"),
    (_set("graphs", 0, "schedule", 0, []), "graphs[0].schedule[0]", "name of a node"),
    (_set("graphs", 0, "schedule", 0, ["sum_1", "t"]), "graphs[0].schedule[0]", "name of a node"),
    (_set("graphs", 0, "nodes", 0, ["a"]), "graphs[0].nodes[0]", "expected name, operator"),
    (_set("graphs", 0, "nodes", 0, 3, "xyz"), "graphs[0].nodes[0]", "hexadecimal"),
    (_set("graphs", 0, "nodes", 0, 4, "input"), "graphs[0].nodes[0]", "output, gradient"),
    (_set("graphs", 0, "nodes", 1, 0, "t"), "graphs[0].nodes", "same name"),
    (_set("graphs", 0, "values", 0, "recomputed", 7), "graphs[0].values", "times, not 7"),
    (_set("graphs", 0, "values", 0, "name", "nobody"), "graphs[0].values", "no node"),
    (lambda found: found.pop("made_by"), "", "'made_by' is missing"),
    (lambda found: found["graphs"].append(found["graphs"][0]), "graphs", "same fingerprint"),
    (lambda found: found["graphs"][0]["values"].clear(), "graphs[0].values", "computed again"),
]


@pytest.mark.parametrize(("change", "place", "problem"), CHANGES)
def test_a_file_with_another_form_is_refused(
    change: Callable[[dict[str, Any]], None], place: str, problem: str
) -> None:
    """The error says where, and what is wrong."""
    found = fields()
    change(found)
    with pytest.raises(PlanFileError, match=problem.replace("[", r"\[")) as caught:
        from_json(json.dumps(found), "plan.json")
    assert (caught.value.path, caught.value.place) == ("plan.json", place)
    assert "plan.json" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"format": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"format": 1e999}'],
)
def test_what_is_no_plan_file_is_refused(text: str) -> None:
    """Whatever it is."""
    with pytest.raises(PlanFileError):
        from_json(text)


def test_a_schedule_that_would_fill_the_memory_is_refused() -> None:
    """A few lines may stand for many steps."""
    found = fields()
    nodes = found["graphs"][0]["nodes"]
    found["graphs"][0]["schedule"] = [[nodes[0][0], nodes[-1][0]]] * 1_000_000
    with pytest.raises(PlanFileError, match="more than"):
        from_json(json.dumps(found))


# --- Anything -------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a file."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, each in items:
        yield from _places(each, (*path, place))


PLACES = list(_places(json.loads(TEXT)))
NAMES = [row[0] for row in json.loads(TEXT)["graphs"][0]["nodes"]]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    """A file in which something was replaced, removed, doubled or swapped."""
    found = fields()
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(PLACES))
        owner: Any = found
        try:
            for place in path:
                owner = owner[place]
            what = draw(st.sampled_from(("set", "remove", "double", "swap")))
            if what == "set":
                owner[last] = draw(ANYTHING)
            elif what == "remove":
                del owner[last]
            elif isinstance(owner, list):
                other = draw(st.integers(0, len(owner) - 1))
                if what == "double":
                    owner.insert(other, copy.deepcopy(owner[last]))
                else:
                    owner[last], owner[other] = owner[other], owner[last]
        except (LookupError, TypeError):
            continue
    return found


@few(300)
@given(mutations())
def test_whatever_a_file_holds_it_is_loaded_or_refused(found: dict[str, Any]) -> None:
    """And what is loaded has the schema's form, is applied or refused, and then runs every node."""
    try:
        plans = from_json(json.dumps(found))
    except PlanFileError:
        return
    try:
        import jsonschema
    except ModuleNotFoundError:
        pass
    else:
        jsonschema.validate(json.loads(json.dumps(found)), SCHEMA)
    assert from_json(to_json(plans)) == plans
    str(fxremat.diff_plans(PLANS, plans))
    try:
        choice = FromFile(plans, None, "eager").choose(make_problem(GRAPH, fusion="none"), None)
    except FxrematError:
        return
    assert set(choice.solution.schedule) == set(GRAPH.names)


# --- Applying -------------------------------------------------------------------------------------------


def cost(graph: JointGraph) -> dict[str, float]:
    """A second for each node."""
    return dict.fromkeys(graph.names, 1.0)


def applied(graph: JointGraph, plans: PlanFile, **options: Any) -> fxremat.Report:
    """What becomes of a graph with these plans."""
    parsed = Options.parse({"compiler": "eager", "plan": plans, "cost": cost(graph), **options})
    return planned(
        graph,
        parsed,
        choose_plan=lambda problem: FromFile(plans, parsed.budget, "eager").choose(problem, None),
    )


def test_a_plan_is_applied_to_its_graph() -> None:
    """With the same peak and time, and a note that says where it is from."""
    report = applied(GRAPH, PLANS)
    (plan,) = PLANS.graphs
    assert report.solution.schedule == plan.solution.schedule
    assert report.peak_bytes == plan.solution.peak_bytes
    assert report.solution.seconds == pytest.approx(plan.solution.seconds, rel=1e-5)
    assert "the plan is one of those given, made for cpu" in report.notes
    assert "none: the plan is given" in report.summary()
    with pytest.raises(InvalidOptionError, match="copy that"):
        PlanFile.of(report)


def test_a_budget_beside_a_plan_is_held_against_it() -> None:
    """A plan above it is refused, with what would do."""
    peak = PLANS.graphs[0].solution.peak_bytes
    assert applied(GRAPH, PLANS, budget=peak).budget_bytes == peak
    with pytest.raises(InfeasibleBudgetError, match="without option 'plan' another is made") as caught:
        applied(GRAPH, PLANS, budget=peak - 1)
    assert caught.value.lowest_peak_bytes == peak


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        (graph_of(width=8), "size", r"float32\[8, 8\], expected float32\[16, 16\]"),
        (graph_of(layers=4), "operator", "nodes, expected"),
    ],
)
def test_another_graph_is_refused(other: JointGraph, kind: str, text: str) -> None:
    """The error says what differs from the nearest, and what to do."""
    with pytest.raises(PlanMismatchError, match=text) as caught:
        applied(other, PLANS)
    assert (caught.value.nearest, caught.value.kind) == ("Sequential", kind)
    assert caught.value.node in other.index
    assert "on_error='fallback'" in str(caught.value)


def test_the_nearest_of_several_graphs_is_told() -> None:
    """That with the fewest nodes of its own."""
    plans = replace(PLANS, graphs=(*fxremat.make_plan(graph_of(8), compiler="eager").graphs, *PLANS.graphs))
    with pytest.raises(PlanMismatchError, match="planned for compiler='eager': "):
        plans.find(graph_of(layers=4), "inductor")


def test_a_schedule_that_is_none_of_the_graph_is_refused() -> None:
    """However it came into the file."""
    (plan,) = PLANS.graphs
    short = fxremat.Schedule(plan.solution.schedule[:-1])
    broken = replace(PLANS, graphs=(replace(plan, solution=replace(plan.solution, schedule=short)),))
    with pytest.raises(ScheduleError):
        applied(GRAPH, broken)


@pytest.mark.parametrize("value", [3, b"plan.json", ["plan.json"], {"path": 1}])
def test_option_plan_takes_a_path_or_plans(value: Any) -> None:
    """Nothing else."""
    with pytest.raises(InvalidOptionError, match="plan"):
        Options.parse({"plan": value})


@pytest.mark.parametrize("other", [{"planner": "auto"}, {"time_limit_seconds": 1}])
def test_option_plan_leaves_nothing_to_planners(other: dict[str, Any]) -> None:
    """What is said to one beside it would be in vain."""
    with pytest.raises(InvalidOptionError, match="has one already"):
        Options.parse({"plan": PLANS, **other})


def test_the_plan_is_a_part_of_the_key() -> None:
    """Of caches: another plan is another key, wherever the file lies."""
    other = fxremat.make_plan(GRAPH, compiler="eager")
    first, again, second = (
        fxremat.partitioner(plan=plans, compiler="eager").key()
        for plans in (PLANS, replace(PLANS, path="elsewhere.json"), other)
    )
    assert first == again != second


# --- Comparing ------------------------------------------------------------------------------------------


def test_a_plan_does_not_differ_from_itself() -> None:
    """Nor where other figures were predicted."""
    (plan,) = PLANS.graphs
    elsewhere = replace(plan, device="NVIDIA H100", solution=replace(plan.solution, seconds=9.0))
    for other in (PLANS, replace(PLANS, graphs=(elsewhere,))):
        found = fxremat.diff_plans(PLANS, other)
        assert found.is_same
        assert str(found).startswith("1 of 1 graphs have the same plan")


def test_values_that_are_treated_otherwise_are_told() -> None:
    """By module and operator, with the bytes that are kept and computed again."""
    kept = fxremat.make_plan(GRAPH, planner="keep_all", compiler="eager")
    found = fxremat.diff_plans(kept, PLANS)
    (graph,) = found.graphs
    assert not found.is_same and graph.graph == ""
    tanh = [each for each in graph.changes if each.operator == "aten.tanh.default"]
    assert sum(each.kept_bytes for each in tanh) < 0 < sum(each.recomputed_bytes for each in tanh)
    assert "aten.tanh.default" in str(found)
    assert "-" in str(found)


def test_graphs_of_one_file_alone_and_other_graphs_are_told() -> None:
    """Those with one name are compared; what differs in the graph is said."""
    wide = fxremat.make_plan(graph_of(width=8), budget="min", compiler="eager")
    (graph,) = fxremat.diff_plans(PLANS, wide).graphs
    assert "float32[8, 8], expected float32[16, 16]" in graph.table()
    assert not graph.is_same
    renamed = replace(wide, graphs=(replace(wide.graphs[0], name="Other"),))
    found = fxremat.diff_plans(PLANS, renamed)
    assert [(each.before is None, each.after is None) for each in found.graphs] == [
        (False, True),
        (True, False),
    ]
    assert "Other: in the second file alone" in str(found)


def test_only_plans_are_compared() -> None:
    """A path is to be loaded before."""
    with pytest.raises(InvalidOptionError, match="load_plan"):
        fxremat.diff_plans("plan.json", PLANS)  # type: ignore[arg-type]
