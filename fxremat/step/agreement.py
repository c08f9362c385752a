"""Agreement: the same plans on all ranks of a program that trains in several processes.

What a rank measures is its own: its batch, its machine, a profiler that was recording. Were each to settle
its plans by that, one might compute more again than the others, which wait for it. So the ranks tell one
another what they have learnt, and settle once for all.

Terms:
    post: what a rank tells of an episode that it has learnt.
    round: one post of each rank: those that tell of the n-th recording of their m-th family.
    alike: ranks whose posts are of the same graphs, called in the same order, under the same options.

1. A rank *posts* when it has learnt an episode, behind the last backward, and waits for nobody.
2. Before plans are settled, a round is *decided*: it is on as soon as all have posted, and off as soon as one
   has waited for long enough; whichever comes first holds for all. Until then steps go on with the plans that
   they have.
3. Of ranks that are alike the first to come *settles*: it merges their posts, chooses plans, and tells them.
   The others take these, or the error.

All this goes through the store of the process group, in which ranks leave messages. It is no collective.
So nothing is stuck if a rank never comes: one that has no such step, or that waits for another in between,
as the stages of a pipeline do. Ranks that are not alike, such as those stages, agree among their like.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fxremat._torch import processes
from fxremat._torch.processes import Group, StoreLost
from fxremat.episode.learnt import Learnt, merged
from fxremat.episode.trace import Candidate
from fxremat.errors import FxrematError
from fxremat.step.settling import Graph, Settled

PATIENCE_SECONDS = 10.0  # that a process waits for the posts of others, until it was in vain once
MAX_LOOKS = 16  # at a round that is not decided: one before each step
SETTLING_SECONDS = 1800.0  # that a rank may take to choose plans
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-3, 0.05  # between two looks

ON, OFF = "on", "off"


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank tells of an episode.

    Attributes:
        digest: The same for ranks that are alike.
        is_measured: Whether it was measured this time.
        learnt: What is known of it.
    """

    digest: str
    is_measured: bool
    learnt: Learnt


@dataclass(frozen=True, slots=True)
class Agreed:
    """What ranks have agreed upon.

    Attributes:
        learnt: What they know together of the episode.
        is_measured: Whether any of them measured it.
        plans: With which plans it was recorded.
        settled: The plans of the family's calls; or why there are none.
        note: Who has agreed.
        is_partial: Whether that is not all ranks.
    """

    learnt: Learnt
    is_measured: bool
    plans: tuple[Candidate, ...]
    settled: Settled | FxrematError
    note: str
    is_partial: bool


class Round:
    """A round that this rank has posted in.

    Args:
        group: The ranks.
        key: The same on all ranks, and for no other round.
        post: What this rank tells.
        plans: With which plans its episode was recorded.
    """

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS  # none any more once it was in vain

    def __init__(self, group: Group, key: str, post: Post, plans: tuple[Candidate, ...]) -> None:
        self._group = group
        self._key = key
        self._post = post
        self._plans = plans
        self._looks = 0
        group.tell(f"{key}/{group.rank}", pickle.dumps(post))
        group.count(f"{key}/posts", 1)

    def agreed(self, settle: Callable[[Learnt], Settled]) -> Agreed | None:
        """What this rank goes on with, together with others or by itself; None if that is not decided yet.

        Args:
            settle: Chooses plans by what ranks know together; of those that are alike one calls it.
        """
        why = "not all ranks have told of such a step"
        try:
            decided = self._decided()
            if decided is None:
                return None
            found = None
            if decided == ON:
                why = "the rank that was to choose the plans of all has not told them"
                found = self._together(settle)
        except StoreLost as error:
            why, found = f"the store of the process group can't be used: {error}", None
        if found is None:
            note = f"rank {self._group.rank} has plans of its own: {why}"
            found = self._outcome([self._post], settle, note, is_partial=True)
        if found.is_partial:
            warnings.warn(f"fxremat: {found.note}", stacklevel=2)
        return found

    def call_off(self) -> None:
        """Take part no longer, and have no other wait for this rank."""
        with contextlib.suppress(StoreLost):
            self._group.first(f"{self._key}/decided", OFF)

    def _decided(self) -> str | None:
        """Whether the round is on or off; None if it is open still."""
        key = f"{self._key}/decided"
        self._looks += 1
        patience = Round.patience_seconds if self._looks == 1 else 0.0
        if _waited(lambda: self._is_complete() or self._group.told(key) is not None, patience):
            return self._group.first(key, ON)
        Round.patience_seconds = 0.0
        return self._group.first(key, OFF) if self._looks == MAX_LOOKS else None

    def _is_complete(self) -> bool:
        """Whether all have posted."""
        return self._group.count(f"{self._key}/posts") == self._group.size

    def _together(self, settle: Callable[[Learnt], Settled]) -> Agreed | None:
        """What the ranks that are alike have agreed upon; None where the one that settles has failed."""
        key = f"{self._key}/{self._post.digest}"
        rank = f"{self._group.rank}"
        if self._group.first(f"{key}/settles", rank) == rank:
            return self._settle_for_all(f"{key}/agreed", settle)
        _waited(lambda: self._group.told(f"{key}/agreed") is not None, SETTLING_SECONDS)
        found: Agreed | None = _read(self._group.told(f"{key}/agreed"))
        return found

    def _settle_for_all(self, key: str, settle: Callable[[Learnt], Settled]) -> Agreed:
        agreed = None
        try:
            posts = [_read(self._group.told(f"{self._key}/{rank}")) for rank in range(self._group.size)]
            alike = {rank: each for rank, each in enumerate(posts) if each.digest == self._post.digest}
            is_partial = len(alike) < len(posts)
            agreed = self._outcome(list(alike.values()), settle, self._who(list(alike)), is_partial)
        finally:
            self._group.tell(key, pickle.dumps(agreed))
        return agreed

    def _outcome(
        self, posts: Sequence[Post], settle: Callable[[Learnt], Settled], note: str, is_partial: bool
    ) -> Agreed:
        measured = [each.learnt for each in posts if each.is_measured]
        known = merged(measured or [each.learnt for each in posts])
        try:
            found: Settled | FxrematError = settle(known)
        except FxrematError as error:
            found = error
        return Agreed(known, bool(measured), self._plans, found, note, is_partial)

    def _who(self, ranks: Sequence[int]) -> str:
        """Who has agreed."""
        if len(ranks) == self._group.size:
            return f"the plans are the same on all {len(ranks)} ranks"
        numbers = ", ".join(map(str, ranks))
        return f"the plans are the same on ranks {numbers} of {self._group.size}; others run another step"


def post(
    key: str, digest: str, is_measured: bool, learnt: Learnt, plans: tuple[Candidate, ...]
) -> Round | None:
    """A round in which this rank has posted; None where it is alone.

    Args:
        key: The same on all ranks, and for no other round.
        digest: The same for ranks that are alike.
        is_measured: Whether the episode was measured this time.
        learnt: What is known of it.
        plans: With which plans it was recorded.
    """
    group = processes.group()
    if group is None:
        return None
    try:
        return Round(group, key, Post(digest, is_measured, learnt), plans)
    except StoreLost as error:
        warnings.warn(f"fxremat: rank {group.rank} has plans of its own: {error}", stacklevel=2)
        return None


def least(key: str, own: int) -> int:
    """The least of what all ranks have found, and what this one has if it is alone.

    It waits for those that have not told theirs, for a while only: one may have no such thing to tell.

    Args:
        key: The same on all ranks, and for nothing else.
        own: What this rank has found.
    """
    group = processes.group()
    if group is None:
        return own
    try:
        group.tell(f"{key}/{group.rank}", str(own).encode())
        ranks = [f"{key}/{rank}" for rank in range(group.size)]
        _waited(lambda: all(group.told(each) is not None for each in ranks), Round.patience_seconds)
        told = [int(each) for each in map(group.told, ranks) if each is not None]
        agreed = int(group.first(f"{key}/least", str(min(told))))
    except StoreLost as error:
        warnings.warn(f"fxremat: rank {group.rank} has a budget of its own: {error}", stacklevel=2)
        return own
    if agreed > own:
        late = "the others had agreed on a larger one before it told of its own"
        warnings.warn(f"fxremat: rank {group.rank} has a budget of its own: {late}", stacklevel=2)
    return min(agreed, own)


def digest_of(graphs: Sequence[Graph], order: object) -> str:
    """The same for ranks whose graphs have the same nodes, sizes and options, and are called in one order.

    Times are no part of it: machines differ in them.

    Args:
        graphs: What each call runs.
        order: The order of forwards and backwards, as text shows it.
    """
    numbers = {number: position for position, number in enumerate(dict.fromkeys(g.number for g in graphs))}
    text = repr((order, [(numbers[graph.number], _facts(graph)) for graph in graphs]))
    return hashlib.sha256(text.encode()).hexdigest()


def _facts(graph: Graph) -> tuple[object, ...]:
    options, baseline = graph.options, graph.baseline
    sizes = (baseline.held_bytes, baseline.forward_bytes, baseline.backward_bytes)
    planner = options.planner if isinstance(options.planner, str) else "a function"
    return (
        options.budget,
        planner,
        options.compiler,
        options.inplace,
        graph.margin,
        baseline.schedule,
        sizes,
    )


def _read(told: bytes | None) -> Any:
    """What a rank told, as it was."""
    return None if told is None else pickle.loads(told)


def _waited(is_so: Callable[[], bool], seconds: float) -> bool:
    """Whether something is so, or comes to be within some seconds."""
    end, pause = time.monotonic() + seconds, SHORTEST_SECONDS
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_SECONDS)
    return found
