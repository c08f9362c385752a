"""Stored steps: another process begins with the plans that one has settled for, and looks whether they hold.

Where it is enough, another process is this one when it has forgotten all that it knew.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import threads
from torch import Tensor, nn

import fxremat
from fxremat._torch import compilers
from fxremat.driver import policy
from fxremat.step import stored
from fxremat.step.step import steps

ROWS, WIDTH = 64, 32
BLOCKS = 3


class Block(nn.Module):
    """Its backward reads five values, which can all be had again from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh().sin().exp().tanh()


class Process:
    """A process with a model whose blocks are compiled one by one.

    Attributes:
        model: The model.
        searches: How often candidates were looked for.
    """

    def __init__(self, budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        steps.__init__()  # type: ignore[misc]
        self.searches = 0
        find = policy.candidates_of

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.searches += 1
            return find(*args, **kwargs)

        monkeypatch.setattr(policy, "candidates_of", counted)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        for block in self.model:
            block.compile(backend="fxremat", options={"budget": budget, "compiler": "eager"})

    def step(self, x: Tensor, calls: int = 1) -> list[Tensor]:
        """A training step; its gradients."""
        functools.reduce(operator.add, (self.model(x).square().mean() for _ in range(calls))).backward()
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return gradients


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Process]]:
    """Makes processes that share a folder."""
    monkeypatch.setattr(stored, "folder", lambda: tmp_path / "steps")
    yield lambda budget: Process(budget, monkeypatch)
    steps.__init__()  # type: ignore[misc]


def trained(process: Process, count: int = 3, **kwargs: Any) -> list[Tensor]:
    """The gradients of the last of some equal steps."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return [process.step(x, **kwargs) for _ in range(count)][-1]


@pytest.mark.parametrize("budget", [0.6, pytest.param("min", marks=pytest.mark.slow)], ids=str)
def test_another_process_begins_with_the_settled_plans(process: Any, budget: Any) -> None:
    """It searches nothing, its first step takes what is predicted, and gradients are the same."""
    first = process(budget)
    expected = trained(first)
    assert first.searches > 0
    (before,) = fxremat.steps()
    second = process(budget)
    found = trained(second, 1)
    (after,) = fxremat.steps()
    assert second.searches == 0
    assert [call.held_bytes for call in after.calls] == [call.held_bytes for call in before.calls]
    assert after.peak_bytes == after.measured_peak_bytes == before.peak_bytes
    assert after.lowest_peak_bytes == before.lowest_peak_bytes
    assert all(map(torch.equal, found, expected))
    trained(second)
    assert second.searches == 0


@pytest.mark.slow
def test_a_longer_step_is_learnt_as_ever(process: Any) -> None:
    """What was not stored runs with cautious plans first, and then all is settled together."""
    first = process(0.6)
    one = trained(first)
    second = process(0.6)
    both = trained(second, calls=2)
    assert second.searches > 0
    report = fxremat.steps()[-1]
    assert len(report.calls) == 2 * BLOCKS
    assert report.budget_bytes is not None and report.peak_bytes <= report.budget_bytes
    for twice, once in zip(both, one, strict=True):
        torch.testing.assert_close(twice, 2 * once)


@pytest.mark.slow
def test_plans_that_hold_no_more_are_settled_anew(process: Any) -> None:
    """In the other process there is more beside the graphs, so that the stored plans exceed the budget."""
    budget = 150_000
    trained(process(budget))
    (before,) = fxremat.steps()
    second = process(budget)
    beside = torch.zeros(ROWS, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        held = [(beside * number).sin() for number in range(4)]
        (second.model(x).square().mean() + sum(each.mean() for each in held)).backward()
        second.model.zero_grad(set_to_none=True)
    (after,) = fxremat.steps()
    assert after.outside_bytes > before.outside_bytes
    assert after.seconds > before.seconds
    assert max(before.peak_bytes, after.peak_bytes) <= budget + 512
    assert second.searches > 0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On several the least memory under autocast is more than the budget that float32 has at 0.6."""
    with threads(1):
        yield


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_told_apart", [True, False])
def test_a_graph_under_autocast_has_plans_of_its_own(
    process: Any, is_told_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo's graph is the same without; and a stored plan that is none of a graph is let go."""
    if not is_told_apart:
        monkeypatch.setattr(compilers, "autocast_types", lambda inputs: {})
    trained(process(0.6))
    second = process(0.6)
    with torch.autocast("cpu", torch.bfloat16):
        found = trained(second)
    assert second.searches > 0
    (report,) = fxremat.steps()
    assert report.budget_bytes is not None and report.peak_bytes <= report.budget_bytes
    torch.compiler.set_stance("force_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(second)
    torch.compiler.set_stance("default")
    assert all(map(torch.equal, found, expected))


def test_plans_are_looked_for_under_the_autocast_of_the_graph(process: Any) -> None:
    """Though nothing is planned where the cache has the graph, and reports are asked for outside of it."""
    model = process(0.6).model
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    (family,) = steps.families.values()
    graph: Any = family.first.graph
    graph._problem = None
    with torch.no_grad():
        names = graph.planning_problem.graph.names
    assert any("_to_copy" in name for name in names)


WORKER = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
import fxremat

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        return x + self.linear(x).tanh().sin().exp().tanh()

torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
for block in model:
    block.compile(backend="fxremat", options={"budget": 0.9})
x = torch.randn(64, 32)
for _ in range(3):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
(report,) = fxremat.steps()
print(json.dumps({
    "loss": loss.item(),
    "plans": [call.plan for call in report.calls],
    "peak": report.peak_bytes,
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


@pytest.mark.inductor
def test_another_process_compiles_nothing(tmp_path: Path) -> None:
    """Compiled code of all plans comes from the compiler's cache; in the first process none does."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WORKER], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    assert cold["misses"] > 1 and warm["misses"] == 0 < warm["hits"]
    for name in ("loss", "plans", "peak"):
        assert warm[name] == cold[name]
