"""How long recomputation really takes: training steps of a network under several planners, side by side.

Each strategy compiles a network of its own, from the same weights and for the same batch, and runs its
graphs as they are (``compiler="eager"``). Steps are taken in turn, so that a machine whose speed drifts
is fair to each, and on a CPU on one thread; a ratio is the median over the rounds. Peaks are those of one
more step.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxremat._torch import compilers
from fxremat.driver.backend import fxremat_backend
from fxremat.driver.journal import reports
from fxremat.measure import measure_peak, time_steps
from fxremat.report.report import Report

__all__ = ["Timing", "time_network"]

_SEED = 0
_AT_EQUAL_PEAK = "auto at sublinear's peak"


@dataclass(frozen=True, slots=True)
class Timing:
    """What a training step took under one strategy.

    Attributes:
        network: ``"resnet"`` or ``"lstm"``.
        size: Its layers, or its steps.
        strategy: The strategy; ``"none"`` recomputes nothing.
        step_seconds: Median seconds of a step.
        ratio: Its time to that of ``"none"``, the median over rounds.
        predicted_ratio: The same by the cost model.
        peak_bytes: Measured peak of a step.
        predicted_peak_bytes: The same by the memory model.
    """

    network: str
    size: int
    strategy: str
    step_seconds: float
    ratio: float
    predicted_ratio: float
    peak_bytes: int
    predicted_peak_bytes: int


Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


class _Run:
    """One strategy's network, compiled by its first step."""

    def __init__(self, build: Build, device: str, options: dict[str, Any]) -> None:
        torch.manual_seed(_SEED)
        with torch.device(device):
            self.model, self.inputs = build()
        compiled = torch.compile(
            self.model, backend=fxremat_backend, options={"compiler": "eager", **options}
        )
        self.loss_of = compiled
        self.step()
        self.report: Report = reports()[-1]

    def step(self) -> None:
        """A forward and a backward that starts without gradients."""
        self.model.zero_grad(set_to_none=True)
        self.loss_of(*self.inputs).backward()


def time_network(network: str, size: int, build: Build, device: str, rounds: int) -> list[Timing]:
    """Compile a network for each strategy, run it, and compare; the first is ``"none"``."""
    torch.compiler.reset()  # or else each size would add to the recompilations of the same code
    with compilers.unlimited_recompilation():
        return _timings(network, size, dict(_runs(build, device)), device, rounds)


def _timings(network: str, size: int, runs: dict[str, _Run], device: str, rounds: int) -> list[Timing]:
    with _one_thread():
        seconds = time_steps({name: run.step for name, run in runs.items()}, rounds=rounds, warmup=1)
    timings = []
    for name, run in runs.items():
        run.model.zero_grad(set_to_none=True)
        ratios = [own / base for own, base in zip(seconds[name], seconds["none"], strict=True)]
        timings.append(
            Timing(
                network,
                size,
                name,
                statistics.median(seconds[name]),
                statistics.median(ratios),
                run.report.solution.seconds / run.report.baseline_seconds,
                measure_peak(run.step, device=device).peak_bytes,
                run.report.peak_bytes,
            )
        )
        run.model.zero_grad(set_to_none=True)
    return timings


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """While it holds, operators on the CPU use one thread: several wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _runs(build: Build, device: str) -> Iterable[tuple[str, _Run]]:
    run = functools.partial(_Run, build, device)
    yield "none", run({"planner": "keep_all"})
    yield "sublinear", (sublinear := run({"planner": "sublinear", "budget": "min"}))
    yield "recursive", run({"planner": "recursive", "budget": "min"})
    yield "auto", run({"planner": "auto", "budget": "min"})
    yield _AT_EQUAL_PEAK, run({"planner": "auto", "budget": sublinear.report.peak_bytes})
