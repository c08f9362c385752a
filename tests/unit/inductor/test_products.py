"""Products that are computed with the sum that reads them."""

from __future__ import annotations

import pytest

from fxremat.graph.loops import Kind, Loop
from fxremat.inductor.products import summed_products

PRODUCT, SUM = Loop(Kind.KERNEL, 4, is_product=True), Loop(Kind.POINTWISE, 4, is_sum=True)


@pytest.mark.parametrize("is_returned", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_sums_of_the_gradients_of_a_parameter_that_is_used_several_times(
    on_cpu: bool, is_returned: bool
) -> None:
    """The last is read by no loop; an operator computes it then, which reads the sum before it."""
    loops = [PRODUCT, PRODUCT, SUM, PRODUCT, SUM, PRODUCT, SUM, Loop(Kind.POINTWISE, 4)]
    reads = [(), (), (0, 1), (), (2, 3), (), (4, 5), (6,)]
    readers = [[step for step, read in enumerate(reads) if each in read] for each in range(len(loops))]
    found = summed_products(loops, reads, readers, {6} if is_returned else (), on_cpu)
    assert found == ({1: 2, 3: 4, 5: 6} if on_cpu or is_returned else {})
