"""fxremat: train the same model in a fraction of the memory.

A ``torch.fx`` compiler pass that decides which values of the forward to keep and which to compute again,
and when, so that the peak of a training step fits a budget in bytes.

    model = torch.compile(model, backend="fxremat", options={"budget": "8GiB"})
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxremat.public import *  # noqa: F403
    from fxremat.public import __all__ as __all__

__version__ = "0.1.0"


def _found(name: str) -> Any:
    """A module of the package, or a public name; the first of these loads all, and PyTorch's compiler.

    That takes seconds, which a program that imports fxremat need not pay before it compiles anything.
    """
    if name != "__all__":
        if name.startswith("__"):  # what Python and its tools ask every module for
            raise _unknown(name)
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
    public = importlib.import_module(f"{__name__}.public")
    globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
    if name not in globals():
        raise _unknown(name)
    return globals()[name]


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *_found("__all__")})


def _unknown(name: str) -> AttributeError:
    return AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers know which names there are
    __getattr__ = _found
