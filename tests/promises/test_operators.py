"""Every operator by itself: no step takes more than its predicted peak, and no plan changes a bit.

Held against eager are the results, gradients and buffers of two steps under each plan; where eager and
PyTorch's own backend ``"aot_eager"`` round in two ways, one of both.

Python numbers that become tensors while an operator runs are left out: ``NUMBER_BYTES`` a node at most.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
    outcomes,
    steps,
    surprises,
    uncompiled,
    without_fxremat,
)

NEEDED = "torch's database of operators needs expecttest"
PARTS = 16  # of the database, one test each
SAMPLES = {torch.float32: 2, torch.complex64: 1}  # of each operator

JITERATORS = ("unary", "binary", "binary_return_by_ref", "2inputs_2outputs", "4inputs_with_extra_args")

# OpInfos that make no step, and why.
EXCLUDED = {
    "allclose": "it returns a Python number",
    "as_strided_partial_views": "it reads what lies beside its operand, which no parameter holds",
    "broadcast_shapes": "it returns sizes",
    "equal": "it returns a Python number",
    "item": "it returns a Python number",
    "resize_": "it changes the size of its operand, which Dynamo does not trace",
    "resize_as_": "it changes the size of its operand, which Dynamo does not trace",
    "sparse_mm_reduce": "it takes sparse operands",
    **{f"jiterator_{each}": "it runs on CUDA alone" for each in JITERATORS},
    "nn_functional_batch_norm_without_cudnn": "it runs on CUDA alone",
    "nn_functional_one_hot": "it takes integers, and what it makes has no derivative",
    "sparse_sampled_addmm": "it takes sparse operands",
    "to_sparse": "it makes a sparse result",
    "torch_ops_aten__efficient_attention_forward": "it runs on CUDA alone",
    "torch_ops_aten__flash_attention_forward": "it runs on CUDA alone",
}

# How PyTorch's own "aot_eager" says that it refuses a step, and why it does. Any other refusal is a failure.
REFUSALS = {
    "Backend compiler exception": "the gradient of a complex svd asks whether numbers are close",
    "Could not guard on data-dependent expression": "what is traced depends on numbers",
    "Data dependent operator": "it reads a number",
    "Dynamic shape operator": "the size of a result depends on numbers",
    "Runtime assertion failed for expression": "what is traced depends on numbers",
    "RuntimeError when making fake tensor call": "the operator does not take the sample where it is traced",
}

# Operators whose results are whatever was there: their bits are not compared.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Operators whose memory depends on numbers that no plan can know: their peaks are not compared.
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
LEAST, HALF = ({"budget": budget, "scope": "graph", "time_limit_seconds": 0.05} for budget in ("min", 0.5))
PLANS: dict[type[Step], tuple[dict[str, Any], ...]] = {
    Trained: ({"planner": "keep_all", "inplace": False}, LEAST, HALF),
    Constant: (LEAST,),
}


class Refused(Exception):
    """PyTorch itself does not compile a step."""


class Tally(Counter[str]):
    """How many operators and steps there were, by what was seen of them; what is loose is named."""

    def take(self, found: Iterable[Outcome]) -> None:
        """Count the plans of a step, by how predicted and measured peaks compare."""
        self["steps"] += 1
        for each in found:
            apart = each.excess_bytes
            self["plans"] += 1
            self["plans as predicted" if apart == 0 else "plans above" if apart > 0 else "plans below"] += 1
            self["plans above by more than numbers"] += not each.is_kept
            self["plans below by more than 1 %"] += not each.is_tight


def complaints(step: Step, tally: Tally | None = None) -> list[str]:
    """What does not hold of a step, and the nodes of its joint graph that surprise.

    Args:
        step: The step.
        tally: Where its plans are counted.

    Raises:
        Refused: PyTorch does not compile it without fxremat either.
    """
    plans = PLANS[type(step)]
    try:
        found = dict(zip(map(str, plans), outcomes(step.fresh(), plans), strict=True))
    except Exception:  # PyTorch's, or ours
        _raise_if_refused(step)
        raise
    wrong = []
    if step.case.operator not in UNSIZED:
        (Tally() if tally is None else tally).take(found.values())
        wrong = [f"{step}, {plan}: {each}" for plan in found for each in _excess(step, found[plan])]
    if step.case.operator not in UNDEFINED:
        differing = _differing(step, found)
        wrong += [f"{step}, {each}: results, gradients or buffers are not PyTorch's" for each in differing]
    return wrong + [f"    {each}" for each in surprises(step)] if wrong else []


def _differing(step: Step, found: Mapping[str, Outcome]) -> list[str]:
    """The plans that leave other bits behind than eager and "aot_eager" do, which differ at times."""
    differing = list(found)
    for reference in (uncompiled, without_fxremat):
        if differing:
            expected = reference(step.fresh())
            differing = [each for each in differing if not have_same_bits(found[each], expected)]
    return differing


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
@pytest.mark.parametrize("dtype", SAMPLES, ids=str)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_database(part: int, dtype: torch.dtype) -> None:
    """The same for every operator of torch's database, a few samples each; ``-rP`` shows how many."""
    pytest.importorskip("expecttest", reason=NEEDED)
    found: list[str] = []
    tally = Tally()
    for op in database()[part::PARTS]:
        if dtype in op.dtypes and op.formatted_name not in EXCLUDED:
            with few_objects():
                found += _complaints_of(op, dtype, tally)
            tally["operators"] += 1
    print(dict(tally))
    assert found == []


def _complaints_of(op: Any, dtype: torch.dtype, tally: Tally) -> Iterator[str]:
    try:
        made = list(itertools.chain.from_iterable(map(steps, cases(op, dtype, SAMPLES[dtype]))))
    except Exception as error:
        yield f"{op.formatted_name} has no samples: {error!r}"
        return
    for step in made:
        try:
            yield from complaints(step, tally)
        except Refused as refusal:
            reason = next((each for each in REFUSALS if str(refusal).startswith(each)), None)
            tally[f"refused by PyTorch: {reason}"] += 1
            if reason is None:
                yield f"{step}: PyTorch refuses it: {refusal}"
        except Exception as error:
            yield f"{step} raises {error!r}"


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Meanwhile Python's collector, and who looks for a profiler among objects, sees none of those before."""
    gc.collect()
    gc.freeze()
    yield


def test_every_operator_with_a_derivative_is_tried() -> None:
    """What takes neither of the types that steps are made of is left out for a reason in the table."""
    pytest.importorskip("expecttest", reason=NEEDED)
    left_out = [
        op.formatted_name for op in database() if op.supports_autograd and not set(SAMPLES) & set(op.dtypes)
    ]
    assert [name for name in left_out if name not in EXCLUDED] == []
