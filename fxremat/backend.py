"""The ``torch.compile`` backend and the partitioner object.

    torch.compile(model, backend="fxremat", mode=..., options={"budget": "8GiB", ...})

Inductor is entered through its custom-partitioner seam, behind its joint-graph passes, so decompositions,
caches and CUDA graphs are Inductor's own. With ``compiler="eager"`` the two fx graphs run as they are.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxremat import _compilers, _torch, calibrate, enclosed
from fxremat.annotate import regions_outside
from fxremat.errors import FxrematError
from fxremat.options import Options
from fxremat.partition import may_fuse
from fxremat.pipeline import partition_joint
from fxremat.report import Report

_reports: list[Report] = []
_fallbacks: list[str] = []  # why PyTorch's partitioner took over, each time

# Inductor's scheduler tries other orders and keeps the lowest estimate; ours is planned.
_KEEP_ORDER = {"reorder_for_peak_memory": False}

# Inductor holds a dead buffer until one of its size is needed, which may be at the peak.
_FREE_AT_ONCE = {"allow_buffer_reuse": False}


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
        options: ``budget``, ``planner``, ``compiler``, ``cost``, ``on_error``, ``inplace``, ``mode`` (which
            ``torch.compile`` does not take beside options) and any of Inductor's.

    Raises:
        InvalidOptionError: An option or its value is unknown.
        InfeasibleBudgetError: No plan fits the budget.
    """
    parsed = Options.parse(options, mode)
    partition = Partitioner(parsed, enclosed.fingerprint(module, inputs))
    if parsed.compiler == "eager":
        return _compilers.compile_without_inductor(module, inputs, partition)
    defaults = _KEEP_ORDER if parsed.budget is None else {**_KEEP_ORDER, **_FREE_AT_ONCE}
    patches = {**defaults, **parsed.inductor, "custom_partitioner_fn": partition}
    reports_before, fallbacks_before = len(_reports), len(_fallbacks)

    def enclose() -> enclosed.Enclosure:
        return enclosed.Enclosure(_reports[reports_before:], _fallbacks[fallbacks_before:])

    hits_before = _compilers.cache_hits()
    enclosed.forget()
    compiled = _compilers.compile_with_inductor(module, inputs, patches, may_fuse, enclose)
    if _compilers.cache_hits() > hits_before:
        _add_from_cache(enclosed.opened())
    return compiled


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
    caches know, and the fingerprint of the graph that it is made for.
    """

    def __init__(self, options: Options, fingerprint: str = "") -> None:
        cost = options.cost if isinstance(options.cost, str) else dict(sorted(options.cost.items()))
        self.options = replace(options, inductor={}, cost=cost)
        self.fingerprint = fingerprint

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the state and ``uuid``, for caches that look at nothing else."""
        key = self.uuid()
        return {**vars(self), "key": key if key is not None else lambda: None}

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int = 0,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph into its forward and its backward under the budget."""
        if not has_backward(gm, num_fwd_outputs):
            return _torch.default_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        name = _graph_name()
        try:
            forward, backward, report = partition_joint(
                gm, num_fwd_outputs, self.options, name, static_lifetime_input_indices or ()
            )
        except FxrematError as error:
            if self.options.on_error == "raise":
                raise
            _warn_of_fallback(name, str(error))
            return _torch.min_cut_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs)
        _reports.append(report)
        return forward, backward

    def uuid(self) -> object:
        """What caches of compiled graphs depend on besides the graph: source, torch, options, calibration."""
        if callable(self.options.planner):
            return None  # a function has no text that names it in another process: nothing is cached
        source = _compilers.source_hash(pathlib.Path(__file__).parent)
        calibration = calibrate.fingerprint(self.options.cost)
        return source, repr(self.options), calibration, self.fingerprint


def has_backward(module: fx.GraphModule, num_fwd_outputs: int) -> bool:
    """Whether the joint graph computes any gradient."""
    (outputs,) = next(iter(module.graph.find_nodes(op="output"))).args
    return any(isinstance(leaf, fx.Node) for leaf in outputs[num_fwd_outputs:])


def partitioner(**options: Any) -> Partitioner:
    """A partitioner for AOTAutograd's ``partition_fn`` or Inductor's ``custom_partitioner_fn``.

    Args:
        **options: As for the backend.

    Example:
        >>> import torch; from functorch.compile import aot_function
        >>> partition = partitioner(budget="min", compiler="eager")
        >>> square = aot_function(torch.square, lambda graph, inputs: graph, partition_fn=partition)
        >>> x = torch.ones(2, requires_grad=True)
        >>> square(x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    return Partitioner(Options.parse(options))


def reports() -> tuple[Report, ...]:
    """A Report for each graph that this process compiled with a backward, or got from a cache, in order.

    Their notes name regions (``annotate.region``) that ran outside of any graph until now.
    """
    outside = [
        f"{line}: a region ran outside of any graph, where it does nothing" for line in regions_outside()
    ]
    return tuple(replace(report, notes=(*report.notes, *outside)) for report in _reports)
