"""Timeline: what is live at each step of a schedule, by name, so that it can be drawn.

Each *life* is bytes that are live from a first to a last step, both included, and the sum of the lives at a
step is what ``liveness.py`` counts there: the same lives under the same rules, so their most is the predicted
peak. Two things are told differently. Where a result takes the place of an operand, the operand's life ends
a step earlier, and the bytes go from one to the other. What liveness only sums has a life of its own: the
tangents, the scratch memory of an operator, a copy that compiled code makes.

What the caller holds (parameters, inputs) is *held*: it is there all the time and no part of any peak.
Linear in steps, but for ``live_at``, which looks at all lives.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxremat._torch import graphs
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.graph.places import Origin
from fxremat.graph.schedule import Binding
from fxremat.memory.instances import storage_instances
from fxremat.memory.liveness import profile_of, scratch_bytes
from fxremat.memory.lowering import Lowering

__all__ = ["HELD", "KINDS", "Life", "Ran", "Timeline", "timeline_of"]

KINDS = {
    "output": "returned by the forward",
    "saved": "kept from the forward for the backward",
    "forward": "computed and freed within the forward",
    "recomputed": "computed again",
    "tangents": "what the backward is called with",
    "backward": "computed and freed within the backward",
    "gradient": "returned by the backward",
    "copy": "a copy that compiled code makes for a kernel",
    "scratch": "what an operator allocates and frees while it runs",
}
"""The kinds of lives, in the order in which they are stacked, and what they are."""

HELD = "held"  # the kind of what the caller holds


@dataclass(frozen=True, slots=True)
class Life:
    """Bytes that are live for some time.

    Attributes:
        origin: The node that they belong to: whose value they hold, whose scratch memory they are, which
            reads the copy.
        kind: One of ``KINDS``, or ``HELD``.
        bytes: How many.
        first: The first step at which they are live.
        last: The last such step.
    """

    origin: Origin
    kind: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A step of the schedule.

    Attributes:
        origin: The node that runs.
        is_mirror: Whether it ran before.
        seconds: Its predicted time; 0 for what a fused kernel computes at no cost.
    """

    origin: Origin
    is_mirror: bool
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """What is live when.

    Attributes:
        steps: The schedule.
        boundary: The first step of the backward.
        lives: What is live, in order of the first step.
        held: What the caller holds all the time, which no peak counts.
    """

    steps: tuple[Ran, ...]
    boundary: int
    lives: tuple[Life, ...]
    held: tuple[Life, ...] = ()

    @functools.cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """The live bytes at each step."""
        return self.live_bytes_of(*{life.kind for life in self.lives})

    def live_bytes_of(self, *kinds: str) -> tuple[int, ...]:
        """The bytes at each step of the lives of these kinds."""
        change = [0] * (len(self.steps) + 1)
        for life in self.lives:
            if life.kind in kinds:
                change[life.first] += life.bytes
                change[life.last + 1] -= life.bytes
        return tuple(itertools.accumulate(change[:-1]))

    @property
    def peak_bytes(self) -> int:
        """The most live bytes; 0 for an empty schedule."""
        return max(self.live_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """The first step at the peak."""
        return self.live_bytes.index(self.peak_bytes) if self.steps else 0

    @property
    def seconds(self) -> float:
        """The predicted time of all steps."""
        return sum(step.seconds for step in self.steps)

    def live_at(self, step: int) -> tuple[Life, ...]:
        """What is live at a step, largest first."""
        alive = (life for life in self.lives if life.first <= step <= life.last)
        return tuple(sorted(alive, key=lambda life: (-life.bytes, life.first)))

    def __reduce__(self) -> tuple[type[Timeline], tuple[object, ...]]:
        """What is computed from the lives is not pickled along."""
        return Timeline, (self.steps, self.boundary, self.lives, self.held)


def timeline_of(
    graph: JointGraph, binding: Binding, lowering: Lowering, seconds: Sequence[float] = ()
) -> Timeline:
    """The timeline of a resolved and lowered schedule.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        lowering: What a memory model makes of it.
        seconds: The predicted time of each step, where it is known.

    Example:
        >>> from fxremat.graph.schedule import bind; from fxremat.predict.models import EVERY_VALUE
        >>> g = JointGraph.from_mappings(
        ...     {"x": (), "a": ["x"], "b": ["a"], "da": ["b", "a"]}, {"a": 4, "b": 2, "da": 4},
        ...     forward_outputs=["b"], backward=["da"], backward_outputs=["da"])
        >>> steps = bind(g, ("a", "b", "da"))
        >>> found = timeline_of(g, steps, EVERY_VALUE.lower(g, steps))
        >>> [(life.origin.name, life.kind, life.first, life.last) for life in found.lives]
        [('a', 'saved', 0, 2), ('b', 'output', 1, 2), ('da', 'gradient', 2, 2)]
        >>> found.live_bytes
        (4, 6, 10)
    """
    return _Reading(graph, binding, lowering).timeline(seconds or [0.0] * len(binding.nodes))


class _Reading:
    """A schedule whose timeline is made."""

    def __init__(self, graph: JointGraph, binding: Binding, lowering: Lowering) -> None:
        self.graph = graph
        self.binding = binding
        self.lowering = lowering
        self.origins = [graph.origins[node] for node in binding.nodes]

    def timeline(self, seconds: Sequence[float]) -> Timeline:
        steps = map(Ran, self.origins, self.binding.is_mirror, seconds)
        lives = (*self._values(), *self._tangents(), *self._copies(), *self._scratch())
        in_order = sorted(self._less_freed(lives), key=lambda life: life.first)
        return Timeline(tuple(steps), self.binding.boundary, tuple(in_order), tuple(self._held()))

    def _values(self) -> Iterable[Life]:
        """The lives of values, those shortened whose place another takes."""
        lives: dict[int, list[Life]] = {}
        for step, life in self._whole_lives():
            lives.setdefault(step, []).append(life)
        for step, before in self.lowering.replaces.items():
            place = self.lowering.runs_at[step]
            own = lives.get(step, [])
            size = sum(life.bytes for life in own)
            for index, life in enumerate(lives.get(before, ())):
                if life.last == place and life.bytes == size:
                    lives[before][index] = replace(life, last=place - 1)
                    break
            else:  # the operand is held on: the result's bytes are its own from the next step on
                lives[step] = [replace(life, first=place + 1) for life in own]
        return (life for each in lives.values() for life in each if life.first <= life.last)

    def _whole_lives(self) -> Iterable[tuple[int, Life]]:
        """The life of each storage instance with bytes, and the step that allocates it."""
        owners, values = self.lowering.instances or storage_instances(self.graph, self.binding)
        returned = {instance: step for step in self.binding.outputs for instance in values[step]}
        stored = [
            (instance, step)
            for instance, (step, storage) in enumerate(owners)
            if self.graph.storage_bytes[storage] and self.lowering.materialised[step]
        ]
        found = profile_of(self.graph, self.binding, self.lowering).lives
        for (instance, step), (_, _, size, birth, death) in zip(stored, found, strict=True):
            kind = self._kind(step, death, returned.get(instance))
            yield step, Life(self.origins[step], kind, size, birth, death)

    def _kind(self, step: int, death: int, output: int | None) -> str:
        boundary = self.binding.boundary
        if output is not None:
            return "output" if output < boundary else "gradient"
        if self.binding.is_mirror[step]:
            return "recomputed"
        if step >= boundary:
            return "backward"
        return "forward" if death < boundary else "saved"

    def _tangents(self) -> Iterable[Life]:
        first, last = self.binding.boundary, len(self.binding.nodes) - 1
        if self.graph.tangent_bytes and first <= last:
            yield Life(Origin("tangents"), "tangents", self.graph.tangent_bytes, first, last)

    def _copies(self) -> Iterable[Life]:
        for first, last, size in self.lowering.extra_bytes:
            if size > 0 and first <= last:
                yield Life(self.origins[last], "copy", size, first, last)

    def _scratch(self) -> Iterable[Life]:
        places = zip(self.origins, self.lowering.runs_at, strict=True)
        for (origin, place), size in zip(places, scratch_bytes(self.graph, self.binding), strict=False):
            if size:
                yield Life(origin, "scratch", size, place, place)

    def _less_freed(self, lives: Iterable[Life]) -> list[Life]:
        """The lives; those that end where a copy takes their place, or spares scratch, end a step earlier."""
        freed: Counter[int] = Counter()
        for place, _, size in self.lowering.extra_bytes:
            freed[place] += max(0, -size)
        for step in self.lowering.replaces:  # which are shortened by now
            freed[self.lowering.runs_at[step]] -= self.graph.node_bytes(self.binding.nodes[step])
        found: list[Life] = []
        for life in sorted(lives, key=lambda each: (each.bytes != freed[each.last], each.first)):
            part = max(0, min(freed[life.last], life.bytes))
            freed[life.last] -= part
            found += [replace(life, bytes=life.bytes - part)] * (part < life.bytes)
            found += [replace(life, bytes=part, last=life.last - 1)] * (part > 0 and life.first < life.last)
        return found

    def _held(self) -> Iterable[Life]:
        last = len(self.binding.nodes) - 1
        for index, node in enumerate(self.graph.fx_nodes[: self.graph.num_inputs]):
            size = 0 if graphs.is_tangent(node) else ops.value_bytes(node)
            if size:
                yield Life(self.graph.origins[index], HELD, size, 0, last)
