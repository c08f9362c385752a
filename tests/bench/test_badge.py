"""bench/badge.py: what the badge says is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from badge import badge

ROOT = Path(__file__).parents[2]


def test_the_badge_is_that_of_the_stored_result() -> None:
    """Made again of the file, it is the same."""
    result = json.loads((ROOT / "bench/results/frontier-transformer.json").read_text("utf-8"))
    assert badge(result) == json.loads((ROOT / "docs/badge.json").read_text("utf-8"))


def test_the_badge_tells_the_least_peak_of_generated_code() -> None:
    """Beside Inductor's default, by the median over rounds; what had a problem counts for nothing."""
    measured = [("inductor", "inductor", 1000, 2.0), ("fxremat", "fxremat, inductor, plan 1", 500, 3.0)]
    measured += [("fxremat", "fxremat, eager, plan 2", 100, 3.0), ("eager", "eager", 400, 1.0)]
    candidates = [
        {
            "name": name,
            "family": family,
            "problem": "",
            "peak_bytes": peak,
            "seconds": [seconds] * 3,
            "rank": [],
        }
        for family, name, peak, seconds in measured
    ]
    broken = {**candidates[1], "problem": "it raised", "peak_bytes": 1}
    found = badge({"device": "x", "models": {"net": {"candidates": [*candidates, broken]}}})
    assert found["label"] == "net, x" and found["message"] == "50% of the memory at 1.50 of the time"
