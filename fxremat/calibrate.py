"""Calibration: what each distinct operator of a graph takes on this machine, found by running it once.

Two figures no formula gives are read off: the *scratch* bytes that an operator allocates and frees again
while it runs (a convolution's reordered operands, a dropout's random numbers), and its seconds. An operator
is run alone on example operands of the traced sizes, once per target, sizes, dtypes, strides and other
arguments in a process. Random states are restored. Operators with effects, of unknown purity, on devices
that are not there, or that refuse the examples have no scratch that is known: 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import fx
from tqdm import tqdm

from fxremat import _compilers, _torch, ops
from fxremat.graph import JointGraph
from fxremat.measure import measure_peak, time_steps

# For this process, by signature; scratch bytes for convolutions laid out as they are and channels last.
_scratch_bytes: dict[bool, dict[object, int]] = {}
_seconds: dict[object, float] = {}

TIMED_ROUNDS = 5
NEGLIGIBLE = 1 / 1000  # of the traffic of a graph's largest operator: smaller ones are not run for scratch

# What an operator raises that cannot run on the examples, or not on this device.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)

_Figure = TypeVar("_Figure", int, float)


def scratch_bytes(graph: JointGraph, fusion: str) -> tuple[int, ...]:
    """Scratch bytes of each node of a graph; loops have none, for they run in registers."""
    loops = (ops.Kind.POINTWISE, ops.Kind.REDUCTION) if fusion == "inductor" else (ops.Kind.POINTWISE,)
    nodes = [node for node in _runnable(graph) if ops.is_random(node) or ops.kind(node) not in loops]
    largest = max(map(ops.moved_bytes, nodes), default=0)
    nodes = [node for node in nodes if ops.moved_bytes(node) > largest * NEGLIGIBLE]
    channels_last = fusion == "inductor"  # how Inductor lays out what a convolution reads
    table = _scratch_bytes.setdefault(channels_last, {})
    _fill(table, nodes, lambda node: _measure_scratch(node, channels_last), "measuring scratch memory")
    known = {node.name: table[signature(node)] for node in nodes}
    return tuple(known.get(node.name, 0) for node in graph.nodes)


def seconds(graph: JointGraph) -> dict[str, float]:
    """Seconds of each node that could be run alone, by name: the median of several runs."""
    nodes = list(_runnable(graph))
    _fill(_seconds, nodes, _measure_seconds, "timing operators")
    return {node.name: _seconds[signature(node)] for node in nodes}


def signature(node: fx.Node) -> object:
    """What a node's figures depend on: target, arguments, and sizes, strides, dtypes of its operands."""

    def describe(argument: object) -> object:
        if not isinstance(argument, fx.Node):
            return str(argument)
        values = ops.tensors(argument.meta.get("val"))
        return str([(_sizes(v.shape), _sizes(v.stride()), v.dtype, v.device) for v in values])

    described = fx.node.map_aggregate((node.args, dict(node.kwargs)), describe)  # type: ignore[arg-type]
    return str(node.target), str(described)


def _sizes(sizes: Iterable[int]) -> list[int | None]:
    return [_torch.hint(size) for size in sizes]


def _runnable(graph: JointGraph) -> Iterable[fx.Node]:
    if _compilers.is_profiling():  # the user's own profiler is running, and there can be but one
        return
    for index, node in enumerate(graph.fx_nodes):
        if index < graph.num_inputs or ops.kind(node) is ops.Kind.VIEW or _torch.is_symbolic(node):
            continue
        is_harmless = ops.is_random(node) or ops.keep_reason(node) is None
        if is_harmless and all(map(_is_present, _devices(node))):
            yield node


def _devices(node: fx.Node) -> Iterable[str]:
    for each in (node, *node.all_input_nodes):
        for tensor in ops.tensors(each.meta.get("val")):
            yield tensor.device.type


def _is_present(device: str) -> bool:
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())


def _fill(
    table: dict[object, _Figure], nodes: list[fx.Node], measure: Callable[[fx.Node], _Figure], title: str
) -> None:
    fresh = {key: node for node in nodes if (key := signature(node)) not in table}
    with _compilers.real_tensors(), torch.no_grad(), torch.random.fork_rng():
        for key, node in tqdm(fresh.items(), title, disable=None, leave=False, delay=1.0):
            table[key] = measure(node)


def _measure_scratch(node: fx.Node, channels_last: bool) -> int:
    device = next(iter(_devices(node)), "cpu")
    try:
        measured = measure_peak(_call(node, channels_last), device=device)
    except REFUSALS:
        return 0
    return max(0, measured.peak_bytes - ops.value_bytes(node))


def _measure_seconds(node: fx.Node) -> float:
    try:
        return statistics.median(time_steps({"": _call(node)}, rounds=TIMED_ROUNDS)[""])
    except REFUSALS:
        return 0.0


def _call(node: fx.Node, channels_last: bool = False) -> Callable[[], object]:
    """The node on example operands, as a callable."""
    channels_last &= ops.is_convolution(node) or ops.is_convolution_gradient(node)

    def example(argument: Any) -> Any:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        return _example(value, channels_last)

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), example)
    target: Any = node.target
    return lambda: target(*args, **kwargs)


def _example(value: Any, channels_last: bool) -> Any:
    """A real value for a traced one: a filled tensor in place of a fake one, sizes by their hints."""
    if isinstance(value, torch.SymInt):
        return _torch.hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_torch.hint(size) or 1 for size in value.shape]
    stride = [_torch.hint(step) or 0 for step in value.stride()]
    fill = 0.5 if value.dtype.is_floating_point else 0
    flat = torch.full((ops.extent(shape, stride),), fill, dtype=value.dtype, device=value.device)
    tensor = flat.as_strided(shape, stride)
    if channels_last and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
