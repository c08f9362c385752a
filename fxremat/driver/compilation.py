"""Compilation: one graph of Dynamo's on its way to compiled code, and all that is known of it meanwhile.

The partitioner splits the graph by its plan, the compiler hands over the code that it generated, and a cache
may have had the graph already: each tells the Compilation that it was given, and nothing else. So two threads
may compile at once, and what a failed compilation has noted goes with it. ``journal.py`` gets those that
succeed.

Where the code of its plan asks for another (``correction.py``), the compilation starts over.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxremat._torch import partitioners
from fxremat._torch.lowered import GeneratedCode
from fxremat.driver.cache import Outcome
from fxremat.driver.correction import Correction, PlanAgain
from fxremat.driver.pipeline import Choice, rewritten, split
from fxremat.driver.policy import Policy, alone, prospects
from fxremat.episode.trace import Prospects
from fxremat.errors import FxrematError, VerificationError
from fxremat.graph.schedule import Schedule
from fxremat.inductor.generated import Handed, handed, read
from fxremat.inductor.kernel_order import KernelOrder, kernel_order
from fxremat.memory.liveness import profile_of
from fxremat.options.options import Options
from fxremat.predict.problem import Problem
from fxremat.report.report import Report
from fxremat.report.verification import Verification

_log = logging.getLogger(__name__)


class Compilation:
    """One graph of Dynamo's that is being compiled, or was.

    A backward that is compiled when it first runs goes on telling: its code is a part of the report.

    Attributes:
        options: The user's options.
        fingerprint: What caches do not see of the graph (``cache.fingerprint``).
        name: What reports call the graph.
        correction: Its plans, and what their code has shown.
        prospects: The plan as a step sees it; None before.
        reports: What was planned so far.
        fallbacks: Why PyTorch's partitioner took over, each time.
        handed: What generated code will not say of the graph that was split last; None before.
        is_compiled: Whether a compiler has compiled the graph; not so where a cache serves it.
        is_uncached: Whether no half of the graph is to come from a cache: one did, without the other.
    """

    def __init__(self, options: Options, fingerprint: str, name: str, policy: Policy | None = None) -> None:
        self.options = options
        self.fingerprint = fingerprint
        self.name = name
        policy = alone(options) if policy is None else policy
        self.correction = Correction(policy, options.budget, name)
        self.prospects: Prospects | None = None
        self.reports: list[Report] = []
        self.fallbacks: list[str] = []
        self.handed: Handed | None = None
        self.is_compiled = False
        self.is_uncached = False
        self._has_forward = False  # whether the code of the forward was handed over
        # Of all plans that were compiled.
        self._order: dict[Schedule, KernelOrder] = {}
        self._spare_bytes: dict[Schedule, Sequence[int]] = {}

    @property
    def policy(self) -> Policy:
        """How the graph's plan is chosen."""
        return self.correction.policy

    @property
    def choice(self) -> Choice | None:
        """The plan that was chosen last, and what it was chosen from; None where a cache had the graph."""
        return self.correction.choice

    @property
    def corrections(self) -> int:
        """How often the graph was planned again because of its code."""
        return self.correction.count

    @property
    def is_in_order(self) -> bool:
        """Whether kernels run in the order of the plan."""
        return self.options.is_bounded and not self.correction.is_as_usual

    def kernel_order(self) -> KernelOrder:
        """How the kernels of the plan are to run; nothing is said without one.

        A plan that is gone back to has what it had, so that its code is what it was.
        """
        if self.choice is None:
            return KernelOrder()
        graph, schedule = self.choice.problem.graph, self.choice.solution.schedule
        if schedule not in self._order:
            self._order[schedule] = kernel_order(graph, schedule)
        return self._order[schedule]

    def spare_bytes(self) -> Sequence[int]:
        """For each step of the plan how much less than its peak is live when it runs; nothing without a plan.

        Nor for the least peak: what is predicted too high there is the user's gain. As with groups, a plan
        that is gone back to has what it had.
        """
        if self.choice is None or self.correction.is_for_least:
            return ()
        problem, solution = self.choice.problem, self.choice.solution
        if solution.schedule not in self._spare_bytes:
            binding, lowering = problem.lowered(solution)
            profile = profile_of(problem.graph, binding, lowering)
            live_bytes = profile.live_bytes[list(lowering.runs_at)]
            self._spare_bytes[solution.schedule] = (profile.peak_bytes - live_bytes).tolist()
        return self._spare_bytes[solution.schedule]

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
            halves = split(graph, self.options, not self.is_in_order)
        except FxrematError as error:
            if self.options.on_error == "raise":
                raise
            self._fall_back(str(error))
            return partitioners.min_cut_partition(module, inputs, num_fwd_outputs=num_forward_outputs)
        self.reports.append(report)
        self.handed = handed(graph)
        return halves

    def _choose(self, problem: Problem) -> Choice:
        """The plan, and how a step sees it."""
        self.correction = self.correction.renewed(problem.graph)
        choice = self.correction.choose(problem)
        self.prospects = prospects(choice)
        return choice

    def rest(self) -> None:
        """Hold no more than further plans are made of; to be called when the graph is compiled."""
        if self.choice is not None:
            self.choice.problem.rest()

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
        if code.is_backward and not (self._has_forward or self.is_uncached):
            self._leave_cache()
            return
        self._has_forward = True
        memory = read(code, self.handed)
        try:
            if memory is not None:
                self.handed = memory.given
                self.correction.take(code, memory)
            elif report.budget_bytes is not None:
                self.correction.go_unread()
        except PlanAgain:
            self._forget()
            raise
        if memory is not None and code.is_backward:
            self.reports[0] = self._judged(report)

    def _leave_cache(self) -> None:
        """Compile anew what has a budget, if a cache had the forward alone: its code was not read.

        Raises:
            PlanAgain: It has one. Without one the backward is compiled when the forward has run by now.
        """
        if self.options.is_bounded:
            self.is_uncached = True
            self._forget()
            raise PlanAgain(f"{self.name} is compiled again, since a cache had its forward alone")

    def _judged(self, report: Report) -> Report:
        """The report with the peak of the code."""
        notes: tuple[str, ...] = ()
        if self.corrections:
            notes = (f"planned again {self.corrections} times, for what the code of other plans takes",)
        return replace(report, lowered_peak_bytes=self.correction.peak_bytes, notes=(*report.notes, *notes))

    def _forget(self) -> None:
        """Be as before the graph was planned."""
        self.reports.clear()
        self.fallbacks.clear()
        self.handed = self.prospects = None
        self.is_compiled = self._has_forward = False
