"""The dynamic programme over blocks: closed forms, exhaustive search, and models."""

from __future__ import annotations

import functools
import heapq
import itertools
import random

import models
import pytest

import fxremat
from fxremat import chain
from fxremat.cost import costs
from fxremat.graph import JointGraph
from fxremat.planners.blocks import cuts, divide, narrowest
from fxremat.planners.condensed import Condensed, condense
from fxremat.planners.persistent import Plan, plans
from fxremat.planners.replay import peak_bytes
from fxremat.planners.table import Table
from fxremat.schedule import validate


def condensed(graph: JointGraph) -> Condensed:
    """The graph as planning weighs it."""
    return condense(graph, costs(graph))


def exact(graph: Condensed, budget: int) -> list[Plan]:
    """The fastest plan for a budget of small sizes, each narrow cut being used and no size rounded."""
    return Table(divide(graph, narrowest(cuts(graph), 1)), 1, budget).fitting(budget)


def advancing(layers: int) -> Condensed:
    """Revolve's chain: x_i is made of x_(i - 1) for a second; the gradient g_i of x_(i - 1) and g_(i + 1).

    x_0 is the caller's, everything else takes one byte, but for the last value, which nobody reads and which
    costs nothing. A gradient runs the forward of its layer within itself, as revolve has it, so that a plan takes forwards(layers, s) - layers seconds. With s checkpoints,
    the input among them, s - 1 values are held while an advance needs two more, and the gradient one.
    """
    operands: dict[str, list[str]] = {"x0": [], "seed": []}
    operands |= {f"x{i}": [f"x{i - 1}"] for i in range(1, layers + 1)}
    for i in range(layers, 0, -1):
        operands[f"g{i}"] = [f"g{i + 1}" if i < layers else "seed", f"x{i - 1}"]
    forward = [f"x{i}" for i in range(1, layers + 1)]
    backward = [name for name in operands if name[0] == "g"]
    order = {name: operands[name] for name in ("x0", *forward, "seed", *backward)}
    sizes = dict.fromkeys([*forward, "seed", *backward], 1) | {f"x{layers}": 0}
    seconds = dict.fromkeys(forward, 1.0) | {f"x{layers}": 0.0}
    return condensed(
        JointGraph.from_mappings(
            order, sizes, backward=["seed", *backward], backward_outputs=["g1"], seconds=seconds
        )
    )


@pytest.mark.parametrize(
    ("layers", "checkpoints"),
    [(10, 2), (10, 3), (16, 3), (20, 3), (32, 4), (100, 5), (1000, 10)],
)
def test_revolve(layers: int, checkpoints: int) -> None:
    """On revolve's chain the plan for its memory takes the number of forwards of its closed form."""
    (plan,) = exact(advancing(layers), checkpoints + 2)
    assert plan.peak_bytes <= checkpoints + 2
    assert plan.seconds == chain.forwards(layers, checkpoints) - layers


def taped(layers: int, kept: int = 1) -> Condensed:
    """Rotor's chain: layer i makes its record of x_(i - 1) in a second; its gradient reads both in two.

    The record takes ``kept`` bytes, of which one is x_i. The gradient of x_i takes one as well.
    """
    operands: dict[str, list[str]] = {"x0": []}
    seconds: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for i in range(1, layers + 1):
        operands[f"x{i}"] = [f"x{i - 1}"]
        sizes[f"x{i}"], seconds[f"x{i}"] = 1, 1.0
        if kept > 1:
            operands[f"t{i}"] = [f"x{i}", f"x{i - 1}"]
            sizes[f"t{i}"] = kept - 1
    operands["seed"] = []
    sizes["seed"] = 1
    for i in range(layers, 0, -1):
        tape = [f"t{i}"] if kept > 1 else []
        operands[f"g{i}"] = [f"g{i + 1}" if i < layers else "seed", f"x{i - 1}", f"x{i}", *tape]
        sizes[f"g{i}"], seconds[f"g{i}"] = 1, 2.0
    backward = ["seed", *(f"g{i}" for i in range(layers, 0, -1))]
    graph = JointGraph.from_mappings(
        operands, sizes, backward=backward, backward_outputs=["g1"], seconds=seconds
    )
    return condensed(graph)


@functools.cache
def mixed(layers: int, checkpoints: int) -> int:
    """Maddison's recurrence: forwards where a checkpoint may hold a value or a record of the same size."""
    if layers <= checkpoints + 1:
        return layers
    if checkpoints == 1:
        return layers * (layers + 1) // 2 - 1
    held = (i + mixed(i, checkpoints) + mixed(layers - i, checkpoints - 1) for i in range(2, layers))
    return min(1 + mixed(layers - 1, checkpoints - 1), *held)


def least_seconds(graph: Condensed, budget: int) -> float:
    """The least time of any plan that fits, by Dijkstra's algorithm over what is done and what is held."""
    boundary = graph.boundary
    start = (0, frozenset[int]())
    best = {start: 0.0}
    tie = itertools.count()
    queue: list[tuple[float, int, tuple[int, frozenset[int]]]] = [(0.0, next(tie), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        done, live = state
        if done == len(graph.operators):
            return seconds
        if seconds > best[state]:
            continue
        for index in (*range(min(done, boundary)), done):
            operator = graph.operators[index]
            made = frozenset(operator.makes)
            if not live.issuperset(operator.reads) or (index < done and live & made):
                continue
            if sum(graph.size[buffer] for buffer in live | made) > budget:
                continue
            after = live | made
            pinned = frozenset(buffer for buffer in after if graph.pinned[buffer])
            for count in range(len(after) + 1):
                for kept in itertools.combinations(sorted(after), count):
                    if not pinned.issubset(kept):
                        continue
                    found = (done + (index == done), frozenset(kept))
                    total = seconds + operator.seconds
                    if total < best.get(found, float("inf")):
                        best[found] = total
                        heapq.heappush(queue, (total, next(tie), found))
    return float("inf")


if __name__ == "__main__":
    for n, s in ((6, 2), (7, 2), (7, 3)):
        print(n, s, least_seconds(advancing(n), s + 2), chain.forwards(n, s) - n)
    for n in (4, 5, 6):
        for b in (3, 4, 5, 6, 7):
            print("taped", n, b, least_seconds(taped(n), b), [2 * n + mixed(n, s) for s in (1, 2, 3, 4)],
                  [p.seconds for p in exact(taped(n), b)])
