"""The values that PyTorch's default keeps, in our order.

PyTorch's partitioner chooses what to save by a minimum cut whose capacities are bytes and whose bans are
what Inductor would have to pay for. The choice costs no time where kernels fuse, so it is the baseline
under Inductor. What it does not save is recomputed lazily, by Algorithm 2.
"""

from __future__ import annotations

from fxremat.planners.base import Problem, Solution


def plan(problem: Problem) -> tuple[Solution, ...]:
    """Mirror count 1 for each forward value that the minimum cut does not keep; none without an fx graph."""
    if problem.graph.module is None:
        return (problem.identity("min_cut"),)
    kept = set(problem.min_cut_saved())
    counts = {
        name: 1
        for name in problem.graph.names[: problem.graph.boundary - problem.graph.num_inputs]
        if name not in kept
    }
    for name in kept:
        leader = problem.graph.leader(name)
        if leader is not None:
            counts.pop(leader, None)
    return (problem.mirror(counts, "min_cut"),)
