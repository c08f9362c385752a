"""Is the budget the peak? Predicted and measured peaks of the model zoo under several budgets.

    python bench/budgets.py --compiler eager --scale full
    python bench/budgets.py --compiler inductor --models transformer resnet --json results.json

Each row is one model under one budget: the predicted peak, the peak measured at the allocator, how far that
is above the predicted one and above the one that was read in Inductor's code, whether it is within the
budget, and whether loss, gradients and buffers equal those of the same compiler without fxremat (bit for bit
with ``compiler="eager"``; under Inductor within 1e-4 of the largest element, or four times what a change of
the parameters by one rounding makes, which a deep network with BatchNorm multiplies).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import models
import torch
from provenance import provenance
from tabulate import tabulate
from tqdm import tqdm

import fxremat
from fxremat.measure import measure_peak

REQUIRED = ("tanh_mlp", "transformer", "resnet", "unet", "lstm", "gated_mlp", "dropout_mlp")
BUDGETS: tuple[float | str | None, ...] = (None, 0.7, 0.5, 0.35, 0.25, "min")


def state(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers after one training step."""
    torch.manual_seed(1)
    loss, gradients = models.train_step(module, inputs)
    buffers = {name.removeprefix("_orig_mod."): each.clone() for name, each in module.named_buffers()}
    return {"loss": loss, **gradients, **buffers}


@dataclass(frozen=True)
class Reference:
    """What a step gives without fxremat, and how far each tensor may be off."""

    expected: dict[str, torch.Tensor]
    tolerance: dict[str, float]

    def equals(self, found: dict[str, torch.Tensor]) -> bool:
        """Whether a step gave the same."""
        if self.expected.keys() != found.keys():
            return False
        return all(
            torch.equal(self.expected[key], found[key])
            or (self.expected[key] - found[key]).abs().max().item() <= self.tolerance[key]
            for key in found
        )


def reference(name: str, scale: str, compiler: str) -> Reference:
    """A step of plain PyTorch, or of Inductor's default."""
    module, inputs = models.fresh(models.case(name, scale))
    if compiler == "eager":
        plain = state(module, inputs)
        return Reference(plain, dict.fromkeys(plain, 0.0))
    torch._dynamo.reset()
    compiled = torch.compile(module)
    expected = state(compiled, inputs)
    moved = [_moved(name, scale, module, compiled, seed) for seed in range(3)]
    tolerance = {}
    for key, tensor in expected.items():
        change = max((each[key] - tensor).abs().max().item() for each in moved)
        tolerance[key] = max(1e-4 * tensor.abs().max().item(), 4 * change)
    return Reference(expected, tolerance)


def _moved(
    name: str, scale: str, module: torch.nn.Module, compiled: torch.nn.Module, seed: int
) -> dict[str, torch.Tensor]:
    """What the step gives when each parameter is changed by one rounding, up or down."""
    original, inputs = models.fresh(models.case(name, scale))
    module.load_state_dict(original.state_dict())
    module.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
    return state(compiled, inputs)


def row(
    name: str, scale: str, compiler: str, budget: float | str | None, expected: Reference
) -> dict[str, Any]:
    """Compile one model under one budget, run it, measure it, compare it."""
    torch._dynamo.reset()
    module, inputs = models.fresh(models.case(name, scale))
    compiled = torch.compile(module, backend="fxremat", options={"budget": budget, "compiler": compiler})
    start = time.perf_counter()
    try:
        found = state(compiled, inputs)
    except fxremat.InfeasibleBudgetError as error:
        return {"model": name, "budget": budget, "lowest_peak_bytes": error.lowest_peak_bytes}
    seconds = time.perf_counter() - start
    report = fxremat.reports()[-1]
    models.train_step(compiled, inputs)
    module.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: models.train_step(compiled, inputs), device="cpu").peak_bytes
    return {
        "model": name,
        "budget": budget,
        "budget_bytes": report.budget_bytes,
        "predicted_bytes": report.solution.peak_bytes,
        "lowered_bytes": report.lowered_peak_bytes,
        "measured_bytes": measured,
        "baseline_bytes": report.baseline_peak_bytes,
        "within": report.budget_bytes is None or measured <= report.budget_bytes,
        "same": expected.equals(found),
        "predicted_time_ratio": report.solution.seconds / report.baseline_seconds,
        "compile_seconds": seconds,
        "planning_seconds": report.planning_seconds,
        "nodes": report.num_nodes,
    }


def _error(measured_bytes: int, told_bytes: int | None) -> str:
    """How far the measured peak is above what was told of it."""
    return "-" if told_bytes is None else f"{measured_bytes / told_bytes - 1:+.2%}"


def format_rows(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as a table, bytes in MiB."""

    def mib(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**20:.2f}"

    cells = []
    for each in rows:
        if "lowest_peak_bytes" in each:
            lowest = mib(each["lowest_peak_bytes"])
            cells.append([each["model"], each["budget"], f"infeasible below {lowest}"])
            continue
        errors = [_error(each["measured_bytes"], each[f"{what}_bytes"]) for what in ("predicted", "lowered")]
        cells.append(
            [
                each["model"],
                each["budget"],
                mib(each["budget_bytes"]),
                mib(each["predicted_bytes"]),
                mib(each["measured_bytes"]),
                *errors,
                "yes" if each["within"] else "NO",
                "yes" if each["same"] else "NO",
                f"{each['predicted_time_ratio']:.3f}",
                f"{each['planning_seconds']:.2f}",
                f"{each['compile_seconds']:.1f}",
            ]
        )
    headers = (
        "model, budget, MiB, predicted, measured, error, of the code's, within, same, time, plan s, compile s"
    )
    return tabulate(cells, headers.split(", "), disable_numparse=True)


def main() -> None:
    """Run the matrix and print it; where asked, write each row as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--scale", choices=("small", "full"), default="full")
    parser.add_argument("--models", nargs="+", default=REQUIRED, choices=models.NAMES)
    parser.add_argument("--budgets", nargs="+", help="None, min or a fraction each")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    words = {"None": None, "min": "min"}
    budgets = [words[b] if b in words else float(b) for b in arguments.budgets or ()] or BUDGETS
    header, rows = provenance(__file__), list[dict[str, Any]]()
    progress = tqdm(total=len(arguments.models) * len(budgets), disable=None)
    for name in arguments.models:
        expected = reference(name, arguments.scale, arguments.compiler)
        for budget in budgets:
            progress.set_description(f"{name} {budget}")
            rows.append(row(name, arguments.scale, arguments.compiler, budget, expected))
            progress.update()
            if arguments.json:
                arguments.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", "utf-8")
    progress.close()
    print(format_rows(rows))


if __name__ == "__main__":
    main()
