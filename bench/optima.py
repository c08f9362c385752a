"""Graphs whose least seconds are known: chains with a theory, and small graphs drawn for the exact planner.

The chains' optima are those of persistent plans: what is held over a stretch of the chain is held over all
of its backward. They are bounds from above, since our plans may drop a value in the midst of a stretch.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxremat.driver.pipeline import make_problem
from fxremat.graph.joint import JointGraph
from fxremat.planners import PLANNERS, auto
from fxremat.search import chain
from fxremat.search.condensed import condense
from fxremat.search.profile import peak_bytes
from fxremat.search.row import Row

Points = list[tuple[int, float]]  # peak bytes and seconds of each plan


# --- Chains ---------------------------------------------------------------------------------------------


def algorithm_1(layers: int, segments: Sequence[int]) -> list[chain.Step]:
    """Backpropagate segment by segment, each run again from its kept input to record the layers' inputs.

    Args:
        layers: How many layers there are.
        segments: The first layer of each segment, ascending, the first one 0.

    Returns:
        Every forward, then, segment by segment from the last, its forwards again but for the last layer's,
        whose output is nobody's input there, and its gradients.
    """
    ends = (*segments[1:], layers)
    steps = [chain.Step(layer, False) for layer in range(layers)]
    for first, end in reversed(list(zip(segments, ends, strict=True))):
        steps += [chain.Step(layer, False) for layer in range(first, end - 1)]
        steps += [chain.Step(layer, True) for layer in reversed(range(first, end))]
    return steps


def forwards(layers: int, checkpoints: int) -> int:
    """How many forwards revolve runs: the closed form, layers + r * layers - chain.beta(s + 1, r - 1)."""
    repeats = next(r for r in itertools.count() if chain.beta(checkpoints, r) >= layers)
    return layers + repeats * layers - chain.beta(checkpoints + 1, repeats - 1)


def advancing(layers: int) -> JointGraph:
    """Revolve's chain: x_i is made of x_(i - 1) for a second; the gradient g_i of x_(i - 1) and g_(i + 1).

    x_0 is the caller's, everything else takes one byte, but for the last value, which nobody reads and which
    costs nothing. A gradient runs the forward of its layer within itself, as revolve has it, so that a plan
    takes forwards(layers, s) - layers seconds. With s checkpoints, the input among them, s - 1 values are
    held while an advance needs two more and a gradient, or a gradient one more and two gradients.
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
    return JointGraph.from_mappings(
        order, sizes, backward=["seed", *backward], backward_outputs=["g1"], seconds=seconds
    )


def taped(layers: int, record: int = 1) -> JointGraph:
    """Rotor's chain: a layer makes its record of its input in a second, and its output of the record.

    x_0 is the caller's; outputs and gradients take one byte, a record, its output included, ``record``; a
    record of a single byte is the output. The gradient of a layer takes two seconds, and reads input, record
    and output. Rotor writes gradients over one another: m of its bytes are m + 1 here. Where the record is
    the output, times are those of the mixed recurrence with s checkpoints in s + 3 bytes.
    """
    operands: dict[str, list[str]] = {"x0": []}
    for i in range(1, layers + 1):
        tape = {f"t{i}": [f"x{i - 1}"]} if record > 1 else {}
        operands |= tape | {f"x{i}": list(tape) or [f"x{i - 1}"]}
    operands["seed"] = []
    for i in range(layers, 0, -1):
        tapes = [f"t{i}"] if record > 1 else []
        operands[f"g{i}"] = [f"g{i + 1}" if i < layers else "seed", f"x{i - 1}", f"x{i}", *tapes]
    sizes = {name: record - 1 if name[0] == "t" else 1 for name in operands if name != "x0"}
    backward = [name for name in operands if name[0] in "sg"]
    each = {"t": 1.0, "g": 2.0} | ({"x": 1.0} if record == 1 else {})
    seconds = {name: each.get(name[0], 0.0) for name in operands}
    return JointGraph.from_mappings(
        operands, sizes, backward=backward, backward_outputs=["g1"], seconds=seconds
    )


@functools.cache
def mixed(layers: int, checkpoints: int) -> int:
    """Maddison's recurrence: forwards where a checkpoint may hold a value or a record of the same size."""
    if layers <= checkpoints + 1:
        return layers
    if checkpoints == 1:
        return layers * (layers + 1) // 2 - 1
    held = (i + mixed(i, checkpoints) + mixed(layers - i, checkpoints - 1) for i in range(2, layers))
    return min(1 + mixed(layers - 1, checkpoints - 1), *held)


@dataclass(frozen=True, slots=True)
class Known:
    """A chain, a budget, and the least seconds of a persistent plan within it.

    Attributes:
        name: The theory and its parameters.
        layers: How long the chain is.
        make: Makes the graph.
        budget: Bytes.
        seconds: What the best persistent plan takes.
        fixed: Seconds that the theory counts and the graph does not: the forwards within gradients.
    """

    name: str
    layers: int
    make: Callable[[], JointGraph]
    budget: int
    seconds: float
    fixed: float = 0.0

    def ratio(self, seconds: float) -> float:
        """Seconds as the theory counts them, over the optimum."""
        return (seconds + self.fixed) / (self.seconds + self.fixed)


REVOLVE = ((10, 2), (10, 3), (16, 3), (20, 3), (32, 4), (100, 5), (1000, 10))
MIXED = ((10, 3), (16, 4), (32, 4), (100, 10))
ROTOR = {  # layers, bytes: seconds, where a record is four times as large as a value
    **{(32, 6): 592, (32, 8): 189, (32, 10): 161, (32, 16): 135, (32, 28): 123},
    **{(100, 6): 5250, (100, 8): 790, (100, 12): 545, (100, 20): 459},
}


def known() -> list[Known]:
    """All chains with known optima."""
    found = [
        Known(
            f"revolve {n}, {s}",
            n,
            functools.partial(advancing, n),
            s + 2,
            forwards(n, s) - n,
            fixed=n,
        )
        for n, s in REVOLVE
    ]
    for n, s in MIXED:
        found.append(Known(f"mixed {n}, {s}", n, functools.partial(taped, n), s + 3, 2 * n + mixed(n, s)))
    for (n, m), seconds in ROTOR.items():
        found.append(Known(f"rotor {n}, {m}", n, functools.partial(taped, n, record=4), m + 1, seconds))
    return found


# --- Small graphs ---------------------------------------------------------------------------------------


def any_dag(seed: int) -> JointGraph:
    """A DAG of 8 to 14 nodes of different sizes and seconds, half of them in the backward; none is dead."""
    draw = random.Random(seed)
    names = [f"n{i}" for i in range(draw.randint(8, 14))]
    boundary = len(names) // 2 + draw.randint(-1, 2)
    operands: dict[str, list[str]] = {"x": []}
    for i, name in enumerate(names):
        operands[name] = draw.sample(names[:i], min(i, draw.randint(1, 3))) or ["x"]
    return _graph(draw, operands, names[:boundary], names[boundary:])


def training_step(seed: int) -> JointGraph:
    """A forward of 4 to 7 nodes with skips, and the backward that autograd would make of it."""
    draw = random.Random(seed)
    forward = [f"f{i}" for i in range(draw.randint(4, 7))]
    operands: dict[str, list[str]] = {"x": []}
    for i, name in enumerate(forward):
        skips = draw.sample(forward[:i], min(i, draw.randint(0, 2)))
        is_chained = i < 3 or draw.random() < 0.7 or not skips
        operands[name] = list(dict.fromkeys([*(forward[i - 1 : i] if is_chained else ()), *skips])) or ["x"]
    for name in reversed(forward):
        above = [f"g{each[1:]}" for each in forward if name in operands[each]]
        saved = [each for each in (*operands[name], name) if each != "x" and draw.random() < 0.7]
        operands[f"g{name[1:]}"] = [*above, *saved] or [name]
    return _graph(draw, operands, forward, [name for name in operands if name[0] == "g"])


def _graph(
    draw: random.Random, operands: dict[str, list[str]], forward: list[str], backward: list[str]
) -> JointGraph:
    """The graph with drawn sizes and seconds, what nobody reads being returned."""
    read = {operand for reads in operands.values() for operand in reads}
    unread = [name for name in backward if name not in read]
    return JointGraph.from_mappings(
        operands,
        {name: draw.choice((1, 1, 2, 3, 5, 8)) for name in (*forward, *backward)},
        forward_outputs=[name for name in forward if name not in read] or forward[-1:],
        backward_outputs=unread or backward[-1:],
        backward=backward,
        seconds={name: float(draw.choice((0, 1, 1, 2, 4, 9))) for name in (*forward, *backward)},
    )


DRAWN: dict[str, Callable[[int], JointGraph]] = {"any DAG": any_dag, "training step": training_step}


# --- What planners make of them -------------------------------------------------------------------------


def heuristic_points(graph: JointGraph) -> Points:
    """The plans of auto's search by itself, without those of other planners, and the graph's own order."""
    planning = make_problem(graph, fusion="none")
    small = condense(graph, planning.costs)
    tries = auto._tries(planning, len(graph.nodes))
    row = Row(small, tries, moves=auto._moves(planning, tries))
    plans = (tuple(range(len(small.operators))), *row.plans())
    return [(peak_bytes(small, plan), small.seconds(plan)) for plan in plans]


def planner_points(graph: JointGraph, planner: str) -> Points:
    """All solutions of a planner."""
    solutions = PLANNERS[planner](make_problem(graph, fusion="none"))
    return [(solution.peak_bytes, solution.seconds) for solution in solutions]


def within(points: Iterable[tuple[int, float]], budget: int) -> float:
    """The least seconds within a budget; infinite if nothing fits."""
    return min((seconds for peak, seconds in points if peak <= budget), default=math.inf)


def gaps(front: Points, points: Points) -> list[float]:
    """At each peak of a proved frontier, how much more the best of other plans takes; infinite if none fits.

    A share of the optimum; of graphs that take no time at all the seconds themselves.
    """
    return [(within(points, peak) - seconds) / (seconds or 1.0) for peak, seconds in front]


def summary(found: list[float]) -> dict[str, Any]:
    """Gaps in figures: how many, those that no plan fits, the mean and the worst of the others, the zeros."""
    finite = [each for each in found if each < math.inf]
    return {
        "budgets": len(found),
        "infeasible": len(found) - len(finite),
        "mean": sum(finite) / max(1, len(finite)),
        "worst": max(finite, default=0.0),
        "equal": sum(abs(each) < 1e-9 for each in finite) / max(1, len(found)),
    }
