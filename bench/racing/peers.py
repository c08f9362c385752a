"""What fxremat is held against: the ways to train in less memory that torch itself has.

    eager           torch without a compiler
    inductor        torch.compile by default; its time is the unit
    budget          torch.compile under ``torch._functorch.config.activation_memory_budget``
    checkpoint      torch.utils.checkpoint around pieces of the network (wrapping.py), eager and compiled
    selective       the same around the smallest pieces, with products, convolutions and attention saved

A *peer* says how a network is wrapped and how it is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from racing import wrapping
from torch import Tensor, nn

__all__ = ["BUDGETS", "FAMILIES", "Peer", "peers"]

FAMILIES = ("eager", "inductor", "budget", "checkpoint", "selective")
BUDGETS = (0.7, 0.5, 0.3, 0.15, 0.0)


@dataclass(frozen=True)
class Peer:
    """A way to train a network.

    Attributes:
        name: What tables call it.
        family: What it has in common with others; the name begins with it.
        is_compiled: Whether Inductor compiles it.
        budget: The activation memory budget.
        way: The way to wrap the network; None leaves it as it is.
        run: Runs the pieces of the network.
    """

    name: str
    family: str
    is_compiled: bool
    budget: float = 1.0
    way: str | None = None
    run: wrapping.Run | None = None

    def wrap(self, model: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Wrap the module in place."""
        if self.way is not None:
            wrapping.ways(model, module, inputs, self.run)[self.way]()

    def while_compiling(self) -> contextlib.AbstractContextManager[Any]:
        """What must hold while the first step is taken."""
        return torch._functorch.config.patch(activation_memory_budget=self.budget)


def peers(names: Sequence[str], families: Collection[str], compilers: Iterable[bool]) -> list[Peer]:
    """The peers of a network.

    Args:
        names: The ways to wrap it, that with the smallest pieces first.
        families: Of ``FAMILIES``; what the ratios have as their unit is there in any case.
        compilers: Of True (compiled by Inductor) and False (eager), the unit's first.
    """
    compilers = tuple(compilers)
    unit = "inductor" if compilers[0] else "eager"
    plain = {"inductor": Peer("inductor", "inductor", True), "eager": Peer("eager", "eager", False)}
    found = [plain[unit]]
    found += [
        peer
        for name, peer in plain.items()
        if name != unit and name in families and peer.is_compiled in compilers
    ]
    if "budget" in families and True in compilers:
        found += [
            Peer(f"activation_memory_budget {budget}", "activation_memory_budget", True, budget)
            for budget in BUDGETS
        ]
    for is_compiled in compilers:
        suffix = "compiled" if is_compiled else "eager"
        if "checkpoint" in families:
            family, run = f"checkpoint, {suffix}", wrapping.checkpointed()
            found += [Peer(f"{family}, {way}", family, is_compiled, way=way, run=run) for way in names]
        if "selective" in families:
            family, run, way = f"selective, {suffix}", wrapping.saves_products(), names[0]
            found.append(Peer(f"{family}, {way}", family, is_compiled, way=way, run=run))
    return found
