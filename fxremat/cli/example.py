"""What MODEL on the command line stands for: a model with what it needs for one training step.

A *reference* is ``package.module:function`` or ``path/to/file.py:function``. The function takes no
arguments and returns ``(model, args)`` or ``(model, args, loss)``, where ``args`` is a tuple, or a mapping of
what the model takes by name. It is looked for where ``python`` would
look: beside the file, and for a module also in the working directory. Whatever goes wrong in the user's code
is told in one sentence, with the user's error chained.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fxremat.device.absent import AbsentCard
from fxremat.errors import InvalidOptionError, near_matches, told
from fxremat.fitting.example import ON_FAKE_TENSORS, Example, kind, returned_by

__all__ = ["Example", "example_of", "load", "step_of"]


def example_of(reference: str, card: AbsentCard | None = None) -> Example:
    """What the function that MODEL names returns, checked.

    Args:
        reference: The function.
        card: Where the model and its arguments are to be, if not where the function puts them.

    Raises:
        InvalidOptionError: It cannot be found or imported, raises an error, or returns something else.
    """
    function = load("MODEL", reference)
    try:
        returned = function() if card is None else card.make(function)
    except Exception as error:
        hint = "" if card is None else ON_FAKE_TENSORS.format("With --device")
        raise InvalidOptionError(
            "MODEL", f"calling {reference!r} raised {told(error)}; --debug shows more.{hint}"
        ) from error
    example = returned_by(reference, returned)
    if card is None:
        return example
    return replace(example, args=card.hold(example.model, example.args), card=card)


def step_of(reference: str) -> Callable[[], object]:
    """What the function that STEP names returns, checked.

    Raises:
        InvalidOptionError: It cannot be found or imported, raises an error, or returns something else.
    """
    function = load("step", reference)
    try:
        step = function()
    except Exception as error:
        raise InvalidOptionError(
            "step", f"calling {reference!r} raised {told(error)}; --debug shows more."
        ) from error
    if not callable(step):
        problem = f"{reference!r} must return a function that runs a step: got {kind(step)}."
        raise InvalidOptionError("step", problem)
    return step  # type: ignore[no-any-return]


def load(option: str, reference: str) -> Callable[..., Any]:
    """The function that a reference names.

    Args:
        option: What an error calls the option that the reference was given for.
        reference: ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        InvalidOptionError: There is no such module or function, or importing it raised an error.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        wanted = "package.module:function or path/to/file.py:function"
        example = f": name a function of it, such as {reference}:build" if reference.endswith(".py") else ""
        raise InvalidOptionError(option, f"expected {wanted}, got {reference!r}{example}.")
    module = _import_file(option, Path(place)) if place.endswith(".py") else _import_module(option, place)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    known = [each for each, value in vars(module).items() if callable(value)]
    raise InvalidOptionError(option, f"{place!r} has no function {name!r}.", near_matches(name, known))


def _import_file(option: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidOptionError(option, f"there is no file {str(path)!r}.")
    _search_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"fxremat_example_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _not_imported(option, str(path), error) from error
    return module


def _import_module(option: str, name: str) -> ModuleType:
    _search_in(Path())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_imported(option, name, error) from error


def _not_imported(option: str, name: str, error: BaseException) -> InvalidOptionError:
    """The error of a module that can't be imported; what it lacks has to be where fxremat runs."""
    lacks = isinstance(error, ModuleNotFoundError)
    advice = f" fxremat runs in {sys.executable}: install it there." if lacks else ""
    return InvalidOptionError(option, f"importing {name!r} raised {told(error)}; --debug shows more.{advice}")


def _search_in(folder: Path) -> None:
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)
