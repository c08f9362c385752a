"""Values that products of matrices read lie so that they read them in place, where nothing asks otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from unseen import no_loops

import fxremat
from fxremat._torch import compilers
from fxremat.graph import ops
from fxremat.inductor.operands import arrange_operands
from fxremat.measure import measure_peak

Function = Callable[[Tensor, Tensor], object]


def traced(function: Function, value: Tensor, weights: Tensor, mode: str = "fake") -> fx.GraphModule:
    """The graph of a function of a value and weights."""
    return make_fx(function, tracing_mode=mode)(value, weights)


def orders(part: fx.GraphModule) -> list[tuple[int, ...]]:
    """The strides that values are told to be stored with."""
    forced = filter(lambda node: "force_stride_order" in str(node.target), part.graph.nodes)
    return [node.meta["val"].stride() for node in forced]


def by_last(x: Tensor, w: Tensor) -> Tensor:
    """A product for each index of the last dimension: neither rows nor columns lie side by side."""
    return torch.bmm(x.exp().permute(2, 0, 1), w)


def in_heads(x: Tensor, w: Tensor) -> Tensor:
    """A product with all heads of a token in a row, of a value that has a dimension for heads."""
    return x.relu().permute(0, 2, 1, 3).view(-1, 12) @ w


def heads_first() -> Tensor:
    """Two sentences, three heads, five tokens and four features, of which each token's lie together."""
    return torch.randn(2, 5, 3, 4).permute(0, 2, 1, 3)


def test_rows_are_stored_side_by_side() -> None:
    """The dimension that products are counted by is no longer the last one, and none has to copy."""
    x, w = torch.randn(6, 4, 3), torch.randn(3, 4, 2)
    part = traced(by_last, x, w)
    assert arrange_operands(part) == 1
    assert orders(part) == [(12, 1, 4)]
    torch.testing.assert_close(part(x, w), by_last(x, w), rtol=0, atol=0)


def in_heads_and_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A caller's value as well, which lies as it was traced."""
    y = x.relu()
    return y.permute(0, 2, 1, 3).view(-1, 12) @ w, y


@pytest.mark.parametrize("function", [in_heads, in_heads_and_returned])
def test_views_go_on_being_views(function: Function) -> None:
    """In the order of sizes the view would be a copy; in the order that was traced it is none."""
    x, w = heads_first(), torch.randn(12, 4)
    part = traced(function, x, w)
    assert arrange_operands(part) == 1
    assert orders(part) == [x.stride()]


def test_what_waits_is_looked_into() -> None:
    """A product that runs behind another node reads its operands through what makes it wait."""
    part = traced(in_heads, heads_first(), torch.randn(12, 4))
    product = next(node for node in part.graph.nodes if ops.packet(node) is ops.aten.mm)
    compilers.order_after(part, {product: next(iter(part.graph.nodes))})
    assert arrange_operands(part) == 1


def squared(x: Tensor, w: Tensor) -> Tensor:
    """Products of a value with itself, of which columns lie side by side."""
    y = x.exp().mT
    return torch.bmm(y, y) + w


def test_a_product_of_a_value_with_itself_may_wait() -> None:
    """What waits is given each of its operands once."""
    x, w = torch.randn(3, 5, 5), torch.randn(3, 5, 5)
    part = traced(squared, x, w)
    (product,) = part.graph.find_nodes(op="call_function", target=ops.aten.bmm.default)
    compilers.order_after(part, {product: next(iter(part.graph.nodes))})
    assert arrange_operands(part) == 0
    torch.testing.assert_close(part(x, w), squared(x, w), rtol=0, atol=0)


def by_each(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Products for each index of the first, the second and the last dimension; one has to copy."""
    y = x.exp()
    return tuple(torch.bmm(y.movedim(dim, 0), y.movedim(dim, 0).mT) for dim in range(3))


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A caller's value, which lies as it was traced."""
    y = x.exp()
    return torch.bmm(y.permute(2, 0, 1), w), y


def sorted_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A value that another kernel reads, too."""
    y = x.exp()
    return torch.bmm(y.permute(2, 0, 1), w), y.sort()[0]


def seen_in_memory(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A value of which another is what lies at some places in memory."""
    y = x.exp()
    return torch.bmm(y.permute(2, 0, 1), w), y.as_strided((8,), (5,)) * 2


def of_an_input(x: Tensor, w: Tensor) -> Tensor:
    """A value that no loop makes."""
    return torch.bmm(x.permute(2, 0, 1), w)


def in_order(x: Tensor, w: Tensor) -> Tensor:
    """A value that is read in the order of its sizes."""
    return x.exp().view(-1, 3) @ w[:, :, 0]


@pytest.mark.parametrize("function", [by_each, returned, sorted_too, seen_in_memory, of_an_input, in_order])
def test_others_are_left_as_they_are(function: Function) -> None:
    """What needs no other order, or may not get one."""
    part = traced(function, torch.randn(6, 4, 3), torch.randn(3, 4, 2))
    assert arrange_operands(part) == 0
    assert not orders(part)


def sliced(x: Tensor, w: Tensor) -> Tensor:
    """A part of a value of known sizes, as long as another tensor."""
    y = torch.arange(72.0).view(6, 4, 3).exp()
    return torch.bmm(y.permute(2, 0, 1)[:, : x.shape[0]], w)


@pytest.mark.parametrize("function", [by_last, sliced])
def test_unknown_sizes_are_left_as_they_are(function: Function) -> None:
    """Orders are tried on sizes that are known."""
    part = traced(function, torch.randn(5, 4, 3), torch.randn(3, 4, 2), "symbolic")
    assert arrange_operands(part) == 0


class Experts(nn.Module):
    """Layers of experts, each token's result the sum of theirs by weights."""

    def __init__(self, width: int = 16, experts: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.firsts, self.seconds = (
            nn.ParameterList(nn.Parameter(torch.randn(size) / 4) for _ in range(layers))
            for size in ((experts, width, 2 * width), (experts, 2 * width, width))
        )
        self.routers = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for first, second, router in zip(self.firsts, self.seconds, self.routers, strict=True):
            hidden = torch.einsum("btd,ndh->bnth", x, first).relu().square()
            x = x + torch.einsum("bnth,nhd,btn->btd", hidden, second, router(x).softmax(-1))
        return x.square().mean()


def test_code_holds_no_copies_of_operands() -> None:
    """Of the products of ``einsum`` with what loops have made of others, the code takes what is predicted."""
    model, x = Experts(), torch.randn(4, 32, 16)
    compiled = torch.compile(model, backend="fxremat", options={"budget": None})
    with no_loops():
        compiled(x).backward()
        measured = measure_peak(lambda: compiled(x).backward()).peak_bytes
    report = fxremat.reports()[-1]
    assert report.solution.peak_bytes == pytest.approx(measured, rel=0.03)
