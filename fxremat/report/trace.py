"""Trace: predicted timelines in the trace event format, which ui.perfetto.dev and chrome://tracing draw.

A graph is two *processes*, its plan and the step without fxremat. In each, every node is a slice of its
predicted seconds, one behind the other, with the node's module, source line and live bytes; recomputation has
a row of its own. Two *counters* go along: the live bytes, and the same by kind (``memory/timeline.py``).

Nodes that a fused kernel computes at no cost take a nanosecond here, the least that the format tells, since
of counters at one time all but the last would be lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from fxremat.memory.timeline import KINDS, Timeline
from fxremat.report.pictures import FilePath, Pictured, write

__all__ = ["save_trace", "trace", "trace_of"]

_LEAST = 1e-3  # microseconds, which the format counts in
_ROWS = {1: "forward", 2: "backward", 3: "computed again"}


def save_trace(path: FilePath, reports: Sequence[Pictured]) -> None:
    """Write the timelines of reports as a trace.

    Raises:
        InvalidOptionError: The file can't be written.
    """
    write(path, trace_of(reports).encode())


def trace_of(reports: Sequence[Pictured]) -> str:
    """The text of a trace of the timelines of reports."""
    named = [
        each
        for report in reports
        for each in (
            (report.graph_name, report.timeline),
            (f"{report.graph_name} without fxremat", report.baseline_timeline),
        )
    ]
    return json.dumps(trace(named))


def trace(timelines: Sequence[tuple[str, Timeline]]) -> dict[str, Any]:
    """The trace of timelines, each with the name of its process.

    >>> trace([])
    {'traceEvents': [], 'displayTimeUnit': 'ms'}
    """
    processes = (_events(number, *each) for number, each in enumerate(timelines, 1))
    return {"traceEvents": list(itertools.chain(*processes)), "displayTimeUnit": "ms"}


def _events(process: int, name: str, timeline: Timeline) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for row, title in _ROWS.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": title}}
    taken = [max(step.seconds * 1e6, _LEAST) for step in timeline.steps]
    starts = [0.0, *itertools.accumulate(taken)]
    by_kind = {kind: timeline.live_bytes_of(kind) for kind in KINDS}
    by_kind = {kind: sizes for kind, sizes in by_kind.items() if any(sizes)}
    for number, step in enumerate(timeline.steps):
        row = 3 if step.is_mirror else 2 if number >= timeline.boundary else 1
        origin, live = step.origin, timeline.live_bytes[number]
        yield {
            "ph": "X",
            "name": origin.operator or origin.name,
            "cat": _ROWS[row],
            "pid": process,
            "tid": row,
            "ts": starts[number],
            "dur": taken[number],
            "args": {
                "node": origin.name,
                "module": origin.module,
                "source": origin.source,
                "live bytes": live,
            },
        }
        yield _counter(process, "live bytes", starts[number], {"all": live})
        kinds = {kind: sizes[number] for kind, sizes in by_kind.items()}
        yield _counter(process, "live bytes by kind", starts[number], kinds)
    for title, series in (("live bytes", ["all"]), ("live bytes by kind", [*by_kind])):
        yield _counter(process, title, starts[-1], dict.fromkeys(series, 0))


def _counter(process: int, name: str, at: float, sizes: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": process, "ts": at, "args": sizes}
