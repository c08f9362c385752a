"""Stored: the plans that steps have settled for, kept on disk, so that the next process begins with them.

A step is known by the graph that it calls first. Beside the compiler's cache, whose entries it is of use
with, a file for each such graph says which plan each call of its steps runs, and under which policy that was
compiled, since this is a part of the key of the compiled code. So the next process plans nothing and compiles
nothing. It records its first step nevertheless; and where that takes more than it should, or calls what was
not called before, all goes on as if nothing had been stored.

Where several processes train together, all of them go on with what the first finds that looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fxremat._torch import compilers, processes
from fxremat.episode.trace import Candidate, Place
from fxremat.graph.schedule import Schedule
from fxremat.options.options import Budget

NOTHING = "{}"  # what is told to other processes where nothing is stored


@dataclass(frozen=True, slots=True, eq=False)
class StoredCall:
    """A call of the steps that are stored, known by the calls before it.

    Attributes:
        plan: The plan that it runs.
        policy: The policy that the plan was compiled under.
        next: The calls that came after it, by the key of their graph.
    """

    plan: Candidate
    policy: str
    next: dict[str, StoredCall] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of the steps together, as of ``settling.Settled``.

    Attributes:
        budget: The budget, as it was given.
        peak_bytes: The predicted peak with the plans.
        lowest_peak_bytes: The least that plans at hand can have.
        lower_bound_seconds: No choice among them takes less within the budget.
    """

    budget: Budget
    peak_bytes: int
    lowest_peak_bytes: int
    lower_bound_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The steps that begin with one graph.

    Attributes:
        first: Their first call.
        figures: What is known of them.
    """

    first: StoredCall
    figures: Figures


# A call: the position of the call before it (-1 for none), the key of its graph, its plan and policy.
Row = tuple[int, str, Candidate, str]


def keep(rows: Sequence[Row], figures: Figures) -> None:
    """Store steps; a file that can't be written is not.

    Args:
        rows: Their calls, each behind the one before it.
        figures: What is known of them.
    """
    place = folder()
    if place is None:
        return
    plans = {(plan, policy): None for _, _, plan, policy in rows}
    positions = {each: position for position, each in enumerate(plans)}
    text = json.dumps(
        {
            "calls": [(before, key, positions[plan, policy]) for before, key, plan, policy in rows],
            "plans": [_told(plan) | {"policy": policy} for plan, policy in plans],
            "figures": asdict(figures),
        }
    )
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, place / _name(rows[0][1]))
        except OSError:
            os.unlink(temporary)
            raise


def find(key: str) -> Stored | None:
    """The steps that begin with a graph; None where none are stored, or not what can be read.

    Args:
        key: What the graph is known by.
    """
    place, text = folder(), NOTHING
    if place is not None:
        with contextlib.suppress(OSError, UnicodeError):
            text = (place / _name(key)).read_text(encoding="utf-8")
    group = processes.group()
    try:
        return _read(text if group is None else group.first(f"stored/{key}", text))
    except (processes.StoreLost, ValueError, TypeError, LookupError):
        return None


def _read(text: str) -> Stored | None:
    found = json.loads(text)
    if not found:
        return None
    plans = [(_plan(each), str(each["policy"])) for each in found["plans"]]
    calls: list[StoredCall] = []
    for before, key, position in found["calls"]:
        calls.append(StoredCall(*plans[position]))
        if before >= 0:
            calls[before].next[key] = calls[-1]
    return Stored(calls[0], Figures(**found["figures"]))


def _told(plan: Candidate) -> dict[str, Any]:
    levels = [(size, _listed(places)) for size, places in plan.levels]
    return asdict(plan) | {"holds": _listed(plan.holds), "levels": levels}


def _listed(places: Iterable[Place]) -> list[Place]:
    return sorted(places, key=str)


def _places(told: Iterable[tuple[str, int | str]]) -> frozenset[Place]:
    return frozenset((str(kind), place) for kind, place in told)


def _plan(told: dict[str, Any]) -> Candidate:
    return Candidate(
        Schedule(map(str, told["schedule"])),
        float(told["seconds"]),
        int(told["held_bytes"]),
        int(told["forward_bytes"]),
        int(told["backward_bytes"]),
        _places(told["holds"]),
        tuple((int(size), _places(places)) for size, places in told["levels"]),
    )


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def folder() -> Path | None:
    """Where steps are stored; None where the user has switched the compiler's caches off."""
    cache = compilers.cache_folder()
    return None if cache is None else cache / "fxremat"
