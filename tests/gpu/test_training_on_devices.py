"""On each device gradients are those without fxremat: half precision, dropout and CUDA graphs included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import assert_close, built, compiled, report_of, training_step
from torch import Tensor, nn

import fxremat
from fxremat.device import calibrate, ledger
from fxremat.device.rates import facts

PART = {"cpu": 0.0, "cuda": 1e-4}  # of the largest element, between runs of the same kernels
FUSED = 1e-3  # the same between kernels that Inductor fuses in two ways
HALF = {"cpu": 0.0, "cuda": 1e-2}


@pytest.mark.parametrize("name", ["gated_mlp", "resnet", "transformer"])
def test_gradients_are_those_without_recomputation(device: str, name: str) -> None:
    """The graph that AOTAutograd traces runs the same kernels with fxremat and without."""
    module, inputs = built(name, device)
    expected = training_step(torch.compile(copy.deepcopy(module), backend="aot_eager"), inputs)
    subject = compiled(module, compiler="eager", budget="min")
    report = report_of(lambda: assert_close(training_step(subject, inputs), expected, PART[device]))
    assert report.solution.mirror_counts


@pytest.mark.inductor
def test_gradients_are_those_of_inductor(device: str) -> None:
    """At the least peak."""
    module, inputs = built("gated_mlp", device)
    expected = training_step(torch.compile(copy.deepcopy(module)), inputs)
    assert_close(training_step(compiled(module, budget="min"), inputs), expected, FUSED)


@pytest.mark.inductor
def test_cuda_graphs_replay_the_plan(device: str) -> None:
    """Under ``mode="reduce-overhead"`` the third step, a replay on a GPU, gives the same gradients."""
    module, inputs = built("tanh_mlp", device)
    expected = training_step(copy.deepcopy(module), inputs)
    subject = compiled(module, budget=0.8, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(training_step(subject, inputs), expected, FUSED)


# --- Half precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_a_scaler_trains_to_the_same_weights(device: str, dtype: torch.dtype) -> None:
    """Two steps of SGD; the scaler scales the loss of float16."""
    module, inputs = built("gated_mlp", device)
    before = weights(module)
    plain = copy.deepcopy(module)
    train(torch.compile(plain, backend="aot_eager"), plain, inputs, device, dtype)
    subject = compiled(module, compiler="eager", budget="min")
    report = report_of(lambda: train(subject, module, inputs, device, dtype))
    assert report.solution.mirror_counts
    assert_close(weights(module), weights(plain), HALF[device])
    assert any(not torch.equal(each, before[name]) for name, each in weights(module).items())


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def train(
    subject: Any, module: nn.Module, inputs: tuple[Tensor, ...], device: str, dtype: torch.dtype
) -> None:
    """Two steps under autocast."""
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=dtype is torch.float16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=dtype):
            loss = subject(*inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# --- Random numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_the_backward_sees_the_forwards_dropout(device: str, compiler: str) -> None:
    """For a network with y(cx) = c y(x), Euler's <dy/dx, x> = y holds only if all masks are drawn once."""
    module, inputs = built("homogeneous", device)
    step = training_step(compiled(module, compiler=compiler, budget="min"), inputs)
    product = (step["inputs.0"].double() * inputs[0].detach().double()).sum()
    size = (step["inputs.0"].double() * inputs[0].detach().double()).abs().sum()
    assert abs(product - step["loss"]) <= 1e-5 * size


def test_the_generator_advances_as_without_fxremat(device: str) -> None:
    """Recomputation draws no numbers of its own, and losses are the same."""
    module, inputs = built("dropout_mlp", device)
    expected = training_step(torch.compile(copy.deepcopy(module), backend="aot_eager"), inputs)
    state = generator_state(device)
    found = training_step(compiled(module, compiler="eager", budget="min"), inputs)
    assert torch.equal(generator_state(device), state)
    assert_close(found, expected, PART[device])


def generator_state(device: str) -> Tensor:
    """The state of the device's random generator."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


# --- Costs ------------------------------------------------------------------------------------------------


def test_costs_are_measured_on_the_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operator of a chain is timed where it runs, once for all processes."""
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path))
    module, inputs = built("tanh_mlp", device)
    subject = compiled(module, compiler="eager", budget="min", cost="measured")
    report = report_of(lambda: training_step(subject, inputs))
    assert not [note for note in report.notes if "could not be timed" in note]
    where = inputs[0].device
    book = ledger.open_ledger(facts(where))
    graph = fxremat.capture(module, *inputs, compiler="eager")
    timed = calibrate.seconds(graph, range(len(graph.nodes)))
    assert timed and all(seconds > 0 for seconds in timed.values())
    assert any("aten.addmm" in key for key in book) and book.is_kept
    monkeypatch.setattr(calibrate, "_measure_seconds", lambda node: pytest.fail("timed again"))
    assert calibrate.seconds(graph, range(len(graph.nodes))) == timed
