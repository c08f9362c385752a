"""cli: what the commands print and write, and how they fail. Without generated code."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.cli import command, demo
from fxremat.device.rates import CPU, PINNED
from fxremat.errors import FxrematError, InfeasibleBudgetError, InvalidOptionError
from fxremat.options.options import of_text

SOURCE = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + 1


def chain():
    return nn.Sequential(*(Layer() for _ in range(8))), (torch.randn(64, 32),), torch.sum


def images():
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers), (torch.randn(2, 4, 16, 16),), torch.sum


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


def broken():
    return Broken(), (torch.randn(64, 32),)


def frozen():
    return nn.Linear(2, 1).requires_grad_(False), (torch.ones(1, 2),), torch.sum


def keep_everything(problem):
    return {}


class Raising(nn.Linear):
    def forward(self, x):
        return {"width": 1}["depth"]


def raising():
    return Raising(2, 2), (torch.ones(1, 2),), torch.sum


def step():
    options = {"budget": 200_000, "compiler": "eager", "time_limit_seconds": 0.1}
    layers = [torch.compile(Layer(), backend="fxremat", options=options) for _ in range(2)]
    return lambda: layers[1](layers[0](torch.randn(64, 32))).sum().backward()


def number():
    return 3
"""
ACTIVATION_BYTES = 64 * 32 * 4


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a file with models; nothing that is compiled or imported outlives the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.compiler.reset()
    path = tmp_path / "tiny.py"
    path.write_text(SOURCE)
    return str(path)


def run(*arguments: str) -> int:
    """The exit status of a command that generates no code."""
    return command.main([*arguments, "--compiler", "eager"])


def written(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a command writes as JSON."""
    path = folder / "out.json"
    assert run(*arguments, "--json", str(path)) == 0
    fields: dict[str, Any] = json.loads(path.read_text())
    return fields


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the commands are listed."""
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {command} " in printed for command in ("demo", "plan", "frontier", "explain"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is the package's."""
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fxremat {fxremat.__version__}\n"


def test_the_module_is_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m fxremat`` does what the script does."""
    monkeypatch.setattr(sys, "argv", ["fxremat", "--version"])
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("fxremat", run_name="__main__")
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"fxremat {fxremat.__version__}\n"


def test_demo_is_given_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and device reach the demo, whose status is the command's."""
    monkeypatch.setattr(demo, "main", lambda steps, device: 7 if (steps, device) == (3, "cpu") else 0)
    assert command.main(["demo", "--steps", "3", "--device", "cpu"]) == 7


def test_plan_prints_a_report_and_compiles_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Budget, peak, time and mirrors are told; no graph was compiled."""
    before = fxremat.reports()
    assert run("plan", f"{model}:chain", "--budget", "min") == 0
    printed = capsys.readouterr().out
    for label in ("budget", "predicted peak", "predicted time", "recomputed nodes", "planner"):
        assert f"\n{label} " in printed
    assert "aten.tanh.default" in printed
    assert fxremat.reports() == before


def test_explain_names_the_users_modules_and_lines(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value is found by the module's path in the model and by its line."""
    (graph,) = written(tmp_path, "explain", f"{model}:chain", "--budget", "min", "--all")["graphs"]
    line = 1 + SOURCE.splitlines().index("        return torch.tanh(self.linear(x)) + 1")
    places = {(value["module"], value["operator"], value["source"]) for value in graph["values"]}
    assert ("1.linear", "aten.addmm.default", f"{model}:{line}") in places
    assert f"tiny.py:{line}" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["chain", "images"])
def test_plan_predicts_what_explain_does(model: str, tmp_path: Path, function: str) -> None:
    """Captured or compiled, the graph and its plan are the same."""
    planned, done = (
        written(tmp_path, command, f"{model}:{function}", "--budget", "min")
        for command in ("plan", "explain")
    )
    (planned_graph,), (done_graph,) = planned["graphs"], done["graphs"]
    assert planned_graph["solution"]["peak_bytes"] == done_graph["solution"]["peak_bytes"]
    assert planned_graph["budget_bytes"] == done_graph["budget_bytes"]
    assert planned["measured_peak_bytes"] == {}


def test_the_measured_peak_is_within_the_budget(model: str, tmp_path: Path) -> None:
    """The measured peak is the predicted one, which fits the budget that eager does not."""
    fields = written(tmp_path, "explain", f"{model}:chain", "--budget", "0.6", "--measure")
    (graph,) = fields["graphs"]
    measured = fields["measured_peak_bytes"]
    assert measured["fxremat"] <= graph["budget_bytes"] < measured["eager"]
    assert measured["fxremat"] == pytest.approx(graph["solution"]["peak_bytes"], abs=16)  # numbers as tensors
    assert measured["eager"] > 16 * ACTIVATION_BYTES


def test_measured_peaks_are_printed_beside_the_predicted(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both in MiB, and as a part of eager's."""
    assert run("explain", f"{model}:chain", "--budget", "0.6", "--measure") == 0
    table = capsys.readouterr().out.splitlines()[-4:]
    assert table[0].split() == ["step", "predicted", "peak", "measured", "peak", "of", "eager"]
    assert table[2].split()[0::4] == ["eager", "100.0%"]
    assert table[3].startswith("fxremat")


def test_a_model_of_several_graphs_has_a_report_for_each(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph break makes two graphs; the step that was measured has no predicted peak."""
    assert run("explain", f"{model}:broken", "--measure") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("graph ") for line in lines) == 2
    assert lines[-1].split()[:2] == ["fxremat", "-"]


@pytest.mark.parametrize(("option", "is_cut"), [("--rows=1", True), ("--all", False)])
def test_the_table_is_cut_where_wanted(
    model: str, capsys: pytest.CaptureFixture[str], option: str, is_cut: bool
) -> None:
    """``--rows`` says how many rows there are left, ``--all`` leaves none."""
    assert run("plan", f"{model}:chain", option) == 0
    assert ("more rows" in capsys.readouterr().out) is is_cut


def test_a_planner_of_the_users(model: str, tmp_path: Path) -> None:
    """A planner is named like a model."""
    for name in ("plan", "explain"):
        fields = written(tmp_path, name, f"{model}:chain", "--planner", f"{model}:keep_everything")
        assert fields["graphs"][0]["solution"]["planner"] == "keep_everything"


# --- The frontier -----------------------------------------------------------------------------------------


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def test_the_frontier_falls_in_peak_and_rises_in_time(model: str, tmp_path: Path) -> None:
    """Strictly, from the baseline's time to the least peak, at which the most nodes run again."""
    fields = written(tmp_path, "frontier", f"{model}:chain")
    points, baseline = fields["points"], fields["baseline"]
    peaks = [point["peak_bytes"] for point in points]
    times = [point["seconds"] for point in points]
    assert peaks == sorted(set(peaks), reverse=True) and times == sorted(set(times))
    assert len(points) > 3 and peaks[0] <= baseline["peak_bytes"]
    assert baseline["time_ratio"] == baseline["peak_ratio"] == 1
    assert points[-1]["time_ratio"] == times[-1] / baseline["seconds"] > 1
    assert points[-1]["recomputed_nodes"] > points[0]["recomputed_nodes"] == 0
    assert points[-1]["saved_bytes"] < points[0]["saved_bytes"] <= baseline["saved_bytes"]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_points_budget_is_the_least_that_it_serves(model: str, tmp_path: Path, compiler: str) -> None:
    """The plan for it has the point's peak, and one byte less is served by the next point."""
    path = tmp_path / "out.json"

    def peak(budget: int) -> int:
        options = ["--budget", str(budget), "--compiler", compiler, "--json", str(path)]
        assert command.main(["plan", f"{model}:chain", *options]) == 0
        solution = json.loads(path.read_text())["graphs"][0]["solution"]
        return int(solution["peak_bytes"])

    assert command.main(["frontier", f"{model}:chain", "--compiler", compiler, "--json", str(path)]) == 0
    points = json.loads(path.read_text())["points"]
    middle = len(points) // 2
    budget = points[middle]["budget_bytes"]
    assert peak(budget) == points[middle]["peak_bytes"]
    assert peak(budget - 1) == points[middle + 1]["peak_bytes"]


def test_the_frontiers_table_shows_its_ends_and_the_budgets_point(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """However few rows are wanted; with ``--all`` there is a row for each point."""
    assert run("frontier", f"{model}:chain", "--all", "--budget", "0.6") == 0
    everything = capsys.readouterr().out.splitlines()
    assert run("frontier", f"{model}:chain", "--rows", "2", "--budget", "0.6") == 0
    lines = capsys.readouterr().out.splitlines()
    assert everything[0].startswith(f"Sequential (eager): {len(everything) - 5} points for ")
    assert lines[2:6] == everything[2:6]
    assert [line[:15].strip() for line in lines[6:-1]] == [
        next(line[:15].strip() for line in everything if " * " in line),
        str(len(everything) - 5),
    ]
    assert lines[-1] == f"... and {len(everything) - 5 - 3} more points between them"


@needs_matplotlib
def test_the_frontier_is_drawn(model: str, tmp_path: Path) -> None:
    """As PNG and SVG, with the baseline and with the measured points that were given."""
    points, plot = tmp_path / "points.json", tmp_path / "frontier.png"
    given = [
        {"name": "checkpoint 2", "family": "checkpoint", "peak_bytes": 9000, "time_ratio": 1.3},
        {"name": "eager", "peak_bytes": 90000, "time_ratio": 1.1, "verdict": "ignored"},
    ]
    points.write_text(json.dumps(given))
    arguments = ["--budget", "0.6", "--plot", str(plot), "--points", str(points)]
    assert run("frontier", f"{model}:chain", *arguments) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = plot.with_suffix(".svg").read_text("utf-8")
    labels = ("fxremat, predicted", "without fxremat, predicted", "the budget's plan", "eager", "checkpoint")
    assert all(f"<!-- {label} -->" in text for label in (*labels, "2", "peak (MiB)"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read: No such file"),
        ("[", "is no JSON"),
        ('{"name": 1}', "should hold a list of"),
        ('[{"name": "eager"}]', "should hold a list of"),
        ('[{"name": "eager", "peak_bytes": 1e999, "time_ratio": 1}]', "should hold a list of"),
    ],
)
def test_measured_points_are_read_before_anything_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    """A file that is missing or holds something else is one message, though there is no such model."""
    path = tmp_path / "points.json"
    if text is not None:
        path.write_text(text)
    assert run("frontier", "nowhere.py:build", "--points", str(path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("fxremat: option 'points'") and message in error


def test_a_budget_below_the_frontier_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As ``plan`` does it."""
    assert run("frontier", f"{model}:chain", "--budget", "1KiB") == 2
    assert "no plan fits a budget of 1,024 bytes" in capsys.readouterr().err


# --- Failing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_a_budget_too_small_is_refused_with_one_that_is_not(
    model: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Status 2, one message without a traceback, and the budget that it proposes is accepted."""
    assert run(command, f"{model}:chain", "--budget", "1KiB") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fxremat: ") and printed.err.count("\n") == 1
    assert "no plan fits a budget of 1,024 bytes" in printed.err
    proposed = printed.err.partition("budget=")[2].partition(" ")[0]
    torch.compiler.reset()
    assert run(command, f"{model}:chain", "--budget", proposed) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--planner", "sublinaer"], "Did you mean 'sublinear'?"),
        (["--planner", "nowhere:plan"], "option 'planner': importing 'nowhere' raised ModuleNotFoundError"),
        (["--budget", "8GiBi"], "option 'budget': got '8GiBi'"),
        (["--budget", "inf"], "option 'budget': got 'inf'"),
        (["--budget", "1.5"], "option 'budget': 1.5 is no fraction of the peak: give up to 1.0; or bytes"),
        (["--json", "no-such-folder/out.json"], "option 'json': 'no-such-folder/out.json' can't be written"),
    ],
)
def test_wrong_options_are_told(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Status 2 and a message that names the option."""
    assert run("plan", f"{model}:chain", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--buget", "0.5"], "unknown: --buget 0.5. Did you mean --budget or"),
        (["--ignore_checkpoint"], "Did you mean --ignore-checkpoints?"),
        (["--budget", "8", "GiB"], "unknown: GiB. A size is one word: 8GiB."),
        (["more", "words"], "unknown: more words."),
    ],
)
def test_unknown_words_are_told(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    """With what was meant, before a model is looked for."""
    with pytest.raises(SystemExit) as left:
        run("plan", "net.py:build", *words)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_plan_is_of_something(capsys: pytest.CaptureFixture[str]) -> None:
    """Without MODEL and STEP the message says what to give."""
    assert run("plan") == 2
    assert "option 'MODEL': a plan is of MODEL, such as net.py:build, or of --step" in capsys.readouterr().err


def test_a_wrong_model_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that the file lacks is no traceback."""
    assert run("plan", f"{model}:chian") == 2
    assert "Did you mean 'chain'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "frontier", "explain"])
def test_what_the_model_raises_is_told_with_its_line(
    model: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Status 2 and one message: type, text and the line of the model."""
    assert run(command, f"{model}:raising") == 2
    printed = capsys.readouterr().err
    line = 1 + SOURCE.splitlines().index('        return {"width": 1}["depth"]')
    assert f"KeyError: 'depth' ({model}:{line})" in printed
    assert printed.startswith("fxremat: ") and printed.count("\n") == 1


def test_what_is_raised_by_us_keeps_its_traceback(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model itself takes its step, its author is not to blame."""

    def fail(*args: object, **kwargs: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("fxremat.driver.partitioner.Partitioner.__call__", fail)
    with pytest.raises(Exception, match="ours") as caught:
        run("explain", f"{model}:chain")
    assert not isinstance(caught.value, FxrematError)


@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_a_model_without_a_gradient_is_not_planned(
    model: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Nothing to train: nothing to plan."""
    assert run(command, f"{model}:frozen") == 2
    assert "has no gradient to compute" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["9" * 5000, "9" * 400 + ".0", "9" * 5000 + "GiB", "1e999"])
def test_a_budget_beyond_counting_is_told(
    model: str, capsys: pytest.CaptureFixture[str], budget: str
) -> None:
    """On one short line."""
    assert run("plan", f"{model}:chain", "--budget", budget) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("fxremat: option 'budget': got ") and len(printed) < 300


@pytest.mark.parametrize("rows", ["-1", "0", "1.5", "many", "9" * 5000])
def test_a_table_has_a_row_at_least(capsys: pytest.CaptureFixture[str], rows: str) -> None:
    """Told before the model is looked for."""
    with pytest.raises(SystemExit) as exited:
        run("plan", "nowhere.py:build", f"--rows={rows}")
    assert exited.value.code == 2
    assert "expected a number from 1" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_planned(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is none, and in a missing one there is none."""
    monkeypatch.setattr(sys.modules["fxremat.driver.capture"], "capture", None)
    for path in (tmp_path, tmp_path / "no-such-folder" / "out.json"):
        assert run("plan", f"{model}:chain", "--json", str(path)) == 2
        assert f"option 'json': {str(path)!r} can't be written" in capsys.readouterr().err


def test_a_step_without_a_gradient_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to train: nothing to explain."""
    assert run("explain", f"{model}:frozen") == 2
    assert "needs a scalar with a gradient" in capsys.readouterr().err


def test_without_a_compiler_the_way_out_is_told(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is compiled, the compiler that was looked for is named."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert command.main(["explain", f"{model}:chain"]) == 2
    assert "'no-such-compiler' was not found. Try --compiler eager." in capsys.readouterr().err


def test_debug_keeps_the_traceback(model: str) -> None:
    """With ``--debug`` the error is raised."""
    with pytest.raises(InfeasibleBudgetError):
        run("plan", f"{model}:chain", "--budget", "1KiB", "--debug")


def test_errors_of_others_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not fxremat's to explain is not caught."""

    def fail(steps: int, device: str) -> int:
        raise OSError("disk on fire")

    monkeypatch.setattr(demo, "main", fail)
    with pytest.raises(OSError, match="disk on fire"):
        command.main(["demo"])


@pytest.mark.parametrize(
    ("text", "budget"),
    [("8589934592", 8 << 30), ("0.4", 0.4), ("1.0", 1.0), ("8GiB", "8GiB"), ("min", "min"), ("none", None)],
)
def test_a_budget_is_read_as_in_python(text: str, budget: object) -> None:
    """Digits are bytes, a point makes a fraction, the rest is for the options to judge."""
    read = of_text("budget", text)
    assert (type(read), read) == (type(budget), budget)


@pytest.mark.parametrize("text", ["-1", "", "1.5", "9" * 5000, "maximum"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    """As in Python."""
    with pytest.raises(InvalidOptionError, match="'budget'"):
        of_text("budget", text)


# --- What holds -------------------------------------------------------------------------------------------


def test_env_prints_what_holds_and_from_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pinned_rates: Path
) -> None:
    """Options with their places, the version of torch, devices, rates and caches."""
    monkeypatch.setenv("FXREMAT_BUDGET", "8GiB")
    assert command.main(["env"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["budget", "'8GiB'", "FXREMAT_BUDGET", "FXREMAT_BUDGET"] in lines
    assert ["scope", "'step'", "default", "FXREMAT_SCOPE"] in lines
    assert ["torch", f"{torch.__version__},", "supported"] in lines
    assert ["rates", "of", "cpu", "pinned", "in", str(pinned_rates / PINNED)] in lines


def test_env_refuses_a_variable_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the one that may be meant."""
    monkeypatch.setenv("FXREMAT_BUGDET", "8GiB")
    assert command.main(["env"]) == 2
    assert "Did you mean 'FXREMAT_BUDGET'" in capsys.readouterr().err


# --- Calibrating ------------------------------------------------------------------------------------------


def test_calibrate_prints_the_rates_and_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured the first time, kept for the second, and measured anew if asked to."""
    measured = [replace(CPU, launch_seconds=1e-6 * number) for number in (7, 8)]
    monkeypatch.setattr("fxremat.device.rates._measured", lambda device: measured.pop(0))
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path))
    printed = []
    for arguments in ([], [], ["--again"]):
        assert command.main(["calibrate", *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert "launch                      7 us\n" in printed[0]
    assert "copies                      16.6 GB/s\n" in printed[0]
    assert f"kept in {tmp_path}" in printed[0]
    assert printed[1] == printed[0] != printed[2]
    assert "launch                      8 us\n" in printed[2]


@pytest.mark.parametrize("name", ["calibrate", "plan", "explain"])
def test_pinned_rates_that_are_none_are_told(
    name: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One message says which file, what is wrong, and what to write."""
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path))
    (tmp_path / "pinned.json").write_text('{"gpu": {}}')
    arguments = [] if name == "calibrate" else [f"{model}:chain", "--compiler", "eager"]
    assert command.main([name, *arguments]) == 2
    told = capsys.readouterr().err
    problem = "torch knows no kind of device 'gpu'. Expected is JSON: finite positive numbers"
    assert told.startswith(f"fxremat: pinned rates, {tmp_path / 'pinned.json'}: {problem}")
    assert told.count("\n") == 1


def test_plan_of_a_step(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step is planned before it runs, written as JSON and drawn."""
    written, drawn = tmp_path / "step.json", tmp_path / "step.html"
    files = ["--json", str(written), "--html", str(drawn)]
    assert command.main(["plan", "--step", f"{model}:step", *files]) == 0
    assert "step of 2 calls of" in capsys.readouterr().out
    (report,) = json.loads(written.read_text("utf-8"))["steps"]
    (data,) = re.findall(r'class="data">(.*?)</script>', drawn.read_text("utf-8"))
    assert max(json.loads(data)["live"]) == report["peak_bytes"]
    assert report["peak_bytes"] <= report["budget_bytes"] == 200_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "or of --step STEP"),
        (["--step", "{}:number"], "must return a function"),
        (["--step", "{}:step", "--budget", "min"], "compiled with"),
        (["--step", "{}:nothing"], "has no function"),
    ],
)
def test_plan_of_no_step(
    arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is said in a sentence."""
    assert command.main(["plan", *(each.format(model) for each in arguments)]) == 2
    assert message in capsys.readouterr().err


# --- Pictures -------------------------------------------------------------------------------------------


def test_pictures_are_written(model: str, tmp_path: Path) -> None:
    """plan writes a page, a snapshot and a trace of the same peak."""
    files = {option: tmp_path / option for option in ("html", "snapshot", "trace")}
    asked = [each for option, path in files.items() for each in (f"--{option}", str(path))]
    fields = written(tmp_path, "plan", f"{model}:chain", *asked)
    peak = fields["graphs"][0]["solution"]["peak_bytes"]
    (data,) = re.findall(r'class="data">(.*?)</script>', files["html"].read_text("utf-8"))
    assert max(json.loads(data)["live"]) == peak
    live = most = 0
    for event in pickle.loads(files["snapshot"].read_bytes())["device_traces"][0]:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        most = max(most, live)
    assert most == peak
    events = json.loads(files["trace"].read_text())["traceEvents"]
    own = [event for event in events if event["name"] == "live bytes" and event["pid"] == 1]
    assert max(event["args"]["all"] for event in own) == peak


def test_explain_records_a_step_for_a_snapshot(model: str, tmp_path: Path) -> None:
    """Its last device is as high as the peak that --measure measures."""
    path = tmp_path / "step.pickle"
    compiled = ("--compiler", "eager", "--measure", "--snapshot", str(path))
    fields = written(tmp_path, "explain", f"{model}:chain", *compiled)
    traces = pickle.loads(path.read_bytes())["device_traces"]
    assert len(traces) == 3
    live = most = 0
    for event in traces[-1]:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        most = max(most, live)
    assert most == fields["measured_peak_bytes"]["fxremat"] > 0


@pytest.mark.parametrize("option", ["--html", "--snapshot", "--trace"])
def test_pictures_are_of_graphs(model: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step there is but a page, and a file that can't be written is told before anything is planned."""
    if option != "--html":
        assert run("plan", "--step", "nowhere.py:step", option, "file") == 2
        assert f"{option[2:]!r}: it is of a graph" in capsys.readouterr().err
    assert run("plan", "--step", "nowhere.py:step", option, "no/such/folder/file") == 2
    assert run("plan", f"{model}:chain", option, "no/such/folder/file") == 2
    assert "can't be written" in capsys.readouterr().err
