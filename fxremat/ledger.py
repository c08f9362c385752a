"""Ledgers: figures measured on this machine, kept on disk so that every process reads the same ones.

Terms. The *facts* of a ledger are what its figures depend on, such as the device and torch's version; each
set of facts has a file of its own, so a figure is never read where it does not hold. A file is lines of
JSON: first the facts and the ledger's name, which is drawn when it is made, then a key and a figure each.

Three clauses make readers agree:

1. A file comes to be whole, header included, or not at all. Of two processes that make one, the first does.
2. Figures are only ever appended, and of two under the same key the first counts. Who appends reads again,
   so that processes which measured the same at the same time go on with the same figures.
3. A line that can't be read is no line, and a file whose header can't be read is made anew. Where the
   folder can't be written to, a ledger lasts as long as the process.

``forget`` removes a ledger; the next has another name. Linear in the size of the file, which has a line for
each distinct operator that was ever timed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Ledger", "folder", "forget", "open_ledger"]


def folder() -> Path:
    """Where ledgers are kept: ``$FXREMAT_CACHE_DIR``, ``$XDG_CACHE_HOME/fxremat`` or ``~/.cache/fxremat``."""
    own = os.environ.get("FXREMAT_CACHE_DIR")
    if own:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or os.path.expanduser("~/.cache")) / "fxremat"


class Ledger:
    """Figures by key, of this process and of all that share the file.

    Attributes:
        path: The file.
        name: Drawn when the ledger was made; the same for all that share the file.
        is_kept: Whether it is on disk.
    """

    def __init__(self, path: Path, facts: Mapping[str, object]) -> None:
        self.path = path
        self._facts = dict(facts)
        self._figures: dict[str, Any] = {}
        self.name, self.is_kept = uuid.uuid4().hex, False
        if not self._read():
            self._create()

    def __contains__(self, key: str) -> bool:
        return key in self._figures

    def __getitem__(self, key: str) -> Any:
        return self._figures[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def refresh(self) -> None:
        """Read what other processes have added."""
        if self.is_kept:
            self._read()

    def add(self, figures: Mapping[str, object]) -> None:
        """Keep figures; under keys that have one already, the first stays."""
        if self.is_kept and _header(self.path) == (self._facts, self.name):
            lines = "".join(json.dumps([key, figure]) + "\n" for key, figure in figures.items())
            with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + lines)  # what another process left unfinished ends here
            self._read()
        for key, figure in figures.items():
            self._figures.setdefault(key, figure)

    def _read(self) -> bool:
        """Take over name and figures from the file; False where there is none that is whole.

        What this process knows already stays as it is.
        """
        header = _header(self.path)
        if header is None or header[0] != self._facts or (self.is_kept and header[1] != self.name):
            return False
        self.name, self.is_kept = header[1], True
        for line in _lines(self.path)[1:]:
            entry = _parsed(line)
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
                self._figures.setdefault(entry[0], entry[1])
        return True

    def _create(self) -> None:
        """Make the file, unless another process was first: clause 1."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made, text = tempfile.mkstemp(dir=self.path.parent, suffix=".new")
        except OSError:
            return
        try:
            with os.fdopen(made, "w", encoding="utf-8") as file:
                file.write(json.dumps({"facts": self._facts, "name": self.name}) + "\n")
            self._put(text)
        except OSError:
            return
        finally:
            with contextlib.suppress(OSError):
                os.unlink(text)
        self._read()

    def _put(self, written: str) -> None:
        try:
            os.link(written, self.path)  # fails where there is a file, which os.replace would not
        except OSError:  # another process was first, the file is broken, or links are unknown here
            if _header(self.path) is None:
                os.replace(written, self.path)


def open_ledger(facts: Mapping[str, object]) -> Ledger:
    """The ledger of these facts, for this process; what is not on disk yet is made."""
    return _ledger(_path(facts), json.dumps(facts))


@functools.cache
def _ledger(path: Path, facts: str) -> Ledger:
    return Ledger(path, json.loads(facts))


def forget(facts: Mapping[str, object]) -> None:
    """Remove the ledger of these facts, from disk and from this process."""
    with contextlib.suppress(OSError):
        _path(facts).unlink()
    _ledger.cache_clear()


def _path(facts: Mapping[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return folder() / f"{facts.get('kind', 'facts')}-{digest[:16]}.jsonl"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []


def _header(path: Path) -> tuple[dict[str, object], str] | None:
    """Facts and name of a ledger's file; None where there are none."""
    header = _parsed(next(iter(_lines(path)), ""))
    if not isinstance(header, dict):
        return None
    facts, name = header.get("facts"), header.get("name")
    return (facts, name) if isinstance(facts, dict) and isinstance(name, str) else None


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None
