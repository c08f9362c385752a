"""Sums of slices that become slices of one sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxremat
from fxremat.graph import ops
from fxremat.graph.accumulation import add_up_whole

WIDTH, LAYERS = 4, 5


class Dense(nn.Module):
    """Each layer reads a concatenation of all before it, along some dimension."""

    def __init__(
        self, read: Callable[[Tensor], Tensor] = torch.tanh, dim: int = 1, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.read, self.dim = read, dim
        self.layers = nn.ModuleList(nn.Linear(WIDTH * each, WIDTH) for each in range(1, layers + 1))

    def forward(self, x: Tensor) -> Tensor:
        """A loss of a batch."""
        found = [x]
        for layer in self.layers:
            found.append(layer(self.read(torch.cat(found, self.dim))))
        return torch.cat(found, self.dim).sin().sum()


def traced(model: nn.Module, x: Tensor) -> fx.GraphModule:
    """The joint graph of a step, as autograd makes it."""
    module = fxremat.capture(model, x).module
    assert module is not None
    return module


def num_sums(module: fx.GraphModule) -> int:
    """How many sums there are."""
    module.graph.eliminate_dead_code()
    return sum(ops.packet(node) is ops.aten.add for node in module.graph.nodes)


def check(module: fx.GraphModule, count: int, *inputs: Tensor) -> None:
    """So many sums give way, and all results are the same in every bit."""
    expected, before = module(*inputs), num_sums(module)
    assert add_up_whole(module) == count
    assert count or num_sums(module) == before
    for found, wanted in zip(module(*inputs), expected, strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


def inputs_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a traced step is called with."""
    return [*(each.detach() for each in model.parameters()), x, torch.tensor(1.0)]


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_sum_is_left_for_each_layer(is_trained: bool, dim: int) -> None:
    """Of one for each pair of layers: the first is added to nothing, and the last adds a single value."""
    x = torch.randn((2, 5, WIDTH)[-dim - 1 :], requires_grad=is_trained)
    model = Dense(dim=dim)
    module = traced(model, x)
    pairs = LAYERS * (LAYERS - 1 + 2 * is_trained) // 2
    assert num_sums(module) == pairs
    check(module, pairs - 1, *inputs_of(model, x.detach()))
    assert num_sums(module) == LAYERS - 1 + is_trained


def test_gradients_of_kernels_are_left_alone() -> None:
    """They have buffers of their own: a sum beside these would be one more."""
    model, x = Dense(nn.Identity()), torch.randn(3, WIDTH)
    check(traced(model, x), 0, *inputs_of(model, x))


class Halved(nn.Module):
    """Adds halves in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        """A loss of a batch."""
        a, b = x.sin(), x.cos()
        return ((a[:, :2] + b[:, :2]) * (a[:, 2:] + b[:, 2:]).exp()).sum()


def test_the_forward_is_as_it_was_written() -> None:
    """The user may have orders for each of its nodes."""
    x = torch.randn(3, 4, requires_grad=True)
    assert add_up_whole(traced(Halved(), x)) == 0


def halves(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Sums of slices of two values."""
    return a[:, :2] + b[:, :2], a[:, 2:] + b[:, 2:]


CASES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, ...]], int]] = {
    "all": (halves, 2),
    "not all of it": (lambda a, b: (a[:, 1:2] + b[:, 1:2], a[:, 2:3] + b[:, 2:3]), 2),
    "a part of more": (lambda a, b: halves(torch.cat([a, a], 1)[:, 2:6], b), 2),
    "elsewhere": (lambda a, b: (a[:, :2] + b[:, 1:3], a[:, 2:3] + b[:, 3:]), 2),
    "one alone": (lambda a, b: (a[:, :2] + b[:, :2],), 0),
    "both are read besides": (lambda a, b: (*halves(a, b), a.sum(), b.sum()), 0),
    "one is read besides": (lambda a, b: (*halves(a, b), a.sum()), 2),
    "seen otherwise": (lambda a, b: halves(a, b.view(16).view(4, 4)), 2),
    "seen otherwise and read besides": (lambda a, b: (*halves(a.t(), b.view(16).view(4, 4)), a + b), 0),
    "crossed": (lambda a, b: (a[:, :2] + b[:, 2:], a[:, 2:] + b[:, :2]), 0),
    "a gap": (lambda a, b: (a[:, :1] + b[:, :1], a[:, 2:] + b[:, 2:]), 0),
    "twice": (lambda a, b: (a[:, :2] + b[:, :2], a[:, 1:] + b[:, 1:]), 0),
    "steps": (lambda a, b: (a[:, ::2] + b[:, ::2], a[:, 1::2] + b[:, 1::2]), 0),
    "dimensions": (lambda a, b: (a[:, :2] + b[:2].t(), a[:, 2:] + b[2:].t()), 0),
    "types": (lambda a, b: halves(a, b.double()), 0),
    "weights": (lambda a, b: (torch.add(a[:, :2], b[:, :2], alpha=2), a[:, 2:] + b[:, 2:]), 0),
    "sizes": (lambda a, b: (a[:, :2] + b[:1, :2], a[:, 2:] + b[:1, 2:]), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_slices_are_added_whole_where_they_lie_alike(name: str) -> None:
    """Side by side in both values, of which one is read by nothing else."""
    function, count = CASES[name]
    x = torch.randn(4, 4)
    module = make_fx(lambda x: function(x.sin(), x.cos()), tracing_mode="fake")(x)
    check(module, count, x)
