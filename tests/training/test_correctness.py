"""Training with fxremat is training without, bit for bit: networks, layers, dtypes; recomputation is real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import attention
import networks
import pytest
import torch
from graphs import CountOperators
from models import NAMES, Case, case, fresh, train_step
from torch import Tensor, nn
from torch.nn import functional
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

import fxremat
from fxremat import InfeasibleBudgetError
from fxremat.measure import measure_peak

# --- The zoo --------------------------------------------------------------------------------------------

BUDGETS: tuple[Any, ...] = (None, 0.5, "min")
PLANS: dict[str, dict[str, Any]] = {
    "keep_all": {"planner": "keep_all"},
    "none": {"budget": None},
    "min": {"budget": "min"},
    "everything": {"planner": everything(1)},
    "everything_twice": {"planner": everything(2)},
}
NUMBERS_BYTES = 32  # the Python numbers of one pointwise operator, which ATen makes tensors while it runs


# As the zoo's small ones, but less deep: tracing takes most of the time.
SHALLOW: dict[str, Callable[[], Any]] = {
    "lstm": lambda: networks.lstm(layers=2, steps=4, hidden=16, batch=8),
    "resnet": lambda: networks.resnet(blocks=1, width=8, batch=4, size=16),
    "densenet": lambda: networks.densenet(layers=2, growth=8, batch=4, size=16),
    "unet": lambda: networks.unet(levels=2, width=8, batch=2, size=32),
    "transformer": lambda: attention.transformer(blocks=2, width=32, heads=2, batch=4, time=32),
    "llama": lambda: attention.llama(blocks=1, width=32, heads=2, batch=4, time=32),
    "encoder_decoder": lambda: attention.encoder_decoder(blocks=1, width=32, heads=2, batch=4, time=32),
}


def shallow(name: str) -> Case:
    """The case of the zoo, or a less deep one."""
    return Case(name, SHALLOW[name]) if name in SHALLOW else case(name)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_networks_train_alike_at_every_budget(name: str, budget: Any) -> None:
    """Outputs, gradients, buffers, random states: eager's. Where half is too little, the lowest peak does."""
    module, inputs = fresh(shallow(name))
    try:
        (report,) = assert_trains_alike(module, inputs, steps=1, budget=budget)
    except InfeasibleBudgetError as error:
        (report,) = assert_trains_alike(module, inputs, steps=1, budget=error.lowest_peak_bytes)
        assert report.peak_bytes == error.lowest_peak_bytes
    assert report.budget_bytes is None or report.peak_bytes <= report.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_networks_train_alike_under_every_plan(name: str, plan: str) -> None:
    """From nothing recomputed to everything up to twice, two steps: the results are the same."""
    module, inputs = fresh(case(name))
    assert_trains_alike(module, inputs, **PLANS[plan])


# --- Layers with state and several outputs --------------------------------------------------------------


def normalised(norm: Callable[..., nn.Module], **keywords: Any) -> nn.Module:
    """Two layers, each behind a normalisation."""
    torch.manual_seed(0)
    parts = [each for _ in range(2) for each in (nn.Linear(4, 4), norm(4, **keywords), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(4, 4))


@pytest.mark.parametrize("plan", ["none", "min", "everything"])
def test_running_statistics_are_eagers_after_three_steps(plan: str) -> None:
    """Means, variances and the count of batches are updated once a step, whatever is computed again."""
    module = normalised(nn.BatchNorm1d)
    assert_trains_alike(module, [square()], steps=3, **PLANS[plan])
    subject = compiled(module, **PLANS[plan])
    for seed in range(3):
        outcome(subject, [square()], seed)
    assert module[1].num_batches_tracked == 3


@pytest.mark.parametrize(
    "module",
    [
        normalised(nn.BatchNorm1d).eval(),
        normalised(nn.BatchNorm1d, track_running_stats=False),
        normalised(nn.BatchNorm1d, affine=False),
        normalised(nn.BatchNorm1d).bfloat16(),
        normalised(nn.LayerNorm).double(),
        normalised(lambda width: nn.GroupNorm(2, width)),
        nn.Sequential(
            nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.Tanh()
        ),
    ],
    ids=("eval", "no_statistics", "not_affine", "bfloat16", "layer_double", "group", "instance"),
)
def test_normalisations_train_alike(module: nn.Module) -> None:
    """Normalisations of every kind and dtype, all of them computed again."""
    assert_trains_alike(module, [square().to(next(module.parameters()).dtype)], planner=everything(1))


def test_batch_statistics_that_the_program_reads_are_the_updated_ones() -> None:
    """The forward reads the running mean behind its update; recomputation reads the same."""

    def body(p: Program, x: Tensor) -> Tensor:
        norm = p.layers[0]
        return norm(x @ p.weight).tanh().exp() * norm.running_mean.sin() * norm.num_batches_tracked

    assert_trains_alike(program(body, nn.BatchNorm1d(4)), [square()], planner=everything(1))


def test_parts_of_a_buffer_that_is_written_to_are_read_once() -> None:
    """What is computed of parts of it, in the forward, is of the old numbers, also where all runs again."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = x @ p.weight
        for part in (*p.state.chunk(2), *p.state.unbind()):
            y = (y * part.cos().sum()).sin()
        p.state.mul_(0.5)
        return y

    assert_trains_alike(program(body), [square()], planner=everything(1))


def test_a_shared_batch_norm_updates_for_each_of_its_uses() -> None:
    """One BatchNorm used three times in a row updates its statistics three times, in order."""
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    module = nn.Sequential(linear, norm, nn.Tanh(), linear, norm, nn.Tanh(), linear, norm)
    assert_trains_alike(module, [square()], planner=everything(2))


def several_outputs(p: Program, x: Tensor) -> tuple[Tensor, ...]:
    """Operators whose results are tuples."""
    y = (x @ p.weight).tanh().exp()
    a, b = y.split(2, 1)
    c, d, e, f = y.sin().unbind(0)
    g, h = y.cos().chunk(2)
    values, positions = y.topk(2)
    largest, at = y.sigmoid().max(1)
    deviation, mean = torch.std_mean(y, 1)
    low, high = torch.var_mean(y, dim=1)
    q, r = torch.linalg.qr(y @ y.mT + 4 * torch.eye(4))
    return (
        (a * b).sin(),
        c * d * e * f,
        (g * h).exp(),
        values.exp() * positions,
        largest.exp() * at,
        deviation * mean,
        (high - low).exp(),
        (q * r).sin(),
        y.sort()[0].square(),
        torch.cummax(y, 0)[0].sin(),
        functional.layer_norm(y, (4,)).sin(),
    )


@pytest.mark.parametrize("mirrors", [1, 2])
def test_operators_with_several_outputs_are_dropped_and_recomputed(mirrors: int) -> None:
    """Each output of such an operator comes back with its operator."""
    (report,) = assert_trains_alike(
        program(several_outputs), [square()], planner=everything(mirrors), reference="aot_eager"
    )
    again = {value.operator for value in report.values if value.recomputed}
    assert {"aten.topk.default", "aten.std_mean.correction", "aten.native_layer_norm.default"} <= again


def test_attention_is_computed_again() -> None:
    """The fused attention, masked and causal, without dropout, is no random operator."""

    def body(p: Program, x: Tensor) -> Tensor:
        q, k, v = ((x @ p.weight).tanh().view(2, 1, 2, 4) * scale for scale in (1, 2, 3))
        causal = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.ones(2, 2, dtype=torch.bool).tril()
        return causal.tanh() + functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).exp()

    (report,) = assert_trains_alike(program(body), [square()], planner=everything(1))
    assert any("attention" in value.operator for value in report.values if value.recomputed)


@pytest.mark.parametrize("plan", ["none", "everything"])
def test_images_of_one_pixel_train_alike(plan: str) -> None:
    """What is written over the other operand of a sum lies as the sum does, by which kernels work on."""
    torch.manual_seed(0)
    norm, wide, narrow = nn.BatchNorm2d(32), nn.Conv2d(32, 128, 1), nn.Conv2d(128, 32, 1)

    def body(p: Program, x: Tensor) -> Tensor:
        tokens = p.layers[0](x).permute(0, 2, 3, 1).reshape(2, 1, 32).tanh()
        total = p.layers[0](x) + 2 * tokens.permute(0, 2, 1).reshape(2, 32, 1, 1)
        return total + 2 * p.layers[2](p.layers[1](p.layers[0](total)).tanh())

    assert_trains_alike(program(body, norm, wide, narrow), [torch.randn(2, 32, 1, 1)], **PLANS[plan])


# --- Dtypes ---------------------------------------------------------------------------------------------


def test_autocast_trains_alike() -> None:
    """Casts to bfloat16 inside of the model are computed again as they were."""

    def body(p: Program, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = functional.layer_norm((x @ p.weight).tanh(), (4,))
            y = functional.softmax(p.layers[0](y), -1)
        return y.float().exp()

    assert_trains_alike(program(body, nn.Linear(4, 4)), [square()], planner=everything(1))


def test_complex_numbers_train_alike() -> None:
    """Fourier transforms, conjugates and the views between complex and real numbers."""

    def body(p: Program, x: Tensor) -> tuple[Tensor, ...]:
        c = torch.fft.fft(torch.complex(x @ p.weight, x)).tanh()
        back = torch.fft.irfft(torch.fft.rfft(x @ p.weight).exp())
        return (c * c.conj()).real.exp(), torch.view_as_real(c.exp()).sin(), back.tanh(), c

    assert_trains_alike(program(body), [square()], planner=everything(2))


# --- Recomputation is real, and the predicted peak is the measured one ----------------------------------


def operators_of_backward(module: nn.Module, inputs: tuple[Tensor, ...]) -> Counter[str]:
    """What the backward of one step runs."""
    loss = module(*inputs)
    with CountOperators() as counted:
        loss.backward()
    return counted.counts


def test_the_backward_multiplies_again_what_was_dropped() -> None:
    """At the least peak the backward runs more matrix products than when all is kept."""
    module, inputs = fresh(case("tanh_mlp"))
    kept = operators_of_backward(compiled(module, planner="keep_all"), inputs)
    least = operators_of_backward(compiled(module, budget="min"), inputs)
    assert kept["aten.addmm"] == 0 < least["aten.addmm"]
    assert kept["aten.tanh"] == 0 < least["aten.tanh"]


def test_the_report_tells_what_the_backward_ran_again() -> None:
    """Mirrors of an operator in the report are as many as the backward runs."""
    module, inputs = fresh(case("tanh_mlp"))
    counts = operators_of_backward(compiled(module, planner=everything(1)), inputs)
    values = fxremat.reports()[-1].values
    assert (
        sum(value.recomputed for value in values if value.operator == "aten.tanh.default")
        == counts["aten.tanh"]
    )


def test_the_update_of_running_statistics_is_not_computed_again() -> None:
    """The mirror of a BatchNorm in training normalises without touching the statistics."""
    module = normalised(nn.BatchNorm1d)
    subject = compiled(nn.Sequential(module, nn.Flatten(0)), planner=everything(1))
    loss = subject(square()).sum()
    before = {name: each.clone() for name, each in module.named_buffers()}
    with CountOperators() as counted:
        loss.backward()
    assert counted.counts["aten._native_batch_norm_legit"] == 2
    assert counted.counts["aten._native_batch_norm_legit_functional"] == 0
    assert_same_outcome(dict(module.named_buffers()), before)


@pytest.mark.parametrize("plan", ["keep_all", "min", "everything_twice"])
@pytest.mark.parametrize("name", ["tanh_mlp", "gated_mlp", "homogeneous", "lstm"])
def test_the_predicted_peak_is_the_measured_one(name: str, plan: str) -> None:
    """For networks of pointwise operators and matrix products, up to the Python numbers among operands."""
    module, inputs = fresh(shallow(name))
    subject = compiled(module, **PLANS[plan])
    train_step(subject, inputs)
    for each in (*module.parameters(), *inputs):
        each.grad = None
    report = fxremat.reports()[-1]

    def step() -> Tensor:
        loss = subject(*inputs)
        loss.backward()
        return loss

    measured_bytes = measure_peak(step, device="cpu").peak_bytes
    assert report.peak_bytes <= measured_bytes <= report.peak_bytes + NUMBERS_BYTES
