"""What is each part of ``auto`` worth? Frontiers with each switched off, beside that with all of them.

    OMP_NUM_THREADS=1 python bench/ablation.py --drawn 200 --json ablation.json

A part earns its place by plans that take less time at the same peak, by a lower least peak, or by seconds of
planning. Each graph is planned for all budgets with every part, and without each. The two frontiers are
compared at ten peaks, evenly spread between the higher of the two least peaks and the higher of the two
greatest: a ratio above 1 is how much slower the fastest plan within the peak is without the part. Columns are
the median and the worst of these ratios over all graphs and peaks, how many least peaks rose and by how much
at most, the ratio of planning seconds (the processor's) without and with the part, and by how much a peak
was mispredicted at most. Networks are planned under Inductor's memory model, or with ``--fusion inplace``
under that of the graphs as they are; drawn ones (random programs of 8 to 40 operators) and chains, whose
least peaks need many recomputations, where every value has a buffer.

Some parts belong to a memory model. Plans found without one count as what they take by the whole model, and
what the lesser model predicted for them is then off.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from models import NAMES, case, fresh
from optima import advancing, taped
from planning import COMPILERS
from programs import LAYERS, OPERATORS, Network, traced
from provenance import provenance
from tabulate import tabulate
from tqdm import tqdm

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.inductor import buffers, concatenation, grouping, inlining, orders, timing
from fxremat.memory.lowering import Copies
from fxremat.planners import auto
from fxremat.predict import models
from fxremat.predict.problem import Problem, Solution
from fxremat.search import row, squeeze, tables
from fxremat.search.condensed import Condensed
from fxremat.search.tables import solve

PEAKS = 10
Points = list[tuple[int, float]]  # peak bytes and seconds, the peaks falling


def _first_variant(problem: Problem, default: Solution) -> list[tuple[frozenset[int], bool]]:
    """Kept for the backward or not, what could be part of its readers is said to be."""
    return variants(problem, default)[:1]


def _last_variant(problem: Problem, default: Solution) -> list[tuple[frozenset[int], bool]]:
    """What is kept for the backward without a budget is said to have a buffer."""
    return variants(problem, default)[-1:]


def _own_order(condensed: Condensed) -> tuple[int, ...]:
    return tuple(range(len(condensed.operators)))


variants = auto._variants

PARTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "dynamic programme": ((row.tables, "solve", lambda condensed: []),),
    "finest table": ((tables, "_finest", lambda divided, known: ()),),
    "all tables but one": ((row.tables, "solve", lambda condensed: solve(condensed)[:1]),),
    "evict": ((row, "evict", lambda *rest: None),),
    "retain": ((row, "retain", lambda condensed, plan, budget: tuple(plan)),),
    "order": ((row, "memory_order", _own_order),),
    "values worth keeping": ((auto, "_variants", _first_variant),),
    "values computed again": ((auto, "_variants", _last_variant),),
    "recipes": ((auto, "_recipes", lambda problem: ()), (auto, "_starts", lambda problem: {})),
    "copies": ((models.Inductor, "copies", lambda *rest: Copies()),),
    "refinement": tuple((auto, name, lambda problem, known, evaluations: []) for name in ("refine", "lower")),
    "squeezes": ((squeeze.Squeeze, "within", lambda self, limit: None),),
    "proofs": ((auto, "_proved", lambda problem, operators: ()),),
    "layout": (
        (buffers, "input_copies", lambda *rest: ()),
        (orders, "channels_last", lambda *rest: frozenset()),
        (inlining, "parts_read", lambda *rest: {}),
    ),
    "concatenation": (
        (grouping.Grouping, "_find_feeders", lambda *rest: ()),
        (concatenation.Slices, "own_operands", lambda *rest: ()),
    ),
    "pooling": (
        (grouping, "scatters", lambda *rest: {}),
        (timing, "inlined_offsets", lambda *rest: ()),
    ),
    "in place": (
        (models.InPlace, "overwrites", False),
        (models.Inductor, "overwrites", False),
        (models, "overwrites", lambda *rest: {}),
        (buffers.Buffers, "_reuses", lambda *rest: ()),
    ),
}


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """Switch a part of ``auto`` off."""
    with contextlib.ExitStack() as stack:
        for owner, name, substitute in PARTS[part]:
            stack.enter_context(mock.patch.object(owner, name, substitute))
        yield


def drawn(seed: int) -> fxremat.JointGraph:
    """The joint graph of a random program."""
    generator = random.Random(seed)
    names = (*OPERATORS, *LAYERS)
    steps = [
        (generator.choice(names), generator.randint(-3, -1), generator.randint(-3, -1))
        for _ in range(generator.randint(8, 40))
    ]
    torch.manual_seed(0)
    return traced(Network([("linear", -1, -1), *steps]))


CHAINS: dict[str, Callable[[], fxremat.JointGraph]] = {
    "60 layers": lambda: advancing(60),
    "400 layers": lambda: advancing(400),
    "40 layers with records": lambda: taped(40, 3),
    "200 layers with records": lambda: taped(200, 3),
}


def network(name: str, scale: str, fusion: str) -> Problem:
    """The planning problem of a network."""
    module, inputs = fresh(case(name, scale))
    return make_problem(fxremat.capture(module, *inputs, compiler=COMPILERS[fusion]), fusion=fusion)


def frontier(problem: Problem) -> tuple[Sequence[Solution], float]:
    """The plans of ``auto``, and the processor's seconds that they took."""
    start = time.process_time()
    found = auto.plan(problem)
    return found, time.process_time() - start


def points(problem: Problem, found: Sequence[Solution]) -> Points:
    """What plans take by a problem's own memory model."""
    again = [problem.evaluate(each.schedule, each.planner) for each in found]
    return [(each.peak_bytes, each.seconds) for each in again]


def fastest(points: Points, peak: float) -> float:
    """The least seconds within a peak."""
    return min(seconds for peak_bytes, seconds in points if peak_bytes <= peak)


def ratios(whole: Points, less: Points) -> list[float]:
    """How much slower the fastest plans of the second are at equal peaks."""
    low = max(min(points)[0] for points in (whole, less))
    high = max(max(points)[0] for points in (whole, less))
    peaks = [low + (high - low) * step / (PEAKS - 1) for step in range(PEAKS)]
    return [fastest(less, peak) / fastest(whole, peak) for peak in peaks]


def measured(make: Callable[[], Problem], parts: Sequence[str]) -> dict[str, Any]:
    """The frontiers of a graph with all parts and without each."""
    problem = make()
    solutions, seconds = frontier(problem)
    whole = points(problem, solutions)
    found: dict[str, Any] = {}
    for part in parts:
        with without(part):
            solutions, less_seconds = frontier(make())
        less = points(problem, solutions)
        errors = (
            predicted.peak_bytes / max(1, peak) - 1
            for predicted, (peak, _) in zip(solutions, less, strict=True)
        )
        found[part] = {
            "time_ratios": ratios(whole, less),
            "least_peak_ratio": min(less)[0] / max(1, min(whole)[0]),
            "planning_ratio": less_seconds / max(seconds, 1e-9),
            "prediction_error": max(errors, key=abs),
        }
    return {"planning_seconds": seconds, "without": found}


def table(rows: dict[str, dict[str, Any]], parts: Sequence[str]) -> str:
    """What each part is worth over all graphs."""
    lines = []
    for part in parts:
        found = [each["without"][part] for each in rows.values()]
        times = [ratio for each in found for ratio in each["time_ratios"]]
        peaks = [each["least_peak_ratio"] for each in found]
        lines.append(
            (
                part,
                statistics.median(times),
                max(times),
                sum(ratio > 1.005 for ratio in times) / len(times),
                sum(ratio > 1 for ratio in peaks),
                max(peaks),
                statistics.median(each["planning_ratio"] for each in found),
                max((each["prediction_error"] for each in found), key=abs),
            )
        )
    heads = [
        "without",
        "median time",
        "worst time",
        "slower by .5 %",
        "higher peaks",
        "worst peak",
        "planning",
        "worst prediction",
    ]
    formats = ("", ".4f", ".3f", ".1%", "d", ".3f", ".2f", ".1%")
    return tabulate(lines, heads, tablefmt="github", floatfmt=formats)


def main() -> int:
    """Measure, print two tables, and write JSON as it goes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=NAMES, metavar="NAME", help="networks (all)")
    parser.add_argument("--scale", default="small", help="of the networks (small)")
    parser.add_argument("--fusion", default="inductor", choices=COMPILERS, help="of the networks (inductor)")
    parser.add_argument("--drawn", type=int, default=200, metavar="COUNT", help="random programs (200)")
    parser.add_argument("--chains", nargs="*", default=list(CHAINS), choices=CHAINS, help="chains (all)")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="of auto (all)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write figures")
    arguments = parser.parse_args()
    results: dict[str, Any] = {**provenance(__file__), "networks": {}, "drawn": {}, "chains": {}}
    graphs: list[tuple[str, str, Callable[[], Problem]]] = []
    for name in arguments.models:
        build = functools.partial(network, name, arguments.scale, arguments.fusion)
        graphs.append(("networks", name, build))
    for name in arguments.chains:
        graphs.append(("chains", name, lambda name=name: make_problem(CHAINS[name](), fusion="none")))
    for seed in range(arguments.drawn):
        graphs.append(("drawn", str(seed), lambda seed=seed: make_problem(drawn(seed), fusion="none")))
    for group, name, make in tqdm(graphs, "graphs", disable=None):
        results[group][name] = measured(make, arguments.parts)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for group in ("networks", "chains", "drawn"):
        if results[group]:
            print(f"\n{group}: {len(results[group])}\n\n{table(results[group], arguments.parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
