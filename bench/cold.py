"""How long does the first step take? Seconds of the processor for one from cold, beside Inductor's own.

    OMP_NUM_THREADS=1 python bench/cold.py --json cold.json

Each figure is that of a process of its own with empty caches: what ``torch.compile`` imports, Dynamo,
planning, Inductor, the C++ compiler (of one thread, so that its seconds are counted) and the step itself;
behind that, the steps until plans have settled. Processes run one after the other, the ways of one network in
an order that is drawn; ratios are of medians. Seconds are the processor's, which other processes disturb less
than the clock.

Columns:
    way: Inductor's own, or a budget: none, a part of the peak of Inductor's step in bytes, or the least.
        A network whose budget is refused has no row for it.
    first: seconds of the first step, and as a ratio to Inductor's.
    three: seconds of the first three steps, in which a step's plans settle, and the same ratio.
    planning: seconds of the plans within.
    again: how often the graph was planned again for what its code takes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import models
import torch
from provenance import provenance
from tabulate import tabulate
from tqdm import tqdm

import fxremat
from fxremat.measure import measure_peak
from fxremat.options.options import Budget

NETWORKS = ("transformer", "llama", "resnet", "unet", "encoder_decoder")
WAYS = ("inductor", "none", "0.8", "0.6", "min")
ROUNDS = 3
STEPS = 3


def child(name: str, scale: str, way: str, peak_bytes: int) -> dict[str, Any]:
    """What this process sees of one network; the peak is that of Inductor's step."""
    module, inputs = models.fresh(models.case(name, scale))
    start = _cpu_seconds()
    if way == "inductor":
        compiled = torch.compile(module)
    else:
        words: dict[str, Budget] = {"none": None, "min": "min"}
        budget = words[way] if way in words else int(float(way) * peak_bytes)
        compiled = torch.compile(module, backend="fxremat", options={"budget": budget})
    seconds: list[float] = []
    try:
        for _ in range(STEPS):
            models.train_step(compiled, inputs)
            start, before = _cpu_seconds(), start
            seconds.append(start - before)
    except fxremat.InfeasibleBudgetError as error:
        return {"network": name, "way": way, "lowest_peak_bytes": error.lowest_peak_bytes}
    measured = measure_peak(lambda: models.train_step(compiled, inputs), device="cpu")
    reports = fxremat.reports()
    return {
        "network": name,
        "way": way,
        "seconds": seconds,
        "peak_bytes": measured.peak_bytes,
        "planning_seconds": sum(each.planning_seconds for each in reports),
        "notes": [note for each in reports for note in each.notes if "again" in note],
    }


def _cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    return sum(os.times()[:4])


def cold(*arguments: object) -> dict[str, Any]:
    """The same, of a process of its own with empty caches."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as cache:
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "FXREMAT_CACHE_DIR": cache}
        environment = {**os.environ, **own, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def rounds_of(name: str, scale: str, count: int) -> list[dict[str, Any]]:
    """Every way of one network, so many times, in an order that is drawn; Inductor's own is the first."""
    ways = [way for way in WAYS if way != "inductor"]
    first = cold(name, scale, "inductor", 0)
    order = random.sample(ways * count + ["inductor"] * (count - 1), (len(ways) + 1) * count - 1)
    return [first, *(cold(name, scale, way, first["peak_bytes"]) for way in order)]


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians of each network and way, and their ratios to Inductor's."""
    found = []
    for name in dict.fromkeys(each["network"] for each in rows):
        for way in WAYS:
            own = [
                each for each in rows if (each["network"], each["way"]) == (name, way) and "seconds" in each
            ]
            if not own:
                continue  # refused
            firsts = statistics.median(each["seconds"][0] for each in own)
            threes = statistics.median(sum(each["seconds"]) for each in own)
            if way == "inductor":
                unit = firsts, threes
            planning = statistics.median(each["planning_seconds"] for each in own)
            notes = "; ".join(dict.fromkeys(note for each in own for note in each["notes"]))
            found.append(
                {"network": name, "way": way, "first": firsts, "first_ratio": firsts / unit[0]}
                | {"three": threes, "three_ratio": threes / unit[1], "planning": planning, "again": notes}
            )
    return found


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The ratios as a table, and the medians of all networks."""
    found = ratios(rows)
    told = []
    for way in dict.fromkeys(each["way"] for each in found):
        middle = statistics.median(each["first_ratio"] for each in found if each["way"] == way)
        three = statistics.median(each["three_ratio"] for each in found if each["way"] == way)
        told.append(f"{way}: median of the first step's ratios {middle:.2f}, of three steps' {three:.2f}")
    return tabulate(found, headers="keys", floatfmt=".2f") + "\n" + "\n".join(told)


def main() -> None:
    """Take the steps, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--scale", default="small", choices=models.SCALES)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, scale, way, peak_bytes = arguments.child
        print(json.dumps(child(name, scale, way, int(peak_bytes))))
        return
    header, rows = provenance(__file__), []
    for name in tqdm(arguments.networks, disable=None):
        rows += rounds_of(name, arguments.scale, arguments.rounds)
        if arguments.json:
            text = json.dumps({**header, "rows": rows}, indent=1)
            arguments.json.write_text(text + "\n", encoding="utf-8")
        tqdm.write(format_rows(rows))


if __name__ == "__main__":
    main()
