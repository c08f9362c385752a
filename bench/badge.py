"""The badge: how little memory a network was trained in, and in how much time, of a file of `frontier.py`.

    python bench/badge.py bench/results/frontier-transformer.json docs/badge.json

What is written is what https://shields.io/badges/endpoint-badge reads: of fxremat under Inductor the lowest
peak that was measured, and what a step took then, as ratios to Inductor's default.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from racing import compare


def badge(result: dict[str, Any]) -> dict[str, Any]:
    """The fields of a badge.

    Args:
        result: What ``frontier.py --json`` has written, of one network under Inductor.
    """
    ((name, model),) = result["models"].items()
    candidates = [
        compare.Candidate(**{**each, "seconds": tuple(each["seconds"]), "rank": tuple(each["rank"])})
        for each in model["candidates"]
        if not each["problem"]
    ]
    (unit,) = (each for each in candidates if each.family == "inductor")
    ours = [each for each in candidates if each.name.startswith(f"{compare.OURS}, inductor")]
    least = min(ours, key=lambda each: each.peak_bytes)
    memory = least.peak_bytes / unit.peak_bytes
    seconds = compare.time_ratio(least, candidates)
    return {
        "schemaVersion": 1,
        "label": f"{name}, {result['device']}",
        "message": f"{memory:.0%} of the memory at {seconds:.2f} of the time",
        "color": "blue",
    }


if __name__ == "__main__":
    source, target = map(pathlib.Path, sys.argv[1:])
    target.write_text(json.dumps(badge(json.loads(source.read_text("utf-8"))), indent=1) + "\n", "utf-8")
