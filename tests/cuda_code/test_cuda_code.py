"""Inductor's CUDA code, without a GPU: its peak on fake tensors is the one that was predicted.

Each bound is the error as it was found for the network (torch 2.13, for an H100), rounded up to the next
tenth of a percent. A prediction that gets worse fails; one that gets better may have its bound lowered.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from concatenating import NETWORKS

import fxremat
from fxremat.cli import command
from fxremat.device.absent import absent, card_named
from fxremat.report.report import Report

# Network, budget, and by how much the code's peak is off what was planned with, at most.
BOUNDS: list[tuple[str, Any, float]] = [
    ("tanh_mlp", None, 0.0),
    ("tanh_mlp", "min", 0.002),
    ("transformer", None, 0.0),
    ("transformer", "min", 0.059),
    *((name, "min", {"gated": 0.002, "dense": 0.02}.get(name, 0.0)) for name in NETWORKS),
]


@pytest.mark.parametrize(("name", "budget", "bound"), BOUNDS)
def test_the_codes_peak_is_predicted(name: str, budget: Any, bound: float) -> None:
    """For the step after the one that compiles."""
    report, code_bytes = step_on("h100", name, budget)
    assert report.peak_bytes == code_bytes
    error = code_bytes / report.solution.peak_bytes - 1
    assert abs(error) <= bound, f"{code_bytes} bytes in place of {report.solution.peak_bytes}: {error:+.2%}"


def step_on(card: str, name: str, budget: Any) -> tuple[Report, int]:
    """The report of a network that is compiled for a card, and the peak of its code."""
    with absent(card_named(card)) as absent_card:
        module, inputs = absent_card.make(NETWORKS.get(name) or models.case(name).build)
        inputs = absent_card.hold(module, inputs)
        options = {"budget": budget, "scope": "graph"}
        compiled = torch.compile(module, backend="fxremat", options=options)

        def step() -> None:
            compiled(*inputs).backward()

        before = len(fxremat.reports())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Inductor's own
            absent_card.peak_bytes(step)
            for each in (*module.parameters(), *inputs):
                each.grad = None
            peak = absent_card.peak_bytes(step)
        (report,) = fxremat.reports()[before:]
        return report, peak


SOURCE = """
import torch
from torch import nn


def chain():
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(256, 64),), lambda y: y.square().mean()


def reading():
    return nn.Linear(2, 1), (torch.ones(1, int(torch.ones(1).item())),), torch.sum
"""


@pytest.mark.parametrize("name", ["plan", "explain", "frontier", "fit"])
def test_the_command_line_says_whether_it_fits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a card with room for it."""
    (tmp_path / "net.py").write_text(SOURCE, encoding="utf-8")
    assert command.main([name, f"{tmp_path}/net.py:chain", "--device", "a100-40gb"]) == 0
    wanted = "the first point that fits is 1 of" if name == "frontier" else "it fits"
    assert wanted in capsys.readouterr().out


def test_a_model_that_reads_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it may not do."""
    (tmp_path / "net.py").write_text(SOURCE, encoding="utf-8")
    assert command.main(["plan", f"{tmp_path}/net.py:reading", "--device", "h100"]) == 2
    assert "sizes but no numbers" in capsys.readouterr().err


def test_nothing_of_the_card_is_left() -> None:
    """Neither a device nor what stood in for it."""
    before = torch.accelerator.current_accelerator()  # a build for CUDA names it without a card as well
    with absent(card_named("T4")):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (7, 5)
    assert not torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() == before
