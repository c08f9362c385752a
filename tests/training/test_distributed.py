"""Training in two processes: a budget each, the same plans on both, and what one process computes."""

from __future__ import annotations

import hashlib
import json
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional_collectives
from training import everything

import fxremat
from fxremat.device import ledger
from fxremat.device.rates import CPU, KEY, PINNED, facts, rates
from fxremat.measure import measure_peak
from fxremat.report.verification import Verification
from fxremat.step.agreement import MAX_LOOKS, Round
from fxremat.step.step import steps

pytestmark = pytest.mark.slow  # two processes, each of which compiles

RANKS, STEPS, ROWS, WIDTH, BLOCKS = 2, 4, 512, 192, 3
BUDGET = 0.7
LIMIT = timedelta(seconds=30)
SLACK_BYTES = 4096  # for the scalars around the graphs
# What a block's parameters take: gloo's threads let go of what was gathered a moment later, or two.
GLOO_BYTES = SLACK_BYTES + 4 * (8 * WIDTH * WIDTH + 7 * WIDTH)

Found = dict[str, Any]


class Block(nn.Module):
    """A normalised pair of products with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A few blocks, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> Tensor:
    """The batch of all ranks."""
    return torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def share(step: int) -> Tensor:
    """This rank's part of it."""
    return batch(step).chunk(RANKS)[distributed.get_rank()]


def trained(
    model: nn.Module, call: Callable[[Tensor], Tensor], data: Callable[[int], Tensor], first: Any = None
) -> tuple[list[float], int]:
    """The losses of a few steps, of which the first runs in a context, and the measured peak of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    peak_bytes = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        x = data(step)

        def run(x: Tensor = x) -> None:
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.item())

        if step == STEPS - 1:
            peak_bytes = measure_peak(run, device="cpu").peak_bytes
        else:
            with (first if step == 0 else None) or nullcontext():
                run()
        optimizer.step()
    return losses, peak_bytes


def plans() -> str:
    """A digest of the plans of all calls of all families of this process."""
    settled = [known.plan.schedule for family in steps.families.values() for known in family.calls()]
    return hashlib.sha256(repr(settled).encode()).hexdigest()


def options(**more: Any) -> dict[str, Any]:
    """Those of the tests."""
    asked = {"compiler": "eager", "budget": BUDGET, "time_limit_seconds": 0.1, **more}
    return {"backend": "fxremat", "options": asked}


def is_equal(verified: Verification | None) -> bool:
    """Whether a graph's calls were held against the graph without fxremat, and no bit was another."""
    return verified is not None and verified.is_kept and not (verified.reason or verified.tolerance)


def told(losses: list[float], peak_bytes: int) -> Found:
    """What a rank tells of its steps."""
    step, *_ = fxremat.steps()
    (family,) = steps.families.values()
    return {
        "losses": losses,
        "peak_bytes": peak_bytes,
        "budget_bytes": step.budget_bytes,
        "baseline_peak_bytes": step.baseline_peak_bytes,
        "predicted_bytes": step.peak_bytes,
        "measured_bytes": step.measured_peak_bytes,
        "calls": len(step.calls),
        "graphs": len({known.graph.number for known in family.calls()}),
        "recordings": family.recordings,
        "notes": step.notes,
        "plans": plans(),
        "verified": [each.verified.calls for each in fxremat.reports() if is_equal(each.verified)],
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
    own = replace(CPU, flops_per_second=66e9 / (1 + 3 * rank), launch_seconds=1e-5 * rank + 1e-6)
    folder = folder / f"{rank}"
    folder.mkdir(parents=True)
    os.environ["FXREMAT_CACHE_DIR"] = str(folder)
    if pinned:
        (folder / PINNED).write_text(json.dumps({"cpu": asdict(own)}), encoding="utf-8")
    else:
        ledger.open_ledger(facts(torch.device("cpu"))).add({KEY: asdict(own)})


@scene
def in_buckets(folder: Path) -> Found:
    """DDP, whose buckets Dynamo makes graphs of; on one rank a profiler watches the first step."""
    give_rates(folder, pinned=False)
    model = Blocks()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    profiler = torch.profiler.profile() if distributed.get_rank() else nullcontext()
    found = told(*trained(model, torch.compile(wrapped, **options(verify=1)), share, profiler))
    return found | {"rates": asdict(rates(torch.device("cpu")))}


@scene
def sharded(folder: Path) -> Found:
    """FSDP2, with its blocks compiled one by one; the rates are pinned, and others on each rank."""
    from torch.distributed.fsdp import fully_shard

    give_rates(folder, pinned=True)
    model = Blocks()
    for block in model.blocks:
        block.compile(**options(verify=1))
        fully_shard(block)
    fully_shard(model)
    return told(*trained(model, model, share))


class Gathering(nn.Module):
    """A block with collectives in its middle: what both ranks have is gathered, and each takes its part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        own = (x @ self.weight).tanh()
        every = functional_collectives.all_gather_tensor_autograd(own, 0, distributed.group.WORLD)
        mixed = (every.sin() @ self.weight).exp()
        return functional_collectives.reduce_scatter_tensor_autograd(
            mixed, "sum", 0, distributed.group.WORLD
        ).sin()


@scene
def collectives(folder: Path) -> Found:
    """Collectives inside of two compiled blocks, with everything computed again that may be."""
    found: Found = {}
    for name, is_compiled in (("eager", False), ("compiled", True)):
        torch.manual_seed(0)
        model = nn.Sequential(Gathering(), Gathering())
        if is_compiled:
            for block in model:
                block.compile(**options(planner=everything(1), budget="min"))
        for step in range(2):  # the second time with the plans that are settled
            model.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(distributed.get_rank()))
            with torch.profiler.profile() if step else nullcontext() as profiler:
                model(x).sum().backward()
        counts = {each.key.removeprefix("_c10d_functional::"): each.count for each in profiler.key_averages()}
        gradients = [each.grad.tolist() for each in model.parameters() if each.grad is not None]
        found[name] = {"gradients": gradients, "counts": counts}
    return found


class Layer(nn.Module):
    """A product and two functions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sin()


def layers(count: int, width: int, **more: Any) -> nn.Module:
    """Some layers, compiled one by one."""
    model = nn.Sequential(*(Layer(width) for _ in range(count)))
    for each in model:
        each.compile(**options(planner="recursive", **more))
    return model


@scene
def infeasible(folder: Path) -> Found:
    """A budget that is enough for each graph, but not for all of them in one step."""
    model = layers(6, 64, budget=80_000)
    errors = []
    for _ in range(2):
        try:
            model(torch.ones(64, 64)).sum().backward()
        except fxremat.InfeasibleBudgetError as error:
            errors.append([error.lowest_peak_bytes, str(error)])
    return {"errors": errors}


@scene
def different(folder: Path) -> Found:
    """Each rank runs a model of its own."""
    model = layers(2 + distributed.get_rank(), 8, budget="min")
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        losses.append(loss.item())
    step, *_ = fxremat.steps()
    return {"losses": losses, "notes": step.notes}


@scene
def alone(folder: Path) -> Found:
    """A step that one of the ranks runs."""
    model = layers(2, 8, budget="min")
    known = [0]
    if distributed.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Round, "patience_seconds", 0.1)
            for _ in range(MAX_LOOKS + 2):
                model.zero_grad()
                model(torch.ones(4, 8)).sum().backward()
                known.append(len(fxremat.steps()))
    distributed.barrier()
    return {"known": known, "notes": [step.notes for step in fxremat.steps()]}


def one_process(folder: Path) -> Found:
    """What one process computes from the whole batch, without fxremat."""
    model = Blocks()
    losses, peak_bytes = trained(model, model, batch)
    return {"losses": losses, "peak_bytes": peak_bytes}


def _rank(rank: int, port: int, folder: Path, names: list[str]) -> None:
    """All scenes, one after the other; what comes of them goes to a file."""
    store = distributed.TCPStore("127.0.0.1", port, RANKS, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
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


# --- What is said of it ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What each rank found, by scene."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("ranks")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a free port
    torch.multiprocessing.spawn(_rank, (store.port, folder, list(SCENES)), RANKS)
    found = [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    errors = [each[name]["error"] for each in found for name in SCENES if "error" in each[name]]
    assert not errors, "\n".join(errors)
    return found


TRAINED = ("in_buckets", "sharded")


@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_of_one_process(ranks: list[dict[str, Found]], name: str) -> None:
    """The mean over ranks is the loss of the whole batch."""
    losses = torch.tensor([each[name]["losses"] for each in ranks], dtype=torch.float64).mean(0)
    expected = torch.tensor(ranks[0]["one_process"]["losses"], dtype=torch.float64)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", TRAINED)
def test_the_measured_peak_of_each_rank_keeps_the_budget(ranks: list[dict[str, Found]], name: str) -> None:
    """One budget for all graphs of a rank's step."""
    for each in ranks:
        found = each[name]
        assert found["calls"] >= 3
        assert 0 < found["predicted_bytes"] <= found["budget_bytes"] < found["baseline_peak_bytes"]
        slack_bytes = GLOO_BYTES if name == "sharded" else SLACK_BYTES
        assert found["peak_bytes"] <= found["budget_bytes"] + slack_bytes
        assert found["measured_bytes"] <= found["budget_bytes"] + slack_bytes


@pytest.mark.parametrize("name", TRAINED)
def test_first_calls_are_verified_on_each_rank(ranks: list[dict[str, Found]], name: str) -> None:
    """Each plan of each graph, while ranks talk to each other around it."""
    for each in ranks:
        assert len(each[name]["verified"]) >= each[name]["graphs"] > 0
        assert all(calls == 1 for calls in each[name]["verified"])


@pytest.mark.parametrize("name", TRAINED)
def test_plans_are_the_same_on_all_ranks(ranks: list[dict[str, Found]], name: str) -> None:
    """Whatever machines and profilers do; and all ranks record the same steps."""
    first, second = (each[name] for each in ranks)
    assert first["plans"] == second["plans"]
    assert first["recordings"] == second["recordings"]
    for each in (first, second):
        assert each["notes"] == ["the plans are the same on all 2 ranks"]
        assert each["warnings"] == []


def test_ranks_have_the_rates_of_the_first(ranks: list[dict[str, Found]]) -> None:
    """Which their ledgers don't say."""
    assert ranks[0]["in_buckets"]["rates"] == ranks[1]["in_buckets"]["rates"]


def test_collectives_inside_of_blocks_happen_once(ranks: list[dict[str, Found]]) -> None:
    """Though everything else is computed again; and gradients are those without fxremat, bit for bit."""
    for each in ranks:
        eager, compiled = (each["collectives"][name] for name in ("eager", "compiled"))
        assert compiled["gradients"] == eager["gradients"] != []
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            assert compiled["counts"][name] == eager["counts"][name] == 4  # two forwards and backwards
        again, once = (
            sum(found["counts"].get(name, 0) for name in ("aten::exp", "aten::exp_"))
            for found in (compiled, eager)
        )
        assert again > once


def test_a_budget_that_is_infeasible_is_so_on_all_ranks(ranks: list[dict[str, Found]]) -> None:
    """With the same error."""
    first, second = (each["infeasible"]["errors"] for each in ranks)
    assert first == second != []


def test_ranks_that_run_different_steps_settle_by_themselves(ranks: list[dict[str, Found]]) -> None:
    """And say so."""
    for rank, each in enumerate(ranks):
        (note,) = each["different"]["notes"]
        assert f"on ranks {rank} of 2" in note
        assert any(note in text for text in each["different"]["warnings"])


def test_a_rank_that_is_alone_waits_for_nobody_in_the_end(ranks: list[dict[str, Found]]) -> None:
    """Nor do reports of its steps."""
    found = ranks[0]["alone"]
    assert found["known"][1] == 0 and found["known"][-1] == 1
    assert "not all ranks" in found["notes"][0][0]
