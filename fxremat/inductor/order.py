"""Order: what holds Inductor to the plan's order.

Control dependencies keep recomputed segments where the plan has them; the marks of segments and stretches
keep its scheduler from fusing across them. Convolutions work in the layout in which they do without a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import fx

from fxremat._torch import compilers
from fxremat.graph import ops
from fxremat.graph.loops import Kind, Loop, kind, loop, readers
from fxremat.graph.nodes import MIRROR, STEP
from fxremat.inductor.products import summed_products
from fxremat.inductor.segments import OWN_BUFFER, segments, stretches, waited_for, waiting

# Keys in the fx meta of the nodes of a part, most of them of the backward's.
SEGMENT = "fxremat_segment"  # a segment of recomputation
STRETCH = "fxremat_stretch"  # a stretch between external kernels that run again
KERNELS = "fxremat_kernels"  # how many external kernels there are up to it, itself counted
APART = "fxremat_apart"  # whether it is a concatenation that is in no kernel with another
STAYS = "fxremat_stays"  # whether it is computed where it stands, as a mirror is


def order_recomputation(backward: fx.GraphModule) -> int:
    """Make each recomputed segment of a backward graph wait for what stands before it.

    A compiler that schedules by dependencies alone may hoist a mirror, which reads saved values only, to the
    backward's start, and the memory comes back. The first mirror of each segment (``segments.py``) is made to
    wait for the last value before it, unless it is computed from that. Only what gets a buffer of its own in
    any case takes part: kernels, reductions and, to be waited for, loops that kernels read. Another loop
    could not be inlined any more, and loops alone run with their readers. A product that is computed with a
    sum is not waited for, or it would be computed by itself; the sum is. Nothing is written over what is
    waited for: a loop that would be, over a product before it, is waited for in its place. Every node is told
    its segment and its stretch, so that the compiler can be kept from fusing loops of two of them
    (``may_fuse``).

    Returns:
        How many dependencies were added.
    """
    nodes = list(backward.graph.nodes)
    owns = [_has_own_buffer(node) and not ops.is_getitem(node) for node in nodes]
    steps = [(node.meta.get(MIRROR), own) for node, own in zip(nodes, owns, strict=True)]
    numbers = segments(steps)
    external = [*map(_is_kernel, nodes)]
    again = [is_kernel and MIRROR in node.meta for node, is_kernel in zip(nodes, external, strict=True)]
    parts, before = stretches(numbers, again), [*accumulate(map(int, external))]
    places = {node: place for place, node in enumerate(nodes)}
    reads = [[places[each] for each in node.all_input_nodes] for node in nodes]
    first = frozenset(waiting(steps, numbers, reads.__getitem__))
    products = _summed_products(nodes, places, reads, first)
    sums = frozenset(products.values())
    may_be = []
    for index, node in enumerate(nodes):
        node.meta |= {SEGMENT: numbers[index], STRETCH: parts[index], KERNELS: before[index]}
        has_buffer = _has_own_buffer(node) or _is_handed_over(node)
        is_computed_here = index in sums or (has_buffer and index not in products)
        may_be.append(is_computed_here and isinstance(node.meta.get("val"), torch.Tensor))
    waits = {nodes[index]: nodes[before] for index, before in waited_for(first, may_be).items()}
    _say_channels_last(backward, waits)
    compilers.order_after(backward, waits)
    return len(waits)


def hold_back(part: fx.GraphModule, steps: Collection[int]) -> None:
    """Have what writes to the concatenations of these steps be fused with nothing past an external kernel.

    Nor with what writes to another concatenation.
    """
    kernels = 0
    for node in part.graph.nodes if steps else ():
        kernels += _is_kernel(node)
        node.meta.setdefault(KERNELS, kernels)
        if node.meta.get(STEP) in steps:
            node.meta |= {STAYS: True, APART: True}


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and kind(node) is Kind.KERNEL


def _is_cat(node: fx.Node) -> bool:
    return ops.packet(node) is ops.aten.cat


def _is_handed_over(node: fx.Node) -> bool:
    """Whether a node is a loop that runs once and whose result an external kernel reads."""
    is_loop = node.op == "call_function" and MIRROR not in node.meta and kind(node) is Kind.POINTWISE
    return is_loop and any(map(_is_kernel, readers(node)))


def _summed_products(
    nodes: Sequence[fx.Node],
    index: Mapping[fx.Node, int],
    reads: Sequence[Sequence[int]],
    waiting: Collection[int],
) -> dict[int, int]:
    """Indices of the products that are computed with a sum, and of their sums."""
    calls = [node if node.op == "call_function" else None for node in nodes]
    found = [Loop(Kind.KERNEL, 0) if node is None else loop(node) for node in calls]
    read_by = [[index[each] for each in readers(node)] for node in nodes]
    devices = (tensor.device.type for node in nodes for tensor in ops.tensors(node.meta.get("val")))
    return summed_products(found, reads, read_by, waiting, {*devices} == {"cpu"})


def _say_channels_last(backward: fx.GraphModule, waiting: Iterable[fx.Node]) -> None:
    """Give convolutions that wait the layout that Inductor gives the others.

    It does not see them as convolutions, and would copy what they make to the layout that was traced.
    """
    found = [node for node in waiting if ops.is_convolution(node) and node.meta["val"].dim() == 4]
    if found and lays_out_channels_last(backward):
        for node in found:
            node.meta["val"] = node.meta["val"].to(memory_format=torch.channels_last)


def held_layout(backward: fx.GraphModule) -> dict[str, bool]:
    """Inductor's configuration that has a backward's convolutions work as if nothing were computed again.

    Inductor has all convolutions of a graph work channels last if some that it sees do, and a backward that
    computes none again may have none to see: of one that does, it would then copy each gradient that lies in
    another order, and some gradients of convolutions need far more scratch memory so.
    """
    if lays_out_channels_last(backward):
        return {"force_layout_optimization": True}
    return {"layout_optimization": False}


def lays_out_channels_last(backward: fx.GraphModule) -> bool:
    """Whether Inductor has the convolutions of a backward work channels last without those that run again."""
    return compilers.lays_out_channels_last(
        [node for node in backward.graph.nodes if MIRROR not in node.meta]
    )


def may_fuse(first: Sequence[Sequence[fx.Node]], second: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether buffers may be made by one kernel.

    They may not where one is computed again, or told to stay, and an external kernel, or the end of its
    segment, stands between them; nor where they are of two concatenations of which one is held back; nor
    where an external kernel runs again between them. The kernel would run at the place of one of them and
    hold what the other works on meanwhile. Nor do reductions wait, past an external kernel, for a loop over
    what they write: they read much more.

    Args:
        first: The nodes that each buffer of a kernel was made for, of which the last counts: the others are
            computed inside of its loop.
        second: Those of another kernel.
    """
    parts = [[max(origins, key=_strictness) for origins in each if origins] for each in (first, second)]
    nodes = [*parts[0], *parts[1]]
    if any(APART in node.meta for node in nodes) and len({*filter(_is_cat, nodes)}) > 1:
        return False
    if any(map(_stays, nodes)):
        is_near = len({(node.meta.get(SEGMENT), _kernels_before(node)) for node in nodes}) <= 1
    else:
        is_near = len({node.meta.get(STRETCH) for node in nodes}) <= 1
    return is_near and not (_are_put_off(*parts) or _are_put_off(*reversed(parts)))


def _are_put_off(nodes: Sequence[fx.Node], later: Sequence[fx.Node]) -> bool:
    """Whether there are reductions that would wait, past an external kernel, for a loop over what they write.

    As they do where gradients of a parameter are added that is used several times: it is asked of a backward.
    """
    last = max(map(_kernels_before, nodes), default=0)
    behind = [
        node
        for node in later
        if SEGMENT in node.meta and _kernels_before(node) > last and kind(node) is Kind.POINTWISE
    ]
    if not behind:
        return False
    reductions = (loop(node).reduction for node in nodes if kind(node) is Kind.REDUCTION)
    written = {reduction.written for reduction in reductions if reduction is not None}
    return any(loop(node).elements in written for node in behind)


def _kernels_before(node: fx.Node) -> int:
    """The number of external kernels before what is computed for a node, as a copy is that a kernel reads."""
    return int(node.meta.get(KERNELS, 0)) - _is_kernel(node)


def _strictness(node: fx.Node) -> tuple[int, bool, bool]:
    """What orders the nodes that a buffer was made for: segments ascend, what stays is the stricter case.

    And then an external kernel, right before which what it reads is computed.
    """
    return node.meta.get(SEGMENT, -1), _stays(node), _is_kernel(node)


def _stays(node: fx.Node) -> bool:
    """Whether a node is a mirror that computes, which a view of what is there does not, or told to stay."""
    return (MIRROR in node.meta and kind(node) is not Kind.VIEW) or STAYS in node.meta


def _has_own_buffer(node: fx.Node) -> bool:
    """Whether a node, or the operator whose output it picks, gets a buffer in any case."""
    if node.op != "call_function":
        return False
    operator = node.args[0] if ops.is_getitem(node) else node
    return isinstance(operator, fx.Node) and kind(operator) in OWN_BUFFER
