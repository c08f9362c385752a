"""Journal: what this process compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxremat._torch import compilers
from fxremat.driver.compilation import Compilation
from fxremat.driver.report import Report
from fxremat.graph.region import regions_outside

_finished: list[Compilation] = []


def add(compilation: Compilation) -> None:
    """Enter a compilation that has succeeded; each once."""
    _finished.append(compilation)


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
