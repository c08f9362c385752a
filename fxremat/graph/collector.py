"""Collector: Python's collector of reference cycles, which is of no use while graphs are worked on.

Planning and rewriting make millions of small objects, and of those in cycles none is given up before the
work is done. The collector would go through the whole graph over and over, and find nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from running; with statement, or decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
