"""Pictures: what they are made of, and how they are written to files.

Three say the same of one or several graphs: a memory snapshot (``snapshot.py``), a trace (``trace.py``) and a
page (``page.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fxremat.errors import InvalidOptionError
from fxremat.memory.timeline import Timeline
from fxremat.report.values import Value

__all__ = ["FilePath", "Pictured", "write"]

FilePath = str | os.PathLike[str]


class Pictured(Protocol):
    """What a picture takes from a Report, whose attributes these are."""

    @property
    def graph_name(self) -> str:
        """Which graph."""

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""

    @property
    def lowered_peak_bytes(self) -> int | None:
        """The peak of the generated code."""

    @property
    def timeline(self) -> Timeline:
        """What is live at each step."""

    @property
    def baseline_timeline(self) -> Timeline:
        """The same without fxremat."""

    @property
    def frontier(self) -> Sequence[tuple[int, float]]:
        """Peaks and seconds of plans."""

    @property
    def values(self) -> Sequence[Value]:
        """What is kept and what is computed again."""

    def summary(self) -> str:
        """A few lines."""


def write(path: FilePath, content: bytes) -> None:
    """Write a file, in place of one that is there.

    Raises:
        InvalidOptionError: It can't be written.
    """
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        problem = f"{os.fspath(path)!r} can't be written: {error.strerror}."
        raise InvalidOptionError("path", problem) from error
