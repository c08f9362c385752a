"""Cache: what of a compiled graph travels in a compiler's cache, and what the cache's key leaves out.

A graph that AOTAutograd's cache serves is not planned again. What became of it when it was compiled, its
*outcome*, travels in the cached entry itself; so it is there in any process that the entry reaches, and goes
when the entry goes. The cache does not say what it reads. So an outcome that is unpickled announces itself to
the compilation that is under way in the same thread (``listening``), and to nobody if there is none.

Three things that a plan depends on are no part of the cache's own key: the marks of regions
(``fxremat.region``), because the key leaves out what stands in a node's meta, the numbers that symbolic
sizes stand for, and the type of autocast around the graph. ``fingerprint`` is all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat._torch import compilers, graphs
from fxremat.episode.trace import Prospects
from fxremat.graph.region import region_mark
from fxremat.report.report import Report


@dataclass(frozen=True)
class Outcome:
    """What became of a graph when it was compiled.

    Attributes:
        reports: The reports of what was planned; empty for a graph without a backward.
        fallbacks: Why PyTorch's partitioner took over, where it did.
        prospects: The plan as a step sees it, and the others that there are; None where nothing was planned.
    """

    reports: tuple[Report, ...] = ()
    fallbacks: tuple[str, ...] = ()
    prospects: Prospects | None = None

    def __reduce__(self) -> tuple[Callable[..., Outcome], tuple[Any, ...]]:
        """Unpickling announces it."""
        return _announced, (self.reports, self.fallbacks, self.prospects)


_heard: ContextVar[list[Outcome] | None] = ContextVar("fxremat_heard", default=None)


def _announced(
    reports: tuple[Report, ...], fallbacks: tuple[str, ...], prospects: Prospects | None
) -> Outcome:
    outcome = Outcome(reports, fallbacks, prospects)
    heard = _heard.get()
    if heard is not None:
        heard.append(outcome)
    return outcome


@contextlib.contextmanager
def listening() -> Iterator[list[Outcome]]:
    """Yield a list to which each outcome is added that this thread unpickles inside.

    A cache reads the entries of a key one after the other and takes the first whose guards hold: the last
    one that it reads.
    """
    heard: list[Outcome] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def fingerprint(module: fx.GraphModule, inputs: Sequence[object]) -> str:
    """What a plan depends on and a cache's key leaves out: regions, sizes, autocast around the graph."""
    marks = [
        (name, index, region_mark(node))
        for name, graph in _graphs(module)
        for index, node in enumerate(graph.nodes)
        if region_mark(node) is not None
    ]
    sizes = [_sizes(each) for each in inputs]
    types = compilers.autocast_types(inputs)
    return hashlib.sha256(repr((marks, sizes, types)).encode()).hexdigest()


def _graphs(module: fx.GraphModule) -> Iterable[tuple[str, fx.Graph]]:
    """The graph and those nested in it, such as the body of a checkpoint."""
    for name, each in module.named_modules():
        if isinstance(each, fx.GraphModule):
            yield name, each.graph


def _sizes(value: object) -> tuple[int | None, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(map(graphs.hint, value.shape))
    return (graphs.hint(value),) if isinstance(value, torch.SymInt) else ()
