"""Plan files as JSON: what ``save_plan`` writes and ``load_plan`` reads, and checks.

``plan.schema.json`` beside this module says the same of the form. Written are the same bytes for the same
plans: a line for each node, for each value that is kept or computed again, and for each *run* of the
schedule, which is a stretch of nodes that stand one behind the other in the graph. So two versions can be
compared line by line.

Whatever else a file holds is a ``PlanFileError`` that says where. Nothing of it is executed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fxremat import given
from fxremat.errors import InvalidOptionError, PlanFileError, near_matches, shown
from fxremat.graph.schedule import Schedule
from fxremat.graph.signature import DIGITS, Row, Signature
from fxremat.planfile.contents import LONGEST, GraphPlan, Maker, PlanFile, Setting
from fxremat.predict.problem import Solution
from fxremat.report.report import Report
from fxremat.report.values import Value

__all__ = ["FORMAT", "VERSION", "from_json", "load_plan", "save_plan", "to_json"]

FORMAT = "fxremat plan"
VERSION = 1
_MOST_STEPS = 1 << 22  # of a schedule: a few lines could stand for more than memory holds
_NESTED = 3  # how deep values stand of which each part gets a line of its own
_USES = {" ".join(each) for each in ((), ("output",), ("gradient",), ("written",), ("output", "gradient"))}
_USES |= {f"{use} written".strip() for use in _USES}

_Read = TypeVar("_Read")


# --- Writing ------------------------------------------------------------------------------------------


def save_plan(path: str | os.PathLike[str], plans: PlanFile | Report | Iterable[Report]) -> PlanFile:
    """Write plans to a file, in place of one that is there.

    Args:
        path: The file.
        plans: Plans, or the reports that have them, such as ``fxremat.reports()``.

    Returns:
        The plans.

    Raises:
        PlanFileError: The file can't be written, or a node's name is none that a file can have.
        InvalidOptionError: There are no plans, or two for one graph.
    """
    found = plans if isinstance(plans, PlanFile) else PlanFile.of(plans)
    place = _path(path)
    text = to_json(found)
    from_json(text, str(place))
    try:
        place.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise PlanFileError(str(place), "", f"it can't be written: {error.strerror}.") from error
    return found


def to_json(plans: PlanFile) -> str:
    """The text of a file with these plans."""
    made_by = {"fxremat": plans.made_by.fxremat, "torch": plans.made_by.torch}
    graphs = [_graph(each) for each in plans.graphs]
    return _laid_out({"format": FORMAT, "version": VERSION, "made_by": made_by, "graphs": graphs}) + "\n"


def _graph(plan: GraphPlan) -> dict[str, Any]:
    solution = plan.solution
    return {
        "name": plan.name,
        "fingerprint": plan.signature.fingerprint,
        "device": plan.device,
        "options": dict(plan.options),
        "planner": solution.planner,
        "note": solution.note,
        "peak_bytes": solution.peak_bytes,
        "seconds": solution.seconds,
        "lower_bound_seconds": solution.lower_bound_seconds,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "baseline_seconds": plan.baseline_seconds,
        "values": [{name: getattr(value, name) for name in _VALUE} for value in plan.values],
        "schedule": list(_runs(solution.schedule, plan.signature)),
        "inputs": list(plan.signature.inputs),
        "nodes": [list(row) for row in plan.signature.nodes],
    }


def _runs(schedule: Schedule, signature: Signature) -> Iterator[str | list[str]]:
    """The schedule: a node by its name, a run of nodes by the names of the first and the last."""
    place = {row.name: position for position, row in enumerate(signature.nodes)}
    start = 0
    for step in range(1, len(schedule) + 1):
        if step < len(schedule) and place[schedule[step]] == place[schedule[step - 1]] + 1:
            continue
        yield schedule[start] if step == start + 1 else [schedule[start], schedule[step - 1]]
        start = step


def _laid_out(value: Any, depth: int = 0) -> str:
    """JSON of which the outer values have a line for each of their parts."""
    if not value or not isinstance(value, (dict, list)) or depth > _NESTED:
        return json.dumps(value)
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_laid_out(each, depth + 1)}" for name, each in value.items()]
    else:
        parts = [_laid_out(each, depth + 1) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{inner}{f',{inner}'.join(parts)}\n{' ' * depth}{closing}"


def _path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise InvalidOptionError.bad_value("path", path, ("the path of a plan file",))
    return Path(path)


# --- Reading ------------------------------------------------------------------------------------------


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    """The plans of a file, for option ``plan``.

    Raises:
        PlanFileError: It can't be read, or is no plan file.
    """
    place = _path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFileError(str(place), "", f"it can't be read: {error.strerror}.") from error
    except UnicodeError as error:
        raise PlanFileError(str(place), "", f"it is no text in UTF-8: {error}.") from error
    return from_json(text, str(place))


def from_json(text: str, path: str = "") -> PlanFile:
    """The plans that a text holds; ``path`` is what errors call it.

    Raises:
        PlanFileError: It holds something else.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_refused)
    except (ValueError, RecursionError, TypeError) as error:
        raise PlanFileError(path, "", f"it is no JSON: {str(error) or type(error).__name__}.") from error
    return _Reader(path).plans(found)


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An object whose names differ: of two that are alike a reviewer may read one, and a parser another."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON's")


_VALUE = {  # what a file has of each value, and how it is read
    "name": "text",
    "module": "text",
    "source": "text",
    "saved_bytes": "whole",
    "recomputed": "whole",
    "recomputed_bytes": "whole",
    "extra_seconds": "amount",
    "reason": "text",
}
_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "budget": (type(None), int, float, str),
    "planner": (str,),
    "compiler": (str,),
    "cost": (str,),
    "inplace": (bool,),
    "time_limit_seconds": (type(None), int, float),
    "scope": (str,),
}
_GRAPH = (
    *("name", "fingerprint", "device", "options", "planner", "note", "peak_bytes", "seconds"),
    *(
        "lower_bound_seconds",
        "baseline_peak_bytes",
        "baseline_seconds",
        "values",
        "schedule",
        "inputs",
        "nodes",
    ),
)


class _Reader:
    """Reads the plans of one file; each method says in which place of it a value stands."""

    def __init__(self, path: str) -> None:
        self._path = path

    def plans(self, found: object) -> PlanFile:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            self._fail("", f"expected an object whose format is {FORMAT!r}, as fxremat.save_plan writes it.")
        version = given.whole(found.get("version"))
        if version is not None and version > VERSION:
            advice = "Install a newer fxremat, or make the plan with this one"
            self._fail("version", f"it is {version}, and this fxremat reads up to {VERSION}. {advice}.")
        if version != VERSION:
            self._fail("version", f"got {shown(found.get('version'))}, expected {VERSION}.")
        fields = self._object(found, "", ("format", "version", "made_by", "graphs"))
        made_by = self._object(fields["made_by"], "made_by", ("fxremat", "torch"))
        maker = Maker(*(self._text(made_by[name], f"made_by.{name}") for name in ("fxremat", "torch")))
        graphs = tuple(self._each(fields["graphs"], "graphs", self._graph))
        if not graphs:
            self._fail("graphs", "it is empty: there is no plan.")
        self._differ([plan.signature.fingerprint for plan in graphs], "graphs", "fingerprint")
        return PlanFile(maker, graphs, self._path)

    def _graph(self, found: object, at: str) -> GraphPlan:
        fields = self._object(found, at, _GRAPH)
        texts = {
            name: self._text(fields[name], f"{at}.{name}") for name in ("name", "device", "planner", "note")
        }
        nodes = tuple(self._each(fields["nodes"], f"{at}.nodes", self._row))
        self._differ([row.name for row in nodes], f"{at}.nodes", "name")
        signature = Signature(tuple(self._each(fields["inputs"], f"{at}.inputs", self._text)), nodes)
        if fields["fingerprint"] != signature.fingerprint:
            problem = (
                "it is not that of the inputs and nodes: the file was changed by hand, or merged wrongly."
            )
            self._fail(f"{at}.fingerprint", problem)
        schedule = self._schedule(fields["schedule"], f"{at}.schedule", signature)
        values = tuple(self._each(fields["values"], f"{at}.values", self._value))
        seconds = self._amount(fields["seconds"], f"{at}.seconds")
        bound = self._amount(fields["lower_bound_seconds"], f"{at}.lower_bound_seconds")
        return GraphPlan(
            texts["name"],
            texts["device"],
            self._options(fields["options"], f"{at}.options"),
            Solution(
                schedule,
                self._whole(fields["peak_bytes"], f"{at}.peak_bytes"),
                seconds,
                bound,
                texts["planner"],
                texts["note"],
            ),
            self._whole(fields["baseline_peak_bytes"], f"{at}.baseline_peak_bytes"),
            self._amount(fields["baseline_seconds"], f"{at}.baseline_seconds"),
            self._agreeing(values, schedule, signature, f"{at}.values"),
            signature,
        )

    def _options(self, found: object, at: str) -> tuple[tuple[str, Setting], ...]:
        fields = self._object(found, at, tuple(_OPTIONS))
        for name, kinds in _OPTIONS.items():
            value = fields[name]
            if type(value) not in kinds:
                self._fail(f"{at}.{name}", f"got {shown(value)}.")
            if isinstance(value, str):
                self._text(value, f"{at}.{name}")
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                self._amount(value, f"{at}.{name}")
        return tuple((name, fields[name]) for name in _OPTIONS)

    def _row(self, found: object, at: str) -> Row:
        parts = self._each(found, at, self._text)
        if len(parts) != len(Row._fields) or not parts[0]:
            self._fail(at, f"expected {', '.join(Row._fields)}.")
        row = Row(*parts)
        if len(row.arguments) != DIGITS or not set(row.arguments) <= set("0123456789abcdef"):
            self._fail(at, f"got {shown(row.arguments)}, expected {DIGITS} hexadecimal digits.")
        if row.use not in _USES:
            self._fail(at, f"got {shown(row.use)}, expected output, gradient or written, or nothing.")
        return row

    def _schedule(self, found: object, at: str, signature: Signature) -> Schedule:
        names = [row.name for row in signature.nodes]
        place = {name: position for position, name in enumerate(names)}
        steps: list[str] = []
        for number, each in enumerate(self._list(found, at)):
            ends = each if isinstance(each, list) and len(each) == 2 else [each]
            known = [place.get(end, -1) if isinstance(end, str) else -1 for end in ends]
            if -1 in known or known[0] > known[-1]:
                problem = (
                    f"got {shown(each)}, expected the name of a node, or of the first and the last of a run."
                )
                self._fail(f"{at}[{number}]", problem)
            if len(steps) + known[-1] - known[0] >= _MOST_STEPS:
                self._fail(at, f"it has more than {_MOST_STEPS} steps.")
            steps += names[known[0] : known[-1] + 1]
        return Schedule(steps)

    def _value(self, found: object, at: str) -> Value:
        fields = self._object(found, at, tuple(_VALUE))
        read = {"text": self._text, "whole": self._whole, "amount": self._amount}
        values: dict[str, Any] = {
            name: read[kind](fields[name], f"{at}.{name}") for name, kind in _VALUE.items()
        }
        return Value(**values, operator="")

    def _agreeing(
        self, values: Sequence[Value], schedule: Schedule, signature: Signature, at: str
    ) -> tuple[Value, ...]:
        """The values, if they say of recomputation what the schedule does: they are what a person reads."""
        self._differ([value.name for value in values], at, "name")
        rows = {row.name: row for row in signature.nodes}
        unknown = [value.name for value in values if value.name not in rows]
        if unknown:
            self._fail(at, f"{shown(unknown[0])} is no node of the graph.")
        told = {value.name: value.recomputed for value in values if value.recomputed}
        counts = schedule.mirror_counts
        if told != counts:
            name = next(name for name in (*counts, *told) if told.get(name) != counts.get(name))
            times = f"{counts.get(name, 0)} times, not {told.get(name, 0)}"
            self._fail(at, f"by the schedule {shown(name)} is computed again {times}.")
        return tuple(replace(value, operator=rows[value.name].operator) for value in values)

    # -- plain values

    def _object(self, found: object, at: str, names: Sequence[str]) -> dict[str, Any]:
        if not isinstance(found, dict):
            self._fail(at, f"got {shown(found)}, expected an object.")
        for name in found:
            if name not in names:
                near = near_matches(name[:LONGEST], names)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                self._fail(at, f"{shown(name)} is unknown.{hint}")
        for name in names:
            if name not in found:
                self._fail(at, f"{name!r} is missing.")
        return found

    def _list(self, found: object, at: str) -> list[Any]:
        if not isinstance(found, list):
            self._fail(at, f"got {shown(found)}, expected a list.")
        return found

    def _each(self, found: object, at: str, read: Callable[[object, str], _Read]) -> list[_Read]:
        return [read(each, f"{at}[{number}]") for number, each in enumerate(self._list(found, at))]

    def _text(self, found: object, at: str) -> str:
        if not isinstance(found, str) or len(found) > LONGEST or not found.isprintable():
            self._fail(at, f"got {shown(found)}, expected a text of printable letters, {LONGEST} at most.")
        return found

    def _whole(self, found: object, at: str) -> int:
        number = given.whole(found)
        if number is None:
            self._fail(at, f"got {shown(found)}, expected a whole number from 0.")
        return number

    def _amount(self, found: object, at: str) -> float:
        number = given.amount(found)
        if number is None or not math.isfinite(number):
            self._fail(at, f"got {shown(found)}, expected a number from 0.")
        return number

    def _differ(self, texts: Sequence[str], at: str, what: str) -> None:
        seen: set[str] = set()
        for text in texts:
            if text in seen:
                self._fail(at, f"two have the same {what}, {shown(text)}.")
            seen.add(text)

    def _fail(self, at: str, problem: str) -> NoReturn:
        raise PlanFileError(self._path, at, problem)
