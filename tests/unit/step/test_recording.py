"""Recording what is live while a step runs."""

import torch

from fxremat import measure
from fxremat._torch import profilers
from fxremat.step import recording
from fxremat.step.recording import CpuRecording, Estimate, Part

CPU = torch.device("cpu")


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
