"""bench on a GPU: memory that got worse fails, time that changed does not, and the script runs on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import baseline
import deep
import pytest
import torch

MIB = 1 << 20


def kept(path: Path, figures: dict[str, Any], **header: str) -> Path:
    """A file of results."""
    fields = {"device": "A GPU, 80GB", "scale": "gpu", "torch": "2.13", "date": "2026-01-01", "command": "x"}
    path.write_text(json.dumps({**fields, **header, "figures": figures}))
    return path


def status(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> int:
    """The exit status of a comparison."""
    kept(folder / "gpu-a-gpu-80gb.json", before)
    return baseline.main([str(kept(folder / "new.json", now)), "--folder", str(folder)])


@pytest.mark.parametrize(
    ("figure", "now", "expected"),
    [
        ("peak_bytes", 103 * MIB, 1),
        ("peak_bytes", 101 * MIB, 0),
        ("peak_bytes", 50 * MIB, 0),
        ("total_bytes", 103 * MIB, 1),
        ("largest_batch", 97 * MIB, 1),
        ("largest_batch", 103 * MIB, 0),
        ("seconds", 500 * MIB, 0),
    ],
)
def test_more_memory_fails_and_more_time_does_not(
    tmp_path: Path, figure: str, now: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """By more than 2 %; a largest batch gets worse by getting smaller. What changed much is told."""
    assert status(tmp_path, {"net": {figure: 100 * MIB}}, {"net": {figure: now}}) == expected
    text = capsys.readouterr().out
    assert ("REGRESSION" in text) == bool(expected)
    assert (figure in text) == (now != 101 * MIB)


@pytest.mark.parametrize(
    "now", [{}, {"net": {"problem": "OutOfMemoryError: ..."}}, {"net": {"seconds": 1.0}}]
)
def test_memory_that_was_not_measured_is_a_regression(
    tmp_path: Path, now: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows what it takes; a program that is new is none."""
    assert (
        status(tmp_path, {"net": {"peak_bytes": MIB, "seconds": 1.0}}, {"new": {"peak_bytes": 1}, **now}) == 1
    )
    assert baseline.NOT_MEASURED in capsys.readouterr().out


def test_a_device_without_stored_results_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, and what was measured can be stored: then it is compared with itself."""
    new = kept(tmp_path / "new.json", {"net": {"peak_bytes": MIB}})
    stored = tmp_path / "gpu-a-gpu-80gb.json"
    assert baseline.main([str(new), "--folder", str(tmp_path), "--write", str(stored)]) == 0
    assert "Nothing is stored" in capsys.readouterr().out
    assert baseline.main([str(new), "--folder", str(tmp_path)]) == 0
    assert "All as stored" in capsys.readouterr().out


def test_benchmarks_and_figures_are_read_together(tmp_path: Path) -> None:
    """pytest-benchmark's medians and the memory beside them; results of reduced size have another file."""
    extra = {"device": "A GPU, 80GB", "scale": "gpu", "torch": "2.13", "peak_bytes": 5}
    benchmark = {"name": "step", "extra_info": extra, "stats": {"median": 0.5}}
    other = {"name": "planning", "extra_info": {}, "stats": {"median": 0.1}}
    first = tmp_path / "steps.json"
    first.write_text(json.dumps({"datetime": "2026-01-01T00:00", "benchmarks": [other, benchmark]}))
    second = kept(tmp_path / "deep.json", {"net": {"peak_bytes": 7}})
    found = baseline.merged(map(baseline.read, (first, second)))
    assert {name: own["peak_bytes"] for name, own in found.figures.items()} == {"step": 5, "net": 7}
    assert found.figures["step"]["seconds"] == 0.5
    small = {**found.header, "scale": "small"}
    assert baseline.stored_at(tmp_path, small) != baseline.stored_at(tmp_path, found.header)
    kept(second, {"net": {"peak_bytes": 7}}, device="Another")
    with pytest.raises(ValueError, match=r"device is A GPU, 80GB and Another"):
        baseline.merged(map(baseline.read, (first, second)))


def test_eager_out_of_memory_leaves_the_predicted_peak() -> None:
    """The factor is that of the prediction, and no time is compared."""
    question = deep.QUESTIONS["resnet"]
    module = torch.nn.Linear(1, 1)
    eager, least = (deep.Subject(name, module, (), module) for name in ("net, eager", "net, fxremat, min"))
    eager.figures["problem"] = "OutOfMemoryError: too much"
    least.figures.update(predicted_without_bytes=700, held_bytes=100, peak_bytes=0, total_bytes=100)
    before = deep._without(eager, least, question)
    deep._judge([eager, least], question, before)
    assert (before, least.figures["factor"]) == (800, 8)
    assert least.figures["is_met"] is False and "factor" not in eager.figures


def test_the_paper_s_networks_are_measured_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At reduced size, which the output says; peaks are as predicted, and the file can be compared."""
    # As where torch's own test tables were imported: flags may be set for a while alone.
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    path = tmp_path / "deep.json"
    build = lambda: deep.lstm(4, deep.LSTMSizes(1, 8, 16, 8, 8))  # noqa: E731
    monkeypatch.setitem(deep.QUESTIONS, "lstm", deep.Question({"small": build}, 2, False))
    words = "--only lstm --device cpu --scale small --rounds 1 --json"
    monkeypatch.setattr(sys, "argv", ["deep.py", *words.split(), str(path)])
    assert deep.main() == 0
    assert "REDUCED size" in capsys.readouterr().out
    results = baseline.read(path)
    eager, asked, least = results.figures.values()
    assert results.header["torch"] == torch.__version__ and results.header["scale"] == "small"
    assert eager["time_ratio"] == 1 and least["peak_bytes"] < eager["peak_bytes"]
    assert least["peak_bytes"] == least["predicted_peak_bytes"]
    assert asked["is_met"] if "problem" not in asked else "InfeasibleBudgetError" in asked["problem"]
