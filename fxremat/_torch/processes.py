"""The door to the processes that train together: their ranks, and the store that they share.

The store is a map of keys to bytes that one of the processes serves. To use it is no collective: nobody waits
for anybody, and it gets in the way of no collective that the program has under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed

__all__ = ["Group", "StoreLost", "group"]


class StoreLost(Exception):
    """The store can't be used, or not any more."""


class Group:
    """All processes of the program.

    Attributes:
        rank: The number of this one.
        size: How many there are.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    def tell(self, key: str, value: bytes) -> None:
        """Let all know a value.

        Raises:
            StoreLost: It can't be told.
        """
        with _losing():
            self._store.set(key, value)

    def told(self, key: str) -> bytes | None:
        """The value that somebody told; None before.

        Raises:
            StoreLost: Nothing can be heard.
        """
        with _losing():
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def first(self, key: str, value: str) -> str:
        """What the first of all said who was asked for a key; that is the value, if nobody was before.

        Raises:
            StoreLost: Nothing can be heard.
        """
        with _losing():
            found: bytes = self._store.compare_set(key, "", value)
            return found.decode()

    def count(self, key: str, more: int = 0) -> int:
        """A sum over all, to which this one adds.

        Raises:
            StoreLost: Nothing can be heard.
        """
        with _losing():
            return int(self._store.add(key, more))


@contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise StoreLost(str(error)) from error


def group() -> Group | None:
    """The processes of which this is one; None where it is alone, or nobody runs behind the others."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    size = distributed.get_world_size()
    if size == 1 or distributed.get_backend() == "fake":
        return None
    store = distributed.distributed_c10d._get_default_store()
    if store is None:  # of MPI
        return None
    return Group(distributed.get_rank(), size, distributed.PrefixStore("fxremat", store))
