"""Programs drawn at random train as in eager, in every bit, and keep to what was predicted of them.

``python tests/support/trials.py --programs 1000 --seed 0`` tries more of them, and shows the least that fail;
``python tests/support/campaign.py`` runs the plans of tens of thousands, without Dynamo.
"""

from __future__ import annotations

import random

import pytest
import torch
from campaign import HOLDING, KINDS, Refused, run_many, try_all
from drawn import Program, draw_program
from graphs import few
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from trials import CHEAP, WAYS, left_behind, tried

import fxremat

MANY = 25  # programs of a slow test


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that eager trains."""
    program = draw_program(draw(st.randoms(use_true_random=False)), most=10)
    assume(program is not None)
    assert program is not None
    return program


@few(6)
@given(programs(), st.sampled_from(CHEAP))
def test_drawn_programs_train_alike(program: Program, way: str) -> None:
    """Outputs, gradients, buffers, inputs and random numbers are eager's; the peak is as predicted."""
    trial = tried(program, way)
    assert trial.holds, trial


@few(3)
@given(programs())
def test_drawn_programs_are_planned_alike_each_time(program: Program) -> None:
    """The same program has the same schedules when it is compiled again."""
    assert schedules(program) == schedules(program)


def schedules(program: Program) -> list[tuple[str, ...]]:
    """The schedules of a program's graphs."""
    torch._dynamo.reset()
    count = len(fxremat.reports())
    left_behind(program, backend="fxremat", options={"compiler": "eager", **WAYS["each graph, min"]})
    return [tuple(each.solution.schedule) for each in fxremat.reports()[count:]]


@few(20)
@given(st.integers(0, 1 << 30))
def test_plans_of_drawn_graphs_compute_alike(seed: int) -> None:
    """Plans of joint graphs that no model has made: the same in every bit, no byte above the prediction."""
    assert [seen for _, seen in try_all("graphs", seed) if seen not in HOLDING] == []


@few(8)
@given(st.integers(0, 1 << 30))
def test_plans_of_drawn_programs_compute_alike(seed: int) -> None:
    """The same of joint graphs that AOTAutograd makes of programs, each plan that a budget gets."""
    try:
        seen = [seen for _, seen in try_all("programs", seed)]
    except Refused:
        reject()
    assert [each for each in seen if each not in HOLDING] == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", range(4))
def test_many_drawn_programs_train_alike(part: int, way: str) -> None:
    """The same of many more, larger ones."""
    failed = []
    for seed in range(part * MANY, (part + 1) * MANY):
        program = draw_program(random.Random(seed))
        trial = tried(program, way) if program is not None else None
        if trial is not None and not trial.holds:
            failed.append(f"seed {seed}: {trial}{program}")
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_many_compute_alike(kind: str) -> None:
    """The same without Dynamo, of hundreds of joint graphs of either kind."""
    assert run_many(kind, first=0, count=400) == 0
