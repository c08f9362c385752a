"""How far the plans of ``auto`` are from what is known or proved to be the least time.

    python bench/gaps.py --json bench/results/gaps.json

Two tables. Chains: at the budget of a closed form or of a known recurrence (revolve, Maddison's mixed
recurrence, rotor), the seconds of the best persistent plan, those of auto, and their ratio; a ratio below 1
is a plan that drops a value in the midst of a stretch, which those theories do not. Small graphs drawn at
random: at each peak of the frontier that ``exact`` proves, how much more the plans take that auto's search
finds by itself, and those that auto ships, which has the proof of a graph that is small enough.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time
from collections.abc import Iterable
from typing import Any

from optima import DRAWN, Known, gaps, heuristic_points, known, planner_points, summary, within
from provenance import provenance
from tabulate import tabulate
from tqdm import tqdm

FAR = 1000  # layers that take minutes


def chain_row(case: Known) -> dict[str, Any]:
    """A chain at its budget."""
    start = time.perf_counter()
    points = planner_points(case.make(), "auto")
    seconds = within(points, case.budget)
    return {
        "chain": case.name,
        "budget": case.budget,
        "optimum": case.seconds + case.fixed,
        "auto": seconds + case.fixed if seconds < math.inf else None,
        "ratio": case.ratio(seconds) if seconds < math.inf else None,
        "lowest_peak": min(points)[0],
        "planning_seconds": time.perf_counter() - start,
    }


def drawn_rows(kind: str, count: int) -> Iterable[dict[str, Any]]:
    """The drawn graphs of one kind, against the proof: the search by itself, and auto as it is shipped."""
    found: dict[str, list[float]] = {"search alone": [], "auto": []}
    for seed in tqdm(range(count), desc=kind, disable=None):
        graph = DRAWN[kind](seed)
        front = planner_points(graph, "exact")
        found["search alone"] += gaps(front, heuristic_points(graph))
        found["auto"] += gaps(front, planner_points(graph, "auto"))
    for plans, each in found.items():
        yield {"graphs": f"{count} of kind {kind}", "plans": plans, **summary(each)}


def format_chains(rows: Iterable[dict[str, Any]]) -> str:
    """The chains as a table."""
    cells = [
        [each["chain"], each["budget"], f"{each['optimum']:.0f}"]
        + (["-", f"none below {each['lowest_peak']}"] if each["auto"] is None else [])
        + ([f"{each['auto']:.0f}", f"{each['ratio']:.3f}"] if each["auto"] is not None else [])
        + [f"{each['planning_seconds']:.1f}"]
        for each in rows
    ]
    return tabulate(cells, ["chain", "budget", "optimum", "auto", "ratio", "plan s"], disable_numparse=True)


def format_drawn(rows: Iterable[dict[str, Any]]) -> str:
    """The drawn graphs as a table."""
    cells = [
        [each["graphs"], each["plans"], each["budgets"], each["infeasible"]]
        + [f"{each[key]:.2%}" for key in ("mean", "worst", "equal")]
        for each in rows
    ]
    headers = ["graphs", "plans", "budgets", "without a plan", "mean gap", "worst gap", "optimal"]
    return tabulate(cells, headers, disable_numparse=True)


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=150, help="drawn graphs of each kind")
    parser.add_argument("--far", action="store_true", help=f"the chain of {FAR} layers too")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    cases = [case for case in known() if arguments.far or case.layers < FAR]
    chains = [chain_row(case) for case in tqdm(cases, desc="chains", disable=None)]
    print(format_chains(chains), end="\n\n")
    drawn = [row for kind in DRAWN for row in drawn_rows(kind, arguments.graphs)]
    print(format_drawn(drawn))
    if arguments.json:
        result = {**provenance(__file__), "chains": chains, "drawn": drawn}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
