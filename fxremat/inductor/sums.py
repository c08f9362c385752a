"""Sums: gradients of an image that are added up are stored, each sum over one that it is of.

The gradient of a residual stream of images grows by what each convolution's gradient adds. Inductor computes
such sums inside of all that reads them, so that several images are held where one would do, and each reader
goes through all of them. A plan has the sum stored. It takes the place of what is added, which nobody reads
any more, and mostly saves as much reading as it takes writing. Without a budget all is left to Inductor.
Linear in nodes and reads.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import fx

from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import LOOPS, Kind, kind, readers

SUM = "fxremat_sum"  # key in the fx meta of a sum that plans have stored: in the place of which operand


def gradient_sums(graph: JointGraph, images: Container[int]) -> Iterator[tuple[int, int]]:
    """The sums of gradients that several loops, and nothing else, read.

    Args:
        graph: A traced graph.
        images: Indices of its images.

    Yields:
        Pairs of an index, and which of its two operands the sum takes the place of.
    """
    found: set[fx.Node] = set()
    for index in range(graph.boundary, len(graph.nodes)):
        node = graph.fx_nodes[index]
        if index not in images or not (ops.is_sum_of_two(node) and _is_read_by_loops(node)):
            continue
        fitting = [each for each in node.all_input_nodes if _is_last_read(each, node, found)]
        if fitting:
            found.add(node)
            yield index, node.args.index(fitting[0])


def _is_read_by_loops(node: fx.Node) -> bool:
    found = dict.fromkeys(readers(node))
    return len(found) > 1 and all(each.op == "call_function" and kind(each) in LOOPS for each in found)


def _is_last_read(operand: fx.Node, total: fx.Node, sums: Container[fx.Node]) -> bool:
    """Whether a value of a buffer of its own is read by a sum, and by nothing behind it."""
    operator = operand.args[0] if ops.is_getitem(operand) else operand
    is_stored = operand in sums or (isinstance(operator, fx.Node) and kind(operator) is Kind.KERNEL)
    return is_stored and all(each.op != "output" and each <= total for each in readers(operand))
