"""Given: a value that a user hands over, read as what it stands for.

Each function answers one question about one value. A number is what ``numbers`` calls one, so that NumPy's
are numbers too; a truth value is none, nor is a tensor or an array. What is returned is Python's own: texts
and pickles that caches are keyed by don't depend on where a number came from.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fxremat.errors import InvalidOptionError

MOST_BYTES = 2**63 - 1  # what the arrays of live bytes count in; no address lies above
MOST_SECONDS = 1e30  # sums of so many, and the steps that a search may take in them, are finite


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that holds, for a person.

    Attributes:
        name: The option.
        value: Its value, as Python writes it.
        source: Where it was given: ``"options"``, ``"fxremat.configure()"``, ``"FXREMAT_BUDGET"``,
            ``"default"`` and their like (``options/settings.py``).
    """

    name: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} from {self.source}"


def choice(option: str, value: object, allowed: Iterable[str], *others: str) -> str:
    """The one of the ``allowed`` texts that a value is.

    Args:
        option: What an error calls it.
        value: What was given.
        allowed: The texts.
        *others: What else the option takes, for the error.

    Raises:
        InvalidOptionError: It is none of the texts.
    """
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        raise InvalidOptionError.bad_value(option, value, (*names, *others))
    return str(value)


def flag(option: str, value: object) -> bool:
    """The truth value that a value is.

    Raises:
        InvalidOptionError: It is another object, even one that counts as true or as false.
    """
    if not isinstance(value, bool):
        raise InvalidOptionError.bad_value(option, value, ("True", "False"))
    return value


def mapping(option: str, value: object) -> Mapping[Any, Any]:
    """The mapping that a value is.

    Raises:
        InvalidOptionError: It is none.
    """
    if not isinstance(value, Mapping):
        raise InvalidOptionError.bad_value(option, value, ("a mapping",))
    return value


def whole(value: object, most: int = MOST_BYTES) -> int | None:
    """The whole number from 0 to ``most`` that a value is; None if it is none.

    >>> whole(3), whole(-3), whole(3.0), whole(True), whole(3, most=2)
    (3, None, None, None, None)
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return None
    return int(value) if 0 <= value <= most else None  # type: ignore[operator]


def amount(value: object, most: float = MOST_SECONDS) -> float | None:
    """The number from 0 to ``most`` that a value is; None if it is none.

    >>> amount(1), amount(0.5), amount(-0.5), amount(float("nan")), amount("1")
    (1.0, 0.5, None, None, None)
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= most else None  # type: ignore[operator]
