"""The values that PyTorch's default keeps, in our order; see ``search/baseline.py``."""

from __future__ import annotations

from fxremat.predict.problem import Problem, Solution
from fxremat.search.baseline import min_cut_plan


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The plan of the minimum cut."""
    return (min_cut_plan(problem),)
