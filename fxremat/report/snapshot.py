"""Snapshot: predicted timelines as a memory snapshot, the file that pytorch.org/memory_viz draws.

torch writes such a file of what an allocator did (``torch.cuda.memory._dump_snapshot``). This one is of what
it will be asked for, byte for byte as predicted, and beside it of what it was asked for by a step that ran:

- *Devices* are timelines: 0 is the first graph's plan, 1 that graph without fxremat, and so on in pairs. The
  last one is the recording, if there is one (``measure.record``).
- *Events* are the beginnings and ends of lives in the order of the schedule, at each step the ends first, or
  those that were recorded. So the most bytes that are allocated at once are the predicted peak, or the
  measured one. The page's axis is the order of events, not time.
- A *frame* is the user's line, or none, with the node's operator, module and name; a *category* is the kind
  of the life (``memory/timeline.py``), or ``unknown``, as the page calls what was there before. The frames of
  a recorded block are its stack, its category is ``measured``.
- A *segment* holds it all. What the caller holds lies at its start, allocated and in no event: the page draws
  it below everything, so the page's own maximum is the peak and these bytes. What is live behind it has the
  place that ``arena/packing.py`` finds for it.

The page reads plain containers in pickle's protocol 4. Linear in lives, times their logarithm.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxremat.arena.packing import Blocks, in_time
from fxremat.measure import Recording
from fxremat.memory.timeline import Life, Timeline
from fxremat.report.pictures import FilePath, Pictured, write

__all__ = ["save_snapshot", "snapshot"]

_PROTOCOL = 4
_BASE = 1 << 40  # where segments begin: no real address, and larger than any position
_UNKNOWN = "unknown"  # the category that the page gives what no event allocates, and expects to be there
_MEASURED = "measured"


def save_snapshot(path: FilePath, reports: Sequence[Pictured], measured: Recording | None = None) -> None:
    """Write the timelines of reports as a memory snapshot, and a recording beside them.

    Raises:
        InvalidOptionError: The file can't be written.
    """
    timelines = [each for report in reports for each in (report.timeline, report.baseline_timeline)]
    write(path, pickle.dumps(snapshot(timelines, measured), protocol=_PROTOCOL))


def snapshot(timelines: Sequence[Timeline], measured: Recording | None = None) -> dict[str, list[Any]]:
    """The snapshot of timelines and a recording, each as a device.

    >>> snapshot([])
    {'device_traces': [], 'segments': []}
    """
    drawn = [*map(_of_timeline, timelines), *([] if measured is None else [_of_recording(measured)])]
    devices = [_Device(number, *each) for number, each in enumerate(drawn)]
    segments = [device.segment() for device in devices if device.total_bytes]
    return {"device_traces": [list(device.events()) for device in devices], "segments": segments}


@dataclass(frozen=True, slots=True)
class _Allocated:
    """Bytes that are allocated from a first to a last step, both included."""

    bytes: int
    first: int
    last: int
    category: str
    frames: list[dict[str, Any]]


_Drawn = tuple[int, Sequence[_Allocated], Sequence[_Allocated]]  # steps, what they allocate, what is held


def _of_timeline(timeline: Timeline) -> _Drawn:
    lives, held = (
        [_Allocated(life.bytes, life.first, life.last, life.kind, _frames(life)) for life in each]
        for each in (timeline.lives, timeline.held)
    )
    return len(timeline.steps), lives, held


def _of_recording(recording: Recording) -> _Drawn:
    """A step of it is an event."""
    blocks = []
    for each in recording.blocks:
        frames = [_frame(name, source) for name, source in each.stack]
        blocks.append(_Allocated(each.bytes, each.first, each.last, _MEASURED, frames))
    return recording.events, blocks, []


class _Device:
    """A timeline or a recording whose allocations have addresses."""

    def __init__(
        self, number: int, steps: int, allocated: Sequence[_Allocated], held: Sequence[_Allocated]
    ) -> None:
        self.number = number
        self.steps = steps
        self.allocated = allocated
        self.held = held
        held_bytes = sum(each.bytes for each in held)
        blocks = Blocks.of([(each.bytes, each.first, each.last) for each in allocated])
        offsets = in_time(blocks)
        self.addresses = [_BASE + held_bytes + int(offset) for offset in offsets]
        self.total_bytes = held_bytes + blocks.height(offsets)

    def events(self) -> Iterable[dict[str, Any]]:
        """The allocations and frees, in order."""
        yield {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": _UNKNOWN}
        ending: dict[int, list[int]] = {}
        beginning: dict[int, list[int]] = {}
        for index, each in enumerate(self.allocated):
            beginning.setdefault(each.first, []).append(index)
            ending.setdefault(each.last + 1, []).append(index)
        for step in range(self.steps):
            for index in ending.get(step, ()):
                yield self._event("free_requested", index)
                yield self._event("free_completed", index)
            for index in beginning.get(step, ()):
                yield self._event("alloc", index)

    def _event(self, action: str, index: int) -> dict[str, Any]:
        each = self.allocated[index]
        return {
            "action": action,
            "addr": self.addresses[index],
            "size": each.bytes,
            "stream": 0,
            "frames": each.frames,
            "category": each.category,
        }

    def segment(self) -> dict[str, Any]:
        """The segment as it is at the end: what is held, and what the step leaves."""
        blocks = list(self._blocks())
        active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        return {
            "device": self.number,
            "address": _BASE,
            "total_size": self.total_bytes,
            "allocated_size": active,
            "active_size": active,
            "requested_size": active,
            "stream": 0,
            "segment_type": "large",
            "blocks": blocks,
        }

    def _blocks(self) -> Iterable[dict[str, Any]]:
        at = _BASE
        for each in self.held:
            yield _block(at, each.bytes, each)
            at += each.bytes
        given = zip(self.addresses, self.allocated, strict=True)
        left = [(address, each) for address, each in given if each.last == self.steps - 1]
        for address, each in sorted(left, key=lambda pair: pair[0]):
            if at < address:
                yield _block(at, address - at)
            yield _block(address, each.bytes, each)
            at = address + each.bytes
        if at < _BASE + self.total_bytes:
            yield _block(at, _BASE + self.total_bytes - at)


def _block(address: int, size: int, allocated: _Allocated | None = None) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": 0 if allocated is None else size,
        "state": "inactive" if allocated is None else "active_allocated",
        "frames": [] if allocated is None else allocated.frames,
    }


def _frames(life: Life) -> list[dict[str, Any]]:
    origin = life.origin
    words = (f"{life.kind}:", origin.operator, origin.name, f"in {origin.module}" if origin.module else "")
    return [_frame(" ".join(word for word in words if word), origin.source)]


def _frame(name: str, source: str) -> dict[str, Any]:
    file, _, line = source.rpartition(":")
    return {"filename": file or "none", "line": int(line) if line.isdecimal() else 0, "name": name}
