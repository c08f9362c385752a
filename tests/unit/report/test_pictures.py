"""pictures: snapshots, traces and pages say what the timeline says, in formats that their readers take."""

from __future__ import annotations

import json
import logging
import pickle
import pickletools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import chain, graphs_and_schedules, networks, problem, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Network, traced
from torch import Tensor, nn
from torch.cuda import _memory_viz

import fxremat
from fxremat._torch import logs
from fxremat.driver.pipeline import make_problem
from fxremat.errors import InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.places import Origin
from fxremat.graph.schedule import Schedule
from fxremat.measure import record
from fxremat.memory.timeline import Timeline
from fxremat.predict.models import profile
from fxremat.predict.problem import Problem
from fxremat.report.charts import columns
from fxremat.report.page import page
from fxremat.report.report import Report, make_report
from fxremat.report.snapshot import snapshot
from fxremat.report.trace import trace


def report_of(planning: Problem, schedule: Schedule, budget_bytes: int | None = None) -> Report:
    """The report of a schedule."""
    solution = planning.evaluate(schedule, "mine")
    baseline = planning.identity("keep_all")
    return make_report(
        planning,
        profile(planning.graph, schedule, planning.fusion),
        solution,
        baseline,
        compiler="eager",
        budget=budget_bytes,
        budget_bytes=budget_bytes,
        lowest_peak_bytes=1,
        lowest_peak_lower_bound_bytes=1,
        planning_seconds=0.0,
        solutions=(solution, baseline),
    )


def drawn() -> Report:
    """The report of a chain of which one value is computed again."""
    graph = chain(4, sizes={"f1": 2**20, "f3": 2**20}, seconds={"f1": 1e-3, "f2": 2e-3, "g1": 1e-3})
    schedule = Schedule(["f1", "f2", "f3", "f4", "g4", "g3", "f1", "g2", "g1"])
    return report_of(problem(graph), schedule, budget_bytes=2**21)


# --- Snapshots ------------------------------------------------------------------------------------------

# What the reader of pytorch.org/memory_viz knows of pickle.
KNOWN = {
    *("PROTO", "FRAME", "STOP", "MEMOIZE", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "BINGET", "LONG_BINGET"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
}


def replayed(found: dict[str, Any], device: int) -> int:
    """The most bytes that the events of a device allocate at once, nothing at two places or twice."""
    live: dict[int, int] = {}
    most = 0
    for event in found["device_traces"][device]:
        if event["action"] == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or begin >= other + size for other, size in live.items())
            live[begin] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        most = max(most, sum(live.values()))
    (segment,) = (each for each in found["segments"] if each["device"] == device)
    blocks = segment["blocks"]
    assert sum(block["size"] for block in blocks) == segment["total_size"]
    held = {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}
    assert live.items() <= held.items()
    return most


def assert_replays(found: dict[str, Any], device: int, timeline: Timeline) -> None:
    """The events reach the peak, and leave what the last step leaves, besides what is held."""
    assert replayed(found, device) == timeline.peak_bytes
    segment = next(each for each in found["segments"] if each["device"] == device)
    held = sum(life.bytes for life in timeline.held)
    assert segment["allocated_size"] == held + timeline.live_bytes[-1]


@given(graphs_and_schedules())
def test_events_reach_the_peak(drawn: tuple[JointGraph, Schedule]) -> None:
    """Any graph, any schedule."""
    graph, schedule = drawn
    timeline = report_of(problem(graph), schedule).timeline
    found = snapshot([timeline])
    if timeline.lives:
        assert_replays(found, 0, timeline)


@given(networks(), st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_a_network_as_a_snapshot(network: Network, seed: int) -> None:
    """Two devices: the plan and the step without fxremat, parameters in no event."""
    planning = make_problem(traced(network), fusion="inductor")
    report = report_of(planning, random_schedule(planning.graph, seed))
    timelines = [report.timeline, report.baseline_timeline]
    found = snapshot(timelines)
    for device, timeline in enumerate(timelines):
        assert_replays(found, device, timeline)
        assert sum(life.bytes for life in timeline.held) > 0
    frames = [frame for block in found["segments"][0]["blocks"] for frame in block["frames"]]
    assert any(frame["name"].startswith("held: ") for frame in frames)


def test_torch_reads_a_snapshot(tmp_path: Path) -> None:
    """Its own readers take the file, and the one of the page knows all that is in it."""
    drawn().save_snapshot(tmp_path / "step.pickle")
    content = (tmp_path / "step.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= KNOWN
    assert content[:2] == b"\x80\x04"
    found = pickle.loads(content)
    assert "1.0MiB" in _memory_viz.trace(found)
    assert "segments: 2\n" in _memory_viz.segsum(found)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(found)
    categories = {event["category"] for event in found["device_traces"][0]}
    assert categories == {"unknown", "saved", "forward", "recomputed", "output", "backward", "gradient"}


def test_a_recording_stands_beside_the_prediction(tmp_path: Path) -> None:
    """The last device replays to the measured peak, the others to the predicted; torch reads them."""
    torch.compiler.reset()
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 1), nn.Flatten(0))
    compiled = torch.compile(model, backend="fxremat", options={"compiler": "eager", "budget": "min"})
    inputs = torch.randn(64, 16)

    def step() -> None:
        model.zero_grad()
        compiled(inputs).backward(torch.ones(64))

    for _ in range(2):
        step()
    model.zero_grad()
    recording = record(step, device="cpu")
    report = fxremat.reports()[-1]
    report.save_snapshot(tmp_path / "step.pickle", measured=recording)
    found = pickle.loads((tmp_path / "step.pickle").read_bytes())
    peaks = [report.timeline.peak_bytes, report.baseline_timeline.peak_bytes, recording.peak_bytes]
    assert [replayed(found, device) for device in range(3)] == peaks
    assert recording.peak_bytes == pytest.approx(report.peak_bytes, rel=0.05)
    assert recording.peak_bytes < peaks[1]
    assert {event["category"] for event in found["device_traces"][2]} == {"unknown", "measured"}
    named = {"filename": "none", "line": 0, "name": "CompiledFunctionBackward"}
    assert any(named in event["frames"] for event in found["device_traces"][2])
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(found)


def test_frames_are_the_users_lines() -> None:
    """File, line, operator, node and module; a node without a line has none."""
    timeline = drawn().timeline
    origin = Origin("mm_3", "aten.mm.default", "blocks.1.mlp", "a/net.py:7")
    first = replace(timeline.lives[0], origin=origin)
    found = snapshot([replace(timeline, lives=(first, *timeline.lives[1:]))])
    _, begun, other, *_ = found["device_traces"][0]
    text = "forward: aten.mm.default mm_3 in blocks.1.mlp"
    assert begun["frames"] == [{"filename": "a/net.py", "line": 7, "name": text}]
    assert other["frames"] == [{"filename": "none", "line": 0, "name": "saved: f2"}]


# --- Traces ---------------------------------------------------------------------------------------------


def test_a_trace_has_slices_and_counters(tmp_path: Path) -> None:
    """Slices one behind the other with their seconds, and the live bytes where each begins."""
    report = drawn()
    report.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["chain", "chain without fxremat"]
    for process, timeline in enumerate((report.timeline, report.baseline_timeline), 1):
        own = [event for event in events if event["pid"] == process]
        slices = [event for event in own if event["ph"] == "X"]
        assert [event["args"]["node"] for event in slices] == [step.origin.name for step in timeline.steps]
        assert sum(event["dur"] for event in slices) * 1e-6 == pytest.approx(timeline.seconds, rel=1e-3)
        ends = [event["ts"] + event["dur"] for event in slices]
        assert [event["ts"] for event in slices] == pytest.approx([0, *ends[:-1]])
        counted = [event["args"]["all"] for event in own if event["name"] == "live bytes"]
        assert tuple(counted) == (*timeline.live_bytes, 0)
        kinds = [sum(event["args"].values()) for event in own if event["name"] == "live bytes by kind"]
        assert kinds == counted
        assert [event["ts"] for event in own if event["name"] == "live bytes"] == [0, *ends]
    again = [event["args"]["node"] for event in events if event.get("cat") == "computed again"]
    assert again == ["f1"]


def test_counters_at_no_cost_are_not_lost() -> None:
    """Steps without seconds have times of their own."""
    timeline = report_of(problem(chain(3, seconds={})), Schedule(chain(3).names)).timeline
    times = [event["ts"] for event in trace([("", timeline)])["traceEvents"] if event["ph"] == "X"]
    assert times == sorted({*times})


# --- Pages ----------------------------------------------------------------------------------------------


class Reading(HTMLParser):
    """Elements, the texts of tables' rows, the script's data; fails where tags don't match."""

    VOID = ("meta", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[dict[str, Any]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID and self.get_starttag_text()[-2:] != "/>":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += text
        if self.open[-1:] == ["script"] and self.tags[-1][1].get("type") == "application/json":
            self.data.append(json.loads(text))


def test_a_page_says_what_the_report_says(tmp_path: Path) -> None:
    """The summary, what is live at the peak, the shapes, the points and the table."""
    report = drawn()
    report.save_html(tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text("utf-8")
    found = Reading(text)
    assert report.summary() in text
    assert ["saved", "1.00 MiB", "1", "f3", "", ""] in found.rows
    paths = [attributes.get("class") for tag, attributes in found.tags if tag == "path"]
    kinds = ["output", "saved", "forward", "recomputed", "backward", "gradient"]
    assert paths == [*kinds, "baseline", "frontier"]
    points = [attributes for tag, attributes in found.tags if attributes.get("class") == "point"]
    assert len(points) == len(report.frontier) == 2
    (data,) = found.data
    live = [report.timeline.live_bytes[step] for step, _ in data["steps"]]
    assert data["live"] == live and max(live) == report.peak_bytes
    assert sum(size for _, size, first, last in data["lives"] if first <= 5 <= last) == live[5]


def test_budget_and_code_are_lines() -> None:
    """Where they are known; the picture is high enough for both."""
    report = replace(drawn(), budget_bytes=2**22, lowered_peak_bytes=2**23)
    lines = [each for tag, each in Reading(page([report])).tags if each.get("class") in ("budget", "dots")]
    heights = [float(each["y1"] or "nan") for each in lines]
    assert heights[0] > heights[1] > 16
    found = Reading(page([replace(report, budget_bytes=None, lowered_peak_bytes=None)]))
    assert not {"budget", "dots"} & {each.get("class") for _, each in found.tags}


def test_a_page_needs_nothing_else() -> None:
    """It names no address and no other file, and forbids itself to ask for any."""
    text = page([drawn()])
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//\w+\.|@import|url\(|\bsrc=|\bhref=", text.replace("default-src=", ""))


def test_names_are_no_markup() -> None:
    """Whatever a graph or a module is called is text, in tables and in the script's data."""
    report = drawn()
    name = "</script><img src=x onerror=alert(1)>"
    origin = Origin(name, name, name, f"{name}:7")
    timeline = replace(
        report.timeline, lives=tuple(replace(life, origin=origin) for life in report.timeline.lives)
    )
    text = page([replace(report, graph_name=name, timeline=timeline)])
    assert "<img" not in text
    assert name in Reading(text).data[0]["places"][0]


def test_a_large_graph_has_its_peak_in_the_picture() -> None:
    """Of the steps that a column stands for it shows the highest; columns stand side by side."""
    graph = chain(2000, sizes={"g1000": 10**6})
    timeline = report_of(problem(graph), Schedule(graph.names)).timeline
    found = columns(timeline, 0.5)
    assert len(found) <= 480
    assert max(timeline.live_bytes[each.step] for each in found) == timeline.peak_bytes > 10**6
    assert [each.left for each in found[1:]] == [each.right for each in found[:-1]]
    assert (found[0].left, found[-1].right) == (0, 1)


def test_several_graphs_are_one_page() -> None:
    """Each has its section."""
    assert len(Reading(page([drawn(), drawn()])).data) == 2


class Block(nn.Module):
    """A block of a network; its output is what the next one begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The residual of a layer between two cheap functions."""
        return x + torch.tanh(self.linear(torch.tanh(x)))


def test_a_step_is_one_page(tmp_path: Path) -> None:
    """The step comes first, with its peaks and its calls, which link to the graphs' timelines."""
    torch.compiler.reset()
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        block.compile(backend="fxremat", options={"compiler": "eager", "budget": "min"})
    for _ in range(3):
        model(torch.randn(256, 64, requires_grad=True)).square().mean().backward()
    step = fxremat.steps()[-1]
    step.save_html(tmp_path / "step.html")
    found = Reading((tmp_path / "step.html").read_text("utf-8"))
    plans = {call.place: call.report for call in step.calls}
    assert None not in plans.values()
    peaks = [step.peak_bytes, *(report.timeline.peak_bytes for report in plans.values() if report)]
    assert [max(data["live"]) for data in found.data] == peaks
    sections = [f"#{each['id']}" for tag, each in found.tags if tag == "section"]
    links = [each["href"] for tag, each in found.tags if tag == "a"]
    assert len(links) == len(step.calls) == 4
    assert set(links) == set(sections[1:])
    without = max(moment.peak_bytes for moment in step.baseline_timeline)
    assert without == step.baseline_peak_bytes > step.peak_bytes
    assert [each.get("class") for _, each in found.tags].count("baseline") == len(sections)
    assert found.data[0]["live"] == [moment.peak_bytes for moment in step.timeline]
    assert "report" not in json.loads(step.to_json())["calls"][0]


def test_a_graph_of_nothing_has_pictures() -> None:
    """No step, no bytes, no plans to choose from."""
    report = replace(
        drawn(), timeline=Timeline((), 0, ()), baseline_timeline=Timeline((), 0, ()), frontier=()
    )
    assert Reading(page([report])).data[0]["steps"] == []
    assert snapshot([report.timeline])["segments"] == []
    assert trace([("", report.timeline)])["traceEvents"]


@pytest.mark.parametrize("save", ["save_html", "save_snapshot", "save_trace"])
def test_a_file_that_cannot_be_written_is_told(save: str, tmp_path: Path) -> None:
    """The error is of the family, and names the file."""
    with pytest.raises(InvalidOptionError, match="nowhere"):
        getattr(drawn(), save)(tmp_path / "nowhere" / "file")


# --- torch's own log ------------------------------------------------------------------------------------


class Listening(logging.Handler):
    """Keeps the artifacts of fxremat that torch's structured log gets, as tlparse would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str], str, int]] = []

    def emit(self, record: Any) -> None:
        artifact = record.metadata.get("artifact", {"name": ""})
        if artifact["name"].startswith("fxremat"):
            self.found.append((artifact, record.payload, record.metadata["frame_id"]))


def test_reports_stand_in_torchs_log() -> None:
    """Where it is kept (TORCH_TRACE), it has the report and the trace of each compiled graph."""
    torch.compiler.reset()
    listening, log = Listening(), logging.getLogger("torch.__trace")
    log.addHandler(listening)
    try:
        model = torch.compile(nn.Linear(4, 2), backend="fxremat", options={"compiler": "eager"})
        model(torch.randn(3, 4)).sum().backward()
    finally:
        log.removeHandler(listening)
    report = fxremat.reports()[-1]
    (text, told, frame), (trace_json, traced_json, _) = listening.found
    assert text == {"name": "fxremat_report", "encoding": "string"}
    assert told == str(report) and frame == 0
    assert trace_json == {"name": "fxremat_trace", "encoding": "json"}
    slices = [each for each in json.loads(traced_json)["traceEvents"] if each["ph"] == "X"]
    assert len(slices) == len(report.timeline.steps) + len(report.baseline_timeline.steps)


def test_nothing_is_logged_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a log no text is made."""

    def content() -> str:
        raise AssertionError

    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])  # pytest's own
    logs.log_artifact("name", logs.TEXT, content)
