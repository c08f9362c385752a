"""Fit: a training step on a device: what it holds, what it needs, and whether there is room for it.

Terms:
    held: what lives from step to step: parameters, buffers, the optimizer's states; and the batch.
    room: the memory of a device, less what is reserved (``device/capacity.py``), less what is held. The
        *peak* of a training step must be no larger; so the room is the budget for ``torch.compile``.
    update: the optimizer's step. It has the gradients and its temporaries, and needs the room for them when
        forward and backward are over. Of the two the larger counts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxremat.device.capacity import reserved_bytes
from fxremat.fitting.example import Example
from fxremat.report.values import mib

__all__ = ["Fit", "Room"]


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device, and what is held there.

    Attributes:
        device: Its name.
        memory_bytes: All that it has.
        parameters_bytes: Parameters and buffers.
        batch_bytes: What the model is called with.
        optimizer: Its name; None where none was named.
        states_bytes: What the optimizer keeps from step to step.
        update_bytes: What its step has live beside: gradients and temporaries.
    """

    device: str
    memory_bytes: int
    parameters_bytes: int
    batch_bytes: int
    optimizer: str | None = None
    states_bytes: int = 0
    update_bytes: int = 0

    @classmethod
    def of(cls, device: str, memory_bytes: int, example: Example) -> Room:
        """The room beside an example."""
        return cls(device, memory_bytes, example.parameters_bytes, example.batch_bytes)

    @property
    def reserved_bytes(self) -> int:
        """What is left to libraries and to the allocator."""
        return reserved_bytes(self.memory_bytes)

    @property
    def held_bytes(self) -> int:
        """What lives from step to step, and the batch."""
        return self.parameters_bytes + self.batch_bytes + self.states_bytes

    @property
    def left_bytes(self) -> int:
        """The budget for a step; negative where not even what is held has room.

        >>> Room("a card", 1000, 300, 100, "SGD", 50).left_bytes
        500
        """
        return self.memory_bytes - self.reserved_bytes - self.held_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """A training step on a device; all figures are predicted.

    Attributes:
        room: The device, and what is held there.
        peak_bytes: The peak of forward and backward, with the gradients, of the plan that has the least time
            of those that fit; where none does, of the one with the lowest peak.
        budget_bytes: The least budget that this plan serves.
        least_bytes: The least budget of a plan that is fast enough.
        slowdown: Its time against that of the step without fxremat.
        baseline_peak_bytes: The peak without fxremat.
        lowest_peak_bytes: The least peak at hand, whatever its time.
        most_slowdown: What was allowed; None for any.
        model: The model's name.
        size: The name and the number of the size that was looked for.
        beyond: The same for the next size, which does not fit.
        looks: How many sizes were planned for.
    """

    room: Room
    peak_bytes: int
    budget_bytes: int = 0
    least_bytes: int = 0
    slowdown: float | None = None
    baseline_peak_bytes: int | None = None
    lowest_peak_bytes: int | None = None
    most_slowdown: float | None = None
    model: str = ""
    size: tuple[str, int] | None = None
    beyond: Fit | None = None
    looks: int = 1

    @property
    def needed_bytes(self) -> int:
        """What the step needs with this plan, beside what is held."""
        return max(self.peak_bytes, self.budget_bytes, self.room.update_bytes)

    @property
    def least_needed_bytes(self) -> int:
        """What it needs with the least that is fast enough."""
        return max(self.least_bytes, self.room.update_bytes)

    @property
    def left_bytes(self) -> int:
        """What is left at the peak; negative where the step does not fit.

        >>> Fit(Room("a card", 1000, 300, 0), 600).left_bytes
        50
        """
        return self.room.left_bytes - self.needed_bytes

    @property
    def is_slow(self) -> bool:
        """Whether the plan takes more time than is allowed."""
        if self.slowdown is None or self.most_slowdown is None:
            return False
        return self.slowdown > self.most_slowdown

    @property
    def does_fit(self) -> bool:
        """Whether all of it has room at once, at no more than the slowdown that is allowed."""
        return self.left_bytes >= 0 and not self.is_slow

    def __bool__(self) -> bool:
        return self.does_fit

    def to_json(self) -> str:
        """The same as JSON, with what follows from it."""
        return json.dumps(self._fields())

    def _fields(self) -> dict[str, Any]:
        beyond = None if self.beyond is None else self.beyond._fields()
        follows = {"does_fit": self.does_fit, "left_bytes": self.left_bytes, "beyond": beyond}
        room = {"held_bytes": self.room.held_bytes, "left_bytes": self.room.left_bytes}
        fields = dataclasses.asdict(dataclasses.replace(self, beyond=None))
        return {**fields, **follows, "room": {**fields["room"], **room}}

    def table(self) -> str:
        """The sum, and what comes of it."""
        return tabulate(list(self._rows()), tablefmt="plain", disable_numparse=True)

    def _rows(self) -> Iterator[tuple[str, str]]:
        room = self.room
        yield room.device, mib(room.memory_bytes)
        yield "left to libraries and the allocator", mib(room.reserved_bytes)
        yield "parameters and buffers", mib(room.parameters_bytes)
        yield "batch", mib(room.batch_bytes)
        if room.optimizer is not None:
            yield f"states of {room.optimizer}", mib(room.states_bytes)
        yield "room for the step", mib(room.left_bytes) if room.left_bytes > 0 else "none is left"
        yield "peak of forward and backward, with gradients", self._peak()
        yield from self._served()
        if room.optimizer is not None:
            yield f"step of {room.optimizer}, with gradients", mib(room.update_bytes)
        if self.lowest_peak_bytes is not None:
            yield "lowest peak", f"{mib(self.lowest_peak_bytes)}, whatever the time"
        yield ("it fits" if self.does_fit else "it does not fit"), self._verdict()

    def _peak(self) -> str:
        text = mib(self.peak_bytes)
        if self.baseline_peak_bytes:
            text += f", {self.peak_bytes / self.baseline_peak_bytes:.1%} of the peak without fxremat"
        if self.slowdown is not None:
            text += f", in {self.slowdown:.2f} times its time"
        return text

    def _served(self) -> Iterator[tuple[str, str]]:
        """Where a margin is left free, the least budget that the plan serves."""
        if self.budget_bytes > self.peak_bytes:
            yield "least budget of this plan", mib(self.budget_bytes)

    def _verdict(self) -> str:
        if self.does_fit:
            states = "" if self.room.optimizer is not None else " for the optimizer's states"
            return f"{mib(self.left_bytes)} are left{states}"
        if self.left_bytes >= 0:
            return (
                f"in no less than {self.slowdown:.2f} times the time, and {self.most_slowdown:g} is asked for"
            )
        return f"{mib(-self.left_bytes)} too much. Ask for a lower budget or make the batch smaller"

    def __str__(self) -> str:
        text = self.table()
        if self.model:
            text = f"{self.model} on {self.room.device}\n\n{text}"
        return text if self.size is None else f"{text}\n\n{self._sizes()}"

    def _sizes(self) -> str:
        assert self.size is not None
        name, number = self.size
        if self.beyond is None:
            return f"{name} {number} does not fit, and no smaller one was looked for"
        assert self.beyond.size is not None
        short = "is too slow" if self.beyond.left_bytes >= 0 else f"lacks {-self.beyond.left_bytes:,} bytes"
        beyond = f"{self.beyond.size[1]} {short}"
        return f"largest {name} that fits: {number}; {beyond} ({self.looks} sizes were planned for)"
