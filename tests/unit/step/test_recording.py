"""Recording what is live while a step runs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch

from fxremat import measure
from fxremat._torch import profilers
from fxremat.step import recording
from fxremat.step.recording import CpuRecording, CudaRecording, Estimate, Part

CPU = torch.device("cpu")


class Allocator:
    """The counters and the history of an allocator of CUDA's, in the place of those of torch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts = {"current": 0, "peak": 0}
        self.blocks = {"allocated": 0, "freed": 0}
        self.history: list[dict[str, object]] | None = None
        patch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        patch.setattr(torch.cuda, "memory_stats", self.stats)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(profilers, "begin_cuda_history", self.begin_history)
        patch.setattr(profilers, "end_cuda_history", self.end_history)

    def stats(self, device: torch.device) -> dict[str, int]:
        found = {f"requested_bytes.all.{which}": count for which, count in self.counts.items()}
        return found | {f"active.all.{which}": count for which, count in self.blocks.items()}

    def reset(self, device: torch.device) -> None:
        self.counts["peak"] = self.counts["current"]

    def begin_history(self) -> None:
        self.history = []

    def end_history(self, device: torch.device) -> list[dict[str, object]]:
        found, self.history = self.history, None
        assert found is not None
        return found

    def takes(self, *changes: int) -> None:
        """Blocks come and, where a change is negative, go."""
        for change in changes:
            self.counts["current"] += change
            self.counts["peak"] = max(self.counts.values())
            self.blocks["allocated" if change > 0 else "freed"] += 1
            if self.history is not None:
                action = "alloc" if change > 0 else "free_completed"
                self.history += [
                    {"action": "segment_alloc"},
                    {"action": action, "addr": 0, "size": abs(change)},
                ]


def test_parts_are_what_the_allocator_gave_between_marks() -> None:
    """The change of each part, and how high it rose."""
    recorded = recording.start(CPU)
    assert isinstance(recorded, CpuRecording)
    kept = torch.empty(1000)
    recorded.mark()
    torch.empty(500)
    recorded.mark()
    recorded.pause()
    torch.empty(1 << 20)
    recorded.resume()
    del kept
    assert recorded.stop() == [Part(4000, 4000), Part(0, 2000), Part(-4000, 0)]
    assert not profilers.is_profiling()


class Garbage:
    """Refers to itself, so that the collector alone finds it; what it holds goes with it.

    Attributes:
        gone: Called then.
    """

    def __init__(self, held: object = None, gone: Callable[[], object] = tuple) -> None:
        self.itself, self.held, self.gone = self, held, gone

    def __del__(self) -> None:
        self.gone()


def test_what_is_collected_as_garbage_counts_as_held() -> None:
    """Whether it is of before or of the step: in the next step it may be collected later."""
    gc.collect()
    callbacks = list(gc.callbacks)
    before = CpuRecording(CPU)
    Garbage(torch.empty(2000))
    assert before.stop() == [Part(8000, 8000)]
    recorded = CpuRecording(CPU)
    Garbage(torch.empty(1000))
    gc.collect()
    recorded.mark()
    torch.empty(500)
    assert recorded.stop() == [Part(4000, 4000), Part(0, 2000)]
    assert gc.callbacks == callbacks


def test_a_recording_goes_on_through_a_backward_pass() -> None:
    """Marks inside of the pass part it; it has to be stopped outside."""
    weight = torch.ones(1000, requires_grad=True)
    recorded = CpuRecording(CPU)
    result = weight * 2
    assert result.grad_fn is not None
    result.grad_fn.register_prehook(lambda _: recorded.mark())
    result.sum().backward()
    _, behind = recorded.stop()
    assert weight.grad is not None
    assert behind.change_bytes <= 4000 <= behind.peak_bytes
    assert not profilers.is_profiling()


def test_nothing_is_recorded_beside_a_profiler_of_the_users() -> None:
    """Torch has but one for a thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert recording.start(CPU) is None
    assert recording.start(torch.device("meta")) is None


def test_a_recording_makes_way_for_a_profiler_of_the_users() -> None:
    """Torch would refuse to start it. What was recorded is forgotten, and torch is as it was."""
    starter = torch.autograd.profiler._enable_profiler
    recorded = CpuRecording(CPU)
    torch.empty(1000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        recorded.mark()
        recorded.pause()
        recorded.resume()
    assert recorded.stop() == []
    assert torch.autograd.profiler._enable_profiler is starter
    another = CpuRecording(CPU)
    assert measure.measure_peak(lambda: torch.empty(1000), device="cpu").peak_bytes == 4000
    assert another.stop() == []
    assert not profilers.is_profiling()


def test_on_cuda_the_history_of_its_allocator_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of each part alone, without what is in a pause; the user's statistics go on."""
    allocator = Allocator(monkeypatch)
    allocator.takes(700, -400)
    recorded = CudaRecording(torch.device("cuda"))
    allocator.takes(100, 50, -50)
    recorded.mark()
    allocator.takes(80, -80, 30)
    recorded.pause()
    allocator.takes(1000, -900)
    recorded.resume()
    allocator.takes(20, -60)
    recorded.mark()
    assert recorded.stop() == [Part(100, 150), Part(-10, 80), Part(0, 0)]
    assert allocator.counts == {"current": 490, "peak": 1430}
    assert allocator.history is None


def test_on_cuda_what_is_collected_as_garbage_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile counts, too: other threads go on."""
    gc.collect()
    callbacks = list(gc.callbacks)
    allocator = Allocator(monkeypatch)
    recorded = CudaRecording(torch.device("cuda"))
    allocator.takes(100)
    recorded.mark()
    Garbage(gone=functools.partial(allocator.takes, -100, 30, -5))
    gc.collect()
    allocator.takes(20, -20)
    assert recorded.stop() == [Part(100, 100), Part(30, 50)]
    assert gc.callbacks == callbacks


def test_a_history_that_is_not_whole_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has ended it meanwhile, say."""
    allocator = Allocator(monkeypatch)
    recorded = CudaRecording(torch.device("cuda"))
    allocator.takes(100)
    allocator.begin_history()
    allocator.takes(50)
    assert recorded.stop() == []


def test_a_history_of_the_users_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there one of another allocator."""
    for backend, is_kept in (("native", True), ("cudaMallocAsync", False)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda found=backend: found)
        monkeypatch.setattr(profilers, "keeps_cuda_history", lambda found=is_kept: found)
        assert recording.start(torch.device("cuda")) is None


def test_on_cuda_a_step_is_measured_by_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was live before is no part of its peak; where all it does is free, the peak is 0."""
    allocator = Allocator(monkeypatch)
    allocator.takes(900, -200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = measure.measure_peak(lambda: allocator.takes(100, 50, -30), device="cuda")
    assert (found.peak_bytes, found.end_bytes) == (150, 120)
    found = measure.measure_peak(lambda: allocator.takes(-500), device="cuda")
    assert (found.peak_bytes, found.end_bytes) == (0, -500)


def test_an_estimate_follows_what_is_known() -> None:
    """Levels at marks, and moments that rise above them."""
    levels = [5]
    estimate = Estimate(lambda: levels[0])
    levels[0] = 8
    estimate.rises(10)
    levels[0] = 7
    estimate.mark()
    levels[0] = 2
    assert estimate.stop() == [Part(2, 13), Part(-5, 0)]


def test_passes_are_watched_and_torch_is_put_back() -> None:
    """Before and behind each pass, also behind one that fails; nothing is left of it in the end."""
    before = torch.autograd._engine_run_backward
    seen: list[object] = []
    end = recording.watching_passes(lambda roots: seen.append(len(roots)), lambda: seen.append("ended"))
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    failing = x * 2
    failing.register_hook(lambda _: 1 / 0)
    try:
        torch.autograd.grad([failing.sum()], [x])
    except ZeroDivisionError:
        seen.append("failed")
    end()
    x.sum().backward()
    assert seen == [1, "ended", 1, "ended", "failed"]
    assert torch.autograd._engine_run_backward is before
