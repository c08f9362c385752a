"""Every operator by itself: no step takes more than its predicted peak, and no plan changes a gradient.

Python numbers that become tensors while an operator runs are left out: ``NUMBER_BYTES`` a node at most.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES, LAYOUTS, family
from operators import (
    Case,
    Constant,
    Outcome,
    Step,
    Trained,
    cases,
    database,
    have_same_bits,
    outcome,
    steps,
    surprises,
    uncompiled,
    without_fxremat,
)

import fxremat

NEEDED = "torch's database of operators needs expecttest"
PARTS = 16  # of the database, one test each
SAMPLES = 3

# OpInfos that make no step, and why. Steps that Dynamo cannot trace as one graph are left out as they come.
EXCLUDED = {
    "allclose": "it returns a Python number",
    "broadcast_shapes": "it returns sizes",
    "equal": "it returns a Python number",
    "item": "it returns a Python number",
    "sparse_mm_reduce": "it takes sparse operands",
    "sparse_sampled_addmm": "it takes sparse operands",
}

# What is quick and differs most, for every run of the tests.
FEW = (
    "add on a view",
    "assign columns",
    "assign rows",
    "attention causal",
    "batch_norm",
    "cat",
    "complex abs",
    "conv2d 1-1",
    "conv2d 33-64",
    "cross_entropy",
    "cumprod",
    "diagonal_scatter of rows",
    "fft outer",
    "layer_norm",
    "median",
    "mm sliced",
    "mvlgamma",
    "pad reflect",
    "roll 2",
    "select_scatter of rows",
    "slice_scatter of rows",
    "var_mean",
)


# How each kind of step is compiled.
PLANS: dict[type[Step], tuple[dict[str, Any], ...]] = {
    Trained: ({"planner": "keep_all", "inplace": False}, {"budget": "min"}, {"budget": 0.5}),
    Constant: ({"budget": "min"},),
}


class Refused(Exception):
    """PyTorch itself does not compile a step."""


def complaints(step: Step) -> list[str]:
    """What does not hold of a step, and the nodes of its joint graph that surprise.

    Raises:
        Refused: PyTorch does not compile it without fxremat either.
    """
    try:
        outcomes = [(options, _outcome(step, options)) for options in PLANS[type(step)]]
    except Exception:  # PyTorch's, or ours
        _raise_if_refused(step)
        raise
    wrong = [f"{step}, {options}: {each}" for options, found in outcomes for each in _excess(step, found)]
    for expected in (uncompiled, without_fxremat):  # which rounds otherwise than eager does at times
        reference = expected(step.fresh())
        differing = [options for options, found in outcomes if not have_same_bits(found, reference)]
        if not differing:
            break
    wrong += [f"{step}, {options}: results, gradients or buffers are not PyTorch's" for options in differing]
    return wrong + [f"    {each}" for each in surprises(step)] if wrong else []


def _outcome(step: Step, options: dict[str, Any]) -> Outcome:
    """What the step leaves behind, within the least budget if no plan fits half of the peak."""
    while True:
        try:
            return outcome(step.fresh(), **options)
        except fxremat.InfeasibleBudgetError as error:
            if error.lowest_peak_bytes <= (error.budget_bytes or 0):
                raise
            options = {**options, "budget": error.lowest_peak_bytes}


def _raise_if_refused(step: Step) -> None:
    try:
        without_fxremat(step.fresh())
    except Exception as error:
        raise Refused(str(error).splitlines()[0]) from error


def _excess(step: Step, found: Outcome) -> Iterator[str]:
    if not found.is_kept:
        yield f"it takes {found.measured_bytes} bytes, {found.predicted_bytes} are predicted"
    if not found.is_tight:
        loose = f"{step} takes {found.measured_bytes} bytes of {found.predicted_bytes} that are predicted"
        warnings.warn(loose, stacklevel=2)


def _all_complaints(case: Case) -> list[str]:
    return [each for step in steps(case) for each in complaints(step)]


@pytest.mark.parametrize("name", FEW)
def test_a_few_families(name: str) -> None:
    """One of each kind: predicted peaks are kept, and gradients are those without recomputation."""
    assert _all_complaints(family(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, layout: str) -> None:
    """The same for every family, however its operands lie in memory."""
    assert _all_complaints(family(name, layout)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_database(part: int, dtype: torch.dtype) -> None:
    """The same for every operator of torch's database, a few samples each."""
    pytest.importorskip("expecttest", reason=NEEDED)
    found: list[str] = []
    for op in database()[part::PARTS]:
        if dtype in op.dtypes and op.formatted_name not in EXCLUDED:
            found += _complaints_of(op, dtype)
    assert found == []


def _complaints_of(op: Any, dtype: torch.dtype) -> Iterator[str]:
    for case in cases(op, dtype, SAMPLES):
        try:
            yield from complaints(case)
        except torch._dynamo.exc.TorchDynamoException as error:
            warnings.warn(f"{case.name} is no step: {str(error).splitlines()[0]}", stacklevel=2)
