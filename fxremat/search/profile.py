"""Profile: the bytes that are live at each run of a plan of operators (``condensed.py``).

A *life* is one making of a buffer by a run of a plan: it begins with that run and is read by the runs up to
the next making of the buffer. These rules are those of the whole search; eviction and retention count by all
of them, tables by 1, 2 and 5 (*apart*), for the blocks of a table do not know their neighbours:

1. A buffer is live from the run that makes it to the last that reads it. What nobody reads dies at once.
2. Of a buffer that is returned one life lasts to the end: the last one that the forward begins; if there is
   none, the last of all.
3. A run that may write over a buffer takes its place if it is the last to read it, if nothing returns it, and
   if both are of the forward or both of the backward. The buffer does not count beside the result then.
4. Neighbouring loops that run in one *call* begin and end together: what one of them reads or makes is live
   throughout. No call goes on from the forward into the backward.
5. Tangents are live from where the backward begins, scratch memory at its own run. Where autograd copies a
   gradient when all has run, the last run counts at least what is live then.

All lives of a plan are found by one sort of its reads and makings by buffer and run, which takes a fraction
of what walking through the plan does. O(n log n) in the plan's reads and makings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxremat.search.condensed import Condensed
from fxremat.search.flat import Flags, Integers


class Lives(NamedTuple):
    """The lives of a plan's buffers, by buffer and then by run.

    Attributes:
        buffer: The buffer of each.
        run: The run that makes it.
        last: The run that reads it last; its own if none does.
        is_read: Whether a run reads it.
        is_again: For each run of the plan, whether its operator ran before.
    """

    buffer: Integers
    run: Integers
    last: Integers
    is_read: Flags
    is_again: Flags


class Profile(NamedTuple):
    """What is live at each run of a plan, and why.

    Attributes:
        live: The live bytes at each run.
        boundary: The first run of the backward.
        first: For each run, that with which its call begins.
        last: For each run, that with which its call ends.
        returned: The run and the buffer of each life that lasts to the end.
        overwritten: For each run that takes the place of a buffer, the run that made it, and the buffer.
    """

    live: Integers
    boundary: int
    first: Integers
    last: Integers
    returned: tuple[tuple[int, int], ...]
    overwritten: dict[int, tuple[int, int]]

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes."""
        return int(self.live.max(initial=0))


class Plan(NamedTuple):
    """A plan with what it takes.

    Attributes:
        peak_bytes: Its highest live bytes.
        seconds: What its operators take.
        operators: The operators in execution order.
    """

    peak_bytes: int
    seconds: float
    operators: tuple[int, ...]

    @classmethod
    def of(cls, condensed: Condensed, operators: Sequence[int], apart: bool = False) -> Plan:
        """The plan that runs these operators."""
        found = profile(condensed, operators, apart)
        return cls(found.peak_bytes, condensed.seconds(operators), tuple(operators))


def peak_bytes(condensed: Condensed, plan: Sequence[int]) -> int:
    """The highest live bytes of a plan."""
    return profile(condensed, plan).peak_bytes


def profile(condensed: Condensed, plan: Sequence[int], apart: bool = False) -> Profile:
    """What is live at each run of a plan in which every run finds what it reads.

    Args:
        condensed: The graph.
        plan: The operators in execution order.
        apart: Whether each operator is a call by itself, and takes the place of no buffer.
    """
    flat, found = condensed.flat, lives(condensed, plan)
    operators, boundary = np.array(plan, dtype=np.int64), condensed.boundary_of(plan)
    first, last = _calls(flat.is_loop[operators] & (not apart), boundary)
    stays = flat.is_pinned[found.buffer] & _is_latest(found, boundary)
    sizes = flat.size[found.buffer]
    live = live_bytes(len(plan), sizes, first[found.run], np.where(stays, len(plan) - 1, last[found.last]))
    live += flat.scratch_bytes[operators]
    live[boundary:] += condensed.graph.tangent_bytes
    taken = _overwritten(condensed, operators, found, boundary)[: 0 if apart else None]
    live -= live_bytes(len(plan), sizes[taken], first[found.last[taken]], last[found.last[taken]])
    live[-1:] = np.maximum(live[-1:], condensed.after_bytes)
    sources = zip(found.run[taken].tolist(), found.buffer[taken].tolist(), strict=True)
    returned = zip(found.run[stays].tolist(), found.buffer[stays].tolist(), strict=True)
    overwritten = dict(zip(found.last[taken].tolist(), sources, strict=True))
    return Profile(live, boundary, first, last, tuple(returned), overwritten)


def lives(condensed: Condensed, plan: Sequence[int]) -> Lives:
    """The lives of a plan in which every run finds what it reads."""
    operators, firsts = np.array(plan, dtype=np.int64), condensed.first_runs(plan)
    is_again = np.ones(len(operators), dtype=bool)
    is_again[firsts[firsts >= 0]] = False
    readers, read = condensed.flat.reads.take(operators)
    makers, made = condensed.flat.makings.take(2 * operators + is_again)
    buffers = np.concatenate([read, made])
    runs = np.concatenate([readers, makers])
    order = np.argsort(buffers * (2 * len(operators)) + 2 * runs + _is_making(read, made))
    buffers, runs = buffers[order], runs[order]
    births = np.flatnonzero(order >= len(read))
    ends = np.append(births[1:], len(order))[: len(births)] - 1  # the last event of each life
    return Lives(buffers[births], runs[births], runs[ends], ends > births, is_again)


def _is_making(read: Integers, made: Integers) -> Integers:
    """A run makes buffers behind what it reads."""
    return np.repeat(np.array([0, 1]), [len(read), len(made)])


def _is_latest(found: Lives, boundary: int) -> Flags:
    """Whether each life is its buffer's last of the forward; its last of all, if the forward begins none."""
    in_forward = found.run < boundary
    is_final = np.append(found.buffer[1:] != found.buffer[:-1], True)[: len(found.buffer)]
    is_followed = np.append(in_forward[1:], False)[: len(found.buffer)] & ~is_final
    begins_early = np.zeros(int(found.buffer.max(initial=-1)) + 1, dtype=bool)
    begins_early[found.buffer[in_forward]] = True
    return np.where(in_forward, ~is_followed, is_final & ~begins_early[found.buffer])


def _calls(is_loop: Flags, boundary: int) -> tuple[Integers, Integers]:
    """The first and the last run of each run's call."""
    count = len(is_loop)
    is_joined = np.append(False, is_loop[1:] & is_loop[:-1])[:count] & (np.arange(count) != boundary)
    calls = np.cumsum(~is_joined) - 1
    firsts = np.flatnonzero(~is_joined)
    lasts = np.append(firsts[1:], count) - 1
    return firsts[calls], lasts[: len(firsts)][calls]


def _overwritten(condensed: Condensed, operators: Integers, found: Lives, boundary: int) -> Integers:
    """The lives whose place the last run that reads them takes: one a run, the first it may write over."""
    runs, buffers = condensed.flat.overwrites.take(operators)
    is_same_part = (found.run < boundary) == (found.last < boundary)
    free = np.flatnonzero(found.is_read & is_same_part & ~condensed.flat.is_pinned[found.buffer])
    if not len(runs) or not len(free):
        return free[:0]
    count = len(condensed.size)
    keys = found.last[free] * count + found.buffer[free]
    order = np.argsort(keys)
    wanted = runs * count + buffers
    places = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    taken = free[order[places]]
    is_there = keys[order[places]] == wanted
    found_lives: Integers = taken[is_there][np.unique(runs[is_there], return_index=True)[1]]
    return found_lives


def live_bytes(length: int, sizes: Integers, first: Integers, last: Integers) -> Integers:
    """The bytes that are live at each run.

    Args:
        length: How many runs there are.
        sizes: Bytes of each life.
        first: The run from which each is live.
        last: The run to which each is live, that run included.
    """
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, first, sizes)
    np.subtract.at(change, last + 1, sizes)
    return np.cumsum(change[:-1])
