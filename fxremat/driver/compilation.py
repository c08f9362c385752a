"""Compilation: one graph of Dynamo's on its way to compiled code, and all that is known of it meanwhile.

The partitioner splits the graph by its plan, the compiler hands over the code that it generated, and a cache
may have had the graph already: each tells the Compilation that it was given, and nothing else. So two threads
may compile at once, and what a failed compilation has noted goes with it. ``journal.py`` gets those that
succeed.

*Correction*: where the code of a plan holds more than the budget, the compilation starts over (``PlanAgain``)
with a plan that is lower by the excess. Where it holds much less than was predicted, a plan that is higher by
what is left is tried, if that saves time; and given up again, if its code holds more than the budget. Where
the least memory is asked for, and the code holds more than was predicted, other plans are looked at, and the
one whose code holds the least stays. What the code has shown (``inductor/learning.py``) is known to each plan
that follows. A plan that no budget would ask for otherwise is first compiled as it would be without one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from torch import fx

from fxremat._torch import partitioners
from fxremat._torch.lowered import GeneratedCode
from fxremat.driver.cache import Outcome
from fxremat.driver.pipeline import Choice, rewritten, split
from fxremat.driver.policy import FromFile, Given, Policy, alone, prospects, refused, unread
from fxremat.episode.trace import Prospects
from fxremat.errors import FxrematError, InfeasibleBudgetError, VerificationError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, bind
from fxremat.inductor.facts import like
from fxremat.inductor.generated import CodeMemory, Handed, handed, read
from fxremat.inductor.learning import learn
from fxremat.options.options import Options
from fxremat.predict.problem import Problem
from fxremat.report.report import Report
from fxremat.report.verification import Verification

MAX_CORRECTIONS = 3  # times that a graph is planned again; each lowers both graphs anew
LEFT = 0.03  # of a budget: what the code must leave of it for a faster plan to be tried
OFF = 0.01  # of a budget: by how much the code must be lower than was predicted for that
GAIN = 0.005  # of a step's time: what such a plan must save

_log = logging.getLogger(__name__)


class PlanAgain(BaseException):
    """The code of a graph asks for another plan, which the compilation has by now.

    No ``Exception``: the compilers on the way up wrap those in errors of their own.
    """


class Compilation:
    """One graph of Dynamo's that is being compiled, or was.

    A backward that is compiled when it first runs goes on telling: its code is a part of the report.

    Attributes:
        options: The user's options.
        fingerprint: What caches do not see of the graph (``cache.fingerprint``).
        name: What reports call the graph.
        policy: How the graph's plan is chosen.
        choice: The plan that was chosen last, and what it was chosen from; None before, and where a cache had
            the graph.
        prospects: The plan as a step sees it; None before.
        reports: What was planned so far.
        fallbacks: Why PyTorch's partitioner took over, each time.
        handed: What generated code will not say of the graph that was split last; None before.
        corrections: How often the graph was planned again because of its code.
        is_compiled: Whether a compiler has compiled the graph; not so where a cache serves it.
    """

    def __init__(self, options: Options, fingerprint: str, name: str, policy: Policy | None = None) -> None:
        self.options = options
        self.fingerprint = fingerprint
        self.name = name
        self.policy = alone(options) if policy is None else policy
        self.choice: Choice | None = None
        self.prospects: Prospects | None = None
        self.reports: list[Report] = []
        self.fallbacks: list[str] = []
        self.handed: Handed | None = None
        self.corrections = 0
        self.is_compiled = False
        self._next: Choice | None = None  # what is to be compiled, if not what the policy chooses
        self._tried: set[Schedule] = set()  # what was compiled
        self._codes: list[tuple[GeneratedCode, CodeMemory]] = []  # of the plan that was split last
        self._taught: JointGraph | None = None  # with all that code has shown
        self._lowest: tuple[int, Choice] | None = None  # the least peak of any code, and its plan
        self._proven: Choice | None = None  # whose code keeps the budget, while a faster plan is tried
        self._refused: InfeasibleBudgetError | None = None
        self._is_as_usual = True  # whether a plan that needs no budget may run in Inductor's own order

    @property
    def is_in_order(self) -> bool:
        """Whether kernels run in the order of the plan."""
        is_given = isinstance(self.policy, FromFile)
        is_default = self.choice is not None and self.choice.is_default and not is_given
        return self.options.is_bounded and not (is_default and self._is_as_usual)

    def split(
        self,
        module: fx.GraphModule,
        inputs: Sequence[object],
        num_forward_outputs: int,
        static_inputs: Sequence[int] = (),
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of a joint graph under the budget, or by PyTorch's partitioner.

        Args:
            module: The joint graph.
            inputs: Its inputs.
            num_forward_outputs: How many of its outputs belong to the forward.
            static_inputs: Positions of the inputs whose memory stays in place.

        Raises:
            FxrematError: One of the family, unless the options say ``on_error="fallback"``.
        """
        try:
            graph, report = rewritten(
                module, num_forward_outputs, self.options, self.name, static_inputs, self._choose
            )
            halves = split(graph, self.options)
        except FxrematError as error:
            if self.options.on_error == "raise":
                raise
            self._fall_back(str(error))
            return partitioners.min_cut_partition(module, inputs, num_fwd_outputs=num_forward_outputs)
        self.reports.append(report)
        self.handed = handed(graph)
        return halves

    def _choose(self, problem: Problem) -> Choice:
        """The plan that the policy takes, or that the code has asked for."""
        known = self._next
        if self._taught is not None:
            problem = _informed(problem, self._taught)
        if self._refused is not None:
            choice = refused(self.policy, problem, self._refused)
        else:
            choice = self.policy.choose(problem, None) if known is None else _again(known, problem)
        self.choice, self.prospects = choice, prospects(choice)
        self._tried.add(choice.solution.schedule)
        return choice

    def _fall_back(self, reason: str) -> None:
        """Say, and remember, that the graph is left to PyTorch's partitioner."""
        self.fallbacks.append(reason)
        warnings.warn(f"fxremat leaves {self.name} to PyTorch's partitioner: {reason}", stacklevel=3)

    def outcome(self) -> Outcome:
        """What goes along into a cache; called by a compiler, once the graph is compiled."""
        self.is_compiled = True
        return Outcome(tuple(self.reports), tuple(self.fallbacks), self.prospects)

    def take_over(self, outcome: Outcome | None) -> None:
        """Make the reports and the fallbacks of when a graph was compiled, which a cache had, one's own."""
        if outcome is None:
            text = f"fxremat has no report of {self.name}: a cache had it without one"
            warnings.warn(text, stacklevel=3)
            return
        self.prospects = outcome.prospects
        for reason in outcome.fallbacks:
            self._fall_back(reason)
        self.reports += (
            replace(
                report, graph_name=self.name, from_cache=True, settings=self.options.settings, verified=None
            )
            for report in outcome.reports
        )

    def take_verification(self, found: Verification) -> bool:
        """Report what a call has shown; whether the compiled graph may go on.

        Raises:
            VerificationError: It computes something else, unless the options say ``on_error="fallback"``.
        """
        self.reports[:] = [
            replace(report, verified=found.and_before(report.verified)) for report in self.reports
        ]
        _log.info("%s: %s", self.name, found)
        if found.is_kept:
            return True
        error = VerificationError(self.name, found.place, found.difference, found.tolerance)
        if self.options.on_error == "raise":
            raise error
        self._fall_back(str(error))
        return False

    def take_code(self, code: GeneratedCode) -> None:
        """Hold the code of one of the two graphs against the budget.

        Raises:
            PlanAgain: Another plan is to be compiled.
        """
        if self.handed is None or len(self.reports) != 1:
            return
        (report,) = self.reports
        lowered = read(code, self.handed)
        if lowered is None:
            if report.budget_bytes is not None:
                self._go_unread()
            return
        self.handed = lowered.given
        self._codes.append((code, lowered))
        peak = max(memory.peak_bytes for _, memory in self._codes)
        which = "backward" if code.is_backward else "forward"
        _log.debug("%s: the code up to the %s holds %d bytes", self.name, which, peak)
        if self.choice is not None and not isinstance(self.policy, Given):
            self._compare(self.choice, peak, code.is_backward)
        if code.is_backward:
            self.reports[0] = self._judged(report, peak)

    def _compare(self, choice: Choice, peak_bytes: int, is_whole: bool) -> None:
        """Go on with another plan, where the code asks for it."""
        is_higher = peak_bytes > (1 + OFF) * choice.solution.peak_bytes
        if isinstance(self.policy, FromFile):
            self._hold_against(self.policy, choice, peak_bytes)
        elif choice.budget_bytes is not None:
            left = choice.budget_bytes - peak_bytes
            if left < 0:
                self._lower(choice, peak_bytes, choice.budget_bytes)
            elif is_whole and left > LEFT * choice.budget_bytes:
                self._raise(choice, peak_bytes, choice.budget_bytes)
        elif is_whole and choice.candidates and is_higher and self._taught is None:
            if self._learn(choice) is not choice:
                self._start_over(None)
        elif is_whole and not choice.candidates and self.options.budget == "min":
            self._look_lower(choice, peak_bytes, is_higher)

    def _hold_against(self, policy: FromFile, choice: Choice, peak_bytes: int) -> None:
        """Refuse a given plan whose code holds more than the budget: there is no other."""
        if choice.budget_bytes is not None and peak_bytes > choice.budget_bytes:
            self._refused = policy.exceeded(choice.budget_bytes, peak_bytes, self.name)
            self._start_over(None)

    def _learn(self, choice: Choice) -> Choice:
        """The same plan, as it is predicted with what its code has shown; itself if that is nothing."""
        problem = choice.problem
        taught = learn(problem.graph, bind(problem.graph, choice.solution.schedule), self._codes)
        if taught is problem.graph:
            return choice
        self._taught = taught
        return _again(choice, replace(problem, graph=taught, _latest=[]))

    def _go_unread(self) -> None:
        """Leave a part of the budget free where the code can't be held against it."""
        policy = unread(self.policy)
        if policy != self.policy:
            self.policy = policy
            self._is_as_usual = False
            self._start_over(None)

    def _lower(self, choice: Choice, peak_bytes: int, budget_bytes: int) -> None:
        """Go on with a plan that is lower by what the code holds beyond the budget."""
        if self._proven is not None:
            self._start_over(self._proven)
        if choice.is_default and self._is_as_usual:
            self._is_as_usual = False
            self._start_over(choice)
        taught = self._learn(choice)
        predicted = taught.solution.peak_bytes
        found = self._found(taught, budget_bytes - max(0, peak_bytes - predicted))
        if found.solution.schedule in self._tried:
            found = self._found(taught, predicted - (peak_bytes - budget_bytes))
        is_known = found.solution.schedule in self._tried
        if self.corrections == MAX_CORRECTIONS or is_known:
            self._refused = InfeasibleBudgetError(
                budget_bytes, peak_bytes, self.name, note="what the code of the last plan takes was read"
            )
        self._start_over(found)

    def _found(self, choice: Choice, within_bytes: int | None) -> Choice:
        """Another plan for the same budget."""
        found = self.policy.choose(choice.problem, within_bytes)
        return replace(found, budget_bytes=choice.budget_bytes)

    def _look_lower(self, choice: Choice, peak_bytes: int, is_higher: bool) -> None:
        """Look for a plan whose code holds less, if this one's holds more than was predicted."""
        if self._lowest is None or peak_bytes < self._lowest[0]:
            self._lowest = peak_bytes, choice
        least, lowest = self._lowest
        if is_higher and self.corrections < MAX_CORRECTIONS:
            taught = self._learn(choice)
            found = self._found(taught, None)
            unexplained = max(0, peak_bytes - taught.solution.peak_bytes)
            is_lower = found.solution.peak_bytes + unexplained < (1 - OFF) * least
            if is_lower and found.solution.schedule not in self._tried:
                self._start_over(found)
        if lowest.solution.schedule != choice.solution.schedule:
            self._start_over(lowest)

    def _raise(self, choice: Choice, peak_bytes: int, budget_bytes: int) -> None:
        """Try a plan that is higher by what the code leaves of the budget, if that saves time.

        Unless less was predicted than it takes: all of the budget was planned with then.
        """
        seconds = choice.solution.seconds
        is_cheap = seconds <= (1 + GAIN) * choice.baseline.seconds
        is_as_told = choice.solution.peak_bytes - peak_bytes < OFF * budget_bytes
        if is_cheap or is_as_told or self.corrections == MAX_CORRECTIONS:
            return
        taught = self._learn(choice)
        found = self._found(taught, taught.solution.peak_bytes + budget_bytes - peak_bytes)
        is_known = found.solution.schedule in self._tried
        if found.solution.seconds < (1 - GAIN) * seconds and not is_known:
            self._proven = choice
            self._start_over(found)

    def _judged(self, report: Report, peak_bytes: int) -> Report:
        """The report with the peak of the code."""
        notes: tuple[str, ...] = ()
        if self.corrections:
            notes = (f"planned again {self.corrections} times, for what the code of other plans takes",)
        return replace(report, lowered_peak_bytes=peak_bytes, notes=(*report.notes, *notes))

    def _start_over(self, choice: Choice | None) -> NoReturn:
        """Forget what was planned, and go on with another choice."""
        self.reports.clear()
        self.fallbacks.clear()
        self._codes.clear()
        self.handed = self.choice = self.prospects = None
        self.is_compiled = False
        self._next = choice
        self.corrections += 1
        _log.debug("%s: planned again, correction %d", self.name, self.corrections)
        raise PlanAgain(f"{self.name} is planned again")


def _informed(problem: Problem, taught: JointGraph) -> Problem:
    """The problem of a graph that was traced again, with what is known of it."""
    return replace(problem, graph=like(problem.graph, taught), _latest=[])


def _again(choice: Choice, problem: Problem) -> Choice:
    """The same plan for a problem that may be known better."""
    without = replace(problem, fusion=problem.model.baseline.name)
    baseline = without.evaluate(choice.baseline.schedule, choice.baseline.planner)
    found = problem.evaluate(choice.solution.schedule, choice.solution.planner)
    bound = min(choice.solution.lower_bound_seconds, found.seconds)
    solution = replace(
        choice.solution, peak_bytes=found.peak_bytes, seconds=found.seconds, lower_bound_seconds=bound
    )
    return replace(choice, problem=problem, baseline=baseline, solution=solution)
