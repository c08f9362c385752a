"""Inlining: which values Inductor computes inside of their readers, and which it realizes.

The first and the third rule of ``fusion.py``. Linear in steps and reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import LOOPS, Kind
from fxremat.graph.schedule import Binding
from fxremat.inductor.concatenation import Slices
from fxremat.inductor.facts import facts
from fxremat.inductor.layout import parts_read
from fxremat.inductor.operations import MOST, Operations
from fxremat.inductor.products import summed_products
from fxremat.inductor.segments import OWN_BUFFER, waited_for
from fxremat.inductor.shown import State
from fxremat.inductor.terms import Place

# Inductor's defaults: config.realize_reads_threshold, realize_acc_reads_threshold, and that for a CPU.
MAX_READS_WHEN_REUSED = 4
MAX_READS, MAX_READS_ON_CPU = 8, 12


class Inlining:
    """What is realized of a schedule.

    Attributes:
        loops: For each step, what its node computes.
        kinds: For each step, what it is; a sum that is computed with a product is an external kernel, and
            the product is none.
        bases: For each step, that whose buffer its value looks at.
        looked_at: The same, an operator's outputs told apart.
        waits_for: For each step that is made to wait (``order.py``) the one that it waits for.
        readers: For each step, those that read its buffer, views looked through.
        states: For steps of which it was shown, what becomes of their values.
        parts_read: For convolutions, the views through which they read parts of values.
        pinned: For each step, whether the backward or the caller needs its value.
        leaves: For each step, the realized steps that computing it reads.
        buffers_read: The same, but as ``looked_at`` tells them apart.
        parts: For steps that read parts of values, the realized steps that computing them reads, and which
            parts of their values.
        inputs_read: For each step, the nodes of the graph's inputs that computing it reads.
        is_dear: For each pointwise step, whether computing it inside of its readers would be too much work.
        realized: For each step, whether its value is computed where it stands.
        realized_at: For each step that is realized, where: where it stands, or where a window or an external
            kernel first reads it, or another waits for it.
        slices: The concatenations to which the loops of their operands write.
        early_readers: For steps that are realized late, the loops before that, and for those of which there
            is a copy for an external kernel, the loops that don't read it; all compute them themselves.
        realized_readers: For each step, the realized ones that read its value, themselves or through inlined
            steps.
    """

    def __init__(self, graph: JointGraph, binding: Binding, waits: Collection[int] = ()) -> None:
        self.graph = graph
        self.binding = binding
        self.loops = [graph.loops[position] for position in binding.nodes]
        self.kinds = [loop.kind for loop in self.loops]
        self.bases = viewed(graph, binding)
        self.looked_at = looked_at_by(graph, binding)
        self.readers = readers(graph, binding, self.bases)
        self.states = facts(graph).shown.states_of(binding, self.readers)
        self.parts_read = parts_read(graph, binding, self.bases)
        outputs = {self.bases[step] for step in binding.outputs}
        crossing = self._crossing()
        self.pinned = [step in outputs or step in crossing for step in range(len(binding.nodes))]
        needed = {step for step, is_pinned in enumerate(self.pinned) if is_pinned}.union(waits)
        products = summed_products(self.loops, binding.reads, self.readers, needed, graph.is_on_cpu)
        for product, total in products.items():
            self.kinds[product], self.kinds[total] = Kind.POINTWISE, Kind.KERNEL
        self._products = frozenset(products)
        self._sums = facts(graph).sums
        self.waits_for = self._find_waited_for(waits) if waits else {}
        self._waited_by = {before: step for step, before in self.waits_for.items()}
        self._shown_by_strides = self._find_shown_by_strides()
        self._may_be_copied = self._find_copied_views()
        self._hinted_at = self._find_hints()
        self._copied: dict[int, set[int]] = {}  # values of which there is a copy, and who reads that
        nothing: list[tuple[int, ...]] = [()] * len(binding.nodes)
        self.leaves = nothing.copy()
        self.buffers_read = nothing
        self.parts: dict[int, Sequence[tuple[int, Place]]] = {}
        own_inputs = facts(graph).inputs
        self.inputs_read = [own_inputs[position] for position in binding.nodes]
        self.realized = [kind is not Kind.VIEW for kind in self.kinds]  # of pointwise steps it is found out
        self.is_dear = [False] * len(binding.nodes)
        self._is_heavy = [False] * len(binding.nodes)  # if a transcendental function is computed, on a CPU
        self.early_readers: dict[int, list[int]] = {}
        self.realized_at = list(range(len(binding.nodes)))
        self._operations = Operations(graph, binding, self.bases)
        self._reads_places = [False] * len(binding.nodes)  # if one buffer at several places
        self._moves = [False] * len(binding.nodes)  # if what computes it reads elsewhere than it computes
        self.slices = Slices(self)
        self._realize()
        self.realized_readers = self._find_realized_readers()

    def _crossing(self) -> frozenset[int]:
        """The steps of the forward that the backward reads."""
        boundary = self.binding.boundary
        forward = enumerate(self.readers[:boundary])
        return frozenset(step for step, each in forward if each and each[-1] >= boundary)  # they ascend

    def _find_waited_for(self, waits: Collection[int]) -> dict[int, int]:
        """The step that each of those waits for that are made to wait."""
        may_be = [
            step >= self.binding.boundary and (kind in OWN_BUFFER or self._is_handed_over(step))
            for step, kind in enumerate(self.kinds)
        ]
        return waited_for(waits, may_be)

    def waited_by(self, step: int) -> Sequence[int]:
        """The step that is made to wait for another, if one is."""
        return (self._waited_by[step],) if step in self._waited_by else ()

    def _is_handed_over(self, step: int) -> bool:
        """Whether a step is a loop that runs once, and that an external kernel reads."""
        if step in self._products or self.binding.is_mirror[step]:
            return False
        is_loop = self.kinds[step] is Kind.POINTWISE
        return is_loop and any(self.loops[reader].kind is Kind.KERNEL for reader in self.readers[step])

    def _find_shown_by_strides(self) -> frozenset[int]:
        """The steps whose values a view shows that names strides."""
        strided = facts(self.graph).strided_views
        views = (step for step, node in enumerate(self.binding.nodes) if node in strided) if strided else ()
        looked_at = (self.binding.reads[step][0] for step in views)
        return frozenset(self.bases[each] for each in looked_at if each is not None)

    def _find_copied_views(self) -> dict[int, set[int]]:
        """For pointwise steps that external kernels read through one view, and get a copy of, who reads that.

        Inductor copies what a view shows that has several readers, one of them a product by itself, unless
        what it looks at is realized. Other loops compute that themselves.
        """
        kinds, bases, reads = self.kinds, self.bases, self.binding.reads
        products = (step for step, loop in enumerate(self.loops) if loop.is_product)
        read = {each for step in products if step not in self._products for each in reads[step]}
        views = {each: bases[each] for each in read if each is not None and kinds[each] is Kind.VIEW}
        looked_at = {base for base in views.values() if kinds[base] is Kind.POINTWISE}
        looked_at = {base for base in looked_at if not self.pinned[base] and base not in self.states}
        users: dict[int, set[int]] = {}
        for step, own in enumerate(reads) if looked_at else ():
            for each in own:
                if each is not None and bases[each] in looked_at:
                    users.setdefault(each, set()).add(step)
        found = {}
        for view, base in views.items():
            if base in looked_at and len(users[view]) > 1:
                shown = self._shown_by(view, users)
                if not any(self._needs_buffer(reader, base) for reader in set(self.readers[base]) - shown):
                    found[base] = shown
        return found

    def _shown_by(self, view: int, users: Mapping[int, Iterable[int]]) -> set[int]:
        """All that reads a view, or a view of it."""
        found, stack = set[int](), [view]
        while stack:
            own = set(users.get(stack.pop(), ())) - found
            found |= own
            stack += own
        return found

    def _find_hints(self) -> dict[int, int]:
        """For pointwise steps that an external kernel reads through a view of several users, that view.

        Inductor sees there that the kernel will want a buffer.
        """
        nodes, reads, hinting = self.binding.nodes, self.binding.reads, facts(self.graph).hinting
        views: dict[int, set[int]] = {}  # and who reads them
        for step, position in enumerate(nodes):
            if position in hinting and step not in self._products:
                views |= {
                    each: set() for each in reads[step] if each is not None and self._is_loop_seen(each)
                }
        for step, own in enumerate(reads) if views else ():
            for each in own:
                if each in views and self._is_of_one_half(each, step):
                    views[each].add(step)
        found: dict[int, int] = {}
        for view in sorted(views):
            if len(views[view]) > 1 and self._is_of_one_half(self.bases[view], view):
                found.setdefault(self.bases[view], view)
        return found

    def _is_loop_seen(self, step: int) -> bool:
        """Whether a step is a view of what a loop computes."""
        return self.kinds[step] is Kind.VIEW and self.kinds[self.bases[step]] is Kind.POINTWISE

    def _is_of_one_half(self, first: int, second: int) -> bool:
        """Whether two steps are both of the forward, or of the backward."""
        return (first < self.binding.boundary) == (second < self.binding.boundary)

    def _realize(self) -> None:
        """Find what computing each step reads, inlined operands looked through, and what is realized."""
        realized, inputs, is_heavy = self.realized, self.inputs_read, self._is_heavy
        bases, looked_at = self.bases, self.looked_at
        nodes, parts = self.binding.nodes, facts(self.graph).part_views
        for step, (kind, reads) in enumerate(zip(self.kinds, self.binding.reads, strict=True)):
            found: list[int] = []
            buffers: list[int] = []
            operations, heavy, moves = 0, self.loops[step].is_expensive, self.loops[step].is_moving
            if self.loops[step].is_cat and self.slices.has(step):
                self._write_to(step)
            for read in reads:
                if read is None:
                    operations += 1
                    continue
                moves = moves or nodes[read] in parts
                if inputs[read] and not realized[read]:
                    inputs[step] |= inputs[read]
                base = bases[read]
                is_late = self.realized_at[base] > step or (
                    base in self._copied and step not in self._copied[base]
                )
                if is_late and bases[step] == step:
                    self.early_readers.setdefault(base, []).append(step)
                    inputs[step] |= inputs[base]
                if realized[base] and not is_late:
                    found.append(base)
                    buffers.append(looked_at[read])
                    operations += 1
                else:
                    found += self.leaves[base]
                    buffers += self.buffers_read[base]
                    operations += self._operations.counts[base]
                    heavy = heavy or is_heavy[base]
                    moves = moves or self._moves[base]
            if bases[step] != step:  # who reads a view reads what it looks at
                continue
            if moves:
                self._find_parts(step, reads)
            self.leaves[step] = self.buffers_read[step] = tuple(dict.fromkeys(found))
            if buffers != found:
                self.buffers_read[step] = tuple(dict.fromkeys(buffers))
            if kind is Kind.POINTWISE:
                is_heavy[step] = heavy and self.graph.is_on_cpu
                self._moves[step] = moves
                self.is_dear[step] = self._costs_much(step, operations)
                realized[step] = self._must_realize(step)
                if realized[step]:
                    if step in self._may_be_copied and not (self.is_dear[step] or self._reads_several(step)):
                        self._copied[step] = self._may_be_copied[step]
                    place = self._place(step)
                    self.realized_at[step] = min((place, *self.waited_by(step)))

    def _find_parts(self, step: int, reads: Iterable[int | None]) -> None:
        """Find which parts of values a step reads, if it reads any."""
        found: dict[tuple[int, Place], None] = {}
        for read in reads:
            if read is not None:
                base = self.bases[read]
                place = self._operations.picked(self.binding.nodes[read], self.realized[base])
                known = {(base, ())} if self.realized[base] else self.parts_of(base)
                found |= {(leaf, place + inside): None for leaf, inside in known}
        if any(place for _, place in found):
            self.parts[step] = tuple(found)

    def parts_of(self, step: int) -> Sequence[tuple[int, Place]]:
        """The realized steps that computing a step reads, and which parts of their values."""
        return self.parts.get(step) or [(leaf, ()) for leaf in self.leaves[step]]

    def _write_to(self, cat: int) -> None:
        """Have loops write to a concatenation: those of what it reads are there by now, if not before."""
        for read in self.slices.own_operands(cat):
            is_loop = self.kinds[read] is Kind.POINTWISE and read not in self._products
            if is_loop and not self.slices.is_there(read, cat):
                self.realized[read], self.realized_at[read] = True, cat
                before = [reader for reader in self.readers[read] if reader < cat]
                if before:
                    self.early_readers[read] = before
        self.slices.take(cat)

    def _must_realize(self, step: int) -> bool:
        """Whether a pointwise value is computed where it stands, for its readers can't compute it."""
        if step in self._products:
            return False
        if self.pinned[step] or self.is_sum(step):
            return True
        if step in self.states:
            return self.states[step] is not State.INLINED
        loop = self.loops[step]
        if self.is_dear[step] or loop.is_maximum or loop.is_draw or step in self.slices.cats:
            return True
        if step in self._shown_by_strides or (step in self._hinted_at and self._reads_several(step)):
            return True
        return any(self._needs_buffer(reader, step) for reader in self.readers[step])

    def is_sum(self, step: int) -> bool:
        """Whether a step is a sum of gradients that is stored."""
        return self.binding.nodes[step] in self._sums

    def is_external(self, step: int) -> bool:
        """Whether what a step reads is read by an external kernel: its own, or that of its sum."""
        return self.kinds[step] is Kind.KERNEL or step in self._products

    def _place(self, step: int) -> int:
        """Where a pointwise value is realized."""
        if self.pinned[step] or self.is_dear[step] or step in self._shown_by_strides or self.is_sum(step):
            return step
        loop, readers = self.loops[step], self.readers[step]
        if loop.is_maximum or loop.is_draw or loop.is_cat or not readers:
            return step
        if len(readers) == 1 and self.loops[readers[0]].is_window:
            return readers[0]
        kernels = [each for each in readers if self.is_external(each) and not self.loops[each].is_put]
        if not kernels:
            return step
        if not self._reads_several(step):
            return kernels[0]
        if len(readers) > 1 and any(self._is_hint(each, step) for each in kernels):
            return step
        return min(kernels[0], self._hinted_at.get(step, kernels[0]))

    def stored_as(self, step: int) -> int:
        """The step whose sizes a realized value is stored with: its own, or a view of images of other sizes.

        A loop that is computed for a convolution which reads such a view goes through that.
        """
        if self.realized_at[step] == step:
            return step
        images, nodes, kernel = facts(self.graph).images, self.binding.nodes, self.made_for(step)
        if kernel is None or nodes[step] not in images:
            return step
        views = (each for each in self._read_by(kernel, step) if nodes[each] in images)
        return next(views, step)

    def made_for(self, step: int) -> int | None:
        """The external kernel right before which a value is realized, since it reads it; None elsewhere."""
        place = self.realized_at[step]
        if place == step or not self.is_external(place):
            return None
        return place if self._read_by(place, step) else None

    def shown_as(self, step: int) -> int:
        """The view of a value that a convolution reads, if it is made for that; itself elsewhere."""
        kernel = self.made_for(step)
        if kernel is None or not ops.has_convolution(self.graph.fx_nodes[self.binding.nodes[kernel]]):
            return step
        return self._read_by(kernel, step)[0]

    def _read_by(self, kernel: int, step: int) -> Sequence[int]:
        """How a kernel reads a value: itself, or views of it."""
        reads = self.binding.reads[kernel]
        return [each for each in reads if each is not None and self.bases[each] == step]

    def _is_hint(self, kernel: int, step: int) -> bool:
        """Whether Inductor sees at a step that an external kernel will want a buffer of its value."""
        is_hinting = self.binding.nodes[kernel] in facts(self.graph).hinting and kernel not in self._products
        return is_hinting and step in self.binding.reads[kernel]

    def _needs_buffer(self, reader: int, step: int) -> bool:
        """Whether a reader can't compute a value itself; it may get copies of parts of it instead."""
        loop = self.loops[reader]
        if not self.is_external(reader):
            return loop.is_window and self._reads_several(step)
        if loop.is_put:
            return False
        if not loop.is_scatter and reader not in self.parts_read:
            return True
        parts = self.parts_read.get(reader, ())
        own = self.binding.reads[reader][1 if loop.is_scatter else 0 :]
        reads = (read for read in own if read is not None)
        return any(self.bases[read] == step and read not in parts for read in reads)

    def _num_reads(self, step: int) -> int:
        """Buffers that computing a step reads."""
        return len(self.buffers_read[step]) + len(self.inputs_read[step])

    def _costs_much(self, step: int, operations: int) -> bool:
        """Whether computing a value inside of its readers would be too much work.

        Args:
            step: The step.
            operations: Those of what it reads.
        """
        is_shared, buffers = len(self.readers[step]) > 1, self._num_reads(step)
        count, reads = self._operations.take(step, operations, buffers, self._moves[step], self.realized)
        self._reads_places[step] = reads > buffers
        is_long = count > self._operations.limit
        if (is_long or self._is_heavy[step]) and (is_shared or self._is_broadcast(step)):
            return True
        if is_long and (count > MOST or self._reads_several(step)):
            return True
        most = MAX_READS_ON_CPU if self.graph.is_on_cpu else MAX_READS
        return reads > (MAX_READS_WHEN_REUSED if is_shared else most)

    def _is_broadcast(self, step: int) -> bool:
        """Whether a loop reads each element of a value several times, since it is broadcast."""
        own = 2 * self.loops[step].elements
        readers = (self.loops[reader] for reader in self.readers[step])
        return any(each.kind in LOOPS and not each.is_moving and own <= each.elements for each in readers)

    def _reads_several(self, step: int) -> bool:
        """Whether computing a step reads several buffers of several elements, or one at several places."""
        if self._reads_places[step]:
            return True
        loops, nodes = self.graph.loops, self.binding.nodes
        large = sum(loops[each].elements > 1 for each in self.inputs_read[step])
        return large + sum(loops[nodes[each]].elements > 1 for each in self.buffers_read[step]) > 1

    def _find_realized_readers(self) -> list[Sequence[int]]:
        """For each step, the realized ones that read its value, themselves or through inlined steps."""
        realized, early = self.realized, self.early_readers
        every: list[Sequence[int]] = list(self.readers)  # these stand behind what they read
        for step in reversed(range(len(every))):
            readers = every[step]
            if step in early or any(each in early or not realized[each] for each in readers):
                own = early.get(step, ())
                through = ((reader, *early.get(reader, ())) for reader in readers if reader not in own)
                found = [(each,) if realized[each] else every[each] for each in itertools.chain(*through)]
                every[step] = list(dict.fromkeys(itertools.chain(*found)))
        return every


# -- which steps read which values, views looked through


def viewed(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at; itself if it is no view, or views an input."""
    return _followed(binding, facts(graph).viewed_places)


def looked_at_by(graph: JointGraph, binding: Binding) -> list[int]:
    """For each step, that whose buffer its value looks at, where an operator's outputs are told apart.

    Such an output is the step of its ``getitem``.
    """
    return _followed(binding, facts(graph).picked_places)


def _followed(binding: Binding, places: Sequence[int | None]) -> list[int]:
    """For each step, where the operands in these places lead, from one to the next."""
    found = list(range(len(binding.nodes)))
    for step, position in enumerate(binding.nodes):
        place = places[position]
        if place is not None:
            source = binding.reads[step][place]
            found[step] = step if source is None else found[source]
    return found


def readers(graph: JointGraph, binding: Binding, bases: Sequence[int]) -> list[list[int]]:
    """For each step that is no view, the steps other than views that read its buffer, ascending.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        bases: What ``viewed`` says.
    """
    found: list[list[int]] = [[] for _ in binding.nodes]
    kinds = facts(graph).kinds
    for step, (position, reads) in enumerate(zip(binding.nodes, binding.reads, strict=True)):
        if kinds[position] is Kind.VIEW:
            continue
        for base in dict.fromkeys([bases[read] for read in reads if read is not None]):
            found[base].append(step)
    return found
