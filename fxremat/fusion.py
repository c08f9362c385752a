"""Fusion: which values of a schedule get a buffer, and when the kernel that makes them runs.

Without fusion every step is a kernel and every value has a buffer. Under Inductor three things differ:

1. *Inlining.* A pointwise value with few reads is not computed where it stands but inside each of its
   readers; what it reads is then held until the last of those has run. It is realized all the same if the
   backward or the caller needs it, if an external kernel reads it, or if it is read more than once and
   expensive (more than 4 buffers read, or a transcendental function).
2. *Fusion.* Realized loops over the same elements become one kernel where no path between them leaves it:
   a loop with what it reads, and loops near each other that read the same buffer. A value that only its own
   kernel reads needs no buffer. Reductions over different dimensions do not fuse. The kernel runs where the
   first of its loops stands, or as soon as all that it reads is there.
3. *In place.* A loop writes over an operand of the same size that nothing else reads.
4. *Layout.* Convolutions work channels last. What they read of the caller's (weights, images) is copied at
   the forward's start, and the copy is held as long as a convolution or its gradient reads it.

This is a model of Inductor's defaults, not Inductor: it sees operators and sizes, not loop indices. How far
it is off is a tested figure (docs/limits). Linear in steps and reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxremat.errors import InvalidOptionError
from fxremat.graph import JointGraph
from fxremat.ops import Kind
from fxremat.schedule import Binding

FUSIONS = ("none", "inductor")

# Inductor's defaults: config.realize_reads_threshold, realize_acc_reads_threshold, max_fusion_size, and the
# distance in its scheduler's are_long_distant_nodes.
MAX_READS_WHEN_REUSED = 4
MAX_READS = 8
MAX_KERNEL_NODES = 64
MAX_DISTANCE = 64

MAX_VISITED = 64  # kernels that the search for a path looks at before it takes one for found


@dataclass(frozen=True, slots=True)
class Lowering:
    """What a code generator makes of a schedule.

    Attributes:
        materialised: For each step, whether its value gets a buffer.
        runs_at: For each step, the step at which the kernel that computes it runs.
        read_until: For each step, the last step at which its operands are read on its behalf.
        reused_bytes: Pairs (step, bytes): a kernel that writes its result over an operand that dies there.
        copied_bytes: Pairs (step, bytes): a copy of an input that is made at the start and held to the step.
    """

    materialised: Sequence[bool]
    runs_at: Sequence[int]
    read_until: Sequence[int]
    reused_bytes: Sequence[tuple[int, int]] = ()
    copied_bytes: Sequence[tuple[int, int]] = ()


def lower(graph: JointGraph, binding: Binding, fusion: str) -> Lowering:
    """Decide for each step whether its value gets a buffer.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        fusion: ``"none"`` or ``"inductor"``.

    Raises:
        InvalidOptionError: Another fusion is named.
    """
    steps = range(len(binding.nodes))
    if fusion == "none" or not graph.fx_nodes:
        return Lowering([True] * len(steps), steps, steps)
    if fusion != "inductor":
        raise InvalidOptionError.bad_value("fusion", fusion, FUSIONS)
    return _Inductor(graph, binding).lower()


@dataclass(slots=True, eq=False)
class _Kernel:
    """A group of steps that run as one kernel; an external kernel is a group of its own."""

    elements: int
    reduction: tuple[int, int] | None
    steps: list[int] = field(default_factory=list)
    producers: list[_Kernel] = field(default_factory=list)
    is_loop: bool = True
    runs_at: int = 0
    ordinal: int = 0

    def admits(self, elements: int, reduction: tuple[int, int] | None) -> bool:
        """Whether a loop over so many elements can be fused into this kernel."""
        if not self.is_loop or len(self.steps) >= MAX_KERNEL_NODES:
            return False
        if reduction is not None and self.reduction is not None:
            return reduction == self.reduction
        if reduction is not None:
            return self.elements in reduction
        return elements == self.elements or (self.reduction is not None and elements in self.reduction)


class _Inductor:
    """One pass of the model over a schedule."""

    def __init__(self, graph: JointGraph, binding: Binding) -> None:
        self.graph = graph
        self.binding = binding
        self.loops = graph.loops
        self.readers = self._readers()
        outputs = {self._base(step) for step in binding.outputs}
        self.pinned = [step in outputs or self._crosses(step) for step in range(len(binding.nodes))]
        self.leaves: list[tuple[int, ...]] = []  # for each step, the realized steps that computing it reads
        self.realized: list[bool] = []
        self.kernels: list[_Kernel | None] = []
        self.latest_reader: dict[int, _Kernel] = {}  # of each buffer, among loops
        self.realized_count = 0

    def lower(self) -> Lowering:
        """Realize, fuse, time, and reuse, in this order."""
        for step in range(len(self.binding.nodes)):
            self._realize(step)
        for step in range(len(self.binding.nodes)):
            self.kernels.append(self._fuse(step) if self.realized[step] else None)
        self._time_kernels()
        runs_at, read_until = self._times()
        materialised = [self._materialised(step) for step in range(len(self.binding.nodes))]
        reuses = list(self._reuses(materialised, read_until))
        return Lowering(materialised, runs_at, read_until, reuses, list(self._copies()))

    # -- what reads what, views looked through

    def _kind(self, step: int) -> Kind:
        return self.loops[self.binding.nodes[step]].kind

    def _base(self, step: int) -> int:
        """The step whose buffer a view looks at; the step itself if it is no view, or views an input."""
        while self._kind(step) is Kind.VIEW:
            node = self.graph.nodes[self.binding.nodes[step]]
            if node.shares is None:
                return step
            source = self.binding.reads[step][node.operands.index(node.shares)]
            if source is None:
                return step
            step = source
        return step

    def _readers(self) -> list[list[int]]:
        readers: list[list[int]] = [[] for _ in self.binding.nodes]
        self.bases = [self._base(step) for step in range(len(self.binding.nodes))]
        for step, reads in enumerate(self.binding.reads):
            if self._kind(step) is Kind.VIEW:
                continue
            for base in dict.fromkeys(self.bases[read] for read in reads if read is not None):
                readers[base].append(step)
        return readers

    def _crosses(self, step: int) -> bool:
        boundary = self.binding.boundary
        return step < boundary and any(reader >= boundary for reader in self.readers[step])

    # -- the three rules

    def _realize(self, step: int) -> None:
        reads = (self.bases[read] for read in self.binding.reads[step] if read is not None)
        found: dict[int, None] = {}
        for base in reads:
            found.update(dict.fromkeys((base,) if self.realized[base] else self.leaves[base]))
        self.leaves.append(tuple(found))
        self.realized.append(self._must_realize(step, len(found)))

    def _must_realize(self, step: int, reads: int) -> bool:
        loop = self.loops[self.binding.nodes[step]]
        if loop.kind is Kind.VIEW:
            return False
        if loop.kind is not Kind.POINTWISE or self.pinned[step] or reads > MAX_READS:
            return True
        if any(self._kind(reader) is Kind.KERNEL for reader in self.readers[step]):
            return True
        return len(self.readers[step]) > 1 and (loop.is_expensive or reads > MAX_READS_WHEN_REUSED)

    def _fuse(self, step: int) -> _Kernel:
        self.realized_count += 1
        loop = self.loops[self.binding.nodes[step]]
        found = (self.kernels[leaf] for leaf in self._near(step))
        producers = list(dict.fromkeys(kernel for kernel in found if kernel is not None))
        is_loop = loop.kind is not Kind.KERNEL
        kernel = self._joinable(step, producers) if is_loop else None
        if kernel is None:
            kernel = _Kernel(loop.elements, loop.reduction, is_loop=is_loop, runs_at=step)
        kernel.reduction = kernel.reduction or loop.reduction
        kernel.elements = max(kernel.elements, loop.elements)
        kernel.steps.append(step)
        kernel.producers.extend(producer for producer in producers if producer is not kernel)
        kernel.ordinal = self.realized_count
        if kernel.is_loop:
            self.latest_reader.update(dict.fromkeys(self.leaves[step], kernel))
        return kernel

    def _joinable(self, step: int, producers: Sequence[_Kernel]) -> _Kernel | None:
        """The kernel that a loop becomes a part of: one that it reads, or a near one with a common read."""
        loop, in_backward = self.loops[self.binding.nodes[step]], step >= self.binding.boundary
        readers = (self.latest_reader.get(leaf) for leaf in self.leaves[step])
        siblings = [kernel for kernel in readers if kernel is not None]
        for kernel in dict.fromkeys((*producers, *siblings)):
            is_near = self.realized_count - kernel.ordinal <= MAX_DISTANCE
            is_same_part = (kernel.steps[0] >= self.binding.boundary) == in_backward
            if not (is_near and is_same_part and kernel.admits(loop.elements, loop.reduction)):
                continue
            if not _leads_to(kernel, producers):
                return kernel
        return None

    def _near(self, step: int) -> Iterable[int]:
        """The leaves of a step in its own part: the backward's graph starts with what was saved."""
        boundary = self.binding.boundary
        return (leaf for leaf in self.leaves[step] if step < boundary or leaf >= boundary)

    def _materialised(self, step: int) -> bool:
        if self._kind(step) in (Kind.VIEW, Kind.KERNEL):
            return True
        if not self.realized[step]:
            return False
        if self.pinned[step]:
            return True
        kernel = self.kernels[step]
        return any(self.kernels[reader] is not kernel for reader in self._realized_readers(step))

    def _realized_readers(self, step: int) -> list[int]:
        found: dict[int, None] = {}
        stack = list(self.readers[step])
        while stack:
            reader = stack.pop()
            if self.realized[reader]:
                found[reader] = None
            else:
                stack.extend(self.readers[reader])
        return list(found)

    # -- when things happen

    def _time_kernels(self) -> None:
        """A kernel runs where its first step stands, or as soon as what it reads is there."""
        kernels = list(dict.fromkeys(kernel for kernel in self.kernels if kernel is not None))
        is_settled = False
        while not is_settled:
            is_settled = True
            for kernel in kernels:
                latest = max((producer.runs_at for producer in kernel.producers), default=0)
                if latest > kernel.runs_at:
                    kernel.runs_at = latest
                    is_settled = False

    def _times(self) -> tuple[list[int], list[int]]:
        runs_at = [step if kernel is None else kernel.runs_at for step, kernel in enumerate(self.kernels)]
        read_until = list(runs_at)
        for step in reversed(range(len(runs_at))):
            is_view = self._kind(step) is Kind.VIEW
            if self.kernels[step] is None and not is_view:
                read_until[step] = max((read_until[r] for r in self.readers[step]), default=step)
            elif is_view:
                read_until[step] = step
        return runs_at, read_until

    def _reuses(self, materialised: Sequence[bool], read_until: Sequence[int]) -> Iterable[tuple[int, int]]:
        """A buffer of a loop may take the place of one of equal size that its kernel reads last."""
        outputs = {self.bases[step] for step in self.binding.outputs}
        taken: set[int] = set()
        for step, kernel in enumerate(self.kernels):
            if kernel is None or not kernel.is_loop or not materialised[step]:
                continue
            size = self.graph.node_bytes(self.binding.nodes[step])
            for leaf in self.leaves[step]:
                fits = materialised[leaf] and size and self._leaf_bytes(leaf) == size
                if not fits or leaf in taken or leaf in outputs or self._realized_readers(leaf) != [step]:
                    continue
                if read_until[step] == kernel.runs_at:
                    taken.add(leaf)
                    yield kernel.runs_at, size
                    break

    def _copies(self) -> Iterable[tuple[int, int]]:
        """What convolutions read of the caller's, until the last of them has run."""
        last: dict[int, int] = {}
        for step, position in enumerate(self.binding.nodes):
            if position in self.graph.convolutions:
                operands = self.graph.nodes[position].operands
                last.update((operand, step) for operand in operands if operand < self.graph.num_inputs)
        for operand, step in last.items():
            yield step, self.graph.channels_last_bytes(operand)

    def _leaf_bytes(self, step: int) -> int:
        return self.graph.node_bytes(self.binding.nodes[step])


def _leads_to(kernel: _Kernel, producers: Sequence[_Kernel]) -> bool:
    """Whether another of the producers needs the kernel, directly or not; True where the search is long."""
    seen: dict[_Kernel, None] = {}
    stack = [producer for producer in producers if producer is not kernel]
    while stack:
        producer = stack.pop()
        if producer is kernel or len(seen) > MAX_VISITED:
            return True
        is_older = producer.steps[-1] < kernel.steps[0]
        if not is_older and producer not in seen:
            seen[producer] = None
            stack.extend(producer.producers)
    return False
