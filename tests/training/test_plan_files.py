"""Plan files: a plan that was made of a captured graph is the one that torch.compile trains with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import assert_same_outcome, compiled, outcome

import fxremat
from fxremat._torch.lowered import GeneratedCode
from fxremat.driver import compilation
from fxremat.errors import InfeasibleBudgetError, PlanMismatchError
from fxremat.graph.schedule import Schedule
from fxremat.inductor.generated import CodeMemory, Handed, read


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.dropout(nn.functional.scaled_dot_product_attention(q, k, v), 0.1)
        return x + self.down(nn.functional.gelu(self.up(x)))


class WithLoss(nn.Module):
    """A network and its loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def layered() -> tuple[nn.Module, Tensor]:
    """A chain of dense layers."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return WithLoss(*layers), torch.randn(64, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    """Two blocks with dropout."""
    return WithLoss(Attention(), Attention()), torch.randn(2, 16, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    """With statistics, to which the forward writes."""
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return WithLoss(*layers), torch.randn(4, 4, 16, 16)


NETWORKS = (layered, transformer, convolutions)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Nothing that is compiled outlives a test."""
    torch.compiler.reset()


def made(make: Callable[[], tuple[nn.Module, Tensor]], **options: Any) -> fxremat.PlanFile:
    """The plans of a network that is captured."""
    model, x = make()
    graph = fxremat.capture(model, x, compiler=options["compiler"])
    return fxremat.make_plan(graph, **options)


def trained(
    make: Callable[[], tuple[nn.Module, Tensor]], **options: Any
) -> tuple[dict[str, Tensor], fxremat.Report | None]:
    """What a step leaves behind, and its report; without options uncompiled."""
    torch.manual_seed(0)
    model, x = make()
    seen = len(fxremat.reports())
    found = outcome(compiled(model, **options) if options else model, [x])
    return found, next(iter(fxremat.reports()[seen:]), None)


def without_writes(schedule: Schedule) -> list[str]:
    """The names of a schedule but for those of what writes back to inputs, which files do not have."""
    return [name for name in schedule if not name.startswith("copy_")]


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("budget", [None, "min"])
def test_a_plan_of_a_captured_graph_is_compiled(
    make: Callable[[], tuple[nn.Module, Tensor]], budget: str | None, tmp_path: Path
) -> None:
    """The same schedule and peak as planned, and the gradients of the model without fxremat."""
    path = tmp_path / "plan.json"
    (plan,) = fxremat.save_plan(path, made(make, budget=budget, compiler="eager")).graphs
    expected, _ = trained(make)
    found, report = trained(make, plan=str(path))
    assert report is not None
    assert without_writes(report.solution.schedule) == list(plan.solution.schedule)
    assert report.peak_bytes == plan.solution.peak_bytes
    assert any(str(path) in note for note in report.notes)
    assert_same_outcome(found, expected)


@pytest.mark.inductor
@pytest.mark.parametrize("make", [layered, pytest.param(convolutions, marks=pytest.mark.slow)])
def test_a_plan_of_a_captured_graph_is_compiled_by_inductor(
    make: Callable[[], tuple[nn.Module, Tensor]], tmp_path: Path
) -> None:
    """The same nodes in the same order; where inputs are written back, that ends the forward."""
    plans = made(make, budget=0.9, compiler="inductor")
    (plan,) = plans.graphs
    _, report = trained(make, plan=plans, compiler="inductor")
    assert report is not None
    assert without_writes(report.solution.schedule) == list(plan.solution.schedule)
    assert report.solution.peak_bytes == pytest.approx(plan.solution.peak_bytes, rel=0.01)
    assert report.peak_bytes == pytest.approx(plan.solution.peak_bytes, rel=0.1)


def test_a_plan_of_a_process_that_trained_is_compiled(tmp_path: Path) -> None:
    """Reports have what a file needs, tied weights included, which a captured graph counts twice."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.hidden = nn.Linear(8, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.hidden(self.embed(x)))).logsumexp(-1).mean()

    def make() -> tuple[nn.Module, Tensor]:
        return Tied(), torch.arange(8).reshape(2, 4)

    _, report = trained(make, budget="min")
    assert report is not None
    path = tmp_path / "plan.json"
    fxremat.save_plan(path, report)
    torch.compiler.reset()
    _, again = trained(make, plan=path)
    assert again is not None
    assert again.solution.schedule == report.solution.schedule
    torch.compiler.reset()
    with pytest.raises(PlanMismatchError, match=r"aten\.add\.Tensor"):
        trained(make, plan=made(make, budget="min", compiler="eager"))


def test_a_plan_of_a_process_that_wrote_to_inputs_is_compiled(tmp_path: Path) -> None:
    """What writes the statistics back is a part of its schedule, and of no file."""
    expected, report = trained(convolutions, budget="min")
    assert report is not None
    assert len(without_writes(report.solution.schedule)) < len(report.solution.schedule)
    path = tmp_path / "plan.json"
    fxremat.save_plan(path, report)
    torch.compiler.reset()
    found, again = trained(convolutions, plan=path)
    assert again is not None
    assert again.solution.mirror_counts == report.solution.mirror_counts
    assert again.peak_bytes == report.peak_bytes
    assert_same_outcome(found, expected)


def test_each_graph_of_a_model_finds_its_plan() -> None:
    """A file has plans for several graphs, and the order in which they are compiled does not count."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.second(x)).sum()

    seen = len(fxremat.reports())
    model, x = Broken(), torch.randn(4, 8)
    compiled(model, budget="min", scope="graph")(x).backward()
    first = fxremat.reports()[seen:]
    assert len(first) == 2
    torch.compiler.reset()
    plans = fxremat.PlanFile.of(reversed(first))
    compiled(model, plan=plans)(x).backward()
    second = fxremat.reports()[seen + 2 :]
    assert [each.solution.schedule for each in second] == [each.solution.schedule for each in first]


def test_another_batch_is_refused_or_left_to_pytorch() -> None:
    """By option on_error."""
    plans = made(layered, budget="min", compiler="eager")

    def larger() -> tuple[nn.Module, Tensor]:
        model, _ = layered()
        return model, torch.randn(65, 32)

    with pytest.raises(PlanMismatchError, match=r"float32\[65, 32\], expected float32\[64, 32\]"):
        trained(larger, plan=plans)
    torch.compiler.reset()
    expected, _ = trained(larger)
    with pytest.warns(UserWarning, match="leaves graph .* to PyTorch's partitioner"):
        found, report = trained(larger, plan=plans, on_error="fallback")
    assert report is None
    assert_same_outcome(found, expected)


def test_a_dynamic_graph_is_another_graph() -> None:
    """It computes with sizes. Its own plan is for those that it was traced with, and runs for others."""
    model, x = layered()
    plans = made(layered, budget="min", compiler="eager")
    with pytest.raises(PlanMismatchError):
        compiled(model, dynamic=True, plan=plans)(x)
    seen = len(fxremat.reports())
    torch.compiler.reset()
    compiled(model, dynamic=True, budget="min", scope="graph")(x).backward()
    own = fxremat.PlanFile.of(fxremat.reports()[seen:])
    torch.compiler.reset()
    again = compiled(model, dynamic=True, plan=own)
    again(x).backward()
    again(torch.randn(99, 32)).backward()
    first, second = fxremat.reports()[seen:]
    assert first.solution.schedule == second.solution.schedule


def test_a_budget_beside_a_plan_is_kept_or_refused() -> None:
    """A plan is not planned again."""
    plans = made(layered, budget="min", compiler="eager")
    peak = plans.graphs[0].solution.peak_bytes
    _, report = trained(layered, plan=plans, budget=peak)
    assert report is not None and report.budget_bytes == peak
    torch.compiler.reset()
    with pytest.raises(InfeasibleBudgetError):
        trained(layered, plan=plans, budget=peak - 1)


@pytest.mark.inductor
def test_code_that_holds_more_than_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other plan to take its place."""
    plans = made(layered, budget=0.9, compiler="inductor")
    budget = plans.graphs[0].solution.peak_bytes + 1

    def read_more(code: GeneratedCode, given: Handed) -> CodeMemory | None:
        found = read(code, given)
        return None if found is None else replace(found, peak_bytes=budget + 1)

    monkeypatch.setattr(compilation, "read", read_more)
    with pytest.raises(InfeasibleBudgetError, match="that is what the plan takes") as caught:
        trained(layered, plan=plans, budget=budget, compiler="inductor", fx_graph_cache=False)
    assert caught.value.lowest_peak_bytes == budget + 1


def test_an_order_in_the_model_goes_before_a_plan() -> None:
    """A plan that computes again what a region keeps is refused."""

    class Keeping(nn.Module):
        def __init__(self, is_kept: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.is_kept = is_kept

        def forward(self, x: Tensor) -> Tensor:
            if self.is_kept:
                with fxremat.region(keep=True):
                    x = torch.tanh(self.first(x))
            else:
                x = torch.tanh(self.first(x))
            return torch.sin(self.second(torch.cos(x))).sum()

    x = torch.randn(4, 8)
    graph = fxremat.capture(Keeping(False), x)
    everything = fxremat.make_plan(
        graph, planner=lambda problem: dict.fromkeys(problem.graph.names, 1), compiler="eager"
    )
    compiled(Keeping(False), plan=everything)(x).backward()
    torch.compiler.reset()
    with pytest.raises(fxremat.ScheduleError, match="its region says keep"):
        compiled(Keeping(True), plan=everything)(x)
