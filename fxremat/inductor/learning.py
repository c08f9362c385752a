"""Learning: what Inductor's scheduler says of a plan, held against what the model has predicted.

It says which loops it has made, which of these have a buffer, and which it has added: copies in the layout
that an external kernel wants. Linear in steps and reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxremat._torch.lowered import GeneratedCode, LoweredOperation
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind
from fxremat.graph.nodes import STEP
from fxremat.graph.schedule import Binding
from fxremat.inductor.buffers import Buffers
from fxremat.inductor.facts import facts, informed
from fxremat.inductor.fusion import lower
from fxremat.inductor.generated import CodeMemory
from fxremat.inductor.grouping import group
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.shown import NONE, Shown, State, spot
from fxremat.inductor.timing import timing
from fxremat.memory.liveness import profile_of
from fxremat.memory.lowering import Lowering

MAX_PASSES = 3  # what is learnt changes what the model says elsewhere, of which more may be learnt


def learn(
    graph: JointGraph, binding: Binding, codes: Iterable[tuple[GeneratedCode, CodeMemory]]
) -> JointGraph:
    """The graph with what the code of a schedule shows, if its peak is predicted better with that.

    Args:
        graph: The graph, with what is known of it.
        binding: The resolved schedule.
        codes: The code of its forward, of its backward, or of both, and what was read from it.
    """
    for code, memory in codes:
        taught = measured = _measured(graph, memory.scratch_bytes)
        for _ in range(MAX_PASSES):
            shown = _shown(taught, binding, code, memory)
            if shown == facts(taught).shown:
                break
            taught = informed(graph, shown, measured.scratch_bytes)
        known = (graph, measured, taught)
        graph = min(known, key=lambda each: abs(_peak_bytes(each, binding, code) - memory.peak_bytes))
    return graph


def _measured(graph: JointGraph, told: Mapping[str, int]) -> JointGraph:
    """The graph with the scratch memory that its operators need, by name, where it is told."""
    known = zip(graph.nodes, graph.scratch_bytes, strict=False)
    scratch_bytes = tuple(told.get(node.name, size) for node, size in known)
    is_new = scratch_bytes != graph.scratch_bytes
    return informed(graph, facts(graph).shown, scratch_bytes) if is_new else graph


def _peak_bytes(graph: JointGraph, binding: Binding, code: GeneratedCode) -> int:
    """The peak that is predicted of the forward or the backward whose code it is."""
    live_bytes = profile_of(graph, binding, lower(graph, binding)).live_bytes
    part = live_bytes[binding.boundary :] if code.is_backward else live_bytes[: binding.boundary]
    return int(part.max(initial=0))


def _shown(graph: JointGraph, binding: Binding, code: GeneratedCode, memory: CodeMemory) -> Shown:
    """What the code shows where the model errs, beside what is known already."""
    known = facts(graph).shown
    grouping = group(graph, binding)
    inlining = grouping.inlining
    predicted = Buffers(grouping, timing(grouping))
    lowering = predicted.lowering()
    replaced = predicted.replaced(lowering.materialised, lowering.held_in)
    states, copies, never = dict(known.states), dict(known.copies), dict(known.never)
    told = _Told(code, memory, inlining)
    for step, state in told.states.items():
        if state is not _predicted(inlining, lowering, step):
            states[spot(binding, inlining.readers, step)] = state
    for (step, reader), size in told.copies.items():
        copies[spot(binding, inlining.readers, step), binding.nodes[reader]] = size
    for step, leaf in replaced.items():
        if told.states.get(step) is State.STORED and told.replaced.get(step) != leaf:
            at = spot(binding, inlining.readers, step)
            never[at] = never.get(at, NONE) | {binding.nodes[leaf]}
    return Shown(states, copies, never)


def _predicted(inlining: Inlining, lowering: Lowering, step: int) -> State:
    """What the model says of a step."""
    if not inlining.realized[step]:
        return State.INLINED
    return State.STORED if lowering.materialised[step] or step in lowering.held_in else State.INSIDE


class _Told:
    """What the code of a forward or a backward says of the steps of its schedule.

    Attributes:
        states: For each step that was lowered as a loop and is for Inductor to decide, what became of it.
        copies: Bytes of the copies that were made of a step's value for another step.
        replaced: For steps whose value takes the place of another's, that step.
    """

    def __init__(self, code: GeneratedCode, memory: CodeMemory, inlining: Inlining) -> None:
        self._inlining = inlining
        self._code = code
        self._steps = {node: node.meta[STEP] for node in code.nodes if STEP in node.meta}
        own = {name: self._own(each) for name, each in code.operations.items()}
        saved = {node.name: step for node, step in self._steps.items() if node.op == "placeholder"}
        found: dict[int, State] = {}
        for name, step in own.items():
            if step is not None and found.get(step) is not State.STORED:
                found[step] = State.STORED if code.operations[name].is_stored else State.INSIDE
        self.copies = dict(self._copies({**saved, **own}, found))
        self.states = {step: found.get(step, State.INLINED) for step in self._loops()}
        places = {name: step for name, step in own.items() if step is not None}
        pairs = ((places.get(name), places.get(other)) for name, other in memory.replaced.items())
        self.replaced = dict(pairs)

    def _loops(self) -> Iterable[int]:
        """The steps of loops that are for Inductor to decide about."""
        inlining = self._inlining
        for step in {inlining.bases[step] for step in self._steps.values()}:
            is_fixed = inlining.pinned[step] or step in inlining.slices.cats or inlining.is_sum(step)
            if inlining.kinds[step] is Kind.POINTWISE and inlining.readers[step] and not is_fixed:
                yield step

    def _own(self, operation: LoweredOperation) -> int | None:
        """The step whose value an operation computes."""
        step = None if operation.made_for is None else self._steps.get(operation.made_for)
        return None if step is None else self._inlining.bases[step]

    def _copies(
        self, own: Mapping[str, int | None], found: dict[int, State]
    ) -> Iterable[tuple[tuple[int, int], int]]:
        """The copies that external kernels read; what is copied where it is computed is its own copy."""
        operations, boundary = self._code.operations, self._inlining.binding.boundary
        readers: dict[str, int] = {}
        for each in operations.values():
            step = max((self._steps[node] for node in each.origins if node in self._steps), default=None)
            if not each.is_loop and step is not None:
                readers.update(dict.fromkeys(each.reads, step))
        for name, each in operations.items():
            is_added = each.is_loop and each.is_stored and each.made_for is None and name in readers
            source = self._copied(each, readers[name], own) if is_added else None
            if source is None:
                continue
            is_saved = self._code.is_backward and source < boundary
            if is_saved or source in found:
                yield (source, readers[name]), each.bytes
            else:
                found[source] = State.STORED

    def _copied(self, copy: LoweredOperation, reader: int, own: Mapping[str, int | None]) -> int | None:
        """The step whose value is copied: one that the kernel reads, and the copy was computed from."""
        inlining = self._inlining
        read = {inlining.bases[each] for each in inlining.binding.reads[reader] if each is not None}
        sources = {step for step in map(own.get, copy.reads) if step is not None} & read
        made = {inlining.bases[self._steps[node]] for node in copy.origins if node in self._steps}
        size = inlining.graph.node_bytes
        fitting = [
            step for step in sources or read & made if size(inlining.binding.nodes[step]) == copy.bytes
        ]
        return max(fitting, default=None)
