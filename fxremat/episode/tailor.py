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
from functools import partial
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
    at_hand = {graph: list(each) for graph, each in candidates.items()}
    settle_for = partial(settle, trace, at_hand)

    def chosen(found: Settlement) -> tuple[Candidate, ...]:
        return tuple(at_hand[call.graph][plan] for call, plan in zip(trace.calls, found.plans, strict=True))

    def ask(plans: Sequence[Candidate], budget: int) -> bool:
        """Ask for plans in place of those that could be better; whether there are any."""
        before = sum(map(len, at_hand.values()))
        worth = _worth(trace, plans, candidates, budget)
        for graph, plan in progress(worth, "fitting plans into the step"):
            members = _members(trace, plans, graph, plan)
            wanted = room(trace, plans, members, budget)
            for _ in range(LOOKS):
                found = tailor(graph, plan, wanted)
                at_hand[graph] += found
                fitting = [each for each in found if wanted.has(each)]
                above = min((_peak(trace, plans, members, each) - budget for each in fitting), default=0)
                if above <= 0:
                    break
                wanted = wanted.without(above)  # for the caller's memory that plans hold, others than now
        return sum(map(len, at_hand.values())) > before

    def lowered(goal: int) -> Settlement:
        """The choice of least peak, asked for lower ones until it is low enough, or none are found."""
        found, part = settle_for(None), LOWER
        for _ in range(MAX_LOWER):  # the same whatever the goal is, so that what comes of it can be a budget
            if part < LEAST_LOWER or found.peak_bytes <= goal:
                break
            is_asked = ask(chosen(found), int(found.peak_bytes * (1 - part)))
            lower = settle_for(None) if is_asked else found
            part = part / 2 if lower.peak_bytes >= found.peak_bytes else part
            found = min(found, lower, key=PEAK_AND_SECONDS)
        return found

    if budget_bytes is None:
        found = lowered(0)
        return chosen(found), found
    try:
        found = settle_for(budget_bytes)
    except InfeasibleBudgetError:
        lowered(budget_bytes)
        found = settle_for(budget_bytes)
    for _ in range(ROUNDS):
        if not ask(chosen(found), budget_bytes):
            break
        before, found = found, settle_for(budget_bytes)
        if found.seconds >= before.seconds:
            found = replace(found, plans=before.plans, peak_bytes=before.peak_bytes, seconds=before.seconds)
        if found.seconds > before.seconds * (1 - GAIN):
            break
    return chosen(found), found


def _members(trace: Trace, plans: Sequence[Candidate], graph: int, plan: Candidate) -> set[int]:
    """The calls of a graph that have a plan."""
    calls = zip(trace.calls, plans, strict=True)
    return {index for index, (call, each) in enumerate(calls) if call.graph == graph and each is plan}


def _peak(trace: Trace, plans: Sequence[Candidate], members: Collection[int], plan: Candidate) -> int:
    """The peak with another plan for some calls."""
    return peak_bytes(trace, [plan if index in members else each for index, each in enumerate(plans)])


def _worth(
    trace: Trace, plans: Sequence[Candidate], candidates: Candidates, budget: int
) -> list[tuple[int, Candidate]]:
    """The plans that others are worth being looked for, by their graphs: the most seconds to be had first.

    Where the peak is above the budget they are those that have a part in that.
    """
    moments = [each for each in timeline(trace, plans) if each.peak_bytes > budget]
    if moments:
        calls = {call for each in moments for call in (*each.held_bytes, each.call) if call is not None}
    else:
        calls = set(range(len(plans)))
    lost: dict[tuple[int, Candidate], float] = {}
    for index in sorted(calls):
        graph, plan = trace.calls[index].graph, plans[index]
        own = plan.seconds - min(each.seconds for each in candidates[graph])
        if len(candidates[graph]) > 1 and (own > 0.0 or moments):
            lost[graph, plan] = lost.get((graph, plan), 0.0) + own
    return sorted(lost, key=lambda each: -lost[each])
