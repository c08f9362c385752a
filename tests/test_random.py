"""Random numbers: each is drawn once, in eager's order, and forward and backward see the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import CountOperators
from models import case, fresh, train_step
from torch import Tensor, nn
from torch.nn import functional
from training import Program, assert_trains_alike, compiled, everything, program, square

import fxremat


def dropout_network(module: type[nn.Module] = nn.Dropout) -> nn.Module:
    """Three layers with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(4, 4), nn.GELU(), module(0.3))))


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("seed", [0, 1])
def test_forward_and_backward_use_the_same_masks(budget: Any, seed: int) -> None:
    """Euler's identity: of a homogeneous function, the gradient times the input is the value."""
    module, inputs = fresh(case("homogeneous"))
    subject = compiled(module, budget=budget)
    torch.manual_seed(seed)
    value, gradients = train_step(subject, inputs)
    torch.testing.assert_close((gradients["inputs.0"] * inputs[0]).sum(), value)


@pytest.mark.inductor
def test_forward_and_backward_use_the_same_masks_under_inductor() -> None:
    """Euler's identity where Inductor computes the masks from seeds, and may compute them again."""
    module, inputs = fresh(case("homogeneous"))
    subject = torch.compile(module, backend="fxremat", options={"budget": "min"})
    value, gradients = train_step(subject, inputs)
    assert sum(fxremat.reports()[-1].solution.mirror_counts.values()) > 0
    torch.testing.assert_close((gradients["inputs.0"] * inputs[0]).sum(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"budget": "min"}, {"planner": everything(1)}, {"planner": everything(2)}],
    ids=["min", "everything", "everything_twice"],
)
def test_dropout_trains_alike(options: dict[str, Any]) -> None:
    """The seed gives eager's masks, and the generator stands where eager leaves it."""
    assert_trains_alike(dropout_network(), [square()], **options)


def many_kinds(p: Program, x: Tensor) -> Tensor:
    """Random operators of every kind, each reading the last one's result."""
    y = (x @ p.weight).tanh()
    y = y * torch.rand_like(y) + torch.randn(4, 4)
    y = y.exp() * torch.bernoulli(torch.full((4, 4), 0.5))
    y = functional.dropout(y, 0.3).sin()[torch.randperm(4)]
    y = functional.rrelu(y + torch.randint(0, 5, (4, 4)) - 3, training=True)
    y = functional.gumbel_softmax(y) * torch.empty(4, 4).uniform_()
    y = y + torch.normal(y.detach(), 0.1) + torch.multinomial(torch.ones(4), 4)
    y = functional.alpha_dropout(y, 0.2, training=True)
    return functional.feature_alpha_dropout(y, 0.4, training=True).tanh()


@pytest.mark.parametrize("mirrors", [1, 2])
def test_random_operators_of_every_kind_keep_their_order(mirrors: int) -> None:
    """None is drawn twice and none moves before another."""
    (report,) = assert_trains_alike(program(many_kinds), [square()], planner=everything(mirrors))
    reasons = [value.reason for value in report.values if value.saved_bytes and not value.recomputed]
    assert "it draws random numbers" in reasons


def test_the_backward_draws_nothing() -> None:
    """Counted: no random operator of the forward runs in the backward."""
    subject = compiled(dropout_network(), planner=everything(1))
    loss = subject(square()).sum()
    with CountOperators() as counted:
        loss.backward()
    assert counted.counts["aten.addmm"] > 0
    assert not {"aten.native_dropout", "aten.bernoulli", "aten.bernoulli_"} & set(counted.counts)


def test_attention_with_dropout_draws_once() -> None:
    """Dropout inside of attention makes it a random operator."""

    def body(p: Program, x: Tensor) -> Tensor:
        q, k, v = ((x @ p.weight).tanh().view(2, 1, 2, 4) * scale for scale in (1, 2, 3))
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3).tanh().exp()

    assert_trains_alike(program(body), [square()], planner=everything(2))


# --- Where numbers are drawn ----------------------------------------------------------------------------


class ForwardNoise(torch.autograd.Function):
    """sin, whose gradient is multiplied by noise that the forward draws behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(torch.rand_like(x))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return gradient * noise


class BackwardNoise(torch.autograd.Function):
    """sin, whose gradient is multiplied by noise that the backward draws without reading anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand(4, 4)


@pytest.mark.parametrize("function", [ForwardNoise, BackwardNoise])
def test_numbers_are_drawn_in_the_pass_that_the_program_draws_them_in(function: Any) -> None:
    """Noise for the backward that the forward draws last is drawn there; the backward's own is drawn late."""
    body = lambda p, x: function.apply(function.apply(x @ p.weight).tanh() @ p.weight)  # noqa: E731
    assert_trains_alike(program(body), [square()], planner=everything(2))


def test_two_graphs_draw_in_turn() -> None:
    """A graph break between two dropouts changes no mask."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = functional.dropout(ForwardNoise.apply(x @ p.weight), 0.3).exp()
        torch._dynamo.graph_break()
        return ForwardNoise.apply(functional.dropout(y @ p.weight, 0.3)) + torch.rand(4, 4)

    assert len(assert_trains_alike(program(body), [square()], planner=everything(1))) == 2


def test_two_steps_under_way_keep_their_own_masks() -> None:
    """The backward of an earlier forward uses that forward's masks."""
    module, inputs = fresh(case("homogeneous"))
    subject = compiled(module, budget="min")
    values = [subject(*inputs) for _ in range(2)]
    for value in values:
        (gradient,) = torch.autograd.grad(value, inputs)
        torch.testing.assert_close((gradient * inputs[0]).sum(), value)
    assert values[0] != values[1]
