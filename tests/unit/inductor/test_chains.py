"""Kernels whose outer loops are fused."""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.graph.loops import Reduction
from fxremat.inductor.chains import link
from fxremat.inductor.kernels import Kernel
from fxremat.inductor.ranges import Ranges
from fxremat.inductor.timing import in_order, spread

IMAGES, CHANNELS, POINTS = 8, 16, 1024


def sums(of: int, written: int) -> Reduction:
    """Sums of so many elements, of which so many are written."""
    return Reduction(of, written, is_inner=True)


def kernel(
    step: int, ranges: Ranges, reduction: Reduction | None, producers: Sequence[Kernel] = ()
) -> Kernel:
    """A kernel of one step."""
    elements = IMAGES * CHANNELS * POINTS if reduction is None else reduction.read
    found = Kernel(elements, reduction, ranges, runs_at=step)
    found.steps.append(step)
    found.newest = step
    for producer in producers:
        found.producers.append(producer)
        producer.consumers.append(found)
    return found


def normalisation(channels_kept: tuple[int, ...] = (IMAGES, CHANNELS)) -> list[Kernel]:
    """Sums over points, their sums over channels, and what is computed with these, with another between."""
    points = sums(IMAGES * CHANNELS * POINTS, IMAGES * CHANNELS)
    first = kernel(0, Ranges(channels_kept, (POINTS,)), points)
    between = kernel(1, Ranges((CHANNELS,), (IMAGES,)), sums(IMAGES * CHANNELS, CHANNELS), [first])
    second = kernel(2, Ranges((IMAGES,), (CHANNELS,)), sums(IMAGES * CHANNELS, IMAGES), [first])
    return [first, between, second, kernel(3, Ranges((IMAGES, POINTS, CHANNELS)), None, [second])]


def shared(first: Kernel, second: Kernel) -> int:
    """All may be fused, and share the more the earlier they stand."""
    return 10 - first.steps[0]


def test_kernels_with_the_same_outer_range_are_a_chain() -> None:
    """They run at one step; what reads one of them alone runs before or behind all."""
    kernels = normalisation()
    link(kernels, shared)
    first, between, second, last = kernels
    assert first.head is second.head is last.head is first and between.head is between
    order = in_order(kernels)
    spread(order, boundary=0, num_steps=8)
    assert first.runs_at == second.runs_at == last.runs_at != between.runs_at
    assert order.index(last) - order.index(first) == 2


def test_a_chain_has_one_depth() -> None:
    """One outer range that the first two have in common, both reductions, is not all of the third's."""
    first, _, second, _ = normalisation()
    deeper = kernel(4, Ranges((IMAGES, CHANNELS)), None, [first])
    link([first, deeper, second], lambda before, behind: 1 + (behind is deeper))
    assert second.head is first.head is first and deeper.head is deeper


def test_kernels_with_another_between_or_no_common_range_are_no_chain() -> None:
    """One between would have to run inside; ranges are common from the outermost on, or not at all."""
    first, between, second, _ = normalisation()
    second.producers.append(between)
    link([first, between, second], shared)
    assert first.head is first and second.head is second
    flat = normalisation((IMAGES * CHANNELS,))
    link(flat, shared)
    assert flat[0].head is flat[0] and flat[2].head is flat[3].head is flat[2]


def test_chains_do_not_wait_for_each_other() -> None:
    """Of two pairs, each with one that reads the other's first, or is read by its second, one stays apart."""
    rows, points = Ranges((IMAGES,), (CHANNELS,)), Ranges((IMAGES, POINTS))
    first = kernel(0, rows, sums(IMAGES * CHANNELS, IMAGES))
    other = kernel(1, rows, sums(IMAGES * CHANNELS, IMAGES))
    between = kernel(2, Ranges((CHANNELS,)), None, [first])
    before = kernel(3, Ranges((CHANNELS,)), None, [other])
    ends = [kernel(4, points, None, [first, before]), kernel(5, points, None, [other, between])]
    kernels = [first, other, between, before, *ends]
    link(kernels, lambda one, two: int(one.steps[0] < 2 and two.steps[0] > 3))
    assert len({each.head for each in kernels}) == len(kernels) - 1
    order = in_order(kernels)
    assert all(order.index(producer) < order.index(each) for each in order for producer in each.producers)


def test_what_must_not_be_fused_is_no_chain() -> None:
    """As past an external kernel that runs again."""
    kernels = normalisation()
    link(kernels, lambda first, second: 0)
    assert all(each.head is each for each in kernels)
