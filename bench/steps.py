"""Does a budget bound a step of many graphs, and what does it cost beside checkpointing by hand?

    OMP_NUM_THREADS=1 python bench/steps.py --networks transformer --compiler eager --json results.json

The stages of a network (its blocks, say) are compiled one by one, and the loss is outside. Beside fxremat at
each budget stand plain ``torch.compile`` of each stage, and ``torch.utils.checkpoint`` around several
at once; and fxremat with all stages compiled as one. With ``--compiler eager`` peers run their graphs as they
are, too (``aot_eager``). The first step of each must give eager's loss and gradients.

Columns:
    budget, predicted, measured: MiB; the peak is that of a step behind three others, from no gradients.
    learning: seconds of the first two steps, in which plans are learnt, settled and compiled.
    time: as a ratio to plain ``torch.compile``: the median of rounds in which each takes one step.
    peer, to it: the fastest peer that takes no more than 2 % above the measured peak, and the ratio to that.

The noise of ratios within one process is no measure of that between processes: figures worth quoting take
three runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import attention
import networks
import torch
from provenance import provenance
from racing.compare import interval
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import fxremat
from fxremat.measure import measure_peak, time_steps

MIB = 2**20
BUDGETS = ("70", "82", "100", "135", "200", "300", "min")  # MiB
SPANS = (1, 2, 3)  # stages that a peer checkpoints at once
ROUNDS = 9
SAME_PEAK = 1.02
TOLERANCE = {"eager": 1e-6, "inductor": 1e-4}  # of the largest element of a gradient

Network = tuple[list[nn.Module], Tensor]  # the stages, and the batch
Wrap = Callable[[Sequence[nn.Module]], Sequence[Callable[[Tensor], Tensor]]]


class Experts(nn.Module):
    """A dense mixture of four experts, of which two have a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream behind the experts."""
        normed = self.norm(x)
        weights, chosen = self.gate(normed).softmax(-1).topk(2, -1)
        for index, expert in enumerate(self.experts):
            x = x + (weights * (chosen == index)).sum(-1, keepdim=True) * expert(normed)
        return x


def convolutions(before: int, after: int) -> nn.Module:
    """Two convolutions; the first halves the image where the width grows."""
    stride = after // before
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, 1, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def resnet() -> Network:
    """Three stages of six residual blocks each."""
    stages: list[nn.Module] = []
    for before, after in ((32, 32), (32, 64), (64, 128)):
        blocks = (networks.Residual(convolutions(after, after)) for _ in range(6))
        stages.append(nn.Sequential(convolutions(before, after), *blocks))
    return stages, torch.randn(16, 32, 32, 32)


def repeated(make: Callable[[], nn.Module]) -> Network:
    """Twelve blocks and a linear layer on a batch of 8 sequences of 256 vectors."""
    return [*(make() for _ in range(12)), nn.Linear(256, 256)], torch.randn(8, 256, 256)


NETWORKS: dict[str, Callable[[], Network]] = {
    "transformer": lambda: repeated(lambda: attention.Block(256, 4, causal=True)),
    "llama": lambda: repeated(lambda: attention.LlamaBlock(256, 4, 256)),
    "experts": lambda: repeated(lambda: nn.Sequential(attention.Block(256, 4, causal=True), Experts(256))),
    "resnet": resnet,
}


@dataclass
class System:
    """A way to train a network.

    Attributes:
        name: What results call it.
        is_peer: Whether it has nothing of fxremat.
        wrap: What it makes of the stages.
    """

    name: str
    is_peer: bool
    wrap: Wrap


@dataclass
class Figures:
    """What a system took.

    Attributes:
        name: Of the system.
        is_peer: Whether it has nothing of fxremat.
        problem: Why it was not measured; empty if it was.
    """

    name: str
    is_peer: bool
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    learning_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    problem: str = ""


class Trained:
    """A network with the same weights each time, under a system."""

    def __init__(self, network: str, wrap: Wrap) -> None:
        torch.manual_seed(0)
        stages, self.batch = NETWORKS[network]()
        self.modules = nn.ModuleList(stages)
        self.calls = wrap(stages)

    def step(self) -> Tensor:
        """A step that begins without gradients: its loss."""
        self.modules.zero_grad()
        x = self.batch
        for call in self.calls:
            x = call(x)
        loss = functional.mse_loss(x, torch.zeros(()).expand_as(x))
        loss.backward()
        return loss.detach()

    def outcome(self) -> list[Tensor]:
        """Loss and gradients of a step."""
        loss = self.step()
        return [loss, *(each.grad.clone() for each in self.modules.parameters() if each.grad is not None)]


def checkpointed(span: int, backend: str, stages: Sequence[nn.Module]) -> list[Callable[[Tensor], Tensor]]:
    """Each stage compiled, so many of them inside of one checkpoint."""
    calls = [torch.compile(stage, backend=backend) for stage in stages]

    def through(some: Iterable[Any], x: Tensor) -> Tensor:
        return functools.reduce(lambda value, call: call(value), some, x)

    groups = [calls[start : start + span] for start in range(0, len(calls), span)]
    return [
        lambda x, some=some: checkpoint(functools.partial(through, some), x, use_reentrant=False)
        for some in groups
    ]


def systems(compiler: str, budgets: Iterable[str]) -> list[System]:
    """Peers, the plain one first, and fxremat."""
    backend = "inductor" if compiler == "inductor" else "aot_eager"
    found = [System("compile", True, lambda stages: [torch.compile(s, backend=backend) for s in stages])]
    for span in SPANS:
        wrap = functools.partial(checkpointed, span, backend)
        found.append(System(f"compile + checkpoint per {span}", True, wrap))
    for budget in budgets:
        options = {"budget": budget if budget == "min" else f"{budget}MiB", "compiler": compiler}
        ours = functools.partial(torch.compile, backend="fxremat", options=options)
        found.append(System(f"fxremat {budget}", False, lambda stages, ours=ours: list(map(ours, stages))))
        whole = lambda stages, ours=ours: [ours(nn.Sequential(*stages))]  # noqa: E731
        found.append(System(f"fxremat {budget}, one graph", False, whole))
    return found


def prepared(
    system: System, network: str, expected: Sequence[Tensor], tolerance: float
) -> tuple[Figures, Any]:
    """What a system took up to its fourth step; it stays ready for more, if it is right."""
    figures = Figures(system.name, system.is_peer)
    known = len(fxremat.steps())
    trained = Trained(network, system.wrap)
    start = time.perf_counter()
    try:
        found = trained.outcome()
        trained.step()
        figures.learning_seconds = time.perf_counter() - start
        trained.step()
    except fxremat.InfeasibleBudgetError as error:
        figures.problem = f"refused: {error.lowest_peak_bytes / MIB:.1f} MiB at least"
        return figures, None
    wrong = max(_difference(*pair) for pair in zip(found, expected, strict=True))
    if wrong > tolerance:
        figures.problem = f"gradients are off by {wrong:.1e}"
        return figures, None
    trained.modules.zero_grad()
    figures.measured_bytes = measure_peak(trained.step, device="cpu").peak_bytes
    for report in fxremat.steps()[known:]:
        figures.predicted_bytes, figures.budget_bytes = report.peak_bytes, report.budget_bytes
    return figures, trained


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def measured(network: str, compiler: str, budgets: Iterable[str], rounds: int) -> list[Figures]:
    """All systems of a network, in turn."""
    expected = Trained(network, lambda stages: stages).outcome()
    figures: list[Figures] = []
    ready: dict[str, Callable[[], object]] = {}
    for system in tqdm(systems(compiler, budgets), disable=None, leave=False):
        found, trained = prepared(system, network, expected, TOLERANCE[compiler])
        figures.append(found)
        if trained is not None:
            ready[found.name] = trained.step
            trained.modules.zero_grad()
    taken = time_steps(ready, rounds=rounds)
    for each in figures:
        each.seconds = taken.get(each.name, [])
    return figures


def ratio(of: Figures, to: Figures) -> str:
    """The median of the ratios of a round, with its interval."""
    low, median, high = interval([own / other for own, other in zip(of.seconds, to.seconds, strict=True)])
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


def row(figures: Figures, all_figures: Sequence[Figures]) -> list[str]:
    """A row of the table."""
    if figures.problem:
        return [figures.name, figures.problem]
    sizes = (figures.budget_bytes, figures.predicted_bytes, figures.measured_bytes)
    shown = ["-" if size is None else f"{size / MIB:.1f}" for size in sizes]
    assert figures.measured_bytes is not None
    peers = [
        each
        for each in all_figures
        if each.is_peer and (each.measured_bytes or 0) <= SAME_PEAK * figures.measured_bytes and each.seconds
    ]
    beside = ["-", "-"]
    if peers and not figures.is_peer:
        peer = min(peers, key=lambda each: sorted(each.seconds)[len(each.seconds) // 2])
        beside = [peer.name, ratio(figures, peer)]
    learning = f"{figures.learning_seconds:.0f}"
    return [figures.name, *shown, learning, ratio(figures, all_figures[0]), *beside]


def main() -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["transformer"])
    parser.add_argument("--compiler", choices=TOLERANCE, default="inductor")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, help="MiB, or min")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    found = {}
    headers = ("system", "budget", "predicted", "measured", "learning", "time", "peer", "to it")
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 1000}  # one code, many systems
    with torch._dynamo.config.patch(limits):
        for name in arguments.networks:
            found[name] = measured(name, arguments.compiler, arguments.budgets, arguments.rounds)
            rows = [row(each, found[name]) for each in found[name]]
            print(f"{name}, {arguments.compiler}\n{tabulate(rows, headers, disable_numparse=True)}\n")
            torch._dynamo.reset()
    if arguments.json is not None:
        rows = {name: [asdict(each) for each in figures] for name, figures in found.items()}
        result = {"provenance": provenance(__file__), "networks": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
