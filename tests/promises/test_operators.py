"""Every operator by itself: no step takes more than its predicted peak, and no plan changes a bit.

Held against eager are the results, gradients and buffers of two steps under each plan; where eager and
PyTorch's own backend ``"aot_eager"`` round in two ways, one of both.

Python numbers that become tensors while an operator runs are left out: ``NUMBER_BYTES`` a node at most.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from families import FAMILIES, LAYOUTS, family
from operators import (
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

# OpInfos that make no step, and why.
EXCLUDED = {
    "allclose": "it returns a Python number",
    "broadcast_shapes": "it returns sizes",
    "equal": "it returns a Python number",
    "item": "it returns a Python number",
    "sparse_mm_reduce": "it takes sparse operands",
    "sparse_sampled_addmm": "it takes sparse operands",
}

# How PyTorch's own "aot_eager" says that it refuses a step, and why it does. Any other refusal is a failure.
REFUSALS = {
    "Could not guard on data-dependent expression": "what is traced depends on numbers",
    "Data dependent operator": "it reads a number",
    "Dynamic shape operator": "the size of a result depends on numbers",
    "Runtime assertion failed for expression": "what is traced depends on numbers",
    "RuntimeError when making fake tensor call": "the operator does not take the sample where it is traced",
}

# Operators whose results are whatever was there: their bits are not compared.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Operators whose results have a size that is not known when a plan is made: their peaks are not compared.
UNSIZED = {
    "argwhere": "one row for each number that is not zero",
    "combinations": "it selects by a mask",
    "masked_select": "one number for each true one in a mask",
    "nonzero": "one row for each number that is not zero",
    "unique": "one number for each different one",
    "unique_consecutive": "one number for each different one",
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
    "lu_solve batched",
    "median",
    "mm sliced",
    "mvlgamma",
    "pad reflect",
    "roll 2",
    "select_scatter of rows",
    "slice_scatter of rows",
    "var_mean",
)


# How each kind of step is compiled. What is outside of the graph is the loss's tangent alone.
LEAST, HALF = ({"budget": budget, "scope": "graph"} for budget in ("min", 0.5))
PLANS: dict[type[Step], tuple[dict[str, Any], ...]] = {
    Trained: ({"planner": "keep_all", "inplace": False}, LEAST, HALF),
    Constant: (LEAST,),
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
    wrong = []
    if step.case.operator not in UNSIZED:
        wrong = [f"{step}, {options}: {each}" for options, found in outcomes for each in _excess(step, found)]
    if step.case.operator not in UNDEFINED:
        differing = _differing(step, outcomes)
        wrong += [f"{step}, {each}: results, gradients or buffers are not PyTorch's" for each in differing]
    return wrong + [f"    {each}" for each in surprises(step)] if wrong else []


def _differing(step: Step, outcomes: Sequence[tuple[dict[str, Any], Outcome]]) -> list[dict[str, Any]]:
    """The plans that leave other bits behind than eager and "aot_eager" do, which differ at times."""
    differing = outcomes
    for reference in (uncompiled, without_fxremat):
        if differing:
            expected = reference(step.fresh())
            differing = [each for each in differing if not have_same_bits(each[1], expected)]
    return [options for options, _ in differing]


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


@pytest.mark.parametrize("name", FEW)
def test_a_few_families(name: str) -> None:
    """One of each kind: predicted peaks are kept, and what is trained is eager's."""
    trained, _ = steps(family(name))
    assert complaints(trained) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, layout: str) -> None:
    """The same for every family, however its operands lie in memory."""
    assert [each for step in steps(family(name, layout)) for each in complaints(step)] == []


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
    for step in itertools.chain.from_iterable(map(steps, cases(op, dtype, SAMPLES))):
        try:
            yield from complaints(step)
        except Refused as refusal:
            if not str(refusal).startswith(tuple(REFUSALS)):
                yield f"{step}: PyTorch refuses it: {refusal}"
