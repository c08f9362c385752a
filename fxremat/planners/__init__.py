"""The planners by name. One algorithm a file; each is a function from a Problem to solutions.

A planner returns its solutions with the one first that it prefers when no budget is given.

Besides the planners there are the parts that two of them are made of. ``auto``: ``condensed`` is the graph
that it plans on, ``order`` reorders it, ``evict`` and ``retain`` make and mend plans, and ``persistent`` is
the dynamic programme, of ``blocks``, their ``shapes``, the ``table`` and ``replay``. ``exact``: ``moves`` and
``sets``; by its name ``milp`` is called, which is that search, and for larger graphs the programme of
``stages``. Those that cut the forward share ``cuts``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fxremat.planners import auto, drop_cheap, keep_all, milp, min_cut, recursive, revolve, sublinear
from fxremat.planners.base import Problem, Solution

Planner: TypeAlias = Callable[[Problem], tuple[Solution, ...]]

PLANNERS: dict[str, Planner] = {
    "auto": auto.plan,
    "keep_all": keep_all.plan,
    "min_cut": min_cut.plan,
    "drop_cheap": drop_cheap.plan,
    "sublinear": sublinear.plan,
    "recursive": recursive.plan,
    "revolve": revolve.plan,
    "exact": milp.plan,
}

__all__ = ["PLANNERS", "Planner", "Problem", "Solution"]
