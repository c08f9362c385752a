"""Options: what a user may ask for, checked once and frozen.

A budget is None (the least time that costs no more memory than the compiler's default), a number of bytes,
a text such as ``"8GiB"`` (without a unit: whole bytes), a fraction of the peak without fxremat, or
``"min"`` (the least peak at hand).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fxremat import _compilers
from fxremat.cost import COSTS
from fxremat.errors import InvalidOptionError
from fxremat.planners import PLANNERS

Budget: TypeAlias = "int | float | str | None"

COMPILERS = ("inductor", "eager")
ON_ERROR = ("raise", "fallback")
_UNITS = {
    "": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_EXPECTED_BUDGET = ("None", "a number of bytes", "'8GiB'", "a fraction of the peak such as 0.4", "'min'")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one ``torch.compile`` call.

    Attributes:
        budget: See the module.
        planner: The name of a planner, or a callable that takes a Problem.
        compiler: ``"inductor"``, or ``"eager"`` to run the fx graphs as they are.
        cost: ``"roofline"``, ``"measured"``, or seconds by node name.
        on_error: ``"raise"``, or ``"fallback"`` to warn and use PyTorch's partitioner.
        inductor: Options for Inductor, those of ``mode`` included.
        inplace: Whether ``compiler="eager"`` writes results over operands that die, where that is safe.
            Inductor decides that for itself; its own option is ``inplace_buffers``.
        time_limit_seconds: About how long the planner may search, counted in steps; None for a few seconds,
            a fraction of one where there is no budget.
        detect_writes: Whether checksums tell of writes to what recomputation reads again.
    """

    budget: Budget = None
    planner: str | Callable[..., Any] = "auto"
    compiler: str = "inductor"
    cost: str | Mapping[str, float] = "roofline"
    on_error: str = "raise"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    inplace: bool = True
    time_limit_seconds: float | None = None
    detect_writes: bool = False

    @property
    def fusion(self) -> str:
        """The memory model that predicts what is compiled."""
        return memory_model(self.compiler, self.inplace)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Check the ``options`` and ``mode`` of a ``torch.compile`` call.

        ``torch.compile`` refuses a ``mode`` beside ``options``, so that it may stand among them too.

        Raises:
            InvalidOptionError: A name is unknown, or a value is not one that its option takes.
        """
        given = dict(options or {})
        mode = given.pop("mode", mode)
        own = {name: given.pop(name) for name in OWN if name in given}
        inductor = {**_mode_options(mode), **{name.replace("-", "_"): value for name, value in given.items()}}
        parsed = cls(**own, inductor=inductor)
        parsed._check()
        return parsed

    def _check(self) -> None:
        check_budget(self.budget)
        check_time_limit(self.time_limit_seconds)
        _check_choice("compiler", self.compiler, COMPILERS)
        _check_choice("on_error", self.on_error, ON_ERROR)
        _check_choice("inplace", self.inplace, (True, False))
        _check_choice("detect_writes", self.detect_writes, (True, False))
        if self.compiler == "inductor" and not self.inplace:
            problem = "is for compiler='eager'; Inductor's own option is inplace_buffers=False."
            raise InvalidOptionError("inplace", problem)
        if not callable(self.planner):
            _check_choice("planner", self.planner, tuple(PLANNERS))
        if not isinstance(self.cost, Mapping):
            _check_choice("cost", self.cost, COSTS)
        known = set(_compilers.inductor_option_names())
        for name in self.inductor:
            if name not in known:
                raise InvalidOptionError.unknown(name, (*OWN, "mode", *known))


OWN = ("budget", "planner", "compiler", "cost", "on_error", "inplace", "time_limit_seconds", "detect_writes")


def memory_model(compiler: str, inplace: bool = True) -> str:
    """The memory model that predicts a compiler: one of ``fusion.FUSIONS``."""
    if compiler == "inductor":
        return "inductor"
    return "inplace" if inplace else "none"


def _mode_options(mode: str | None) -> dict[str, Any]:
    modes = _compilers.inductor_modes()
    if mode is not None and mode not in modes:
        raise InvalidOptionError.bad_value("mode", mode, modes)
    return dict(modes[mode]) if mode is not None else {}


def _check_choice(option: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise InvalidOptionError.bad_value(option, value, map(str, allowed))


def check_budget(budget: object) -> None:
    """Raise InvalidOptionError unless ``resolve_budget`` will understand the budget."""
    if budget is None or budget == "min":
        return
    if isinstance(budget, str):
        _parse_bytes(budget)
    elif isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget < math.inf:
        raise InvalidOptionError.bad_value("budget", budget, _EXPECTED_BUDGET)
    elif isinstance(budget, float) and budget > 1:
        raise InvalidOptionError(
            "budget", f"{budget!r} is no fraction; give bytes as an int, such as {int(budget)}."
        )


def check_time_limit(seconds: object) -> None:
    """Raise InvalidOptionError unless it is None or a positive number."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < math.inf):  # type: ignore[operator]
        raise InvalidOptionError.bad_value("time_limit_seconds", seconds, ("None", "a positive number"))


def resolve_budget(budget: Budget, baseline_peak_bytes: int) -> int | None:
    """The budget in bytes; None for None and ``"min"``, which are not numbers of bytes.

    >>> resolve_budget("1.5KiB", 0), resolve_budget(0.25, 4096), resolve_budget(100, 0)
    (1536, 1024, 100)
    """
    check_budget(budget)
    if budget is None or budget == "min":
        return None
    if isinstance(budget, str):
        return _parse_bytes(budget)
    return int(budget * baseline_peak_bytes) if isinstance(budget, float) else budget


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = match[2].removesuffix("ytes").removesuffix("b") + "b" if match and match[2] else ""
    unit = "" if unit == "b" else unit
    if match is None or unit not in _UNITS or (not unit and "." in match[1]):
        raise InvalidOptionError.bad_value("budget", text, _EXPECTED_BUDGET)
    return int(float(match[1]) * _UNITS[unit])
