"""Programs drawn at random train as in eager, in every bit, and keep to what was predicted of them.

``python tests/support/trials.py --programs 1000 --seed 0`` tries more of them, and shows the least that fail.
"""

from __future__ import annotations

import random

import pytest
import torch
from drawn import Program, draw_program
from graphs import few
from hypothesis import assume, given
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
