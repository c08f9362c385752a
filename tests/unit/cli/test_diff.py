"""cli.diff and --save: plans are saved, compared and refused on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxremat
from fxremat.cli import command

SOURCE = """
import torch
from torch import nn


def chain():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(64, 16),), torch.sum


def step():
    return lambda: None
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reference to a model; the working directory is its own."""
    torch.compiler.reset()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(SOURCE)
    return "tiny.py:chain"


def saved(model: str, path: str, *options: str, by: str = "plan") -> int:
    """The status of saving a plan."""
    return command.main([by, model, "--compiler", "eager", "--save", path, *options])


def test_plan_saves_what_it_prints(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that can be loaded, with the same peak."""
    assert saved(model, "plan.json", "--budget", "min", "--json", "report.json") == 0
    assert "predicted peak" in capsys.readouterr().out
    (plan,) = fxremat.load_plan("plan.json").graphs
    (graph,) = json.loads(Path("report.json").read_text())["graphs"]
    assert plan.solution.peak_bytes == graph["solution"]["peak_bytes"]
    assert plan.signature.fingerprint == graph["made"]["fingerprint"]


def test_plan_and_explain_save_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Captured or compiled: diff finds nothing, and its status is 0."""
    assert saved(model, "captured.json", "--budget", "min") == 0
    assert saved(model, "compiled.json", "--budget", "min", by="explain") == 0
    capsys.readouterr()
    assert command.main(["diff", "captured.json", "compiled.json"]) == 0
    assert capsys.readouterr().out.startswith("1 of 1 graphs have the same plan\n")


def test_diff_tells_what_two_plans_do(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its status is 1 where they differ."""
    assert saved(model, "first.json") == 0
    assert saved(model, "second.json", "--budget", "min") == 0
    capsys.readouterr()
    assert command.main(["diff", "first.json", "second.json"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("0 of 1 graphs have the same plan\n")
    for text in ("budget", "None", "min", "predicted peak", "predicted time", "aten.", "recomputed"):
        assert text in printed


def test_diff_of_what_is_no_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and status 2."""
    assert command.main(["diff", "tiny.py", "none.json"]) == 2
    assert capsys.readouterr().err.startswith("fxremat: plan file tiny.py: it is no JSON")
    assert command.main(["diff", "none.json", "tiny.py"]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_where_nothing_can_be_written_nothing_is_planned(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is looked at before."""
    assert saved(model, "none/plan.json") == 2
    assert "option 'save'" in capsys.readouterr().err


def test_a_step_is_not_saved(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plans are made for its calls."""
    assert command.main(["plan", "--step", "tiny.py:step", "--save", "plan.json"]) == 2
    assert "option 'save'" in capsys.readouterr().err
