"""The paper's networks and the largest batch, measured: what fxremat saves, and what it costs.

    python bench/deep.py --json deep.json                       on the GPU, at the paper's sizes
    python bench/deep.py --device cpu --scale small             shows that it works

    resnet     1000 layers, batch 32, images of 224x224. Asked for: a 7th of eager's memory, parameters and
               batch included, at no more than 20 % more time.
    lstm       4 layers of 1024, batch 64, 256 steps. Asked for: an 8th of eager's memory above parameters
               and batch.
    largest    the largest batch of a 152-layer ResNet and of a language model that fits, in eager and with
               fxremat, to one part in 32.

For the first two, eager, fxremat at what is asked for, and fxremat at its least peak take their steps in
turn. If eager runs out of memory, the memory without fxremat is the predicted one, and no time is compared.
Under ``--scale small`` the networks are small, which every result says.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import largest
import models
import torch
from provenance import provenance
from tabulate import tabulate
from torch import Tensor, nn

import fxremat
from fxremat._torch import compilers
from fxremat.measure import measure_peak, time_steps
from fxremat.paper.networks import LSTM, LSTMSizes, PreActivationResNet, ResNetSizes, stage_blocks

Figures = dict[str, dict[str, Any]]
Built = tuple[nn.Module, tuple[Tensor, ...]]

_SEED = 0
_CUDA_SHARE = 0.95  # of the card's free memory; the rest is left to fragmentation and to libraries
_CPU_BATCHES = 3  # without a card the memory is what so many batches take in eager


# --- The networks ---------------------------------------------------------------------------------------


def resnet(depth: int, sizes: ResNetSizes) -> Built:
    """The paper's ResNet and a batch, on torch's default device."""
    images = torch.randn(sizes.batch, 3, sizes.pixels, sizes.pixels)
    network = PreActivationResNet(stage_blocks(depth), sizes)
    return network, (images, torch.randint(sizes.classes, (sizes.batch,)))


def lstm(steps: int, sizes: LSTMSizes) -> Built:
    """The paper's LSTM and a batch, on torch's default device."""
    series = torch.randn(steps, sizes.batch, sizes.inputs)
    return LSTM(sizes), (series, torch.randint(sizes.classes, (steps, sizes.batch)))


@dataclass(frozen=True)
class Question:
    """What is asked of a network.

    Attributes:
        build: Makes it at each scale.
        factor: How many times less memory.
        counts_held: Whether parameters and batch are part of that memory.
        extra_time: What it may cost at most, as a ratio to eager's time; None if that is not asked.
    """

    build: Mapping[str, Callable[[], Built]]
    factor: float
    counts_held: bool
    extra_time: float | None = None


QUESTIONS = {
    "resnet": Question(
        {
            "gpu": lambda: resnet(1000, ResNetSizes()),
            "small": lambda: resnet(26, ResNetSizes(width=4, batch=16, pixels=64, classes=10)),
        },
        factor=7,
        counts_held=True,
        extra_time=0.2,
    ),
    "lstm": Question(
        {
            "gpu": lambda: lstm(256, LSTMSizes()),
            "small": lambda: lstm(8, LSTMSizes(layers=2, hidden=8, batch=64, inputs=8, classes=16)),
        },
        factor=8,
        counts_held=False,
    ),
}

Examples = Callable[[int], Built]

LARGEST: dict[str, dict[str, Examples]] = {
    "resnet152": {
        "gpu": lambda batch: resnet(152, ResNetSizes(batch=batch)),
        "small": lambda batch: resnet(14, ResNetSizes(width=4, batch=batch, pixels=64, classes=10)),
    },
    "language_model": {
        "gpu": lambda batch: models.attention.language_model(
            blocks=12, width=768, heads=12, batch=batch, time=1024
        ),
        "small": lambda batch: models.attention.language_model(
            blocks=2, width=32, heads=2, batch=batch, time=32
        ),
    },
}
SCALES = ("small", "gpu")


# --- Memory and time --------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A network that is trained, and what its step took."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss_of: Callable[..., Tensor]
    figures: dict[str, Any] = field(default_factory=dict)

    def step(self) -> None:
        """A training step."""
        largest.take_step(self.module, self.loss_of, self.inputs)

    def measure(self, device: str) -> None:
        """Compile, and measure the peak of a later step."""
        self.step()
        self.module.zero_grad(set_to_none=True)
        peak = measure_peak(self.step, device=device).peak_bytes
        self.module.zero_grad(set_to_none=True)
        held = largest.held_bytes(self.module, self.inputs)
        self.figures.update(peak_bytes=peak, total_bytes=held + peak, held_bytes=held)


def answer(
    name: str, scale: str, device: str, compiler: str, rounds: int, with_least: bool = True
) -> Figures:
    """The figures of a network in eager, with fxremat at what is asked for, and at its least peak.

    The last is left out where it is not wanted, unless eager runs out of memory.
    """
    question = QUESTIONS[name]
    make = functools.partial(_subject, question.build[scale], device)
    eager, least = make(f"{name}, eager", None), None
    attempt(eager, device)
    if with_least or "problem" in eager.figures:
        least = make(f"{name}, fxremat, min", {"budget": "min", "compiler": compiler})
        attempt(least, device)
    before = _without(eager, least, question)
    held = largest.held_bytes(eager.module, eager.inputs) if question.counts_held else 0
    found = [eager]
    if before:
        budget = max(
            1, int(before / question.factor) - held
        )  # of 1 byte: refused, with the least that would do
        asked = make(f"{name}, fxremat, 1/{question.factor:g}", {"budget": budget, "compiler": compiler})
        attempt(asked, device)
        found.append(asked)
    found += [] if least is None else [least]
    _time([each for each in found if "problem" not in each.figures], rounds)
    _judge(found, question, before)
    return {each.name: each.figures for each in found}


def _subject(
    build: Callable[[], Built], device: str, name: str, options: Mapping[str, Any] | None
) -> Subject:
    torch.manual_seed(_SEED)
    with torch.device(device):
        module, inputs = build()
    compiled: Any = module
    if options is not None:
        compiled = torch.compile(module, backend="fxremat", options=dict(options))
    return Subject(name, module, inputs, compiled)


def attempt(subject: Subject, device: str) -> None:
    """Measure a subject, or write down why it could not be."""
    count = len(fxremat.reports())
    try:
        subject.measure(device)
    except (torch.OutOfMemoryError, fxremat.InfeasibleBudgetError) as error:
        subject.figures["problem"] = f"{type(error).__name__}: {error}".split("\n")[0]
    for report in fxremat.reports()[count:]:
        subject.figures.update(
            predicted_peak_bytes=report.peak_bytes,
            predicted_without_bytes=report.baseline_peak_bytes,
            predicted_time_ratio=report.solution.seconds / report.baseline_seconds,
            recomputed_nodes=sum(report.solution.mirror_counts.values()),
            nodes=report.num_nodes,
            planning_seconds=report.planning_seconds,
        )
    subject.module.zero_grad(set_to_none=True)
    gc.collect()


def _without(eager: Subject, least: Subject | None, question: Question) -> int:
    """Bytes without fxremat: measured, else predicted; 0 if neither is known."""
    own = eager.figures
    if least is None or "problem" not in own:
        return int(own["total_bytes" if question.counts_held else "peak_bytes"])
    planned = least.figures
    held = planned.get("held_bytes", 0) if question.counts_held else 0
    return int(planned["predicted_without_bytes"]) + held if "held_bytes" in planned else 0


def _time(subjects: list[Subject], rounds: int) -> None:
    """Time steps in turn; ratios are to the first, which is eager's if that ran."""
    seconds = time_steps({each.name: each.step for each in subjects}, rounds=rounds)
    for each in subjects:
        each.module.zero_grad(set_to_none=True)
        each.figures["seconds"] = statistics.median(seconds[each.name])
        ratios = [own / base for own, base in zip(seconds[each.name], seconds[subjects[0].name], strict=True)]
        if subjects[0].name.endswith("eager"):
            each.figures["time_ratio"] = statistics.median(ratios)


def _judge(subjects: list[Subject], question: Question, before: int) -> None:
    """How many times less memory each takes than without fxremat, and whether that is what was asked."""
    for each in subjects:
        own = each.figures
        if "problem" in own or not before:
            continue
        own["without_bytes"] = before
        own["factor"] = before / own["total_bytes" if question.counts_held else "peak_bytes"]
        is_time_met = question.extra_time is None or own.get("time_ratio", 9.0) <= 1 + question.extra_time
        own["is_met"] = own["factor"] >= question.factor and is_time_met


# --- The largest batch ------------------------------------------------------------------------------------


def largest_batches(name: str, scale: str, device: str, compiler: str, memory_bytes: int | None) -> Figures:
    """The largest batch in eager and with fxremat, within the memory given or all that there is."""

    def build(batch: int) -> Built:
        torch.manual_seed(_SEED)
        with torch.device(device):
            return LARGEST[name][scale](batch)

    memory = memory_bytes or _memory(build, device)
    found: Figures = {}
    for way, options in (("eager", None), ("fxremat", {"compiler": compiler})):
        does_fit = functools.partial(largest.fits, build, memory_bytes=memory, device=device, options=options)
        batch = largest.largest(does_fit)
        found[f"{name}, largest batch, {way}"] = {"largest_batch": batch, "memory_bytes": memory}
    return found


def _memory(build: Examples, device: str) -> int:
    """Most of what the card has free; without a card, what a few batches take."""
    if torch.device(device).type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return int(_CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    module, inputs = build(_CPU_BATCHES)
    peak = measure_peak(lambda: largest.take_step(module, module, inputs), device=device).peak_bytes
    return peak + largest.held_bytes(module, inputs)


# --- The command ------------------------------------------------------------------------------------------


@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
def main() -> int:
    """Measure what was asked for, print it, write it; the result is the exit status."""
    arguments = _arguments()
    figures: Figures = {}
    common = (arguments.scale, arguments.device, arguments.compiler)
    for name in arguments.only:
        print(f"{name} ({arguments.scale}) ...", file=sys.stderr, flush=True)
        torch._dynamo.reset()
        if name in QUESTIONS:
            with compilers.unlimited_recompilation():
                figures |= answer(name, *common, arguments.rounds, not arguments.no_least)
        else:
            for network in LARGEST:
                figures |= largest_batches(network, *common, arguments.memory)
    header = _header(arguments)
    print(format_figures(header, figures))
    if arguments.json is not None:
        text = json.dumps({**header, "figures": figures}, indent=1) + "\n"
        arguments.json.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*QUESTIONS, "largest")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--scale", choices=SCALES, default="gpu" if has_gpu else "small")
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--no-least", action="store_true", help="leave out the least peak")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="for largest; default: what is free")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE.json")
    return parser.parse_args()


def _header(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **provenance(__file__, arguments.device),
        "scale": arguments.scale,
        "compiler": arguments.compiler,
    }


def format_figures(header: Mapping[str, Any], figures: Figures) -> str:
    """Two tables, bytes in MiB, under a line that says where and how large."""
    size = (
        "at the paper's sizes"
        if header["scale"] == "gpu"
        else "at REDUCED size, which only shows that it works"
    )
    lines = [f"{header['device']}, torch {header['torch']}, {size}"]
    steps = [(name, own) for name, own in figures.items() if "largest_batch" not in own]
    batches = [(name, own) for name, own in figures.items() if "largest_batch" in own]
    if steps:
        headers = "step, peak MiB, predicted, total MiB, times less, time ratio, as asked"
        lines += ["", _table(headers, [_step_cells(*each) for each in steps])]
    if batches:
        cells = [(name, _mib(own["memory_bytes"]), str(own["largest_batch"])) for name, own in batches]
        lines += ["", _table("largest batch, memory MiB, batch", cells)]
    return "\n".join(lines)


def _step_cells(name: str, own: Mapping[str, Any]) -> tuple[str, ...]:
    if "problem" in own:
        return name, own["problem"].split(":")[0], "", "", "", "", "no"
    factor, ratio = own.get("factor"), own.get("time_ratio")
    return (
        name,
        _mib(own["peak_bytes"]),
        _mib(own["predicted_peak_bytes"]) if "predicted_peak_bytes" in own else "-",
        _mib(own["total_bytes"]),
        "-" if factor is None else f"{factor:.2f}",
        "-" if ratio is None else f"{ratio:.3f}",
        "yes" if own.get("is_met") else "no",
    )


def _table(headers: str, cells: list[tuple[str, ...]]) -> str:
    names = headers.split(", ")
    return tabulate(cells, names, colalign=("left", *["right"] * (len(names) - 1)), disable_numparse=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


if __name__ == "__main__":
    sys.exit(main())
