"""Recording: what is live while a step runs, measured in parts.

A *part* goes from one mark to the next; of each is known by how much the live bytes changed in it, and how
high they rose above those at its begin. On a CPU torch's allocator is watched through a profiler, on CUDA by
the history that it keeps. Where neither can be had, because one of the user's goes on, a step is
estimated (``Estimate``) from what its graphs say and what autograd holds for the rest: its temporaries are
missing then, but for two gradients as large as any. What libraries allocate once and keep is no step's.
A rehearsal, which runs on fake tensors, counts for itself (``Rehearsed``).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from fxremat import measure
from fxremat._torch import patches, profilers
from fxremat._torch.fakes import Rehearsal


class Part(NamedTuple):
    """What was live between two marks, above what was live at the first: in the end, and at most."""

    change_bytes: int
    peak_bytes: int


class Recording(Protocol):
    """A recording that is going on."""

    def mark(self) -> None:
        """End a part and begin another."""

    def pause(self) -> None:
        """Leave out what follows."""

    def resume(self) -> None:
        """Leave out no more."""

    def stop(self) -> list[Part]:
        """End it; the parts."""
        ...


class CpuRecording:
    """The allocator of the CPU in the thread that runs the step."""

    def __init__(self, device: torch.device) -> None:
        self._record = profilers.AllocatorRecord(device)
        self.mark, self.pause, self.resume = self._record.mark, self._record.pause, self._record.resume

    def stop(self) -> list[Part]:
        """End it; the parts."""
        self.pause()
        return _summed([] if self._record.is_broken_off else self._record.parts)


class CudaRecording:
    """The history of CUDA's allocator, which keeps one meanwhile; torch's peak statistics go on undisturbed.

    A mark is known by how many of the history's changes there were before it. What is freed while garbage is
    collected is left out, as it is of what a CPU's allocator does (``profilers.AllocatorRecord``).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[list[int]] = [[]]  # the changes of bytes in each; the last part goes on
        self._marks: list[int] = []  # counts of changes, the first at the begin; none while it is paused
        self._collections: list[int] = []  # such counts when garbage began to be collected, and when it was
        self._watch: Any = torch.compiler.disable(self._see_collection)
        self._is_lost = False
        self.resume()

    def mark(self) -> None:
        """End a part and begin another."""
        self._marks.append(measure.cuda_count(self._device))

    def pause(self) -> None:
        """Leave out what follows."""
        if not self._marks:
            return
        with contextlib.suppress(ValueError):  # it was interrupted before
            gc.callbacks.remove(self._watch)
        self.mark()
        places = [count - self._marks[0] for count in self._marks]
        collected = [count - self._marks[0] for count in self._collections]
        self._marks, self._collections = [], []
        changes = [size for _, size, _ in measure.cuda_changes(profilers.end_cuda_history(self._device))]
        for begin, end in zip(collected[::2], collected[1::2], strict=False):
            changes[begin:end] = [max(0, size) for size in changes[begin:end]]
        self._is_lost |= len(changes) != places[-1]
        self._parts[-1] += changes[: places[1]]
        self._parts += (changes[begin:end] for begin, end in itertools.pairwise(places[1:]))

    def resume(self) -> None:
        """Leave out no more."""
        profilers.begin_cuda_history()
        self.mark()
        gc.callbacks.append(self._watch)

    def _see_collection(self, _phase: str, _info: object) -> None:
        """Note when garbage is collected, in whatever thread."""
        self._collections.append(measure.cuda_count(self._device))

    def stop(self) -> list[Part]:
        """End it; the parts, none where the history is not all that there was."""
        self.pause()
        return _summed([] if self._is_lost else self._parts)


def _summed(parts: Iterable[Iterable[int]]) -> list[Part]:
    """Parts, by the changes of bytes in each."""
    sums = ([0, *itertools.accumulate(changes)] for changes in parts)
    return [Part(each[-1], max(each)) for each in sums]


class Estimate:
    """What a step is known to hold.

    Attributes:
        live_bytes: What is live now, as far as graphs tell.
    """

    def __init__(self, live_bytes: Callable[[], int]) -> None:
        self.live_bytes = live_bytes
        self._levels = [live_bytes()]
        self._peaks: list[int] = [self._levels[0]]

    def rises(self, size: int) -> None:
        """So many bytes are live for a moment, besides what is known."""
        self._peaks[-1] = max(self._peaks[-1], self.live_bytes() + size)

    def mark(self) -> None:
        """End a part and begin another."""
        self._levels.append(self.live_bytes())
        self._peaks.append(self._levels[-1])

    def pause(self) -> None:
        """Leave out what follows."""

    def resume(self) -> None:
        """Leave out no more."""

    def stop(self) -> list[Part]:
        """End it; the parts."""
        self.mark()
        pairs = zip(itertools.pairwise(self._levels), self._peaks, strict=False)
        return [Part(after - before, max(peak, after) - before) for (before, after), peak in pairs]


class Rehearsed:
    """What would be live in a rehearsal, but for what plans hold."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self._parts: list[Part] = []
        self._begin()

    def _begin(self) -> None:
        self._start = self._rehearsal.peak_bytes = self._rehearsal.live_bytes

    def mark(self) -> None:
        """End a part and begin another."""
        now = self._rehearsal
        self._parts.append(Part(now.live_bytes - self._start, now.peak_bytes - self._start))
        self._begin()

    def pause(self) -> None:
        """Leave out what follows."""

    def resume(self) -> None:
        """Leave out no more."""

    def stop(self) -> list[Part]:
        """End it; the parts."""
        self.mark()
        return self._parts


def start(device: torch.device) -> Recording | None:
    """A recording of what the device's memory holds; None if it can't be watched now."""
    if device.type == "cuda" and measure.can_record_cuda():
        _have_workspaces(device)
        return CudaRecording(device)
    if device.type != "cpu" or profilers.is_profiling():
        return None
    return CpuRecording(device)


def _have_workspaces(device: torch.device) -> None:
    """Multiply matrices in this thread and in that of a backward: cuBLAS keeps a workspace for each (33 MiB).

    The backward of the first step would be taken to leave its own behind.
    """
    if torch.cuda.is_current_stream_capturing():
        return

    def multiply(gradient: object = None) -> None:
        ones = torch.ones(16, 16, device=device)
        torch.addmm(ones[0], ones, ones)  # with a bias: cuBLASLt, which has one more
        torch.mm(ones, ones)

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        multiply()
        leaf = torch.ones(1, device=device, requires_grad=True)
        leaf.register_hook(multiply)
        leaf.sum().backward()


watching_passes = patches.watching_passes
