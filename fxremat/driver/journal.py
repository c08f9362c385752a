"""Journal: what this process compiled, and what it left to PyTorch."""

from __future__ import annotations

import warnings
from dataclasses import replace

from fxremat._torch import compilers
from fxremat.driver import cache
from fxremat.driver.report import Report
from fxremat.graph.region import regions_outside

RECORDED: list[Report] = []
FALLBACKS: list[str] = []  # why PyTorch's partitioner took over, each time


def add_from_cache(enclosure: cache.Enclosure | None) -> None:
    """Take over the reports and the warnings of a graph that a cache had."""
    name = graph_name()
    if enclosure is None:
        warnings.warn(f"fxremat has no report of {name}: a cache had it without one", stacklevel=3)
        return
    for text in enclosure.warnings:
        warn_of_fallback(name, text)
    RECORDED.extend(replace(report, graph_name=name, from_cache=True) for report in enclosure.reports)


def graph_name() -> str:
    """What reports call the graph that is being compiled."""
    return f"graph {compilers.compile_id() or len(RECORDED)}"


def warn_of_fallback(name: str, reason: str) -> None:
    """Say, and remember, that a graph is left to PyTorch's partitioner."""
    FALLBACKS.append(reason)
    warnings.warn(f"fxremat leaves {name} to PyTorch's partitioner: {reason}", stacklevel=3)


def reports() -> tuple[Report, ...]:
    """A Report for each graph that this process compiled with a backward, or got from a cache, in order.

    A graph whose compilation failed has none. One whose backward fails later, where that is compiled when it
    first runs, has: its forward ran as the report says. Their notes name regions (``fxremat.region``) that
    ran outside of any graph until now.
    """
    outside = [
        f"{line}: a region ran outside of any graph, where it does nothing" for line in regions_outside()
    ]
    return tuple(replace(report, notes=(*report.notes, *outside)) for report in RECORDED)
