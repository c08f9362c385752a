"""What can go wrong, as types: every error that fxremat raises on purpose is an ``FxrematError``.

Each kind keeps what it knows as fields, so that a program can react without parsing a message. Each has
the builtin parent that fits it, so that ``except ValueError`` keeps working for a caller who does not
know fxremat.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fxremat import _torch


class FxrematError(_torch.PassedThrough):
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
        near_matches: Known names or values that resemble it, best first.
    """

    def __init__(self, option: str, problem: str, near_matches: Iterable[str] = ()) -> None:
        self.option = option
        self.near_matches = tuple(near_matches)
        hint = f" Did you mean {' or '.join(map(repr, self.near_matches))}?" if self.near_matches else ""
        super().__init__(f"option {option!r}: {problem}{hint}")

    @classmethod
    def unknown(cls, option: str, known: Iterable[str]) -> InvalidOptionError:
        """The error for an option name that is neither fxremat's nor the compiler's."""
        near = difflib.get_close_matches(option, sorted(known), n=3, cutoff=0.5)
        return cls(option, "is known neither to fxremat nor to the compiler.", near)

    @classmethod
    def bad_value(cls, option: str, value: object, allowed: Iterable[str]) -> InvalidOptionError:
        """The error for a value outside of ``allowed``."""
        names = list(allowed)
        near = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
        return cls(option, f"got {value!r}, expected {', '.join(names)}.", near)


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
    """

    def __init__(self, node: str, step: int | None, problem: str) -> None:
        self.node = node
        self.step = step
        where = "" if step is None else f" at step {step}"
        super().__init__(f"schedule, {node!r}{where}: {problem}")


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
