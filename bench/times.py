"""Are the seconds right? Times of steps that recompute, predicted and taken, as ratios to those that do not.

    OMP_NUM_THREADS=1 python bench/times.py --json results.json
    OMP_NUM_THREADS=1 python bench/times.py --compiler eager

Each row is one model with one plan of ``auto``, five from the least time to the lowest peak. The plans are
made by the roofline and priced by both costs, so that both are held against the same step. Steps with the
plans and without run in turn, in an order that is drawn each time; their time is the thread's, which other
processes disturb less than the clock, and the ratio that of the medians. An error is a predicted ratio less
the one that was taken, in points of a percent.

Where memory lies moves the time of the same code by several percent from process to process: take the median
of three or more.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import attention
import models
import networks
import torch
from networks import Built
from provenance import provenance
from tabulate import tabulate
from tqdm import tqdm

import fxremat
from fxremat.predict.cost import COSTS, costs
from fxremat.predict.problem import pareto
from fxremat.search.baseline import baseline_plan

# Large enough that operators outweigh the interpreter, small enough for a step in tens of milliseconds.
MODELS: dict[str, tuple[Callable[..., Built], dict[str, int]]] = {
    "tanh_mlp": (networks.tanh_mlp, {"layers": 16, "width": 128, "batch": 2048}),
    "gated_mlp": (networks.gated_mlp, {"blocks": 5, "width": 128, "batch": 2048}),
    "dropout_mlp": (networks.dropout_mlp, {"blocks": 8, "width": 128, "batch": 2048}),
    "transformer": (
        attention.transformer,
        {"blocks": 4, "width": 128, "heads": 4, "batch": 4, "time": 256},
    ),
    "llama": (attention.llama, {"blocks": 3, "width": 128, "heads": 4, "batch": 4, "time": 256}),
    "encoder_decoder": (
        attention.encoder_decoder,
        {"blocks": 2, "width": 128, "heads": 4, "batch": 4, "time": 256},
    ),
    "vision_transformer": (
        attention.vision_transformer,
        {"blocks": 4, "width": 192, "heads": 3, "batch": 8, "size": 64},
    ),
    "resnet": (networks.resnet, {"blocks": 3, "width": 16, "batch": 32, "size": 32}),
    "densenet": (networks.densenet, {"layers": 6, "growth": 12, "batch": 16, "size": 32}),
    "unet": (networks.unet, {"levels": 3, "width": 16, "batch": 4, "size": 96}),
    "lstm": (networks.lstm, {"layers": 2, "steps": 10, "hidden": 128, "batch": 128}),
}
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)  # on the frontier, from the least time to the lowest peak
ENOUGH_BYTES = 1 << 40  # a budget that every plan keeps, so that kernels run in the order of the plan


@dataclass(frozen=True)
class Place:
    """A planner that takes one plan of the frontier, or the one without recomputation of ours."""

    place: float | None

    def __call__(self, problem: fxremat.Problem) -> fxremat.Solution:
        """The plan."""
        if self.place is None:
            return baseline_plan(problem)
        frontier = pareto(fxremat.PLANNERS["auto"](problem))
        return frontier[round(self.place * (len(frontier) - 1))]


@dataclass(frozen=True)
class Noting:
    """A planner that hands its plan on, and notes the problem and the plan."""

    planner: Place
    noted: list[tuple[fxremat.Problem, fxremat.Solution]] = field(default_factory=list, repr=False)

    def __call__(self, problem: fxremat.Problem) -> fxremat.Solution:
        """The other planner's plan."""
        solution = self.planner(problem)
        self.noted.append((problem, solution))
        return solution

    def __reduce__(self) -> tuple[type[Noting], tuple[Place]]:
        """The key of a compiler's cache is the plan's alone."""
        return Noting, (self.planner,)


def thread_seconds(steps: list[Callable[[], object]], rounds: int) -> list[float]:
    """Each step's median seconds of the thread's time, run in turn after one that is not timed."""
    seconds: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    for _ in range(rounds + 1):
        random.shuffle(order)
        for each in order:
            start = time.thread_time()
            steps[each]()
            seconds[each].append(time.thread_time() - start)
    return [statistics.median(own[1:]) for own in seconds]


def rows_of(name: str, compiler: str, rounds: int) -> list[dict[str, Any]]:
    """What was predicted and measured for one model."""
    build, sizes = MODELS[name]
    module, inputs = models.fresh(models.Case(name, lambda: build(**sizes)))
    torch._dynamo.reset()
    steps, planners = [], [Noting(Place(place)) for place in (None, *PLACES)]
    for planner in planners:
        options = {"planner": planner, "compiler": compiler, "budget": ENOUGH_BYTES, "scope": "graph"}
        options["fx_graph_cache"] = False  # which would know the plan, and not ask the planner
        compiled = torch.compile(module, backend=fxremat.fxremat_backend, options=options)
        models.train_step(compiled, inputs)
        steps.append(lambda compiled=compiled: models.train_step(compiled, inputs))
    without, *taken = thread_seconds(steps, rounds)
    problem, baseline = planners[0].noted[-1]
    plans = [planner.noted[-1][1] for planner in planners[1:]]
    predicted = {cost: _ratios(problem, cost, baseline, plans) for cost in COSTS}
    return [
        {
            "model": name,
            "peak": plan.peak_bytes / baseline.peak_bytes,
            "seconds": without,
            "taken": own / without,
            **{cost: ratios[each] for cost, ratios in predicted.items()},
        }
        for each, (plan, own) in enumerate(zip(plans, taken, strict=True))
    ]


def _ratios(
    problem: fxremat.Problem, cost: str, baseline: fxremat.Solution, plans: Sequence[fxremat.Solution]
) -> list[float]:
    """The predicted seconds of plans, as ratios to the baseline's."""
    known = costs(problem.graph, cost, problem.model.on(problem.graph).fuses)
    priced = replace(problem, costs=known, _latest={})
    first, *others = (priced.evaluate(plan.schedule, "").seconds for plan in (baseline, *plans))
    return [each / first for each in others]


def main() -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for name in tqdm(arguments.models, disable=None, leave=False):
        rows += rows_of(name, arguments.compiler, arguments.rounds)
    columns = ("taken", *COSTS)
    shown = [
        (row["model"], f"{row['peak']:.0%}", *(f"{row[column] - 1:+.1%}" for column in columns))
        for row in rows
    ]
    print(tabulate(shown, ("model", "peak", *columns), disable_numparse=True))
    for cost in COSTS:
        errors = [abs(row[cost] - row["taken"]) * 100 for row in rows]
        print(f"{cost}: median error {statistics.median(errors):.1f} points, largest {max(errors):.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**provenance(__file__), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
