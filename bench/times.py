"""Are the seconds right? Times of steps that recompute, predicted and taken, as ratios to those that do not.

    OMP_NUM_THREADS=1 python bench/times.py --json results.json

Each row is one model with one plan of ``auto``, run as fx graphs (``compiler="eager"``): two from the middle
of the frontier, and its lowest. The plan is made by the roofline and priced by both costs, so that both are
held against the same step. Steps with the plan and without run in turn; their time is the processor's,
which other processes disturb less than the clock, and the ratio that of the medians. An error is a
predicted ratio less the one that was taken, in points of a percent.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attention
import models
import networks
import torch
from networks import Built
from tabulate import tabulate
from tqdm import tqdm

import fxremat
from fxremat.predict.cost import COSTS, costs
from fxremat.predict.problem import pareto
from fxremat.search.baseline import baseline_plan

# Large enough that operators outweigh the interpreter, small enough for a step in tens of milliseconds.
MODELS: dict[str, tuple[Callable[..., Built], dict[str, int]]] = {
    "tanh_mlp": (networks.tanh_mlp, {"layers": 16, "width": 128, "batch": 1024}),
    "gated_mlp": (networks.gated_mlp, {"blocks": 4, "width": 128, "batch": 1024}),
    "transformer": (
        attention.transformer,
        {"blocks": 4, "width": 128, "heads": 4, "batch": 4, "time": 128},
    ),
    "resnet": (networks.resnet, {"blocks": 3, "width": 16, "batch": 16, "size": 32}),
}
PLACES = (1 / 3, 2 / 3, 1.0)  # on the frontier, from the least time to the lowest peak


def planner(place: float, predicted: dict[str, float]) -> Callable[[fxremat.Problem], fxremat.Solution]:
    """A planner that notes what is predicted for its plan, as ratios to the step without fxremat."""

    def plan(problem: fxremat.Problem) -> fxremat.Solution:
        baseline = baseline_plan(problem)
        frontier = pareto(fxremat.PLANNERS["auto"](problem))
        chosen = frontier[round(place * (len(frontier) - 1))]
        predicted["peak"] = chosen.peak_bytes / baseline.peak_bytes
        for cost in COSTS:
            priced = replace(problem, costs=costs(problem.graph, cost))
            taken = [priced.evaluate(each.schedule, "").seconds for each in (chosen, baseline)]
            predicted[cost] = taken[0] / taken[1]
        return chosen

    return plan


def processor_seconds(steps: list[Callable[[], object]], rounds: int) -> list[float]:
    """Each step's median seconds of processor time, run in turn after one that is not timed."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for own, step in zip(seconds, steps, strict=True):
            start = time.process_time()
            step()
            own.append(time.process_time() - start)
    return [statistics.median(own[1:]) for own in seconds]


def rows_of(name: str, rounds: int) -> list[dict[str, Any]]:
    """What was predicted and measured for one model."""
    build, sizes = MODELS[name]
    module, inputs = models.fresh(models.Case(name, lambda: build(**sizes)))
    predicted: list[dict[str, float]] = [{} for _ in PLACES]
    planners = [planner(place, own) for place, own in zip(PLACES, predicted, strict=True)]
    torch._dynamo.reset()
    steps = []
    for each in ("keep_all", *planners):
        options = {"planner": each, "compiler": "eager", "budget": None}
        compiled = torch.compile(module, backend=fxremat.fxremat_backend, options=options)
        models.train_step(compiled, inputs)
        steps.append(lambda compiled=compiled: models.train_step(compiled, inputs))
    without, *seconds = processor_seconds(steps, rounds)
    return [
        {"model": name, "seconds": without, "taken": own / without, **ratios}
        for own, ratios in zip(seconds, predicted, strict=True)
    ]


def main() -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for name in tqdm(arguments.models, disable=None, leave=False):
        rows += rows_of(name, arguments.rounds)
    columns = ("taken", *COSTS)
    shown = [
        (row["model"], f"{row['peak']:.0%}", *(f"{row[column] - 1:+.1%}" for column in columns))
        for row in rows
    ]
    print(tabulate(shown, ("model", "peak", *columns), disable_numparse=True))
    for cost in COSTS:
        errors = [abs(row[cost] - row["taken"]) * 100 for row in rows]
        print(f"{cost}: mean error {statistics.mean(errors):.1f} points, largest {max(errors):.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
