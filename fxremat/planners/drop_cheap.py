"""Drop the results of cheap operators (Chen et al. 2016, Sec. 4.2).

Dense linear algebra, convolutions and attention are kept; normalisations, activations, pooling and
everything else that is limited by bandwidth is computed again where the backward needs it.
"""

from __future__ import annotations

from fxremat.device.arithmetic import flops
from fxremat.predict.problem import Problem, Solution


def plan(problem: Problem) -> tuple[Solution, ...]:
    """The one plan."""
    return (problem.mirror(mirror_counts(problem), "drop_cheap"),)


def mirror_counts(problem: Problem) -> dict[str, int]:
    """Mirror count 1 for each forward value whose operator does no dense arithmetic.

    In a graph made of mappings an operator is cheap whose seconds are below the mean of the forward's.
    """
    graph = problem.graph
    forward = range(graph.num_inputs, graph.boundary)
    if graph.fx_nodes:
        cheap = [node for node in forward if flops(graph.fx_nodes[node]) == 0]
    else:
        seconds = {node: problem.costs.of_node(graph, node) for node in forward}
        mean = sum(seconds.values()) / max(1, len(seconds))
        cheap = [node for node in forward if seconds[node] < mean]
    return {graph.nodes[node].name: 1 for node in cheap}
