"""Modules as steps that train: torch's own database of modules, as ``operators.py`` has that of operators.

A *ModuleInfo* is an entry of the database: a class, and *inputs*, ways to construct and to call it. A module
is called as an operator is in a trained step. Its operands are parameters times one and its results are
squared, so that there is something to compute again on both sides; its own parameters are learned as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from operators import Case, Trained, enlarged, made
from torch import nn

__all__ = ["TrainedModule", "module_cases", "module_database"]


# Modules whose samples stay as small as they are, and why.
SMALL = {
    "nn.GRU": "a longer sequence is a larger graph",
    "nn.LSTM": "a longer sequence is a larger graph",
    "nn.MultiLabelMarginLoss": "it compares each class with each other: many of them take gigabytes",
    "nn.RNN": "a longer sequence is a larger graph",
}


def module_database() -> dict[str, Any]:
    """All ModuleInfos, by name."""
    from torch.testing._internal import common_modules

    return {info.name: info for info in common_modules.module_db}


def module_cases(info: Any, at_most: int) -> Iterator[Case]:
    """So many ways to train a module, as different as there are, and mostly enlarged."""
    torch.manual_seed(0)
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    found: dict[str, Case] = {}
    for number, each in enumerate(itertools.islice(inputs, 64)):
        module = info.module_cls(*each.constructor_input.args, **each.constructor_input.kwargs).train()
        if each.forward_input is None:
            continue
        module = module.to(
            torch.float32
        )  # some have buffers of another type, as the database's own tests know
        case = made(f"{info.name} {number}", module, *each.forward_input.args, **each.forward_input.kwargs)
        case.run(case.leaves)  # a lazy one has its parameters then
        options = sorted(each.constructor_input.kwargs)
        found.setdefault(f"{case.spec}{[type(leaf).__name__ for leaf in case.leaves]}{options}", case)
    step = max(1, len(found) // at_most)
    for case in list(found.values())[::step][:at_most]:
        yield case if info.name in SMALL else enlarged(case)


class TrainedModule(Trained):
    """A trained step whose operator is a module with parameters and buffers."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        assert isinstance(case.call, nn.Module)
        self.module = case.call
