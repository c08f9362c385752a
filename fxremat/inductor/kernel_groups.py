"""Kernel groups: which loops Inductor runs in one call of a C++ function on a CPU, and where a plan ends one.

By itself it has all loops between two external kernels be a group: what they make is allocated before the
call, and what they read is freed behind it. A plan may need some of that to be freed earlier, or made later.
There the group ends and another begins. Each takes time to compile, so loops are of one where that needs no
more memory than the plan takes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.device.calibrate import may_lie_in_order
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.inductor.facts import copied_bytes, facts
from fxremat.inductor.grouping import Grouping
from fxremat.memory.liveness import MemoryProfile
from fxremat.memory.lowering import Lowering


def kernel_groups(grouping: Grouping, lowering: Lowering, profile: MemoryProfile) -> list[int]:
    """For each step of a schedule the number of the group that its loop is in, or of the latest before.

    Numbers ascend in the forward and, from 0 again, in the backward.

    Args:
        grouping: The kernels of a schedule of a traced graph on a CPU.
        lowering: What they hold.
        profile: How much that is.
    """
    graph, binding = grouping.graph, grouping.binding
    loops = {kernel.runs_at: kernel.is_loop for kernel in grouping.kernels if kernel is not None}
    made, copied = _made_bytes(profile, lowering), _copied_bytes(graph, binding, lowering)
    numbers: list[int] = []
    for half in (range(binding.boundary), range(binding.boundary, len(binding.nodes))):
        part = slice(half.start, half.stop)
        live = profile.live_bytes[part].tolist()
        numbers += together(list(map(loops.get, half)), live, made[part], copied[part])
    steps = enumerate(grouping.kernels)
    return [numbers[step if kernel is None else kernel.runs_at] for step, kernel in steps]


def _made_bytes(profile: MemoryProfile, lowering: Lowering) -> list[int]:
    """For each step the bytes that are allocated at it, less those in whose place others are."""
    made = [0] * len(lowering.runs_at)
    for _, _, size, birth, _ in profile.lives:
        made[birth] += size
    for first, _, size in lowering.extra_bytes:
        made[first] += size
    return made


def _copied_bytes(graph: JointGraph, binding: Binding, lowering: Lowering) -> list[int]:
    """For each step the bytes of the copies that loops make for it, at most.

    Those for gradients of single channels (``images.py``) count as scratch memory, and those of sequences
    without what is freed when they are made.
    """
    copied = [0] * len(lowering.runs_at)
    for first, _, size in lowering.extra_bytes:
        copied[first] += max(0, size)
    convolutions = facts(graph).convolutions if graph.scratch_bytes else ()
    sequences = facts(graph).sequences
    for step, node in enumerate(binding.nodes):
        place = lowering.runs_at[step]
        if node in convolutions and may_lie_in_order(graph.fx_nodes[node]):
            copied[place] += graph.scratch_bytes[node]
        if node in sequences:
            copied[place] = max(copied[place], copied_bytes(graph, node, sequences[node]))
    return copied


def together(
    is_loop: Sequence[bool | None],
    live_bytes: Sequence[int],
    made_bytes: Sequence[int],
    copied_bytes: Sequence[int],
) -> list[int]:
    """The number of the group at each step of a program, if groups are as few as its peak allows.

    Args:
        is_loop: For each step whether a loop runs at it; None if nothing does.
        live_bytes: What is live at it, if each loop is a group of its own.
        made_bytes: What is allocated at it.
        copied_bytes: What of that loops make for an external kernel, right before it.

    >>> together([True, True, False, True, True], [3, 4, 4, 3, 3], [1, 1, 0, 1, 1], [0] * 5)
    [0, 0, 0, 1, 1]
    >>> together([True, True, True], [3, 4, 3], [1, 3, 1], [0] * 3)  # the first is freed before the third
    [0, 1, 2]
    """
    peak_bytes = max(live_bytes, default=0)
    numbers: list[int] = []
    number, group_bytes, is_open = -1, 0, False
    for is_one, live, made, copied in zip(is_loop, live_bytes, made_bytes, copied_bytes, strict=True):
        group_bytes += made if is_one is not False else copied
        if (is_one or (is_one is False and copied)) and not (is_open and group_bytes <= peak_bytes):
            number, group_bytes, is_open = number + 1, live, True
        if is_one is False:
            is_open = False
        numbers.append(max(number, 0))
    return numbers
