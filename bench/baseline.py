"""Has anything come to take more memory? New results against those that are stored for the device.

    python bench/baseline.py steps.json deep.json                    compare
    python bench/baseline.py steps.json deep.json --write FILE.json  and write what could be stored

What is stored is in bench/results/gpu-DEVICE.json. The inputs are what ``pytest bench --benchmark-json``
and ``deep.py --json`` write; all must be of one device, one scale and one version of torch. A *figure* is
memory or time of one program. Memory that is more than 2 % worse than the stored (a peak that is higher, a
largest batch that is smaller) is a *regression*, and so is a program that is stored and was not measured,
since nobody knows what it takes. Times are shown where they changed by more than 5 %, and fail nothing: they
depend on what else the machine does. The exit status is 1 if there is a regression; where nothing is stored
for the device it is 0, and that is said.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

__all__ = ["Change", "Results", "changes", "merged", "read", "stored_at"]

RESULTS = pathlib.Path(__file__).resolve().parent / "results"

MEMORY_TOLERANCE = 0.02
TIME_SHOWN = 0.05
PEAKS = ("peak_bytes", "total_bytes")
BATCHES = ("largest_batch",)
TIMES = ("seconds",)
HEADER = ("device", "scale", "torch", "date", "command")
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Results:
    """Figures by program, and what they were measured on."""

    header: dict[str, Any]
    figures: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Change:
    """A figure that is not what is stored.

    Attributes:
        program: Whose.
        figure: Which, or ``not measured``.
        before: What is stored.
        now: What was measured.
        is_regression: Whether memory got worse.
    """

    program: str
    figure: str
    before: float
    now: float
    is_regression: bool


# --- Reading --------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> Results:
    """The results in a file of ours or of pytest-benchmark.

    Raises:
        ValueError: There are none in the file.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    found = _of_benchmarks(fields["benchmarks"]) if "benchmarks" in fields else fields.get("figures", {})
    header = _benchmarks_header(fields) if "benchmarks" in fields else fields
    if not found:
        raise ValueError(f"{path}: no figures in it")
    return Results({name: header[name] for name in HEADER}, found)


def _of_benchmarks(benchmarks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        each["name"]: {**each["extra_info"], "seconds": each["stats"]["median"]}
        for each in benchmarks
        if "peak_bytes" in each["extra_info"]
    }


def _benchmarks_header(fields: Mapping[str, Any]) -> dict[str, Any]:
    first: Mapping[str, Any] = next(
        (each["extra_info"] for each in fields["benchmarks"] if "peak_bytes" in each["extra_info"]),
        dict.fromkeys(HEADER),
    )
    named = {name: first[name] for name in ("device", "scale", "torch")}
    return {**named, "date": fields["datetime"][:10], "command": "pytest bench"}


def merged(parts: Iterable[Results]) -> Results:
    """All results as one.

    Raises:
        ValueError: They are of several devices, scales or versions of torch.
    """
    parts = list(parts)
    for name in ("device", "scale", "torch"):
        values = list(dict.fromkeys(part.header[name] for part in parts))
        if len(values) > 1:
            raise ValueError(
                f"these results can't be stored together: {name} is {' and '.join(map(str, values))}"
            )
    header = {**parts[0].header, "command": "; ".join(str(part.header["command"]) for part in parts)}
    return Results(header, {name: own for part in parts for name, own in part.figures.items()})


def stored_at(folder: pathlib.Path, header: Mapping[str, Any]) -> pathlib.Path:
    """The file for results of that device, which is of the scale ``gpu`` unless its name says another."""
    scale = "" if header["scale"] == "gpu" else f"-{header['scale']}"
    return folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', str(header['device']).lower()).strip('-')}{scale}.json"


# --- Comparing ------------------------------------------------------------------------------------------


def changes(stored: Results, new: Results) -> list[Change]:
    """What is worse in memory, better in memory, or another time; programs in the stored order."""
    found = []
    for program, before in stored.figures.items():
        if "problem" in before:
            continue
        now = new.figures.get(program)
        if now is None or "problem" in now:
            found.append(Change(program, NOT_MEASURED, 0, 0, True))
            continue
        for figure in (*PEAKS, *BATCHES, *TIMES):
            if figure in before:
                found.append(_change(program, figure, before[figure], now.get(figure)))
    return [each for each in found if each is not None]


def _change(program: str, figure: str, before: float, now: float | None) -> Change | None:
    """A figure's change, if it is one to be told."""
    if now is None:
        return Change(program, f"{figure} {NOT_MEASURED}", before, 0, figure not in TIMES)
    if abs(now - before) <= (TIME_SHOWN if figure in TIMES else MEMORY_TOLERANCE) * before:
        return None
    is_worse = now < before if figure in BATCHES else now > before
    return Change(program, figure, before, now, is_worse and figure not in TIMES)


def format_changes(found: Iterable[Change]) -> str:
    """A line for each, regressions first."""
    cells = [
        (
            each.program,
            each.figure,
            _number(each.figure, each.before),
            _number(each.figure, each.now),
            f"{each.now / each.before - 1:+.1%}" if each.before else "-",
            "REGRESSION" if each.is_regression else "",
        )
        for each in sorted(found, key=lambda each: not each.is_regression)
    ]
    headers = ("program", "figure", "stored", "now", "change", "")
    aligned = ("left", "left", "right", "right", "right", "left")
    return tabulate(cells, headers, colalign=aligned, disable_numparse=True)


def _number(figure: str, value: float) -> str:
    if figure in PEAKS:
        return f"{value / 2**20:.2f} MiB"
    return f"{value * 1e3:.3f} ms" if figure in TIMES else f"{value:g}"


# --- The command ------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> int:
    """Compare, print, write; the result is the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS, help="where results are stored")
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE.json", help="all new results in one file")
    arguments = parser.parse_args(words)
    try:
        new = merged(map(read, arguments.results))
    except ValueError as error:
        parser.error(str(error))
    path = stored_at(arguments.folder, new.header)
    stored = read(path) if path.exists() else None
    if arguments.write is not None:
        text = json.dumps({**new.header, "figures": new.figures}, indent=1) + "\n"
        arguments.write.write_text(text, encoding="utf-8")
    if stored is None:
        print(f"Nothing is stored for this device ({path.name}) to compare {len(new.figures)} programs with.")
        return 0
    found = changes(stored, new)
    print(
        f"{len(stored.figures)} programs stored on {stored.header['date']}, torch {stored.header['torch']};"
    )
    print(f"{len(new.figures)} measured on {new.header['date']}, torch {new.header['torch']}.")
    print(f"\n{format_changes(found)}" if found else "All as stored.")
    return int(any(each.is_regression for each in found))


if __name__ == "__main__":
    sys.exit(main())
