"""On each device the budget is the peak, predictions hold, and larger batches fit."""

from __future__ import annotations

from typing import Any

import largest
import pytest
import torch
from devices import built, compiled, measured, report_of, training_step
from networks import tanh_mlp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxremat
from fxremat import InfeasibleBudgetError
from fxremat.device.results import as_run
from fxremat.predict.models import INDUCTOR_MARGIN

EXACT = 0.01  # how far a prediction may be off without Inductor; with it, as far as the budget leaves free


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gated_mlp", 0.5),
        ("gated_mlp", "min"),
        ("resnet", 0.5),
        ("transformer", "min"),
        ("unet", "min"),
        ("lstm", 0.5),
    ],
)
def test_the_budget_is_the_measured_peak(device: str, name: str, budget: Any) -> None:
    """Without Inductor the predicted peak is what the allocator hands out."""
    assert_budget_holds(device, name, {"compiler": "eager", "budget": budget}, EXACT)


@pytest.mark.inductor
def test_the_budget_is_the_measured_peak_under_inductor(device: str) -> None:
    """The prediction is off by less than what it leaves free of a budget."""
    assert_budget_holds(device, "gated_mlp", {"budget": 0.5}, INDUCTOR_MARGIN)


def assert_budget_holds(device: str, name: str, options: dict[str, Any], tolerance: float) -> None:
    """Where half of the peak is too little, the least that would do is asked for."""
    module, inputs = built(name, device)
    try:
        subject = compiled(module, **options)
        report = report_of(lambda: training_step(subject, inputs))
    except InfeasibleBudgetError as error:
        options = {**options, "budget": error.lowest_peak_bytes}
        subject = compiled(module, **options)
        report = report_of(lambda: training_step(subject, inputs))
    training_step(subject, inputs)
    peak = measured(module, subject, inputs, device)
    assert report.peak_bytes < report.baseline_peak_bytes
    assert abs(peak - report.peak_bytes) <= tolerance * report.peak_bytes
    assert report.budget_bytes is None or peak <= report.budget_bytes


@pytest.mark.inductor
def test_without_a_budget_the_peak_is_at_most_inductors(device: str) -> None:
    """Measured, both."""
    peaks = []
    for compile_it in (compiled, torch.compile):
        module, inputs = built("tanh_mlp", device)
        subject = compile_it(module)
        for _ in range(2):
            training_step(subject, inputs)
        peaks.append(measured(module, subject, inputs, device))
    assert peaks[0] <= peaks[1]


def test_a_budget_that_is_too_small_is_refused(device: str) -> None:
    """With the least that would do; the device's memory is given back."""
    module, inputs = built("gated_mlp", device)
    with pytest.raises(InfeasibleBudgetError) as caught:
        training_step(compiled(module, compiler="eager", budget=1), inputs)
    assert caught.value.lowest_peak_bytes > 1


def test_a_larger_batch_fits(device: str) -> None:
    """Within what a batch takes in eager, fxremat trains one of twice the size, not of any size."""
    layers, width = (24, 16) if device == "cpu" else (64, 256)
    unit = 8 if device == "cpu" else 4096

    def build(rows: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module, inputs = tanh_mlp(layers, width, rows * unit)
        return module.to(device), tuple(each.to(device) for each in inputs)

    module, inputs = build(8)
    eager: Any = module
    training_step(eager, inputs)
    memory = measured(module, eager, inputs, device) + largest.held_bytes(module, inputs)
    before = largest.largest(lambda rows: largest.fits(build, rows, memory, device), first=8)
    assert before == 8
    options = {"compiler": "eager"}
    assert largest.fits(build, 16, memory, device, options)
    assert not largest.fits(build, 1 << 9, memory, device, options)


@pytest.mark.parametrize("most", [0, 1, 7, 64, 1000])
def test_the_search_for_the_largest_batch(most: int) -> None:
    """What it finds fits, and a 32nd more does not; it takes few tries, none above the limit."""
    tried: list[int] = []

    def does_fit(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    found = largest.largest(does_fit, first=4, most=1024)
    assert found <= most < found + 1 + max(1, found // largest.FINENESS)
    assert len(tried) <= 20 and max(tried) <= 1024
    assert largest.largest(lambda batch: True, first=4, most=100) == 64


class Attention(nn.Module):
    """Blocks of attention with dropout by one of torch's implementations on a GPU, whose sum is returned."""

    def __init__(self, backend: SDPBackend, blocks: int, width: int) -> None:
        super().__init__()
        self.backend = backend
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            heads = block(x).unflatten(-1, (-1, 32)).transpose(1, 2)
            with sdpa_kernel(self.backend if x.is_cuda else SDPBackend.MATH):
                y = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
            x = x + y.transpose(1, 2).flatten(-2)
        return x.float().sum()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    ],
)
def test_attention_with_dropout(device: str, backend: SDPBackend, dtype: torch.dtype) -> None:
    """Its gradient, which is run alone to find its scratch memory, may read the dropout's seed anywhere."""
    torch.manual_seed(0)
    module = Attention(backend, blocks=4, width=64).to(device, dtype)
    inputs = (torch.randn(4, 128, 64, device=device, dtype=dtype),)
    subject = compiled(module, compiler="eager", budget="min")
    report = report_of(lambda: training_step(subject, inputs))
    training_step(subject, inputs)
    peak = measured(module, subject, inputs, device)
    assert report.peak_bytes < report.baseline_peak_bytes
    assert abs(peak - report.peak_bytes) <= EXACT * report.peak_bytes


def test_what_libraries_keep_is_no_steps(device: str) -> None:
    """The first step of a process is also that in which cuBLAS allocates its workspaces."""
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    module, inputs = built("gated_mlp", device)
    subject = compiled(module, compiler="eager", budget=0.5)
    for _ in range(2):
        training_step(subject, inputs)
    (report,) = fxremat.steps()
    gradients = sum(each.nbytes for each in module.parameters())
    assert report.outside_bytes <= gradients + 64
    assert report.measured_peak_bytes is not None and report.measured_peak_bytes <= report.peak_bytes + 64


def test_recordings_leave_torchs_statistics_alone(device: str) -> None:
    """The peak that a user reads in the steps that are recorded is that of the step."""
    module, inputs = built("gated_mlp", device)
    subject = compiled(module, compiler="eager", budget=0.5)
    peaks = []
    for _ in range(4):
        report = report_of(lambda: training_step(subject, inputs)) if not peaks else fxremat.reports()[-1]
        peaks.append(measured(module, subject, inputs, device))
    assert max(peaks) <= report.peak_bytes * (1 + EXACT)
    assert min(peaks) >= report.peak_bytes * (1 - EXACT)


def test_an_operators_first_run_takes_no_more_scratch_than_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace that a library allocates once, and keeps, is no operator's scratch memory."""
    monkeypatch.setattr("fxremat.device.calibrate._seen", {})
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()).to(device)
    graph = fxremat.capture(module, torch.randn(32, 64, device=device), loss=torch.sum, compiler="eager")
    assert set(as_run(graph).scratch_bytes) == {0}
