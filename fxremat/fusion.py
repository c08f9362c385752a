"""Lowering: which values of a schedule get a buffer, and when the kernel that makes them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.errors import InvalidOptionError
from fxremat.graph import JointGraph
from fxremat.schedule import Binding

FUSIONS = ("none", "inductor")


@dataclass(frozen=True, slots=True)
class Lowering:
    """What a code generator makes of a schedule.

    Attributes:
        materialised: For each step, whether its value gets a buffer.
        runs_at: For each step, the step at which the kernel that computes it runs.
        read_until: For each step, the last step at which its operands are read on its behalf.
        reused_bytes: Pairs (step, bytes): a kernel that writes its result over an operand that dies there.
    """

    materialised: Sequence[bool]
    runs_at: Sequence[int]
    read_until: Sequence[int]
    reused_bytes: Sequence[tuple[int, int]] = ()


def lower(graph: JointGraph, binding: Binding, fusion: str) -> Lowering:
    """Decide for each step whether its value gets a buffer.

    Args:
        graph: The graph.
        binding: The resolved schedule.
        fusion: ``"none"`` or ``"inductor"``.
    """
    steps = range(len(binding.nodes))
    if fusion == "none":
        return Lowering([True] * len(steps), steps, steps)
    raise InvalidOptionError.bad_value("fusion", fusion, FUSIONS)
