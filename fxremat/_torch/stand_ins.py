"""Stand-ins: how something stands in the place of a function of torch while any thread is inside of a block.

Each thread has variables of its own that say whether, and what, a stand-in is to do for it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["StandIn", "having", "standing_in"]

_lock = threading.Lock()


class StandIn:
    """Stands in the place of a function of torch while any thread is inside.

    Attributes:
        before: What it stands in the place of.
        inside: A key for each that is inside. None is left, and it changes nothing more, when it has gone.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.inside: set[object] = set()

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def standing_in(owner: Any, name: str, kind: type[StandIn]) -> Iterator[None]:
    """Have a function of a class be of this kind; what others set meanwhile is not overruled, and stays."""
    key, found = object(), None
    try:  # whatever is interrupted is taken back
        with _lock:
            found = getattr(owner, name)
            if not isinstance(found, kind):
                found = kind(found)
                setattr(owner, name, found)
            found.inside.add(key)
        yield
    finally:
        with _lock:
            if isinstance(found, kind):
                found.inside.discard(key)
                if not found.inside and getattr(owner, name) is found:
                    setattr(owner, name, found.before)


@contextlib.contextmanager
def having(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Have a variable of this thread be a value."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)
