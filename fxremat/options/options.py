"""Options: what a user may ask for, checked once and frozen.

A budget is None (the least time that costs no more memory than the compiler's default), a number of bytes,
a text such as ``"8GiB"`` (without a unit: whole bytes), a fraction of the peak without fxremat,
``"min"`` (the least peak at hand), ``"device"`` (what the device has free) or a part of that, ``"90%"``. The
backend makes bytes of the last two when the first graph is compiled (``driver/device_budget.py``).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeAlias

from fxremat import given
from fxremat._torch import compilers
from fxremat.errors import InvalidOptionError, shown
from fxremat.given import Setting
from fxremat.planfile.contents import PlanFile
from fxremat.planfile.text import load_plan
from fxremat.planners import PLANNERS
from fxremat.predict.cost import check_cost

Budget: TypeAlias = "int | float | str | None"
GivenPlanner: TypeAlias = "str | Callable[..., Any]"  # a name of PLANNERS, or a function of the user's

COMPILERS = ("inductor", "eager")
ON_ERROR = ("raise", "fallback")
SCOPES = ("step", "graph")
_PLANNERS_OWN = frozenset({"planner", "time_limit_seconds"})
_BUDGETS = (
    "None, a number of bytes below 2**63, '8GiB', a fraction of the peak such as 0.4, 'min', 'device', or a "
    "part such as '90%' of what the device has free"
)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_PREFIXES = {
    1000: (("k", "kilo"), ("m", "mega"), ("g", "giga"), ("t", "tera")),
    1024: (("ki", "kibi"), ("mi", "mebi"), ("gi", "gibi"), ("ti", "tebi")),
}
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    unit: base**power
    for base, prefixes in _PREFIXES.items()
    for power, (short, long) in enumerate(prefixes, start=1)
    for unit in (short, f"{short}b", f"{short}byte", f"{short}bytes", f"{long}byte", f"{long}bytes")
}


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
        verify: For how many of its first calls in training each compiled graph is held against itself without
            fxremat (``verification.py``).
        scope: Whose peak the budget bounds: ``"step"``, that of a whole training step, however many graphs
            it is compiled to; or ``"graph"``, that of each graph by itself.
        plan: Plans to take in place of making any; None to make them.
        ignore_checkpoints: Whether planning is free of what ``torch.utils.checkpoint`` says in the model, its
            policies' orders included.
        sources: Where each option was given, by its name; no part of what two Options are compared by.
    """

    budget: Budget = None
    planner: GivenPlanner = "auto"
    compiler: str = "inductor"
    cost: str | Mapping[str, float] = "roofline"
    on_error: str = "raise"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    inplace: bool = True
    time_limit_seconds: float | None = None
    detect_writes: bool = False
    verify: int = 0
    scope: str = "step"
    plan: PlanFile | None = None
    ignore_checkpoints: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The options that hold, ours first, each with where it was given."""
        values = {**{name: getattr(self, name) for name in OWN}, **self.inductor}
        return tuple(
            Setting(name, _written(value), self.sources.get(name, "default"))
            for name, value in values.items()
        )

    @property
    def fusion(self) -> str:
        """The name of the memory model that predicts what is compiled."""
        return memory_model(self.compiler, self.inplace)

    @property
    def deciding(self) -> tuple[tuple[str, str | int | float | bool | None], ...]:
        """What the plan of a graph depends on, by name, and a function of the user's by its own."""
        of_the_user = str(getattr(self.planner, "__name__", "a function"))
        return (
            ("budget", self.budget),
            ("planner", self.planner if isinstance(self.planner, str) else of_the_user),
            ("compiler", self.compiler),
            ("cost", self.cost if isinstance(self.cost, str) else "given"),
            ("inplace", self.inplace),
            ("time_limit_seconds", self.time_limit_seconds),
            ("scope", self.scope),
            ("plan", None if self.plan is None else self.plan.title),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether a peak is to be kept: there is a budget, or plans that were made for one."""
        return self.budget is not None or (self.plan is not None and self.plan.has_budget)

    @property
    def reads_code(self) -> bool:
        """Whether the backend holds generated code against the budget."""
        return self.compiler == "inductor" and compilers.hands_over_code(self.inductor)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Check the ``options`` and ``mode`` of a ``torch.compile`` call.

        ``torch.compile`` refuses a ``mode`` beside ``options``, so that it may stand among them too.

        Raises:
            InvalidOptionError: A name is unknown, or a value is not one that its option takes.
        """
        return cls.of(checked(options, mode))

    @classmethod
    def of(cls, values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Options:
        """The options with these values, which were checked one by one.

        Args:
            values: By their names, ours and Inductor's.
            sources: Where each was given; by default that is ``"options"``.

        Raises:
            InvalidOptionError: Two of them exclude each other.
        """
        if sources is None:
            sources = dict.fromkeys(values, "options")
        own = {name: value for name, value in values.items() if name in _READERS}
        inductor = {name: value for name, value in values.items() if name not in _READERS}
        found = cls(**own, inductor=inductor, sources=sources)
        if found.compiler == "inductor" and not found.inplace:
            problem = "is for compiler='eager'; Inductor's own option is inplace_buffers=False."
            raise InvalidOptionError("inplace", f"False from {sources['inplace']} {problem}")
        if found.plan is not None:
            for name in sorted(_PLANNERS_OWN & own.keys()):
                problem = f"from {sources[name]} is for making a plan, and option 'plan' has one already."
                raise InvalidOptionError(name, problem)
        return found


def checked(options: Mapping[str, Any] | None = None, mode: str | None = None) -> dict[str, Any]:
    """The values of ``options`` and ``mode`` by name, in Python's own types; a mode as what it stands for.

    Raises:
        InvalidOptionError: A name is unknown, or a value is not one that its option takes.
    """
    found = _by_name(options)
    mode_options = _mode_options(found.pop("mode", mode))
    own = {name: read(found.pop(name)) for name, read in _READERS.items() if name in found}
    if found.get("custom_partitioner_fn") is not None:
        problem = (
            "fxremat is the partitioner. Give planner=... a function of yours, or use backend='inductor'."
        )
        raise InvalidOptionError("custom_partitioner_fn", problem)
    return {**own, **mode_options, **found}


def memory_model(compiler: str, inplace: bool = True) -> str:
    """The name of the memory model that predicts a compiler: one of ``predict.models.FUSIONS``."""
    if compiler == "inductor":
        return "inductor"
    return "inplace" if inplace else "none"


def _by_name(options: object) -> dict[str, Any]:
    """The options by their names, in which dashes are underscores."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        expected = "a mapping from names to values such as {'budget': '8GiB'}"
        raise InvalidOptionError("options", f"got {shown(options)}, expected {expected}.")
    known = {*_READERS, "mode", *compilers.inductor_option_names()}
    found: dict[str, Any] = {}
    for given_name, value in options.items():
        if not isinstance(given_name, str):
            raise InvalidOptionError(
                "options", f"got {shown(given_name)} where the name of an option belongs."
            )
        name = given_name.replace("-", "_")
        if name not in known:
            raise InvalidOptionError.unknown(given_name, known)
        if name in found:
            raise InvalidOptionError(given_name, "is given twice, with dashes and with underscores.")
        found[name] = value
    return found


def _mode_options(mode: object) -> dict[str, Any]:
    modes = compilers.inductor_modes()
    return {} if mode is None else dict(modes[given.choice("mode", mode, modes)])


def _written(value: object) -> str:
    """A value as Python writes it, a function by its name."""
    name = getattr(value, "__qualname__", None)
    return shown(value) if name is None else f"{getattr(value, '__module__', '')}.{name}"


# --- Values -------------------------------------------------------------------------------------------


def check_budget(budget: object) -> Budget:
    """A budget that ``resolve_budget`` understands, in Python's own types.

    Raises:
        InvalidOptionError: It is none.
    """
    if budget is None:
        return None
    if isinstance(budget, str) and (budget == "min" or _bytes_of_text(budget) is not None):
        return str(budget)
    if share_of_device(budget) is not None:
        return str(budget)
    size = given.whole(budget)
    if size is not None:
        return size
    fraction = given.amount(budget, given.MOST_BYTES)
    if fraction is None:
        raise InvalidOptionError("budget", f"got {shown(budget)}, expected {_BUDGETS}.")
    if fraction > 1:
        problem = (
            f"{fraction!r} is no fraction of the peak: give up to 1.0; or bytes, as an int such as "
            f"{int(fraction)} or as a text such as '8GiB'."
        )
        raise InvalidOptionError("budget", problem)
    return fraction


def check_time_limit(seconds: object) -> float | None:
    """The time limit in Python's own types.

    Raises:
        InvalidOptionError: It is neither None nor a positive number.
    """
    if seconds is None:
        return None
    limit = given.amount(seconds)
    if not limit:
        expected = ("None", f"a number above 0 and up to {given.MOST_SECONDS:g}")
        raise InvalidOptionError.bad_value("time_limit_seconds", seconds, expected)
    return limit


def check_verify(calls: object) -> int:
    """How many calls are verified, in Python's own type; False is none.

    Raises:
        InvalidOptionError: It is no number of calls.
    """
    found = 0 if calls is False else given.whole(calls)
    if found is None:
        raise InvalidOptionError.bad_value("verify", calls, ("a number of calls", "False"))
    return found


def check_planner(planner: object) -> GivenPlanner:
    """The name of a planner, or a callable.

    Raises:
        InvalidOptionError: It is neither.
    """
    return planner if callable(planner) else given.choice("planner", planner, PLANNERS, "a function")


def check_plan(plan: object) -> PlanFile | None:
    """Plans, read if it is their file that is named.

    Raises:
        InvalidOptionError: It is neither.
        PlanFileError: The file can't be read, or holds no plans.
    """
    if plan is None or isinstance(plan, PlanFile):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise InvalidOptionError.bad_value("plan", plan, ("None", "a path", "what fxremat.load_plan returns"))
    return load_plan(plan)


# How the value of each option of ours is read: checked, and in Python's own types.
_READERS: dict[str, Callable[[object], Any]] = {
    "budget": check_budget,
    "planner": check_planner,
    "compiler": functools.partial(given.choice, "compiler", allowed=COMPILERS),
    "cost": check_cost,
    "on_error": functools.partial(given.choice, "on_error", allowed=ON_ERROR),
    "inplace": functools.partial(given.flag, "inplace"),
    "time_limit_seconds": check_time_limit,
    "detect_writes": functools.partial(given.flag, "detect_writes"),
    "verify": check_verify,
    "scope": functools.partial(given.choice, "scope", allowed=SCOPES),
    "plan": check_plan,
    "ignore_checkpoints": functools.partial(given.flag, "ignore_checkpoints"),
}
OWN = tuple(_READERS)


def share_of_device(budget: object) -> float | None:
    """The part of what a device has free that a budget is; None for a budget of another kind.

    >>> [share_of_device(budget) for budget in ("device", "90%", 0.9, "8GiB")]
    [1.0, 0.9, None, None]

    Raises:
        InvalidOptionError: It is no part, but more, or nothing.
    """
    if not isinstance(budget, str):
        return None
    if budget == "device":
        return 1.0
    match = _PERCENT.fullmatch(budget.strip())
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        problem = f"{budget!r} is a part of what the device has free: give above 0% and up to 100%."
        raise InvalidOptionError("budget", problem)
    return share


def is_size(budget: Budget) -> bool:
    """Whether a budget is a number of bytes, whatever the graph.

    >>> [is_size(budget) for budget in (None, "min", 0.5, "90%", 100, "8GiB")]
    [False, False, False, False, True, True]
    """
    if budget is None or budget == "min" or isinstance(budget, float):
        return False
    return share_of_device(budget) is None


def resolve_budget(budget: Budget, baseline_peak_bytes: int) -> int | None:
    """The budget in bytes; None for None and ``"min"``, which are not numbers of bytes.

    >>> resolve_budget("1.5KiB", 0), resolve_budget(0.25, 4096), resolve_budget(100, 0)
    (1536, 1024, 100)
    """
    budget = check_budget(budget)
    share = share_of_device(budget)
    if share is not None:
        problem = (
            f"{budget!r} is a part of what a device has free, which torch.compile(backend='fxremat') and the "
            f"command line ask it for. Here give bytes, or {share:g}: of the peak without fxremat."
        )
        raise InvalidOptionError("budget", problem)
    if isinstance(budget, str):
        return None if budget == "min" else _bytes_of_text(budget)
    return int(budget * baseline_peak_bytes) if isinstance(budget, float) else budget


def _bytes_of_text(text: str) -> int | None:
    """The number of bytes that a text names; None if it names none, or one that can't be counted."""
    match = _SIZE.fullmatch(text.strip().lower())
    scale = _UNITS.get(match[2], 0) if match is not None else 0
    if match is None or scale == 0 or (scale == 1 and "." in match[1]):
        return None
    size = Decimal(match[1]) * scale
    return int(size) if size <= given.MOST_BYTES else None


# --- Text ---------------------------------------------------------------------------------------------

_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def of_text(name: str, text: str) -> object:
    """The value of one of our options that was written down where everything is text, checked.

    Digits are bytes or seconds, digits with a point a fraction or seconds, ``none`` is None, and truth values
    are 1, 0, true and false. What has no text, such as a planner of one's own, can't be written.

    >>> of_text("budget", "0.5"), of_text("budget", "1024"), of_text("inplace", "0")
    (0.5, 1024, False)

    Raises:
        InvalidOptionError: It is no value of the option.
    """
    value: object = text.strip()
    if name in ("budget", "time_limit_seconds") or (name == "verify" and text.strip().isdecimal()):
        value = _number(text.strip())
    elif name in ("detect_writes", "ignore_checkpoints", "inplace", "verify"):
        value = _FLAGS.get(text.strip().lower(), text)
    return _READERS[name](value)


def _number(text: str) -> int | float | str | None:
    """The number that digits stand for, None for ``none``; other text as it is."""
    if text.lower() == "none":
        return None
    if not text.replace(".", "", 1).isdecimal():
        return text
    return float(text) if "." in text or len(text) > 20 else int(text)
