"""Snapshot: predicted timelines as a memory snapshot, the file that pytorch.org/memory_viz draws.

torch writes such a file of what an allocator did (``torch.cuda.memory._dump_snapshot``). This one is of what
it will be asked for, byte for byte as predicted:

- *Devices* are timelines: 0 is the first graph's plan, 1 that graph without fxremat, and so on in pairs.
- *Events* are the beginnings and ends of lives in the order of the schedule, at each step the ends first. So
  the most bytes that are allocated at once are the predicted peak. The page's axis is the order of events,
  not time.
- A *frame* is the user's line, or none, with the node's operator, module and name; a *category* is the kind
  of the life (``memory/timeline.py``), or ``unknown``, as the page calls what was there before.
- A *segment* holds it all. What the caller holds lies at its start, allocated and in no event: the page draws
  it below everything, so the page's own maximum is the peak and these bytes. What is live behind it has the
  place that ``arena/packing.py`` finds for it.

The page reads plain containers in pickle's protocol 4. Linear in lives, times their logarithm.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from fxremat.arena.packing import Blocks, in_time
from fxremat.memory.timeline import Life, Timeline
from fxremat.report.pictures import FilePath, Pictured, write

__all__ = ["save_snapshot", "snapshot"]

_PROTOCOL = 4
_BASE = 1 << 40  # where segments begin: no real address, and larger than any position
_UNKNOWN = "unknown"  # the category that the page gives what no event allocates, and expects to be there


def save_snapshot(path: FilePath, reports: Sequence[Pictured]) -> None:
    """Write the timelines of reports as a memory snapshot.

    Raises:
        InvalidOptionError: The file can't be written.
    """
    timelines = [each for report in reports for each in (report.timeline, report.baseline_timeline)]
    write(path, pickle.dumps(snapshot(timelines), protocol=_PROTOCOL))


def snapshot(timelines: Sequence[Timeline]) -> dict[str, list[Any]]:
    """The snapshot of timelines, each as a device.

    >>> snapshot([])
    {'device_traces': [], 'segments': []}
    """
    devices = [_Device(number, timeline) for number, timeline in enumerate(timelines)]
    segments = [device.segment() for device in devices if device.total_bytes]
    return {"device_traces": [list(device.events()) for device in devices], "segments": segments}


class _Device:
    """A timeline whose lives have addresses."""

    def __init__(self, number: int, timeline: Timeline) -> None:
        self.number = number
        self.timeline = timeline
        held = sum(life.bytes for life in timeline.held)
        lives = Blocks.of([(life.bytes, life.first, life.last) for life in timeline.lives])
        offsets = in_time(lives)
        self.addresses = [_BASE + held + int(offset) for offset in offsets]
        self.total_bytes = held + lives.height(offsets)

    def events(self) -> Iterable[dict[str, Any]]:
        """The allocations and frees, in order."""
        yield {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": _UNKNOWN}
        ending: dict[int, list[int]] = {}
        beginning: dict[int, list[int]] = {}
        for index, life in enumerate(self.timeline.lives):
            beginning.setdefault(life.first, []).append(index)
            ending.setdefault(life.last + 1, []).append(index)
        for step in range(len(self.timeline.steps)):
            for index in ending.get(step, ()):
                yield self._event("free_requested", index)
                yield self._event("free_completed", index)
            for index in beginning.get(step, ()):
                yield self._event("alloc", index)

    def _event(self, action: str, index: int) -> dict[str, Any]:
        life = self.timeline.lives[index]
        return {
            "action": action,
            "addr": self.addresses[index],
            "size": life.bytes,
            "stream": 0,
            "frames": _frames(life),
            "category": life.kind,
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
        last = len(self.timeline.steps) - 1
        left = zip(self.addresses, self.timeline.lives, strict=True)
        at = _BASE
        for life in self.timeline.held:
            yield _block(at, life.bytes, life)
            at += life.bytes
        for address, life in sorted(
            ((address, life) for address, life in left if life.last == last), key=lambda each: each[0]
        ):
            if at < address:
                yield _block(at, address - at)
            yield _block(address, life.bytes, life)
            at = address + life.bytes
        if at < _BASE + self.total_bytes:
            yield _block(at, _BASE + self.total_bytes - at)


def _block(address: int, size: int, life: Life | None = None) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": 0 if life is None else size,
        "state": "inactive" if life is None else "active_allocated",
        "frames": [] if life is None else _frames(life),
    }


def _frames(life: Life) -> list[dict[str, Any]]:
    origin = life.origin
    file, _, line = origin.source.rpartition(":")
    words = (f"{life.kind}:", origin.operator, origin.name, f"in {origin.module}" if origin.module else "")
    text = " ".join(word for word in words if word)
    return [{"filename": file or "none", "line": int(line) if line.isdecimal() else 0, "name": text}]
