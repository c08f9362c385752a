"""Products: those that Inductor computes together with their sum."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fxremat.graph.loops import Kind, Loop


def summed_products(
    loops: Sequence[Loop],
    reads: Sequence[Sequence[int | None]],
    readers: Sequence[Sequence[int]],
    needed: Collection[int],
    on_cpu: bool,
) -> dict[int, int]:
    """Products of matrices that are computed with the sum that reads them, by ``addmm``.

    Of two products that are added it is the second, for Inductor's patterns are tried in that order. On other
    devices than a CPU it prefers a loop for the sum if only loops read it. It goes through the sums from the
    last, so that one that such a product reads is read by an operator.

    Args:
        loops: What each step computes.
        reads: The steps that each one reads.
        readers: The steps that read each one's value, views looked through.
        needed: Steps that something else needs besides their readers: the caller, the other graph, or an
            operator that waits for them.
        on_cpu: Whether the graph runs on a CPU.

    Returns:
        The step of the sum for that of each product.
    """
    found: dict[int, int] = {}
    operators = {step for step, loop in enumerate(loops) if loop.kind is not Kind.POINTWISE}
    for step in reversed([step for step, loop in enumerate(loops) if loop.is_sum]):
        if operators.isdisjoint(readers[step]) and step not in needed and not on_cpu:
            continue
        for read in reversed(reads[step]):
            if read is None or read in needed or readers[read] != [step]:
                continue
            if loops[read].is_product and loops[read].elements == loops[step].elements:
                found[read] = step
                operators.add(step)
                break
    return found
