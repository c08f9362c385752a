"""The plan with the least time that fits the budget, among all at hand.

The graph is condensed first (``search/condensed.py``), so that a plan is found and weighed in milliseconds.
Then, for each of a row of budgets between the least that a plan can be found for and what keeping everything
takes (``search/row.py``):

1. the dynamic programme over blocks (``search/tables.py``) has plans that fit;
2. ``evict`` runs through the operators under the budget, dropping what is cheapest to have again; a few times
   in two orders, with prices that lean to what the best plan so far recomputes, and with noise; where nothing
   is fused, and bytes are exact, in other orders that come of the best plan's as well;
3. the plan of the budget below is a start as well, so that more memory never costs time;
4. ``retain`` uses up what room is left by dropping recomputations.

The best of each budget is measured exactly, and plans are then improved by the whole model
(``search/refine.py``): the lowest ones, and those around the budgets that are asked for, or all. What is
found for a budget depends on it only in the ranges of peaks that it lies in; hence a smaller budget never
gives a higher peak. The plans of the simpler planners are starts too, and but for ``revolve``'s are measured
besides, so that none of theirs is better; of a large graph those are that nothing beats in the condensed
graph, and those of ``min_cut`` and ``revolve`` are left out, which take long; of a very large one, for the
least memory, only what seems lowest is weighed. Graphs of few operators have the plans of ``exact``. Work is
bounded in steps, not in seconds, so the same graph gives the same plan everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from fxremat.errors import InvalidOptionError
from fxremat.graph.collector import collector_paused
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.mirrors import placed
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import Schedule
from fxremat.planners import drop_cheap, keep_all, min_cut, recursive, revolve, sublinear
from fxremat.predict.problem import LEAST, Problem, Solution, pareto, progress
from fxremat.proof import search
from fxremat.search.baseline import default_plan
from fxremat.search.condensed import condense
from fxremat.search.profile import peak_bytes
from fxremat.search.refine import lower, refine, refine_around
from fxremat.search.replay import followed
from fxremat.search.row import Row

MAX_TRIES, FEW_NODES = 160, 2000  # plans that are tried for a graph of so many nodes; fewer for larger ones
ENOUGH_TRIES = 64  # for each variant of the condensed graph, and for the plans of other planners
TRIES_BESIDE = 16  # for one variant, with which another has a few plans as well
REFINED, REFINED_NODES = 0.4, 600  # plans that are refined for a try, and in graphs of up to so many nodes
MOVED_NODES = 200  # in graphs of up to so many nodes an order is tried for each try, if no kernels are fused
MOVES_PER_BUDGET = 0.05  # orders that are tried for each budget, as a part of those for the least
LOWERED, AROUND = 0.4, 0.8  # plans that are weighed for a try: for the least peak, and around a budget
STEPS_PER_SECOND = 150_000  # nodes whose part in a plan is tried in a second, on one core of a Zen 4 at 4 GHz
MAX_PROVED, MAX_PROVED_STATES = 16, 3000  # operators, and states opened, of graphs whose frontier is proved
STEPS_OF_REVOLVE = 30_000  # of its plans together, which are starts
MAY_BE_LEAST = 1.25  # how much higher than the lowest plan weighed another may seem that could be lower
MOST_SEEMING = 4  # of these: how many are weighed, those that seem lowest


@collector_paused()
def plan(problem: Problem) -> tuple[Solution, ...]:
    """The default, which serves no budget at all, then the frontier by falling peak."""
    default = default_plan(problem)
    graph, variants = problem.graph, _variants(problem, default)
    tries = _tries(problem, len(graph.nodes))
    has_time = tries >= ENOUGH_TRIES
    recipes = _recipes(problem) if has_time else ()
    known = [_nodes(graph, each.schedule) for each in recipes]
    if problem.budgets != () and not has_time:
        known = _starts(problem)
    reach = MAY_BE_LEAST if not tries and problem.budgets == (LEAST,) else math.inf
    seeming: dict[Schedule, int] = {}  # the peaks that plans seem to have in the condensed graph
    copies = problem.model.on(graph).copies(graph, problem.lowered(default)[0])
    for (inlined, joins_calls), share in zip(variants, _shares(problem, tries, len(variants)), strict=False):
        condensed = condense(graph, problem.costs, problem.model, inlined, joins_calls, copies)
        starts = [followed(condensed, each) for each in known]
        row = Row(condensed, share, starts, reach, _moves(problem, tries))
        for operators in row.plans():
            seeming.setdefault(condensed.schedule(operators), peak_bytes(condensed, operators))
    found = list(_weighed(problem, seeming, reach))
    if not found:
        found.append(problem.identity("auto"))
    if has_time:
        found += recipes
        others = revolve.schedules(problem, STEPS_OF_REVOLVE)
        lowest = sorted(
            others, key=lambda each: peak_bytes(condensed, followed(condensed, _nodes(graph, each)))
        )
        found += [problem.evaluate(each, "revolve") for each in lowest[:MOST_SEEMING]]
    found += [default, *_proved(problem, len(condensed.operators))]
    if problem.budgets is None:
        found = improved(problem, found, None)
    elif problem.budgets:
        for budget in problem.budgets:
            found += refine_around(problem, found, budget, round(AROUND * tries), round(LOWERED * tries))
    return (default, *pareto(found))


@collector_paused()
def improved(problem: Problem, known: Sequence[Solution], budget: int | None) -> list[Solution]:
    """Plans that come of others by the whole memory model alone, and what is worth being kept of these.

    Args:
        problem: The problem.
        known: Plans of it.
        budget: Bytes; None for plans of all peaks.
    """
    nodes = len(problem.graph.nodes)
    tries, found = _tries(problem, nodes), list(known)
    if budget is None or min(each.peak_bytes for each in known) > budget:
        found += lower(problem, found, round(LOWERED * tries))
    if budget is not None:
        return refine_around(problem, found, budget, round(AROUND * tries))
    part = min(1.0, REFINED_NODES / max(1, nodes))
    return found + refine(problem, found, round(REFINED * tries * part))


def _weighed(problem: Problem, seeming: Mapping[Schedule, int], reach: float) -> Iterator[Solution]:
    """The plans that obey, without those that seem so much higher than the lowest one that was weighed."""
    least = math.inf
    lowest_first = sorted(seeming, key=lambda each: seeming[each])
    for schedule in progress(lowest_first, "weighing plans"):
        if seeming[schedule] > reach * least:
            return
        found = problem.evaluate_needed(schedule, "auto")
        if problem.allows(found.schedule):
            least = min(least, found.peak_bytes)
            yield found


def _recipes(problem: Problem) -> tuple[Solution, ...]:
    """The plans of the planners that follow a recipe, but for ``revolve``'s: too many to start from."""
    recipes = (keep_all, drop_cheap, min_cut, sublinear, recursive)
    return tuple(itertools.chain.from_iterable(each.plan(problem) for each in recipes))


def _nodes(graph: JointGraph, schedule: Schedule) -> Sequence[int]:
    """The nodes of a schedule."""
    return [graph.index[name] for name in schedule]


def _starts(problem: Problem) -> list[Sequence[int]]:
    """The nodes that the plans of the same run but for ``min_cut``'s, and not what they take."""
    graph = problem.graph
    counts = [{}, drop_cheap.mirror_counts(problem), *sublinear.mirror_counts(graph)]
    counts += (each for cuts in recursive.CUTS_PER_PART for each in recursive.mirror_counts(graph, cuts))
    return [placed(graph, each) for each in counts]


def _tries(problem: Problem, nodes: int) -> int:
    """How many plans may be tried: as the time limit says, else fewer the larger the graph is."""
    if problem.time_limit_seconds is not None:
        return round(problem.time_limit_seconds * STEPS_PER_SECOND / max(1, nodes))
    return int(MAX_TRIES * min(1.0, FEW_NODES / max(1, nodes)) ** 1.5)


def _shares(problem: Problem, tries: int, variants: int) -> list[int]:
    """The tries for each variant: equal parts where these are enough, else all for the first.

    The others then have a few plans without tries, unless none are asked for or the graph is very large.
    """
    equal = max(1, min(variants, tries // ENOUGH_TRIES))
    has_others = problem.budgets != () and tries >= TRIES_BESIDE
    return [tries // equal] * equal + [0] * (variants - equal) * has_others


def _moves(problem: Problem, tries: int) -> tuple[int, int]:
    """How many orders are tried for the least budget, and for each other: where bytes are exact."""
    if problem.model.on(problem.graph).fuses:
        return 0, 0
    moves = min(tries, MAX_TRIES) * min(1.0, MOVED_NODES / max(1, len(problem.graph.nodes)))
    return round(moves), round(MOVES_PER_BUDGET * moves)


def _proved(problem: Problem, operators: int) -> tuple[Solution, ...]:
    """The proved frontier of a small graph; nothing where a search would take long."""
    if operators > MAX_PROVED:
        return ()
    try:
        return search.plan(problem, MAX_PROVED_STATES)
    except InvalidOptionError:  # it gave up, or has no say under this memory model
        return ()


def _variants(problem: Problem, default: Solution) -> list[tuple[frozenset[int], bool]]:
    """The graph as it is condensed: nodes without a buffer, and whether neighbouring loops run in one call.

    What is kept for the backward has a buffer. Computed again, it may be part of what reads it, in the
    forward as well: so said of a plan that computes all again that is cheap. Other values are worth keeping.
    On a CPU it is the one in which neighbouring loops run in one call, as far as no plan ends it.
    """
    if not problem.model.on(problem.graph).fuses:
        return [(frozenset(), False)]
    (cheap,) = drop_cheap.plan(problem)
    variants = (_inlined(problem, cheap), False), (_inlined(problem, default), problem.graph.is_on_cpu)
    return list(dict.fromkeys(variants))


def _inlined(problem: Problem, solution: Solution) -> frozenset[int]:
    """The pointwise nodes that get no buffer at any step of a plan, as a compiler lowers it."""
    graph = problem.graph
    binding, lowering = problem.lowered(solution)
    steps = zip(binding.nodes, lowering.materialised, strict=True)
    stored = {node for node, is_stored in steps if is_stored}
    return frozenset(
        node
        for node in binding.nodes
        if node not in stored
        and graph.loops[node].kind is Kind.POINTWISE
        and graph.nodes[node].phase is not Phase.INPUT
    )
