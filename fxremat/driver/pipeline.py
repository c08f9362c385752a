"""The pipeline: the stages in order.

    JointGraph -> problem -> solutions -> choice -> rewrite -> partition -> (forward, backward) + Report

The stages up to the choice are those of every way to ask: ``plan`` and ``frontier``, the command line, the
backend. Everything that decides is a pure function of its arguments; the same graph and options give the same
plan.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxremat._torch import partitioners
from fxremat.emit.partition import partition
from fxremat.emit.rewrite import rewrite
from fxremat.emit.views import let_views_copy
from fxremat.emit.writes import read_again
from fxremat.episode.trace import Candidate
from fxremat.errors import InfeasibleBudgetError, InvalidOptionError, ScheduleError, shown
from fxremat.graph.collector import collector_paused
from fxremat.graph.joint import JointGraph, check_graph
from fxremat.graph.signature import device_title, signature
from fxremat.graph.simplify import simplify
from fxremat.inductor.facts import mark
from fxremat.inductor.images import work_alike
from fxremat.inductor.operands import arrange_operands
from fxremat.inductor.order import order_recomputation
from fxremat.inductor.sequences import store_as_read
from fxremat.options.options import (
    Budget,
    GivenPlanner,
    Options,
    check_planner,
    check_time_limit,
    resolve_budget,
)
from fxremat.planfile.contents import PlanFile
from fxremat.planners import PLANNERS
from fxremat.predict.cost import costs
from fxremat.predict.models import MemoryModel, model
from fxremat.predict.problem import LEAST, PEAK_AND_SECONDS, Problem, Solution, margin, pareto, progress
from fxremat.proof.bounds import Bounds
from fxremat.report.report import Made, Report, make_report
from fxremat.search.baseline import baseline_plan

SECONDS_WITHOUT_BUDGET = 0.1  # that ``auto`` searches where the default plan, or nearly that, is wanted

_RETURNED = "mirror counts by node name, a schedule (names of nodes in order), a Solution, or several"


@collector_paused()
def make_problem(
    graph: JointGraph,
    cost: str | Mapping[str, float] = "roofline",
    fusion: str = "inductor",
    static_inputs: Sequence[int] = (),
    time_limit_seconds: float | None = None,
) -> Problem:
    """The planning problem of a graph.

    Its graph is the one with layouts and scratch bytes as they are at run time, which depend on the memory
    model: so they are found here, and not when the graph is captured, which runs nothing. Scratch bytes that
    the graph has count as they are.
    """
    check_graph(graph)
    memory = model(fusion)
    graph = as_run(graph, memory)
    limit = check_time_limit(time_limit_seconds)

    @functools.cache
    def min_cut_saved() -> Sequence[str]:
        assert graph.module is not None
        return partitioners.min_cut_saved(graph.module, len(graph.forward_outputs), static_inputs)

    return Problem(graph, costs(graph, cost, memory.on(graph).fuses), memory.name, min_cut_saved, limit)


def as_run(graph: JointGraph, memory: MemoryModel) -> JointGraph:
    """The graph with values that lie as they do when it runs, and with its operators' scratch bytes.

    Each distinct operator is run once, alone, if its device is there (``device/calibrate.py``).
    """
    return graph if graph.scratch_bytes or graph.module is None else memory.as_run(graph)


def plan(
    graph: JointGraph,
    budget: Budget = None,
    planner: GivenPlanner = "auto",
    cost: str | Mapping[str, float] = "roofline",
    fusion: str = "inductor",
    time_limit_seconds: float | None = None,
) -> Solution:
    """The least-time solution of a planner whose predicted peak fits the budget.

    Args:
        graph: The joint graph.
        budget: None, bytes, ``"8GiB"``, a fraction of the peak without fxremat, or ``"min"``.
        planner: A name of ``fxremat.PLANNERS``; a callable that takes a Problem and returns a Solution,
            several, a schedule, or mirror counts; or one whose only parameter is called ``node``, that
            takes a node of the forward (an ``fx.Node``) and returns its mirror count.
        cost: ``"roofline"``, ``"measured"``, or seconds by node name.
        fusion: The memory model: ``"inductor"``; ``"inplace"``, which is the backend's for
            ``compiler="eager"``; or ``"none"``, where every value has a buffer of its own.
        time_limit_seconds: About how long ``"auto"`` may search. The limit is counted in steps, so that the
            plan is the same on every machine; None stands for a few seconds, less per node for large graphs.
            For ``"exact"`` it limits the seconds of its proofs, and None stands for 60.

    Raises:
        InfeasibleBudgetError: None of the planner's solutions fits.
        InvalidOptionError: An option has no such value.
    """
    limit = _time_limit(budget, planner, time_limit_seconds)
    problem = make_problem(graph, cost, fusion, time_limit_seconds=limit)
    return decide(problem, budget, planner).solution


def make_plan(graph: JointGraph, **options: Any) -> PlanFile:
    """The plan of a captured graph, to be saved to a file and applied where the model is compiled.

    Args:
        graph: The joint graph, captured with the same ``compiler``.
        **options: As for the backend.

    Raises:
        InfeasibleBudgetError: No plan fits the budget.
        InvalidOptionError: An option or its value is unknown, or is none of a graph that is captured.

    Example:
        >>> import torch; from fxremat import capture
        >>> graph = capture(torch.nn.Linear(4, 2), torch.randn(3, 4), loss=torch.sum, compiler="inductor")
        >>> made = make_plan(graph, budget="min")
        >>> [plan.name for plan in made.graphs], made.graphs[0].solution.peak_bytes > 0
        (['Linear'], True)
    """
    parsed = Options.parse(options)
    if parsed.ignore_checkpoints:
        raise InvalidOptionError("ignore_checkpoints", "is for fxremat.capture, which makes the graph.")
    return PlanFile.of(planned(graph, parsed))


def frontier(
    graph: JointGraph,
    planner: GivenPlanner = "auto",
    cost: str | Mapping[str, float] = "roofline",
    fusion: str = "inductor",
    time_limit_seconds: float | None = None,
) -> tuple[Solution, ...]:
    """The solutions that budgets are served from: no other of the planner's beats one in both peak and time.

    Args:
        graph: The joint graph.
        planner: As for ``plan``.
        cost: As for ``plan``.
        fusion: As for ``plan``.
        time_limit_seconds: As for ``plan``.

    Returns:
        Solutions with strictly falling peak and strictly rising time, each with the bound for its own peak.

    Raises:
        InvalidOptionError: An option has no such value.
    """
    problem = make_problem(graph, cost, fusion, time_limit_seconds=time_limit_seconds)
    bounds = bounds_of(problem)
    front = pareto(solve(problem, planner))
    return tuple(bounded(problem, bounds, each) for each in progress(front, "bounding seconds"))


def _time_limit(budget: Budget, planner: GivenPlanner, time_limit_seconds: float | None) -> float | None:
    """The seconds of a search: little where ``auto`` is not asked for more than the default plan."""
    if time_limit_seconds is None and budget is None and planner == "auto":
        return SECONDS_WITHOUT_BUDGET
    return time_limit_seconds


def solve(problem: Problem, planner: GivenPlanner) -> tuple[Solution, ...]:
    """The solutions of a planner, the one first that it prefers without a budget.

    Raises:
        InvalidOptionError: There is no such planner, or a callable takes or returns something else.
        ScheduleError: What a callable returns is no execution of the graph.
    """
    planner = check_planner(planner)
    if isinstance(planner, str):
        return PLANNERS[planner](problem)
    name = str(getattr(planner, "__name__", type(planner).__name__))
    if _takes_nodes(planner, name):
        returned: object = {node.name: planner(node) for node in _forward(problem.graph)}
    else:
        returned = planner(problem)
    return _as_solutions(problem, returned, name)


def _takes_nodes(planner: Callable[..., Any], name: str) -> bool:
    """Whether a planner is a function from a node to its mirror count: its only parameter is ``node``."""
    try:
        signature = inspect.signature(planner)
    except (TypeError, ValueError):
        return False  # a callable without a signature
    try:
        signature.bind(None)
    except TypeError as error:
        expected = "one argument: the Problem, or one called node"
        raise InvalidOptionError("planner", f"{name!r} takes {signature}, expected {expected}.") from error
    return list(signature.parameters) == ["node"]


def _forward(graph: JointGraph) -> Sequence[Any]:
    """The nodes of the forward, as fx nodes where there are any."""
    nodes: Sequence[Any] = graph.fx_nodes or graph.nodes
    return nodes[graph.num_inputs : graph.boundary]


def _as_solutions(problem: Problem, returned: object, name: str) -> tuple[Solution, ...]:
    """What a planner of the user's returned, as solutions that are valid and have this problem's figures."""
    try:
        if isinstance(returned, Mapping):
            return (problem.mirror(returned, name),)
        items = (returned,) if isinstance(returned, Solution) else _items(returned)
        if items and all(isinstance(item, Solution) for item in items):
            return tuple(_checked(problem, item) for item in items)
        if items and all(isinstance(item, str) for item in items):
            return (problem.check(problem.evaluate(items, name)),)
    except ScheduleError as error:
        raise ScheduleError(error.node, error.step, error.problem, name) from error
    raise InvalidOptionError("planner", f"{name!r} returned {shown(returned)}, expected {_RETURNED}.")


def _items(returned: object) -> tuple[Any, ...]:
    """What a sequence or a generator holds; nothing for what is none, or has no order."""
    if isinstance(returned, (str, Set)):
        return ()
    try:
        iterator = iter(returned)  # type: ignore[call-overload]
    except TypeError:
        return ()
    return tuple(iterator)


def _checked(problem: Problem, solution: Solution) -> Solution:
    """The solution with the figures of this problem, for which it may not have been made."""
    found = problem.check(problem.evaluate(solution.schedule, solution.planner))
    return replace(found, note=solution.note)


@dataclass(frozen=True, slots=True)
class Choice:
    """The solution that serves a budget, beside what it was chosen from.

    Attributes:
        problem: What was to be solved.
        baseline: What runs without fxremat.
        budget_bytes: The budget; None where it is no number of bytes.
        solutions: All that the planner found, the one first that it prefers without a budget.
        bounds: What no solution undercuts.
        solution: The one that was chosen, with the bound on the seconds of all that serve the budget.
        candidates: The plans for a step of several graphs; empty where the graph has its own budget.
        is_default: Whether the plan that serves a budget is the one that is preferred without. It is for
            ``"min"`` only where its code is read.
    """

    problem: Problem
    baseline: Solution
    budget_bytes: int | None
    solutions: tuple[Solution, ...]
    bounds: Bounds
    solution: Solution
    candidates: tuple[Candidate, ...] = ()
    is_default: bool = False

    @property
    def as_run(self) -> Problem:
        """The problem as the solution was weighed, and will run."""
        return self.problem.as_usual if self.is_default else self.problem


def decide(
    problem: Problem,
    budget: Budget,
    planner: GivenPlanner,
    within_bytes: int | None = None,
    is_exact: bool = False,
) -> Choice:
    """The choice of a planner's solution for a budget.

    Args:
        problem: The problem.
        budget: As for ``plan``.
        planner: As for ``plan``.
        within_bytes: A predicted peak that the solution is to keep besides the budget; if none does, the one
            with the lowest peak is taken.
        is_exact: Whether nothing of the budget is left free for the error of the prediction; a budget that
            the solution without one fits changes nothing then.

    Raises:
        InfeasibleBudgetError: No solution fits the budget.
        InvalidOptionError: There is no such budget or planner.
    """
    baseline = baseline_plan(problem)
    budget_bytes = resolve_budget(budget, baseline.peak_bytes)
    allowed = _allowed(problem, budget_bytes, is_exact)
    asked = _asked(problem, budget, allowed if within_bytes is None else within_bytes)
    solutions, bounds = solve(asked, planner), bounds_of(problem)
    preferred = problem.as_usual.evaluate(solutions[0].schedule, solutions[0].planner)
    is_ample = is_exact and budget_bytes is not None and preferred.peak_bytes <= budget_bytes
    if within_bytes is not None:
        front = pareto(solutions)
        chosen = next((each for each in front if each.peak_bytes <= within_bytes), front[-1])
    elif budget is None or is_ample:
        chosen = replace(preferred, note=solutions[0].note)
    else:
        chosen = choose(problem, solutions, budget, budget_bytes, is_exact)
    solution = bounded(problem, bounds, chosen, allowed)
    is_alike = PEAK_AND_SECONDS(chosen) == PEAK_AND_SECONDS(preferred)
    is_default = is_alike and chosen.schedule == preferred.schedule and (budget != "min" or is_exact)
    return Choice(problem, baseline, budget_bytes, solutions, bounds, solution, is_default=is_default)


def _asked(problem: Problem, budget: Budget, peak_bytes: int | None) -> Problem:
    """The problem with the peak that a plan is asked for; none without a budget."""
    in_words = (LEAST,) if budget == "min" else ()
    return replace(problem, budgets=in_words if peak_bytes is None else (peak_bytes,))


def choose(
    problem: Problem,
    solutions: Sequence[Solution],
    budget: Budget,
    budget_bytes: int | None,
    is_exact: bool = False,
) -> Solution:
    """The solution that serves a budget: the preferred, the lowest, or the fastest that fits.

    Args:
        problem: The problem.
        solutions: What the planner found.
        budget: As for ``plan``.
        budget_bytes: The same in bytes; None where it is no number.
        is_exact: Whether nothing of the budget is left free for the error of the prediction.
    """
    if budget is None:
        return solutions[0]
    front = pareto(solutions)
    allowed = _allowed(problem, budget_bytes, is_exact)
    if budget_bytes is None or allowed is None:
        return front[-1]
    fitting = [solution for solution in front if solution.peak_bytes <= allowed]
    if not fitting:
        found = front[-1].peak_bytes
        proved = min(found, bounds_of(problem).lowest_peak_bytes)
        lowest, bound = (least_budget(problem, peak, is_exact) for peak in (found, proved))
        raise InfeasibleBudgetError(budget_bytes, lowest, problem.graph.name, bound)
    return fitting[0]


def _allowed(problem: Problem, budget_bytes: int | None, is_exact: bool) -> int | None:
    """The predicted peak that a budget allows."""
    if budget_bytes is None or is_exact:
        return budget_bytes
    return int(budget_bytes * (1 - margin(problem)))


def least_budget(problem: Problem, peak_bytes: int, is_exact: bool = False) -> int:
    """The least budget in bytes that allows a predicted peak."""
    return peak_bytes if is_exact else int(-(-peak_bytes // (1 - margin(problem))))


def bounds_of(problem: Problem) -> Bounds:
    """What no schedule of the problem undercuts."""
    return Bounds(problem.graph, problem.costs, problem.model)


def bounded(
    problem: Problem, bounds: Bounds, solution: Solution, allowed_bytes: int | None = None
) -> Solution:
    """The solution with the bound on the seconds of all with the peak that is allowed, or with its own."""
    within = solution.peak_bytes if allowed_bytes is None else allowed_bytes
    least = bounds.seconds(max(within, solution.peak_bytes))
    return replace(solution, lower_bound_seconds=min(least, solution.seconds))


def planned(
    graph: JointGraph,
    options: Options,
    static_inputs: Sequence[int] = (),
    choose_plan: Callable[[Problem], Choice] | None = None,
) -> Report:
    """The report of a graph that is planned; its ``solution`` is the plan.

    Args:
        graph: The joint graph.
        options: The user's options.
        static_inputs: Positions of the inputs whose memory stays in place.
        choose_plan: Takes the plan; by default it is chosen for the options' budget.

    Raises:
        FxrematError: One of the family.
    """
    start = time.perf_counter()
    limit = _time_limit(options.budget, options.planner, options.time_limit_seconds)
    problem = make_problem(graph, options.cost, options.fusion, static_inputs, limit)
    if choose_plan is None:
        choose_plan = functools.partial(decide, budget=options.budget, planner=options.planner)
    choice = choose_plan(problem)
    problem = choice.as_run  # what its code has shown of the graph may be known by now
    report = make_report(
        problem,
        problem.model.profile(problem.graph, choice.solution.schedule),
        choice.solution,
        choice.baseline,
        compiler=options.compiler,
        budget=options.budget,
        budget_bytes=choice.budget_bytes,
        lowest_peak_bytes=min(each.peak_bytes for each in choice.solutions),
        lowest_peak_lower_bound_bytes=choice.bounds.lowest_peak_bytes,
        planning_seconds=time.perf_counter() - start,
        solutions=choice.solutions,
        settings=options.settings,
    )
    made = Made(device_title(problem.graph), options.deciding, signature(problem.graph))
    return replace(report, notes=(*report.notes, *_notes(problem)), made=made)


def _notes(problem: Problem) -> Sequence[str]:
    """What is to be known about the problem's costs."""
    count, nodes = problem.costs.untimed, len(problem.graph.nodes) - problem.graph.num_inputs
    if count == 0:
        return ()
    return (f"{count} of {nodes} nodes could not be timed alone; their seconds are the roofline's",)


def rewritten(
    module: fx.GraphModule,
    num_forward_outputs: int,
    options: Options,
    name: str,
    static_inputs: Sequence[int] = (),
    choose_plan: Callable[[Problem], Choice] | None = None,
) -> tuple[JointGraph, Report]:
    """The joint graph of a plan, mirrors included, and the report.

    Args:
        module: The joint fx graph.
        num_forward_outputs: How many of its outputs belong to the forward.
        options: The user's options.
        name: What reports call it.
        static_inputs: As for ``planned``.
        choose_plan: As for ``planned``.

    Raises:
        FxrematError: One of the family; the module has at most been simplified then.
    """
    if options.ignore_checkpoints:
        module = partitioners.without_checkpoints(module)
    is_lowered = options.compiler == "inductor"
    simplify(module, fuses=is_lowered)
    graph = JointGraph.from_fx(module, num_forward_outputs, name=name, redraws=not is_lowered)
    graph = as_run(graph, model(options.fusion))
    report = planned(graph, options, static_inputs, choose_plan)
    if is_lowered:
        mark(graph)
    planned_graph = rewrite(graph, report.solution.schedule)
    return planned_graph, replace(report, reads_again=read_again(planned_graph))


def split(
    graph: JointGraph, options: Options, is_as_usual: bool = False
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a rewritten graph, as its compiler takes them.

    Args:
        graph: The graph of the plan.
        options: The user's options.
        is_as_usual: Whether it is to be compiled as it would be without a budget.
    """
    is_lowered = options.compiler == "inductor"
    inplace = options.inplace and options.compiler == "eager"
    forward, backward = partition(graph, inplace, is_lowered, is_lowered and not is_as_usual)
    if is_lowered:
        work_alike(forward, backward)
        order_recomputation(backward)
        for part in (forward, backward):
            store_as_read(part)
            arrange_operands(part)
    else:
        let_views_copy(forward)
        let_views_copy(backward)
    return forward, backward
