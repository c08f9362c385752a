"""The door to torch's profilers: what the allocator did while a call ran, and whether anyone else is looking.

Torch has two. The newer one (``torch.profiler``) knows the address of each block, and there is one for the
whole process: a second session, even beside one that is only being prepared, ends in a crash. The older one
belongs to a thread and knows no addresses. It is the only one that can't collide with a profiler of the
user's, if the thread is our own.

The allocator of CUDA keeps a history of its own when it is told to, the process's as well. It is the only one
that knows the bytes which were asked for.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.profiler import ProfilerAction, ProfilerActivity

from fxremat._torch import patches

__all__ = [
    "AllocatorRecord",
    "allocator_changes",
    "begin_cuda_history",
    "cuda_history",
    "end_cuda_history",
    "is_profiling",
    "keeps_cuda_history",
    "make_way",
    "quiet_session",
    "session_elsewhere",
]

_CHANGE = "memory_alloc"  # the kind of the older profiler's events that are the allocator's, frees included
_MARK = "fxremat"  # the name of an event that parts what is recorded
_COLLECTS, _COLLECTED = "fxremat: garbage is collected", "fxremat: garbage was collected"  # of two others
_LEVEL = "KINETO_LOG_LEVEL"


class _Thread(threading.local):
    """What records in a thread.

    Attributes:
        record: The record that goes on; None if there is none.
    """

    def __init__(self) -> None:
        self.record: AllocatorRecord | None = None


_thread = _Thread()


def is_profiling() -> bool:
    """Whether a profiler is recording in this thread that is no record of ours."""
    return bool(torch._C._autograd._profiler_enabled()) and _thread.record is None


def make_way() -> None:
    """Break off what records in this thread."""
    if _thread.record is not None:
        _thread.record.break_off()


def session_elsewhere() -> bool:
    """Whether a session of ``torch.profiler`` is recording or being prepared, in whatever thread.

    Torch itself tells no more than ``is_profiling``, so its own objects are looked for: they refer to their
    classes, as all objects of Python's classes do. O(n) in all objects that there are, some 0.2 us for each.
    """
    kinds = list(_with_subclasses(profiler.profile, torch.profiler.profile))
    return any(map(_is_session, gc.get_referrers(*kinds)))


def _with_subclasses(*kinds: type) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(*kind.__subclasses__())


def _is_session(found: Any) -> bool:
    kind = type(found)  # not isinstance, which asks the object itself: there are dead proxies among them
    if issubclass(kind, profiler.profile):
        is_recording = found.profiling_start_time_ns > found.profiling_end_time_ns
        return bool(found.entered and (is_recording or found.kineto_results is None))
    # With this option one of the above is used again, and shows nothing while it is prepared.
    is_reused = issubclass(kind, torch.profiler.profile) and found.acc_events
    return is_reused and found.current_action is ProfilerAction.WARMUP


@contextlib.contextmanager
def quiet_session() -> Iterator[torch.profiler.profile]:
    """A session of ``torch.profiler`` that watches the allocator of the CPU."""
    session = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with contextlib.ExitStack() as stack:
        with _silent():
            stack.enter_context(session)
        yield session


def keeps_cuda_history() -> bool:
    """Whether the allocator of CUDA is keeping a history."""
    return bool(torch._C._cuda_isHistoryEnabled())


def begin_cuda_history(*, with_lines: bool = False) -> None:
    """Have the allocator of CUDA keep a history.

    Args:
        with_lines: Whether with the lines of Python that asked for memory, which costs microseconds for each.
    """
    torch.cuda.memory._record_memory_history(context="alloc" if with_lines else None, stacks="python")


def end_cuda_history(device: torch.device) -> list[dict[str, Any]]:
    """The events of the history on a device, which ends."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][index]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return events


@contextlib.contextmanager
def cuda_history(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """The history of CUDA's allocator, with the lines of Python that asked: its events, at the end."""
    events: list[dict[str, Any]] = []
    begin_cuda_history(with_lines=True)
    try:
        yield events
        torch.cuda.synchronize(device)
    finally:
        events += end_cuda_history(device)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Have the profiler's library not tell stderr of every start and stop, unless the user has set its level.

    It reads the level when it is used for the first time. Child processes are to inherit nothing of this.
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LEVEL]


class AllocatorRecord:
    """What a device's allocator does in this thread, in parts, until it is stopped.

    What Python's collector of reference cycles gives back is left out: when it comes is chance, and it may be
    of before. So garbage of the call's own counts as held to the end.

    The older profiler's state is the thread's, and autograd gives each of its nodes the state that was there
    when the pass began: a record is to be stopped, and started again, outside of passes.

    Raises:
        RuntimeError: A profiler is recording in this thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[list[int]] = [[]]  # what is read by now; the last part goes on
        self.is_broken_off = False
        self._way = functools.partial(make_way)  # its own, though others make way alike
        self.resume()

    def break_off(self) -> None:
        """Make way for another profiler: what was recorded is of no use any more."""
        self.pause()
        self.is_broken_off = True
        self.parts = []

    def mark(self) -> None:
        """Begin a new part."""
        _note(_MARK)

    def resume(self) -> None:
        """Record; nothing that was broken off."""
        if self.is_broken_off:
            return
        make_way()
        _thread.record = self  # from here on ``pause`` takes back whatever was done when it is interrupted
        patches.making_way(self._way)
        gc.callbacks.append(_watch)
        nothing = torch._C._profiler._ExperimentalConfig()
        kind = profiler.ProfilerState.CPU
        config = profiler.ProfilerConfig(kind, False, True, False, False, False, nothing)
        torch._C._autograd._enable_profiler_legacy(config)

    def pause(self) -> None:
        """Record no more for now."""
        if _thread.record is not self:
            return
        was_broken_off, self.is_broken_off = self.is_broken_off, True  # if it is interrupted
        threads: Any = ()
        if torch._C._autograd._profiler_enabled():
            threads = torch._C._autograd._disable_profiler_legacy()
        patches.making_way_no_more(self._way)
        with contextlib.suppress(ValueError):  # it was interrupted before
            gc.callbacks.remove(_watch)
        _thread.record = None
        self._read(threads)
        self.is_broken_off = was_broken_off

    def _read(self, threads: Any) -> None:
        """Add what was recorded to the parts."""
        events = [event for events in threads for event in events]
        events.sort(key=lambda event: event.start_us())
        is_collecting = False
        for event in events:
            name = event.name() if event.kind() == "push" else None
            if name == _MARK:
                self.parts.append([])
            elif name in (_COLLECTS, _COLLECTED):
                is_collecting = name == _COLLECTS
            elif event.kind() == _CHANGE:
                is_cuda = self.device.type == "cuda"
                size_bytes = event.cuda_memory_usage() if is_cuda else event.cpu_memory_usage()
                is_left_out = size_bytes == 0 or (is_collecting and size_bytes < 0)
                self.parts[-1] += [] if is_left_out else [size_bytes]


def _note(name: str) -> None:
    """Record an event of a name; no mode of the program's sees it."""
    with _RecordFunctionFast(name):
        pass


def _see_collection(phase: str, _: object) -> None:
    """Note when garbage is collected in a thread that records."""
    if _thread.record is not None:
        _note(_COLLECTS if phase == "start" else _COLLECTED)


_watch: Any = torch.compiler.disable(_see_collection)  # called anywhere, it is nothing to be compiled


def allocator_changes(call: Callable[[], object], device: torch.device) -> list[int]:
    """Bytes that a device's allocator gave (or got back: below 0) while the call ran, in order of time.

    What the call returns is held meanwhile. Only this thread counts, and those that operators start to share
    their work with.

    Raises:
        RuntimeError: A profiler is recording in this thread.
    """
    record = AllocatorRecord(device)
    try:
        _held = call()
    finally:
        record.pause()
    return record.parts[0]
