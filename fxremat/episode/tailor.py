"""Tailor: plans that fit into a step, when what it leaves to its graphs is known.

Candidates are a coarse frontier in three figures: what a plan holds, and its two peaks. A step asks for a few
points of it. Once it has settled for candidates, each graph is asked for plans that fit where these do
(``room.py``). They are found from the candidates next to that, by the whole memory model, which takes a
fraction of what finding candidates takes. Then the step settles again, with what was found besides.

For the least memory, rooms are those of budgets that are somewhat lower than the step's peak.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from fxremat.episode.candidates import Improve, fresh
from fxremat.episode.hold import held, with_hold, without_hold
from fxremat.episode.room import Room, room
from fxremat.episode.settle import Settlement, settle
from fxremat.episode.trace import Candidate, Trace, peak_bytes, timeline
from fxremat.errors import InfeasibleBudgetError
from fxremat.memory.liveness import profile_of
from fxremat.predict.problem import PEAK_AND_SECONDS, Problem, progress

NEAREST = 6  # candidates on either side of a room from which plans for it are looked for
LOOKS = 2  # at a room, when it turns out what else its plans hold
ROUNDS = 3  # in which each graph is asked for plans within a budget
GAIN = 2e-3  # of the time; a round that gains less is the last
LOWER, LEAST_LOWER = 0.04, 0.01  # by which the least peak shall be lower, at first and at last
MAX_LOWER = 8  # goals for it

Candidates: TypeAlias = Mapping[int, Sequence[Candidate]]
Tailor: TypeAlias = Callable[[int, Candidate, Room], Sequence[Candidate]]


def plans_for(
    problem: Problem, known: Sequence[Candidate], plan: Candidate, wanted: Room, improve: Improve
) -> list[Candidate]:
    """Plans that fit into a room, as far as there are any, and others near to it.

    Args:
        problem: The problem of the graph.
        known: Its candidates.
        plan: The one in whose place another is wanted.
        wanted: The room.
        improve: Finds plans of a problem for a budget from others that are known.
    """
    graph = problem.graph
    binding, lowering = problem.lowered(problem.evaluate(plan.schedule, "auto"))
    profile = profile_of(graph, binding, lowering)
    # A problem counts, besides, the outputs between forward and backward, and with the tangents behind it.
    outputs_bytes = max(0, profile.saved_bytes - plan.held_bytes)
    others_bytes = max(0, int(profile.live_bytes[binding.boundary :].max(initial=0)) - plan.backward_bytes)
    budget = wanted.peak_bytes + others_bytes
    scratch_bytes = max(0, budget - wanted.held_bytes - outputs_bytes)

    def peak(each: Candidate) -> int:
        between = each.held_bytes + outputs_bytes + scratch_bytes
        return max(each.forward_bytes, each.backward_bytes + others_bytes, between)

    narrowed = held(problem, scratch_bytes)
    fitting = [each for each in known if peak(each) <= budget]
    starts = heapq.nsmallest(NEAREST, fitting, key=lambda each: each.seconds)
    starts += heapq.nsmallest(NEAREST, (each for each in known if peak(each) > budget), key=peak)
    schedules = (with_hold(each.schedule, graph) for each in starts)
    found = improve(narrowed, [narrowed.evaluate(each, "auto") for each in schedules], budget)
    return fresh(problem, (without_hold(each.schedule) for each in found), known)


def tailored(
    trace: Trace, candidates: Candidates, budget_bytes: int | None, tailor: Tailor
) -> tuple[tuple[Candidate, ...], Settlement]:
    """The plans of an episode's calls, with those that graphs found for it; and what ``settle`` says of them.

    Args:
        trace: The episode.
        candidates: Those of each graph, by its number.
        budget_bytes: What the peak must not exceed; None for the lowest peak.
        tailor: Finds plans of a graph, given its number, for a room in place of a plan.

    Raises:
        InfeasibleBudgetError: No choice fits.
    """
    tailoring = _Tailoring(trace, candidates, tailor)
    found = tailoring.lowest(0) if budget_bytes is None else tailoring.within(budget_bytes)
    return tailoring.plans(found), found


class _Tailoring:
    """An episode that is settled with more and more plans."""

    def __init__(self, trace: Trace, candidates: Candidates, tailor: Tailor) -> None:
        self.trace = trace
        self.tailor = tailor
        self.at_hand = {graph: list(each) for graph, each in candidates.items()}

    def within(self, budget: int) -> Settlement:
        """The choice of least time within a budget.

        Raises:
            InfeasibleBudgetError: No choice fits.
        """
        try:
            found = settle(self.trace, self.at_hand, budget)
        except InfeasibleBudgetError:
            self.lowest(budget)
            found = settle(self.trace, self.at_hand, budget)
        for _ in range(ROUNDS):
            if not self._ask(self.plans(found), budget):
                break
            before, found = found, settle(self.trace, self.at_hand, budget)
            if found.seconds >= before.seconds:
                found = replace(
                    found, plans=before.plans, peak_bytes=before.peak_bytes, seconds=before.seconds
                )
            if found.seconds > before.seconds * (1 - GAIN):
                break
        return found

    def lowest(self, enough: int) -> Settlement:
        """The choice of least peak; lower ones are asked for until it is low enough, or none are found."""
        found, part = settle(self.trace, self.at_hand, None), LOWER
        for _ in range(MAX_LOWER):  # the same whatever is enough, so that what comes of it can be a budget
            if part < LEAST_LOWER or found.peak_bytes <= enough:
                break
            is_asked = self._ask(self.plans(found), int(found.peak_bytes * (1 - part)))
            lower = settle(self.trace, self.at_hand, None) if is_asked else found
            part = part / 2 if lower.peak_bytes >= found.peak_bytes else part
            found = min(found, lower, key=PEAK_AND_SECONDS)
        return found

    def plans(self, found: Settlement) -> tuple[Candidate, ...]:
        """The plans of a choice."""
        pairs = zip(self.trace.calls, found.plans, strict=True)
        return tuple(self.at_hand[call.graph][plan] for call, plan in pairs)

    def _ask(self, plans: Sequence[Candidate], budget: int) -> bool:
        """Ask for plans in place of those that could be better; whether there are any."""
        before = sum(map(len, self.at_hand.values()))
        worth = self._worth(plans, budget)
        for (graph, plan), members in progress(worth.items(), "fitting plans into the step"):
            wanted = room(self.trace, plans, members, budget)
            for _ in range(LOOKS):
                found = self.tailor(graph, plan, wanted)
                self.at_hand[graph] += found
                fitting = [each for each in found if wanted.has(each)]
                above = min((self._peak(plans, members, each) - budget for each in fitting), default=0)
                if above <= 0:
                    break
                wanted = wanted.without(above)  # for the caller's memory that plans hold, others than now
        return sum(map(len, self.at_hand.values())) > before

    def _worth(self, plans: Sequence[Candidate], budget: int) -> dict[tuple[int, Candidate], set[int]]:
        """The plans that others are worth being looked for, by graph, and the calls that have them.

        Where the peak is above the budget they are those that have a part in that; else those with the most
        seconds to be had come first.
        """
        high = [each for each in timeline(self.trace, plans) if each.peak_bytes > budget]
        to_blame = {call for each in high for call in (*each.held_bytes, each.call)}
        members: dict[tuple[int, Candidate], set[int]] = {}
        for index, (call, plan) in enumerate(zip(self.trace.calls, plans, strict=True)):
            members.setdefault((call.graph, plan), set()).add(index)

        def lost(graph: int, plan: Candidate) -> float:
            least = min(each.seconds for each in self.at_hand[graph])
            return len(members[graph, plan]) * (plan.seconds - least)

        def is_worth(graph: int, plan: Candidate) -> bool:
            is_part = not members[graph, plan].isdisjoint(to_blame) if high else lost(graph, plan) > 0.0
            return is_part and len(self.at_hand[graph]) > 1

        ranked = sorted(members, key=lambda each: -lost(*each))
        return {each: members[each] for each in ranked if is_worth(*each)}

    def _peak(self, plans: Sequence[Candidate], members: Collection[int], plan: Candidate) -> int:
        """The peak with another plan for some calls."""
        replaced = [plan if index in members else each for index, each in enumerate(plans)]
        return peak_bytes(self.trace, replaced)
