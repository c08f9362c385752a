"""The planners by name: what the option ``planner`` takes, one a file.

Each is a function from a Problem to solutions, with the one first that it prefers when no budget is given.
What they are made of is elsewhere: ``search`` finds plans, ``proof`` proves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fxremat.planners import auto, drop_cheap, exact, keep_all, min_cut, recursive, revolve, sublinear
from fxremat.predict.problem import Problem, Solution

Planner: TypeAlias = Callable[[Problem], tuple[Solution, ...]]

PLANNERS: dict[str, Planner] = {
    "auto": auto.plan,
    "keep_all": keep_all.plan,
    "min_cut": min_cut.plan,
    "drop_cheap": drop_cheap.plan,
    "sublinear": sublinear.plan,
    "recursive": recursive.plan,
    "revolve": revolve.plan,
    "exact": exact.plan,
}

__all__ = ["PLANNERS", "Planner", "Problem", "Solution"]
