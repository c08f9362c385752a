"""Logs: a line for each graph that is compiled and each step that is settled, to who asks for it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxremat

TRAINS = """
import torch
torch.manual_seed(0)
options = {"budget": "min", "compiler": "eager"}
model = torch.compile(torch.nn.Linear(4, 2), backend="fxremat", options=options)
model(torch.ones(3, 4)).sum().backward()
"""


def train(scope: str = "step", steps: int = 1, **options: object) -> None:
    """Compile and train a small model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    options = {"budget": "min", "compiler": "eager", "scope": scope, **options}
    compiled = torch.compile(model, backend="fxremat", options=options)
    for _ in range(steps):
        compiled(torch.ones(64, 8)).sum().backward()
        model.zero_grad()


def lines(caplog: pytest.LogCaptureFixture, level: int, logger: str = "fxremat") -> list[str]:
    """What was logged at a level, by ours."""
    found = [each for each in caplog.records if each.name.startswith(logger) and each.levelno == level]
    return [each.getMessage() for each in found]


@pytest.fixture(autouse=True)
def propagating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps registered loggers to itself, once it has set its own up."""
    monkeypatch.setattr(logging.getLogger("fxremat"), "propagate", True)


def test_a_compiled_graph_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Name, budget, both peaks, extra time, planner and planning time; no table."""
    caplog.set_level(logging.INFO, "fxremat")
    train(scope="graph")
    report = fxremat.reports()[-1]
    (line,) = lines(caplog, logging.INFO)
    assert line.startswith(f"{report.graph_name} (eager): budget 'min', predicted peak ")
    assert f"planned by {report.solution.planner} in {report.planning_seconds:.2f} s" in line
    assert f"{report.peak_bytes / 2**20:.2f} MiB of {report.baseline_peak_bytes / 2**20:.2f} MiB" in line
    assert lines(caplog, logging.DEBUG) == []


def test_tables_are_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    """The report as it is printed, but for what regions of other programs add to its notes later."""
    caplog.set_level(logging.DEBUG, "fxremat")
    train(scope="graph")
    report = fxremat.reports()[-1]
    (line,) = (each for each in lines(caplog, logging.DEBUG) if report.table() in each)
    assert line.startswith(f"{report.graph_name} (eager)\n")


def test_a_settled_step_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """When the second step begins; the one that was recorded says why."""
    caplog.set_level(logging.DEBUG, "fxremat")
    train(steps=2)
    assert any(
        each.startswith("settled: step of 1 call of 1 graph: budget min")
        for each in lines(caplog, logging.INFO, "fxremat.step.family")
    )
    assert "a step of 1 calls is learnt, recording 1" in lines(caplog, logging.DEBUG)
    assert str(fxremat.steps()[-1]) in lines(caplog, logging.DEBUG)


@pytest.mark.inductor
def test_corrections_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes of generated code, at DEBUG; nothing is planned again that need not be."""
    caplog.set_level(logging.DEBUG, "fxremat")
    with torch.compiler.config.patch(force_disable_caches=True):  # whose graphs have no code to read
        train(scope="graph", compiler="inductor")
    read = [each for each in lines(caplog, logging.DEBUG) if "the code up to the" in each]
    report = fxremat.reports()[-1]
    assert f"{report.graph_name}: the code up to the backward holds {report.peak_bytes} bytes" in read
    again = [each for each in lines(caplog, logging.DEBUG) if "planned again" in each]
    (line,) = lines(caplog, logging.INFO)
    assert (f", {len(again)} corrections" in line) == bool(again)


def test_a_fallback_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """With its reason."""
    caplog.set_level(logging.INFO, "fxremat")
    with pytest.warns(UserWarning, match="leaves"):
        train(scope="graph", budget=1, on_error="fallback")
    (line,) = lines(caplog, logging.INFO)
    assert "left to PyTorch's partitioner" in line and "no plan fits" in line


def test_nothing_is_made_for_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens, no line is written."""
    written = []
    monkeypatch.setattr(fxremat.Report, "line", lambda report: written.append(report) or "")
    monkeypatch.setattr(fxremat.StepReport, "line", lambda report: written.append(report) or "")
    train(steps=2)
    assert written == []
    torch._dynamo.reset()  # or what is compiled runs again
    caplog.set_level(logging.INFO, "fxremat")
    train(steps=2)
    assert len(written) == 2


def test_torch_knows_the_logger() -> None:
    """So ``torch._logging.set_logs`` and the list of what TORCH_LOGS takes have it."""
    assert torch._logging._internal.log_registry.is_log("fxremat")


@pytest.mark.parametrize(("value", "debugs"), [("+fxremat", True), ("fxremat", False), (None, None)])
@pytest.mark.slow
def test_torch_logs(value: str | None, debugs: bool | None) -> None:
    """The variable shows a line on stderr, and with a plus the tables; by default nothing is shown."""
    environment = {name: text for name, text in os.environ.items() if name != "TORCH_LOGS"}
    environment |= {} if value is None else {"TORCH_LOGS": value}
    ran = subprocess.run([sys.executable, "-c", TRAINS], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ("graph 0/0 (eager): budget 'min'" in ran.stderr) == (debugs is not None)
    assert ("kept because" in ran.stderr) == bool(debugs)
