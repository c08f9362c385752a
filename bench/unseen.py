"""Are predictions right on networks that no rule was made for? Random architectures under several budgets.

    python bench/unseen.py --seeds 1 2 3 --json unseen.json
    python bench/unseen.py --seeds 1 2 3 --device cuda       # on the GPU
    python bench/unseen.py --seeds 1 2 3 --device h100       # Inductor's code for a card that is not there
    python bench/unseen.py --no-loops                        # on the CPU, for the memory alone: much faster
    python bench/unseen.py --architectures gpt2 whisper      # of the library transformers; all without names
    python bench/unseen.py --seeds 1 2 3 --joined rows       # networks around concatenations
    python bench/unseen.py --seeds 1 2 3 --joined dense      # each layer reads a concatenation of all before
    python bench/unseen.py --crossed groups4.silu.row        # of small networks of images; all without names

Each seed is a network: one of sequences (normalisations, attention, gates, dropout, tied projections) or one
of images (convolutions of 1 to 64 channels, normalisations, pooling, skips that are added or concatenated),
whose depth, width and parts are drawn, some of them under bfloat16. Without ``--seeds`` new ones are drawn.
The architectures of transformers are small, with weights drawn at random (``pretrained.py``). With
``--joined`` the networks are small and concatenate all kinds of values (``joined.py``), or all before each
layer (``dense.py``), with ``--crossed`` small convolutions with each normalisation and each activation, in
three ways (``crossed.py``).

Columns:
    budget, planned: MiB; planned is the peak that the plan was made with.
    code: what Inductor's code takes, as read before it is compiled: what reports predict.
    measured: what the step takes at the allocator, or on fake tensors where the card is not there.
    off, error: how far the measured peak is from the planned and from the predicted one.
    used: the measured peak as a part of the budget.
    time: predicted, as a ratio to the step without fxremat.
    compile s, plan s: seconds of the first step, and of the last plan within.
    note: how often another plan was made for what the code takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import crossed
import dense
import joined
import torch
from networks import Residual, Scored
from provenance import provenance
from tabulate import tabulate
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.nn import functional
from tqdm import tqdm

import fxremat
from fxremat.device.absent import AbsentCard, absent, card_named
from fxremat.measure import measure_peak
from fxremat.options.options import Budget

MIB = 2**20
BUDGETS = ("None", "0.8", "0.6", "0.4", "min")
NEW_SEEDS = 20
ERRORS = ("predicted_bytes", "lowered_bytes")  # of what plans were made with, and of what reports predict
THERE = ("cpu", "cuda")
JOINED = (*joined.SIZES, "dense")
PAID = 1.01  # times the step without fxremat: less is no time

Drawn = tuple[nn.Module, tuple[Tensor, ...]]
Layer = Callable[[random.Random, int], nn.Module]


class Attention(nn.Module):
    """Attention by torch's function or by products, with or without a mask of the past."""

    def __init__(self, width: int, heads: int, fused: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused, self.causal = heads, fused, causal
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, time, width), as the result."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if self.causal:
                past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
                scores = scores.masked_fill(~past, -1e4)
            y = self.dropout(scores.softmax(-1)) @ v
        return self.dropout(self.out(y.transpose(1, 2).flatten(-2)))


class Gated(nn.Module):
    """A product of two branches, of which one is a gate."""

    def __init__(self, width: int, inner: int, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(width, inner),
            nn.Linear(width, inner),
            nn.Linear(inner, width),
        )
        self.activation = gate

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return self.down(self.up(x) * self.activation(self.gate(x)))


class RMSNorm(nn.Module):
    """Normalisation by the root of the mean square, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Concatenated(nn.Module):
    """A branch's channels behind those of its input."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        """More channels than the input has."""
        return torch.cat([x, self.branch(x)], 1)


class Around(nn.Module):
    """A path at half the size, whose result is put beside the input and mixed with it."""

    def __init__(self, channels: int, inner: nn.Module, pool: nn.Module, mode: str) -> None:
        super().__init__()
        self.inner, self.pool, self.mode = inner, pool, mode
        self.mix = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        below = functional.interpolate(self.inner(self.pool(x)), scale_factor=2.0, mode=self.mode)
        return self.mix(torch.cat([x, below], 1))


class LowPrecision(nn.Module):
    """A network under bfloat16 autocast."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The network's result."""
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.network(x)


ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardswish,
    nn.ELU,
)


def drawn(seed: int) -> Drawn:
    """The network of a seed, and a batch for it."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    network, inputs = (_sequence if choose.random() < 0.5 else _image)(choose)
    return Scored(LowPrecision(network) if choose.random() < 0.25 else network), inputs


def _sequence(choose: random.Random) -> Drawn:
    width, heads = choose.choice([64, 96, 128, 192]), choose.choice([2, 4])
    norm: Callable[[int], nn.Module] = choose.choice([nn.LayerNorm, RMSNorm])
    layers: list[nn.Module] = [nn.Linear(width, width)] if choose.random() < 0.5 else []
    kinds = choose.sample([_attention, _mlp, _gated, _convolved], choose.randint(1, 3))
    for index in range(choose.randint(4, 8)):
        branch = [norm(width), kinds[index % len(kinds)](choose, width, heads)]
        layers.append(Residual(*branch) if choose.random() < 0.9 else nn.Sequential(*branch))
    batch, steps = choose.choice([4, 8]), choose.choice([64, 100, 128])
    return nn.Sequential(*layers, norm(width)), (torch.randn(batch, steps, width),)


def _attention(choose: random.Random, width: int, heads: int) -> nn.Module:
    return Attention(width, heads, choose.random() < 0.5, choose.random() < 0.5, choose.choice([0.0, 0.1]))


def _mlp(choose: random.Random, width: int, heads: int) -> nn.Module:
    inner = width * choose.choice([1, 2, 4])
    dropout = nn.Dropout(choose.choice([0.0, 0.1]))
    return nn.Sequential(
        nn.Linear(width, inner), choose.choice(ACTIVATIONS)(), dropout, nn.Linear(inner, width)
    )


def _gated(choose: random.Random, width: int, heads: int) -> nn.Module:
    gate = choose.choice([functional.silu, torch.sigmoid, functional.gelu, torch.tanh])
    return Gated(width, width * choose.choice([1, 2, 3]), gate)


class _Transposed(nn.Module):
    """A module that has channels second, for values that have them last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


def _convolved(choose: random.Random, width: int, heads: int) -> nn.Module:
    size = choose.choice([3, 5])
    groups = choose.choice([1, width])
    return nn.Sequential(
        _Transposed(nn.Conv1d(width, width, size, padding=size // 2, groups=groups)), nn.SiLU()
    )


def _image(choose: random.Random) -> Drawn:
    channels, size = choose.choice([1, 3]), choose.choice([32, 48, 64])
    width = choose.choice([8, 16, 32, 64])
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1)]
    for _ in range(choose.randint(2, 4)):
        layers += (_image_block(choose, width) for _ in range(choose.randint(1, 3)))
        if choose.random() < 0.3:
            below = nn.Sequential(*(_image_block(choose, width) for _ in range(choose.randint(1, 2))))
            layers.append(Around(width, below, _pool(choose), choose.choice(["nearest", "bilinear"])))
        if choose.random() < 0.4:
            grown = choose.choice([4, 12, 16])
            layers += [Concatenated(_unit(choose, width, grown)), nn.Conv2d(width + grown, width, 1)]
        if choose.random() < 0.5 and size >= 16:
            layers.append(_pool(choose) if choose.random() < 0.5 else nn.Conv2d(width, width, 3, 2, 1))
            size //= 2
    head = nn.Conv2d(width, choose.choice([1, 10]), 1)
    return nn.Sequential(*layers, head), (torch.randn(choose.choice([4, 8, 16]), channels, 64, 64),)


def _image_block(choose: random.Random, width: int) -> nn.Module:
    units = [_unit(choose, width, width) for _ in range(choose.randint(1, 2))]
    return Residual(*units) if choose.random() < 0.6 else nn.Sequential(*units)


def _unit(choose: random.Random, before: int, after: int) -> nn.Module:
    norms = [
        nn.BatchNorm2d(after),
        nn.GroupNorm(choose.choice([1, 4]), after),
        nn.InstanceNorm2d(after),
        nn.Identity(),
    ]
    size = choose.choice([1, 3, 3, 5])
    groups = after if before == after and choose.random() < 0.2 else 1
    convolution = nn.Conv2d(before, after, size, padding=size // 2, groups=groups, bias=choose.random() < 0.5)
    parts = [convolution, choose.choice(norms), choose.choice(ACTIVATIONS)()]
    if choose.random() < 0.1:
        parts.append(nn.Dropout2d(0.1))
    return nn.Sequential(*parts)


def _pool(choose: random.Random) -> nn.Module:
    return choose.choice([nn.MaxPool2d(2), nn.AvgPool2d(2)])


# --- One network under one budget ---------------------------------------------------------------------


@contextlib.contextmanager
def device(name: str) -> Iterator[AbsentCard | None]:
    """Nothing for a device that is there, or a card that is not."""
    if name in THERE:
        yield None
    else:
        with absent(card_named(name)) as card:
            yield card


@contextlib.contextmanager
def no_loops() -> Iterator[None]:
    """Fused loops do nothing, and no C++ is compiled: buffers and external kernels are those of the code."""
    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *inputs: None):
        yield


def network(seed: int | str) -> Drawn:
    """The network of a seed, of a kind and a seed, or the architecture of a name, and a batch for it."""
    if isinstance(seed, int):
        return drawn(seed)
    kind, _, number = seed.partition(" ")
    if seed in crossed.NAMES:
        return crossed.network(seed)
    if kind in joined.SIZES:
        return joined.network(kind, int(number))
    if kind == "dense":
        return dense.network(int(number))
    import pretrained  # needs transformers

    torch.manual_seed(0)
    built: Drawn = pretrained.ARCHITECTURES[seed]()
    return built


def row(seed: int | str, budget: Budget, card: AbsentCard | None, device: str = "cpu") -> dict[str, Any]:
    """Compile one network under one budget, run it and measure it, on the device or for the card."""
    torch._dynamo.reset()
    module, inputs = network(seed) if card is None else card.make(lambda: network(seed))
    if card is None:
        module, inputs = module.to(device), tuple(each.to(device) for each in inputs)
    else:
        inputs = card.hold(module, inputs)
    compiled = torch.compile(module, backend="fxremat", options={"budget": budget, "scope": "graph"})

    def step() -> None:
        for each in module.parameters():
            each.grad = None
        compiled(*inputs).backward()

    def peak() -> int:
        module.zero_grad(set_to_none=True)
        return measure_peak(step, device=device).peak_bytes if card is None else card.peak_bytes(step)

    start, found = time.perf_counter(), {"seed": seed, "budget": budget}
    try:
        with warnings.catch_warnings(action="ignore"):
            peak()
    except fxremat.InfeasibleBudgetError as error:
        return found | {"lowest_peak_bytes": error.lowest_peak_bytes, "budget_bytes": error.budget_bytes}
    seconds = time.perf_counter() - start
    measured = peak()
    report = fxremat.reports()[-1]
    return found | {
        "budget_bytes": report.budget_bytes,
        "predicted_bytes": report.solution.peak_bytes,
        "lowered_bytes": report.lowered_peak_bytes,
        "measured_bytes": measured,
        "time_ratio": report.solution.seconds / report.baseline_seconds,
        "nodes": report.num_nodes,
        "compile_seconds": seconds,
        "planning_seconds": report.planning_seconds,
        "notes": [note for note in report.notes if "again" in note],
    }


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    cells: list[list[str]] = []
    for each in rows:
        head = [str(each["seed"]), str(each["budget"])]
        if "measured_bytes" not in each:
            cells.append([*head, f"refused; {_mib(each['lowest_peak_bytes'])} would do"])
            continue
        sizes = [_mib(each[f"{name}_bytes"]) for name in ("budget", "predicted", "lowered", "measured")]
        used = "-" if each["budget_bytes"] is None else f"{_used(each):.3f}"
        times = (
            f"{each['time_ratio']:.3f}",
            f"{each['compile_seconds']:.1f}",
            f"{each['planning_seconds']:.1f}",
        )
        errors = [f"{_error(each, of):+.2%}" for of in ERRORS]
        cells.append([*head, *sizes, *errors, used, *times, "; ".join(each["notes"])])
    headers = "seed, budget, MiB, planned, code, measured, off, error, used, time, compile s, plan s, note"
    return tabulate(cells, headers.split(", "), disable_numparse=True)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What the rows come to."""
    served = [each for each in rows if "measured_bytes" in each]
    bounded = [each for each in served if each["budget_bytes"] is not None]
    over = sum(_used(each) > 1 for each in bounded)
    used = [_used(each) for each in bounded if each["time_ratio"] > PAID]
    told = [
        f"{len(rows)} steps, {len(rows) - len(served)} refused, {over} above the budget",
    ]
    for of, name in zip(ERRORS, ("plan", "report"), strict=True):
        errors = [abs(_error(each, of)) for each in served] or [0.0]
        told.append(f"error of the {name}s: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")
    if used:
        shares = f"median {statistics.median(used):.3f}, least {min(used):.3f}"
        told.append(f"used of the budget where time is paid: {shares}")
    return "\n".join(told)


def _error(each: dict[str, Any], of: str) -> float:
    return float(each["measured_bytes"] / (each[of] or each["predicted_bytes"]) - 1)


def _used(each: dict[str, Any]) -> float:
    return float(each["measured_bytes"] / each["budget_bytes"])


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.2f}"


def main() -> None:
    """Draw the networks, run them, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, help=f"default: {NEW_SEEDS} new ones")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--joined", choices=JOINED, help="networks around concatenations")
    kinds.add_argument(
        "--crossed",
        nargs="*",
        choices=crossed.NAMES,
        metavar="NAME",
        help="small networks of images, in the place of seeds",
    )
    kinds.add_argument("--architectures", nargs="*", help="names of transformers', in the place of seeds")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, help="None, min or a fraction each")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or a card that need not be there: h100")
    parser.add_argument("--no-loops", action="store_true", help="fused loops of a CPU are not compiled")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    seeds: list[int | str] = arguments.seeds or random.sample(range(10**6), NEW_SEEDS)
    if arguments.joined is not None:
        seeds = [f"{arguments.joined} {seed}" for seed in seeds]
    if arguments.crossed is not None:
        seeds = arguments.crossed or list(crossed.NAMES)
    if arguments.architectures is not None:
        import pretrained

        seeds = arguments.architectures or list(pretrained.ARCHITECTURES)
    words: dict[str, Budget] = {"None": None, "min": "min"}
    budgets = [words[each] if each in words else float(each) for each in arguments.budgets]
    where = arguments.device if arguments.device in THERE else "cpu"
    header = {**provenance(__file__, where), "seeds": seeds}
    if where == "cpu":
        header["device"] = arguments.device
    rows: list[dict[str, Any]] = []
    loops = no_loops() if arguments.no_loops else contextlib.nullcontext()
    with loops, device(arguments.device) as card:
        for seed in tqdm(seeds, disable=None):
            for budget in budgets:
                rows.append(row(seed, budget, card, where))
                tqdm.write(format_rows(rows[-1:]))
                if arguments.json:
                    text = json.dumps({**header, "rows": rows}, indent=1)
                    arguments.json.write_text(text + "\n", encoding="utf-8")
    print(f"{format_rows(rows)}\n{summary(rows)}")


if __name__ == "__main__":
    main()
