"""Room: what an episode leaves to the plan of some of its calls, when the plans of all others are chosen.

Candidates are found before anything is known of the step around their graph. When it is known, a plan can be
looked for that fits into it: it may hold so much while others run, and have such a peak when it runs itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxremat.episode.trace import Candidate, Trace, charged_bytes, held_bytes, own_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """What a plan may take.

    Attributes:
        peak_bytes: Its forward or its backward, as ``Candidate`` counts them.
        held_bytes: Between them.
    """

    peak_bytes: int
    held_bytes: int

    def has(self, plan: Candidate) -> bool:
        """Whether a plan fits that holds as much of the caller's memory as the plan before."""
        is_low = max(plan.forward_bytes, plan.backward_bytes) <= self.peak_bytes
        return is_low and plan.held_bytes <= self.held_bytes

    def without(self, size: int) -> Room:
        """The room that is so many bytes smaller."""
        return Room(max(0, self.peak_bytes - size), max(0, self.held_bytes - size))


def room(trace: Trace, plans: Sequence[Candidate], members: Collection[int], budget_bytes: int) -> Room:
    """What another plan of some calls may take, so that the episode keeps a budget.

    Where one of these calls runs while others of them wait, they share what is left, or too much: each of
    those that wait may hold as much more as the one that runs may take.

    Args:
        trace: The episode.
        plans: The plan of each call.
        members: The positions of the calls, which have the same plan.
        budget_bytes: The budget; below the episode's peak it is what that is to come down to.
    """
    held_most = peak_most = math.inf
    running: list[tuple[float, int, int]] = []  # what is left for members, what one takes, how many wait
    waiting: set[int] = set()

    def left(outside_bytes: int) -> float:
        """What is left of the budget beside the others that wait, and what members hold of others' memory."""
        others = sum(held_bytes(trace.calls[each], plans[each]) for each in waiting.difference(members))
        charged = sum(charged_bytes(trace.calls[each], plans[each]) for each in waiting.intersection(members))
        return budget_bytes - outside_bytes - others - charged

    def others_need(outside_bytes: int) -> None:
        nonlocal held_most
        count = len(waiting.intersection(members))
        if count:
            held_most = min(held_most, left(outside_bytes) / count)

    for event in trace.events:
        others_need(event.between_bytes)
        waiting.discard(event.call)
        call, plan = trace.calls[event.call], plans[event.call]
        own = own_bytes(call, plan, event.is_backward)
        if event.call in members:
            bare = plan.backward_bytes if event.is_backward else plan.forward_bytes
            rest = left(event.outside_bytes) - (own - bare)
            running.append((rest, bare, len(waiting.intersection(members))))
        else:
            others_need(event.outside_bytes + own)
        if not event.is_backward:
            waiting.add(event.call)
    others_need(trace.after_bytes)
    held_now = max(plans[each].held_bytes for each in members)
    for rest, bare, count in running:
        if count:
            held_most = min(held_most, held_now + (rest - bare - count * held_now) / (count + 1))
    held_most = max(0.0, held_most)
    for rest, _, count in running:
        peak_most = min(peak_most, rest - (count * held_most if count else 0.0))
    held_most = min(held_most, peak_most)
    return Room(math.floor(max(0.0, peak_most)), math.floor(max(0.0, held_most)))
