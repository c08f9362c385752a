"""Profilers: measuring collides with none, and leaves no trace."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

import fxremat
from fxremat.device import calibrate
from fxremat.device.results import as_run
from fxremat.errors import FxrematError
from fxremat.measure import held_bytes, measure_peak

HERE = torch.device("cpu")


def floats(count: int) -> Tensor:
    """A tensor of ``count`` float32 numbers: 4 bytes each."""
    return torch.empty(count, dtype=torch.float32)


class Rolled(nn.Module):
    """Rolls two dimensions, of which torch does one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(x * self.weight, (1, 2), (0, 1)).exp()


def run(program: str) -> str:
    """What a program of its own process prints, which a collision would end."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


def test_compiling_under_profilers_of_the_users() -> None:
    """In the warm-up of a schedule, and in one thread while another one's work is recorded."""
    program = """
        import os, threading, torch
        from torch import nn
        from torch.profiler import ProfilerActivity, profile, schedule

        def step():
            torch._dynamo.reset()
            net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
            net = torch.compile(net, backend="fxremat", options={"compiler": "eager", "budget": "min"})
            net(torch.ones(4, 8)).sum().backward()

        steps = schedule(wait=0, warmup=1, active=2)
        with profile(activities=[ProfilerActivity.CPU], schedule=steps) as recorded:
            for _ in range(3):
                step()
                recorded.step()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            thread = threading.Thread(target=step)
            thread.start()
            torch.ones(3).exp()
            thread.join()
        seen = {event.key for event in recorded.key_averages()}
        print("aten::exp" in seen, "KINETO_LOG_LEVEL" in os.environ)
    """
    assert run(program).split() == ["True", "False"]


@pytest.mark.parametrize("acc_events", [False, True])
def test_peaks_are_not_measured_beside_a_profiler(acc_events: bool) -> None:
    """It may be recording or being prepared, here or in another thread; behind it there is no trouble."""
    cycle = schedule(wait=0, warmup=1, active=1, skip_first=0)
    recorded = profile(activities=[ProfilerActivity.CPU], schedule=cycle, acc_events=acc_events)
    recorded.start()
    for _ in range(3):
        with pytest.raises(FxrematError, match="a profiler is recording or being prepared"):
            measure_peak(lambda: floats(1), device="cpu")
        with ThreadPoolExecutor(1) as elsewhere, pytest.raises(FxrematError, match="profiler"):
            elsewhere.submit(measure_peak, lambda: floats(1), device="cpu").result()
        recorded.step()
    recorded.stop()
    assert measure_peak(lambda: floats(1), device="cpu").peak_bytes == 4


def test_a_call_is_measured_beside_a_profiler() -> None:
    """From a thread of its own; the profiler does not see it."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded, ThreadPoolExecutor(1) as thread:
        held = thread.submit(held_bytes, lambda: torch.ones(10).cumsum(0), HERE).result()
        torch.ones(3).exp()
    assert held == (80, 40)
    seen = {event.key for event in recorded.key_averages()}
    assert "aten::exp" in seen and "aten::cumsum" not in seen


def test_scratch_memory_is_the_same_under_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """So plans are, and the user's figures hold none of our operators."""
    graph = fxremat.capture(Rolled(), torch.ones(64, 64), loss=torch.sum)
    monkeypatch.setattr(calibrate, "_seen", {})
    expected = as_run(graph).scratch_bytes
    assert max(expected) == 64 * 64 * 4
    monkeypatch.setattr(calibrate, "_seen", {})
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        assert as_run(graph).scratch_bytes == expected
    assert "aten::roll" not in {event.key for event in recorded.key_averages()}
