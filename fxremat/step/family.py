"""Family: what is known of the episodes that begin with one call, and which plans its calls have.

The episodes of a family are settled together, since a call can't know how its episode goes on: one after the
other as if they were one, in which the calls that they share are one call. Where several processes train
together, all of them settle for the same (``agreement.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fxremat.episode.learnt import Learnt
from fxremat.episode.trace import Call, Candidate, Event, Place, Trace, peak_bytes, timeline
from fxremat.errors import FxrematError, InfeasibleBudgetError
from fxremat.report.step_report import CallReport, StepReport
from fxremat.step.agreement import Round, digest_of, post
from fxremat.step.settling import Graph, Settled, as_stored, settled
from fxremat.step.stored import Figures, Row, StoredCall, keep

MAX_RECORDINGS = 24  # of the episodes of a family

_numbers = itertools.count()
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Known:
    """A call of a family's episodes, known by the calls before it.

    Attributes:
        graph: What it runs.
        plan: The plan that it runs.
        stored: What another process has stored of it.
        next: The calls that came after it, by graph.
    """

    graph: Graph
    plan: Candidate
    stored: StoredCall | None = None
    next: dict[int, Known] = field(default_factory=dict)


@dataclass(eq=False)
class Shape:
    """An episode that is known: what ran, and what it took the last time that it was recorded.

    Attributes:
        calls: Its calls, in the order of their forwards.
        learnt: What is known of it.
        plans: With which plans it was recorded the last time.
        growth: How many times larger its inputs may be by what the plans are made for; below 1 they were
            larger than that.
        is_new: Whether code ran for the first time, which may take more than it does later; or none at all.
        is_real: Whether it ran, and was not rehearsed.
    """

    calls: tuple[Known, ...]
    learnt: Learnt
    plans: tuple[Candidate, ...]
    growth: float = 1.0
    is_new: bool = False
    is_real: bool = True

    @property
    def trace(self) -> Trace:
        """Its model."""
        return self.learnt.trace


# Whether gradients were there when it began, then calls, and whether their backward ran, in order.
Signature: TypeAlias = tuple[bool, tuple[tuple[Known, bool], ...]]


class Family:
    """The episodes that begin with one call.

    Attributes:
        number: How many this process had before.
        first: That call.
        shapes: What is known of them, by whether gradients were there when they began, and by what ran.
        latest: Which of these was recorded last.
        is_pending: Whether plans are to be settled before the next one begins.
        is_surprised: Whether one was met that is not known, and was not recorded.
        recordings: How often any was recorded.
        round: What is to be agreed upon with other ranks before plans are settled; None for nothing.
        stored: What another process has stored of them.
        settled: What was settled for the calls of all of them.
        notes: What is to be known of that.
    """

    def __init__(self, first: Known, stored: Figures | None = None) -> None:
        self.number = next(_numbers)
        self.first = first
        self.stored = stored
        self.shapes: dict[Signature, Shape] = {}
        self.latest: Signature = (False, ())
        self.is_pending = False
        self.is_surprised = False
        self.recordings = 0
        self.round: Round | None = None
        self.settled: Settled | None = None
        self.notes: tuple[str, ...] = ()

    @property
    def is_to_be_recorded(self) -> bool:
        """Whether there is more to learn: of an episode that is not known, or has got other plans."""
        is_new = self.is_surprised or not self.shapes or self.shapes[self.latest].is_new
        has_changed = any(plans_of(shape.calls) != shape.plans for shape in self.shapes.values())
        return (is_new or has_changed) and self.recordings < MAX_RECORDINGS

    def calls(self) -> list[Known]:
        """All calls of its episodes, each once."""
        return list(dict.fromkeys(call for shape in self.shapes.values() for call in shape.calls))

    def excess(self) -> float:
        """How many times more was measured than predicted for the plans that ran; 1 if it was less."""
        comparable = (each for each in self.shapes.values() if each.growth >= 1 and not each.is_new)
        return max((each.learnt.excess for each in comparable), default=1.0)

    def trace(self, is_grown: bool) -> Trace:
        """Its episodes one after the other, as if they were one; a call that they share is one call.

        Args:
            is_grown: Whether for inputs as large as plans are made for: outside bytes grow no faster.
        """
        position = {call: index for index, call in enumerate(self.calls())}
        charges: list[dict[Place, int]] = [{} for _ in position]
        events: list[Event] = []
        after_bytes = 0
        for shape in self.shapes.values():
            growth = shape.growth if is_grown else 1.0
            for index, event in enumerate(shape.trace.events):
                between = max(round(growth * event.between_bytes), 0 if index else after_bytes)
                call = position[shape.calls[event.call]]
                outside = round(growth * event.outside_bytes)
                events.append(Event(call, event.is_backward, outside, between))
            for known, call_ in zip(shape.calls, shape.trace.calls, strict=True):
                found = charges[position[known]]
                for place, size in call_.charges.items():
                    found[place] = max(round(growth * size), found.get(place, 0))
            after_bytes = round(growth * shape.trace.after_bytes)
        calls = tuple(Call(known.graph.number, found) for known, found in zip(position, charges, strict=True))
        return Trace(calls, tuple(events), after_bytes)

    def learn(self, signature: Signature, found: Shape) -> None:
        """Keep what is known of an episode that was recorded, and tell it to other ranks."""
        is_measured = found.learnt.measured_bytes is not None
        is_better = is_measured or signature not in self.shapes
        if is_better:
            self.shapes[signature] = found
        _log.debug("a step of %d calls is learnt, recording %d", len(found.calls), self.recordings)
        if self.round is not None:
            self.round.call_off()
        self.latest, known = signature, self.shapes[signature].learnt
        self.round = post(f"{self.number}/{self.recordings}", self._digest(), is_measured, known, found.plans)
        if is_better or self.round is not None:  # which then does not depend on what this rank could measure
            self.is_pending = True
            self.is_surprised = False

    def _digest(self) -> str:
        """The same for ranks that know the same episodes, and have recorded the same last."""
        position = {call: index for index, call in enumerate(self.calls())}
        order = [
            (signature == self.latest, signature[0], [(position[call], ran) for call, ran in signature[1]])
            for signature in self.shapes
        ]
        return digest_of([call.graph for call in position], order)

    def settle(self) -> None:
        """Give the calls their plans, if anything has been learnt since, and ranks agree.

        Raises:
            InfeasibleBudgetError: No plans fit a budget.
        """
        if not self.is_pending:
            return
        if self.round is None:
            self._take(self._settled())
            self.is_pending = False
            return
        agreed = self.round.agreed(self._settled)
        if agreed is None:
            return
        self.is_pending, self.round, self.notes = False, None, (agreed.note,)
        self._keep(agreed.learnt, agreed.plans if agreed.is_measured else self.shapes[self.latest].plans)
        if isinstance(agreed.settled, FxrematError):
            self.is_pending = True  # the next step is refused as well
            raise agreed.settled
        self._take(agreed.settled)

    def _settled(self, known: Learnt | None = None) -> Settled:
        """What to settle for, by what is known of the latest episode."""
        if known is not None:
            self._keep(known, self.shapes[self.latest].plans)
        calls = self.calls()
        graphs = [each.graph for each in calls]
        plans = tuple(each.graph.seen(each.plan) for each in calls)
        if self.stored is not None and all(each.stored is not None for each in calls):
            found = as_stored(graphs, plans, self.trace(is_grown=False), self.excess(), self.stored)
            if found is not None:
                return found
        self.stored = None
        before = self.settled is not None
        for is_grown in (True, False):
            with contextlib.suppress(InfeasibleBudgetError):  # for that only what is predicted counts
                return settled(graphs, plans, self.trace(is_grown), self.excess(), before)
        return settled(graphs, plans, self.trace(is_grown=False), has_settled=before)

    def _keep(self, known: Learnt, plans: tuple[Candidate, ...]) -> None:
        """Know this of the latest episode; another rank may have other numbers for its graphs."""
        shape = self.shapes[self.latest]
        calls = shape.calls
        pairs = zip(calls, known.trace.calls, strict=True)
        numbered = tuple(replace(call, graph=own.graph.number) for own, call in pairs)
        learnt = replace(known, trace=replace(known.trace, calls=numbered))
        self.shapes[self.latest] = replace(shape, learnt=learnt, plans=plans)

    def _take(self, found: Settled) -> None:
        self.settled = found
        for known, plan in zip(self.calls(), found.plans, strict=True):
            known.plan = plan
        self._log_plans()
        has_run = all(plans_of(each.calls) == each.plans and each.is_real for each in self.shapes.values())
        if has_run and self.stored is None:
            self._store(found)

    def reports(self) -> list[StepReport]:
        """A report for each of its episodes; none before plans are settled."""
        if self.settled is None:
            return []
        return [_report(shape, self.settled, self.notes) for shape in self.shapes.values()]

    def _log_plans(self) -> None:
        if _log.isEnabledFor(logging.INFO):
            for report in self.reports():
                _log.info("settled: %s", report.line())
                _log.debug("%s", report)

    def _store(self, found: Settled) -> None:
        """Keep on disk what was settled, unless each graph's cached code says it already."""
        calls = self.calls()
        is_own = len(calls) == 1 and self.first.plan == self.first.graph.own_plan
        if is_own or len({each.graph.options.budget for each in calls}) > 1:
            return
        rows: list[Row] = []
        left = [(-1, self.first)]
        while left:
            before, known = left.pop()
            if known.graph.key is None:
                return
            rows.append((before, known.graph.key, known.plan, known.graph.policy_of(known.plan)))
            left += [(len(rows) - 1, each) for each in known.next.values() if each in calls]
        highest = max(peak_bytes(each.trace, plans_of(each.calls)) for each in self.shapes.values())
        keep(rows, Figures(found.budget, highest, found.lowest_peak_bytes, found.lower_bound_seconds))


def plans_of(calls: Sequence[Known]) -> tuple[Candidate, ...]:
    """The plans that calls run."""
    return tuple(known.plan for known in calls)


def _report(shape: Shape, settled: Settled, notes: tuple[str, ...]) -> StepReport:
    """The report of an episode."""
    plans = plans_of(shape.calls)
    variants: dict[int, list[Candidate]] = {}
    for known in shape.calls:
        of_graph = variants.setdefault(known.graph.number, [])
        of_graph += [known.plan] if known.plan not in of_graph else []
    moments = timeline(shape.trace, plans)
    without = timeline(shape.trace, tuple(known.graph.baseline for known in shape.calls))
    return StepReport(
        tuple(
            CallReport(
                known.graph.name,
                variants[known.graph.number].index(known.plan),
                len(variants[known.graph.number]),
                known.plan.seconds,
                known.plan.held_bytes,
                known.plan.forward_bytes,
                known.plan.backward_bytes,
                known.graph.report_of(known.plan),
            )
            for known in shape.calls
        ),
        settled.budget,
        settled.budget_bytes,
        max(moment.peak_bytes for moment in without),
        max(moment.peak_bytes for moment in moments),
        settled.lowest_peak_bytes,
        max(moment.outside_bytes for moment in moments),
        shape.learnt.measured_bytes,
        peak_bytes(shape.trace, shape.plans),
        sum(plan.seconds for plan in plans),
        sum(known.graph.baseline.seconds for known in shape.calls),
        settled.lower_bound_seconds,
        moments,
        without,
        notes,
    )
