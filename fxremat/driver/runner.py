"""Runner: a graph of Dynamo's in a step, with all plans that it is compiled with.

What Dynamo calls. Each call runs the plan that the step has for it (``step/step.py``), and a plan is compiled
when a call runs it for the first time: by then Dynamo has made sure that the world is as it was when the
graph was traced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxremat._torch import autograd, compilers, fakes, graphs
from fxremat.driver import frames, policy
from fxremat.driver.compilation import Compilation
from fxremat.driver.partitioner import Partitioner
from fxremat.driver.pipeline import Choice
from fxremat.driver.policy import Asked, Asking, Cautious, Given, MaybeAlone, Policy, WithinBudget
from fxremat.episode.candidates import candidate
from fxremat.episode.room import Room
from fxremat.episode.tailor import plans_for
from fxremat.episode.trace import Candidate, Prospects
from fxremat.errors import FxrematError, InfeasibleBudgetError, ScheduleError
from fxremat.graph.schedule import Schedule, bind
from fxremat.inductor.learning import learn
from fxremat.options.options import Options, is_size, resolve_budget
from fxremat.planners import auto
from fxremat.predict.problem import Problem
from fxremat.report.report import Report
from fxremat.step.step import Episode, Run, steps

MAX_LOOKS = 2  # for a plan whose peak is right, when it turns out where the step's peak is then

_numbers = itertools.count()

Compile = Callable[[fx.GraphModule, Sequence[Any], Compilation], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Variant:
    """A graph, compiled with one plan."""

    compiled: Callable[..., Any]
    compilation: Compilation


class Runner:
    """A graph of Dynamo's that shares its budget with the others of a step.

    Attributes:
        number: Tells it from other graphs of the process.
        key: The same in another process that runs it under the same options; None for a planner that has no
            name.
        name: What reports call it.
        options: The user's options.
        device: Where it runs.
        sizes: The numbers that its plans are for in place of symbols; empty for those it was traced with.
        variants: Its compiled plans.
    """

    def __init__(
        self,
        origin: compilers.Origin,
        options: Options,
        fingerprint: str,
        name: str,
        compile_: Compile,
        sizes: Mapping[Any, int] | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.key = _key(origin, options, fingerprint)
        self.options = options
        self.name = name
        self.sizes = sizes or {}
        self.device = _device(origin)
        self.variants: dict[Schedule, Variant] = {}
        self._fingerprint = fingerprint
        self._compile = compile_
        self._origin = origin
        self._prospects: Prospects
        self._is_stored = False
        self._problem: Problem | None = None
        self._tailored: list[Candidate] = []
        self._heard: set[Schedule] = set()  # the plans whose code has been looked at
        self._has_learnt = False  # whether that has shown anything
        self._weighed: dict[Schedule, Candidate] = {}  # plans as they are known since
        self._ran: set[Schedule] = set()

    @property
    def has_limit(self) -> bool:
        """Whether its budget is a number of bytes."""
        return is_size(self.options.budget)

    def compile_first(self) -> Variant:
        """Compile the graph for the first time; as it will be compiled again, so that caches have it by then.

        Raises:
            InfeasibleBudgetError: No plan of it fits the budget.
        """
        with steps.paused(), graphs.at_sizes(self.sizes):
            policy = self._first_policy()
            variant = self._variant(policy)
        prospects = variant.compilation.prospects
        if prospects is not None:
            self._prospects = prospects
            self._is_stored = isinstance(policy, Given) and policy.schedule == prospects.plan.schedule
            self.variants[prospects.plan.schedule] = variant
        choice = variant.compilation.choice
        if choice is not None:
            self._problem = choice.problem
        return variant

    def _first_policy(self) -> Policy:
        """The plan that another process has stored, or what is usual."""
        usual = self._usual_policy()
        stored = steps.stored(self.key)
        return usual if stored is None else Given(stored.plan.schedule, stored.policy, usual)

    def _usual_policy(self) -> Policy:
        """Whether the graph may be all of its step but for the loss, or should take little from others."""
        budget, planner = self.options.budget, self.options.planner
        if not (steps.waiting or compilers.is_bucket() or frames.is_inside_of_module()):
            is_whole = any(map(_is_loss, self._origin.outputs))
            return self._within_budget if is_whole else MaybeAlone(self._within_budget)
        waiting = sum(run.plan.held_bytes for run in steps.waiting)
        return Cautious(planner, resolve_budget(budget, 0) if self.has_limit else None, waiting)

    @property
    def _within_budget(self) -> WithinBudget:
        return WithinBudget(self.options.budget, self.options.planner, self.options.reads_code)

    def look_ahead(self) -> bool:
        """Choose the first plan of the graph without compiling it, for a rehearsal.

        Returns:
            Whether there is anything to plan.
        """
        problem = self._asked()
        if problem is None:
            return False
        try:
            self._prospects = policy.prospects(self._choice_ahead(problem))
        except FxrematError:
            if self.options.on_error == "raise":
                raise
            return False
        return True

    def _choice_ahead(self, problem: Problem) -> Choice:
        """The first plan; that the step has no room for it is said when the whole of it is known."""
        if not steps.waiting and not frames.is_inside_of_module():
            with contextlib.suppress(InfeasibleBudgetError):
                return self._within_budget.choose(problem, None)
        return Cautious(self.options.planner).choose(problem, None)

    def adopt(self, origin: compilers.Origin) -> None:
        """Go on with the graph as Dynamo has traced it now."""
        self._origin = origin

    def _variant(self, policy: Policy) -> Variant:
        compilation = Compilation(self.options, self._fingerprint, self.name, policy)
        compiled = self._compile(self._origin.module(), self._origin.inputs, compilation)
        return Variant(compiled, compilation)

    def resized(self, sizes: Mapping[Any, int]) -> Runner:
        """A Runner of the same graph at other sizes; nothing is compiled yet."""
        fingerprint = f"{self._fingerprint} {sorted(sizes.values())}"
        name = f"{self.name} at {', '.join(map(str, sizes.values()))}"
        return Runner(self._origin, self.options, fingerprint, name, self._compile, sizes)

    # -- plans

    @property
    def first_plan(self) -> Candidate:
        """The plan that it was compiled with first."""
        return self._prospects.plan

    @property
    def own_plan(self) -> Candidate | None:
        """The plan that it has for itself; None if it was compiled as a part of a step."""
        return None if self._prospects.candidates or self._is_stored else self.first_plan

    @property
    def is_corrected(self) -> bool:
        """Whether that plan is another than predictions ask for, because of what its code takes."""
        variant = self.variants.get(self.first_plan.schedule)
        return variant is not None and variant.compilation.corrections > 0

    @property
    def overestimate_bytes(self) -> int:
        """By how much its own plan was predicted higher than its code is."""
        variant = self.variants.get(self.first_plan.schedule)
        reports = () if variant is None else variant.compilation.reports
        found = (each.solution.peak_bytes - each.peak_bytes for each in reports)
        return max([0, *found])

    @property
    def baseline(self) -> Candidate:
        """What runs without fxremat."""
        return self._prospects.baseline

    @property
    def margin(self) -> float:
        """The part of a budget that is left free because the memory model is not exact."""
        return self._prospects.margin

    @functools.cached_property
    def cautious_plan(self) -> Candidate:
        """The plan of a call about whose step nothing is known."""
        return policy.cautious(self.candidates, None)

    def plan_within(self, allowed_bytes: int, peak: Callable[[Candidate], int]) -> Candidate:
        """The plan for a step in which nothing else is planned.

        Args:
            allowed_bytes: What the step's peak is to keep; that of the plan may be higher where none does.
            peak: The step's peak with a plan.
        """
        problem, lowest = self.planning_problem, WithinBudget("min", self.options.planner)
        outside = peak(self.first_plan) - problem.evaluate(self.first_plan.schedule, "auto").peak_bytes
        found = self.first_plan
        for _ in range(MAX_LOOKS):
            choice = lowest.choose(problem, allowed_bytes - outside)
            found = candidate(problem, choice.solution)
            if peak(found) <= allowed_bytes:
                break
            outside += peak(found) - allowed_bytes
        problem.rest()
        return found

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The plans to choose from, those that were tailored among them, as far as they are known by now."""
        return self._known([*self._candidates, *self._tailored])

    @functools.cached_property
    def _candidates(self) -> Sequence[Candidate]:
        if self._prospects.candidates:
            return self._prospects.candidates
        found = policy.candidates_of(self.planning_problem, self.options.planner)
        self.planning_problem.rest()
        return found

    def tailor(self, plan: Candidate, wanted: Room) -> Sequence[Candidate]:
        """Plans that fit into a room, or near to it; none where the user has said how plans are made.

        Args:
            plan: The one in whose place another is wanted.
            wanted: The room.
        """
        if self.options.planner != "auto":
            return ()
        found = plans_for(self.planning_problem, self.candidates, plan, wanted, auto.improved)
        self.planning_problem.rest()
        self._tailored += found
        return found

    def seen(self, plan: Candidate) -> Candidate:
        """A plan with what is known of it since the code of plans has shown more than was predicted."""
        (found,) = self._known([plan])
        return found

    def _known(self, plans: Sequence[Candidate]) -> Sequence[Candidate]:
        """Plans with what is known of them by now."""
        self._learn()
        if not self._has_learnt:
            return plans
        problem = self.planning_problem
        for plan in plans:
            if plan.schedule not in self._weighed:
                found = candidate(problem, problem.evaluate(plan.schedule, "auto"))
                self._weighed[plan.schedule] = found
        problem.rest()
        return [self._weighed[plan.schedule] for plan in plans]

    def _learn(self) -> None:
        """Take in what the code of settled plans has shown, if that is more than was predicted."""
        for schedule, variant in self.variants.items():
            problem, shown = self._problem, variant.compilation.correction.surprises
            if problem is None or not shown or schedule in self._heard:
                continue  # without a problem no plan is weighed, and the graph is not traced for this alone
            self._heard.add(schedule)
            with contextlib.suppress(ScheduleError):  # a compiler may have settled a size that was dynamic
                taught = learn(problem.graph, bind(problem.graph, schedule), shown)
                if taught is not problem.graph:
                    self._problem = replace(problem, graph=taught, _latest={})
                    self._has_learnt = True
                    self._weighed.clear()

    def policy_of(self, plan: Candidate) -> str:
        """The text of the policy that a plan was compiled under."""
        return repr(self.variants[plan.schedule].compilation.policy)

    def report_of(self, plan: Candidate) -> Report | None:
        """What was done to the graph with a plan; None where that is not compiled."""
        variant = self.variants.get(plan.schedule)
        return next(iter(variant.compilation.reports), None) if variant is not None else None

    @property
    def planning_problem(self) -> Problem:
        """What its planners solve; where a cache had the graph, it is traced once more for that."""
        problem = self._asked()
        assert problem is not None
        return problem

    def _asked(self) -> Problem | None:
        """The same; None if there is nothing to plan."""
        if self._problem is None:
            try:
                self._compile_again(Asking())
            except Asked as asked:
                self._problem = asked.problem
        return self._problem

    def _compile_again(self, policy: Policy) -> Variant:
        """Compile the graph when Dynamo may have gone on."""
        with steps.paused(), fakes.outside_of_modes(), self._origin.resumed(), graphs.at_sizes(self.sizes):
            return self._variant(policy)

    # -- calls

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph with the plan that the step has for this call."""
        return self.call(inputs)

    def call(self, inputs: Sequence[Any], growth: float = 1.0) -> Any:
        """Run the graph with the plan that the step has for this call.

        Args:
            inputs: Its inputs.
            growth: How many times larger they may be by what the plan is made for.
        """
        if compilers.is_tracing():
            return self.variants[self.first_plan.schedule].compiled(*inputs)
        episode, run = steps.begin(self, inputs, growth)
        compiled = self._compiled(run) if steps.rehearsal is None else self._rehearsed
        run.is_first = run.plan.schedule not in self._ran
        self._ran.add(run.plan.schedule)
        episode.forward_begins(run, inputs)
        since = autograd.clock()
        outputs = compiled(*inputs)
        flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        node = autograd.backward_of(flat, since) or autograd.backward_of(inputs, since)
        if node is not None:
            _follow(episode, run, node, inputs, flat)
        episode.forward_ends(run, is_waiting=node is not None)
        return outputs

    def _compiled(self, run: Run) -> Callable[..., Any]:
        """What runs the plan of a call."""
        variant = self.variants.get(run.plan.schedule)
        if variant is None:
            is_own = run.plan is self.own_plan  # which may be corrected when its code is seen
            variant = self._compile_again(self._within_budget if is_own else self._given(run))
            taken = variant.compilation.prospects
            if not is_own and taken is not None and taken.plan.schedule != run.plan.schedule:
                run.go_on_with(taken.plan)
            self.variants[run.plan.schedule] = variant
        return variant.compiled

    def _given(self, run: Run) -> Given:
        """The policy of a call's plan; one that was stored may be none of the graph, as it is traced here."""
        stored = run.known.stored
        if stored is None or stored.plan != run.plan:
            return Given(run.plan.schedule)
        return Given(run.plan.schedule, stored.policy, Cautious(self.options.planner))

    @functools.cached_property
    def _rehearsed(self) -> Callable[..., Any]:
        """What runs the graph in a rehearsal."""
        with self._origin.resumed():
            return fakes.rehearsable(self._origin.module(), self._origin.inputs)

    @property
    def reports(self) -> list[Report]:
        """The reports of its compiled plans that steps run with."""
        in_use = {plan.schedule for plan in steps.plans_of(self)} & self.variants.keys()
        used = [variant for schedule, variant in self.variants.items() if schedule in in_use or not in_use]
        return [report for each in used for report in each.compilation.reports]

    @property
    def fallbacks(self) -> list[str]:
        """Why PyTorch's partitioner took over, each time."""
        return [reason for each in self.variants.values() for reason in each.compilation.fallbacks]


def _follow(episode: Episode, run: Run, node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Have autograd tell when it comes to the backward of a call, and when it has let go of it."""
    token = _Token()
    of = weakref.ref(node)
    weakref.finalize(token, episode.dropped, run).atexit = False

    def begins(tangents: Sequence[Tensor | None], _token: object = token) -> None:
        if not torch.compiler.is_compiling():
            episode.backward_begins(run, of(), tangents)

    node.register_prehook(begins)
    if episode.recording is None:
        return

    run.leaf_bytes = _bytes(autograd.leaves(node))
    handles: list[Any] = []

    def ended(gradients: object) -> None:
        if torch.compiler.is_compiling():
            return
        episode.backward_ended(run)
        while handles:
            handles.pop().remove()

    handles += (each.register_prehook(ended) for each in autograd.nodes_behind(node))
    for kind, tensors in (("inputs", inputs), ("outputs", outputs)):
        for place, each in enumerate(tensors):
            if isinstance(each, Tensor) and not (each.is_leaf and each.requires_grad):
                storage = autograd.storage_of(each)
                if storage is not None:
                    run.storages[kind, place] = autograd.WeakStorage(storage), storage.nbytes()


class _Token:
    """Lives as long as the node of autograd's that a hook with it belongs to."""


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes of the memory of tensors, each once."""
    return autograd.storage_bytes(each for each in tensors if each is not None)


def _key(origin: compilers.Origin, options: Options, fingerprint: str) -> str | None:
    """What a graph and its options are known by in other processes."""
    under = Partitioner(options, fingerprint).uuid()
    return None if under is None else hashlib.sha256(repr((origin.text, under)).encode()).hexdigest()


def _is_loss(value: object) -> bool:
    """Whether a backward may begin with an output, as far as can be seen from it."""
    return isinstance(value, Tensor) and value.requires_grad and value.dim() == 0


def _device(origin: compilers.Origin) -> torch.device:
    """Where a graph of Dynamo's runs: on CUDA if any of its inputs is there."""
    devices = {each.device for each in origin.inputs if isinstance(each, Tensor)}
    return next((each for each in devices if each.type == "cuda"), torch.device("cpu"))
