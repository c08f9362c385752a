"""The door to Inductor's scheduler: in which order kernels run, and which loops may be one kernel."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import fx
from torch._inductor import custom_graph_pass

__all__ = ["Order", "Origins", "by_place", "choices", "running"]

Origins = Sequence[Sequence[fx.Node]]


class Order(NamedTuple):
    """How the kernels of a graph are to run.

    Attributes:
        settings: Inductor's configuration for that.
        made_at: For each step of a schedule the step at which its value is made.
        groups: On a CPU, for each of them the number of the kernel group that its loop is in.
        held_back: Which of them are fused with less, for caches to tell.
        key: Under which key the meta of a node says which step it is.
    """

    settings: Mapping[str, Any]
    made_at: Sequence[int]
    groups: Sequence[int]
    held_back: Set[int]
    key: str


def running(order: Order) -> contextlib.AbstractContextManager[Any]:
    """Have Inductor order kernels by ``_InOrder``, but where the user has it order them in another way."""
    from torch._inductor import config

    found = dict(order.settings)
    if config._post_fusion_custom_pass is None:
        found["_post_fusion_custom_pass"] = _InOrder(order)
    return config.patch(found)  # type: ignore[no-any-return]


class _InOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """Run each kernel where the first of its buffers is made, or behind what it reads.

    Inductor's own order gets what a kernel reads right before it. Where a kernel has a buffer that stands far
    before the others, all that the others need comes first, and what has stood between waits with its
    operands live. A buffer is made where it stands in the graph, but for a loop that Inductor computes right
    before an external kernel that reads it: what stands between reads what that loop may be written over.
    """

    def __init__(self, order: Order) -> None:
        self._order = order

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The scheduler's nodes in the new order."""
        from torch._inductor.virtualized import V

        places = self._places(list(V.graph.graph.nodes))

        def first(node: Any) -> tuple[int, fx.Node | None]:
            """Where the first of a kernel's buffers is made, and the last that this one computes."""
            own = ([(places[each], each) for each in one if each in places] for one in _origins(node))
            return min(map(max, filter(None, own)), default=(0, None))

        found = by_place(nodes, lambda node: first(node)[0])
        groups = self._order.groups
        if groups:
            made_for = (first(node)[1] for node in found)
            steps = [None if each is None else each.meta.get(self._order.key) for each in made_for]
            _end_groups(found, [None if step is None else groups[step] for step in steps])
        return found

    def _places(self, traced: Sequence[Any]) -> dict[fx.Node, int]:
        """For each node of a graph, the place of that at which its value is made."""
        from torch._inductor import inductor_prims

        made_at, key = self._order.made_at, self._order.key
        first: dict[int, int] = {}  # of each step, where it stands
        for index, node in enumerate(traced):
            first.setdefault(node.meta.get(key, -1), index)
        known = sorted(first)  # a product and its sum are one node by now, which is of no step
        places: dict[fx.Node, int] = {}
        for index, node in enumerate(traced):  # another order: made so, or copied by its reader
            step = node.meta.get(key)
            is_laid = node.target is inductor_prims.force_stride_order
            if is_laid and step == node.args[0].meta.get(key):
                places[node] = places[node.args[0]]
            else:
                is_late = step is not None and made_at and made_at[step] > step
                later = bisect_left(known, made_at[step]) if is_late else len(known)
                places[node] = max(index, first[known[later]]) if later < len(known) else index
        return places

    def uuid(self) -> str:
        """What stands for the pass in keys of caches; the partitioner's key has the source."""
        _, made_at, groups, held_back, _ = self._order
        return f"fxremat: kernels in order, at {made_at}, groups {groups}, held back {sorted(held_back)}"


def _end_groups(nodes: Sequence[Any], numbers: Sequence[int | None]) -> None:
    """Have a backend that runs several loops in one call end their group where the next has a higher number.

    Args:
        nodes: The scheduler's, in the order in which they run.
        numbers: For each of them the number of its group; None where it may be in any.
    """
    from torch._inductor.scheduler import NopKernelSchedulerNode

    ends: dict[Any, set[str]] = {}  # for each device, the names of what is made last in a group
    latest, before = -1, None
    for node, number in zip(nodes, numbers, strict=True):
        if isinstance(node, NopKernelSchedulerNode):
            continue  # nothing runs
        if number is not None and number > latest:
            latest = number
            if before is not None:
                ends.setdefault(before.get_device(), set()).update(before.get_buffer_names())
        before = node
    for device, names in ends.items():
        _flush_behind(nodes[0].scheduler, device, names)


def _flush_behind(scheduler: Any, device: Any, names: Set[str]) -> None:
    """Have a scheduler's backend for a device end its group behind what makes buffers of these names."""
    backend = scheduler.get_backend(device)
    usual = backend.ready_to_flush

    def ready_to_flush() -> bool:
        return usual() or bool(names & scheduler.current_node.get_buffer_names())

    backend.ready_to_flush = ready_to_flush


def by_place(nodes: list[Any], place: Callable[[Any], int]) -> list[Any]:
    """A scheduler's nodes by their places, or behind what they read.

    Args:
        nodes: The nodes; they stay as they are if one stands before what it reads.
        place: Where a node is to run, if what it reads is there.
    """
    writer = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    ready: list[int] = []
    for index, node in enumerate(nodes):
        needed = {writer.get(read.name, index) for read in node.unmet_dependencies} - {index}
        if any(each > index for each in needed):
            return nodes
        ready.append(max([place(node), *(ready[each] for each in needed)]))
    return [nodes[index] for index in sorted(range(len(nodes)), key=lambda each: (ready[each], each))]


def choices(given: Any, may_fuse: Callable[[Origins, Origins], bool]) -> Any:
    """The choices that are in force, Inductor's or the user's, but for what may not be fused.

    Made of the class of those given and with their state, not a copy of it, so that all but ``can_fuse`` is
    theirs, whatever they were constructed with.
    """

    class Choices(type(given)):  # type: ignore[misc]
        def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            may = may_fuse(_origins(node1), _origins(node2))
            return may and bool(given.can_fuse(scheduler, node1, node2, shared_data_score))

    choices = object.__new__(Choices)
    choices.__dict__ = given.__dict__
    return choices


def _origins(node: Any) -> list[list[fx.Node]]:
    """For each buffer of a scheduler's node, the fx node that it was made for, or all those that it computes.

    Inductor does not say what it made a copy for, unless it is a concatenation's.
    """
    found = []
    for each in node.get_nodes():
        if each.node is not None:
            origin = _concatenation(each) or _made_for(each.node)
            found.append(list(each.node.get_origins()) if origin is None else [origin])
    return found


def _made_for(buffer: Any) -> fx.Node | None:
    """The fx node that a buffer was made for.

    Inductor says the last of all that the buffer stands for, such as the expansion of a value to the sizes
    that it has, wherever that stands.
    """
    origin: fx.Node | None = buffer.get_origin_node()
    computed = buffer.get_origins()
    while origin is not None and origin not in computed and getattr(origin.target, "is_view", False):
        origin = origin.all_input_nodes[0]
    return origin


def _concatenation(node: Any) -> fx.Node | None:
    """The concatenation to which a scheduler's node writes what nobody reads before, if there is one."""
    from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode

    readers = [use.node for made in node.get_outputs() for use in made.users]
    cats: list[Any] = [each for each in readers if isinstance(each, NopKernelSchedulerNode)]
    if not cats:
        return None
    known: list[Any] = [each for each in readers if isinstance(each, BaseSchedulerNode) and each.node]
    origins = filter(None, (each.node.get_origin_node() for each in known))
    cat: fx.Node | None = cats[0].node.get_origin_node()
    return cat if cat is not None and all(cat <= origin for origin in origins) else None
