"""Operands that are read for their sizes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from unseen import no_loops

import fxremat
from fxremat.emit.partition import saved_values
from fxremat.graph import ops
from fxremat.graph.contents import forget_contents

POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


class Pooled(nn.Module):
    """What nothing but average pooling reads, between two layers."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        pool = POOLS[dims - 1](3, 2, padding=1, count_include_pad=False)
        self.layers = nn.Sequential(conv(3, 4, 3), pool, conv(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """A loss of images, sequences or volumes of three channels."""
        return self.layers(x).square().sum()


def sizes(dims: int) -> tuple[int, ...]:
    """Of a batch."""
    return (2, 3) + (9,) * dims


def pooled_is_saved(graph: fxremat.JointGraph) -> bool:
    """Whether the backward gets the first convolution's result, or a view of it."""
    views = graph.nodes[graph.index["convolution"]].views
    return any(graph.nodes[index].views == views for index in saved_values(graph))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_is_pooled_is_not_saved_for_its_sizes(dims: int) -> None:
    """Without a budget, too; autograd saves it."""
    x = torch.randn(sizes(dims))
    assert pooled_is_saved(fxremat.capture(Pooled(dims), x))
    assert not pooled_is_saved(fxremat.capture(Pooled(dims), x, compiler="inductor"))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_the_same(dims: int, last: bool) -> None:
    """In every bit, whatever was pooled, and however it lay."""
    x = torch.randn(sizes(dims))
    if last and dims > 1:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    model = Pooled(dims)
    module = fxremat.capture(model, x).module
    inputs = [*(each.detach() for each in model.parameters()), x, torch.tensor(1.0)]
    assert module is not None
    assert len(inputs) == len(module.graph.find_nodes(op="placeholder"))
    expected = module(*inputs)
    before = len(module.graph.nodes)
    forget_contents(module)
    module.recompile()
    assert len(module.graph.nodes) == before + 1
    for found, wanted in zip(module(*inputs), expected, strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


def test_sizes_that_are_not_known_are_read() -> None:
    """They are taken from the operand."""
    model = Pooled(2)
    found: list[bool] = []

    def look(problem: fxremat.Problem) -> fxremat.Solution:
        graph = problem.graph
        pooled = [node for node in graph.fx_nodes if ops.packet(node) is ops.aten.avg_pool2d_backward]
        found.extend(ops.is_convolution(node.args[1]) for node in pooled)
        return fxremat.PLANNERS["keep_all"](problem)[0]

    compiled = torch.compile(model, backend="fxremat", dynamic=True, options={"planner": look})
    with fresh_cache(), no_loops():
        compiled(torch.randn(2, 3, 9, 9)).backward()
    assert found == [True]
