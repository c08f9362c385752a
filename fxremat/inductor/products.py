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
    devices than a CPU it prefers a loop for the sum if only loops read it.

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
    found = {}
    for step, loop in enumerate(loops):
        if not loop.is_sum:
            continue
        has_loops_alone = all(loops[each].kind is Kind.POINTWISE for each in readers[step])
        if has_loops_alone and step not in needed and not on_cpu:
            continue
        for read in reversed(reads[step]):
            if read is None or read in needed or readers[read] != [step]:
                continue
            if loops[read].is_product and loops[read].elements == loop.elements:
                found[read] = step
                break
    return found
