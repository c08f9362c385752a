"""measure: peaks whose bytes are known beforehand, and timing in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fxremat import measure
from fxremat.errors import FxrematError, InvalidOptionError
from fxremat.measure import Block, Measurement, measure_peak, record, time_steps


def floats(count: int) -> Tensor:
    """A tensor of ``count`` float32 numbers: 4 bytes each."""
    return torch.empty(count, dtype=torch.float32)


def test_peak_is_the_highest_sum() -> None:
    """Blocks that are never held together are never added together."""

    def step() -> None:
        for count in (100, 300, 200):
            floats(count)

    assert measure_peak(step, device="cpu").peak_bytes == 1200


def test_blocks_held_together_add_up() -> None:
    """The peak is the sum of all blocks that are held at one moment."""

    def step() -> None:
        first, second = floats(100), floats(50)
        del first
        floats(25)
        del second

    assert measure_peak(step, device="cpu").peak_bytes == 600


def test_what_the_step_returns_is_held_at_the_end() -> None:
    """The result of a step counts to the end, and so does what it leaves behind."""
    left_behind: list[Tensor] = []

    def step() -> Tensor:
        left_behind.append(floats(10))
        return floats(30)

    assert measure_peak(step, device="cpu").end_bytes == 160


def test_a_step_without_memory_measures_zero() -> None:
    """Nothing allocated: nothing measured."""
    measurement = measure_peak(lambda: None, device="cpu")
    assert (measurement.peak_bytes, measurement.end_bytes) == (0, 0)


def test_views_and_inplace_operators_cost_nothing() -> None:
    """Only storages count."""
    given = torch.zeros(8, 4)
    assert measure_peak(lambda: given.t().reshape(8, 4)[2:].relu_(), device="cpu").peak_bytes == 128
    assert measure_peak(lambda: given.t()[2:].relu_(), device="cpu").peak_bytes == 0


@pytest.mark.parametrize("measured_before", [False, True])
def test_frees_of_older_blocks_are_no_part(measured_before: bool) -> None:
    """The free of a block from before the step counts for nothing, logged or not."""
    older: list[Tensor] = []
    if measured_before:
        measure_peak(lambda: older.append(floats(1000)), device="cpu")
    else:
        older.append(floats(1000))

    def step() -> Tensor:
        older.clear()
        return floats(10)

    measurement = measure_peak(step, device="cpu")
    assert (measurement.peak_bytes, measurement.end_bytes) == (40, 40)


def test_an_address_used_again_is_another_block() -> None:
    """Each free is paired with the latest allocation at its address."""

    def step() -> None:
        for _ in range(5):
            floats(250)
        first = floats(250)
        floats(250)
        del first

    assert measure_peak(step, device="cpu").peak_bytes == 2000


def test_a_training_step_ends_holding_its_gradients() -> None:
    """A linear layer of a 64 byte weight ends with 64 bytes; before, its output of 32 was held."""
    weight = torch.randn(4, 4, requires_grad=True)
    given = torch.randn(2, 4)
    seed = torch.ones(2, 4)

    def step() -> None:
        (given @ weight).backward(seed)

    measurement = measure_peak(step, device="cpu")
    assert measurement.end_bytes == 64
    assert measurement.peak_bytes == 32 + 64


def test_saved_values_count_until_their_backward() -> None:
    """A chain of n tanh holds n results at the end of its forward."""
    given = torch.randn(256, requires_grad=True)

    def forward() -> Tensor:
        value = given
        for _ in range(7):
            value = value.tanh()
        return value

    assert measure_peak(forward, device="cpu").peak_bytes == 7 * 1024


def test_a_step_in_a_compiled_function_counts_its_buffers() -> None:
    """A function run by another backend is measured like eager code."""
    compiled = torch.compile(lambda x: (x + 1).exp(), backend="aot_eager")
    given = torch.zeros(100)
    compiled(given)
    measurement = measure_peak(lambda: compiled(given), device="cpu")
    assert (measurement.peak_bytes, measurement.end_bytes) == (800, 400)


@pytest.mark.inductor
def test_generated_kernels_buffers_are_counted() -> None:
    """A buffer that Inductor's own code allocates is seen like any other."""
    compiled = torch.compile(lambda x: (x + 1).exp().sum(0, keepdim=True) @ x.t())
    given = torch.zeros(64, 32)
    compiled(given)
    measurement = measure_peak(lambda: compiled(given), device="cpu")
    assert (measurement.peak_bytes, measurement.end_bytes) == (4 * (32 + 64), 4 * 64)


def test_the_default_device_is_torchs() -> None:
    """Without a device, the memory of torch's default device is meant."""
    assert measure_peak(lambda: floats(10)).peak_bytes == 40


def test_a_device_that_cannot_be_measured_is_refused() -> None:
    """The error names the device and what would do."""
    with pytest.raises(InvalidOptionError, match="'meta', expected cpu, cuda"):
        measure_peak(lambda: None, device="meta")


def test_an_error_in_the_step_reaches_the_caller() -> None:
    """Measuring hides no error, and measuring works afterwards."""

    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_peak(step, device="cpu")
    assert measure_peak(lambda: floats(1), device="cpu").peak_bytes == 4


def test_a_running_profiler_is_left_alone() -> None:
    """torch has one profiler: measuring inside of it is refused, rather than wrong for both."""
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(FxrematError, match="profiler"):
        measure_peak(lambda: floats(1), device="cpu")


def test_seconds_are_those_of_the_step() -> None:
    """The time measured is at least the time slept."""
    assert measure_peak(lambda: time.sleep(0.02), device="cpu").seconds >= 0.02


def test_a_measurement_is_frozen() -> None:
    """Results are values."""
    with pytest.raises(AttributeError):
        Measurement(1, 1, 0.0).peak_bytes = 2  # type: ignore[misc]


def test_a_recording_has_the_steps_blocks_alone() -> None:
    """From the event that gave one to the last before its free; the free of an older block is no event."""
    older = [floats(1000)]

    def step() -> Tensor:
        first = floats(100)
        older.clear()
        second = floats(50)
        del first
        return second

    recording = record(step, device="cpu")
    blocks = [(block.bytes, block.first, block.last) for block in recording.blocks]
    assert blocks == [(400, 0, 1), (200, 1, 2)] and recording.events == 3
    assert recording.held_bytes == (400, 600, 200)
    assert (recording.peak_bytes, recording.end_bytes) == (600, 200)


def test_a_recording_of_nothing() -> None:
    """No block, no event, no bytes."""
    recording = record(lambda: None, device="cpu")
    assert (recording.blocks, recording.events, recording.peak_bytes, recording.end_bytes) == ((), 0, 0, 0)


def test_a_recorded_peak_is_the_measured_one() -> None:
    """Of a training step; a block tells which operators asked for it, innermost first."""
    weight = torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        weight.grad = None
        (torch.ones(2, 4) @ weight).exp().sum().backward()

    step()
    recording, measurement = record(step, device="cpu"), measure_peak(step, device="cpu")
    assert (recording.peak_bytes, recording.end_bytes) == (measurement.peak_bytes, measurement.end_bytes)
    stacks = [[name for name, _ in block.stack] for block in recording.blocks]
    assert ["aten::exp"] in stacks
    assert any(stack[:1] == ["aten::mm"] and "MmBackward0" in stack for stack in stacks)


def test_cudas_history_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end where their free is completed; what is not of blocks is no event."""
    frame = {"name": "forward", "filename": "net.py", "line": 7}
    events = [
        {"action": "free_completed", "addr": 9, "size": 5},
        {"action": "segment_alloc", "addr": 0, "size": 512},
        {"action": "alloc", "addr": 8, "size": 3, "frames": [frame]},
        {"action": "free_requested", "addr": 8, "size": 3},
        {"action": "alloc", "addr": 9, "size": 4},
        {"action": "free_completed", "addr": 8, "size": 3},
        {"action": "snapshot", "addr": 0, "size": 0},
    ]

    @contextlib.contextmanager
    def history(_: torch.device) -> Iterator[list[dict[str, Any]]]:
        yield events

    monkeypatch.setattr(measure.profilers, "cuda_history", history)
    monkeypatch.setattr(measure.profilers, "keeps_cuda_history", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    recording = record(lambda: None, device="cuda")
    assert recording.blocks == (Block(3, 0, 1, (("forward", "net.py:7"),)), Block(4, 1, 2, ()))
    assert recording.held_bytes == (3, 7, 4)
    monkeypatch.setattr(measure.profilers, "keeps_cuda_history", lambda: True)
    with pytest.raises(FxrematError, match="history"):
        record(lambda: None, device="cuda")


def test_steps_are_timed_in_turn() -> None:
    """A B A B: neighbours in time are the ones that are compared."""
    calls: list[str] = []
    steps = {"A": lambda: calls.append("A"), "B": lambda: calls.append("B")}
    seconds = time_steps(steps, rounds=2, warmup=1)
    assert calls == ["A", "B"] * 3
    assert {name: len(each) for name, each in seconds.items()} == {"A": 2, "B": 2}


def test_each_step_is_given_its_own_time() -> None:
    """The slower step has the greater seconds."""
    seconds = time_steps({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, rounds=2)
    assert min(seconds["slow"]) >= 0.02
    assert min(seconds["fast"]) < 0.02


@pytest.mark.gpu
def test_cuda_bytes_are_those_asked_for() -> None:
    """On CUDA the allocator's rounding to 512 bytes is left out."""

    def step() -> Tensor:
        scratch = torch.empty(1000, device="cuda")
        result = torch.empty(500, device="cuda")
        del scratch
        return result

    measurement = measure_peak(step, device="cuda")
    assert (measurement.peak_bytes, measurement.end_bytes) == (6000, 2000)


@pytest.mark.gpu
def test_cuda_records_what_it_measures() -> None:
    """The same peak, the line that asked, and no history that goes on."""

    def step() -> Tensor:
        scratch = torch.empty(1000, device="cuda")
        return scratch.exp()

    recording, measurement = record(step, device="cuda"), measure_peak(step, device="cuda")
    assert (recording.peak_bytes, recording.end_bytes) == (measurement.peak_bytes, measurement.end_bytes)
    assert recording.blocks[0].stack[0][0] == "step"
    assert not measure.profilers.keeps_cuda_history()


@pytest.mark.gpu
def test_cuda_seconds_include_the_kernels() -> None:
    """A step is over when the GPU has done its work."""
    big = torch.randn(4096, 4096, device="cuda")
    (seconds,) = time_steps({"matmul": lambda: big @ big}, rounds=1)["matmul"]
    assert seconds > 2 * 4096**3 / 2e15  # no GPU does 2 PFLOP/s in float32
