"""Cuts: where the forward is narrow, so that keeping what crosses is cheap.

A *cut* is a position in the forward. It is crossed by the storages that were made at or before it and are
read behind it by a node of the forward that may run again; their bytes are its *width*. With those kept,
everything else of the segment before it can be computed again. A cut may be crossed by several tensors: a
residual stream and a mask, the (h, c) pair of an LSTM step, a U-Net's skips. A reader that runs once asks for
nothing to be kept: the running statistics of BatchNorm, which are written at the forward's end, do not make
its outputs cross every cut. Linear in nodes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxremat.graph.joint import JointGraph


@dataclass(frozen=True, slots=True)
class ForwardLives:
    """The lives of the forward's storages within the forward.

    Attributes:
        born: For each storage, the node that makes it.
        dead: For each storage, its last reader in the forward that may run again (its maker, where none).
        positions: The nodes behind which the forward may be cut, in order.
        widths: For each of those, the bytes that cross it.
    """

    born: dict[int, int]
    dead: dict[int, int]
    positions: tuple[int, ...]
    widths: tuple[int, ...]


def forward_lives(graph: JointGraph) -> ForwardLives:
    """Find where each storage lives in the forward, and how wide each cut is."""
    born: dict[int, int] = {}
    dead: dict[int, int] = {}
    for position in range(graph.num_inputs, graph.boundary):
        node = graph.nodes[position]
        for storage in node.creates:
            born[storage] = dead[storage] = position
        if node.keep is not None:
            continue
        for operand in node.operands:
            for storage in graph.nodes[operand].views:
                dead[storage] = position
    change = [0] * (graph.boundary + 1)
    for storage, position in born.items():
        change[position] += graph.storage_bytes[storage]
        change[dead[storage]] -= graph.storage_bytes[storage]
    positions, widths, width = [], [], 0
    for position in range(graph.num_inputs, graph.boundary):
        width += change[position]
        is_last = position == graph.boundary - 1
        if not is_last and graph.nodes[position + 1].leader is None:
            positions.append(position)
            widths.append(width)
    return ForwardLives(born, dead, tuple(positions), tuple(widths))


def candidates(lives: ForwardLives, widest: int) -> list[int]:
    """Positions where the width is a local minimum of at most ``widest`` bytes.

    Neighbours that the same storages cross count once: the first of them.
    """
    found = []
    changed = {
        position
        for storage, made in lives.born.items()
        if made < lives.dead[storage]
        for position in (made, lives.dead[storage])
    }
    for at, (position, width) in enumerate(zip(lives.positions, lives.widths, strict=True)):
        before = lives.widths[at - 1] if at else width
        after = lives.widths[at + 1] if at + 1 < len(lives.widths) else width
        if width <= widest and before >= width <= after and position in changed:
            found.append(position)
    return found


def narrow_places(lives: ForwardLives) -> Iterable[list[int]]:
    """Sets of candidates for cuts: the narrowest quarter of the local minima, half of them, and all."""
    width_at = dict(zip(lives.positions, lives.widths, strict=True))
    minima = sorted(width_at[place] for place in candidates(lives, max(lives.widths, default=0)))
    if minima:
        for widest in dict.fromkeys((minima[len(minima) // 4], minima[len(minima) // 2], minima[-1])):
            yield candidates(lives, widest)


def crossing(lives: ForwardLives, cuts: Sequence[int]) -> list[int]:
    """The storages that cross at least one of the cuts, in order of making. ``cuts`` ascend."""
    crossed = []
    for storage, position in lives.born.items():
        at = bisect.bisect_left(cuts, position)
        if at < len(cuts) and cuts[at] < lives.dead[storage]:
            crossed.append(storage)
    return crossed


def mirror_everything_but(graph: JointGraph, kept: Iterable[int]) -> dict[str, int]:
    """Mirror count 1 for every node of the forward but those that make the kept storages."""
    keep = set(kept)
    return {
        node.name: 1
        for node in graph.nodes[graph.num_inputs : graph.boundary]
        if keep.isdisjoint(node.creates)
    }
