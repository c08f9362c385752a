"""Nodes: what planning needs to know of each node of an fx graph, and how it is found out.

A *storage* is a piece of memory that one node allocates. Views share it; each output of an operator with
several is one of its own. The nodes whose values share a storage are its alias set. A storage is as large as
the result that lies in it, but for two kinds of operators whose results are a part of what they allocate.
Nodes and storages are referred to by index. Linear in nodes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.graph import ops
from fxremat.graph.generators import state_of
from fxremat.graph.region import Order, order_of
from fxremat.graph.replays import replay

MIRROR = "fxremat_mirror_of"  # key in a mirror's fx meta: the name of the node that it computes again
STEP = (
    "fxremat_step"  # key in the fx meta of a rewritten graph's nodes: the step of the schedule that each is
)

TRACED = "fxremat_traced"  # key in the fx meta of a node whose value was corrected: what was traced


class Phase(enum.Enum):
    """The part a node plays in a training step; see the module's terms."""

    INPUT = "input"
    FORWARD = "forward"
    DEFERRED = "deferred"
    BACKWARD = "backward"


# Clone the storage of their first operand whole, however little of it that views, and write to the clone.
_STORAGE_CLONES = frozenset(
    {
        ops.aten.as_strided_scatter,
        ops.aten.copy,
        ops.aten.diagonal_scatter,
        ops.aten.select_scatter,
        ops.aten.slice_scatter,
    }
)

# Compute in memory as large as their operands and shrink the tensor to their result, which keeps all of it.
_SHRINKING = frozenset(
    {
        ops.aten.binary_cross_entropy,
        ops.aten.col2im,
        ops.aten.mse_loss,
        ops.aten.smooth_l1_loss,
        ops.aten.soft_margin_loss,
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a JointGraph. Nodes and storages are referred to by index.

    Attributes:
        name: The fx node's name, as schedules spell it.
        operands: The nodes it reads, each once, in order of their first use.
        creates: The storages that running it allocates.
        recreates: The storages that running it a second time allocates.
        views: The storages that its value keeps alive.
        shares: The operand whose storages it views, if it creates none.
        leader: The operator directly behind which it stands, for a ``getitem``.
        keep: Why it may not run a second time; None if it may.
        at_least: How often the user wants it computed again if the backward needs it.
        at_most: How often the user allows it to be; None for any number.
        wish: ``"save"`` or ``"recompute"``: what the user prefers where planners are free.
        ordered: Whether it must keep its place among the ordered nodes: effects, random numbers, and what
            reads an input that the program writes to.
    """

    name: str
    phase: Phase
    operands: tuple[int, ...] = ()
    creates: tuple[int, ...] = ()
    recreates: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    shares: int | None = None
    leader: int | None = None
    keep: str | None = None
    at_least: int = 0
    at_most: int | None = None
    wish: str = ""
    ordered: bool = False


def analyse(
    fx_nodes: Sequence[fx.Node], output: fx.Node, phases: Sequence[Phase], forbidden: frozenset[str]
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The nodes of a graph in canonical order, and the bytes of each storage.

    Args:
        fx_nodes: All nodes but the output.
        output: The output node.
        phases: The phase of each node.
        forbidden: Names of nodes that may not run a second time, besides those known not to.
    """
    index = {node: position for position, node in enumerate(fx_nodes)}
    mutated = _readers_of_mutated(fx_nodes, output)
    storages = _Storages()
    nodes: list[Node] = []
    for node, phase in zip(fx_nodes, phases, strict=True):
        creates, views, shares = storages.add(node)
        order = order_of(node) if phase is Phase.FORWARD else Order()
        keep = "it is forbidden" if node.name in forbidden else _keep_reason(node, node in mutated, order)
        nodes.append(
            Node(
                node.name,
                phase,
                tuple(index[operand] for operand in _operands(node)),
                creates=creates,
                recreates=creates[: replay(node).outputs],
                views=views,
                shares=None if shares is None else index[shares],
                leader=index[shares] if shares is not None and ops.is_getitem(node) else None,
                keep=keep if phase is not Phase.INPUT else None,
                at_least=order.at_least,
                at_most=order.at_most,
                wish=order.wish,
                ordered=ops.has_effect(node) or ops.is_random(node) or node in mutated,
            )
        )
    return tuple(nodes), tuple(storages.sizes)


def _operands(node: fx.Node) -> Sequence[fx.Node]:
    """What the node reads; what draws random numbers counts the state from which it may draw them again."""
    state = state_of(node)
    return node.all_input_nodes if state is None else [*node.all_input_nodes, state]


def _keep_reason(node: fx.Node, reads_mutated: bool, order: Order) -> str | None:
    if order.at_most == 0:
        return order.reason
    if node.meta.get("recompute") is graphs.CheckpointPolicy.MUST_SAVE:
        return "its checkpoint policy is MUST_SAVE"  # outside of the forward, where users order nothing
    if reads_mutated:
        return "it reads an input that the program writes to"
    if ops.is_getitem(node) and _is_statistics_update(node):
        return "it is an update of running statistics"
    if any(None in map(graphs.hint, tensor.shape) for tensor in ops.tensors(node.meta.get("val"))):
        return "its size is not known"
    return ops.keep_reason(node, is_declared_pure=order.at_least > 0)


def _is_statistics_update(node: fx.Node) -> bool:
    """Whether a ``getitem`` picks an output that a replay leaves out."""
    position, outputs = node.args[1], replay(node.all_input_nodes[0]).outputs
    return outputs is not None and isinstance(position, int) and position >= outputs


def _readers_of_mutated(nodes: Sequence[fx.Node], output: fx.Node) -> frozenset[fx.Node]:
    """Nodes that read again, directly or through a view, an input that the program writes to.

    It would be the new value. The writes are ``copy_`` nodes, and what the runtime copies back when the
    forward has ended, which the outputs' descriptions tell.
    """
    described = graphs.leaves(output.meta.get("desc"))
    written = [graphs.mutated_input_of(description) for description in described]
    tainted = {
        n for n in nodes if n.op == "placeholder" and n.meta.get("desc") in written and "desc" in n.meta
    }
    tainted |= {n.all_input_nodes[0] for n in nodes if n.target is ops.aten.copy_.default}
    shown = ops.roots(nodes) if tainted else {}
    tainted = {shown[each] for each in tainted}
    return frozenset(node for node in shown if any(shown[each] in tainted for each in replay(node).operands))


class _Storages:
    """Gives each node its storages; ``slots`` holds those of each output of an operator with several.

    Outputs are a tuple, or a mapping by name where the operator is a kernel of the user's.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.views: dict[fx.Node, tuple[int, ...]] = {}
        self.slots: dict[fx.Node, dict[object, tuple[int, ...]]] = {}

    def add(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], fx.Node | None]:
        """Returns what the node creates, what its value views, and the operand it shares with."""
        shares = node.all_input_nodes[0] if ops.is_getitem(node) else ops.viewed_operand(node)
        if node.op in ("placeholder", "get_attr"):
            created: tuple[int, ...] = ()
            self.views[node] = ()
        elif shares is None:
            created = self._create(node)
        else:
            created = ()
            self.views[node] = self._picked(node, shares) if ops.is_getitem(node) else self.views[shares]
        return created, self.views[node], shares

    def _create(self, node: fx.Node) -> tuple[int, ...]:
        value = node.meta.get("val")
        several = value if isinstance(value, (list, tuple)) else [value]
        outputs = value if isinstance(value, dict) else dict(enumerate(several))
        self.slots[node] = {key: self._allocate(output) for key, output in outputs.items()}
        if ops.packet(node) in _STORAGE_CLONES:
            self.sizes[-1] = max(self.sizes[-1], self._cloned_bytes(node.all_input_nodes[0]))
        if ops.packet(node) in _SHRINKING:
            self.sizes[-1] = max(self.sizes[-1], *map(_elements_bytes, node.all_input_nodes))
        created = tuple(storage for slot in self.slots[node].values() for storage in slot)
        self.views[node] = created
        return created

    def _cloned_bytes(self, node: fx.Node) -> int:
        """Bytes of the storage that a value lies in, which a clone of it takes as well."""
        tensor = node.meta["val"]
        if tensor.layout is not torch.strided:
            return 0  # its elements are cloned, which are the result's
        if _is_expanded(tensor):
            return _elements_bytes(node)  # as well, though torch 2.11 traces an expanded result
        if self.views[node]:
            return self.sizes[self.views[node][0]]
        return graphs.hint(tensor.untyped_storage().nbytes()) or 0  # the caller's, as it was traced

    def _allocate(self, output: object) -> tuple[int, ...]:
        sizes = [ops.storage_bytes(tensor) for tensor in ops.tensors(output)]
        self.sizes.extend(sizes)
        return tuple(range(len(self.sizes) - len(sizes), len(self.sizes)))

    def _picked(self, node: fx.Node, source: fx.Node) -> tuple[int, ...]:
        return self.slots.get(source, {}).get(node.args[1], self.views[source])


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of the tensor share their place in memory."""
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    return any(graphs.hint(step) == 0 and graphs.hint(size) != 1 for size, step in layout)


def _elements_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor, each element in a place of its own; 0 where a size is unknown."""
    tensor: torch.Tensor = node.meta["val"]
    return math.prod(graphs.hint(size) or 0 for size in tensor.shape) * tensor.dtype.itemsize


def boundary_of(order: Sequence[Node], is_mirror: Sequence[bool] = ()) -> int:
    """Where in an order of nodes the backward begins: behind the forward and the ``getitem`` that follow it.

    Args:
        order: Nodes as they run, inputs among them or not.
        is_mirror: For each, whether it ran before, which does not end the forward; empty if none did.
    """
    early = Phase.INPUT, Phase.FORWARD
    backwards = range(len(order) - 1, -1, -1)
    ends = (at for at in backwards if order[at].phase in early and not (is_mirror and is_mirror[at]))
    boundary = next(ends, -1) + 1
    while boundary < len(order) and order[boundary].leader is not None:
        boundary += 1
    return boundary
