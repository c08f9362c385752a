"""The ``torch.compile`` backend and the partitioner object.

    torch.compile(model, backend="fxremat", mode=..., options={"budget": "8GiB", ...})

Inductor is entered through its custom-partitioner seam, behind its joint-graph passes, so decompositions,
caches and CUDA graphs are Inductor's own. With ``compiler="eager"`` the two fx graphs run as they are.

Before kernels are compiled, the generated code is held against the budget (``inductor/generated.py``). Where
it holds more, a lower plan is compiled in its place; where it holds much less, a faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxremat._torch import compilers, fakes, partitioners
from fxremat._torch.compilers import Origin
from fxremat.driver import ahead, cache, device_budget, journal, verification
from fxremat.driver.compilation import Compilation
from fxremat.driver.correction import PlanAgain
from fxremat.driver.partitioner import Partitioner
from fxremat.driver.policy import alone
from fxremat.driver.runner import Runner
from fxremat.driver.sizes import AnySizes
from fxremat.emit.writes import guarded
from fxremat.graph.nodes import STEP
from fxremat.inductor.images import arrange_images, store_sums
from fxremat.inductor.order import held_layout, hold_back, may_fuse
from fxremat.options import settings
from fxremat.options.options import Options, checked
from fxremat.step.step import steps

# Where kernels run in a plan's order. Inductor's scheduler tries other orders and keeps the lowest estimate,
# ours is planned; and it holds a dead buffer until one of its size is needed, which may be at the peak.
_AS_PLANNED = {
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
    "triton.reorder_for_reducing_graph_partitions": False,
}


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
            ``time_limit_seconds``, ``detect_writes``, ``verify``, ``scope``, ``plan``,
            ``ignore_checkpoints``, ``mode`` (which ``torch.compile`` does not take beside options) and any of
            Inductor's. Those that are absent may be given elsewhere (``options/settings.py``).

    Raises:
        InvalidOptionError: An option or its value is unknown.
        InfeasibleBudgetError: No plan fits the budget.
        PlanMismatchError: Plans are given, and none is for this graph.
        RatesError: Rates are pinned, but can't be taken at their word.
    """
    parsed = settings.in_force(settings.Layer("options", checked(options, mode)))
    return compile_under(parsed, module, inputs)


def compile_under(parsed: Options, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo's under these options.

    Raises:
        InfeasibleBudgetError: No plan fits the budget.
        PlanMismatchError: Plans are given, and none is for this graph.
        RatesError: Rates are pinned, but can't be taken at their word.
    """
    parsed = device_budget.resolved(parsed, inputs)
    fingerprint, name = cache.fingerprint(module, inputs), journal.graph_name()
    if parsed.budget is None or parsed.plan is not None or parsed.scope == "graph":
        if steps.rehearsal is not None:
            return module
        return _compile_alone(module, inputs, parsed, fingerprint, name)
    origin = Origin(module, inputs)
    runner = ahead.take(origin, parsed, fingerprint)
    if runner is not None:
        return _at_all_sizes(origin, runner)
    runner = Runner(origin, parsed, fingerprint, name, _compile)
    if steps.rehearsal is not None:
        if not runner.look_ahead():
            return module
        ahead.keep(origin, parsed, fingerprint, runner)
    else:
        first = runner.compile_first()
        if not runner.variants:  # nothing to plan
            journal.add(first.compilation)
            return first.compiled
    found = _at_all_sizes(origin, runner)
    journal.add(found)
    return found


def _at_all_sizes(origin: Origin, runner: Runner) -> Runner | AnySizes:
    """What Dynamo calls for a graph."""
    return AnySizes(origin, runner) if origin.symbols else runner


def _compile_alone(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, fingerprint: str, name: str
) -> Callable[..., Any]:
    """A graph that shares its budget with no other, or whose plan is given."""
    compilation = Compilation(options, fingerprint, name, alone(options, options.reads_code))
    compiled = _compile(module, inputs, compilation)
    journal.add(compilation)
    return compiled


def _compile(module: fx.GraphModule, inputs: Sequence[Any], compilation: Compilation) -> Callable[..., Any]:
    origin = Origin(module, inputs) if compilation.options.verify else None
    compiled = _guarded(_compiled(module, inputs, compilation), module, compilation)
    compilation.rest()
    journal.log(compilation)
    if origin is None or not compilation.reports:
        return compiled
    return _verified(compiled, origin, compilation)


def _compiled(module: fx.GraphModule, inputs: Sequence[Any], compilation: Compilation) -> Callable[..., Any]:
    partition = Partitioner(compilation.options, compilation.fingerprint, compilation)
    if compilation.options.compiler == "eager":
        return compilers.compile_without_inductor(module, inputs, partition)
    with cache.listening() as heard:
        compiled = _compile_within_budget(module, inputs, compilation, partition)
    if not compilation.is_compiled:
        compilation.take_over(heard[-1] if heard else None)
    return compiled


def _compile_within_budget(
    module: fx.GraphModule, inputs: Sequence[Any], compilation: Compilation, partition: Partitioner
) -> Callable[..., Any]:
    """Compile with Inductor, with another plan where the code holds more than the budget, or much less."""
    options = compilation.options
    as_planned = {name: value for name, value in _AS_PLANNED.items() if name not in options.inductor}

    def in_order(graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> compilers.Order | None:
        if is_backward:
            arrange_images(graph, inputs, compilation.spare_bytes)
        if not compilation.is_in_order:
            return None
        order, settings = compilation.kernel_order(), as_planned
        if is_backward:
            store_sums(graph)
            settings = {**as_planned, **held_layout(graph)}
        hold_back(graph, order.held_back)
        return compilers.Order(settings, *order, STEP)

    key = partition.key()
    while True:
        is_cached = key is not None and not compilation.is_uncached
        try:
            return compilers.compile_with_inductor(
                module,
                inputs,
                {**options.inductor, "custom_partitioner_fn": partition},
                may_fuse,
                compilation.outcome,
                compilation.take_code,
                backward_now=options.is_bounded,
                in_order=in_order,
                key=f"{key} {compilation.corrections}" if is_cached else None,
            )
        except PlanAgain:
            continue  # a few times at most


def _guarded(
    compiled: Callable[..., Any], module: fx.GraphModule, compilation: Compilation
) -> Callable[..., Any]:
    """The compiled graph, with a check that what its recomputation reads again is as the forward left it."""
    inputs: Mapping[int | str, str] = dict(enumerate(compilers.input_names(module)))
    names = {}
    for report in compilation.reports:
        for each in report.reads_again:
            place = f"{each.kind.removesuffix('s')} {each.place} of {report.graph_name}"
            names[each] = inputs[each.place] if each.kind == "inputs" else place
    attributes = dict((*module.named_parameters(), *module.named_buffers()))
    return guarded(compiled, names, attributes, compilation.options.detect_writes)


def _verified(compiled: Callable[..., Any], origin: Origin, compilation: Compilation) -> Callable[..., Any]:
    """The compiled graph, which is held against the same graph without fxremat when it is first called."""
    options = compilation.options

    def reference() -> Callable[..., Any]:
        with fakes.outside_of_modes(), origin.resumed():
            module, inputs = origin.module(), origin.inputs
            if options.compiler == "eager":
                return compilers.compile_without_inductor(module, inputs, partitioners.default_partition)
            return compilers.compile_as_inductor(module, inputs, options.inductor)

    module, is_exact = origin.module(), options.compiler == "eager"
    obstacle = verification.obstacle(module)
    if not is_exact and compilers.records_cuda_graphs(options.inductor):
        obstacle = "CUDA graphs would be recorded for the copies"
    values = (*origin.inputs, *(node.meta.get("example_value") for node in module.graph.nodes))
    tolerance = 0.0 if is_exact else verification.rounding(values)
    subject = verification.Subject(compiled, reference, compilers.input_names(module), tolerance, obstacle)
    return verification.Verified(subject, options.verify, compilation.take_verification, steps.paused)
