"""What can go wrong, as types: every error that fxremat raises on purpose is an ``FxrematError``.

Each kind keeps what it knows as fields, so that a program can react without parsing a message. Each has
the builtin parent that fits it, so that ``except ValueError`` keeps working for a caller who does not
know fxremat.
"""

from __future__ import annotations

import difflib
import os
import reprlib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from fxremat._torch import graphs


class _Shown(reprlib.Repr):
    """How messages show a value: on a piece of a line, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, value: int, level: int) -> str:
        """A number that is too long to be read, and from Python 3.11 on to be printed, by its size."""
        return repr(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"


shown = _Shown().repr

# Where the code lies that a user hasn't written: ours, torch's, Python's.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parent, Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)


def told(error: BaseException) -> str:
    """What an error of a user's code says, and the line of the user's that raised it or led to it."""
    files = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    lines = [f"{file}:{line}" for file, line in files if _is_the_users(file)]
    where = f" ({lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {str(error).removesuffix('.')}{where}"


def _is_the_users(file: str) -> bool:
    is_installed = "site-packages" in file and not file.startswith(_LIBRARIES[:2])
    return not file.startswith("<") and (is_installed or not file.startswith(_LIBRARIES))


def near_matches(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that resemble another, best first."""
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)


class FxrematError(graphs.PassedThrough):
    """The root of the family.

    Dynamo hands it to the caller of a compiled model as it is, where it would wrap other errors of a
    backend in one of its own.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args, first_useful_frame=None)

    def __reduce__(self) -> tuple[object, ...]:
        return _from_parts, (type(self), self.args), self.__dict__


def _from_parts(kind: type[FxrematError], args: tuple[object, ...]) -> FxrematError:
    """An unpickled error; ``args`` holds its message, which is not what its kind is called with."""
    error = kind.__new__(kind)
    error.args = args
    return error


class InvalidOptionError(FxrematError, ValueError):
    """An option has a name or a value that does not exist.

    Attributes:
        option: The name as it was given.
        problem: What is wrong with it.
        near_matches: Known names or values that resemble it, best first.
    """

    def __init__(self, option: str, problem: str, near_matches: Iterable[str] = ()) -> None:
        self.option = option
        self.problem = problem
        self.near_matches = tuple(near_matches)
        hint = f" Did you mean {' or '.join(map(repr, self.near_matches))}?" if self.near_matches else ""
        super().__init__(f"option {option!r}: {problem}{hint}")

    @classmethod
    def unknown(cls, option: str, known: Iterable[str]) -> InvalidOptionError:
        """The error for an option name that is neither fxremat's nor the compiler's."""
        near = near_matches(option, known)
        return cls(option, "is known neither to fxremat nor to the compiler.", near)

    @classmethod
    def bad_value(cls, option: str, value: object, allowed: Iterable[str]) -> InvalidOptionError:
        """The error for a value outside of ``allowed``."""
        names = list(allowed)
        near = near_matches(value if isinstance(value, str) else shown(value), names)
        return cls(option, f"got {shown(value)}, expected {', '.join(names)}.", near)


class InfeasibleBudgetError(FxrematError, MemoryError):
    """No plan at hand fits the budget.

    Attributes:
        budget_bytes: What was asked for.
        lowest_peak_bytes: The least peak among all plans at hand. Given as the budget, it works.
        lower_bound_bytes: Proved: no plan at all fits a smaller budget.
    """

    def __init__(
        self,
        budget_bytes: int,
        lowest_peak_bytes: int,
        graph_name: str = "the graph",
        lower_bound_bytes: int = 0,
        note: str = "",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.lowest_peak_bytes = lowest_peak_bytes
        self.lower_bound_bytes = lower_bound_bytes
        bound = f", and none is below {lower_bound_bytes:,}" if lower_bound_bytes else ""
        super().__init__(
            f"{graph_name}: no plan fits a budget of {budget_bytes:,} bytes; the lowest peak found is "
            f"{lowest_peak_bytes:,} bytes{bound}. Use budget={lowest_peak_bytes} or budget='min', or make "
            f"the batch smaller." + (f" ({note}.)" if note else "")
        )


class RatesError(FxrematError, ValueError):
    """The rates that a person has pinned can't be taken at their word.

    Attributes:
        path: The file that holds them.
    """

    def __init__(self, path: Path, problem: str, example: str) -> None:
        self.path = path
        super().__init__(
            f"pinned rates, {path}: {problem}. Expected is JSON: finite positive numbers by kind of device, "
            f"as in {example}. Correct the file, or remove it and the rates are measured."
        )


class CaptureError(FxrematError):
    """A model or an fx graph could not be made a JointGraph."""


class GraphError(FxrematError, ValueError):
    """A JointGraph breaks one of its invariants.

    Attributes:
        node: The name of the node at fault.
    """

    def __init__(self, node: str, problem: str, source: str = "") -> None:
        self.node = node
        where = f" ({source})" if source else ""
        super().__init__(f"node {node!r}{where}: {problem}")


class ScheduleError(FxrematError, ValueError):
    """A schedule is not an execution of its graph.

    Attributes:
        node: The name at fault.
        step: Its position in the schedule, or None where the fault is an absence.
        problem: What is wrong with it.
    """

    def __init__(self, node: str, step: int | None, problem: str, planner: str = "") -> None:
        self.node = node
        self.step = step
        self.problem = problem
        whose = f" of planner {planner!r}" if planner else ""
        where = "" if step is None else f" at step {step}"
        super().__init__(f"schedule{whose}, {shown(node)}{where}: {problem}")


class PlanFileError(FxrematError, ValueError):
    """A plan file can't be read or written, or holds what is no plan.

    Attributes:
        path: The file; empty for a text that is of none.
        place: Where in it the fault is, such as ``graphs[0].schedule``; empty where it is as a whole.
    """

    def __init__(self, path: str, place: str, problem: str) -> None:
        self.path = path
        self.place = place
        where = f"{path}, {place}" if path and place else path or place
        super().__init__(f"plan file{f' {where}' if where else ''}: {problem}")


class PlanMismatchError(FxrematError, ValueError):
    """A graph is none of those that a plan file has plans for.

    Attributes:
        graph_name: What reports call the graph.
        nearest: The name of the file's graph that resembles it most; empty where the file has none.
        kind: What differs first: ``"operator"``, ``"size"``, ``"dtype"``, ``"arguments"``, ``"use"``,
            ``"input"``, or ``"count"`` where one graph has all nodes of the other and more.
        node: The graph's first node that differs; empty where there is none.
    """

    def __init__(self, graph_name: str, nearest: str, kind: str, node: str, problem: str) -> None:
        self.graph_name = graph_name
        self.nearest = nearest
        self.kind = kind
        self.node = node
        super().__init__(
            f"{graph_name}: {problem}. Compile the model that the plan was made of, with the same sizes and "
            f"versions, or make the plan again; on_error='fallback' leaves such graphs to PyTorch's "
            f"partitioner."
        )


class VerificationError(FxrematError, ArithmeticError):
    """A compiled graph computes something else than the same graph without fxremat.

    Attributes:
        graph_name: What reports call the graph.
        place: What differs most, such as ``gradient of self.layers.0.weight``.
        difference: By how much, relative to the largest element of all outputs or of all gradients.
        tolerance: What would have been allowed.
    """

    def __init__(self, graph_name: str, place: str, difference: float, tolerance: float) -> None:
        self.graph_name = graph_name
        self.place = place
        self.difference = difference
        self.tolerance = tolerance
        super().__init__(
            f"{graph_name}: {place} differs by {difference:.3g} from that of the graph without fxremat; "
            f"{tolerance:.3g} is allowed. That is a fault of fxremat's: please report it. "
            f"on_error='fallback' goes on with PyTorch's partitioner."
        )


class ModifiedInputError(FxrematError, RuntimeError):
    """A tensor was written to between the forward and the backward, which computes from it again.

    Attributes:
        tensor: What the user calls it, such as ``self.layers.0.weight``.
        shape: Its sizes.
        operator: What would be computed again from it.
        source: The user's file and line of that operator; empty where it is not known.
    """

    def __init__(self, tensor: str, shape: tuple[int, ...], operator: str, source: str = "") -> None:
        self.tensor = tensor
        self.shape = shape
        self.operator = operator
        self.source = source
        where = f" ({source})" if source else ""
        super().__init__(
            f"{tensor}, of shape {list(shape)}, was written to between the forward and the backward, where "
            f"{operator}{where} is computed again from it: gradients would be wrong. Write to it behind the "
            f"backward, or have it computed once: with fxremat.region(keep=True) around that line, or for "
            f"the whole model with planner='keep_all'."
        )
