"""What differs between two plan files: graphs, figures, and which values are kept and which recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fxremat.errors import InvalidOptionError, shown
from fxremat.graph.signature import difference
from fxremat.planfile.contents import GraphPlan, PlanFile
from fxremat.report.values import Value, mib, repeated


@dataclass(frozen=True, slots=True)
class Change:
    """Values of one place in a model that two plans treat in different ways.

    Attributes:
        module: The user's module, the numbers of repeated ones left open.
        operator: What computes the values.
        source: The user's file and line.
        before: What the first plan does with each: ``"kept"``, ``"recomputed"`` (``"recomputed 2 times"``),
            both, or ``"-"`` where nothing of it is needed.
        after: The same of the second.
        names: The values.
        kept_bytes: By how many more bytes of them the second plan keeps for the backward.
        recomputed_bytes: By how many more bytes of them it computes again.
    """

    module: str
    operator: str
    source: str
    before: str
    after: str
    names: tuple[str, ...]
    kept_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """What differs between two plans of a graph.

    Attributes:
        before: The first plan; None where the graph is in the second file alone.
        after: The second plan; None where it is in the first alone.
        graph: How the second graph differs from the first; empty where it does not.
        changes: What differs in the treatment of values, most bytes first.
    """

    before: GraphPlan | None
    after: GraphPlan | None
    graph: str = ""
    changes: tuple[Change, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether the two are the same schedule of the same graph, whatever was predicted for it."""
        if self.before is None or self.after is None or self.graph:
            return False
        before, after = (_positions(each) for each in (self.before, self.after))
        return before == after

    def table(self) -> str:
        """The difference for a person."""
        if self.before is None or self.after is None:
            plan, where = (self.after, "second") if self.before is None else (self.before, "first")
            assert plan is not None
            return f"{plan.name}: in the {where} file alone"
        before, after = self.before, self.after
        name = before.name if before.name == after.name else f"{before.name} -> {after.name}"
        rows = [
            ("device", before.device, after.device, ""),
            *_options(dict(before.options), dict(after.options)),
            _bytes("predicted peak", before.solution.peak_bytes, after.solution.peak_bytes),
            _bytes("saved for the backward", _saved(before), _saved(after)),
            _seconds("predicted time", before.solution.seconds, after.solution.seconds),
            _bytes("peak without fxremat", before.baseline_peak_bytes, after.baseline_peak_bytes),
            ("recomputed nodes", *(str(_recomputed(each)) for each in (before, after)), ""),
        ]
        parts = [tabulate(rows, (name, "first", "second", "change"), disable_numparse=True)]
        if self.graph:
            parts.append(f"the graph differs: {self.graph}")
        if self.changes:
            headers = ("module", "operator", "source", "values", "first", "second", "kept", "recomputed")
            right = ("left",) * 3 + ("right", "left", "left", "right", "right")
            parts.append(tabulate(map(_row, self.changes), headers, disable_numparse=True, colalign=right))
        elif not self.is_same and not self.graph:
            parts.append("the same values are kept and computed again, in another order")
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What differs between two plan files.

    Attributes:
        graphs: A difference for each graph of either, those that are the same included.
    """

    graphs: tuple[GraphDiff, ...]

    @property
    def is_same(self) -> bool:
        """Whether both have the same schedules for the same graphs, whatever was predicted for them."""
        return all(each.is_same for each in self.graphs)

    def __str__(self) -> str:
        same = sum(each.is_same for each in self.graphs)
        told = [f"{same} of {len(self.graphs)} graphs have the same plan"]
        return "\n\n".join([*told, *(each.table() for each in self.graphs)])


def diff_plans(first: PlanFile, second: PlanFile) -> PlanDiff:
    """What differs between two plan files.

    Graphs that compute the same belong together; of the others those of one name, in order.

    Raises:
        InvalidOptionError: One of the two is no plan file.
    """
    for name, plans in (("first", first), ("second", second)):
        if not isinstance(plans, PlanFile):
            raise InvalidOptionError(name, f"got {shown(plans)}, expected what fxremat.load_plan returns.")
    left = list(second.graphs)
    pairs: dict[int, GraphPlan] = {}
    for is_alike in (_same_graph, _same_name):
        for place, plan in enumerate(first.graphs):
            found = next((each for each in left if is_alike(plan, each)), None)
            if place not in pairs and found is not None:
                pairs[place] = found
                left.remove(found)
    diffs = [_diff(plan, pairs.get(place)) for place, plan in enumerate(first.graphs)]
    return PlanDiff((*diffs, *(GraphDiff(None, each) for each in left)))


def _same_graph(first: GraphPlan, second: GraphPlan) -> bool:
    return first.signature.fingerprint == second.signature.fingerprint


def _same_name(first: GraphPlan, second: GraphPlan) -> bool:
    return first.name == second.name


def _diff(before: GraphPlan, after: GraphPlan | None) -> GraphDiff:
    if after is None:
        return GraphDiff(before, None)
    found = difference(before.signature, after.signature)
    return GraphDiff(before, after, "" if found is None else found.text, tuple(_changes(before, after)))


def _changes(before: GraphPlan, after: GraphPlan) -> Iterable[Change]:
    first, second = ({value.name: value for value in plan.values} for plan in (before, after))
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys((*first, *second)):
        value = max((each[name] for each in (first, second) if name in each), key=_has_place)
        states = tuple(_state(each.get(name)) for each in (first, second))
        if states[0] != states[1]:
            place = (repeated(value.module), value.operator, value.source)
            groups.setdefault((*place, *states), []).append(name)
    changes = [
        Change(
            module,
            operator,
            source,
            was,
            now,
            tuple(names),
            _sum(second, names, _kept) - _sum(first, names, _kept),
            _sum(second, names, _again) - _sum(first, names, _again),
        )
        for (module, operator, source, was, now), names in groups.items()
    ]
    return sorted(changes, key=lambda each: (-abs(each.kept_bytes) - abs(each.recomputed_bytes), each.names))


def _state(value: Value | None) -> str:
    """What a plan does with a value."""
    if value is None:
        return "-"
    times = "" if value.recomputed == 1 else f" {value.recomputed} times"
    parts = ["kept"] * (value.saved_bytes > 0) + [f"recomputed{times}"] * (value.recomputed > 0)
    return ", ".join(parts) or "-"


def _has_place(value: Value) -> bool:
    """Whether it is known where in the model a value comes from: not of a graph that was captured."""
    return bool(value.module or value.source)


def _kept(value: Value) -> int:
    return value.saved_bytes


def _again(value: Value) -> int:
    return value.recomputed * value.recomputed_bytes


def _sum(values: Mapping[str, Value], names: Iterable[str], of: Callable[[Value], int]) -> int:
    return sum(of(values[name]) for name in names if name in values)


def _positions(plan: GraphPlan) -> Sequence[int]:
    """The schedule by positions in the body, which names are no part of."""
    place = {row.name: position for position, row in enumerate(plan.signature.nodes)}
    return [place[name] for name in plan.solution.schedule]


def _saved(plan: GraphPlan) -> int:
    return sum(value.saved_bytes for value in plan.values)


def _recomputed(plan: GraphPlan) -> int:
    return sum(plan.solution.mirror_counts.values())


# --- What is printed ----------------------------------------------------------------------------------


def _options(
    before: Mapping[str, object], after: Mapping[str, object]
) -> Iterable[tuple[str, str, str, str]]:
    for name, value in before.items():
        if value != after.get(name):
            yield name, str(value), str(after.get(name)), ""


def _bytes(what: str, before: int, after: int) -> tuple[str, str, str, str]:
    return what, mib(before), mib(after), f"{(after - before) / 2**20:+.2f} MiB"


def _seconds(what: str, before: float, after: float) -> tuple[str, str, str, str]:
    change = f"{after / before - 1:+.1%}" if before else ""
    return what, f"{before * 1e3:.2f} ms", f"{after * 1e3:.2f} ms", change


def _row(change: Change) -> tuple[str, ...]:
    more = (f"{each / 2**20:+.2f} MiB" for each in (change.kept_bytes, change.recomputed_bytes))
    count = str(len(change.names))
    return (change.module, change.operator, change.source, count, change.before, change.after, *more)
