"""The programme solved: the best plan for a budget in a given order of the operators, with a bound.

HiGHS (Huangfu and Hall 2018; ``scipy.optimize.milp``) solves the mixed-integer programme of ``programme.py``
for the least seconds within a budget, or for the least peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy  # its parts are imported when they are first used, which takes longer than all of fxremat

from fxremat.proof.programme import Array, Programme

SCALE = 1000.0  # what seconds and bytes are scaled to: HiGHS keeps to a millionth, whatever the unit
TOLERANCE = 1e-4  # of SCALE: by how much a plan must beat another to count as better
# A matrix, and the least and the most of its product.
Limit: TypeAlias = "tuple[scipy.sparse.csr_array, float, Any]"
OPTIMAL, LIMIT, INFEASIBLE = 0, 1, 2  # the status of scipy's milp


class Answer(NamedTuple):
    """What is known of a programme.

    Attributes:
        plan: The best plan that was found among those that are better than what was given, if any.
        bound: No plan has less of what is minimised; what was given if no plan is better.
        is_proved: Whether the plan is the best, or it is proved that none is better.
    """

    plan: tuple[int, ...] | None
    bound: float
    is_proved: bool


def least_seconds(stages: Programme, budget: int, below: float, limit_seconds: float) -> Answer:
    """The plan that takes the least time within a budget, if that is less than so many seconds.

    Args:
        stages: The plans.
        budget: Bytes, tangents included.
        below: What the plan must take less than; infinite for any.
        limit_seconds: When to give up.
    """
    once = sum(operator.seconds for operator in stages.condensed.operators)
    unit = once / SCALE or 1.0
    cost = stages.seconds / unit
    limits = [_memory(stages, budget)]
    if below < math.inf:
        limits.append((scipy.sparse.csr_array(cost[None, :]), -np.inf, (below - once) / unit - TOLERANCE))
    answer = _solve(stages, cost, limits, limit_seconds)
    return answer._replace(bound=min(once + answer.bound * unit, below))


def least_peak(stages: Programme, below: float, limit_seconds: float) -> Answer:
    """The plan with the lowest peak, if that is less than so many bytes."""
    unit = below / SCALE
    peak = scipy.sparse.csr_array(np.full((stages.sizes.shape[0], 1), -1.0))
    limits = [(scipy.sparse.hstack([stages.sizes / unit, peak]), -np.inf, -stages.least_bytes / unit)]
    cost = np.zeros(len(stages.seconds) + 1)
    cost[-1] = 1.0
    answer = _solve(stages, cost, limits, limit_seconds, SCALE - TOLERANCE)
    return answer._replace(bound=min(answer.bound * unit, below))


def _memory(stages: Programme, budget: int) -> Limit:
    unit = max(1, budget) / SCALE
    return stages.sizes / unit, -np.inf, (budget - stages.least_bytes) / unit


def _solve(
    stages: Programme,
    cost: Array,
    limits: Sequence[Limit],
    limit_seconds: float,
    most: float = 1.0,
) -> Answer:
    """Minimise a cost; variables beyond those of the stages are from 0 to ``most``."""
    own, count = len(stages.seconds), len(cost)
    none = scipy.sparse.csr_array((stages.rows.shape[0], count - own))
    rows = scipy.sparse.hstack([stages.rows, none])
    is_whole = np.zeros(count)
    is_whole[[variable for _, _, variable in stages.mirrors]] = 1
    upper = np.where(np.arange(count) < own, 1.0, most)
    found = scipy.optimize.milp(
        cost,
        integrality=is_whole,
        bounds=(0.0, upper),
        constraints=[(rows, -np.inf, stages.limits), *limits],
        options={"time_limit": limit_seconds, "mip_rel_gap": 0.0},
    )
    if found.status == INFEASIBLE:
        return Answer(None, math.inf, is_proved=True)
    assert found.status in (OPTIMAL, LIMIT), found.message
    chosen = None if found.x is None else stages.plan(found.x)
    bound = 0.0 if found.mip_dual_bound is None else max(0.0, found.mip_dual_bound)
    return Answer(chosen, bound, found.status == OPTIMAL)
