"""The race of one model: its peers, fxremat where they stand, and the time of all of them in turn.

Each candidate trains a copy of the network with the same weights. Its first step compiles it, and must give
eager's loss and gradients; its third is measured at the allocator, from no gradients. A candidate that raises
an error or gives something else is reported and not timed.

fxremat is given each peer's measured peak as its budget, in bytes. If what it does then is measured above
that, a budget is tried that is lower by the same ratio. What a larger budget gave, or none, serves a lower
peak as well where it is measured to fit. Where Inductor's peaks stay too high, ``compiler="eager"`` is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import random
import time
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from budgets import Reference
from racing import peers as peers_of
from racing import wrapping
from racing.compare import AGAIN, OURS, Candidate
from torch import Tensor, nn
from torch._inductor import config as _inductor

import fxremat
from fxremat.measure import measure_peak, time_steps

__all__ = ["Race"]

_TRIES = 4  # budgets tried for one peer: each is lower by the ratio that the last one's peak was too high by
_SEED = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """A module, and what is called in its place."""

    module: nn.Module
    call: Callable[..., Any]

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.call(*inputs)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's."""
        return self.module.named_parameters()


@dataclass
class Runner:
    """A candidate that can take steps."""

    found: Candidate
    program: Program
    seconds: list[float] = field(default_factory=list)

    def candidate(self) -> Candidate:
        """What it took so far."""
        return dataclasses.replace(self.found, seconds=tuple(self.seconds))


class Race:
    """One model at one scale.

    Args:
        model: The name of its case.
        scale: One of ``models.SCALES``.
        compiler: ``"inductor"``; ``"eager"`` leaves out all that needs generated code, and has eager's time
            as the unit.
        device: Where it is trained.
        progress: Is told what is under way.
    """

    def __init__(
        self,
        model: str,
        scale: str,
        *,
        compiler: str = "inductor",
        device: str = "cpu",
        progress: Progress = lambda stage: None,
    ) -> None:
        self.case = models.case(model, scale)
        self.compiler = compiler
        self.device = device
        self.progress = progress
        self.runners: list[Runner] = []
        self.failed: list[Candidate] = []
        _, self.inputs = self._fresh()
        self.reference = self._reference()

    def run(self, families: Collection[str] = peers_of.FAMILIES, rounds: int = 15) -> list[Candidate]:
        """Prepare all candidates and time them; the first is the unit of the ratios."""
        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            _inductor.patch(fx_graph_cache=False),
        ):
            self._prepare(families)
            self._time(rounds)
        return [*(runner.candidate() for runner in self.runners), *self.failed]

    def _prepare(self, families: Collection[str]) -> None:
        names = list(wrapping.ways(self.case.name, *self._fresh(), wrapping.checkpointed()))
        compilers = (True, False) if self.compiler == "inductor" else (False,)
        unit, *others = peers_of.peers(names, families, compilers)
        if self.add_peer(unit) is None:
            raise RuntimeError(f"nothing can be compared with {unit.name}: {self.failed[0].problem}")
        self.add_peer(dataclasses.replace(unit, name=f"{unit.name}, again", family=AGAIN))
        for peer in others:
            self.add_peer(peer)
        self._add_ours()

    # --- Candidates -------------------------------------------------------------------------------

    def add_peer(self, peer: peers_of.Peer) -> Runner | None:
        """Compile, check and measure a peer; None if it is not fit to be timed."""

        def prepare(module: nn.Module) -> Callable[..., Any]:
            peer.wrap(self.case.name, module, self.inputs)
            return torch.compile(loss_of(module), fullgraph=True) if peer.is_compiled else module

        return self._add(peer.name, peer.family, prepare, peer.while_compiling())

    def _add(
        self,
        name: str,
        family: str,
        prepare: Callable[[nn.Module], Callable[..., Any]],
        while_compiling: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Runner | None:
        """Compile, check and measure a candidate; None if it is not fit to be timed."""
        self.progress(name)
        module, _ = self._fresh()
        start = time.perf_counter()
        try:
            program = Program(module, prepare(module))
            with while_compiling or contextlib.nullcontext():
                state = self._state(program)
            seconds = time.perf_counter() - start
            wrong = _differences(self.reference, state)
            self._step(program)
            module.zero_grad(set_to_none=True)
            peak = measure_peak(lambda: self._step(program), device=self.device).peak_bytes
        except Exception as error:  # whatever a peer raises: it is told in its row
            problem = f"{type(error).__name__}: {error}".split("\n")[0]
            self.failed.append(Candidate(name, family, problem))
            return None
        finally:
            module.zero_grad(set_to_none=True)
            gc.collect()
        found = Candidate(name, family, wrong, peak, details={"first_step_seconds": seconds})
        if wrong:
            self.failed.append(found)
            return None
        self.runners.append(Runner(found, program))
        return self.runners[-1]

    def _add_ours(self) -> None:
        peaks = sorted({runner.found.peak_bytes for runner in self.runners}, reverse=True)  # the peers'
        compilers = ("inductor", "eager") if self.compiler == "inductor" else ("eager",)
        seekers = [Seeker(self, compiler) for compiler in compilers]
        seekers[0].default()
        for seeker in seekers:
            seeker.least()
        for peak_bytes in peaks:
            for seeker in seekers:
                if seeker.fit(peak_bytes):
                    break

    # --- Steps ------------------------------------------------------------------------------------

    def _fresh(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        module, inputs = models.fresh(self.case)
        return module.to(self.device), tuple(each.to(self.device) for each in inputs)

    def _step(self, program: Any) -> object:
        """A training step, which leaves its gradients to be dropped."""
        return models.train_step(program, self.inputs)

    def _state(self, program: Any) -> dict[str, Tensor]:
        torch.manual_seed(_SEED)
        loss, gradients = models.train_step(program, self.inputs)
        return {"loss": loss, **{name: each.clone() for name, each in gradients.items()}}

    def _reference(self) -> Reference:
        """Eager's loss and gradients, and how far each may be off (see bench/budgets.py)."""
        self.progress("eager's gradients")
        module, _ = self._fresh()
        expected = self._state(module)
        moved = [self._moved(seed) for seed in range(3)]
        tolerance = {}
        for key, tensor in expected.items():
            change = max((each[key] - tensor).abs().max().item() for each in moved)
            tolerance[key] = max(1e-4 * tensor.abs().max().item(), 4 * change)
        return Reference(expected, tolerance)

    def _moved(self, seed: int) -> dict[str, Tensor]:
        """The same when each parameter is changed by one rounding, up or down."""
        module, _ = self._fresh()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + signs.to(self.device) * torch.finfo(parameter.dtype).eps)
        return self._state(module)

    def _time(self, rounds: int) -> None:
        """Time all candidates in rounds, each round in another order: none follows the same one always."""
        shuffle = random.Random(_SEED).shuffle
        gc.collect()
        gc.freeze()  # so that collecting before each step is quick, and none collects while it is timed
        gc.disable()
        for number in range(rounds + 1):  # the first is for warming up
            self.progress(f"round {number} of {rounds}")
            order = list(self.runners)
            shuffle(order)
            for runner in order:
                gc.collect()
                step = functools.partial(self._step, runner.program)
                taken = time_steps({"": step}, rounds=1, warmup=0)[""]
                runner.program.module.zero_grad(set_to_none=True)
                runner.seconds += taken if number else []
        gc.enable()
        gc.unfreeze()


class Seeker:
    """Asks fxremat for measured peaks, under one compiler."""

    def __init__(self, race: Race, compiler: str) -> None:
        self.race = race
        self.compiler = compiler
        self.served: dict[float, Runner] = {}  # by their budgets, infinity for none

    def default(self) -> None:
        """What it does without a budget."""
        self._ask(math.inf, None, "no budget")

    def least(self) -> None:
        """The least peak that it finds."""
        self._ask(0, "min", "min")

    def fit(self, peak_bytes: int) -> bool:
        """Whether something was found whose measured peak is not above the one given."""
        budget = peak_bytes
        for _ in range(_TRIES):
            runner = self._serving(budget, peak_bytes)
            runner = runner or self._ask(budget, budget, f"{budget / 2**20:.4f} MiB")
            if runner is None:
                return False
            if runner.found.peak_bytes <= peak_bytes:
                return True
            budget = budget * peak_bytes // runner.found.peak_bytes
        return False

    def _serving(self, budget: int, peak_bytes: int) -> Runner | None:
        """What a larger budget, or none, gave, if it is measured to fit the peak as well."""
        larger = (runner for asked, runner in self.served.items() if asked >= budget)
        return next((runner for runner in larger if runner.found.peak_bytes <= peak_bytes), None)

    def _ask(self, number: float, budget: float | str | None, name: str) -> Runner | None:
        runner = self.compile(budget, f"{OURS}, {self.compiler}, {name}")
        if runner is not None:
            self.served[number] = runner
        return runner

    def compile(self, budget: float | str | None, name: str) -> Runner | None:
        """Compile, check and measure fxremat at a budget; None if it is not fit to be timed."""
        options = {"budget": budget, "compiler": self.compiler}

        def prepare(module: nn.Module) -> Callable[..., Any]:
            return torch.compile(loss_of(module), fullgraph=True, backend="fxremat", options=options)

        count = len(fxremat.reports())
        runner = self.race._add(name, OURS, prepare)
        own = fxremat.reports()[count:]
        if runner is not None:  # without a graph break, so with one report
            report = own[-1]
            time_ratio = report.solution.seconds / report.baseline_seconds
            runner.found = dataclasses.replace(
                runner.found,
                rank=(self.compiler == "eager", time_ratio, report.peak_bytes),
                details={
                    **(runner.found.details or {}),
                    "budget": budget,
                    "predicted_peak_bytes": report.peak_bytes,
                    "predicted_time_ratio": time_ratio,
                    "recomputed_nodes": sum(report.solution.mirror_counts.values()),
                    "planning_seconds": report.planning_seconds,
                },
            )
        return runner


def loss_of(module: nn.Module) -> Callable[..., Tensor]:
    """What to compile instead of a module: a function with a code object of its own.

    Dynamo keeps what it compiled with the code, and would serve one candidate with the graph of another
    whose modules look alike.
    """

    def forward(*inputs: Tensor) -> Tensor:
        return module(*inputs)

    alone = forward.__code__.replace(co_name="loss_of")
    return types.FunctionType(alone, forward.__globals__, "loss_of", None, forward.__closure__)


def _differences(reference: Reference, state: dict[str, Tensor]) -> str:
    """Empty, or what of a step is not eager's."""
    if reference.equals(state):
        return ""
    keys = [
        key
        for key, tensor in reference.expected.items()
        if key not in state or not (state[key] - tensor).abs().max().item() <= reference.tolerance[key]
    ]
    return f"wrong: {keys[0] if keys else 'further gradients'} ({len(keys)} of {len(reference.expected)})"
