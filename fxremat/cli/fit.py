"""``fxremat fit``: whether MODEL can be trained on a device, and the largest size that can."""

from __future__ import annotations

import argparse

from fxremat.cli.example import load
from fxremat.fitting.fit import Fit
from fxremat.fitting.fitting import fit

__all__ = ["fit_of"]


def fit_of(arguments: argparse.Namespace) -> Fit:
    """The fit that was asked for.

    Raises:
        FxrematError: One of the family.
    """
    optimizer, planner = arguments.optimizer, arguments.planner
    return fit(
        load("MODEL", arguments.model),
        optimizer=load("optimizer", optimizer) if optimizer is not None and ":" in optimizer else optimizer,
        device=arguments.device,
        memory=arguments.memory,
        slowdown=arguments.slowdown,
        largest=arguments.largest,
        planner=load("planner", planner) if ":" in planner else planner,
        compiler=arguments.compiler,
    )
