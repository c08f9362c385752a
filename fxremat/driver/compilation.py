"""Compilation: one graph of Dynamo's on its way to compiled code, and all that is known of it meanwhile.

The partitioner splits the graph by its plan, the compiler hands over the code that it generated, and a cache
may have had the graph already: each tells the Compilation that it was given, and nothing else. So two threads
may compile at once, and what a failed compilation has noted goes with it. ``journal.py`` gets those that
succeed.

*Correction*: where the code of a plan holds more than the budget, and there is a lower plan, the compilation
starts over (``PlanAgain``) with a peak that the next plan must keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxremat._torch import compilers, partitioners
from fxremat.driver.cache import Outcome
from fxremat.driver.options import Options
from fxremat.driver.pipeline import Choice, rewritten, split
from fxremat.driver.policy import Policy, WithinBudget, prospects
from fxremat.driver.report import Report, mib
from fxremat.episode.trace import Prospects
from fxremat.errors import FxrematError
from fxremat.inductor.generated import Handed, handed, read
from fxremat.predict.problem import Problem

MAX_CORRECTIONS = 3  # times that a graph is planned again; each compiles both graphs anew


class PlanAgain(BaseException):
    """The code of a graph holds more than the budget, and there is a lower plan.

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
        within_bytes: A predicted peak that the next plan must keep besides the budget.
        corrections: How often the graph was planned again.
        is_compiled: Whether a compiler has compiled the graph; not so where a cache serves it.
    """

    def __init__(self, options: Options, fingerprint: str, name: str, policy: Policy | None = None) -> None:
        self.options = options
        self.fingerprint = fingerprint
        self.name = name
        self.policy = WithinBudget(options.budget, options.planner) if policy is None else policy
        self.choice: Choice | None = None
        self.prospects: Prospects | None = None
        self.reports: list[Report] = []
        self.fallbacks: list[str] = []
        self.handed: Handed | None = None
        self.within_bytes: int | None = None
        self.corrections = 0
        self.is_compiled = False

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
        """The plan that the policy takes."""
        self.choice = choice = self.policy.choose(problem, self.within_bytes)
        self.prospects = prospects(choice)
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
        self.reports += (replace(report, graph_name=self.name, from_cache=True) for report in outcome.reports)

    def take_code(self, code: compilers.GeneratedCode) -> None:
        """Hold the code of one of the two graphs against the budget.

        Raises:
            PlanAgain: It holds more, and there is a lower plan.
        """
        if self.handed is None or len(self.reports) != 1:
            return
        lowered = read(code, self.handed)
        if lowered is not None:
            self.handed = lowered.given
            (report,) = self.reports
            peak = max(lowered.peak_bytes, report.lowered_peak_bytes or 0)
            self.reports[0] = self._judged(report, peak)

    def _judged(self, report: Report, peak_bytes: int) -> Report:
        """The report with the peak of the code."""
        notes = []
        if report.lowered_peak_bytes is None and self.corrections:
            notes.append(f"planned again {self.corrections} times: higher plans were above the budget")
        excess = peak_bytes - (report.budget_bytes or peak_bytes)
        if excess > 0:
            text = f"lowered peak {mib(peak_bytes)} above the budget of {mib(peak_bytes - excess)}"
            if self.corrections < MAX_CORRECTIONS and report.peak_bytes > report.lowest_peak_bytes:
                self._start_over(report.peak_bytes - excess)
                raise PlanAgain(text)
            where = f"fxremat has no lower plan of {report.graph_name}"
            warnings.warn(f"{where}: {text}", RuntimeWarning, stacklevel=2)
            notes.append(text)
        return replace(report, lowered_peak_bytes=peak_bytes, notes=(*report.notes, *notes))

    def _start_over(self, within_bytes: int) -> None:
        """Forget what was planned; the next plan must keep a lower peak."""
        self.reports.clear()
        self.fallbacks.clear()
        self.handed = self.prospects = None
        self.is_compiled = False
        self.within_bytes = within_bytes
        self.corrections += 1
