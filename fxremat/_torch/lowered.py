"""The door to what Inductor has made of a graph: its code, before any kernel is compiled, and its scheduler.

See ``graphs.py`` for the other doors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

__all__ = [
    "GeneratedCode",
    "LoweredOperation",
    "gradients_keep_layouts",
    "reader",
    "stores_for_gradients",
    "wants_buffers",
    "writes_shared_to_slices",
]


@dataclass(frozen=True, slots=True)
class LoweredOperation:
    """A loop or an external kernel, as Inductor's scheduler has it.

    Attributes:
        is_loop: Whether it is a loop, or a concatenation that loops write to.
        made_for: The fx node whose value it computes; None for what Inductor adds, such as a copy.
        origins: All fx nodes that it computes, and for a copy maybe that which reads it.
        reads: The names of the buffers that it reads.
        bytes: Of its result.
        is_stored: Whether its result has a buffer; not so if no other kernel reads it.
        layouts: Sizes and strides of the tensors that an external kernel reads, in order.
    """

    is_loop: bool
    made_for: fx.Node | None
    origins: Sequence[fx.Node]
    reads: Sequence[str]
    bytes: int
    is_stored: bool
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = ()


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The code that Inductor generated for a graph, before its kernels are compiled.

    Attributes:
        text: Its source.
        is_backward: Whether the graph is a backward.
        buffer_bytes: Bytes of a buffer's memory by its name; None for another name.
        origins: The fx nodes that a buffer was made for, by its name.
        viewed: The buffers and inputs whose memory a buffer is that an operator returned, by its name.
        outputs: What the graph returns, in order.
        operations: What its kernels were made of, by the names of the results.
        nodes: What was lowered.
        strides: Those of a buffer, by its name; None for another name, and for what has none.
    """

    text: str
    is_backward: bool
    buffer_bytes: Callable[[str], int | None]
    origins: Callable[[str], Sequence[fx.Node]]
    viewed: Callable[[str], Sequence[str]]
    outputs: Sequence[object] = ()
    operations: Mapping[str, LoweredOperation] = field(default_factory=dict)
    nodes: Sequence[fx.Node] = ()
    strides: Callable[[str], Sequence[int] | None] = lambda name: None


def gradients_keep_layouts() -> bool:
    """Whether the gradient of a convolution reads its operands as they lie, as in torch 2.11, or arranged."""
    from torch._inductor import lowering

    of_gradients = lowering.maybe_layout_constraints(torch.ops.aten.convolution_backward.default)
    return of_gradients is lowering.constrain_to_fx_strides


def reader(read: Callable[[GeneratedCode], None], is_backward: bool) -> Callable[[str], None]:
    """What is called with the text of the code that Inductor generates, and hands on the whole of a graph."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def take(text: str) -> None:
        graph = V.graph
        is_whole = isinstance(graph, GraphLowering) and graph.name is None  # not one that is tried out
        if is_whole and not graph.cpp_wrapper:
            read(_generated(graph, text, is_backward))

    return take


def _generated(graph: Any, text: str, is_backward: bool) -> GeneratedCode:
    def buffer_bytes(name: str) -> int | None:
        from torch._inductor import ir

        buffer = graph.name_to_buffer.get(name)
        if buffer is None:
            return None
        if isinstance(buffer.layout, (ir.NoneLayout, ir.MultiOutputLayout)):
            return 0
        elements = graph.get_allocation_storage_size(buffer)
        return int(graph.sizevars.optimization_hint(elements, fallback=0)) * buffer.get_dtype().itemsize

    def origins(name: str) -> Sequence[fx.Node]:
        buffer = graph.name_to_buffer.get(name)
        return () if buffer is None else tuple(buffer.get_origins())

    def viewed(name: str) -> Sequence[str]:
        buffer = graph.name_to_buffer.get(name)
        return () if buffer is None else tuple(buffer.get_inputs_that_alias_output())

    def strides(name: str) -> Sequence[int] | None:
        found = getattr(graph.name_to_buffer.get(name), "maybe_get_stride", lambda: None)()
        return None if found is None else tuple(graph.sizevars.optimization_hints(found))

    (outputs,) = next(iter(graph.graph.find_nodes(op="output"))).args
    operations = dict(_operations(graph, buffer_bytes))
    nodes = tuple(graph.graph.nodes)
    return GeneratedCode(
        text, is_backward, buffer_bytes, origins, viewed, outputs, operations, nodes, strides
    )


def _operations(
    graph: Any, buffer_bytes: Callable[[str], int | None]
) -> Iterator[tuple[str, LoweredOperation]]:
    """What a graph was lowered to, by the names of the results."""
    from torch._inductor import ir

    for buffer in graph.buffers:
        if isinstance(buffer, (ir.ComputedBuffer, ir.ConcatKernel, ir.ExternKernel)):
            name = buffer.get_name()
            is_loop = not isinstance(buffer, ir.ExternKernel)
            yield (
                name,
                LoweredOperation(
                    is_loop,
                    buffer.get_origin_node(),
                    tuple(buffer.get_origins()),
                    tuple({read.name: None for read in buffer.get_read_writes().reads}),
                    buffer_bytes(name) or 0,
                    name not in graph.removed_buffers,
                    () if is_loop else tuple(_layouts(graph, buffer)),
                ),
            )


def _layouts(graph: Any, kernel: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes and strides of the tensors that an external kernel reads, up to what has none."""
    for read in kernel.inputs:
        strides = getattr(read, "maybe_get_stride", lambda: None)()
        if strides is None:
            return
        sizes, strides = (graph.sizevars.optimization_hints(each) for each in (read.get_size(), strides))
        yield tuple(sizes), tuple(strides)


def wants_buffers(node: fx.Node) -> bool:
    """Whether Inductor gives what an operator reads, and others too, a buffer as soon as it is computed."""
    from torch._inductor.lowering import needs_realized_inputs

    return node.target in needs_realized_inputs


def writes_shared_to_slices() -> bool:
    """Whether on a GPU operands of a concatenation that loops read as well are computed right into it.

    From torch 2.12 on they are.
    """
    return torch.__version__ >= "2.12"


def stores_for_gradients() -> bool:
    """Whether Inductor stores what gradients of convolutions read before it asks for another layout.

    From torch 2.14 on it does, in graphs whose convolutions work channels last.
    """
    from torch._inductor.kernel import conv

    return hasattr(conv, "convolution_backward_lowering")
