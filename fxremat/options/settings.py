"""Settings: which options hold for a graph that is compiled now, and where each was given.

Options can be given in several *places*. From the nearest to the farthest:

1. ``options``: ``options=`` and ``mode=`` of the ``torch.compile`` call.
2. ``fxremat.backend()``: the object that was given as the backend.
3. ``fxremat.enabled()``: the blocks that this thread is inside of, the innermost first.
4. ``fxremat.install()``: in force for the whole process until ``fxremat.uninstall()``.
5. ``fxremat.configure()``: the defaults of the process.
6. The variables of the environment, such as ``FXREMAT_BUDGET``.
7. The defaults of ``options.Options``.

Each option by itself is taken from the nearest place that gives it. A place is looked at when a graph is
compiled: what is compiled stays as it is, whatever changes later. What values hold is a part of the key of
every cache, where they were given is not.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fxremat.errors import InvalidOptionError
from fxremat.given import Setting
from fxremat.options.options import OWN, Options, checked, of_text

PREFIX = "FXREMAT_"
VARIABLES = {f"{PREFIX}{name.upper()}": name for name in OWN}
_OTHERS = ("FXREMAT_CACHE_DIR",)  # variables that are no options
MISSPELT = 0.7  # how alike a misspelling and what it stands for are, as difflib counts


@dataclass(frozen=True, slots=True)
class Layer:
    """What one place gives.

    Attributes:
        source: The place.
        values: The options by name, checked one by one.
    """

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)


enclosing: ContextVar[tuple[Layer, ...]] = ContextVar("fxremat_enclosing", default=())  # innermost first
_of_process: dict[str, Layer] = {}  # "install" and "configure", as far as they give any


def configure(**options: Any) -> None:
    """Set the options of this process where nothing nearer gives them.

    Each call replaces what the one before has set; without options, nothing is set any more. Graphs that are
    compiled stay as they are.

    Args:
        **options: As for the backend, Inductor's among them.

    Raises:
        InvalidOptionError: An option or its value is unknown; what was set before stays.

    Example:
        >>> import fxremat
        >>> fxremat.configure(budget="8GiB", on_error="fallback")
        >>> print(fxremat.settings()[0])
        budget='8GiB' from fxremat.configure()
        >>> fxremat.configure()
    """
    keep("configure", options or None)


def keep(place: str, options: Mapping[str, Any] | None) -> None:
    """Have a place of the process, ``"configure"`` or ``"install"``, give these options; None takes it away.

    Raises:
        InvalidOptionError: An option or its value is unknown.
    """
    if options is None:
        _of_process.pop(place, None)
    else:
        _of_process[place] = Layer(f"fxremat.{place}()", checked(options))


def is_installed() -> bool:
    """Whether ``fxremat.install()`` is in force."""
    return "install" in _of_process


def settings() -> tuple[Setting, ...]:
    """The options that would hold for a graph that ``backend="fxremat"`` compiled here and now.

    Raises:
        InvalidOptionError: A variable of the environment is misspelt, or has an unknown value.
    """
    return in_force().settings


def in_force(*nearest: Layer) -> Options:
    """The options that hold for a graph that is compiled now.

    Args:
        *nearest: What its own compilation gives, the nearest first.

    Raises:
        InvalidOptionError: A variable of the environment is misspelt or has an unknown value, or two options
            that come together here exclude each other.
    """
    places = [_of_process[place] for place in ("install", "configure") if place in _of_process]
    layers = [*nearest, *enclosing.get(), *places, *_environment(os.environ)]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        values.update(layer.values)
        sources.update(dict.fromkeys(layer.values, layer.source))
    return Options.of(values, sources)


def _environment(variables: Mapping[str, str]) -> Iterator[Layer]:
    """What each variable gives; an empty one counts as absent."""
    for variable in sorted(variables):
        if not variable.startswith(PREFIX) or variable in _OTHERS:
            continue
        if variable not in VARIABLES:
            meant = _meant(variable)
            if meant:
                raise InvalidOptionError(variable, "is no variable of fxremat's.", meant)
            continue
        if variables[variable].strip():
            yield Layer(variable, {VARIABLES[variable]: _read(variable, variables[variable])})


def _meant(variable: str) -> list[str]:
    """The variables of which one may be a misspelling; none for one that somebody else has use for."""
    names = [each.removeprefix(PREFIX) for each in (*VARIABLES, *_OTHERS)]
    found = difflib.get_close_matches(variable.removeprefix(PREFIX), names, cutoff=MISSPELT)
    return [f"{PREFIX}{name}" for name in found]


def _read(variable: str, text: str) -> object:
    try:
        return of_text(VARIABLES[variable], text)
    except InvalidOptionError as error:
        raise InvalidOptionError(variable, error.problem, error.near_matches) from None
