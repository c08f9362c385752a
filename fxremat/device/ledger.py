"""Ledgers: figures measured on this machine, kept on disk so that every process reads the same ones.

Terms. The *facts* of a ledger are what its figures depend on, such as the device and torch's version; each
set of facts has a file of its own, so a figure is never read where it does not hold. A file is lines of
JSON: first the facts and the ledger's name, which is drawn when it is made, then a key and a figure each.

Three clauses make readers agree:

1. A file comes to be whole, header included, or not at all. Of two processes that make one, the first does.
2. Figures are only ever appended, and of several under the same key the first counts that is of use to its
   reader. That depends on the figure alone, so what is of no use is measured again once, for all processes.
   Who appends reads again, so that processes which measured the same at the same time go on with the same
   figures.
3. A line that can't be read is no line, and a file that can be read but has no header is made anew (by the
   last of those that do so at once). Whatever else is found in its place stays there: a ledger of other
   facts, a file that may not be read, anything that is no regular file. A ledger then lasts as long as the
   process, as do figures that can't be written.

Whoever may write to the folder may share the figures: a file is made with its folder's group and bits.

``forget`` removes a ledger; the next has another name. Linear in the size of the file, which has a line for
each distinct operator that was ever timed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["Ledger", "folder", "forget", "open_ledger", "open_regular", "positive"]

_LONGEST_HEADER = 1 << 16  # bytes: a file without a line's end is not read any further

_Used = TypeVar("_Used")


def folder() -> Path:
    """Where ledgers are kept: ``$FXREMAT_CACHE_DIR``, ``$XDG_CACHE_HOME/fxremat`` or ``~/.cache/fxremat``."""
    own = os.environ.get("FXREMAT_CACHE_DIR")
    if own:
        return Path(os.path.expanduser(own))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "fxremat"


def open_regular(path: Path, flags: int = os.O_RDONLY) -> io.FileIO:
    """A regular file, opened without a buffer; it is not made.

    Raises:
        OSError: It can't be opened, or is something else, such as a pipe, which might never answer.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(os.open(path, flags), "r+" if flags & os.O_RDWR else "r")


def positive(figure: object) -> float | None:
    """A figure as a float; None unless it is a finite positive number."""
    if isinstance(figure, bool) or not isinstance(figure, (int, float)):
        return None
    return float(figure) if 0 < figure <= sys.float_info.max else None


class Ledger:
    """Figures by key, of this process and of all that share the file.

    Attributes:
        path: The file.
        name: Drawn when the ledger was made; the same for all that share the file.
    """

    def __init__(self, path: Path, facts: Mapping[str, object]) -> None:
        self.path = path
        self.name = uuid.uuid4().hex
        self._facts = dict(facts)
        self._has_file = False
        self._kept: dict[str, list[object]] = {}  # all figures of each key in the file
        self._unkept: dict[str, list[object]] = {}  # of keys with one that could not be written: those known
        if not self._read():
            self._create()

    @property
    def is_kept(self) -> bool:
        """Whether it is on disk, with all its figures."""
        return self._has_file and not self._unkept

    def __iter__(self) -> Iterator[str]:
        return iter({**self._kept, **self._unkept})

    def first(self, key: str, use: Callable[[object], _Used | None]) -> _Used | None:
        """The first figure of a key that is of use; None where there is none.

        Args:
            key: The key.
            use: What is made of a figure: None if it is of no use, for anyone may have written to the file.
        """
        return next((used for used in map(use, self._figures(key)) if used is not None), None)

    def refresh(self) -> None:
        """Read what other processes have added."""
        if self._has_file:
            self._read()

    def add(self, figures: Mapping[str, object]) -> None:
        """Keep figures, each behind those that its key has already."""
        if not self._append(figures):
            for key, figure in figures.items():
                self._unkept[key] = [*self._figures(key), figure]
        self.refresh()

    def _figures(self, key: str) -> Sequence[object]:
        return self._unkept.get(key, self._kept.get(key, []))

    def _append(self, figures: Mapping[str, object]) -> bool:
        """Whether the file is still there and has the figures now."""
        lines = [json.dumps([key, figure]) for key, figure in figures.items()]
        text = "\n".join(["", *lines, ""]).encode()  # what another process left unfinished ends here
        try:
            with open_regular(self.path, os.O_RDWR | os.O_APPEND) as file:
                if _header(file.read(_LONGEST_HEADER)) != (self._facts, self.name):
                    return False
                return file.write(text) == len(text)  # at once: nothing comes between from other processes
        except OSError:
            return False

    def _read(self) -> bool:
        """Take over name and figures from the file; False where it is none of this ledger's."""
        try:
            with open_regular(self.path) as file:
                start = file.read(_LONGEST_HEADER)
                header = _header(start)
                if header is None or header[0] != self._facts or (self._has_file and header[1] != self.name):
                    return False
                lines = (start + file.readall()).split(b"\n")
        except OSError:
            return False
        self.name, self._has_file, self._kept = header[1], True, _entries(lines[1:])
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
            _share(text, self.path.parent)
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
            if _is_free(self.path):
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


def _share(written: str, folder: Path) -> None:
    """Give a file the group of its folder and the bits; the owner may read and write it in any case."""
    status = folder.stat()
    with contextlib.suppress(OSError, AttributeError):  # not a group of ours, or a system without groups
        os.chown(written, -1, status.st_gid)
    with contextlib.suppress(OSError):  # a file system without bits
        os.chmod(written, status.st_mode & 0o666 | 0o600)


def _is_free(path: Path) -> bool:
    """Whether a ledger may be put there: there is nothing, or a file that can be read and is none.

    Raises:
        OSError: What is there can't be read.
    """
    if not os.path.lexists(path):
        return True
    with open_regular(path) as file:
        return _header(file.read(_LONGEST_HEADER)) is None


def _header(start: bytes) -> tuple[dict[str, object], str] | None:
    """Facts and name of a ledger from the start of its file; None where there are none."""
    header = _parsed(start.partition(b"\n")[0])
    if not isinstance(header, dict):
        return None
    facts, name = header.get("facts"), header.get("name")
    return (facts, name) if isinstance(facts, dict) and isinstance(name, str) else None


def _entries(lines: Iterable[bytes]) -> dict[str, list[object]]:
    """The figures of each key, in order."""
    found: dict[str, list[object]] = {}
    for line in lines:
        entry = _parsed(line)
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
            found.setdefault(entry[0], []).append(entry[1])
    return found


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
