"""Plan files: plans made on one machine, reviewed, and run on another.

    make (laptop, for a card) -> save -> review, commit -> load -> apply (each rank of the cluster)

A PlanFile has a plan for each of some graphs: a schedule, the graph's signature, by which another process
recognises it (``graph/signature.py``), and what was predicted. What is applied is the schedule; a file
executes nothing. All else in it is for whoever reads it, and is made again where the plan is applied.

The file's text is JSON (``text.py``), the same for the same plans, so that a hash of it stands for them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from fxremat.errors import InvalidOptionError, PlanMismatchError, shown
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import Schedule
from fxremat.graph.signature import Signature, body, difference, signature
from fxremat.predict.problem import Solution
from fxremat.report.report import Report
from fxremat.report.values import Value, short

LONGEST = 4096  # letters of a text
_DIGITS = 6  # of seconds; more would be noise to whoever compares two files
_REPORTS = "a Report, or several, such as fxremat.reports()"

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A plan, and the graph that it is of.

    Attributes:
        name: What reports called the graph.
        device: The card, or the kind of device, that the plan was made for.
        options: The options that decided the plan, by name.
        solution: The plan; its schedule is in the names of ``signature``.
        baseline_peak_bytes: Predicted peak without fxremat.
        baseline_seconds: Predicted time without fxremat.
        values: What is kept and what is computed again, in the order of the forward.
        signature: What the graph computes.
    """

    name: str
    device: str
    options: tuple[tuple[str, Setting], ...]
    solution: Solution
    baseline_peak_bytes: int
    baseline_seconds: float
    values: tuple[Value, ...]
    signature: Signature

    def schedule_of(self, graph: JointGraph) -> Schedule:
        """The schedule in the names of a graph with the same signature.

        What writes back to the inputs of the graph, which is no part of signatures, ends the forward.
        """
        own = body(graph)
        index = {row.name: node for row, node in zip(self.signature.nodes, own, strict=True)}
        steps = [index[name] for name in self.solution.schedule]
        end = 0
        ran: set[int] = set()
        for step, node in enumerate(steps, 1):
            if node not in ran and graph.nodes[node].phase is Phase.FORWARD:
                end = step
            ran.add(node)
        while end < len(steps) and graph.nodes[steps[end]].leader is not None:
            end += 1
        known = frozenset(own)
        writes = [node for node in range(graph.num_inputs, len(graph.nodes)) if node not in known]
        return Schedule(graph.nodes[node].name for node in (*steps[:end], *writes, *steps[end:]))


@dataclass(frozen=True, slots=True)
class Maker:
    """What made a plan file.

    Attributes:
        fxremat: Its version.
        torch: Its version.
    """

    fxremat: str
    torch: str


@dataclass(frozen=True, repr=False)
class PlanFile:
    """Plans for one or several graphs, each found by what its graph computes.

    Attributes:
        made_by: What made them.
        graphs: The plans, no two for graphs with the same fingerprint.
        path: The file that they were read from; empty if they were made here.
    """

    made_by: Maker
    graphs: tuple[GraphPlan, ...]
    path: str = field(default="", compare=False)

    @classmethod
    def of(cls, reports: Report | Iterable[Report]) -> PlanFile:
        """The plans of reports, of this process or of the one whose cache they are from.

        Raises:
            InvalidOptionError: They are none, or two have different plans for one graph.
        """
        given = (reports,) if isinstance(reports, Report) else reports
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise InvalidOptionError("reports", f"got {shown(reports)}, expected {_REPORTS}.")
        plans: dict[str, GraphPlan] = {}
        for report in given:
            plan = _plan_of(report)
            known = plans.setdefault(plan.signature.fingerprint, plan)
            if known.solution.schedule != plan.solution.schedule:
                problem = (
                    f"{known.name} and {plan.name} are the same graph with different plans, and a file has "
                    f"one for each graph. Choose one of the reports."
                )
                raise InvalidOptionError("reports", problem)
        if not plans:
            raise InvalidOptionError("reports", f"got none, expected {_REPORTS}.")
        return cls(Maker(importlib.metadata.version("fxremat"), torch.__version__), tuple(plans.values()))

    @functools.cached_property
    def key(self) -> str:
        """A hash of the plans, for caches of what is compiled with them."""
        return hashlib.sha256(repr(self.graphs).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"PlanFile({self.key})"

    def __reduce__(self) -> tuple[type[PlanFile], tuple[Maker, tuple[GraphPlan, ...]]]:
        """The same bytes wherever the file lies: caches pickle what a graph is compiled with."""
        return PlanFile, (self.made_by, self.graphs)

    @property
    def has_budget(self) -> bool:
        """Whether a plan was made for a budget: kernels run in the order of plans then."""
        return any(dict(plan.options).get("budget") is not None for plan in self.graphs)

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.path or "those given"

    def find(self, graph: JointGraph, compiler: str = "") -> GraphPlan:
        """The plan for a graph.

        Args:
            graph: The graph.
            compiler: What is going to compile it, for the error.

        Raises:
            PlanMismatchError: There is none, and how the nearest of the file's graphs differs.
        """
        found = signature(graph)
        for plan in self.graphs:
            if plan.signature.fingerprint == found.fingerprint:
                return plan
        differences = [(plan, difference(plan.signature, found)) for plan in self.graphs]
        told = [(each, plan) for plan, each in differences if each is not None]
        least, nearest = min(told, key=lambda each: each[0].nodes)
        made_with = dict(nearest.options).get("compiler")
        others = "" if compiler in ("", made_with) else f", planned for compiler={made_with!r}"
        which = f"{nearest.name!r}{others}"
        problem = f"no plan of {self.title} is for this graph. It differs from {which}: {least.text}"
        where = graph.source(least.node) if least.node else ""
        problem += f" ({where})" if where else ""
        raise PlanMismatchError(graph.name, nearest.name, least.kind, least.node, problem)


def _plan_of(report: object) -> GraphPlan:
    """The plan of a report, with figures and places that other machines have alike."""
    if not isinstance(report, Report) or report.made is None:
        raise InvalidOptionError("reports", f"got {shown(report)}, expected {_REPORTS}.")
    given = dict(report.made.options).get("plan")
    if given is not None:
        raise InvalidOptionError("reports", f"the plan of {report.graph_name} is one of {given}: copy that.")
    solution = report.solution
    names = {row.name for row in report.made.signature.nodes}  # what writes back to inputs is not among them
    plan = replace(
        solution,
        schedule=Schedule(name for name in solution.schedule if name in names),
        seconds=_rounded(solution.seconds),
        lower_bound_seconds=_rounded(solution.lower_bound_seconds),
        planner=_plain(solution.planner),
        note=_plain(solution.note),
    )
    return GraphPlan(
        _plain(report.graph_name),
        _plain(report.made.device),
        tuple((name, value) for name, value in report.made.options if name != "plan"),
        plan,
        report.baseline_peak_bytes,
        _rounded(report.baseline_seconds),
        tuple(map(_value_of, report.values)),
        report.made.signature,
    )


def _value_of(value: Value) -> Value:
    return replace(
        value,
        module=_plain(value.module),
        source=_plain(short(value.source)),
        reason=_plain(value.reason),
        extra_seconds=_rounded(value.extra_seconds),
    )


def _plain(text: str) -> str:
    """The text with a question mark for whatever can't be printed."""
    return "".join(each if each.isprintable() else "?" for each in text[:LONGEST])


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
