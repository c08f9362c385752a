"""Annotations: what users say in their model about keeping and computing again.

``with fxremat.region(...)`` is the mirror attribute of Chen et al. 2016 (Sec. 4.5). It marks the operators
that run inside, and every planner obeys, at every budget:

    with fxremat.region(keep=True):        # these values are never computed again
    with fxremat.region(mirror=2):         # dropped, and computed again up to twice: Algorithm 2's m(v)
    with fxremat.region(recompute=True):   # dropped, and computed again as often as the planner likes

An order to compute again declares the custom operators that it stands for to be pure; of no other operator it
overrules why it is kept. The tags of ``torch.utils.checkpoint`` mean the same: MUST_SAVE and MUST_RECOMPUTE
are orders, PREFER_SAVE and PREFER_RECOMPUTE are wishes, which hold where a budget leaves the choice.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat import given
from fxremat._torch import graphs
from fxremat.errors import GraphError, InvalidOptionError, shown

KEY = "fxremat"  # of the annotation in node.meta["custom"]

_outside: dict[str, None] = {}


@graphs.traced_with_callers
def region(
    *, keep: bool = False, mirror: int | None = None, recompute: bool = False
) -> AbstractContextManager[Any]:
    """Mark the operators that run inside; regions nest, and the innermost one counts.

    Outside of a model that is being compiled or captured it does nothing. What the backward needs of the last
    value of a marked part is computed again, too, and so is all that this needs; let the values that shall be
    kept between two parts stand outside of both.

    Args:
        keep: The values inside are never computed again.
        mirror: The mirror count of the values inside; 0 is ``keep``. Copies that nobody reads do not run.
        recompute: The values inside are dropped and computed again, as often as the planner likes. Like a
            mirror count above 0 this says of a custom operator that it may run again: it gives the same, and
            has no effect.

    Raises:
        InvalidOptionError: Not exactly one of the three is given; ``keep`` or ``recompute`` is neither True
            nor False; or ``mirror`` is no int of 0 or more. In a model that is being compiled, too.

    Example:
        >>> with region(recompute=True):
        ...     y = torch.relu(torch.ones(2))
    """
    times = _times(keep, mirror, recompute)
    order: dict[str, Any] = {"recompute": True} if times is None else {"mirror": times}
    if not torch.compiler.is_compiling():
        frame = sys._getframe(1)
        order["source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not graphs.is_tracing():
            _outside[order["source"]] = None
    return graphs.annotate({KEY: order})


# Dynamo calls it in place of tracing it, so that its error reaches the user as it is.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _times(keep: object, mirror: object, recompute: object) -> int | None:
    """How often a region orders to compute again; None for any number."""
    kept, again = given.flag("keep", keep), given.flag("recompute", recompute)
    if kept + again + (mirror is not None) != 1:
        raise InvalidOptionError("region", "give one of keep=True, mirror=<times>, recompute=True.")
    if mirror is None:
        return 0 if kept else None
    times = given.whole(mirror) if isinstance(mirror, int) else None  # Dynamo has no other kinds of it
    if times is None:
        expected = "how often to compute again, an int of 0 or more"
        raise InvalidOptionError("mirror", f"got {shown(mirror)}, expected {expected}.")
    return times


def regions_outside() -> tuple[str, ...]:
    """``file:line`` of the regions that this process ran outside of any graph, where they do nothing."""
    return tuple(_outside)


@dataclass(frozen=True, slots=True)
class Order:
    """What the user says about one node.

    Attributes:
        at_least: How often its value has to be computed again if the backward needs it.
        at_most: How often it may be; None for any number.
        wish: ``"save"``, ``"recompute"`` or nothing: what to do where it is free.
        reason: Who says so.
    """

    at_least: int = 0
    at_most: int | None = None
    wish: str = ""
    reason: str = ""


def order_of(node: fx.Node) -> Order:
    """The region and the checkpoint policy of a node.

    Raises:
        GraphError: They contradict each other.
    """
    order, tag = _region_order(node), _policy_order(node)
    if order is None or (tag.at_least == 0 and tag.at_most is None):
        return order or tag
    if (order.at_least > 0 and tag.at_most == 0) or (tag.at_least > 0 and order.at_most == 0):
        raise GraphError(node.name, f"{order.reason}, but {tag.reason}; take one of them back")
    return order


def region_mark(node: fx.Node) -> dict[str, Any] | None:
    """What the innermost region around a node says, as the trace keeps it."""
    marked: dict[str, Any] | None = (node.meta.get("custom") or {}).get(KEY)
    return marked


def _region_order(node: fx.Node) -> Order | None:
    marked = region_mark(node)
    if marked is None:
        return None
    if marked.get("recompute"):
        return Order(at_least=1, reason="its region says recompute=True")
    count = marked["mirror"]
    return Order(count, count, reason=f"its region says mirror={count}" if count else "its region says keep")


def _policy_order(node: fx.Node) -> Order:
    policy = node.meta.get("recompute")
    if policy is graphs.CheckpointPolicy.MUST_SAVE:
        return Order(at_most=0, reason="its checkpoint policy is MUST_SAVE")
    if policy is graphs.CheckpointPolicy.MUST_RECOMPUTE:
        return Order(at_least=1, reason="its checkpoint policy is MUST_RECOMPUTE")
    if policy is graphs.CheckpointPolicy.PREFER_SAVE:
        return Order(wish="save", reason="its checkpoint policy is PREFER_SAVE")
    if policy is graphs.CheckpointPolicy.PREFER_RECOMPUTE:
        return Order(wish="recompute", reason="its checkpoint policy is PREFER_RECOMPUTE")
    return Order()
