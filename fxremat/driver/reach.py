"""Reach: ways to fxremat where a program does not pass ``options=`` on, or names no backend but "inductor".

``backend`` makes options a part of the backend itself. ``enabled`` and ``install`` have fxremat compile what
``torch.compile(backend="inductor")`` is to compile, the default backend of most programs, with the options
and the mode that Inductor was to be given. Who compiles a graph is decided when it is compiled, and not when
``torch.compile`` is called: a model that is compiled before a block and called first inside of it is
fxremat's; one that is compiled inside and called first behind it is Inductor's. What is compiled stays.

Other backends are let alone, Inductor's packages ahead of time included, and ``torch._dynamo.optimize``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from fxremat._torch import patches
from fxremat.driver.backend import compile_under
from fxremat.options import settings
from fxremat.options.options import checked
from fxremat.options.settings import Layer


class Backend:
    """A backend with options of its own, for ``torch.compile`` and all who hand it on.

    Two are equal if their options are, so that equal ones share compiled code. It never changes: copies of it
    are itself, and it can be pickled if its options can.

    Attributes:
        options: As they were given.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.__name__ = "fxremat"  # what Dynamo calls the backend
        self.options = dict(options)
        self._layer = Layer("fxremat.backend()", checked(options))

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's; ``options`` and ``mode`` of the call hold before the backend's own."""
        found = settings.in_force(Layer("options", checked(options, mode)), self._layer)
        return compile_under(found, module, inputs)

    def __repr__(self) -> str:
        return f"fxremat.backend({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def _key(self) -> str:
        """Its options as text: 1, a byte, and 1.0, all of the peak, are two budgets."""
        return repr(sorted((name, repr(value)) for name, value in self._layer.values.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __copy__(self) -> Backend:
        return self

    def __deepcopy__(self, memo: object) -> Backend:
        return self

    def __reduce__(self) -> tuple[Callable[..., Backend], tuple[dict[str, Any]]]:
        return Backend, (self.options,)


def backend(**options: Any) -> Backend:
    """The backend with options of its own, for ``torch.compile(backend=...)``.

    Args:
        **options: As for ``backend="fxremat"``, ``mode`` among them.

    Raises:
        InvalidOptionError: An option or its value is unknown.

    Example:
        >>> import torch
        >>> double = torch.compile(lambda x: x + x, backend=backend(budget="1MiB", compiler="eager"))
        >>> x = torch.ones(2, requires_grad=True)
        >>> double(x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    return Backend(options)


def enabled(**options: Any) -> contextlib.AbstractContextManager[None]:
    """Have what this thread compiles inside, with ``backend="inductor"`` too, go through fxremat.

    Blocks can be nested: an option that the inner one leaves out is that of the outer one. Other threads go
    on as they are, and those that are started inside have none of it.

    Args:
        **options: As for ``backend="fxremat"``. Those of the ``torch.compile`` call hold before them.

    Raises:
        InvalidOptionError: An option or its value is unknown.

    Example:
        >>> import torch
        >>> model = torch.compile(torch.nn.Linear(2, 2))
        >>> with enabled(budget="1MiB", compiler="eager"):
        ...     loss = model(torch.ones(2)).sum()
        >>> loss.backward()
    """
    return _enabled(Layer("fxremat.enabled()", checked(options)))


@contextlib.contextmanager
def _enabled(layer: Layer) -> Iterator[None]:
    end = patches.taking_inductor(_take)
    token = settings.enclosing.set((layer, *settings.enclosing.get()))
    try:
        yield
    finally:
        settings.enclosing.reset(token)
        end()


_lock = threading.Lock()
_end: Callable[[], None] | None = None  # takes back what ``install`` has put into torch


def install(**options: Any) -> None:
    """Have what the process compiles from now on, with ``backend="inductor"``, go through fxremat.

    In all threads, until ``uninstall``. Where it is in force already, these options replace its own.

    Args:
        **options: As for ``backend="fxremat"``. Those of the ``torch.compile`` call hold before them, and
            those of ``enabled``, too.

    Raises:
        InvalidOptionError: An option or its value is unknown; what was in force stays.
    """
    global _end
    with _lock:
        settings.keep("install", options)
        if _end is None:
            _end = patches.taking_inductor(_take)


def uninstall() -> None:
    """Take ``install`` back: torch is as it was before. What was compiled meanwhile stays as it is.

    Nothing happens where it is not in force.
    """
    global _end
    with _lock:
        settings.keep("install", None)
        if _end is not None:
            _end()
            _end = None


def _take(module: fx.GraphModule, inputs: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Compile what Inductor was to compile, if that is wanted in this thread; else ``NotImplemented``."""
    if not settings.enclosing.get() and not settings.is_installed():
        return NotImplemented
    return compile_under(settings.in_force(Layer("options", checked(given))), module, inputs)
