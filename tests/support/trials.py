"""Trials of drawn programs: what does not hold of one within a budget, and the least that fails.

A *trial* trains a program a few times in eager, and compiled with a budget, from the same numbers. What both
leave behind is compared in every bit: outputs, gradients, parameters, buffers, inputs, the generator's state.
Eager decides; where PyTorch's own backend ``"aot_eager"`` rounds otherwise than eager, its bits do. A last
step is measured, against what was predicted of it and against the budget.

Run as a script, it tries thousands: ``python tests/support/trials.py --programs 1000 --seed 0``.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from drawn import Batch, Program, draw_program, smaller, step
from operators import NUMBER_BYTES, is_same
from torch import Tensor
from torch._dynamo.utils import counters
from training import everything

import fxremat
from fxremat.measure import measure_peak

SLACK_BYTES = 512  # to which a budget is kept
STEPS = 3
SEARCH = {"time_limit_seconds": 0.2}

# How a program may be compiled; "bytes" is three quarters of what eager's step takes.
WAYS: dict[str, dict[str, Any]] = {
    "no budget": {},
    "min": {"budget": "min", **SEARCH},
    "half": {"budget": 0.5, **SEARCH},
    "four fifths": {"budget": 0.8, **SEARCH},
    "bytes": {"budget": "bytes", **SEARCH},
    "each graph, min": {"budget": "min", "scope": "graph", **SEARCH},
    "everything again": {"planner": everything(1)},
    "everything again and again": {"planner": everything(2)},
}
# Those that take a second at most, and those that settle steps.
CHEAP = ["no budget", "each graph, min", "everything again", "everything again and again"]
DEAR = [each for each in WAYS if each not in CHEAP]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial has shown.

    Attributes:
        verdict: ``"holds"``, or what does not, in a word.
        details: What exactly.
    """

    verdict: str
    details: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing was found to be wrong; a program that PyTorch refuses shows nothing."""
        return self.verdict in ("holds", "holds, not measured", "refused by torch")


class Compiled:
    """A program that is compiled in its parts by a backend."""

    def __init__(self, program: Program, **how: Any) -> None:
        self.module = program.module()
        for part in program.parts if how else ():
            setattr(self.module, part, torch.compile(getattr(self.module, part), **how))

    def __call__(self, *given: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = self.module(*given)
        return outputs


def left_behind(program: Program, **how: Any) -> tuple[Compiled, list[dict[str, Any]]]:
    """What a few steps of a program leave behind, each by name."""
    compiled = Compiled(program, **how)
    left = []
    for seed in range(STEPS):
        compiled.module.zero_grad(set_to_none=True)
        batch = program.batch()
        torch.manual_seed(seed)
        outputs = step(compiled, batch)
        found: dict[str, Any] = {f"output {place}": each for place, each in enumerate(outputs)}
        found |= {f"gradient of leaf {place}": each.grad for place, each in enumerate(batch.leaves)}
        found |= {f"input {place}": each for place, each in enumerate(batch.given)}
        for name, each in (*compiled.module.named_parameters(), *compiled.module.named_buffers()):
            found |= {name: each, f"gradient of {name}": each.grad if each.is_leaf else None}
        found["generator"] = torch.get_rng_state()
        left.append({name: _kept(each) for name, each in found.items()})
    return compiled, left


def _kept(value: Tensor | None) -> tuple[Tensor, bool] | None:
    """A copy of a tensor, and whether autograd goes on from it."""
    return None if value is None else (value.detach().clone(), value.requires_grad)


def differing(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """The names of what differs, and in which step it first does."""
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        names = [name for name in theirs if not _agree(ours.get(name), theirs[name])]
        if names:
            return [f"step {place}", *names]
    return []


def _agree(found: Any, expected: Any) -> bool:
    if found is None or expected is None:
        return found is expected
    return found[1] == expected[1] and is_same(found[0], expected[0])


def tried(program: Program, way: str) -> Trial:
    """Train a program in one of the ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = left_behind(program)[1]
        except Exception as error:  # of eager, whatever it is
            return Trial("refused by torch", repr(error))
        try:
            return _tried(program, dict(WAYS[way]), expected)
        except Exception as error:  # of ours, or of PyTorch's
            told = traceback.format_exc()
            try:
                torch._dynamo.reset()
                left_behind(program, backend="aot_eager")
            except Exception as theirs:  # which PyTorch raises without us
                return Trial("refused by torch", repr(theirs))
            return Trial(f"raises {type(error).__name__}", told)


def _tried(program: Program, options: dict[str, Any], expected: list[dict[str, Any]]) -> Trial:
    if options.get("budget") == "bytes":
        options["budget"] = max(1, _step_bytes(program) * 3 // 4)
    known = len(fxremat.reports()), len(fxremat.steps())
    compiled, found = _compiled(program, options)
    measured = _measured(program, compiled, options, known)
    wrong = differing(found, expected)
    if wrong:
        torch._dynamo.reset()
        reference = left_behind(program, backend="aot_eager")[1]
        against = differing(found, reference)
        if against:
            return Trial("differs", f"from eager: {wrong}; from aot_eager: {against}")
    return measured


def _compiled(program: Program, options: dict[str, Any]) -> tuple[Compiled, list[dict[str, Any]]]:
    """Train with the options; with the least budget that is possible if theirs is less."""
    for _ in range(4):
        torch._dynamo.reset()
        counters.clear()
        try:
            return left_behind(program, backend="fxremat", options={"compiler": "eager", **options})
        except fxremat.InfeasibleBudgetError as error:
            refused = error
            options["budget"] = error.lowest_peak_bytes
    raise refused


def _step_bytes(program: Program) -> int:
    module, batch = program.module(), program.batch()
    return _peak_bytes(lambda: step(module, batch))


def _measured(program: Program, compiled: Compiled, options: dict[str, Any], known: tuple[int, int]) -> Trial:
    """A last step, measured against what was predicted of it, and against its budget.

    Left out are steps of which a graph has no backward: what PyTorch does with that is not known.

    Args:
        known: How many reports of graphs, and of steps, there were before.
    """
    reports, steps = fxremat.reports()[known[0] :], fxremat.steps()[known[1] :]
    graphs = counters["stats"]["unique_graphs"]
    batch = program.batch()
    compiled.module.zero_grad(set_to_none=True)
    if options.get("budget") is not None and options.get("scope") != "graph":
        if not steps or len(steps[-1].calls) < graphs:
            return Trial("holds, not measured")
        report: Any = steps[-1]
        measured_bytes = _peak_bytes(lambda: step(compiled, batch))
        slack_bytes = SLACK_BYTES
    else:
        wanted = [each for each in (*batch.given, *compiled.module.parameters()) if each.requires_grad]
        if (
            not program.has_loss
            or graphs != 1
            or len(reports) != 1
            or not all(each.is_leaf for each in wanted)
        ):
            return Trial("holds, not measured")
        (report,) = reports
        measured_bytes = _peak_bytes(lambda: _gradients(compiled, batch, wanted))
        slack_bytes = NUMBER_BYTES * report.num_nodes
    if measured_bytes > report.peak_bytes + slack_bytes:
        return Trial("exceeds", f"{measured_bytes} bytes, {report.peak_bytes} predicted\n{report}")
    if report.budget_bytes is not None and measured_bytes > report.budget_bytes + slack_bytes + SLACK_BYTES:
        return Trial("exceeds the budget", f"{measured_bytes} bytes, budget {report.budget_bytes}\n{report}")
    return Trial("holds")


def _peak_bytes(step: Callable[[], object]) -> int:
    torch.manual_seed(0)
    return measure_peak(step, device="cpu").peak_bytes


def _gradients(compiled: Compiled, batch: Batch, wanted: Sequence[Tensor]) -> Any:
    """Outputs and gradients; these are not accumulated, which may take a copy that no graph knows of."""
    outputs = compiled(*batch.given)
    return outputs, torch.autograd.grad(outputs[0], wanted, allow_unused=True)


def least(program: Program, way: str, verdict: str, most: int = 60) -> Program:
    """A smaller program of which the same does not hold."""
    tries = 0
    candidates = smaller(program)
    while tries < most:
        each = next(candidates, None)
        if each is None:
            break
        tries += 1
        if tried(each, way).verdict == verdict:
            program = each
            candidates = smaller(program)
    return program


def main() -> None:
    """Try so many programs, each in two ways or three, and print those that fail."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next have the next")
    parser.add_argument("--statements", type=int, default=14, help="of a program, at most")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.time()
    gc.freeze()  # what stands is not looked through each time
    for seed in range(given.seed, given.seed + given.programs):
        chance = random.Random(seed)
        program = draw_program(chance, given.statements)
        if program is None:
            counts["no program"] += 1
            continue
        for way in chance.sample(CHEAP, 2) + chance.choices(DEAR, k=seed % 3 == 0):
            trial = tried(program, way)
            counts[trial.verdict] += 1
            if not trial.holds:
                print(f"--- seed {seed}, {way}: {trial.verdict}", flush=True)
                found = least(program, way, trial.verdict)
                print(f"{tried(found, way).details}\n{found}", flush=True)
        if seed % 20 == 0:
            print(f"... {seed} {time.time() - began:.0f} s {dict(counts)}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
