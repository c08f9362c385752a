"""What is not PyTorch's own: custom operators and functions, checkpoints, nested graphs, effects."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from training import (
    Program,
    assert_same_outcome,
    assert_trains_alike,
    compiled,
    everything,
    outcome,
    program,
    square,
)

RUNS: Counter[str] = Counter()  # how often the custom operators below ran on real tensors


@pytest.fixture(autouse=True)
def runs() -> Iterator[None]:
    """Each test counts from zero."""
    RUNS.clear()
    yield


# --- Custom operators -----------------------------------------------------------------------------------


@torch.library.custom_op("fxremat_tests::wave", mutates_args=())
def wave(x: Tensor) -> Tensor:
    """sin, and nobody knows that it is pure."""
    RUNS["wave"] += 1
    return x.sin()


@wave.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxremat_tests::count_up", mutates_args=("total",))
def count_up(total: Tensor) -> None:
    """Adds one in place."""
    RUNS["count_up"] += 1
    total.add_(1)


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _wave_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * ctx.saved_tensors[0].cos()


wave.register_autograd(_wave_backward, setup_context=_keep_input)


def test_a_custom_operator_runs_exactly_once() -> None:
    """Its result is kept, whatever is asked for, and the report says why."""
    body = lambda p, x: (wave((x @ p.weight).tanh()) * 2).exp().sin() * wave(x).exp()  # noqa: E731
    (report,) = assert_trains_alike(program(body), [square()], steps=1, planner=everything(2))
    assert RUNS["wave"] == 2 * 2  # two places, eager and compiled
    assert "it is a custom operator, not known to be pure" in {value.reason for value in report.values}


def test_a_custom_operator_that_writes_runs_exactly_once() -> None:
    """On a value and on a buffer of the module."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh().detach().clone()
        count_up(y)
        count_up(p.state)
        return (y @ p.weight).tanh().exp() * p.state.sin()

    assert_trains_alike(program(body), [square()], steps=1, planner=everything(2))
    assert RUNS["count_up"] == 2 * 2


class Cube(torch.autograd.Function):
    """x ** 3 with a gradient written by hand, which reads a value that the forward computes for it alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(3 * x**2)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope


class Quantized(torch.autograd.Function):
    """Rounds; the gradient passes where x is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x.abs() < 1)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (passes,) = ctx.saved_tensors
        return gradient * passes, None


def with_functions(p: Program, x: Tensor) -> Tensor:
    """Both functions, the second with a step that a buffer follows."""
    y = Cube.apply((x @ p.weight).tanh()).sin()
    with torch.no_grad():
        p.state.copy_(torch.maximum(p.state * 0.9, y.abs().amax(0) / 7))
    return Quantized.apply(y @ p.weight, p.state).tanh().exp()


@pytest.mark.parametrize("mirrors", [1, 2])
def test_custom_functions_train_alike(mirrors: int) -> None:
    """A custom gradient reads what its forward computed, or the same computed again."""
    assert_trains_alike(program(with_functions), [square()], planner=everything(mirrors))


def test_a_hook_on_a_value_still_runs() -> None:
    """A gradient hook is part of the backward."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        y.register_hook(lambda gradient: gradient * 2)
        return y.exp().sin()

    assert_trains_alike(program(body), [square()], planner=everything(1))


# --- torch.utils.checkpoint in the model ----------------------------------------------------------------


def checkpointed(**keywords: Any) -> nn.Module:
    """Three layers, each in a checkpoint of its own."""

    def body(p: Program, x: Tensor) -> Tensor:
        for layer in p.layers:
            x = checkpoint(lambda y, layer=layer: layer(y).tanh().exp(), x, use_reentrant=False, **keywords)
        return x.sin()

    return program(body, *(nn.Linear(4, 4) for _ in range(3)))


def matrix_products_are_saved(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A selective policy with an order to save, an order to recompute, and a wish."""
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    if operator is torch.ops.aten.tanh.default:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, matrix_products_are_saved)
PLANS: tuple[dict[str, Any], ...] = ({"budget": None}, {"budget": "min"}, {"planner": everything(2)})


@pytest.mark.parametrize("options", PLANS, ids=["none", "min", "everything"])
def test_checkpoints_in_the_model_train_alike(options: dict[str, Any]) -> None:
    """The planner decides for itself; the results are those of the checkpointed model."""
    assert_trains_alike(checkpointed(), [square()], **options)


def test_what_a_policy_must_save_is_saved() -> None:
    """Selective checkpointing's MUST_SAVE is an order that everything(1) does not overrule."""
    (report,) = assert_trains_alike(checkpointed(context_fn=SELECTIVE), [square()], planner=everything(1))
    products = [value for value in report.values if value.operator == "aten.addmm.default"]
    assert products and all(value.recomputed == 0 for value in products)
    assert {value.reason for value in products} == {"its checkpoint policy is MUST_SAVE"}
    assert any(value.recomputed for value in report.values)


def test_checkpoints_with_random_numbers_and_statistics_train_like_the_model_without() -> None:
    """Dropout draws once and BatchNorm counts once, where eager's checkpoint would update it twice."""

    def block(p: Program, x: Tensor) -> Tensor:
        return functional.dropout(p.layers[0](x @ p.weight).tanh(), 0.3)

    def plain(p: Program, x: Tensor) -> Tensor:
        return block(p, block(p, x)).exp().sin()

    def nested(p: Program, x: Tensor) -> Tensor:
        inner = lambda y: checkpoint(block, p, y, use_reentrant=False).exp()  # noqa: E731
        return checkpoint(inner, checkpoint(block, p, x, use_reentrant=False), use_reentrant=False).sin()

    expected = outcome(program(plain, nn.BatchNorm1d(4)), [square()])
    found = compiled(program(nested, nn.BatchNorm1d(4)), planner=everything(2))
    assert_same_outcome(outcome(found, [square()]), expected)


# --- Graphs in graphs, effects --------------------------------------------------------------------------


def a_branch(p: Program, x: Tensor) -> Tensor:
    """torch.cond on a value."""
    y = (x @ p.weight).tanh()
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).exp()


@torch.compiler.nested_compile_region
def _region(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh().exp()


def a_nested_region(p: Program, x: Tensor) -> Tensor:
    """One region used twice."""
    return _region(_region(x.sin(), p.weight).cos(), p.weight).sin()


def an_inner_gradient(p: Program, x: Tensor) -> Tensor:
    """torch.func.grad in the forward."""
    inner = torch.func.grad(lambda y: (y @ p.weight).tanh().sum())(x)
    return (inner @ p.weight).sin().exp()


def a_mapped_function(p: Program, x: Tensor) -> Tensor:
    """torch.func.vmap over the rows."""
    return torch.func.vmap(lambda row: (row @ p.weight).tanh().exp())(x).sin()


@pytest.mark.parametrize("body", [a_branch, a_nested_region, an_inner_gradient, a_mapped_function])
def test_programs_of_programs_train_alike(body: Callable[..., Any]) -> None:
    """Higher-order operators are kept; functional transforms leave plain operators."""
    assert_trains_alike(program(body), [square()], planner=everything(2))


def test_an_effect_happens_once_per_forward(capfd: pytest.CaptureFixture[str]) -> None:
    """Printing from inside of the graph: once for each step, although everything else runs again."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        torch.ops.aten._print("inside")
        return y.exp().sin()

    subject = compiled(program(body), planner=everything(1))
    for _ in range(2):
        subject(square()).sum().backward()
    assert capfd.readouterr().out.count("inside") == 2
