"""The strategies that the paper compares (Chen et al. 2016, Sec. 5), and the memory that each takes.

Terms:
    strategy: a planner and an allocation. The first three recompute nothing and differ in the static
        allocation (Sec. 3): every value its own bytes, in place, in place and sharing. The others plan
        recomputation and share.
    parameter gradients: what the joint graph returns, and the partial sums that it is added up from.
        They live on when the step ends, and are as large whatever is recomputed.
    feature maps: everything else that a step allocates: values of the forward, gradients with respect to
        them, and single contributions to a parameter's gradient. As in the paper, parameters and an
        operator's scratch memory are no part of it, and parameter gradients belong to the parameters.

Linear in nodes, apart from the planners.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxremat.arena.allocate import allocate
from fxremat.device.rates import CUDA
from fxremat.driver.pipeline import choose
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase
from fxremat.planners import PLANNERS, Planner, recursive
from fxremat.predict.cost import roofline
from fxremat.predict.problem import Problem, Solution

__all__ = ["NAMES", "Planned", "Strategy", "plan_strategies", "strategies_for"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a strategy is made.

    Attributes:
        name: What tables call it.
        planner: A name of `PLANNERS`; "recursive" stands for k = 1 here.
        allocation: ``"none"``, ``"in-place"`` or ``"sharing"``.
        within: The strategy whose predicted peak is the budget; None for the least peak.
    """

    name: str
    planner: str
    allocation: str = "sharing"
    within: str | None = None


_STRATEGIES = (
    Strategy("none", "keep_all", "none"),
    Strategy("in-place", "keep_all", "in-place"),
    Strategy("sharing", "keep_all"),
    Strategy("drop bn-relu", "drop_cheap"),
    Strategy("sublinear", "sublinear"),
    Strategy("recursive", "recursive"),
    Strategy("auto", "auto"),
    Strategy("auto at sublinear's peak", "auto", within="sublinear"),
)
NAMES = tuple(strategy.name for strategy in _STRATEGIES)
_PLANS: dict[str, Planner] = {
    **PLANNERS,
    "recursive": functools.partial(recursive.with_cuts, cuts_per_part=1),
}
_CONVOLUTIONAL = "drop bn-relu"  # the paper has it for networks of convolutions only


@dataclass(frozen=True, slots=True)
class Planned:
    """What a strategy is predicted to take.

    Attributes:
        strategy: Its name.
        feature_map_bytes: The static allocation without parameter gradients.
        total_bytes: The static allocation with them.
        peak_bytes: The most bytes live at one step, with them; no allocation takes less.
        seconds: Predicted time of a step on a GPU.
        planning_seconds: How long planning took; 0 where the plan is that of an earlier strategy.
    """

    strategy: str
    feature_map_bytes: int
    total_bytes: int
    peak_bytes: int
    seconds: float
    planning_seconds: float


def strategies_for(convolutional: bool) -> tuple[Strategy, ...]:
    """The strategies that make sense for a network, in the paper's order."""
    return tuple(each for each in _STRATEGIES if convolutional or each.name != _CONVOLUTIONAL)


def plan_strategies(
    graph: JointGraph, strategies: Iterable[Strategy], begin: Callable[[str], object] = lambda name: None
) -> tuple[Planned, ...]:
    """Plan a graph by each strategy, and allocate its plan.

    Args:
        graph: The joint graph, of tensors of the paper's device or fake ones.
        strategies: Which; one that is another's budget stands before it.
        begin: Is told the name of each strategy before it is planned.
    """
    problem = Problem(graph, roofline(graph, CUDA), "none")
    allocated = functools.cache(functools.partial(_feature_map_and_total_bytes, graph))
    solved: dict[str, tuple[Solution, ...]] = {}
    found: dict[str, Planned] = {}
    for strategy in strategies:
        begin(strategy.name)
        start = time.perf_counter()
        if strategy.planner not in solved:
            solved[strategy.planner] = _PLANS[strategy.planner](problem)
        planning_seconds = time.perf_counter() - start
        solution = _chosen(problem, solved[strategy.planner], found.get(strategy.within or ""))
        found[strategy.name] = Planned(
            strategy.name,
            *allocated(solution.schedule, strategy.allocation),
            solution.peak_bytes,
            solution.seconds,
            planning_seconds,
        )
    return tuple(found.values())


def _chosen(problem: Problem, solutions: Sequence[Solution], within: Planned | None) -> Solution:
    """The solution of least peak, or the fastest within another strategy's peak."""
    if within is None:
        return choose(problem, solutions, "min", None)
    return choose(problem, solutions, within.peak_bytes, within.peak_bytes)


# --- Static allocation --------------------------------------------------------------------------------


def _feature_map_and_total_bytes(
    graph: JointGraph, schedule: Sequence[str], allocation: str
) -> tuple[int, int]:
    without = without_parameter_gradients(graph, allocation)
    return arena_bytes(without, schedule, allocation), arena_bytes(graph, schedule, allocation)


def arena_bytes(graph: JointGraph, schedule: Sequence[str], allocation: str) -> int:
    """Bytes of a schedule's static allocation."""
    return allocate(graph, schedule, strategy=allocation).arena_bytes


# --- Parameter gradients ------------------------------------------------------------------------------


def without_parameter_gradients(graph: JointGraph, allocation: str) -> JointGraph:
    """The graph in which parameter gradients take no bytes; partial sums do where nothing is in place."""
    sizes = list(graph.storage_bytes)
    for storage in parameter_gradients(graph, in_place=allocation != "none"):
        sizes[storage] = 0
    return replace(graph, storage_bytes=tuple(sizes))


def parameter_gradients(graph: JointGraph, in_place: bool) -> tuple[int, ...]:
    """The storages of the gradients that the graph returns, and in place of the partial sums that they end.

    A parameter that is used at every step of an unrolled network has one contribution per step. They are
    added up one by one, ``add = mm + mm_1; add_1 = add + mm_2``: mm, add and add_1 can share a buffer.
    """
    maker = {storage: index for index, node in enumerate(graph.nodes) for storage in node.creates}
    found: dict[int, None] = {}
    for output in graph.backward_outputs:
        for storage in graph.nodes[output].views if output is not None else ():
            found.update(dict.fromkeys(_partial_sums(graph, maker, storage) if in_place else (storage,)))
    return tuple(found)


def _partial_sums(graph: JointGraph, maker: Mapping[int, int], storage: int) -> Iterable[int]:
    """A storage, and the partial sums behind it, the first contribution included."""
    following: int | None = storage
    while following is not None:
        yield following
        following = _sum_before(graph, maker, following)


def _sum_before(graph: JointGraph, maker: Mapping[int, int], storage: int) -> int | None:
    """What a sum is added up from: the operand that is a sum or else runs first, if it alone reads it."""
    if not _is_sum(graph, maker[storage]):
        return None
    for term in sorted(graph.nodes[maker[storage]].operands, key=lambda term: not _is_sum(graph, term)):
        node = graph.nodes[term]
        made = maker[node.views[0]] if node.phase is Phase.BACKWARD and node.views else term
        is_ours = _is_read_by(graph, made, maker[storage])
        if is_ours and graph.node_bytes(made) == graph.storage_bytes[storage]:
            return graph.nodes[made].creates[0]
    return None


def _is_read_by(graph: JointGraph, node: int, reader: int) -> bool:
    """Whether a node alone reads another one's value, maybe through views of it."""
    while node != reader and len(graph.users[node]) == 1:
        (node,) = graph.users[node]
        if node != reader and graph.nodes[node].shares is None:
            return False
    return node == reader


def _is_sum(graph: JointGraph, node: int) -> bool:
    """Whether the node adds two values of the backward."""
    is_add = bool(graph.fx_nodes) and ops.packet(graph.fx_nodes[node]) is ops.aten.add
    return is_add and graph.nodes[node].phase is Phase.BACKWARD
