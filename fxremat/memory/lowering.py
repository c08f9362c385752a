"""Lowering: what a memory model says of a schedule, whichever model it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxremat.memory.inplace import Overwrite
from fxremat.memory.instances import Instances


@dataclass(frozen=True, slots=True)
class Lowering:
    """What a code generator makes of a schedule.

    Attributes:
        materialised: For each step, whether its value gets a buffer.
        runs_at: For each step, the step at which the kernel that computes it runs.
        read_until: For each step, the last step at which its operands are read on its behalf, but for those
            of ``read_later``.
        extra_bytes: Triples (first step, last step, bytes), the steps included: copies that the code holds
            besides the values, and, negative, results that are written over an operand that dies there.
        held_in: For steps whose value is a part of a later step's buffer, that step.
        read_later: Pairs of an operand's step and a step at which it is read, too.
        replaces: For steps whose result takes the place of an earlier buffer, the step that made that one;
            the negative bytes of ``extra_bytes`` are theirs.
        overwrites: Without fusion, the same steps, and which operand they write over.
        instances: The storage instances of the schedule, where they had to be found.
        after_bytes: What is live behind the last step: all that is returned, and the copy of a gradient that
            autograd makes where it does not lie as its parameter does.
    """

    materialised: Sequence[bool]
    runs_at: Sequence[int]
    read_until: Sequence[int]
    extra_bytes: Sequence[tuple[int, int, int]] = ()
    held_in: Mapping[int, int] = field(default_factory=dict)
    read_later: Sequence[tuple[int, int]] = ()
    replaces: Mapping[int, int] = field(default_factory=dict)
    overwrites: Mapping[int, Overwrite] = field(default_factory=dict)
    instances: Instances | None = None
    after_bytes: int = 0


class Copies(NamedTuple):
    """The copies that the code of any schedule of a graph holds, as far as they do not depend on it.

    Attributes:
        of_inputs: For each input that is copied for several readers, these nodes and the bytes. The copy is
            there from the forward on until the last of them has run.
        after_bytes: What is live behind the last step, the copy of a gradient included (``Lowering``).
    """

    of_inputs: Sequence[tuple[Sequence[int], int]] = ()
    after_bytes: int = 0
