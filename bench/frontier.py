"""The frontier, measured: peak and time of what torch has, and of fxremat at each of these peaks.

    python bench/frontier.py --models transformer resnet --scale full --json f.json --plot f.png

Each model runs in a process of its own. With ``--json FILE.json`` what a model took is kept in the folder
FILE as soon as it is done, and is not measured again unless a source, torch or an option has changed. What
the columns mean: frontier.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

import torch
from provenance import provenance
from racing import compare, wrapping
from racing.peers import FAMILIES
from racing.race import Race
from tqdm import tqdm

import fxremat
from fxremat._torch import compilers
from fxremat.plots.canvas import check_plot
from fxremat.plots.frontier import MeasuredPoint, plot_points

HERE = pathlib.Path(__file__).resolve().parent
MODELS = tuple(wrapping.MODELS)
ROUNDS = {"small": 9, "full": 21, "gpu": 21}
SOURCES = (HERE, pathlib.Path(fxremat.__file__).parent)


def main() -> int:
    """Race the models, print their tables, write what was asked for; the result is the exit status."""
    arguments = _arguments()
    if arguments.part is not None:
        _race(arguments)
        return 0
    if arguments.plot is not None:
        check_plot(arguments.plot)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.json.with_suffix("") if arguments.json else pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {name: _part(name, folder, arguments) for name in arguments.models}
    done = {name: part for name, part in parts.items() if part is not None}
    rows = {name: compare.rows(_candidates(part)) for name, part in done.items()}
    print(compare.format_summary(rows))
    if arguments.json is not None:
        _write(arguments.json, {**_header(arguments), **_results(done, rows)})
    if arguments.plot is not None:
        for name, part in done.items():
            _plot(name, _candidates(part), arguments)
    return 0 if len(done) == len(parts) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--scale", choices=tuple(ROUNDS), default="small")
    parser.add_argument("--peers", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--rounds", type=int, help="timed steps of each candidate (default: 21, small: 9)")
    parser.add_argument(
        "--compiler",
        choices=("inductor", "eager"),
        default="inductor",
        help="eager leaves out what needs generated code; the unit of time is eager's then",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="FILE-MODEL.png for each model")
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    parser.add_argument("--part", type=pathlib.Path, help=argparse.SUPPRESS)  # one model, in this process
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or ROUNDS[arguments.scale]
    return arguments


# --- One model ----------------------------------------------------------------------------------------


def _part(name: str, folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What a model took: as it was kept, or from a new process; None if that failed."""
    path = folder / f"{name}.json"
    wanted = _key(arguments)
    if arguments.again or not path.exists() or json.loads(path.read_text("utf-8"))["key"] != wanted:
        path.unlink(missing_ok=True)
        subprocess.run([*_command(name, arguments), "--part", str(path)], check=False)
    if not path.exists():
        print(f"{name}: failed", file=sys.stderr)
        return None
    part: dict[str, Any] = json.loads(path.read_text("utf-8"))
    candidates = _candidates(part)
    _write(folder / f"{name}-points.json", _points(candidates))
    print(f"{name} ({arguments.scale}), noise {compare.noise(candidates):.1%}")
    print(f"{compare.format_rows(compare.rows(candidates))}\n", flush=True)
    return part


def _command(name: str, arguments: argparse.Namespace) -> list[str]:
    given = {
        "--models": [name],
        "--scale": [arguments.scale],
        "--peers": arguments.peers,
        "--rounds": [arguments.rounds],
        "--compiler": [arguments.compiler],
        "--device": [arguments.device],
    }
    options = [word for option, values in given.items() for word in (option, *map(str, values))]
    return [sys.executable, __file__, *options]


def _race(arguments: argparse.Namespace) -> None:
    """Race one model in this process and write what it took."""
    (name,) = arguments.models
    torch.backends.cudnn.allow_tf32 = False  # or else no gradient would be eager's
    start = time.perf_counter()
    with tqdm(disable=None, desc=name, unit="stage", bar_format="{desc} [{elapsed}]{postfix}") as bar:

        def begin(stage: str) -> None:
            bar.set_postfix_str(stage)
            bar.update()

        race = Race(
            name,
            arguments.scale,
            compiler=arguments.compiler,
            device=arguments.device,
            progress=begin,
        )
        candidates = race.run(arguments.peers, arguments.rounds)
    part = {
        "model": name,
        "key": _key(arguments),
        "date": time.strftime("%Y-%m-%d"),
        "wall_seconds": time.perf_counter() - start,
        "noise": compare.noise(candidates),
        "candidates": [asdict(each) for each in candidates],
    }
    _write(arguments.part, part)


def _key(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a measurement depends on besides the machine."""
    return {
        "scale": arguments.scale,
        "peers": sorted(arguments.peers),
        "rounds": arguments.rounds,
        "compiler": arguments.compiler,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sources": [compilers.source_hash(folder).hex() for folder in SOURCES],
    }


# --- What is written ----------------------------------------------------------------------------------


def _header(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **provenance(__file__, arguments.device),
        "scale": arguments.scale,
        "unit": arguments.compiler,
    }


def _results(done: dict[str, dict[str, Any]], rows: dict[str, list[compare.Row]]) -> dict[str, Any]:
    everything = [row for found in rows.values() for row in found]
    return {
        "summary": compare.summary(everything),
        "models": {
            name: {
                "summary": compare.summary(rows[name]),
                "rows": [asdict(row) for row in rows[name]],
                **{key: value for key, value in part.items() if key != "key"},
            }
            for name, part in done.items()
        },
    }


def _candidates(part: dict[str, Any]) -> list[compare.Candidate]:
    lists = ("seconds", "rank")
    return [
        compare.Candidate(**{**each, **{name: tuple(each[name]) for name in lists}})
        for each in part["candidates"]
    ]


def _points(candidates: list[compare.Candidate]) -> list[dict[str, Any]]:
    """The measured points, as ``fxremat frontier --points`` reads them."""
    return [
        {
            "name": each.name,
            "family": each.family,
            "peak_bytes": each.peak_bytes,
            "time_ratio": compare.time_ratio(each, candidates),
        }
        for each in candidates
        if not each.problem and each.family != compare.AGAIN
    ]


def _plot(name: str, candidates: list[compare.Candidate], arguments: argparse.Namespace) -> None:
    points = [MeasuredPoint(**each) for each in _points(candidates)]
    ours = [each for each in points if each.family == compare.OURS]
    beaten = {
        each.name
        for each in ours
        for other in ours
        if (other.peak_bytes, other.time_ratio) != (each.peak_bytes, each.time_ratio)
        and other.peak_bytes <= each.peak_bytes
        and other.time_ratio <= each.time_ratio
    }
    shown = [each for each in points if each.name not in beaten]
    unit = "Inductor's default" if arguments.compiler == "inductor" else "eager"
    path = arguments.plot.with_name(f"{arguments.plot.stem}-{name}.png")
    plot_points(shown, path, f"{name}, {arguments.scale}", f"time, as a ratio to {unit}")


def _write(path: pathlib.Path, fields: Any) -> None:
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
