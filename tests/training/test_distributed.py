"""Training in two processes: the budget of each rank, the same plans on both, and what one process computes."""

from __future__ import annotations

import hashlib
import json
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxremat
from fxremat.device import ledger
from fxremat.device.rates import CPU, KEY, PINNED, facts, rates
from fxremat.driver.step import steps
from fxremat.measure import measure_peak

RANKS, STEPS, ROWS, WIDTH, BLOCKS = 2, 4, 512, 192, 4
BUDGET = 0.7
SLACK_BYTES = 4096  # for the scalars around the graphs

Found = dict[str, Any]


class Block(nn.Module):
    """A normalised pair of products with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    """A few blocks, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def batch(step: int) -> Tensor:
    """The batch of all ranks."""
    return torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def share(step: int) -> Tensor:
    """This rank's part of it."""
    return batch(step).chunk(RANKS)[distributed.get_rank()]


def trained(model: nn.Module, call: Callable[[Tensor], Tensor], data: Callable[[int], Tensor]) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = call(data(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def peaks(model: nn.Module, call: Callable[[Tensor], Tensor], first: Any = None) -> tuple[list[float], list[int | None]]:
    """The losses and the measured peaks of a few steps, of which the first runs in a given context."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    found: list[int | None] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = share(step)

        def run() -> None:
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.item())

        if step == 0:  # which compiles
            with first or nullcontext():
                run()
            found.append(None)
        else:
            found.append(measure_peak(run, device="cpu").peak_bytes)
        optimizer.step()
    return losses, found


def plans() -> str:
    """A digest of the plans of all calls of all families of this process."""
    settled = [known.plan.schedule for family in steps.families.values() for known in family.calls()]
    return hashlib.sha256(repr(settled).encode()).hexdigest()


def options(**more: Any) -> dict[str, Any]:
    """Those of the tests."""
    return {"backend": "fxremat", "options": {"compiler": "eager", "budget": BUDGET, "time_limit_seconds": 0.1, **more}}


def told(losses: list[float], found: list[int | None]) -> Found:
    """What a rank tells of its steps."""
    step = fxremat.steps()[-1]
    return {
        "losses": losses,
        "peaks": found,
        "budget": step.budget_bytes,
        "calls": len(step.calls),
        "graphs": sorted({call.graph_name for call in step.calls}),
        "baseline": step.baseline_peak_bytes,
        "predicted": step.peak_bytes,
        "measured": step.measured_peak_bytes,
        "recordings": [family.recordings for family in steps.families.values()],
        "notes": step.notes,
        "plans": plans(),
        "reports": [asdict(replace(each, values=(), notes=())) ["budget"] for each in fxremat.reports()],
    }


# --- What runs on each rank -----------------------------------------------------------------------------

SCENES: dict[str, Callable[[Path], Found]] = {}


def scene(function: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Register what both ranks run."""
    SCENES[function.__name__] = function
    return function


def give_rates(folder: Path, pinned: bool) -> None:
    """Let this machine have rates that no other has."""
    rank = distributed.get_rank()
    own = replace(CPU, flops_per_second=CPU.flops_per_second / (1 + 3 * rank), launch_seconds=1e-5 * (1 + rank))
    folder = folder / f"{rank}"
    folder.mkdir(parents=True)
    os.environ["FXREMAT_CACHE_DIR"] = str(folder)
    if pinned:
        (folder / PINNED).write_text(json.dumps({"cpu": asdict(own)}), encoding="utf-8")
    else:
        ledger.open_ledger(facts(torch.device("cpu"))).add({KEY: asdict(own)})


@scene
def in_buckets(folder: Path) -> Found:
    """DDP, whose buckets Dynamo makes graphs of; machines have different rates."""
    give_rates(folder, pinned=False)
    model = blocks()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    return told(*peaks(model, torch.compile(wrapped, **options()))) | {"rates": asdict(rates(torch.device("cpu")))}


@scene
def profiled(folder: Path) -> Found:
    """The same, with a profiler of the user's in the first step of one rank, and rates that can't be shared."""
    give_rates(folder, pinned=True)
    model = blocks()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    profiler = torch.profiler.profile() if distributed.get_rank() else nullcontext()
    return told(*peaks(model, torch.compile(wrapped, **options()), profiler))


@scene
def sharded(folder: Path) -> Found:
    """FSDP2, with its blocks compiled one by one."""
    from torch.distributed.fsdp import fully_shard

    model = blocks()
    for block in model:
        block.compile(**options())
        fully_shard(block)
    fully_shard(model)
    return told(*peaks(model, model))


def one_process(folder: Path) -> Found:
    """What one process computes from the whole batch, without fxremat."""
    model = blocks()
    return {"losses": trained(model, model, batch)}


def _rank(rank: int, port: int, folder: Path, names: list[str]) -> None:
    """All scenes, one after the other; what comes of them goes to a file."""
    store = distributed.TCPStore("127.0.0.1", port, RANKS, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    found: dict[str, Found] = {"one_process": one_process(folder)} if rank == 0 else {}
    for name, each in ((name, SCENES[name]) for name in names):
        steps.families.clear()
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                found[name] = each(folder / name)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
        found[name]["warnings"] = [str(each.message) for each in heard if "fxremat" in str(each.message)]
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()
