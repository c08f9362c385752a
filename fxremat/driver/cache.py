"""Enclosures: what a compiled graph takes along into a compiler's cache, and what the cache must tell apart.

A graph that AOTAutograd's cache serves is not planned again. Its report travels in the cached entry itself,
as an object that says so when it is unpickled; so it is there in any process that the entry reaches, and
goes when the entry goes.

Two things that a plan depends on are no part of the cache's own key: the marks of regions
(``fxremat.region``), because the key leaves out what stands in a node's meta, and the numbers that symbolic
sizes stand for. ``fingerprint`` is both of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.driver.report import Report
from fxremat.graph.region import region_mark

_opened: list[Enclosure] = []  # the one that was unpickled last, or none


class Enclosure:
    """What became of a graph when it was compiled.

    Attributes:
        reports: The reports of what was planned; empty for a graph without a backward.
        warnings: Why PyTorch's partitioner took over, where it did.
    """

    def __init__(self, reports: Sequence[Report] = (), warnings: Sequence[str] = ()) -> None:
        self.reports = tuple(reports)
        self.warnings = tuple(warnings)

    def __reduce__(self) -> tuple[Callable[..., Enclosure], tuple[Any, ...]]:
        """Unpickling opens it, so that ``opened`` finds what a cache has just read."""
        return _open, (self.reports, self.warnings)


def _open(reports: Sequence[Report], warnings: Sequence[str]) -> Enclosure:
    enclosure = Enclosure(reports, warnings)
    _opened[:] = [enclosure]
    return enclosure


def forget() -> None:
    """From now on ``opened`` returns what is unpickled later, and nothing before."""
    _opened.clear()


def opened() -> Enclosure | None:
    """The enclosure that was unpickled last; None if none was since ``forget``.

    A cache reads the entries of a key one after the other and takes the first whose guards hold: the last
    one that it reads.
    """
    return _opened[0] if _opened else None


def fingerprint(module: fx.GraphModule, inputs: Sequence[object]) -> str:
    """What a plan depends on and a cache's key leaves out: the regions of a graph and its inputs' sizes."""
    marks = [
        (name, index, region_mark(node))
        for name, graph in _graphs(module)
        for index, node in enumerate(graph.nodes)
        if region_mark(node) is not None
    ]
    sizes = [_sizes(each) for each in inputs]
    return hashlib.sha256(repr((marks, sizes)).encode()).hexdigest()


def _graphs(module: fx.GraphModule) -> Iterable[tuple[str, fx.Graph]]:
    """The graph and those nested in it, such as the body of a checkpoint."""
    for name, each in module.named_modules():
        if isinstance(each, fx.GraphModule):
            yield name, each.graph


def _sizes(value: object) -> tuple[int | None, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(map(graphs.hint, value.shape))
    return (graphs.hint(value),) if isinstance(value, torch.SymInt) else ()
