"""fxremat fit: what the command line makes of a fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxremat.cli import command

SOURCE = """
import torch
from torch import nn

def build(batch=8):
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh()), (torch.ones(batch, 16),), torch.sum

def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file with a model."""
    (tmp_path / "net.py").write_text(SOURCE, encoding="utf-8")
    return f"{tmp_path}/net.py"


def test_a_fit_is_printed_and_written(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options reach it by their names; an optimizer may be a function of the user's."""
    json_file = tmp_path / "fit.json"
    options = (
        f"--device cpu --memory 64KiB --compiler eager --optimizer {model}:with_momentum --json {json_file}"
    )
    assert command.main(["fit", f"{model}:build", *options.split(), "--largest", "batch"]) == 0
    assert "largest batch that fits: " in capsys.readouterr().out
    fields = json.loads(json_file.read_text("utf-8"))
    assert fields["does_fit"] and fields["room"]["optimizer"] == "SGD"


def test_a_wrong_option_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence."""
    assert command.main(["fit", f"{model}:build", "--device", "cpu", "--optimizer", "adan"]) == 2
    assert "fxremat: option 'optimizer': got 'adan'" in capsys.readouterr().err
