"""Verification: what was found where a compiled graph was held against itself without fxremat.

How that is done, and what the terms mean, stands in ``driver/verification.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Verification"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found by comparing a compiled graph with its reference.

    Attributes:
        calls: How many calls were compared.
        difference: The largest that was found; 0.0 where all is equal.
        place: Where: ``"output 0"``, ``"gradient of self.weight"``, and the like; empty where all is equal.
        tolerance: The largest difference that is taken for rounding.
        gradient_norm: The Euclidean norm of all gradients together, of the last call.
        reference_norm: The same of the reference.
        measured_peak_bytes: The peak of the last call, for which the report's ``peak_bytes`` is the
            prediction; None where it can't be measured.
        reason: Why nothing was compared; empty where something was.
    """

    calls: int = 0
    difference: float = 0.0
    place: str = ""
    tolerance: float = 0.0
    gradient_norm: float = 0.0
    reference_norm: float = 0.0
    measured_peak_bytes: int | None = None
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether no difference is larger than the tolerance."""
        return self.difference <= self.tolerance

    def and_before(self, before: Verification | None) -> Verification:
        """This and what earlier calls have shown."""
        if before is None or before.reason:
            return self
        worst = self if self.difference >= before.difference else before
        return replace(self, calls=self.calls + before.calls, difference=worst.difference, place=worst.place)

    def __str__(self) -> str:
        if self.reason:
            return f"not verified: {self.reason}"
        found = "equal" if self.difference == 0 else f"differs by {self.difference:.2g} ({self.place})"
        calls = f"{self.calls} call{'s' * (self.calls != 1)}"
        return f"{calls} compared: {found}, {self.tolerance:.2g} is allowed"
