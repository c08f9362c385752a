"""Journal: what this process compiled, and the logs that tell of it meanwhile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from fxremat._torch import compilers, logs
from fxremat.driver.compilation import Compilation
from fxremat.graph.region import regions_outside
from fxremat.report.report import Report
from fxremat.report.step_report import StepReport
from fxremat.report.trace import trace_of
from fxremat.step.step import steps as _steps


class Compiled(Protocol):
    """A graph that was compiled, with one plan or several."""

    @property
    def reports(self) -> Sequence[Report]:
        """What was planned."""

    @property
    def fallbacks(self) -> Sequence[str]:
        """Why PyTorch's partitioner took over, each time."""


_finished: list[Compiled] = []
_log = logging.getLogger(__name__)


def add(compiled: Compiled) -> None:
    """Enter a graph whose compilation has succeeded; each once."""
    _finished.append(compiled)


def log(compilation: Compilation) -> None:
    """Tell of a graph that is compiled: a line, and its tables for who asks for more (logger ``fxremat``).

    Its reports, and their timelines as traces, stand beside the compiled graph in torch's structured log.
    """
    for report in compilation.reports:
        logs.log_artifact("fxremat_report", logs.TEXT, functools.partial(str, report))
        logs.log_artifact("fxremat_trace", logs.JSON, functools.partial(trace_of, [report]))
    if not _log.isEnabledFor(logging.INFO):
        return
    corrected = f", {compilation.corrections} corrections" if compilation.corrections else ""
    for report in compilation.reports:
        _log.info("%s%s", report.line(), corrected)
        _log.debug("%s", report)
    for reason in compilation.fallbacks:
        _log.info("%s: left to PyTorch's partitioner: %s", compilation.name, reason)
    if not (compilation.reports or compilation.fallbacks):
        _log.debug("%s: there is nothing to plan", compilation.name)


def graph_name() -> str:
    """What reports call the graph whose compilation begins."""
    return f"graph {compilers.compile_id() or sum(1 for _ in _reports())}"


def fallbacks() -> tuple[str, ...]:
    """Why graphs that this process compiled were left to PyTorch's partitioner, in order."""
    return tuple(reason for each in _finished for reason in each.fallbacks)


def reports() -> tuple[Report, ...]:
    """A Report for each graph that this process compiled with a backward, or got from a cache, in order.

    A graph whose compilation failed has none. One whose backward fails later, where that is compiled when it
    first runs, has: its forward ran as the report says. Their notes name regions (``fxremat.region``) that
    ran outside of any graph until now.
    """
    outside = [
        f"{line}: a region ran outside of any graph, where it does nothing" for line in regions_outside()
    ]
    return tuple(replace(report, notes=(*report.notes, *outside)) for report in _reports())


def _reports() -> Iterator[Report]:
    return (report for each in _finished for report in each.reports)


def steps() -> tuple[StepReport, ...]:
    """A StepReport for each kind of training step that this thread ran, in the order of their first.

    A step is known once its backward has run, and has its plans from then on.

    Raises:
        InfeasibleBudgetError: No plans fit the budget of one.
    """
    return _steps.reports()
