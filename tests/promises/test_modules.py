"""Every module of torch's database: no step takes more than predicted, and no plan changes what it computes.

As for operators (``test_operators.py``); held against the plan that keeps all, in every bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from modules import TrainedModule, module_cases, module_database
from operators import Case, have_same_bits, outcome, surprises

import fxremat

NEEDED = "torch's database of modules needs expecttest"
PARTS = 16  # of the database, one test each
SAMPLES = 2
BUDGETS = ("min", 0.5)

# What Dynamo raises for what it can't trace as one graph; an error of ours is none of these.
REFUSALS = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)

# What is quick and differs most, for every run of the tests.
FEW = (
    "nn.BatchNorm2d",
    "nn.Conv2d",
    "nn.CrossEntropyLoss",
    "nn.Embedding",
    "nn.GRUCell",
    "nn.LayerNorm",
    "nn.MaxPool2d",
    "nn.PReLU",
)


def complaints(case: Case) -> Iterator[str]:
    """What does not hold of a module's step."""
    step = TrainedModule(case)
    kept = outcome(copy.deepcopy(step), planner="keep_all", inplace=False)
    for budget in BUDGETS:
        try:
            found = outcome(copy.deepcopy(step), budget=budget)
        except fxremat.InfeasibleBudgetError:
            continue  # half of the peak is less than any plan takes
        if not found.is_kept:
            yield f"{case.name}, {budget}: {found.measured_bytes} bytes of {found.predicted_bytes} predicted"
            yield from (f"    {each}" for each in surprises(step))
        if not found.is_tight:
            loose = f"{case.name}, {budget}: {found.measured_bytes} of {found.predicted_bytes} bytes"
            warnings.warn(loose, stacklevel=2)
        if not have_same_bits(found, kept):
            yield f"{case.name}, {budget}: losses, gradients or buffers differ"


def complaints_of(name: str, samples: int) -> list[str]:
    """The same of a module's samples; what Dynamo can't trace as one graph is left out as it comes."""
    found: list[str] = []
    for case in module_cases(module_database()[name], samples):
        try:
            with torch._dynamo.config.patch(allow_rnn=True):  # which Dynamo leaves out by default
                found += complaints(case)
        except REFUSALS as error:
            warnings.warn(f"{case.name} is no step: {str(error).splitlines()[0]}", stacklevel=2)
    return found


@pytest.mark.parametrize("name", FEW)
def test_a_few_modules(name: str) -> None:
    """One of each kind: losses, gradients and buffers are those of keep_all, and peaks are kept."""
    pytest.importorskip("expecttest", reason=NEEDED)
    assert complaints_of(name, samples=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_database(part: int) -> None:
    """The same for every module, a few samples each."""
    pytest.importorskip("expecttest", reason=NEEDED)
    found: list[str] = []
    for name in sorted(module_database())[part::PARTS]:
        found += complaints_of(name, SAMPLES)
    assert found == []
