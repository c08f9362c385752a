"""Measured, not predicted: the peak bytes and the seconds of a step that really runs, and each of its blocks.

Terms. A *step* is a callable without arguments, usually a forward and a backward. A block of
memory is *the step's* if it is allocated while the step runs. Three clauses say what counts:

1. The peak is the highest sum of bytes of the step's blocks that are held at one moment. It is
   never negative, and what the caller holds at the start (parameters, inputs, old gradients) is no
   part of it.
2. What the step returns is held to the end, as are the gradients that it leaves behind.
3. Bytes are those that were asked for: an allocator's rounding is left out where it tells.

On the CPU the allocator's events, as recorded by ``torch.profiler``, are summed in the order of
time; each free is paired with its allocation by address. So the figure is exact, it covers the
buffers of Inductor's kernels, and the free of an older block cannot push it below the truth. On
CUDA the allocator's own statistics are read. They cannot tell blocks apart, so there a step should
free nothing older: start it without gradients, as a training step does anyway. Torch's peak statistics
start anew there.

A *recording* has every block, and its peak is the measured one. On CUDA it takes torch's own record of the
allocator's events, with the lines of Python that asked, which costs microseconds for each.

A single operator is measured in another way (``held_bytes``), which may run anywhere at any time: beside
a profiler of the user's, and without touching the statistics of an allocator.

Left out: memory that does not come from torch's allocator (a library's scratch, CUDA graphs' pools
after their capture). Whatever a first run does on top, such as compiling, counts if it is measured:
run a compiled step once before.

Complexity: linear in the number of allocator events, apart from sorting them; a recording holds the stack of
each block.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import profile

from fxremat._torch import profilers
from fxremat.errors import FxrematError, InvalidOptionError

__all__ = [
    "Block",
    "Measurement",
    "Recording",
    "can_measure",
    "held_bytes",
    "measure_peak",
    "record",
    "time_steps",
]

_ALLOCATOR_EVENT = "[memory]"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of a step took.

    Attributes:
        peak_bytes: The highest sum of bytes held at one moment, above those held at the start.
        end_bytes: The bytes still held at the end, above those held at the start.
        seconds: The time of the run, with the profiler's share on the CPU: compare by `time_steps`.
    """

    peak_bytes: int
    end_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that the allocator gave to a step.

    Attributes:
        bytes: How much.
        first: Which of the recording's events gave it, counted from 0.
        last: The last event before it was freed; the last of all where it is held at the end.
        stack: What asked for it, innermost first, each with its ``file:line``: operators, which have none, on
            the CPU; functions of Python on CUDA.
    """

    bytes: int
    first: int
    last: int
    stack: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """What the allocator did while a step ran, in order: its *events* gave or freed a block of the step's.

    Attributes:
        blocks: The step's blocks, in the order in which they were given.
        events: How many events there were.
        seconds: The time of the run, recording included.
    """

    blocks: tuple[Block, ...]
    events: int
    seconds: float

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """The sum of the bytes held behind each event."""
        change = [0] * (self.events + 1)
        for block in self.blocks:
            change[block.first] += block.bytes
            change[block.last + 1] -= block.bytes
        return tuple(itertools.accumulate(change[:-1]))

    @property
    def peak_bytes(self) -> int:
        """The highest sum of bytes held at one moment, above those held at the start."""
        return max(self.held_bytes, default=0)

    @property
    def end_bytes(self) -> int:
        """The bytes still held at the end, above those held at the start."""
        return self.held_bytes[-1] if self.events else 0


def measure_peak(step: Callable[[], object], *, device: torch.device | str | None = None) -> Measurement:
    """Run the step once; the result holds the peak bytes that it allocated on the device.

    >>> import torch
    >>> def step():
    ...     scratch = torch.empty(1000)  # 4 bytes each
    ...     return torch.empty(500)
    >>> measurement = measure_peak(step, device="cpu")
    >>> measurement.peak_bytes, measurement.end_bytes
    (6000, 2000)

    Args:
        device: Whose memory is meant; torch's default device if it is not given.

    Raises:
        InvalidOptionError: The device is neither a CPU nor a CUDA device.
        FxrematError: A profiler is recording or being prepared, and the CPU's memory is to be measured by
            another.
    """
    where = _measurable(device)
    if where.type == "cuda":
        return _measure_cuda(step, where)
    recording = _record_cpu(step)
    return Measurement(recording.peak_bytes, recording.end_bytes, recording.seconds)


def record(step: Callable[[], object], *, device: torch.device | str | None = None) -> Recording:
    """Run the step once; the result holds the blocks that it allocated on the device.

    >>> import torch
    >>> recording = record(lambda: torch.ones(1000).exp(), device="cpu")  # 4 bytes each
    >>> [(block.bytes, block.first, block.last) for block in recording.blocks]
    [(4000, 0, 1), (4000, 1, 2)]
    >>> recording.peak_bytes, recording.end_bytes, recording.blocks[1].stack
    (8000, 4000, (('aten::exp', ''),))

    Args:
        device: Whose memory is meant; torch's default device if it is not given.

    Raises:
        InvalidOptionError: The device is neither a CPU nor a CUDA device.
        FxrematError: On the CPU as ``measure_peak``. On CUDA torch is recording the history of the memory.
    """
    where = _measurable(device)
    return _record_cpu(step) if where.type == "cpu" else _record_cuda(step, where)


def _measurable(device: torch.device | str | None) -> torch.device:
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise InvalidOptionError.bad_value("device", str(where), ("cpu", "cuda"))
    return where


def can_measure(device: torch.device) -> bool:
    """Whether ``measure_peak`` can measure a device now: not the CPU while a profiler records."""
    if device.type == "cpu":
        return not (profilers.is_profiling() or profilers.session_elsewhere())
    return device.type == "cuda"


def held_bytes(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """The highest sum of bytes that a call held at one moment, and what it held at its end: what it returns.

    For calls that free nothing older and run in a thread of their own, so that no profiler can be recording
    there. On CUDA the allocator's events are of whole blocks. What was freed can't have been more than was
    asked for, which its counters tell without rounding: the lower figure is taken.

    >>> import torch
    >>> given = torch.empty(1000)  # 4 bytes each
    >>> held_bytes(lambda: given.flip(0).sum(), torch.device("cpu"))
    (4004, 4)
    """
    if device.type == "cuda":
        return _held_on_cuda(call, device)
    sums = [0, *itertools.accumulate(profilers.allocator_changes(call, device))]
    return max(sums), sums[-1]


def time_steps(
    steps: Mapping[str, Callable[[], object]], *, rounds: int = 10, warmup: int = 1
) -> dict[str, list[float]]:
    """Run the steps in turn, round by round; the result holds each step's seconds, one per round.

    On a machine whose speed drifts, the steps of one round meet the same weather: compare them
    round by round, by the median of the ratios.

    >>> seconds = time_steps({"A": lambda: sum(range(10)), "B": lambda: sum(range(99))}, rounds=3)
    >>> {name: len(each) for name, each in seconds.items()}
    {'A': 3, 'B': 3}

    Args:
        rounds: How often each step is timed.
        warmup: How often each step runs before that, in turn as well, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(warmup + rounds):
        for name, step in steps.items():
            taken, _ = _timed(step)
            if round_index >= warmup:
                seconds[name].append(taken)
    return seconds


def _timed(step: Callable[[], object]) -> tuple[float, object]:
    """The seconds until the step's work was done on the GPU too, and what the step returned."""
    _wait_for_cuda()
    start = time.perf_counter()
    returned = step()
    _wait_for_cuda()
    return time.perf_counter() - start, returned


def _wait_for_cuda() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# --- The allocator's events -----------------------------------------------------------------------

_Change = tuple[int, int, tuple[tuple[str, str], ...]]  # an address, bytes (below 0: freed), and a stack


def _record_cpu(step: Callable[[], object]) -> Recording:
    profilers.make_way()
    if not can_measure(torch.device("cpu")):  # torch would end one of them, or crash
        raise FxrematError(
            "a profiler is recording or being prepared, and torch has but one: measure before it or after it"
        )
    with profilers.quiet_session() as recorded:
        seconds, _held = _timed(step)
    return _recording(_cpu_changes(recorded), seconds)


def _cpu_changes(recorded: profile) -> list[_Change]:
    """The CPU allocator's events, in the order of time."""
    profiler: Any = recorded.profiler
    roots = profiler.kineto_results.experimental_event_tree()
    changes = []
    for event in _each_event(roots):
        if event.name != _ALLOCATOR_EVENT:
            continue
        fields = event.typed[1]
        if fields.device.type == "cpu":
            stack = tuple(_operators(event)) if fields.alloc_size > 0 else ()
            changes.append((event.start_time_ns, (fields.ptr, fields.alloc_size, stack)))
    changes.sort(key=lambda change: change[0])
    return [change for _, change in changes]


def _each_event(roots: Iterable[Any]) -> Iterator[Any]:
    """Every event below the roots, parents first, siblings in their order."""
    waiting = list(roots)[::-1]
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(reversed(event.children))


def _operators(event: Any) -> Iterator[tuple[str, str]]:
    """What an event is a part of, innermost first."""
    while event.parent is not None:
        event = event.parent
        yield event.name, ""


def _record_cuda(step: Callable[[], object], device: torch.device) -> Recording:
    if profilers.keeps_cuda_history():  # which a second would end
        raise FxrematError("torch is recording the history of CUDA's memory: end that before a recording")
    gc.collect()
    torch.cuda.synchronize(device)
    with profilers.cuda_history(device) as events:
        seconds, _held = _timed(step)
    return _recording(cuda_changes(events), seconds)


def cuda_changes(events: Iterable[Mapping[str, Any]]) -> Iterator[_Change]:
    """What torch's history of the memory says of blocks; their bytes are those that were asked for."""
    for event in events:
        if event["action"] == "alloc":
            frames = event.get("frames", ())
            stack = tuple((each["name"], f"{each['filename']}:{each['line']}") for each in frames)
            yield event["addr"], event["size"], stack
        elif event["action"] == "free_completed":
            yield event["addr"], -event["size"], ()


def _recording(changes: Iterable[_Change], seconds: float) -> Recording:
    """The blocks that the changes saw given."""
    given: list[tuple[int, int, tuple[tuple[str, str], ...]]] = []  # bytes, event, stack
    freed: dict[int, int] = {}  # by block, at which event
    holder: dict[int, int] = {}  # by address, the block that is there
    events = 0
    for address, change_bytes, stack in changes:
        held = holder.pop(address, None)
        if held is not None:
            freed[held] = events
        if change_bytes > 0:
            holder[address] = len(given)
            given.append((change_bytes, events, stack))
        if held is not None or change_bytes > 0:  # clause 1: the free of an older block is nothing
            events += 1
    return Recording(
        tuple(
            Block(size_bytes, first, freed.get(block, events) - 1, stack)
            for block, (size_bytes, first, stack) in enumerate(given)
        ),
        events,
        seconds,
    )


# --- CUDA: the allocator's statistics -------------------------------------------------------------


def _measure_cuda(step: Callable[[], object], device: torch.device) -> Measurement:
    gc.collect()  # so that no older block is freed while the step runs
    torch.cuda.synchronize(device)
    start_bytes = cuda_bytes(device, "current")
    torch.cuda.reset_peak_memory_stats(device)
    seconds, _held = _timed(step)
    torch.cuda.synchronize(device)
    peak_bytes = max(0, cuda_bytes(device, "peak") - start_bytes)
    return Measurement(peak_bytes, cuda_bytes(device, "current") - start_bytes, seconds)


def _held_on_cuda(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    def counts() -> tuple[int, int]:
        return cuda_bytes(device, "current"), cuda_bytes(device, "freed")

    def counted() -> object:
        before = counts()
        result = call()
        found.extend(after - each for after, each in zip(counts(), before, strict=True))
        return result

    found: list[int] = []
    sums = [0, *itertools.accumulate(profilers.allocator_changes(counted, device))]
    end_bytes, freed_bytes = found
    return end_bytes + min(max(sums) - sums[-1], freed_bytes), end_bytes


def can_record_cuda() -> bool:
    """Whether CUDA's allocator can keep a history now: the native one, and nobody has it keep one."""
    return torch.cuda.get_allocator_backend() == "native" and not profilers.keeps_cuda_history()


def cuda_count(device: torch.device) -> int:
    """How many changes a history of CUDA's allocator would have from the begin of the process."""
    stats = torch.cuda.memory_stats(device)
    return int(stats["active.all.allocated"] + stats["active.all.freed"])


def cuda_bytes(device: torch.device, which: str) -> int:
    """One of the allocator's counts of bytes; only its native backend knows those asked for."""
    native = torch.cuda.get_allocator_backend() == "native"
    kind = "requested_bytes" if native else "allocated_bytes"
    return int(torch.cuda.memory_stats(device)[f"{kind}.all.{which}"])
