"""The ranges of a CPU's loops are those that Inductor gives them, before it fuses any."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import crossed
import pytest
import torch
from graphs import Function
from known import off_with
from networks import Residual
from torch import Tensor, nn
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler, SchedulerNode
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from unseen import LowPrecision, no_loops

import fxremat
from fxremat.driver import pipeline
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.schedule import bind
from fxremat.inductor import fusion
from fxremat.inductor.grouping import Grouping, group
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.nests import nests
from fxremat.inductor.orders import Orders
from fxremat.inductor.ranges import Ranges
from fxremat.inductor.segments import recomputation

Groups = dict[str, Ranges]  # by the last node that a loop was made for


def last_origin(node: BaseSchedulerNode) -> str:
    """The last of the nodes whose values a loop computes."""
    origins = node.node.get_origins()
    return str(max(origins, key=list(next(iter(origins)).graph.nodes).index))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str]]]:
    """What is computed together, in each kernel that Inductor makes while the fixture is used."""
    found: list[set[str]] = []
    fuse = Scheduler.fuse_nodes

    def record(self: Scheduler, nodes: list[Any]) -> list[Any]:
        made = fuse(self, nodes)
        found.extend({last_origin(each) for each in kernel.get_nodes()} for kernel in made)
        return made

    monkeypatch.setattr(Scheduler, "fuse_nodes", record)
    with no_loops(), fresh_cache():
        yield found


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """The ranges of the loops that Inductor schedules while the fixture is used."""
    found: Groups = {}
    fuse = Scheduler.fuse_nodes

    def record(self: Scheduler, nodes: list[Any]) -> list[Any]:
        for each in nodes:
            if isinstance(each, SchedulerNode):
                kept, reduced = each.group[1]
                ranges = Ranges(tuple(map(int, kept)), tuple(map(int, reduced)))
                found.setdefault(last_origin(each), ranges)  # a mean is a sum first
        return fuse(self, nodes)

    monkeypatch.setattr(Scheduler, "fuse_nodes", record)
    with no_loops(), fresh_cache():
        yield found


def graph_of(
    module: nn.Module, *args: Tensor, monkeypatch: pytest.MonkeyPatch, planner: str = "auto"
) -> JointGraph:
    """The graph that is planned when a module is compiled."""
    graphs: list[JointGraph] = []
    planned = pipeline.planned

    def keep(graph: JointGraph, *rest: Any, **more: Any) -> Any:
        graphs.append(graph)
        return planned(graph, *rest, **more)

    monkeypatch.setattr(pipeline, "planned", keep)
    torch._dynamo.reset()
    options = {"scope": "graph", "fx_graph_cache": False, "planner": planner}
    torch.compile(module, backend="fxremat", options=options)(*args).sum().backward()
    (graph,) = graphs
    return graph


def predicted(graph: JointGraph) -> Groups:
    """The ranges that are known of a graph's loops in its own order."""
    binding = bind(graph, graph.names)
    again = recomputation(graph, binding)
    inlining = Inlining(graph, binding, again.waiting)
    found = zip(graph.names, nests(graph, inlining, Orders(graph, inlining, again)), strict=True)
    return {name: ranges for name, ranges in found if ranges is not None}


def attention(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Attention whose mask is one for all heads."""
    return torch.softmax(torch.where(mask > 0, q @ k, -1e9), dim=-1) @ q


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    """Rows that are normalised, and a bias."""
    return functional.layer_norm(x @ weight, (16,)) * weight[0]


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """A gate of two halves, and a permuted value."""
    left, right = (x @ weight).chunk(2, dim=-1)
    return (left * right.tanh()).permute(0, 2, 1).contiguous().exp() @ x


def turned(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution over a sequence whose features come last, and what is done to its result."""
    found = functional.silu(functional.conv1d(x.transpose(1, 2), weight, padding=1).transpose(1, 2))
    return (found - found.sum(-1, keepdim=True)).square() + x


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Attention to the result of a convolution over a sequence: four dimensions that are no image's."""
    found = functional.conv1d(x.transpose(1, 2), weight, padding=1).transpose(1, 2)
    apart = found.unflatten(-1, (2, 8)).transpose(1, 2)
    return torch.softmax(apart @ apart.mT, -1) @ apart


SHAPES: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    attention: [(2, 4, 16, 16), (2, 4, 16, 16), (16, 16)],
    normalised: [(4, 8, 16), (16, 16)],
    parts: [(4, 8, 16), (16, 16)],
    turned: [(4, 16, 8), (8, 8, 3)],
    heads: [(4, 12, 16), (16, 16, 3)],
}


@pytest.mark.parametrize("function", SHAPES, ids=lambda function: function.__name__)
def test_sequences_have_inductors_ranges(
    function: Callable[..., Tensor], scheduled: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of masks, normalisations, halves and permuted values."""
    args = [torch.randn(shape, requires_grad=True) for shape in SHAPES[function]]
    known = predicted(graph_of(Function(function), *args, monkeypatch=monkeypatch))
    both = known.keys() & scheduled.keys()
    assert len(both) >= 2
    assert {name: known[name] for name in both} == {name: scheduled[name] for name in both}


@pytest.mark.parametrize(
    ("norm", "under", "kept"),
    [
        (nn.BatchNorm2d(8), nn.Sequential, {(4 * 14 * 14, 8), (4, 14 * 14, 8)}),
        (nn.InstanceNorm2d(8), LowPrecision, {(14 * 14, 4 * 8), (4, 14 * 14, 8)}),
    ],
)
def test_images_have_inductors_ranges(
    norm: nn.Module,
    under: Callable[[nn.Module], nn.Module],
    kept: set[tuple[int, ...]],
    scheduled: Groups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Points and channels where each channel is scaled; images apart where each of them drops channels.

    Where each is normalised by itself, the channels of all are those of one.
    """
    layers = nn.Conv2d(3, 8, 3), norm, nn.ELU(), nn.Dropout2d(0.5), nn.Conv2d(8, 8, 3), nn.ELU()
    mean = Function(torch.mean)  # images that are returned lie as they were traced
    model = under(nn.Sequential(*layers, mean))
    x = torch.randn(4, 3, 16, 16)
    known = predicted(graph_of(model, x, monkeypatch=monkeypatch, planner="keep_all"))
    both = known.keys() & scheduled.keys()
    assert {known[name].kept for name in both} >= kept
    assert {name: known[name] for name in both} == {name: scheduled[name] for name in both}


@off_with("2.11")
def test_images_of_both_orders_have_inductors_ranges(
    scheduled: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lie as they were traced; loops go through them as most of what they read and write lies."""
    parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(2)]
    model = nn.Sequential(*(Residual(*each) for each in parts), Function(torch.mean))
    x = torch.randn(4, 8, 16, 16)
    known = predicted(graph_of(model, x, monkeypatch=monkeypatch, planner="keep_all"))
    both = known.keys() & scheduled.keys()
    assert {known[name].kept for name in both} >= {(4, 8, 256), (1024, 8)}
    assert {name: known[name] for name in both} == {name: scheduled[name] for name in both}


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="traces no sigmoid of the gradient")
def test_what_is_computed_of_merged_images_alone_is_flat(
    scheduled: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each image is normalised by itself, the gate of a residual block lies as those of one do."""
    model, (x,) = crossed.network("instances.silu.residual")
    known = predicted(graph_of(model, x, monkeypatch=monkeypatch, planner="keep_all"))
    gates = [name for name in known.keys() & scheduled.keys() if name.startswith("sigmoid")]
    assert gates and {known[name] for name in gates} == {Ranges((x.numel(),))}
    assert all(known[name] == scheduled[name] for name in gates)


@pytest.mark.parametrize("groups", [1, 2])
def test_pooled_images_have_inductors_ranges(
    groups: int, scheduled: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns are apart where windows are read, and points are one where channels are in groups."""
    first = nn.Conv2d(3, 8, 3), nn.ELU(), nn.AvgPool2d(2), nn.GroupNorm(groups, 8), nn.Tanh()
    model = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.AvgPool2d(3, 1, 1), nn.ELU(), Function(torch.mean))
    known = predicted(graph_of(model, torch.randn(4, 3, 18, 18), monkeypatch=monkeypatch))
    both = known.keys() & scheduled.keys()
    assert {len(known[name].kept) for name in both} >= {1, 3, 4}
    assert {name: known[name] for name in both} == {name: scheduled[name] for name in both}


@pytest.mark.usefixtures("scheduled")
def test_loops_of_other_ranges_are_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of a softmax whose mask is one for all heads: exponentials are stored for it."""
    args = [torch.randn(shape, requires_grad=True) for shape in SHAPES[attention]]
    graph = graph_of(Function(attention), *args, monkeypatch=monkeypatch)
    binding = bind(graph, graph.names)
    again = recomputation(graph, binding)
    grouping = Grouping(graph, binding, Inlining(graph, binding, again.waiting), again)
    kernels = dict(zip(graph.names, grouping.kernels, strict=True))
    assert kernels["exp"] is not kernels["sum_1"]
    assert fusion.lower(graph, binding).materialised[graph.names.index("exp")]


def summed(x: Tensor, weight: Tensor) -> Tensor:
    """The rows of a sum that is stored, for it reads so much, are normalised."""
    terms = itertools.accumulate([weight] * 4, torch.matmul, initial=x)
    return functional.layer_norm(functools.reduce(torch.add, terms), (16,))


def joined(x: Tensor, weight: Tensor) -> Tensor:
    """A concatenation is brought into another order."""
    both = torch.cat([x @ weight, x.tanh() @ weight])
    return both.transpose(1, 2).contiguous() @ x.repeat(2, 1, 1)


def halves(x: Tensor, weight: Tensor) -> Tensor:
    """Two loops alike read a half each."""
    left, right = (x @ weight).chunk(2, dim=-1)
    return left.exp() @ right.sin().mT


@pytest.mark.parametrize(
    ("function", "first", "second"),
    [(summed, "add_3", "mul"), (joined, "cat", "clone"), (halves, "exp", "sin")],
)
def test_loops_that_do_not_go_through_the_same_are_kernels_of_their_own(
    function: Callable[..., Tensor],
    first: str,
    second: str,
    fused: list[set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of what is computed in a loop over all elements, what reads a concatenation, and other parts."""
    args = [torch.randn(shape, requires_grad=True) for shape in [(4, 8, 16), (16, 16)]]
    graph = graph_of(Function(function), *args, monkeypatch=monkeypatch)
    kernels = dict(zip(graph.names, group(graph, bind(graph, graph.names)).kernels, strict=True))
    assert {first, second} <= set().union(*fused)
    assert not any({first, second} <= each for each in fused)
    assert None is not kernels[first] is not kernels[second] is not None


@pytest.mark.usefixtures("scheduled")
def test_what_is_read_again_row_by_row_takes_no_place() -> None:
    """The exponentials of a softmax are of one row at a time, and hand the place of the scores to nothing."""

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        for _ in range(2):
            y = torch.softmax(y @ y.mT, -1) @ y
        return y @ weight

    torch.compiler.reset()
    args = [torch.randn(shape, requires_grad=True) for shape in [(4, 64, 16), (16, 16)]]
    options = {"budget": "min", "scope": "graph"}
    torch.compile(Function(twice), backend="fxremat", options=options)(*args).sum().backward()
    report = fxremat.reports()[-1]
    assert report.solution.peak_bytes == pytest.approx(report.lowered_peak_bytes, rel=0.03)


@pytest.mark.usefixtures("scheduled")
def test_numbers_are_drawn_in_the_rows_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of a softmax, both computed again: one kernel does both, and stores no numbers."""

    def dropped(x: Tensor) -> Tensor:
        return functional.dropout(torch.softmax(x @ x.mT, -1), 0.5) @ x

    graph = graph_of(Function(dropped), torch.randn(4, 16, 8, requires_grad=True), monkeypatch=monkeypatch)
    again = {name: 1 for name in graph.names if name.startswith(("div", "gt", "inductor_random"))}
    binding = bind(graph, expand(graph, again))
    steps = dict(reversed([*zip(binding.nodes, range(len(binding.nodes)), strict=True)]))  # the first of each
    kernels = group(graph, binding).kernels
    (draw,) = (node for node, loop in enumerate(graph.loops) if loop.is_draw)
    assert kernels[steps[draw]] is kernels[steps[graph.index["sum_1"]]] is not None
    assert not fusion.lower(graph, binding).materialised[steps[draw]]


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """A gate that is computed of a convolution over a sequence whose features come last."""
    gate = functional.conv1d(x.transpose(1, 2), weight, padding=1).transpose(1, 2)
    return (functional.silu(gate) * x).square().sum()


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="traces no sigmoid of the gradient")
@pytest.mark.usefixtures("scheduled")
def test_a_loop_over_all_elements_is_split_for_its_own_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that a convolution reads is a loop over its sizes; the sigmoid's sizes are others."""
    args = [torch.randn(shape, requires_grad=True) for shape in [(4, 64, 48), (48, 48, 3)]]
    graph = graph_of(Function(gated), *args, monkeypatch=monkeypatch)
    grouping = group(graph, bind(graph, graph.names))
    kernels = dict(zip(graph.names, grouping.kernels, strict=True))
    viewed = graph.nodes[graph.index["convolution_backward"]].operands[0]
    read = graph.nodes[viewed].shares
    assert read is not None and kernels["sigmoid"] is not None
    assert kernels[graph.nodes[read].name] is not kernels["sigmoid"]
