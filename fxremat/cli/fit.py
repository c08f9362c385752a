"""Fit: whether a training step has room on a card.

What the caller holds (parameters, buffers, the batch) and the step's peak, which has the gradients, must be
there at once. Not counted are the optimizer's states, the libraries' workspaces and CUDA's own context, which
takes some hundred MB.
"""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from fxremat.driver.report import mib


@dataclass(frozen=True, slots=True)
class Fit:
    """A step on a card.

    Attributes:
        card: The card's name.
        memory_bytes: What it has.
        held_bytes: What the caller holds.
        peak_bytes: What the step takes on top of that.
    """

    card: str
    memory_bytes: int
    held_bytes: int
    peak_bytes: int

    @property
    def left_bytes(self) -> int:
        """What is left at the peak; negative where the step does not fit.

        >>> Fit("a card", 100, 30, 60).left_bytes
        10
        """
        return self.memory_bytes - self.held_bytes - self.peak_bytes

    @property
    def does_fit(self) -> bool:
        """Whether all of it has room at once."""
        return self.left_bytes >= 0

    def table(self) -> str:
        """The sum, and what comes of it."""
        left = f"{mib(self.left_bytes)} are left for the optimizer's states and for libraries"
        lacks = f"{mib(-self.left_bytes)} too much. Ask for a lower --budget or make the batch smaller"
        rows = [
            (self.card, mib(self.memory_bytes)),
            ("parameters, buffers, batch", mib(self.held_bytes)),
            ("peak of the step, with gradients", mib(self.peak_bytes)),
            ("it fits" if self.does_fit else "it does not fit", left if self.does_fit else lacks),
        ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)
