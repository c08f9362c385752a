"""The baseline: what runs without fxremat.

PyTorch's partitioner chooses what to save by a minimum cut whose capacities are bytes and whose bans are
what Inductor would have to pay for. The choice costs no time where kernels fuse, so it is the baseline under
Inductor. What it does not save is recomputed lazily, by Algorithm 2. Saving a view keeps the storage that it
looks at, so that storage's maker is kept, the backward reads the view that was saved, and other views are
free. A saved value that the trace computes in the backward alone, such as a mask, moves to the forward.
"""

from __future__ import annotations

from fxremat.graph.collector import collector_paused
from fxremat.graph.nodes import Phase
from fxremat.predict.problem import Problem, Solution
from fxremat.search.cuts import mirror_everything_but


def baseline_plan(problem: Problem) -> Solution:
    """What the user has without us: under Inductor PyTorch's min-cut, else what a checkpoint policy says.

    Without us nothing is written in place that the program does not write in place.
    """
    return default_plan(problem.without)


def default_plan(problem: Problem) -> Solution:
    """What runs where no budget is given: the baseline, written in place where that is safe."""
    if problem.model.fuses:
        return min_cut_plan(problem)
    wished = {node.name: 1 for node in problem.graph.nodes if node.wish == "recompute"}
    return problem.mirror(wished, "keep_all")


@collector_paused()
def min_cut_plan(problem: Problem) -> Solution:
    """Mirror count 1 for each forward value that the minimum cut does not keep; none without an fx graph."""
    graph = problem.graph
    if graph.module is None:
        return problem.identity("min_cut")
    saved = [graph.nodes[graph.index[name]] for name in problem.min_cut_saved()]
    kept = {storage for node in saved for storage in node.views}
    early = [node.name for node in saved if node.phase is Phase.DEFERRED and node.views]
    counts = mirror_everything_but(graph, kept)
    return problem.mirror({**counts, **{node.name: 0 for node in saved}}, "min_cut", early)
