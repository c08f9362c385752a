"""Concatenation: which concatenations are made by the loops of their operands, and which by one of their own.

On a CPU the loops of the operands write to slices of the result. On a GPU they do so where one of them can,
unless another can't and loops alone read the result. An operand whose layout is still free by then has no
other buffer: it is computed right into the first concatenation of it, and read from there. One that another
concatenation holds, that is read through a view, or whose layout an external kernel or a caller has fixed is
copied. So is each of a result that convolutions of the backward read, which lies as these work
(``images.py``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from fxremat._torch import lowered
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import LOOPS, Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import facts

MAX_JOINED = 8  # Inductor's config.max_pointwise_cat_inputs: more operands are never joined in one loop

# Products of matrices, which are written wherever Inductor wants them.
_PRODUCTS = frozenset({ops.aten.addmm, ops.aten.baddbmm, ops.aten.bmm, ops.aten.mm})

# What Inductor takes for a loop beside what is tagged as one, where it looks at who reads a concatenation.
_TAKEN_FOR_LOOPS = frozenset({ops.aten.cat, ops.aten.constant_pad_nd})


class Realized(Protocol):
    """What is known of a schedule's steps by the time that one of them is lowered (``inlining.py``)."""

    graph: JointGraph
    binding: Binding
    kinds: list[Kind]
    bases: list[int]
    pinned: list[bool]
    waits_for: dict[int, int]
    leaves: list[tuple[int, ...]]
    realized: list[bool]
    realized_at: list[int]

    def is_external(self, step: int) -> bool:
        """Whether what a step reads is read by an external kernel."""


class Slices:
    """The concatenations of a schedule to which the loops of their operands write.

    They are taken in order, each when all before it is lowered.

    Attributes:
        cats: Their steps.
        held_in: For each operand that is computed right into one and read from there, the first of them.
    """

    def __init__(self, inlining: Realized) -> None:
        self.cats: set[int] = set()
        self.held_in: dict[int, int] = {}
        self._inlining: Realized = weakref.proxy(inlining)  # of which it is a part
        self._binding = inlining.binding
        self._bases, self._kinds = inlining.bases, inlining.kinds

    def has(self, cat: int) -> bool:
        """Whether loops of its operands write to a concatenation, or it is a loop of its own."""
        reads = self._binding.reads[cat]
        if self._inlining.graph.is_on_cpu or len(reads) > MAX_JOINED:
            return True
        copied = [self._is_copied(read, cat) for read in reads]
        if lowered.writes_shared_to_slices() and any(self._is_shared(read, cat) for read in reads):
            return True
        if any(copied) and all(map(self._is_loop, self._users(cat, cat))):
            return False
        return not all(copied) or any(self._is_reduced(read, cat) for read in reads)

    def take(self, cat: int) -> None:
        """Have loops write to a concatenation, for all of whose own operands there are such by now."""
        self.cats.add(cat)
        for read in self.own_operands(cat):
            if not self._is_copied(read, cat):
                self.held_in[read] = cat

    def own_operands(self, cat: int) -> Sequence[int]:
        """The steps that a concatenation reads themselves, and not through views."""
        reads = dict.fromkeys(self._binding.reads[cat])
        return [read for read in reads if read is not None and self._bases[read] == read]

    def is_there(self, base: int, step: int) -> bool:
        """Whether a value has a buffer by the time that a step is lowered."""
        return self._inlining.realized[base] and self._inlining.realized_at[base] <= step

    def _is_copied(self, read: int | None, cat: int) -> bool:
        """Whether an operand has to be copied, and can't be computed right into a concatenation."""
        if read is None or self._bases[read] != read or read in self.held_in or read in self.cats:
            return True
        is_written_anywhere = self._kinds[read] in LOOPS or self._is_product(read)
        return not (is_written_anywhere and self.is_there(read, cat)) or self._is_fixed(read, cat)

    def _is_product(self, step: int) -> bool:
        return ops.packet(self._inlining.graph.fx_nodes[self._binding.nodes[step]]) in _PRODUCTS

    def _is_fixed(self, step: int, cat: int) -> bool:
        """Whether something has fixed how a value lies by the time that a concatenation of it is lowered.

        A caller or the backward does, a view, or an external kernel before; a convolution or ``mm``, which
        want a buffer in their own order, in any case; and a product that was made to wait, as the result of
        a graph of its own.
        """
        if self._inlining.pinned[step] or step in self._inlining.waits_for:
            return True
        return any(user is not None and self._fixes(user, step, cat) for user in self._users(step, cat))

    def _fixes(self, user: int, step: int, cat: int) -> bool:
        """Whether a user of a value has fixed how it lies."""
        if self._kinds[user] is Kind.VIEW:
            return self._inlining.realized_at[step] <= user < cat
        if not self._inlining.is_external(user):
            return False
        node, graph = self._binding.nodes[user], self._inlining.graph
        is_strict = graph.loops[node].is_product or node in facts(graph).convolutions
        return is_strict or (user < cat and not self._is_product(user))

    def _is_shared(self, read: int | None, cat: int) -> bool:
        """Whether others use an operand too, in loops or before it has a buffer."""
        users = () if read is None else self._users(read, cat)
        if read is None or len(users) < 2:
            return False
        is_inlined = not self.is_there(self._bases[read], cat)
        return is_inlined or any(self._is_loop(user) for user in users if user != cat)

    def _is_loop(self, user: int | None) -> bool:
        """Whether it is a loop that uses a value, views of it followed."""
        if user is None:
            return False
        if self._kinds[user] is Kind.VIEW:
            return all(map(self._is_loop, self._users(user, user)))
        node = self._inlining.graph.fx_nodes[self._binding.nodes[user]]
        is_tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return is_tagged or ops.packet(node) in _TAKEN_FOR_LOOPS

    def _is_reduced(self, read: int | None, cat: int) -> bool:
        """Whether an operand is what a reduction makes, or is computed of that."""
        if read is None:
            return False
        base = self._bases[read]
        made = (base,) if self.is_there(base, cat) else self._inlining.leaves[base]
        return any(self._kinds[each] is Kind.REDUCTION for each in made)

    def _users(self, read: int, step: int) -> Sequence[int | None]:
        """The users of a value in the half of a step, views too; None for the other half, or a caller."""
        boundary, every = self._binding.boundary, self._every_user[read]
        found: list[int | None] = [user for user in every if (user < boundary) == (step < boundary)]
        is_returned = len(found) < len(every) or read in self._returned
        return [*found, None] if is_returned and (read < boundary) == (step < boundary) else found

    @functools.cached_property
    def _returned(self) -> frozenset[int]:
        return frozenset(self._binding.outputs)

    @functools.cached_property
    def _every_user(self) -> Sequence[Sequence[int]]:
        """For each step those that read its value, views too."""
        found: list[list[int]] = [[] for _ in self._binding.nodes]
        for step, reads in enumerate(self._binding.reads):
            for read in dict.fromkeys(reads):
                if read is not None:
                    found[read].append(step)
        return found
