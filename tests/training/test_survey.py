"""survey: what a step takes is known, and its plans are settled, before it runs; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.driver import compilation
from fxremat.measure import measure_peak

Step = Callable[[], Any]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that is compiled outlives a test."""
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of graphs, each time that one is split by a plan."""
    names: list[str] = []
    split = compilation.Compilation.split

    def counted(self: compilation.Compilation, *args: Any) -> Any:
        halves = split(self, *args)
        names.append(self.name)
        return halves

    monkeypatch.setattr(compilation.Compilation, "split", counted)
    return names


def options(budget: int | float) -> dict[str, Any]:
    """Those of a graph that runs as it is, planned fast."""
    return {"budget": budget, "compiler": "eager", "time_limit_seconds": 0.1}


def blockwise(budget: int | float, blocks: int = 3, width: int = 16) -> tuple[nn.Module, Step]:
    """Blocks that are compiled one by one, and a step with the loss outside of them."""
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    compiled = [torch.compile(each, backend="fxremat", options=options(budget)) for each in model]
    x = torch.randn(64, width)

    def step() -> None:
        y = x
        for each in compiled:
            y = each(y)
        y.square().mean().backward()

    return model, step


def whole(budget: int | float) -> tuple[nn.Module, Step]:
    """A model that is compiled as a whole, and a step with the loss outside of it."""
    model = nn.Sequential(Block(16), Block(16), nn.Linear(16, 50))
    compiled = torch.compile(model, backend="fxremat", options=options(budget))
    x, target = torch.randn(64, 16), torch.randint(50, (64,))
    return model, lambda: nn.functional.cross_entropy(compiled(x), target).backward()


def without_gradients(model: nn.Module) -> None:
    """Drop those of a model."""
    for each in model.parameters():
        each.grad = None


@pytest.mark.parametrize(("build", "budget"), [(blockwise, 85_000), (whole, 0.8)])
def test_the_predicted_peak_is_measured(
    build: Callable[[Any], tuple[nn.Module, Step]], budget: float, splits: list[str]
) -> None:
    """The first step has the settled plans, and keeps the budget by them; nothing is compiled later."""
    model, step = build(budget)
    (ahead,) = fxremat.survey(step)
    assert splits == []
    step()
    without_gradients(model)
    compiled = tuple(splits)
    assert len(compiled) == len({(call.graph_name, call.plan) for call in ahead.calls})
    *_, after = [
        each for each in fxremat.steps() if each.calls == ahead.calls
    ]  # others may have such calls, too
    assert after.measured_plans_peak_bytes == ahead.peak_bytes
    assert ahead.budget_bytes is not None and ahead.peak_bytes <= ahead.budget_bytes + 512
    step()
    without_gradients(model)
    measured = measure_peak(step, device="cpu").peak_bytes
    let_go_of = 0 if build is blockwise else 64 * 50 * 4  # the output's gradient, before its backward ends
    for found in (after.measured_peak_bytes, measured):
        assert found is not None and 0 <= ahead.peak_bytes - found <= let_go_of
    assert tuple(splits) == compiled


def test_nothing_is_touched() -> None:
    """Parameters, buffers, gradients and random numbers are as they were; so are the gradients of a step."""
    model = Block(16, nn.BatchNorm1d)
    compiled = torch.compile(model, backend="fxremat", options=options(100_000))
    x = torch.randn(64, 16)

    def step() -> None:
        compiled(x).square().mean().backward()

    first = next(model.parameters())
    first.grad = gradient = torch.ones_like(first)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    fxremat.survey(step)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert first.grad is gradient and bool((gradient == 1).all())
    assert [each.grad for each in model.parameters() if each is not first] == [None] * 5


def test_gradients_are_the_same_after_it() -> None:
    """Bit for bit those of the model without fxremat."""
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, step = whole(0.8)
        if is_compiled:
            fxremat.survey(step)
        torch.manual_seed(1)
        with torch.compiler.set_stance("default" if is_compiled else "force_eager"):
            step()
        found.append([each.grad for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)


def test_a_step_that_reads_numbers_is_refused() -> None:
    """The message names the line, and says what to do."""
    layer = torch.compile(nn.Linear(4, 4), backend="fxremat", options=options(100_000))

    def step() -> float:
        loss = layer(torch.ones(2, 4)).square().mean()
        loss.backward()
        return float(loss.detach())

    with pytest.raises(
        fxremat.CaptureError, match=r"test_survey.py:\d+.*Leave out of the function what reads"
    ):
        fxremat.survey(step)
    step()  # runs as ever


def test_an_optimizer_is_refused() -> None:
    """Its state would be fake from then on."""
    model, step = blockwise(100_000, blocks=1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def train() -> None:
        step()
        optimizer.step()

    with pytest.raises(fxremat.CaptureError, match="optimizer"):
        fxremat.survey(train)
    assert not optimizer.state
    assert all(each.grad is None for each in model.parameters())


def test_a_step_without_compiled_graphs_is_refused() -> None:
    """There is nothing to learn of it."""
    layer = nn.Linear(4, 4)
    with pytest.raises(fxremat.CaptureError, match="no graph"):
        fxremat.survey(lambda: layer(torch.ones(2, 4)).sum().backward())


def test_a_budget_that_no_plans_fit_is_refused() -> None:
    """Before anything runs, with the least budget that would do."""
    _, step = blockwise(10_000, blocks=2)
    with pytest.raises(fxremat.InfeasibleBudgetError, match="lowest peak found") as caught:
        fxremat.survey(step)
    assert caught.value.lowest_peak_bytes > 10_000


def test_a_step_that_ran_is_reported_as_it_is(splits: list[str]) -> None:
    """A survey in the middle of training changes nothing."""
    model, step = whole(0.8)
    for _ in range(2):
        step()
        without_gradients(model)
    known, compiled = fxremat.steps(), tuple(splits)
    assert fxremat.survey(step)[0].peak_bytes == known[-1].peak_bytes
    step()
    assert tuple(splits) == compiled
