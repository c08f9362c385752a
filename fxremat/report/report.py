"""Reports: what was kept, what is computed again and why, in tables that a person reads.

A Report is frozen values and holds no graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from tabulate import tabulate

from fxremat.emit.writes import ReadAgain
from fxremat.given import Setting
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import bind
from fxremat.graph.signature import Signature
from fxremat.measure import Recording
from fxremat.memory.liveness import MemoryProfile
from fxremat.memory.timeline import Timeline
from fxremat.predict.problem import Problem, Solution, pareto
from fxremat.report.page import save_page
from fxremat.report.pictures import FilePath
from fxremat.report.snapshot import save_snapshot
from fxremat.report.trace import save_trace
from fxremat.report.values import Value, by_place, mib, more
from fxremat.report.verification import Verification


@dataclass(frozen=True, slots=True)
class Made:
    """What a plan was made of, for a file that has it (``planfile``).

    Attributes:
        device: The card, or the kind of device.
        options: The options that decided the plan, by name.
        signature: What the graph computes.
    """

    device: str
    options: tuple[tuple[str, str | int | float | bool | None], ...]
    signature: Signature


@dataclass(frozen=True, slots=True)
class Report:
    """What fxremat did to one compiled graph.

    Attributes:
        graph_name: Which graph; a model with graph breaks has several.
        compiler: ``"inductor"`` or ``"eager"``.
        budget: The budget as it was given.
        budget_bytes: The budget in bytes; None where it is no number, and where the plan was chosen for a
            step of several graphs.
        solution: The plan.
        baseline_peak_bytes: Predicted peak without fxremat.
        baseline_seconds: Predicted time without fxremat.
        num_nodes: Nodes of the joint graph.
        planning_seconds: How long planning took.
        gap: How much longer the plan takes than any within the budget must, or within its own peak where the
            budget is no number: 0.02 for 2 % at most.
        lowest_peak_bytes: The least peak of all plans at hand; a low budget may have lower ones.
        lowest_peak_lower_bound_bytes: No schedule has a lower peak.
        values: The saved and the recomputed values, in the order of the forward.
        timeline: What is live at each step of the plan, by the prediction that it was made with: its peak is
            that of ``solution``.
        baseline_timeline: The same without fxremat.
        frontier: The predicted peak and seconds of each plan at hand that no other beats in both, peaks
            falling.
        notes: What could not be done as the user ordered, and why; and what the planner says of the plan.
        lowered_peak_bytes: The peak of the code that Inductor generated, read before it is compiled; None
            where it is not known, as under ``compiler="eager"``.
        from_cache: Whether a cache had the graph compiled, so that it was not planned now: the plan, the
            places in the source and the planning time are those of when it was.
        reads_again: The inputs and outputs of the graph that recomputation reads: nobody may write to them
            between the forward and the backward (``emit/writes.py``).
        made: What the plan was made of; None for a plan that was given a report by itself.
        settings: The options that held, each with where it was given; a planner of the user's by its name.
        verified: What option ``verify`` has found; None where nothing was to be verified until now.
    """

    graph_name: str
    compiler: str
    budget: int | float | str | None
    budget_bytes: int | None
    solution: Solution
    baseline_peak_bytes: int
    baseline_seconds: float
    num_nodes: int
    planning_seconds: float
    gap: float
    lowest_peak_bytes: int
    lowest_peak_lower_bound_bytes: int
    values: tuple[Value, ...]
    timeline: Timeline
    baseline_timeline: Timeline
    frontier: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()
    from_cache: bool = False
    lowered_peak_bytes: int | None = None
    reads_again: tuple[ReadAgain, ...] = ()
    made: Made | None = None
    settings: tuple[Setting, ...] = ()
    verified: Verification | None = None

    @property
    def peak_bytes(self) -> int:
        """The predicted peak: that of the code, where it is known, else that which the plan was made with."""
        return self.solution.peak_bytes if self.lowered_peak_bytes is None else self.lowered_peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes held from the forward to the backward."""
        return sum(value.saved_bytes for value in self.values)

    def to_json(self) -> str:
        """The report as JSON; of the graph it has the fingerprint, and no timelines."""
        nothing = Timeline((), 0, ())
        fields = asdict(replace(self, made=None, timeline=nothing, baseline_timeline=nothing))
        del fields["timeline"], fields["baseline_timeline"]
        made = (
            None
            if self.made is None
            else {
                "device": self.made.device,
                "options": dict(self.made.options),
                "fingerprint": self.made.signature.fingerprint,
            }
        )
        return json.dumps({**fields, "solution": json.loads(self.solution.to_json()), "made": made})

    def save_html(self, path: FilePath) -> None:
        """Write the report as one HTML file with its timeline and its frontier as pictures (``page.py``).

        Raises:
            InvalidOptionError: The file can't be written.
        """
        save_page(path, [self])

    def save_snapshot(self, path: FilePath, measured: Recording | None = None) -> None:
        """Write the timelines as a memory snapshot for pytorch.org/memory_viz (``snapshot.py``).

        Args:
            path: Where to.
            measured: A step that ran (``fxremat.measure.record``), to be seen beside what is predicted.

        Raises:
            InvalidOptionError: The file can't be written.
        """
        save_snapshot(path, [self], measured)

    def save_trace(self, path: FilePath) -> None:
        """Write the timelines as a trace for ui.perfetto.dev (``trace.py``).

        Raises:
            InvalidOptionError: The file can't be written.
        """
        save_trace(path, [self])

    def summary(self) -> str:
        """A few lines: budget, peak, time."""
        of_baseline = _ratio(self.peak_bytes, self.baseline_peak_bytes)
        least = mib(self.lowest_peak_lower_bound_bytes)
        milliseconds = f"{self.solution.seconds * 1e3:.2f} ms"
        ratio = more(self.solution.seconds, self.baseline_seconds)
        rows = [
            ("budget", _budget(self)),
            ("predicted peak", f"{mib(self.peak_bytes)}, {of_baseline} of the peak without fxremat"),
            *self._lowered(),
            ("saved for the backward", mib(self.saved_bytes)),
            ("predicted time", f"{milliseconds}, {ratio} against the time without fxremat"),
            ("lower bound", self._bound()),
            ("lowest peak", f"{mib(self.lowest_peak_bytes)} found, {least} at least for any plan"),
            ("recomputed nodes", f"{sum(self.solution.mirror_counts.values())} of {self.num_nodes}"),
            ("planner", f"{self.solution.planner}, {self.planning_seconds:.2f} s"),
        ]
        given = [str(each) for each in self.settings if each.source not in ("default", "options")]
        if given:
            rows.append(("options", ", ".join(given)))
        if self.from_cache:
            rows.append(
                ("cache", "the compiled graph was in a cache, with this report of when it was planned")
            )
        if self.verified is not None:
            rows.append(("verified", str(self.verified)))
        rows += [("note", note) for note in self.notes]
        return f"{self.graph_name} ({self.compiler})\n" + tabulate(rows, tablefmt="plain")

    def line(self) -> str:
        """Name, budget, peak, time and planner on one line, for a log."""
        where = "from a cache, " if self.from_cache else ""
        return (
            f"{self.graph_name} ({self.compiler}): {_short_budget(self)}, predicted peak "
            f"{mib(self.peak_bytes)} of {mib(self.baseline_peak_bytes)} without fxremat, predicted time "
            f"{more(self.solution.seconds, self.baseline_seconds)}, {where}planned by "
            f"{self.solution.planner} in {self.planning_seconds:.2f} s"
        )

    def _lowered(self) -> Iterable[tuple[str, str]]:
        if self.lowered_peak_bytes is not None:
            yield "", f"read from the generated code; planned with {mib(self.solution.peak_bytes)}"

    def _bound(self) -> str:
        within = "at this peak" if self.budget_bytes is None else "within this budget"
        least = f"at least {self.solution.lower_bound_seconds * 1e3:.2f} ms {within}"
        return f"{least}: at most {math.ceil(self.gap * 1000) / 1000:.1%} from optimal"

    def table(self, limit: int | None = 30) -> str:
        """The values by module and source line, those with most bytes first.

        Args:
            limit: Rows to print; None for all.
        """
        rows = by_place(self.values)
        shown = rows if limit is None else rows[:limit]
        text = tabulate(
            [
                (
                    each.module,
                    each.operator,
                    each.source,
                    each.count,
                    mib(each.saved_bytes),
                    mib(each.recomputed_bytes),
                    f"{each.extra_seconds * 1e6:.0f}",
                    each.reason,
                )
                for each in shown
            ],
            headers=(
                "module",
                "operator",
                "source",
                "values",
                "saved",
                "recomputed",
                "extra us",
                "kept because",
            ),
            disable_numparse=True,
            colalign=("left", "left", "left", "right", "right", "right", "right", "left"),
        )
        hidden = len(rows) - len(shown)
        return text + (f"\n... and {hidden} more rows" if hidden else "")

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"


def make_report(
    problem: Problem,
    profile: MemoryProfile,
    solution: Solution,
    baseline: Solution,
    *,
    compiler: str,
    budget: int | float | str | None,
    budget_bytes: int | None,
    lowest_peak_bytes: int,
    lowest_peak_lower_bound_bytes: int,
    planning_seconds: float,
    solutions: Sequence[Solution] = (),
    settings: tuple[Setting, ...] = (),
) -> Report:
    """The report of a planned graph; ``solutions`` are those that the plan was chosen from."""
    graph = problem.graph
    return Report(
        graph.name,
        compiler,
        budget,
        budget_bytes,
        solution,
        baseline.peak_bytes,
        baseline.seconds,
        len(graph.nodes) - graph.num_inputs,
        planning_seconds,
        _gap(solution),
        lowest_peak_bytes,
        lowest_peak_lower_bound_bytes,
        tuple(_values(graph, problem, profile, solution)),
        problem.timeline(solution),
        problem.without.timeline(baseline),
        tuple((each.peak_bytes, each.seconds) for each in pareto(solutions)),
        (*_notes(graph, {life.name for life in profile.saved}), *filter(None, [solution.note])),
        settings=settings,
    )


def _gap(solution: Solution) -> float:
    if solution.lower_bound_seconds <= 0:
        return 0.0 if solution.seconds <= 0 else math.inf
    return solution.seconds / solution.lower_bound_seconds - 1


def _notes(graph: JointGraph, saved: set[str]) -> Iterable[str]:
    """Values that are kept although the user wants them computed again."""
    found: dict[tuple[str, str, str], None] = {}
    for node in graph.nodes:
        if node.at_least and node.keep is not None and node.name in saved:
            place = (graph.source(node.name) or node.name, graph.operator(node.name), node.keep)
            found[place] = None
    for source, operator, reason in found:
        yield f"{source}: {operator} is kept although it is marked to be computed again: {reason}"


def _values(
    graph: JointGraph, problem: Problem, profile: MemoryProfile, solution: Solution
) -> Iterable[Value]:
    saved: dict[str, int] = {}
    for life in profile.saved:
        saved[life.name] = saved.get(life.name, 0) + life.bytes
    mirrors = solution.mirror_counts
    for name in bind_order(graph, solution, {*saved, *mirrors}):
        index = graph.index[name]
        node = graph.nodes[index]
        yield Value(
            name,
            graph.operator(name),
            graph.module_path(name),
            graph.source(name),
            saved.get(name, 0),
            mirrors.get(name, 0),
            sum(graph.storage_bytes[storage] for storage in node.recreates),
            mirrors.get(name, 0) * problem.costs.of_node(graph, index),
            (node.keep or "") if name in saved else "",
        )


def bind_order(graph: JointGraph, solution: Solution, names: set[str]) -> list[str]:
    """The names in the order in which they first run."""
    order = dict.fromkeys(graph.nodes[node].name for node in bind(graph, solution.schedule).nodes)
    return [name for name in order if name in names]


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _budget(report: Report) -> str:
    if report.budget is None and report.made is not None and dict(report.made.options).get("plan"):
        return "none: the plan is given"
    if report.budget is None:
        return "none: the least time at no more memory than without fxremat"
    if report.budget_bytes is None and report.budget != "min":
        return f"{report.budget!r} for the step that the graph is a part of (fxremat.steps())"
    if report.budget_bytes is None:
        return "min: the least peak at hand"
    return f"{report.budget!r} = {mib(report.budget_bytes)} for this graph"


def _short_budget(report: Report) -> str:
    """The budget in few words."""
    if report.budget is None:
        return "no budget"
    size = "" if report.budget_bytes is None else f" = {mib(report.budget_bytes)}"
    return f"budget {report.budget!r}{size}"
