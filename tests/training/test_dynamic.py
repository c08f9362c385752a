"""Dynamic shapes: one plan serves every size, and gradients are right for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training import Program, assert_same_outcome, compiled, everything, outcome, program

import fxremat
from fxremat import InfeasibleBudgetError

SIZES = (8, 6, 11)  # rows of the first batch, and of those that must run without being compiled again


def rows(count: int) -> Tensor:
    """A batch of so many rows."""
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def assert_serves_all_sizes(subject: Any, expected: nn.Module, batches: list[Tensor]) -> None:
    """Every batch trains alike, and there is one report for all of them."""
    count = len(fxremat.reports())
    for batch in batches:
        assert_same_outcome(outcome(subject, [batch]), outcome(expected, [batch]))
    assert len(fxremat.reports()) == count + 1


def plain(p: Program, x: Tensor) -> Tensor:
    """Two layers."""
    return ((x @ p.weight).tanh() @ p.weight).sin().exp()


def sizes_as_numbers(p: Program, x: Tensor) -> Tensor:
    """The number of rows enters the values."""
    y = (x @ p.weight).tanh() / x.shape[0]
    return y.exp() * (x.shape[0] + 1) + torch.arange(x.shape[0])[:, None]


def sizes_of_views(p: Program, x: Tensor) -> Tensor:
    """Views and expansions whose sizes the backward needs."""
    y = (x @ p.weight).tanh().view(-1, 2, 2).transpose(0, 1).reshape(2, -1)
    z = y.exp().unsqueeze(0).expand(3, *y.shape).sin()
    return torch.cat([z, z[:, :, : x.shape[0]]], dim=2).sum(0)


def sizes_of_new_tensors(p: Program, x: Tensor) -> Tensor:
    """Tensors that are made of the batch's size, padded, pooled, rolled."""
    y = (x @ p.weight).tanh() + torch.zeros(x.shape[0], 4)
    y = functional.pad(y, (0, 0, 1, x.shape[0] - 2)).exp()
    return y.cumsum(0).roll(1, 0).softmax(0) * torch.ones(2 * x.shape[0] - 1, 1)


def normalised(p: Program, x: Tensor) -> Tensor:
    """BatchNorm and LayerNorm of a batch of unknown size."""
    return functional.layer_norm(p.layers[0](x @ p.weight).tanh().exp(), (4,)).sin()


def attended(p: Program, x: Tensor) -> Tensor:
    """Attention over as many positions as there are rows."""
    q, k, v = ((x @ p.weight).tanh()[None, None] * scale for scale in (1, 2, 3))
    return functional.scaled_dot_product_attention(q, k, v)[0, 0].exp()


BODIES = (plain, sizes_as_numbers, sizes_of_views, sizes_of_new_tensors, normalised, attended)


@pytest.mark.parametrize(
    "options", [{"budget": "min"}, {"planner": everything(2)}], ids=["min", "everything"]
)
@pytest.mark.parametrize("body", BODIES)
def test_one_plan_serves_all_batch_sizes(body: Callable[..., Any], options: dict[str, Any]) -> None:
    """With dynamic=True other sizes run without being compiled again, and train as in eager."""
    module = program(body, nn.BatchNorm1d(4))
    subject = compiled(copy.deepcopy(module), dynamic=True, **options)
    assert_serves_all_sizes(subject, module, [rows(count) for count in SIZES])


def test_a_dimension_may_be_marked_dynamic() -> None:
    """mark_dynamic makes one dimension symbolic; the plan is for the size that was seen first."""
    batches = [rows(count) for count in SIZES]

    def body(p: Program, x: Tensor) -> Tensor:
        return sizes_of_views(p, x)

    module = program(body)
    subject = compiled(copy.deepcopy(module), budget="min")
    torch._dynamo.mark_dynamic(batches[0], 0)
    expected = [outcome(module, [batch]) for batch in batches]
    count = len(fxremat.reports())
    for batch, other in zip(batches, expected, strict=True):
        subject.zero_grad()
        subject(batch).sum().backward()
        torch.testing.assert_close(body(module, batch), subject(batch), rtol=0, atol=0)
        assert other["weight.grad"].isfinite().all()
    assert len(fxremat.reports()) == count + 1


def least_bytes(module: nn.Module, size: int) -> int:
    """The least peak of a training step that is compiled for so many rows alone."""
    outcome(compiled(copy.deepcopy(module), dynamic=False, budget="min", inplace=False), [rows(size)])
    return fxremat.reports()[-1].peak_bytes


def test_larger_sizes_are_planned_anew_within_a_budget_of_bytes() -> None:
    """For somewhat more rows if their plan fits, else for the very size; what no plan fits is refused."""
    module = program(lambda p, x: plain(p, x).sum())
    budget = (least_bytes(module, 100) + least_bytes(module, 107)) // 2
    subject = compiled(copy.deepcopy(module), dynamic=True, budget=budget, inplace=False)
    count = len(fxremat.reports())

    def planned(*sizes: int) -> list[str]:
        for size in sizes:
            assert_same_outcome(outcome(subject, [rows(size)]), outcome(module, [rows(size)]))
            assert fxremat.steps()[-1].measured_peak_bytes <= budget
        return [each.graph_name.partition(" at ")[2] for each in fxremat.reports()[count:]]

    assert planned(64, 48) == [""]
    assert planned(70, 76, 60) == ["", "76"]  # of four sizes in each octave the next
    assert planned(100, 99, 70) == ["", "76", "100"]  # for the next, 107, there is no plan
    for refused in (107, 200):
        with pytest.raises(InfeasibleBudgetError, match=f"at {refused}: no plan fits"):
            subject(rows(refused))
    assert planned(100) == ["", "76", "100"]


def test_a_new_size_without_dynamic_shapes_is_a_new_report() -> None:
    """Static shapes: each size is compiled and planned by itself, with its own peak."""
    module = program(plain)
    subject = compiled(copy.deepcopy(module), dynamic=False, budget="min")
    count = len(fxremat.reports())
    for size in (8, 16):
        assert_same_outcome(outcome(subject, [rows(size)]), outcome(module, [rows(size)]))
    small, large = fxremat.reports()[count:]
    assert small.peak_bytes < large.peak_bytes
    assert small.graph_name != large.graph_name


def test_a_size_that_depends_on_data_is_kept() -> None:
    """Rows picked by a mask: how many there are is not known when the plan is made."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        return (y[y[:, 0] > 0].exp() @ p.weight).sin()

    module = program(body)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        subject = compiled(copy.deepcopy(module), planner=everything(1))
        assert_serves_all_sizes(subject, module, [rows(8)])


def test_a_number_read_from_a_tensor_is_kept() -> None:
    """A value that becomes a number of the program, inside of the graph."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        return (y * y.detach().sum().item()).exp()

    module = program(body)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        subject = compiled(copy.deepcopy(module), planner=everything(1))
        assert_serves_all_sizes(subject, module, [rows(8)])
