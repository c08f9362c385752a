"""Replays: what a mirror runs so that it computes what its node has computed, and changes nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from fxremat.graph import ops
from fxremat.graph.generators import redraw, state_of


class Replay(NamedTuple):
    """How a mirror computes what a node has computed.

    Attributes:
        target: What it calls.
        args: What it calls it with.
        kwargs: And by name.
        outputs: How many of the node's outputs it computes, the first ones; None for all.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: int | None = None

    @property
    def operands(self) -> Sequence[fx.Node]:
        """The nodes that it reads."""
        found: list[fx.Node] = []
        fx.node.map_arg((self.args, dict(self.kwargs)), found.append)
        return found


def replay(node: fx.Node) -> Replay:
    """How to compute a node's results again, bit for bit, and change nothing else.

    Batch normalisation in training normalises with the batch's own statistics; the running ones are
    read only to be updated. Its mirror leaves them out, so they are updated once: of its outputs the result,
    the mean and the reciprocal deviation are left. What drew random numbers draws them again from the state
    that was kept. Everything else runs as it did.
    """
    if node.target is ops.aten._native_batch_norm_legit_functional.default and ops.argument(node, "training"):
        named = {name: ops.argument(node, name) for name in ("input", "weight", "bias", "momentum", "eps")}
        args = (named["input"], named["weight"], named["bias"], True, named["momentum"], named["eps"])
        return Replay(ops.aten._native_batch_norm_legit.no_stats, args, {}, outputs=3)
    state = state_of(node)
    if state is not None:
        return Replay(redraw, (state, *state.args, node.target, *node.args), node.kwargs)
    return Replay(node.target, node.args, node.kwargs)
