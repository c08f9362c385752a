"""The ``torch.compile`` backend and the partitioner object.

    torch.compile(model, backend="fxremat", mode=..., options={"budget": "8GiB", ...})

Inductor is entered through its custom-partitioner seam, behind its joint-graph passes, so decompositions,
caches and CUDA graphs are Inductor's own. With ``compiler="eager"`` the two fx graphs run as they are.

Before kernels are compiled, the generated code is held against the budget (``lowered.py``). Where it holds
more, a lower plan is compiled in its place.
"""

from __future__ import annotations

import hashlib
import pathlib
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxremat import _compilers, _torch, calibrate, enclosed
from fxremat.annotate import regions_outside
from fxremat.errors import FxrematError, InvalidOptionError
from fxremat.lowered import Handed, handed, read
from fxremat.options import Options
from fxremat.partition import may_fuse
from fxremat.pipeline import rewritten, split
from fxremat.report import Report, mib
from fxremat.writes import guarded

_reports: list[Report] = []
_fallbacks: list[str] = []  # why PyTorch's partitioner took over, each time

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
    partition = Partitioner(parsed, enclosed.fingerprint(module, inputs))
    first = len(_reports)
    compiled = _compile(module, inputs, parsed, partition)
    return _guarded(compiled, module, _reports[first:], parsed.detect_writes)


def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, partition: Partitioner
) -> Callable[..., Any]:
    if options.compiler == "eager":
        with _Attempt(partition):
            return _compilers.compile_without_inductor(module, inputs, partition)
    defaults = {} if options.budget is None else _AS_PLANNED
    patches = {**defaults, **options.inductor, "custom_partitioner_fn": partition}
    hits_before = _compilers.cache_hits()
    enclosed.forget()
    compiled = _compile_within_budget(module, inputs, patches, partition)
    if _compilers.cache_hits() > hits_before:
        _add_from_cache(enclosed.opened())
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
                return _compilers.compile_with_inductor(
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
    inputs: Mapping[int | str, str] = dict(enumerate(_compilers.input_names(module)))
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
        self.reports = slice(len(_reports), None)
        self.fallbacks = slice(len(_fallbacks), None)
        partition.given = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What other graphs report from now on is not this one's."""
        if kind is not None:
            del _reports[self.reports], _fallbacks[self.fallbacks]
        self.reports = slice(self.reports.start, len(_reports))
        self.fallbacks = slice(self.fallbacks.start, len(_fallbacks))

    def enclose(self) -> enclosed.Enclosure:
        """What goes along into a cache."""
        return enclosed.Enclosure(_reports[self.reports], _fallbacks[self.fallbacks])

    def read(self, code: _compilers.GeneratedCode) -> None:
        """Hold the code of one of the graphs against the budget."""
        found = _reports[self.reports]
        if self.partition.given is None or len(found) != 1:
            return
        lowered = read(code, self.partition.given)
        if lowered is not None:
            self.partition.given = lowered.given
            peak = max(lowered.peak_bytes, found[0].lowered_peak_bytes or 0)
            _reports[self.reports.start] = self._judged(found[0], peak)

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


def _add_from_cache(enclosure: enclosed.Enclosure | None) -> None:
    """Take over the reports and the warnings of a graph that a cache had."""
    name = _graph_name()
    if enclosure is None:
        warnings.warn(f"fxremat has no report of {name}: a cache had it without one", stacklevel=3)
        return
    for text in enclosure.warnings:
        _warn_of_fallback(name, text)
    _reports.extend(replace(report, graph_name=name, from_cache=True) for report in enclosure.reports)


def _graph_name() -> str:
    """What reports call the graph that is being compiled."""
    return f"graph {_compilers.compile_id() or len(_reports)}"


def _warn_of_fallback(name: str, reason: str) -> None:
    _fallbacks.append(reason)
    warnings.warn(f"fxremat leaves {name} to PyTorch's partitioner: {reason}", stacklevel=3)


class Partitioner(_torch.CustomPartitionerFn):
    """A partition function for AOTAutograd and for Inductor.

    Its state is constant, so that caches which pickle it hit: its options, but for Inductor's own, which
    caches know, and ``detect_writes``, which changes no graph; and the fingerprint of the graph that it is
    made for. What changes is no part of what is pickled; it follows from the graph and the options.

    Attributes:
        within_bytes: A predicted peak that plans must keep besides the budget.
        given: What generated code will not say of the graph that was split last; None before.
    """

    def __init__(self, options: Options, fingerprint: str = "") -> None:
        cost = options.cost if isinstance(options.cost, str) else dict(sorted(options.cost.items()))
        self.options = replace(options, inductor={}, cost=cost, detect_writes=False)
        self.fingerprint = fingerprint
        self.within_bytes: int | None = None
        self.given: Handed | None = None

    def key(self) -> str:
        """A short text for what ``uuid`` is; another each time where that is nothing."""
        return hashlib.sha256(repr(self.uuid() or uuid.uuid4()).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the state and ``uuid``, for caches that look at nothing else."""
        key = self.uuid()
        state = {"options": self.options, "fingerprint": self.fingerprint}
        return {**state, "key": key if key is not None else lambda: None}

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int = 0,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph into its forward and its backward under the budget.

        Raises:
            InvalidOptionError: Inductor asks, and the options are for graphs that run as they are.
        """
        if kwargs.get("compiler") == "inductor" and self.options.compiler != "inductor":
            problem = (
                "Inductor would compile graphs that write in place. Use partitioner(compiler='inductor')."
            )
            raise InvalidOptionError("compiler", problem)
        if not has_backward(gm, num_fwd_outputs):
            return _torch.default_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        name = _graph_name()
        try:
            graph, report = rewritten(
                gm,
                num_fwd_outputs,
                self.options,
                name,
                static_lifetime_input_indices or (),
                self.within_bytes,
            )
            forward, backward = split(graph, self.options)
        except FxrematError as error:
            if self.options.on_error == "raise":
                raise
            _warn_of_fallback(name, str(error))
            return _torch.min_cut_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs)
        _reports.append(report)
        self.given = handed(graph)
        return forward, backward

    def uuid(self) -> object:
        """What caches of compiled graphs depend on besides the graph: source, torch, options, calibration."""
        if callable(self.options.planner):
            return None  # a function has no text that names it in another process: nothing is cached
        source = _compilers.source_hash(pathlib.Path(__file__).parent)
        try:
            calibration = calibrate.fingerprint(self.options.cost)
        except FxrematError as error:  # planning raises it as well, and a fallback depends on nothing else
            calibration = str(error)
        return source, repr(self.options), calibration, self.fingerprint


def has_backward(module: fx.GraphModule, num_fwd_outputs: int) -> bool:
    """Whether the joint graph computes any gradient."""
    (outputs,) = next(iter(module.graph.find_nodes(op="output"))).args
    return any(isinstance(leaf, fx.Node) for leaf in outputs[num_fwd_outputs:])


def partitioner(**options: Any) -> Partitioner:
    """A partitioner for AOTAutograd's ``partition_fn`` or Inductor's ``custom_partitioner_fn``.

    Args:
        **options: As for the backend, but for ``detect_writes``, and Inductor's own, which it must be given.

    Raises:
        InvalidOptionError: An option or its value is unknown, or is none of a partitioner's.

    Example:
        >>> import torch; from functorch.compile import aot_function
        >>> partition = partitioner(budget="min", compiler="eager")
        >>> square = aot_function(torch.square, lambda graph, inputs: graph, partition_fn=partition)
        >>> x = torch.ones(2, requires_grad=True)
        >>> square(x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    parsed = Options.parse(options)
    for name in parsed.inductor:
        raise InvalidOptionError(name, "is Inductor's own. Give it to torch.compile, beside the partitioner.")
    if parsed.detect_writes:
        raise InvalidOptionError("detect_writes", "is for backend='fxremat'; a partitioner runs no graph.")
    return Partitioner(parsed)


def reports() -> tuple[Report, ...]:
    """A Report for each graph that this process compiled with a backward, or got from a cache, in order.

    A graph whose compilation failed has none. One whose backward fails later, where that is compiled when it
    first runs, has: its forward ran as the report says. Their notes name regions (``annotate.region``) that
    ran outside of any graph until now.
    """
    outside = [
        f"{line}: a region ran outside of any graph, where it does nothing" for line in regions_outside()
    ]
    return tuple(replace(report, notes=(*report.notes, *outside)) for report in _reports)
