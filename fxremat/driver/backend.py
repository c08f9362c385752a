"""The ``torch.compile`` backend and the partitioner object.

    torch.compile(model, backend="fxremat", mode=..., options={"budget": "8GiB", ...})

Inductor is entered through its custom-partitioner seam, behind its joint-graph passes, so decompositions,
caches and CUDA graphs are Inductor's own. With ``compiler="eager"`` the two fx graphs run as they are.

Before kernels are compiled, the generated code is held against the budget (``inductor/lowered.py``). Where it
holds more, a lower plan is compiled in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxremat._torch import compilers
from fxremat.driver import cache
from fxremat.driver.journal import FALLBACKS, RECORDED, add_from_cache
from fxremat.driver.options import Options
from fxremat.driver.partitioner import Partitioner
from fxremat.driver.report import Report, mib
from fxremat.driver.writes import guarded
from fxremat.inductor.lowered import read
from fxremat.inductor.order import may_fuse

MAX_CORRECTIONS = 3  # times that a graph is planned again; each compiles both graphs anew

# Under a budget. Inductor's scheduler tries other orders and keeps the lowest estimate, ours is planned;
# and it holds a dead buffer until one of its size is needed, which may be at the peak.
_AS_PLANNED = {"reorder_for_peak_memory": False, "allow_buffer_reuse": False}


def fxremat_backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's; what ``torch.compile(backend="fxremat")`` calls.

    Args:
        module: The graph.
        inputs: Example inputs.
        mode: As for Inductor.
        options: ``budget``, ``planner``, ``compiler``, ``cost``, ``on_error``, ``inplace``,
            ``time_limit_seconds``, ``detect_writes``, ``mode`` (which ``torch.compile`` does not take beside
            options) and any of Inductor's.

    Raises:
        InvalidOptionError: An option or its value is unknown.
        InfeasibleBudgetError: No plan fits the budget.
        RatesError: Rates are pinned, but can't be taken at their word.
    """
    parsed = Options.parse(options, mode)
    partition = Partitioner(parsed, cache.fingerprint(module, inputs))
    first = len(RECORDED)
    compiled = _compile(module, inputs, parsed, partition)
    return _guarded(compiled, module, RECORDED[first:], parsed.detect_writes)


def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, partition: Partitioner
) -> Callable[..., Any]:
    if options.compiler == "eager":
        with _Attempt(partition):
            return compilers.compile_without_inductor(module, inputs, partition)
    defaults = {} if options.budget is None else _AS_PLANNED
    patches = {**defaults, **options.inductor, "custom_partitioner_fn": partition}
    hits_before = compilers.cache_hits()
    cache.forget()
    compiled = _compile_within_budget(module, inputs, patches, partition)
    if compilers.cache_hits() > hits_before:
        add_from_cache(cache.opened())
    return compiled


def _compile_within_budget(
    module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], partition: Partitioner
) -> Callable[..., Any]:
    """Compile with Inductor, with a lower plan each time that the code holds more than the budget."""
    has_bytes = partition.options.budget not in (None, "min")
    for corrections in range(MAX_CORRECTIONS + 1):
        attempt = _Attempt(partition, corrections)
        try:
            with attempt:
                return compilers.compile_with_inductor(
                    module,
                    inputs,
                    patches,
                    may_fuse,
                    attempt.enclose,
                    attempt.read,
                    backward_now=has_bytes,
                    in_order=partition.options.budget is not None,
                    key=f"{partition.key()} {corrections}",
                )
        except Exception:  # of the attempt's own, whatever the compilers wrap it in
            if attempt.within_bytes is None:
                raise
            partition.within_bytes = attempt.within_bytes
    raise AssertionError("the last attempt is not given up")


def _guarded(
    compiled: Callable[..., Any], module: fx.GraphModule, found: Sequence[Report], detect_writes: bool
) -> Callable[..., Any]:
    """The compiled graph, with a check that what its recomputation reads again is as the forward left it."""
    inputs: Mapping[int | str, str] = dict(enumerate(compilers.input_names(module)))
    names = {}
    for report in found:
        for each in report.reads_again:
            place = f"{each.kind.removesuffix('s')} {each.place} of {report.graph_name}"
            names[each] = inputs[each.place] if each.kind == "inputs" else place
    attributes = dict((*module.named_parameters(), *module.named_buffers()))
    return guarded(compiled, names, attributes, detect_writes)


class _Attempt:
    """One compilation of a graph of Dynamo's: what it reported, and what its code holds.

    What was reported counts if the compilation succeeds, and is taken back whatever else ends it. A backward
    that is compiled when it first runs is no part of it: the forward has then run as the report says.

    Attributes:
        within_bytes: The predicted peak that the next plan must keep, where the code was above the budget.
    """

    def __init__(self, partition: Partitioner, corrections: int = 0) -> None:
        self.partition = partition
        self.corrections = corrections
        self.within_bytes: int | None = None
        self.reports = slice(len(RECORDED), None)
        self.fallbacks = slice(len(FALLBACKS), None)
        partition.given = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What other graphs report from now on is not this one's."""
        if kind is not None:
            del RECORDED[self.reports], FALLBACKS[self.fallbacks]
        self.reports = slice(self.reports.start, len(RECORDED))
        self.fallbacks = slice(self.fallbacks.start, len(FALLBACKS))

    def enclose(self) -> cache.Enclosure:
        """What goes along into a cache."""
        return cache.Enclosure(RECORDED[self.reports], FALLBACKS[self.fallbacks])

    def read(self, code: compilers.GeneratedCode) -> None:
        """Hold the code of one of the graphs against the budget."""
        found = RECORDED[self.reports]
        if self.partition.given is None or len(found) != 1:
            return
        lowered = read(code, self.partition.given)
        if lowered is not None:
            self.partition.given = lowered.given
            peak = max(lowered.peak_bytes, found[0].lowered_peak_bytes or 0)
            RECORDED[self.reports.start] = self._judged(found[0], peak)

    def _judged(self, report: Report, peak_bytes: int) -> Report:
        """The report with the peak of the code.

        Raises:
            RuntimeError: It is above the budget, and there is a lower plan.
        """
        notes = []
        if report.lowered_peak_bytes is None and self.corrections:
            notes.append(f"planned again {self.corrections} times: higher plans were above the budget")
        excess = peak_bytes - (report.budget_bytes or peak_bytes)
        if excess > 0:
            text = f"lowered peak {mib(peak_bytes)} above the budget of {mib(peak_bytes - excess)}"
            if self.corrections < MAX_CORRECTIONS and report.peak_bytes > report.lowest_peak_bytes:
                self.within_bytes = report.peak_bytes - excess
                raise RuntimeError(text)
            where = f"fxremat has no lower plan of {report.graph_name}"
            warnings.warn(f"{where}: {text}", RuntimeWarning, stacklevel=2)
            notes.append(text)
        return replace(report, lowered_peak_bytes=peak_bytes, notes=(*report.notes, *notes))
