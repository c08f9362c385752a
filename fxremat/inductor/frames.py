"""Frames: how the loops and views of a graph go through what they read, whatever the schedule.

A value's elements are counted as it was traced to lie, for images channels last where convolutions work so,
and once more in the order of their sizes: each is a *frame*. What follows a convolution over a sequence runs
in its order, with the features apart. Images whose channels are normalised in groups have all points in one
dimension, and run over them before the channels all the same. What keeps two dimensions apart is then a
number: how many elements lie inside of the outer one (its *block*). A value that is computed inside of its
reader hands on its blocks, views and broadcasts translate them. None where the indices of a loop are not
known.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from fxremat._torch import compilers, graphs
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import AVERAGES, LOOPS, Kind, Loop, Reduction, is_padded, strides_of
from fxremat.graph.ops import aten, prims
from fxremat.inductor.facts import facts
from fxremat.inductor.ranges import Blocks, Ranges, ranges_between

NONE: Blocks = frozenset()

_POOLED = 2  # dimensions of an image that windows go through, the last ones
_IMAGE = 4  # dimensions of an image, whose order is that of channels last where convolutions work so
_CHANNELS_LAST = (0, 2, 3, 1)
_IN_GROUPS = (0, 3, 1, 2)  # the same of (examples, groups, channels of a group, points)

# Elementwise, though not tagged so.
_COPYING = frozenset({aten._to_copy, aten.clone, aten.lift_fresh_copy, prims.convert_element_type})
# They read no element of what they are given.
_FILLING = frozenset(
    {
        aten.arange,
        aten.empty_like,
        aten.full,
        aten.full_like,
        aten.new_full,
        aten.new_zeros,
        aten.ones_like,
        aten.scalar_tensor,
        aten.zeros,
        aten.zeros_like,
        prims.inductor_lookup_seed,
        prims.inductor_random,
        prims.iota,
    }
)


class Access(NamedTuple):
    """How a loop goes through an operand.

    Attributes:
        added: The blocks that come of it, whatever those of the operand are.
        dims: For each dimension of the loop that goes through the operand: how far it goes there in a step,
            its size, and its own block. None if the blocks of the operand are those of the loop.
    """

    added: Blocks
    dims: tuple[tuple[int, int, int], ...] | None = None

    def blocks(self, own: Blocks) -> Blocks:
        """The loop's blocks, from those of the operand."""
        if self.dims is None:
            return self.added | own
        found = (
            block * (each // step)
            for each in own
            for step, size, block in self.dims
            if step <= each < step * size and each % step == 0
        )
        return self.added.union(found)


SAME = Access(NONE)


class Indices:
    """How a loop, or a view, goes through what it reads.

    Attributes:
        accesses: How it goes through each of its operands; None where that is not known.
        added: The blocks that come of it, whatever those of the operands are.
        is_plain: Whether it goes through all of them element by element.
    """

    def __init__(self, accesses: Sequence[Access | None]) -> None:
        self.accesses = accesses
        self.added = NONE.union(*(each.added for each in accesses if each is not None))
        self.is_plain = all(each is SAME for each in accesses)
        self._ranges: dict[Blocks, Ranges] = {}

    def blocks(self, operands: Iterable[Blocks | None]) -> Blocks | None:
        """Its blocks, from what its operands show; None if they are not known."""
        found = self.added
        for access, own in zip(self.accesses, operands, strict=True):
            if own is None or access is None:
                return None
            if own:
                found |= access.blocks(own)
        return found

    def ranges(self, loop: Loop, blocks: Blocks | None) -> Ranges | None:
        """The ranges of a loop with these blocks."""
        if blocks is None or loop.kind not in LOOPS:
            return None
        if blocks not in self._ranges:
            inner = 1 if loop.reduction is None else loop.reduction.read // max(1, loop.reduction.written)
            self._ranges[blocks] = ranges_between(loop.elements, inner, blocks)
        return self._ranges[blocks]


class _Value(NamedTuple):
    """The value of a node.

    Attributes:
        node: The node.
        tensor: Its value; None where it is not one tensor.
        order: The dimensions, those first whose elements lie far apart.
    """

    node: fx.Node
    tensor: torch.Tensor | None
    order: Sequence[int]

    @property
    def is_image(self) -> bool:
        """Whether it lies channels last."""
        return self.order in (_CHANNELS_LAST, _IN_GROUPS)

    @property
    def sizes(self) -> list[int]:
        """Those of its dimensions."""
        return [] if self.tensor is None else _hints(self.tensor.shape)

    def steps(self) -> list[int]:
        """For each dimension, how many elements lie inside of it."""
        return _steps_along(self.sizes, self.order)


class Frame(NamedTuple):
    """An order in which loops may go through images.

    Attributes:
        indices: For each node, how it goes through what it reads; None if it is no loop and no view, or not
            known.
        splits: The blocks of each image that is stored in the other order.
        given: For nodes that read images of the caller's, which of their operands these are, and which.
        is_last: Whether it is channels last.
    """

    indices: Sequence[Indices | None]
    splits: Mapping[int, Blocks]
    given: Mapping[int, Sequence[tuple[int, int]]]
    is_last: bool

    def stored(self, node: int, is_in_order: bool) -> Blocks:
        """The blocks of a value that is stored, if an image in the order of its sizes or channels last."""
        return self.splits.get(node, NONE) if is_in_order is self.is_last else NONE


_known: weakref.WeakKeyDictionary[JointGraph, Sequence[Frame]] = weakref.WeakKeyDictionary()


def frames(graph: JointGraph) -> Sequence[Frame]:
    """Orders of images: of their sizes and channels last; one, where none lie channels last."""
    found = _known.get(graph)
    if found is None:
        forward = graph.fx_nodes[: graph.boundary]
        works_last = any(map(_works_on_images, forward)) and compilers.lays_out_channels_last(forward)
        orders = (False, True) if works_last else (None,)
        found = _known[graph] = [_frame(graph, is_last) for is_last in orders]
    return found


def _frame(graph: JointGraph, is_last: bool | None) -> Frame:
    """The frame of an order; where that is None, of what was traced, in which all images lie."""
    values: list[_Value] = []
    for place, node in enumerate(graph.fx_nodes):
        tensor = _tensor(node)
        order: Sequence[int] = () if tensor is None else _order(tensor)
        if tensor is not None and tensor.dim() == _IMAGE and is_last is not None:
            if is_last:
                order = _IN_GROUPS if _is_in_groups(graph, place, tensor, values) else _CHANNELS_LAST
            else:
                several = [at for at in order if tensor.shape[at] != 1]
                known = ([at for at in each if at in several] for each in (range(_IMAGE), _CHANNELS_LAST))
                tensor = tensor if several in known else None  # its dimensions are others
                order = range(_IMAGE)
        values.append(_Value(node, tensor, order))
    indices = [_of_node(graph, place, values) for place in range(len(values))]
    if is_last is None:
        return Frame(indices, {}, {}, is_last=False)
    splits = dict(_splits(graph, is_last))
    given = ((each, _given(graph, node.operands, splits)) for each, node in enumerate(graph.nodes))
    return Frame(indices, splits, {each: found for each, found in given if found}, is_last)


def _given(graph: JointGraph, operands: Sequence[int], images: Container[int]) -> Sequence[tuple[int, int]]:
    """The places of operands that are images of the caller's, and which of the inputs they are."""
    each = enumerate(operands)
    return [(place, node) for place, node in each if node < graph.num_inputs and node in images]


def _splits(graph: JointGraph, is_last: bool) -> Iterable[tuple[int, Blocks]]:
    """For each image, its blocks in a loop that goes through it in the other order."""
    for place, (_, channels, *points) in facts(graph).images.items():
        inner = channels if is_last else math.prod(points)
        yield place, frozenset({channels * math.prod(points), inner})


def _is_in_groups(graph: JointGraph, place: int, tensor: torch.Tensor, values: Sequence[_Value]) -> bool:
    """Whether a value is a view of an image with its channels in groups, or computed of such."""
    operands, shared = graph.nodes[place].operands, graph.shared_places[place]
    if graph.loops[place].kind is not Kind.VIEW:
        like = (values[each] for each in operands if values[each].order is _IN_GROUPS)
        return any(each.sizes == _hints(tensor.shape) for each in like)
    base = None if shared is None else values[operands[shared]]
    if base is None or not base.is_image:
        return False
    is_other = _groups(_hints(tensor.shape), base.sizes)
    return not is_other if base.order is _IN_GROUPS else _groups(base.sizes, _hints(tensor.shape))


def _groups(image: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether these are sizes of an image with its channels in groups, and its points in one dimension."""
    examples, channels, rows, columns = image
    in_groups = [examples, sizes[1], channels // max(1, sizes[1]), rows * columns]
    return in_groups == list(sizes) != list(image)


def _works_on_images(node: fx.Node) -> bool:
    """Whether a node is a convolution of images; beside one of sequences four dimensions may be anything."""
    return ops.is_convolution(node) and len(node.meta["val"].shape) == _IMAGE


def _of_node(graph: JointGraph, place: int, values: Sequence[_Value]) -> Indices | None:
    value, loop = values[place], graph.loops[place]
    operands = [values[each] for each in graph.nodes[place].operands]
    if loop.kind is Kind.VIEW:
        return Indices(_of_view(value, operands, graph.shared_places[place]))
    accesses = _of_loop(loop, value, operands)
    return None if accesses is None else Indices(accesses)


def _of_loop(loop: Loop, value: _Value, operands: Sequence[_Value]) -> Sequence[Access | None] | None:
    """How a loop goes through its operands, if it is elementwise, pools, or reduces inner dimensions."""
    operator, is_known = ops.packet(value.node), value.tensor is not None
    if operator in _FILLING:
        return [SAME] * len(operands)
    if operator is aten.repeat and len(value.sizes) == 1:  # one range, whatever is read
        return [Access(NONE, ())] * len(operands)
    if operator in AVERAGES and is_known:
        return [_pooled(value, operands[0]), *[SAME] * (len(operands) - 1)]
    is_elementwise = operator in _COPYING or torch.Tag.pointwise in getattr(value.node.target, "tags", ())
    order = value.order
    if loop.kind is Kind.REDUCTION and len(operands) == 1 and _is_inner(loop.reduction):
        (value,) = operands
        is_known = is_elementwise = value.tensor is not None
    if not is_elementwise or not is_known:
        return None
    if loop.reduction is not None:
        order = _reduced_last(value, loop.reduction.read // max(1, loop.reduction.written))
    return [_broadcast(value._replace(order=order), each) for each in operands]


def _pooled(value: _Value, operand: _Value) -> Access | None:
    """How an average pooling goes through what it reads, or its gradient, which does not in equal steps."""
    several = [at for at in value.order if value.sizes[at] > 1]
    sizes = [value.sizes[at] for at in several]
    if ops.packet(value.node) is not aten.avg_pool2d or is_padded(value.node):
        pooled = [at >= len(value.sizes) - _POOLED for at in several]
        blocks = zip(itertools.pairwise(pooled), _steps(sizes), strict=False)
        return Access(frozenset(block for (before, at), block in blocks if before or at), ())
    steps, (rows, columns) = operand.steps(), strides_of(value.node)
    steps[-2:] = steps[-2] * rows, steps[-1] * columns
    return _through(sizes, [steps[at] for at in several])


def _reduced_last(value: _Value, reduced: int) -> Sequence[int]:
    """The order of a value's dimensions with those last that are reduced, the innermost of the sizes."""
    inner = len(value.sizes)
    while reduced > 1 and inner:
        inner -= 1
        reduced //= max(1, value.sizes[inner])
    kept, rest = ([at for at in value.order if (at < inner) is is_kept] for is_kept in (True, False))
    return [*kept, *(rest if value.is_image else sorted(rest))]


def _is_inner(reduction: Reduction | None) -> bool:
    return reduction is not None and reduction.is_inner


def _of_view(view: _Value, operands: Sequence[_Value], place: int | None) -> Sequence[Access | None]:
    """How a view goes through what it looks at."""
    accesses: list[Access | None] = [SAME] * len(operands)
    if place is not None and view.tensor is not None:
        base = operands[place]
        if ops.is_getitem(view.node):  # of several parts that an operator shows, or of its results
            shown = ops.viewed_operand(base.node)
            base = view if shown is None else _picked_from(shown, view)
        accesses[place] = _looked_at(view, base)
    return accesses


def _picked_from(node: fx.Node, part: _Value) -> _Value:
    """The value that a node splits, of which a part lies as the whole does."""
    tensor = _tensor(node)
    return _Value(node, tensor, part.order if tensor is None or part.is_image else _order(tensor))


def _broadcast(value: _Value, operand: _Value) -> Access | None:
    """How an elementwise loop goes through an operand; an input of the graph lies as it was traced.

    Args:
        value: What the loop computes, or reduces, with the order in which it runs through that.
        operand: The operand.
    """
    is_given, missing = operand.node.op == "placeholder", len(value.sizes) - len(operand.sizes)
    if operand.tensor is None or missing < 0 or (is_given and not operand.tensor.is_contiguous()):
        return None
    read, sizes = [1] * missing + operand.sizes, value.sizes
    # beside an image what has fewer dimensions lies as it does
    steps = _steps_along(read, value.order) if value.is_image else [0] * missing + operand.steps()
    if any(each not in (1, size) for each, size in zip(read, sizes, strict=True)):
        return None
    several = [at for at in value.order if sizes[at] > 1]
    sizes, steps = [sizes[at] for at in several], [0 if read[at] == 1 else steps[at] for at in several]
    return SAME if steps == _steps(sizes) else _through(sizes, steps)


def _looked_at(view: _Value, base: _Value) -> Access | None:
    """How a view goes through what it looks at."""
    if view.tensor is None or base.tensor is None:
        return None
    if _laid_out(view.tensor) == _laid_out(base.tensor):
        return SAME
    if math.prod(base.sizes) == 1:
        return Access(NONE, ())
    if view.is_image:
        return _looked_at_image(view, base) if base.is_image else None
    sizes, strides = view.sizes, _hints(view.tensor.stride(), 0)
    steps = [_step(sizes[at], strides[at], base) for at in view.order]
    known = [step for step in steps if step is not None]
    return _through([sizes[at] for at in view.order], known) if len(known) == len(steps) else None


def _laid_out(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions that have several places."""
    each = zip(_hints(tensor.shape), _hints(tensor.stride(), 0), strict=True)
    return [(size, stride) for size, stride in each if size != 1]


def _looked_at_image(view: _Value, base: _Value) -> Access | None:
    """How a view goes through an image that lies channels last: a part of it, or one that is expanded.

    Or all of it, with the channels of several images as those of one, or the other way round, as where images
    are normalised one by one; or with the channels in groups, which lie as before.
    """
    if view.tensor is None or base.tensor is None:
        return None
    if view.order != base.order:
        return SAME
    sizes = [view.sizes[at] for at in view.order]
    whole = [base.sizes[at] for at in view.order]
    is_whole = sizes[1:3] == whole[1:3] and math.prod(sizes) == math.prod(whole)
    if is_whole and 1 in (sizes[0], whole[0]):
        if sizes[0] == 1:  # channels are no one step from each other, and stay one dimension
            return Access(frozenset(sizes[-1:]), ())
        return _through(sizes, [sizes[-1], *_steps(whole)[1:]])
    is_expanded = all(each in (1, size) for each, size in zip(whole, sizes, strict=True))
    if not is_expanded and view.tensor.stride() != base.tensor.stride():
        return None
    steps = zip(whole, sizes, _steps(whole), strict=True)
    return _through(sizes, [0 if each == 1 and size > 1 else step for each, size, step in steps])


def _step(size: int, stride: int, base: _Value) -> int | None:
    """How many elements of a value, in its order, a dimension of a view goes on by; None if that changes.

    Args:
        size: The dimension's.
        stride: The same, as it was traced.
        base: The value.
    """
    if size == 1 or stride == 0 or base.tensor is None:
        return 0
    found: set[int | None] = set()
    for each, own, step in zip(base.sizes, _hints(base.tensor.stride(), 0), base.steps(), strict=True):
        is_first = own <= stride < each * own and stride % max(1, own) == 0
        if each > 1 and own and (is_first or stride < own < stride * size):
            found.add(None if step * stride % own else step * stride // own)
    return found.pop() if len(found) == 1 else None


def _through(sizes: Sequence[int], steps: Sequence[int]) -> Access:
    """How a loop of these sizes goes through something; steps of 0 stay where they are."""
    own = _steps(sizes)
    dims = [(step, size, block) for step, size, block in zip(steps, sizes, own, strict=True) if size > 1]
    added = frozenset(
        block
        for (step, _, block), (inner, size, _) in itertools.pairwise(dims)
        if step != inner * size or (not step) != (not inner)
    )
    return Access(added, tuple(each for each in dims if each[0]))


def _order(value: torch.Tensor) -> Sequence[int]:
    """The dimensions of a value, those first whose elements lie far apart, as it was traced."""
    strides = _hints(value.stride(), 0)
    apart = [size > 1 for size in _hints(value.shape)]
    if not all(step for step, several in zip(strides, apart, strict=True) if several):
        return range(value.dim())
    return sorted(range(value.dim()), key=lambda at: -strides[at] if apart[at] else -math.inf)


def _steps_along(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """For each dimension, how many elements lie inside of it if they are counted in this order."""
    found = [1] * len(sizes)
    for at, step in zip(order, _steps([sizes[at] for at in order]), strict=True):
        found[at] = step
    return found


def _steps(sizes: Sequence[int]) -> list[int]:
    """For each dimension, how many elements lie inside of it."""
    return [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]


def _hints(sizes: Iterable[int | torch.SymInt], unknown: int = 1) -> list[int]:
    return [graphs.hint(size) or unknown for size in sizes]


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
