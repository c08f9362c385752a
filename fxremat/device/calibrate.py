"""Calibration: what each distinct operator of a graph takes on this machine, found by running it once.

Two figures no formula gives are read off: the *scratch* bytes that an operator allocates and frees again
while it runs (a convolution's reordered operands, a dropout's random numbers, a result that is rolled twice),
and its seconds. An operator is run alone, in a thread of its own, on example operands of the traced sizes,
once per target, sizes, dtypes, strides and other arguments: its scratch in each process, its seconds once for
all processes, for they are kept in the device's ledger. Random states are restored. Operators with effects,
of unknown purity, on devices that are not there, that refuse the examples, or that would trust them blindly,
have no scratch that is known: 0, and no seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import astuple
from typing import Any, TypeVar

import torch
from tabulate import tabulate
from torch import fx
from tqdm import tqdm

from fxremat._torch import graphs, profilers
from fxremat.device import ledger
from fxremat.device.ledger import positive
from fxremat.device.rates import REFUSALS, alone, facts, is_present, present, rates, seconds_per_call, source
from fxremat.graph import loops, ops
from fxremat.graph.joint import JointGraph
from fxremat.measure import held_bytes

# For this process, by signature; scratch bytes of convolutions laid out as traced, and as Inductor does it.
_scratch_bytes: dict[bool, dict[str, int]] = {}

# Operators that could not be timed in this process; another may have the memory for them.
_refused: dict[torch.device, dict[str, float | None]] = {}

# Read a workspace whose content, and on a CPU whose size, only their forward knows: on an example they crash.
_TRUSTING = frozenset(
    {
        ops.aten._cudnn_rnn_backward,
        ops.aten.miopen_rnn_backward,
        ops.aten.mkldnn_rnn_layer_backward,
    }
)

SECONDS_DIGITS = 3

_Figure = TypeVar("_Figure", int, "float | None")


def scratch_bytes(
    graph: JointGraph, *, in_registers: Collection[loops.Kind] = (), arranged: bool = False
) -> tuple[int, ...]:
    """Scratch bytes of each node of a graph.

    Args:
        graph: The graph.
        in_registers: What runs in registers, and has none unless it draws random numbers.
        arranged: Whether convolutions read what Inductor arranges for them, whatever was traced.
    """
    nodes = [node for node in _runnable(graph) if ops.is_random(node) or loops.kind(node) not in in_registers]
    table = _scratch_bytes.setdefault(arranged, {})
    measure = _scratch_arranged if arranged else _scratch
    _fill(table, nodes, measure, "measuring scratch memory")
    known = {node.name: table[signature(node)] for node in nodes}
    return tuple(known.get(node.name, 0) for node in graph.nodes)


def seconds(graph: JointGraph, wanted: Collection[int]) -> dict[str, float]:
    """Seconds of the wanted nodes that could be run alone, by name; from the ledger where they are known.

    Args:
        graph: The graph.
        wanted: Places of its nodes.
    """
    found: dict[str, float] = {}
    if profilers.is_profiling():  # what were timed is the profiler
        return found
    for device, nodes in _by_device(graph, frozenset(wanted)).items():
        book = ledger.open_ledger(facts(device))
        keys = [signature(node) for node in nodes]
        if any(book.first(key, positive) is None for key in keys):
            book.refresh()
        tried = _refused.setdefault(device, {})
        fresh = {
            key: node for key, node in zip(keys, nodes, strict=True) if book.first(key, positive) is None
        }
        _fill(tried, list(fresh.values()), _measure_seconds, "timing operators")
        timed = {key: tried.pop(key) for key in fresh if tried[key] is not None}
        if timed:
            book.add(timed)
        for node, key in zip(nodes, keys, strict=True):
            taken = book.first(key, positive)
            if taken is not None:
                found[node.name] = taken
    return found


def _by_device(graph: JointGraph, wanted: Collection[int]) -> dict[torch.device, list[fx.Node]]:
    found: dict[torch.device, list[fx.Node]] = {}
    for node in _runnable(graph, wanted):
        found.setdefault(_device(node), []).append(node)
    return found


def fingerprint(cost: str | Mapping[str, float]) -> str:
    """A text that changes whenever what was measured for a cost does; caches of compiled graphs depend on it.

    Under a profiler, where nothing is timed, it is another.

    >>> fingerprint("roofline") == fingerprint("roofline")
    True
    """
    parts: list[object] = []
    if not isinstance(cost, Mapping):
        parts += [profilers.is_profiling()]
        parts += [(device.type, astuple(rates(device))) for device in present()]
    if cost == "measured":
        parts += [ledger.open_ledger(facts(device)).name for device in present()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def summaries(again: bool = False) -> list[str]:
    """What is known of each device of this machine, its rates measured if need be, as tables.

    Args:
        again: Forget first what was measured, rates and seconds of operators.
    """
    if torch.cuda.is_available():
        torch.cuda.init()
    for device in present() if again else ():
        ledger.forget(facts(device))
    return [_summary(device) for device in present()]


def _summary(device: torch.device) -> str:
    found, book = rates(device), ledger.open_ledger(facts(device))
    rows = [(name, str(fact)) for name, fact in facts(device).items()]
    rows += [
        ("products in float32", f"{found.flops_per_second / 1e9:.6g} GFLOP/s"),
        ("products in half precision", f"{found.half_flops_per_second / 1e9:.6g} GFLOP/s"),
        ("products in float64", f"{found.double_flops_per_second / 1e9:.6g} GFLOP/s"),
        ("copies", f"{found.bytes_per_second / 1e9:.6g} GB/s"),
        ("launch", f"{found.launch_seconds * 1e6:.3g} us"),
        ("these rates are", source(device)),
        ("operators timed", str(sum(book.first(key, positive) is not None for key in book))),
    ]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def signature(node: fx.Node) -> str:
    """What a node's figures depend on: target, arguments, and sizes, strides, dtypes of its operands."""

    def describe(argument: object) -> object:
        if not isinstance(argument, fx.Node):
            return str(argument)
        values = ops.tensors(argument.meta.get("val"))
        return str([(_sizes(v.shape), _sizes(v.stride()), v.dtype, v.device, v.is_conj()) for v in values])

    described = fx.node.map_aggregate((node.args, dict(node.kwargs)), describe)  # type: ignore[arg-type]
    return f"{node.target}{described}"


def _sizes(sizes: Iterable[int]) -> list[int | None]:
    return [graphs.hint(size) for size in sizes]


def _runnable(graph: JointGraph, wanted: Collection[int] | None = None) -> Iterable[fx.Node]:
    for index, node in enumerate(graph.fx_nodes):
        if wanted is not None and index not in wanted:
            continue
        if index < graph.num_inputs or loops.kind(node) is loops.Kind.VIEW or graphs.is_symbolic(node):
            continue
        if ops.packet(node) in _TRUSTING:
            continue
        is_harmless = ops.is_random(node) or ops.keep_reason(node) is None
        if is_harmless and all(map(is_present, _devices(node))):
            yield node


def _devices(node: fx.Node) -> Iterable[torch.device]:
    for each in (node, *node.all_input_nodes):
        for tensor in ops.tensors(each.meta.get("val")):
            yield tensor.device


def _device(node: fx.Node) -> torch.device:
    """Where a node runs."""
    return next(iter(_devices(node)), torch.device("cpu"))


def _fill(
    table: MutableMapping[str, _Figure],
    nodes: list[fx.Node],
    measure: Callable[[fx.Node], _Figure],
    title: str,
) -> None:
    fresh = {key: node for node in nodes if (key := signature(node)) not in table}
    if not fresh:
        return
    with alone(map(_device, fresh.values())) as run:
        for key, node in tqdm(fresh.items(), title, disable=None, leave=False, delay=1.0):
            table[key] = run(functools.partial(measure, node))


def _scratch(node: fx.Node, arranged: bool = False) -> int:
    device = _device(node)
    for definite in (False, True):
        with contextlib.suppress(*REFUSALS):
            call = _call(node, arranged, definite)
            if device.type == "cuda":
                call()  # the first run also allocates what a library keeps, such as the workspace of cuBLAS
            peak_bytes, end_bytes = held_bytes(call, device)
            return max(0, peak_bytes - max(end_bytes, ops.value_bytes(node)))
    return 0


def _scratch_arranged(node: fx.Node) -> int:
    """As ``_scratch``, with what convolutions read laid out as Inductor does it.

    Images lie channels last, sequences in the order of their sizes, as the results of their convolutions do.
    An image of one channel has the strides of either order in any case: torch's own convolution then takes it
    for channels first, and copies the others.
    """
    return _scratch(node, ops.is_convolution(node) or ops.is_convolution_gradient(node))


def _measure_seconds(node: fx.Node) -> float | None:
    try:
        seconds = seconds_per_call(_call(node), _device(node))
    except REFUSALS:
        return None
    return float(f"{seconds:.{SECONDS_DIGITS}g}")


def _call(node: fx.Node, arranged: bool = False, definite: bool = False) -> Callable[[], object]:
    """The node on example operands, as a callable."""

    def example(argument: Any) -> Any:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        return _example(value, arranged, definite)

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), example)
    target: Any = node.target
    return lambda: target(*args, **kwargs)


def _example(value: Any, arranged: bool, definite: bool) -> Any:
    """A real value for a traced one: a filled tensor in place of a fake one, sizes by their hints.

    Args:
        value: The traced one.
        arranged: Whether images are laid out channels last, and sequences in the order of their sizes.
        definite: Whether matrices are to be the identity, and indices to count from 1, as factorisations and
            what reads them want it.
    """
    if isinstance(value, torch.SymInt):
        return graphs.hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(map(_size, value.shape))
    stride = [graphs.hint(step) or 0 for step in value.stride()]
    if arranged and loops.is_channels_first(value):
        return _channels_last(shape, stride, value).fill_(0.5)
    if arranged and len(shape) == 3:
        stride = list(torch.empty(shape, device="meta").stride())
    count = ops.extent(shape, stride) if all(shape) else 0
    found = _numbers(count, value.dtype, value.device).as_strided(shape, stride)
    if definite and len(shape) > 1 and (found.is_floating_point() or found.is_complex()):
        found.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    elif definite:
        found.fill_(1)
    return found.conj() if value.is_conj() else found


def _size(size: int | torch.SymInt) -> int:
    """What a size stands for, 0 as well, since operators trust that sizes fit; 1 where it is not known."""
    hint = graphs.hint(size)
    return 1 if hint is None else hint


def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers that most operators take and that cost them most: true, an index of 0, no two of them alike."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.linspace(0.25, 0.75, count, device=device).to(dtype)
    return torch.full((count,), dtype is torch.bool, dtype=dtype, device=device)


def _channels_last(shape: list[int], stride: list[int], traced: torch.Tensor) -> torch.Tensor:
    """A new tensor, channels last: a part of another's channels if the traced one is."""
    images, channels, height, width = shape
    is_contiguous = stride[1] >= height * width
    of = max(channels, stride[0] // stride[1]) if is_contiguous and images > 1 else channels
    full = torch.empty(
        (images, of, height, width),
        dtype=traced.dtype,
        device=traced.device,
        memory_format=torch.channels_last,
    )
    return full[:, :channels]
