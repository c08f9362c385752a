"""Calibration: what each distinct operator of a graph takes on this machine, found by running it once.

Two figures no formula gives are read off: the *scratch* bytes that an operator allocates and frees again
while it runs (a convolution's reordered operands, a dropout's random numbers, a result that is rolled twice),
and its seconds; and what its results are like, which is not always as it was traced (``results.py``). An
operator is run alone, in a thread of its own, on example operands of the traced sizes, once per target,
sizes, dtypes, strides and other arguments: its scratch in each process, its seconds once for all processes,
for they are kept in the device's ledger. Random states are restored. Operators with effects, of unknown
purity, on devices that are not there, that refuse the examples, or that would trust them blindly, have no
scratch that is known: 0, and no seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from tabulate import tabulate
from torch import fx
from tqdm import tqdm

from fxremat._torch import graphs, profilers
from fxremat.device import ledger
from fxremat.device.examples import Strides, size_of, take, tensor_like
from fxremat.device.ledger import positive
from fxremat.device.rates import REFUSALS, alone, facts, is_present, present, rates, seconds_per_call, source
from fxremat.graph import loops, ops
from fxremat.graph.joint import JointGraph
from fxremat.measure import held_bytes

# What was seen in this process, by the number of threads, each of which may need some, and by signature.
_seen: dict[int, dict[str, Seen]] = {}

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

# Dereference the seed of their dropout on the host, whatever its traced device says: elsewhere they crash.
_SEEDED_ON_HOST = frozenset(
    {ops.aten._scaled_dot_product_efficient_attention_backward, ops.aten._efficient_attention_backward}
)

# Take a number of a source for each true of a mask; where there are too few they refuse, or on a GPU crash.
_MASKED = frozenset({ops.aten.masked_scatter, ops.aten.masked_scatter_backward})

# Their effect is an error, which the numbers of an example are none of: they run alone as what has no effect.
_CHECKS = frozenset({ops.aten._linalg_check_errors.default})

SECONDS_DIGITS = 3

_Figure = TypeVar("_Figure", "Seen", "float | None")


class Form(NamedTuple):
    """What a tensor is like."""

    sizes: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype


Forms = tuple[Form | None, ...]  # of what an operator returns; None for what is no tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """What an operator did that was run alone.

    Attributes:
        scratch_bytes: What it allocated and freed again.
        forms: What its results are like; None where it could not be run.
    """

    scratch_bytes: int
    forms: Forms | None


UNSEEN = Seen(0, None)


@dataclass(frozen=True, slots=True)
class _Example:
    """An operator on example operands.

    Attributes:
        node: Its node.
        strides: Those of the first tensors that it reads; the others are laid out as they were traced.
    """

    node: fx.Node
    strides: tuple[Strides, ...] = ()

    @property
    def signature(self) -> str:
        """What its figures depend on."""
        return f"{signature(self.node)}{self.strides or ''}"

    def call(self, definite: bool = False) -> Callable[[], object]:
        """The operator on real operands.

        Args:
            definite: Whether matrices are to be the identity, and indices to count from 1, as factorisations
                and what reads them want it.
        """
        strides = iter(self.strides)
        is_seeded = ops.packet(self.node) in _SEEDED_ON_HOST

        def example(argument: Any) -> Any:
            value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
            if isinstance(value, torch.SymInt):
                return graphs.hint(value)
            if not isinstance(value, torch.Tensor):
                return value
            is_seed = is_seeded and not value.dim() and not value.is_floating_point()
            where = torch.device("cpu") if is_seed else value.device
            return tensor_like(value, where, next(strides, None), definite)

        args: Any
        args, kwargs = fx.node.map_aggregate((self.node.args, dict(self.node.kwargs)), example)
        target: Any = self.node.target
        if graphs.is_effectful(target):
            target, args = args[1], args[2:]
        if ops.packet(self.node) in _MASKED:
            take(*args)
        return lambda: target(*args, **kwargs)


def run_alone(nodes: Iterable[fx.Node]) -> list[Seen]:
    """What the operator of each node does alone, on operands that lie as the node's are said to."""
    wanted = {node: _Example(node) for node in nodes if _is_runnable(node)}
    found = dict(zip(wanted, _see_all(wanted.values()), strict=True))
    return [found.get(node, UNSEEN) for node in nodes]


def scratch_bytes(
    graph: JointGraph,
    *,
    in_registers: Collection[loops.Kind],
    arranged: Collection[fx.Node],
    settled: bool,
) -> tuple[int, ...]:
    """Scratch bytes of each node of a graph under Inductor.

    Args:
        graph: The graph.
        in_registers: What runs in registers, and has none unless it draws random numbers.
        arranged: The convolutions that read what is arranged channels last for them, whatever was traced.
        settled: Whether gradients of convolutions do so in any case; else they may read all in the order of
            its sizes as well, as those always may whose weights have one channel, and the lesser counts.
    """
    nodes = [node for node in _runnable(graph) if ops.is_random(node) or loops.kind(node) not in in_registers]
    sizes = _scratch_sizes(_Example(node, _arranged(node, node in arranged)) for node in nodes)
    known = {node.name: size for node, size in zip(nodes, sizes, strict=True)}
    for node in filter(ops.is_convolution_gradient, nodes):
        is_copied = settled and may_lie_in_order(node)
        if is_copied or not settled or _has_one_channel(node):
            known[node.name] = min(known[node.name], _bytes_in_order(node, is_copied))
    return tuple(known.get(node.name, 0) for node in graph.nodes)


def may_lie_in_order(node: fx.Node) -> bool:
    """Whether a node is the gradient of a convolution of images on a CPU whose weights have one channel.

    Channels last, some kernels for those need a multiple of the memory of what they read.
    """
    if not ops.is_convolution_gradient(node) or not _is_runnable(node) or _device(node).type != "cpu":
        return False
    image = _operands(node)[1]
    return image.dim() == 4 and _has_one_channel(node) and size_of(image.shape[1]) > 1


def less_in_order_bytes(node: fx.Node) -> int:
    """By how much less such a gradient needs on a copy of the image in the order of its sizes; at least 0."""
    (size,) = _scratch_sizes([_Example(node, _arranged(node))])
    return max(0, size - _bytes_in_order(node, copied=True))


def _has_one_channel(gradient: fx.Node) -> bool:
    """Whether the weights of a convolution have one channel each, of whose gradient this is the node."""
    return size_of(_operands(gradient)[2].shape[1]) == 1


def _bytes_in_order(node: fx.Node, copied: bool = False) -> int:
    """The scratch bytes of a gradient that reads all in the order of its sizes, and of an image's copy."""
    operands = _operands(node)
    (size,) = _scratch_sizes([_Example(node, tuple(map(_in_order, operands)))])
    return size + copied * math.prod(map(size_of, operands[1].shape)) * operands[1].itemsize


def scratch_bytes_of(node: fx.Node, layouts: Sequence[tuple[Sequence[int], Strides]]) -> int | None:
    """Scratch bytes of a convolution, or its gradient, that reads tensors of these layouts.

    Args:
        node: Its node.
        layouts: Sizes and strides of the first tensors that it reads.

    Returns:
        None if it can't be run alone, or was traced with tensors of other sizes.
    """
    operands = _operands(node)
    if not _is_runnable(node) or len(layouts) > len(operands):
        return None
    strides = list(_arranged(node))
    for place, (sizes, stride) in enumerate(layouts):
        if list(sizes) != list(map(size_of, operands[place].shape)):
            return None
        strides[place] = stride
    example = _Example(node, tuple(strides))
    (size,) = _scratch_sizes([example])
    return size


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
        _fill(tried, map(_Example, fresh.values()), _measure_seconds, "timing operators")
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
        if (wanted is None or index in wanted) and index >= graph.num_inputs and _is_runnable(node):
            yield node


def _is_runnable(node: fx.Node) -> bool:
    """Whether an operator may be run alone on examples."""
    if loops.kind(node) is loops.Kind.VIEW or graphs.is_symbolic(node) or ops.packet(node) in _TRUSTING:
        return False
    is_harmless = ops.is_random(node) or ops.keep_reason(node) is None or _is_check(node)
    return is_harmless and all(map(is_present, _devices(node)))


def _is_check(node: fx.Node) -> bool:
    """Whether a node does nothing but look for errors."""
    return graphs.is_effectful(node.target) and node.args[1] in _CHECKS


def _devices(node: fx.Node) -> Iterable[torch.device]:
    for each in (node, *node.all_input_nodes):
        for tensor in ops.tensors(each.meta.get("val")):
            yield tensor.device


def _device(node: fx.Node) -> torch.device:
    """Where a node runs."""
    return next(iter(_devices(node)), torch.device("cpu"))


def _fill(
    table: MutableMapping[str, _Figure],
    examples: Iterable[_Example],
    measure: Callable[[_Example], _Figure],
    title: str,
) -> list[str]:
    """Measure what a table does not have yet; the signatures of all."""
    wanted = [(each.signature, each) for each in examples]
    fresh = {key: each for key, each in wanted if key not in table}
    if fresh:
        with alone(_device(each.node) for each in fresh.values()) as run:
            for key, each in tqdm(fresh.items(), title, disable=None, leave=False, delay=1.0):
                table[key] = run(functools.partial(measure, each))
    return [key for key, _ in wanted]


def _scratch_sizes(examples: Iterable[_Example]) -> list[int]:
    """The scratch bytes of each example."""
    return [each.scratch_bytes for each in _see_all(examples)]


def _see_all(examples: Iterable[_Example]) -> list[Seen]:
    """What each example does, which is run once."""
    table = _seen.setdefault(torch.get_num_threads(), {})
    return [table[key] for key in _fill(table, examples, _see, "measuring scratch memory")]


def _see(example: _Example) -> Seen:
    device = _device(example.node)
    forms: list[Form | None] = []

    def run() -> object:
        results = call()
        forms[:] = forms_of(results)
        return results

    for definite in (False, True):
        with contextlib.suppress(*REFUSALS):
            call = example.call(definite)
            if device.type == "cuda":
                call()  # the first run also allocates what a library keeps, such as the workspace of cuBLAS
            peak_bytes, end_bytes = held_bytes(run, device)
            scratch = max(0, peak_bytes - max(end_bytes, _bytes_of(example.node, forms)))
            return Seen(scratch, tuple(forms))
    return UNSEEN


def _bytes_of(node: fx.Node, forms: Sequence[Form | None]) -> int:
    """Bytes of a node's value as it was traced, or less if it was seen to be of a smaller dtype."""
    found = 0
    for leaf, form in itertools.zip_longest(graphs.leaves(node.meta.get("val")), forms):
        for tensor in ops.tensors(leaf):
            size, itemsize = ops.storage_bytes(tensor), tensor.dtype.itemsize
            found += size if form is None else size * min(itemsize, form.dtype.itemsize) // itemsize
    return found


def forms_of(value: object) -> Forms:
    """What each leaf of an operator's result is like."""
    return tuple(
        Form(tuple(each.shape), each.stride(), each.dtype)
        if isinstance(each, torch.Tensor) and each.layout is torch.strided
        else None
        for each in graphs.leaves(value)
    )


def _measure_seconds(example: _Example) -> float | None:
    try:
        seconds = seconds_per_call(example.call(), _device(example.node))
    except REFUSALS:
        return None
    return float(f"{seconds:.{SECONDS_DIGITS}g}")


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an operator reads, in order."""
    found: list[torch.Tensor] = []
    reads = node.args, dict(node.kwargs)
    fx.node.map_arg(reads, lambda each: found.extend(ops.tensors(each.meta.get("val"))))
    return found


def _arranged(node: fx.Node, channels_last: bool = True) -> tuple[Strides, ...]:
    """The strides of what a convolution reads, as Inductor lays it out; none for other operators.

    Images lie channels last, or else as they were traced; sequences in the order of their sizes, as the
    results of their convolutions do. An image of one channel has the strides of either order in any case:
    torch's own convolution then takes it for channels first, and copies the others.
    """
    if not ops.has_convolution(node):
        return ()
    return tuple(_arranged_strides(each, channels_last) for each in _operands(node))


def _in_order(value: torch.Tensor) -> Strides:
    """The strides of what lies in the order of its sizes."""
    return tuple(torch.empty(list(map(size_of, value.shape)), device="meta").stride())


def _arranged_strides(value: torch.Tensor, channels_last: bool) -> Strides:
    shape = list(map(size_of, value.shape))
    stride = [graphs.hint(step) or 0 for step in value.stride()]
    if channels_last and loops.is_channels_first(value):
        _, channels, height, width = shape
        is_part = stride[1] >= height * width and shape[0] > 1  # of the channels of another's
        of = max(channels, stride[0] // stride[1]) if is_part else channels
        return (of * height * width, 1, of * width, of)
    return _in_order(value) if len(shape) == 3 else tuple(stride)
