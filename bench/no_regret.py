"""Does fxremat without a budget ever cost more than Inductor alone? Peaks and times as ratios to Inductor's.

    python bench/no_regret.py --scale full --json results.json

Each model runs in a process of its own, in the way of ``racing/race.py``: gradients are held against
eager's, peaks are the allocator's, and time ratios are medians over rounds in which each program takes one
step. The noise is what the same comparison makes of Inductor timed against itself. The exit status is 1 if a
ratio of peaks is above 1.00 or one of times above 1.02.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from provenance import provenance
from racing import compare, wrapping
from racing.race import Race, Seeker
from tabulate import tabulate

MOST_PEAK, MOST_TIME = 1.00, 1.02  # the ratios that are promised


class Pair(Race):
    """Inductor's default, twice, and fxremat without a budget."""

    def _add_ours(self) -> None:
        Seeker(self, "inductor").default()


def row_of(name: str, scale: str, device: str, rounds: int) -> dict[str, Any]:
    """The ratios of one model, measured in this process."""
    candidates = Pair(name, scale, device=device).run((), rounds)
    unit = candidates[0]
    ours = next(each for each in candidates if each.family == compare.OURS)
    if ours.problem:
        return {"model": name, "problem": ours.problem}
    low, median, high = compare.compared(ours, unit)
    return {
        "model": name,
        "problem": "",
        "peak_bytes": unit.peak_bytes,
        "peak_ratio": ours.peak_bytes / unit.peak_bytes,
        "time_ratio": median,
        "interval": [low, high],
        "noise": compare.noise(candidates),
    }


def verdict(row: dict[str, Any]) -> str:
    """What was found, in a word or two."""
    if row["problem"]:
        return str(row["problem"])
    too_much = [
        what for what, most in (("peak", MOST_PEAK), ("time", MOST_TIME)) if row[f"{what}_ratio"] > most
    ]
    return "more " + " and ".join(too_much) if too_much else "no regret"


def main() -> int:
    """Measure, print a table, and write JSON where asked to; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(wrapping.MODELS), default=tuple(wrapping.MODELS))
    parser.add_argument("--scale", choices=("small", "full"), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one model, in this process
    arguments = parser.parse_args()
    if arguments.one:
        row = row_of(arguments.models[0], arguments.scale, arguments.device, arguments.rounds)
        arguments.json.write_text(json.dumps(row), encoding="utf-8")
        return 0
    header, rows = provenance(__file__, arguments.device), list[dict[str, Any]]()
    for name in arguments.models:
        rows.append(_measured(name, arguments))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", "utf-8")
    print(tabulate([_shown(row) for row in rows], HEADERS, disable_numparse=True))
    return int(any(verdict(row) != "no regret" for row in rows))


HEADERS = ("model", "peak", "peak ratio", "time ratio", "95 %", "noise", "verdict")


def _measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The ratios of one model, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "row.json"
        given = {"models": name, "scale": arguments.scale, "device": arguments.device, "json": path}
        options = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, __file__, *options, "--rounds", str(arguments.rounds), "--one"]
        subprocess.run(command, check=False)
        if not path.exists():
            return {"model": name, "problem": "failed"}
        row: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return row


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    if row["problem"]:
        return (row["model"], "-", "-", "-", "-", "-", verdict(row))
    low, high = row["interval"]
    return (
        row["model"],
        f"{row['peak_bytes'] / 2**20:.2f} MiB",
        f"{row['peak_ratio']:.3f}",
        f"{row['time_ratio']:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{row['noise']:.3f}",
        verdict(row),
    )


if __name__ == "__main__":
    sys.exit(main())
