"""``fxremat demo``: what fxremat does to a training run, seen in a few minutes on any machine.

A small byte-level transformer learns the sources of Python's standard library, as found on this
machine, once per *setting*: eager, Inductor by default, and fxremat at two budgets. All settings start
from the same weights and see the same batches, so their losses must agree; what may differ is the
memory and the time. Settings take their training steps in turn, so that a machine whose speed
drifts is fair to each; ratios of time are medians of the ratios within one turn.

The peak is that of one forward and backward which starts without gradients. The optimizer's states
are as large in every setting, and no part of it.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from fxremat._torch.compilers import missing_compiler
from fxremat.errors import FxrematError, InvalidOptionError
from fxremat.measure import measure_peak, time_steps

__all__ = ["DemoRow", "Sizes", "format_demo", "main", "run_demo"]

_BYTES = 256  # the vocabulary
_TEXT_BYTES = 512 * 1024
_SEED = 0
_BUDGETS: tuple[float | str, ...] = (0.5, "min")


@dataclass(frozen=True, slots=True)
class DemoRow:
    """What one setting took, and the loss at each of its steps; ratios are to eager."""

    setting: str
    budget: str
    losses: tuple[float, ...]
    peak_bytes: int
    peak_ratio: float
    step_seconds: float
    step_ratio: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the model and its batches are."""

    blocks: int = 6
    width: int = 128
    heads: int = 4
    time: int = 256
    batch: int = 8


def main(steps: int = 20, device: str | None = None) -> int:
    """Run the demo and print its table; the result is the exit status."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    problem = missing_compiler(device)
    if problem is not None:
        print(f"Note: {problem}, so Inductor can't generate code. fxremat runs its graphs eagerly.")
    print(format_demo(run_demo(steps, device=device)))
    return 0


def run_demo(steps: int = 20, *, device: str = "cpu", sizes: Sizes | None = None) -> list[DemoRow]:
    """Train in every setting and measure; the first row is eager.

    What this process has compiled before is compiled again at its next use.

    Args:
        steps: How many optimizer steps each setting takes. The first compiles and is not timed.

    Raises:
        InvalidOptionError: There are too few steps to time one.
    """
    if steps < 2:
        raise InvalidOptionError.bad_value("steps", steps, ("a number from 2",))
    sizes = sizes or Sizes()
    torch.compiler.reset()  # or else each run would add to the recompilations of the same code
    batches = _batches(sizes, steps, device)
    runs = {
        setting: _Run(compiled, batches, sizes, device)
        for setting, compiled in _settings(missing_compiler(device) is None).items()
    }
    seconds = _train(runs, steps)
    return _rows(runs, seconds, device)


def format_demo(rows: list[DemoRow]) -> str:
    """The rows as a table, and in a sentence how far the losses agree."""
    table = tabulate(
        [
            (
                row.setting,
                row.budget,
                f"{row.losses[-1]:.4f}",
                f"{row.peak_bytes / 2**20:.1f}",
                f"{row.peak_ratio:.2f}",
                f"{row.step_seconds * 1e3:.0f}",
                f"{row.step_ratio:.2f}",
            )
            for row in rows
        ],
        headers=("setting", "budget", "loss", "peak MiB", "of eager", "step ms", "of eager"),
        colalign=("left", "left", *["right"] * 5),
        disable_numparse=True,
    )
    by_step = list(zip(*(row.losses for row in rows), strict=True))
    difference = max(max(losses) - min(losses) for losses in by_step)
    return f"{table}\n\nAt each of the {len(by_step)} steps the losses agree to {difference:.1e}."


# --- The text ---------------------------------------------------------------------------------


def _batches(sizes: Sizes, steps: int, device: str) -> list[Tensor]:
    """One batch of byte sequences per step, each one byte longer than the model's time."""
    text = torch.frombuffer(bytearray(_standard_library()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(_SEED)
    last = len(text) - sizes.time - 1
    starts = torch.randint(last, (steps, sizes.batch, 1), generator=generator)
    return list(text[starts + torch.arange(sizes.time + 1)].to(device))


def _standard_library() -> bytes:
    """The first few hundred KiB of the standard library's modules, in the order of their names."""
    directory = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(directory.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            return bytes(text[:_TEXT_BYTES])
    raise FxrematError(f"the demo needs Python's own sources to read, and {directory} has too few")


# --- The model --------------------------------------------------------------------------------


class _Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        behind: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return behind


class _LanguageModel(nn.Module):
    """Predicts each next byte; its forward returns the loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, sizes.width)
        self.position = nn.Parameter(0.02 * torch.randn(sizes.time, sizes.width))
        self.blocks = nn.Sequential(*(_Block(sizes) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, _BYTES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.blocks(self.embedding(text[:, :-1]) + self.position)
        logits: Tensor = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


# --- Training ---------------------------------------------------------------------------------

_Compile = Callable[[nn.Module], Callable[..., Any]]


def _settings(generates_code: bool) -> dict[tuple[str, str], _Compile]:
    """Name and budget of each setting, and what it makes of a model."""
    settings: dict[tuple[str, str], _Compile] = {("eager", ""): lambda model: model}
    if generates_code:
        settings["inductor", ""] = torch.compile
    compiler = "inductor" if generates_code else "eager"
    for budget in _BUDGETS:
        options: Any = {"budget": budget, "compiler": compiler}
        settings["fxremat", str(budget)] = partial(torch.compile, backend="fxremat", options=options)
    return settings


class _Run:
    """One setting's training: a model of its own, from the same weights and on the same batches."""

    def __init__(self, compiled: _Compile, batches: list[Tensor], sizes: Sizes, device: str) -> None:
        torch.manual_seed(_SEED)
        self.model = _LanguageModel(sizes).to(device)
        self.loss_of = compiled(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = batches
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Take the next optimizer step."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss_of(self.batches[len(self.losses)])
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def peak_bytes(self, device: str) -> int:
        """The measured peak of a forward and a backward."""
        self.model.zero_grad(set_to_none=True)
        text = self.batches[0]
        return measure_peak(lambda: self.loss_of(text).backward(), device=device).peak_bytes


_Runs = dict[tuple[str, str], _Run]


def _train(runs: _Runs, steps: int) -> dict[str, list[float]]:
    """Take all steps of all runs in turn; the result holds the seconds of all but the first."""
    with tqdm(total=steps * len(runs), file=sys.stderr, disable=None, unit="step") as bar:

        def step(name: str, run: _Run) -> None:
            bar.set_description(name if run.losses else f"{name}, compiling", refresh=True)
            run.step()
            bar.update()

        named = {" ".join(setting).strip(): run for setting, run in runs.items()}
        step_of = {name: partial(step, name, run) for name, run in named.items()}
        return time_steps(step_of, rounds=steps - 1, warmup=1)


def _rows(runs: _Runs, seconds: dict[str, list[float]], device: str) -> list[DemoRow]:
    """Each run's figures beside those of the first."""
    peaks = [run.peak_bytes(device) for run in runs.values()]
    baseline = next(iter(seconds.values()))
    rows = []
    for ((setting, budget), run), peak, own in zip(runs.items(), peaks, seconds.values(), strict=True):
        ratios = [mine / eager for mine, eager in zip(own, baseline, strict=True)]
        rows.append(
            DemoRow(
                setting=setting,
                budget=budget or "-",
                losses=tuple(loss.item() for loss in run.losses),
                peak_bytes=peak,
                peak_ratio=peak / peaks[0],
                step_seconds=statistics.median(own),
                step_ratio=statistics.median(ratios),
            )
        )
    return rows
