"""Random numbers: forward and backward see the same, and the program's later ones are eager's.

Where graphs run as they are, numbers are drawn again from the state that the generator had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import CountOperators
from models import case, fresh, train_step
from torch import Tensor, nn
from torch.nn import functional
from training import Program, assert_trains_alike, compiled, everything, program, square

import fxremat
from fxremat.graph.generators import redraw


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
    """Drawn again they are the same, and none moves before another."""
    (report,) = assert_trains_alike(program(many_kinds), [square()], planner=everything(mirrors))
    drawn_again = {value.operator for value in report.values if value.recomputed}
    assert {
        "aten.rand_like.default",
        "aten.native_dropout.default",
        "aten.multinomial.default",
    } <= drawn_again


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "uniform": lambda x: torch.empty_like(x).uniform_(),
    "normal": lambda x: torch.empty_like(x).normal_(),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "gumbel_softmax": functional.gumbel_softmax,
}


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", DRAWS)
def test_two_draws_alike_are_two(name: str, budget: Any) -> None:
    """Of the same operand, by the same operator: other numbers, which eager has, too."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = x @ p.weight - 1
        first, second = DRAWS[name](y), DRAWS[name](y)
        return (y * (first - second)).sin()

    module = program(body)
    assert module(square()).count_nonzero()
    assert_trains_alike(module, [square()], budget=budget)


def test_the_backward_leaves_the_generator_as_it_was() -> None:
    """Counted: it draws the masks again, each from its own state."""
    subject = compiled(dropout_network(), planner=everything(1))
    loss = subject(square()).sum()
    state = torch.get_rng_state()
    with CountOperators() as counted:
        loss.backward()
    assert counted.counts["aten.addmm"] > 0 and counted.counts["aten.native_dropout"] > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_what_raises_leaves_the_generator_as_it_was() -> None:
    """An operator that fails while it draws again disturbs no later number."""
    state, before = torch.get_rng_state(), torch.rand(3)
    now = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        redraw(state, torch.device("cpu"), torch.ops.aten.bernoulli.default, torch.full((3,), 2.0))
    assert torch.equal(torch.get_rng_state(), now)
    assert torch.equal(redraw(state, torch.device("cpu"), torch.rand, 3), before)
    assert torch.equal(torch.get_rng_state(), now)


def test_a_network_with_dropout_goes_as_low_as_checkpointing() -> None:
    """It does not keep what the masks were applied to, nor the masks; its gradients are eager's."""
    torch.manual_seed(0)
    layers = [each for _ in range(8) for each in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    net, x = nn.Sequential(*layers), torch.randn(1024, 64)
    (report,) = assert_trains_alike(net, [x], budget="min")
    kept = [value for value in report.values if "dropout" in value.operator and not value.recomputed]
    assert report.peak_bytes < 0.6 * report.baseline_peak_bytes
    assert len(kept) <= 2


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
