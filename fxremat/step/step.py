"""Step: follows the calls of compiled graphs through training steps, and settles their plans.

A step is known by its calls, as they come: an *episode* (``episode/trace.py``) begins with the first forward
when no call is waiting and ends with the last backward. Nobody has to mark it, so that accumulation, several
models and validation in between are what they are.

1. The first time, each call runs a cautious plan, and the episode is recorded (``recording.py``).
2. Before the next episode begins, plans are settled for all of its calls together. A graph whose plan has
   changed is compiled once more when it is next called; calls of one graph may get different plans.
3. The next time it is recorded once more, with the settled plans, and settled again if it takes more.

Episodes that begin alike are a *family*. Their plans are settled together, since a call can't know how its
episode goes on. A call that no episode of the family had runs a cautious plan, and the episode is learnt;
but only so many times.

Episodes belong to the thread that runs the forwards. A backward may run in any. Where several processes train
together, they settle for the same plans (``agreement.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fxremat._torch import autograd, graphs
from fxremat._torch.fakes import Rehearsal
from fxremat.episode.learnt import learnt
from fxremat.episode.trace import TANGENTS, Call, Candidate, Event, Place, Trace
from fxremat.errors import InfeasibleBudgetError
from fxremat.report.step_report import StepReport
from fxremat.step import recording, stored
from fxremat.step.family import Family, Known, Shape
from fxremat.step.recording import Estimate, Part, Recording
from fxremat.step.settling import Graph
from fxremat.step.stored import StoredCall

_log = logging.getLogger(__name__)


class Run:
    """A call that was made: what is told of it by autograd's node, which its hooks belong to.

    Attributes:
        known: Which call it is.
        position: Its position in the episode.
        growth: How many times larger its inputs may be by what the plan is made for.
        plan: The plan that runs.
        is_first: Whether its code runs for the first time.
        storages: The caller's memory that the plan may hold, by its place; weak.
        charges: For each of these that nobody else held when the backward began, its bytes.
        leaf_bytes: The gradients that stay, of parameters.
        zeros_bytes: What autograd allocates when the backward begins, for outputs without a gradient.
        tangents: The tangents, weak, with their bytes; None where they stay to the end of the backward.
    """

    def __init__(self, known: Known, position: int, growth: float) -> None:
        self.known = known
        self.position = position
        self.growth = growth
        self.plan = known.plan
        self.is_first = False
        self.storages: dict[Place, tuple[autograd.WeakStorage, int]] = {}
        self.charges: dict[Place, int] = {}
        self.leaf_bytes = self.zeros_bytes = 0
        self.tangents: tuple[tuple[autograd.WeakStorage, int], ...] | None = None

    def go_on_with(self, plan: Candidate) -> None:
        """Run another plan than the stored one, which is none of the graph."""
        self.plan = self.known.plan = plan
        self.known.stored = None

    def see_tangents(self) -> None:
        """Its backward has ended: count the tangents that nobody holds by now as held by it alone."""
        if self.tangents is None:
            return
        gone = sum(size for storage, size in self.tangents if storage.expired())
        self.charges[TANGENTS] = self.zeros_bytes + gone


class Episode:
    """An episode that is under way.

    Attributes:
        family: What it belongs to.
        base_bytes: The results that its first graph was given.
        accumulates: Whether gradients were there when it began.
        kept_bytes: And how much of them.
        runs: Its calls.
        waiting: Those whose backward is to come.
        events: The positions of calls, and whether their backward ran, in order.
        recording: What is being measured; None for an episode that is known.
    """

    def __init__(
        self,
        family: Family,
        base_bytes: int,
        accumulates: bool,
        device: torch.device,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self.family = family
        self.base_bytes = base_bytes
        self.accumulates = accumulates
        self.kept_bytes = 0
        self.runs: list[Run] = []
        self.waiting: dict[Run, bool] = {}  # and whether a backward has run since its forward
        self.events: list[tuple[int, bool]] = []
        self._backward_of: Run | None = None
        self.ran: list[bool] = []  # for each part of the recording, whether a call ran in it
        self.gradient_bytes = self.tangent_bytes = self.around_bytes = self.result_bytes = 0
        self.is_measured = self.is_paused = self.is_lost = False
        self.is_rehearsed = rehearsal is not None
        self.recording: Recording | None = None
        self._end_watch: Callable[[], None] | None = None
        self._thread = threading.get_ident()
        if family.is_to_be_recorded and not autograd.is_in_pass():
            family.recordings += 1
            found = recording.start(device) if rehearsal is None else recording.Rehearsed(rehearsal)
            self.is_measured = found is not None and not self.is_rehearsed
            self.recording = Estimate(self._estimated_bytes) if found is None else found
            self._end_watch = recording.watching_passes(self._pass_begins, self._pass_ended)

    # -- what happens

    def forward_begins(self, run: Run, inputs: Sequence[Any]) -> None:
        """A call is made."""
        self._backward_has_ended()
        self.runs.append(run)
        self._go_into(each.grad_fn for each in inputs if isinstance(each, Tensor))
        self.events.append((run.position, False))
        self._mark(begins=True)

    def forward_ends(self, run: Run, is_waiting: bool) -> None:
        """Its outputs are there."""
        if is_waiting:
            self.waiting[run] = False
        self._mark(begins=False)

    def backward_begins(self, run: Run, node: Node | None, tangents: Sequence[Tensor | None]) -> None:
        """Autograd has come to it."""
        if run not in self.waiting:
            return  # a second time, of a graph that was retained
        self._backward_has_ended()
        self.events.append((run.position, True))
        if self.recording is not None:
            gone = {place: size for place, (storage, size) in run.storages.items() if storage.expired()}
            held = () if self.is_rehearsed else run.plan.holds  # a rehearsal holds nothing
            run.charges = {place: size for place, size in gone.items() if place not in held}
            self.tangent_bytes = autograd.storage_bytes(each for each in tangents if each is not None)
            if node is not None:
                run.zeros_bytes = autograd.zeros_bytes(node, tangents)
                run.tangents = autograd.released(node, tangents)
            self._go_into([node])
            self._mark(begins=True)
            self._backward_of = run
        del self.waiting[run]
        for each in self.waiting:
            self.waiting[each] = True

    def backward_ended(self, run: Run) -> None:
        """Its gradients are there: autograd goes on with what they are for."""
        if self._backward_of is run:
            self._backward_has_ended()

    def _backward_has_ended(self) -> None:
        """So it has, if one has begun and nothing else told; a hook behind it would hold the tangents."""
        if self._backward_of is None:
            return
        self.tangent_bytes = 0
        self.gradient_bytes += self._backward_of.leaf_bytes
        self._backward_of.see_tangents()
        self._backward_of = None
        self._mark(begins=False)

    def dropped(self, run: Run) -> None:
        """Its backward will never come."""
        self.waiting.pop(run, None)

    def _mark(self, begins: bool) -> None:
        if self.recording is not None:
            # One call inside of another: a checkpoint's, say. A record can't be stopped inside of a pass.
            self.is_lost |= begins != (len(self.ran) % 2 == 0)
            if self.is_lost:
                return
            if self.ran:
                self.recording.mark()
            self.ran.append(begins)

    def _pass_begins(self, roots: Sequence[Any]) -> None:
        is_other = threading.get_ident() != self._thread or graphs.is_tracing()
        if is_other or self.is_paused or autograd.is_in_pass():
            return
        if self.accumulates and not any(is_backward for _, is_backward in self.events):
            self.kept_bytes = sum(autograd.gradients_of(roots).values())
        widest = self._go_into(each.grad_fn for each in roots if isinstance(each, Tensor))
        if isinstance(self.recording, Estimate) and not self.is_paused:
            self.result_bytes = widest  # what the loss is computed from: a variable of the program holds it
            self.recording.rises(2 * widest)

    def _go_into(self, nodes: Iterable[Node | None]) -> int:
        """See what autograd holds for the program around the graphs; the bytes of its largest gradient."""
        if self.is_paused or not isinstance(self.recording, Estimate):
            return 0
        known = {storage.cdata for run in self.runs for storage, _ in run.storages.values()}
        self.around_bytes, widest = autograd.around_graphs(nodes, known)
        return widest

    def _pass_ended(self) -> None:
        if threading.get_ident() != self._thread or self.is_paused or autograd.is_in_pass():
            return
        self._backward_has_ended()
        if self.is_lost:
            self._end_recording()
        has_run = any(is_backward for _, is_backward in self.events)
        if has_run and not self.waiting and self.recording is not None:
            self.learn()

    # -- what is learnt

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the recording what is done inside, such as compiling."""
        recorded = self.recording
        if recorded is None or self.is_paused:
            yield
            return
        recorded.pause()
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False
            recorded.resume()

    def learn(self) -> None:
        """End the recording, and keep what it says."""
        parts = self._end_recording()
        was_interrupted = len(parts) < len(self.ran) or sum(self.ran) < len(self.events)
        if self.is_lost or was_interrupted or not self.runs or not parts:
            return
        trace, measured = self._trace(parts)
        calls = tuple(run.known for run in self.runs)
        events = tuple((calls[position], is_backward) for position, is_backward in self.events)
        signature = self.accumulates, events
        plans = tuple(run.known.graph.seen(run.plan) for run in self.runs)
        growth = max(run.growth for run in self.runs)
        found = learnt(trace, measured if self.is_measured else None, plans)
        is_new = self.is_rehearsed or any(run.is_first for run in self.runs)
        self.family.learn(signature, Shape(calls, found, plans, growth, is_new, not self.is_rehearsed))

    def abandon(self) -> None:
        """Learn nothing of it."""
        self._end_recording()

    def _end_recording(self) -> list[Part]:
        if self.recording is None:
            return []
        recorded, self.recording = self.recording, None
        if self._end_watch is not None:
            self._end_watch()
        return recorded.stop()

    def _trace(self, parts: Sequence[Part]) -> tuple[Trace, int]:
        """The model of the episode, and the highest live bytes, of the parts in which it was recorded."""
        waiting: dict[int, int] = {}
        events = []
        live = highest = between = self.base_bytes + self.kept_bytes
        left = iter(self.events)
        for ran, part in itertools.zip_longest(self.ran, parts, fillvalue=False):
            assert isinstance(part, Part)
            highest = max(highest, live + part.peak_bytes)
            held = sum(waiting.values())
            if ran:
                position, is_backward = next(left)
                run = self.runs[position]
                arrives = run.zeros_bytes - run.charges.get(TANGENTS, 0) if is_backward else 0
                events.append(Event(position, is_backward, live - held + arrives, between))
                waiting.pop(position, None)
                if not is_backward:
                    waiting[position] = 0 if self.is_rehearsed else self.runs[position].plan.held_bytes
                between = 0
            else:
                between = max(between, live + part.peak_bytes - held)
            live += part.change_bytes
        calls = tuple(Call(run.known.graph.number, run.charges) for run in self.runs)
        return Trace(calls, tuple(events), between), highest

    def _estimated_bytes(self) -> int:
        """What is live as far as the graphs say."""
        outputs = {
            storage: size
            for run in self.runs
            for place, (storage, size) in run.storages.items()
            if place[0] == "outputs" and not storage.expired()
        }
        held = sum(run.plan.held_bytes for run in self.waiting)
        own = held + sum(outputs.values())
        return own + self.gradient_bytes + self.tangent_bytes + self.around_bytes + self.result_bytes


class Steps(threading.local):
    """The episodes of this thread.

    Attributes:
        families: What is known of them, by the graph that is called first.
        current: The one that is under way, or was the last.
        rehearsal: That which is going on (``ahead.py``); None where steps really run.
    """

    def __init__(self) -> None:
        self.families: dict[int, Family] = {}
        self.current: Episode | None = None
        self.rehearsal: Rehearsal | None = None
        self._begun: dict[int, Family] = {}
        self._at: Known | None = None  # the call that was made last, of those that are known

    @property
    def waiting(self) -> tuple[Run, ...]:
        """The calls whose backward is to come."""
        return () if self.current is None else tuple(self.current.waiting)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Record nothing of what is done inside."""
        return contextlib.nullcontext() if self.current is None else self.current.paused()

    def begin(self, graph: Graph, inputs: Sequence[Any], growth: float) -> tuple[Episode, Run]:
        """A call is about to be made: the episode that it belongs to, and the plan that it is to run.

        Args:
            graph: What it runs.
            inputs: What it is given.
            growth: How many times larger that may be by what the plan is made for.
        """
        if self._is_first(graph):
            self._begin_episode(graph, inputs)
        episode = self.current
        assert episode is not None
        if self._at is None:
            known = episode.family.first
        elif graph.number in self._at.next:
            known = self._at.next[graph.number]
        else:
            found = self.stored(graph.key)
            plan = graph.cautious_plan if found is None else found.plan
            _log.debug("%s: a call that no step had before, with a cautious or a stored plan", graph.name)
            known = self._at.next[graph.number] = Known(graph, plan, found)
            episode.family.is_surprised = episode.recording is None
        self._at = known
        return episode, Run(known, len(episode.runs), growth)

    def stored(self, key: str | None) -> StoredCall | None:
        """What another process has stored of the next call, if it is of the graph with a key."""
        if key is None or self.rehearsal is not None:
            return None
        if self.waiting:
            before = None if self._at is None else self._at.stored
            return None if before is None else before.next.get(key)
        found = stored.find(key)
        return None if found is None else found.first

    def _family(self, graph: Graph) -> Family:
        """A family of which nothing is known but what another process has stored."""
        found = None if graph.key is None or self.rehearsal is not None else stored.find(graph.key)
        if found is None:
            return Family(Known(graph, graph.first_plan))
        return Family(Known(graph, found.first.plan, found.first), found.figures)

    def _is_first(self, graph: Graph) -> bool:
        """Whether a call begins an episode."""
        episode = self.current
        if episode is None or not episode.waiting:
            return True
        is_over = all(episode.waiting.values())  # a backward has gone past what is waiting still
        return is_over and episode.family.first.graph is graph

    def _begin_episode(self, graph: Graph, inputs: Sequence[Any]) -> None:
        if self.current is not None and self.current.recording is not None:
            self.current.is_lost |= autograd.is_in_pass()  # and ended behind the pass
            if not self.current.is_lost:
                self.current.learn()
        family = self.families.get(graph.number)
        if family is None:
            family = self.families[graph.number] = self._family(graph)
        family.settle()
        accumulates = any(
            isinstance(each, Tensor) and each.is_leaf and each.grad is not None for each in inputs
        )
        family.is_surprised |= all(accumulates != before for before, _ in family.shapes)
        base_bytes = _base_bytes(inputs)
        self.current = Episode(family, base_bytes, accumulates, graph.device, self.rehearsal)
        self._begun[graph.number] = family
        self._at = None

    @contextlib.contextmanager
    def rehearsing(self, rehearsal: Rehearsal) -> Iterator[dict[int, Family]]:
        """Learn of the episodes that run inside; yield their families, by the graph that is called first."""
        before, at = self.current, self._at
        self.current, self.rehearsal, self._begun = None, rehearsal, {}
        try:
            yield self._begun
            if self.current is not None and self.current.recording is not None:
                self.current.learn()
        finally:
            if self.current is not None:
                self.current.abandon()
            self.current, self._at, self.rehearsal, self._begun = before, at, None, {}

    def plans_of(self, graph: Graph) -> list[Candidate]:
        """The plans that calls of a graph run."""
        waiting = [family.first for family in self.families.values()]
        found = []
        while waiting:
            known = waiting.pop()
            waiting += known.next.values()
            found += [known.plan] if known.graph is graph else []
        return found

    def reports(self, families: Iterable[Family] | None = None) -> tuple[StepReport, ...]:
        """A report for each episode that is known, with the plans that are settled.

        What ranks are still to agree upon is left out: to ask for reports must not need all of them.

        Args:
            families: Those meant; all by default.
        """
        found: list[StepReport] = []
        for family in self.families.values() if families is None else families:
            with contextlib.suppress(InfeasibleBudgetError):  # the next step raises it
                if family.round is None:
                    family.settle()
            found += family.reports()
        return tuple(found)


steps = Steps()


def _base_bytes(inputs: Sequence[Any]) -> int:
    """What a step has allocated before its first graph is called: results that are given to that."""
    tensors = (each for each in inputs if isinstance(each, Tensor) and each.grad_fn is not None)
    return autograd.storage_bytes(tensors)
