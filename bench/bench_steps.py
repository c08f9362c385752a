"""A training step of each network under each system: its time, and its measured and predicted peak.

    pytest bench --benchmark-json steps.json

On a GPU the networks have the sizes of the scale ``gpu``. Without one they are small, what needs Inductor is
left to ``-m slow``, and the figures only show that it works: ``scale`` says so in each benchmark's extra
info, and in its name. Beside fxremat stand eager, Inductor, checkpoint and selective checkpoint in both, and
torch's activation memory budgets. Each system's loss and gradients are checked against eager's before it is
timed (bench/frontier.md says how); compiling is no part of the time.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from racing import peers, wrapping
from racing.race import Race, Runner, Seeker

HAS_GPU = torch.cuda.is_available()
DEVICE, SCALE = ("cuda", "gpu") if HAS_GPU else ("cpu", "small")
NETWORKS = (
    "resnet50",
    "resnet152",
    "language_model",
    "llama",
    "unet",
    "vision_transformer",
    "lstm",
)
BUDGETS: tuple[float | str | None, ...] = (None, 0.5, "min")
ROUNDS = 15 if HAS_GPU else 3


@dataclass(frozen=True)
class System:
    """A way to train.

    Attributes:
        name: What results call it.
        needs_inductor: Whether it compiles generated code.
        prepare: Adds it to a race, compiled, checked and measured; None if something was wrong.
    """

    name: str
    needs_inductor: bool
    prepare: Callable[[Race], Runner | None]


def torchs() -> Iterator[System]:
    """What torch itself has, checkpoint around the network's smallest pieces."""
    for peer in peers.peers(["smallest"], peers.FAMILIES, (True, False)):
        yield System(peer.name, peer.is_compiled, functools.partial(_add_peer, peer))


def _add_peer(peer: peers.Peer, race: Race) -> Runner | None:
    if peer.way is None:
        return race.add_peer(peer)
    names = wrapping.ways(race.case.name, *race._fresh(), wrapping.checkpointed())
    return race.add_peer(dataclasses.replace(peer, way=next(iter(names))))


def ours() -> Iterator[System]:
    """fxremat without a budget, at half of the peak, and at its least peak."""
    for compiler in ("inductor", "eager"):
        for budget in BUDGETS:
            name = f"fxremat, {compiler}, {'no budget' if budget is None else budget}"
            prepare = functools.partial(_add_ours, compiler, budget, name)
            yield System(name, compiler == "inductor", prepare)


def _add_ours(compiler: str, budget: float | str | None, name: str, race: Race) -> Runner | None:
    return Seeker(race, compiler).compile(budget, name)


@functools.lru_cache(maxsize=1)  # one network's weights and reference on the device at a time
def race_of(network: str) -> Race:
    """The race that systems of a network are added to, one at a time."""
    return Race(network, SCALE, device=DEVICE)


def case(system: System) -> object:
    """The system as a parameter; compiling for a CPU takes too long for every run."""
    marks = [pytest.mark.slow] if system.needs_inductor and not HAS_GPU else []
    return pytest.param(system, id=system.name, marks=marks)


@pytest.mark.parametrize("system", [case(each) for each in (*torchs(), *ours())])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda name: f"{name}, {SCALE}")
def test_step(benchmark: BenchmarkFixture, network: str, system: System) -> None:
    """Loss and gradients are eager's; time and peak are recorded."""
    torch.backends.cudnn.allow_tf32 = False  # or else no gradient would be eager's
    race = race_of(network)
    count = len(race.failed)
    runner = system.prepare(race)
    if runner is None:
        problem = race.failed[count].problem
        assert problem.startswith("InfeasibleBudgetError"), problem
        pytest.skip(problem)
    try:
        benchmark.pedantic(
            _step, (race, runner), setup=runner.program.module.zero_grad, rounds=ROUNDS, warmup_rounds=1
        )
    finally:
        race.runners.clear()
        gc.collect()
    details = runner.found.details or {}
    benchmark.extra_info.update(
        device=torch.cuda.get_device_name() if HAS_GPU else platform.machine(),
        torch=torch.__version__,
        scale=SCALE,
        peak_bytes=runner.found.peak_bytes,
        **{name: details[name] for name in ("predicted_peak_bytes", "recomputed_nodes") if name in details},
    )


def _step(race: Race, runner: Runner) -> None:
    race._step(runner.program)
    if HAS_GPU:
        torch.cuda.synchronize()
