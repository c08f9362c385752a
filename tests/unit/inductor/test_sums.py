"""Sums of gradients that plans have stored."""

from __future__ import annotations

from collections.abc import Callable

import crossed
import pytest
import torch
from graphs import Function
from models import train_step
from networks import Residual, Scored
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from unseen import no_loops

import fxremat
from fxremat._torch.lowered import GeneratedCode
from fxremat.driver import pipeline
from fxremat.driver.compilation import Compilation
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import bind
from fxremat.inductor.facts import as_usual, facts
from fxremat.inductor.order import KERNELS, SEGMENT, STAYS, STRETCH, may_fuse
from fxremat.predict.models import INDUCTOR

IMAGE = (4, 8, 16, 16)


def convolution() -> nn.Conv2d:
    """One that keeps sizes and channels."""
    return nn.Conv2d(8, 8, 3, padding=1)


def stack(block: Callable[[], nn.Module]) -> JointGraph:
    """The graph of four equal blocks."""
    blocks = nn.Sequential(*(block() for _ in range(4)))
    return fxremat.capture(Scored(blocks), torch.randn(IMAGE), compiler="inductor")


def sums(graph: JointGraph) -> list[str]:
    """The names of the sums that are stored."""
    return [graph.nodes[index].name for index in facts(graph).sums]


def test_sums_along_residual_blocks_are_stored() -> None:
    """Each of the one before. Of the three of four blocks the last is read once: no other is made of it."""
    graph = stack(lambda: Residual(convolution(), nn.GroupNorm(2, 8), nn.ReLU()))
    found = sums(graph)
    first, second = (graph.fx_nodes[graph.index[name]] for name in found)
    assert first in second.all_input_nodes
    for node, place in zip((first, second), facts(graph).sums.values(), strict=True):
        assert max(node.all_input_nodes[place].users) is node


def test_sums_that_are_stored_anyway_or_read_once_are_left_alone() -> None:
    """A gradient of a convolution reads one as it is; behind a plain row of convolutions there are none."""
    assert not sums(stack(lambda: Residual(convolution(), nn.ReLU(), convolution())))
    assert not sums(stack(lambda: nn.Sequential(convolution(), nn.ReLU())))


@pytest.mark.parametrize(("is_alone", "count"), [(True, 1), (False, 0)])
def test_no_sum_is_stored_beside_what_is_read_again(is_alone: bool, count: int) -> None:
    """What is added is the gradient of another value as well: to store the sum would take more."""

    def function(x: Tensor, y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        gated = x.tanh() * y.sigmoid()
        read = gated if is_alone else gated + z
        return functional.conv2d(read, weight, padding=1).square() + gated.tanh()

    inputs = [torch.randn(size, requires_grad=True) for size in (IMAGE, IMAGE, IMAGE, (8, 8, 3, 3))]
    graph = fxremat.capture(Function(function), *inputs, loss=torch.sum, compiler="inductor")
    assert len(facts(graph).sums) == count


def test_a_graph_as_usual_stores_none() -> None:
    """Its own order takes no less than with sums that are stored; elsewhere the two are one graph."""
    graph = stack(lambda: Residual(convolution(), nn.BatchNorm2d(8), nn.GELU()))
    usual = as_usual(graph)
    assert facts(graph).sums and not facts(usual).sums
    stored = [INDUCTOR.lower(each, bind(each, each.names)).materialised for each in (graph, usual)]
    for name in sums(graph):
        assert [each[graph.names.index(name)] for each in stored] == [True, False]
    peaks = [int(INDUCTOR.profile(each, each.names).live_bytes.max()) for each in (graph, usual)]
    assert peaks[0] <= peaks[1]
    plain = stack(lambda: nn.Sequential(convolution(), nn.ReLU()))
    assert as_usual(plain) is plain


def test_the_choice_without_a_budget_is_weighed_as_it_runs() -> None:
    """So is one for a budget that it keeps; one for less has its sums stored."""
    graph = stack(lambda: Residual(convolution(), nn.BatchNorm2d(8), nn.GELU()))
    problem = pipeline.make_problem(graph)
    usual = pipeline.decide(problem, None, "auto", is_exact=True)
    peak = usual.solution.peak_bytes
    ample = pipeline.decide(problem, peak, "auto", is_exact=True)
    less = pipeline.decide(problem, peak - 1, "auto", is_exact=True)
    assert usual.is_default and ample.is_default and not less.is_default
    assert usual.as_run is ample.as_run is problem.as_usual and less.as_run is problem
    assert ample.solution.peak_bytes == peak == usual.baseline.peak_bytes
    for each in (usual, ample, less):
        assert each.as_run.evaluate(each.solution.schedule, "auto").peak_bytes == each.solution.peak_bytes


@pytest.mark.parametrize(("stays", "number", "is_one"), [(True, 1, True), (True, 2, False), (False, 2, True)])
def test_a_sum_that_stays_is_fused_with_what_stands_near(stays: bool, number: int, is_one: bool) -> None:
    """Past an external kernel it would wait, with what it is of."""
    backward = fx.Graph()
    x = backward.placeholder("x")
    total, reader = (backward.call_function(torch.ops.aten.add.Tensor, (x, x)) for _ in range(2))
    marks = {SEGMENT: 1, STRETCH: 1}
    total.meta = {**marks, KERNELS: 1} | ({STAYS: True} if stays else {})
    reader.meta = {**marks, KERNELS: number}
    assert may_fuse([[total]], [[reader]]) is is_one


def gradients(module: nn.Module, x: Tensor, **options: object) -> tuple[list[Tensor], fxremat.Report]:
    """Those of a step that is compiled with these options, and its report."""
    torch.compiler.reset()
    module.zero_grad()
    train_step(torch.compile(module, backend="fxremat", options=options), (x,))
    return [each.grad.clone() for each in module.parameters() if each.grad is not None], fxremat.reports()[-1]


def test_gradients_are_the_same() -> None:
    """Kernels are compiled here, of a small network."""
    blocks = nn.Sequential(*(Residual(convolution(), nn.GELU()) for _ in range(3)))
    module, x = Scored(blocks), torch.randn(IMAGE)
    train_step(module, (x,))
    expected = [each.grad.clone() for each in module.parameters() if each.grad is not None]
    with fresh_cache():
        found, report = gradients(module, x, budget="min")
    assert report.lowered_peak_bytes == pytest.approx(report.solution.peak_bytes, rel=0.01)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward that is compiled, whether a sum of it was told to stay."""
    found: list[bool] = []
    usual = Compilation.take_code

    def take_code(this: Compilation, code: GeneratedCode) -> None:
        if code.is_backward:
            found.append(any(STAYS in node.meta for node in code.nodes))
        usual(this, code)

    monkeypatch.setattr(Compilation, "take_code", take_code)
    return found


@pytest.mark.parametrize(("part", "is_stored"), [(1.25, False), (0.8, True)])
def test_a_budget_that_is_kept_anyway_stores_no_sum(part: float, is_stored: bool, stored: list[bool]) -> None:
    """Then all is as without one."""
    module, inputs = crossed.network("batches.gelu.residual")
    with fresh_cache(), no_loops():
        _, report = gradients(module, *inputs, budget=None)
        assert report.lowered_peak_bytes is not None and not any(stored)
        stored.clear()
        gradients(module, *inputs, budget=int(part * report.lowered_peak_bytes))
    assert stored[-1] is is_stored


def test_sums_of_many_blocks_take_what_is_predicted() -> None:
    """There are sums amid what is computed again for what reads them."""
    torch.manual_seed(0)
    layers = ((nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for _ in range(8))
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(*each) for each in layers))
    with fresh_cache(), no_loops():
        _, report = gradients(Scored(network), torch.randn(4, 3, 28, 28), budget="min")
    assert report.solution.peak_bytes == pytest.approx(report.lowered_peak_bytes, rel=0.01)
    assert not any("again" in note for note in report.notes)
