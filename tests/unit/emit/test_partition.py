"""partition: the forward and the backward together are the joint graph, and save what they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import (
    Sketch,
    assert_same,
    chain,
    compiled_graphs,
    example_inputs,
    few,
    networks,
    output_names,
    placeholders,
    random_schedule,
    run,
    run_parts,
)
from hypothesis import given
from hypothesis import strategies as st
from models import case, fresh
from programs import Network, batch, traced
from torch import Tensor, fx, nn

import fxremat
from fxremat.emit.partition import partition, saved_values
from fxremat.emit.rewrite import rewrite
from fxremat.errors import GraphError, InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.schedule import Schedule
from fxremat.inductor.order import SEGMENT, may_fuse, order_recomputation
from fxremat.predict.models import profile


def saved_names(graph: JointGraph) -> list[str]:
    """Names of what the backward needs from the forward."""
    return [graph.nodes[index].name for index in saved_values(graph)]


def operators(module: fx.GraphModule) -> list[str]:
    """Names of what an fx graph runs, in order."""
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


class TwoLayers(nn.Module):
    """sum(tanh(x @ w) @ v)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.v = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.w).tanh() @ self.v).sum()


# --- By hand --------------------------------------------------------------------------------------------


def test_what_the_backward_reads_is_saved() -> None:
    """Of a two-layer network: the weight and the input that gradients read, and tanh's output."""
    graph = fxremat.capture(TwoLayers(), torch.randn(3, 4))
    #  w's gradient reads x = primals_3; tanh's reads v = primals_2 and tanh; v's reads tanh
    assert saved_names(graph) == ["primals_2", "primals_3", "tanh"]
    forward, backward = partition(graph)
    assert operators(forward) == ["mm", "tanh", "mm_1", "sum_1"]
    assert output_names(forward) == ["sum_1", "primals_2", "primals_3", "tanh"]
    assert placeholders(backward) == ["primals_2", "primals_3", "tanh", "tangents_1"]
    assert len(output_names(backward)) == len(graph.backward_outputs)


def test_a_view_of_what_is_saved_is_taken_again() -> None:
    """Both tanh and a view of it are read: where views are taken again, tanh alone is handed over."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).tanh()
        return (y.view(2, 6).exp() * y.view(2, 6).sin()).sum() + (y @ w).sum()

    w = torch.randn(4, 4, requires_grad=True)
    graph, *_ = compiled_graphs(program, torch.randn(3, 4), w)
    by_itself, again = partition(graph), partition(graph, views_again=True)
    views = {node.name for node in graph.nodes if node.shares is not None}
    assert views & set(output_names(by_itself[0]))
    assert "tanh" in output_names(again[0])
    assert not views & set(output_names(again[0]))
    assert set(output_names(again[0])) < set(output_names(by_itself[0]))
    assert views & set(operators(again[1]))


def test_a_view_of_a_view_of_what_is_saved_is_taken_again() -> None:
    """Both of them; a view of what is not saved is saved itself."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        y, z = (x @ w).tanh(), (x @ w).sin()
        return (y.view(2, 6).t().sin() + z.view(6, 2).sin()).sum()

    graph, *_ = compiled_graphs(program, torch.randn(3, 4), torch.randn(4, 4, requires_grad=True))
    by_itself, again = (
        {graph.nodes[index].name for index in saved_values(graph, views_again)}
        for views_again in (False, True)
    )
    views = [node for node in graph.nodes if node.name in by_itself and node.shares is not None]
    bases = [graph.nodes[node.shares] for node in views if node.shares is not None]
    assert [node.name for node in bases] == ["view", "sin"]
    assert "tanh" in by_itself and "sin" not in by_itself
    assert again == by_itself - {views[0].name}


def test_a_view_that_may_not_run_again_is_saved() -> None:
    """Such as one of an input that the program writes to: taken again it would show the new value."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).tanh()
        return (y.view(2, 6).exp() * y.view(2, 6).sin()).sum() + (y @ w).sum()

    graph, *_ = compiled_graphs(program, torch.randn(3, 4), torch.randn(4, 4, requires_grad=True))
    nodes = [replace(node, keep="a test") if node.shares is not None else node for node in graph.nodes]
    kept = replace(graph, nodes=tuple(nodes))
    assert saved_values(graph, views_again=True) != saved_values(graph)
    assert saved_values(kept, views_again=True) == saved_values(kept)


def test_images_are_saved_in_the_place_of_views_of_them() -> None:
    """Those of a convolution and of the caller's; not what loops make, nor for what may not run again."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.convolution(x.view(1, 8, 3, 3).sin().view(2, 4, 3, 3))
            return y.view(1, 8, 3, 3).sin().sum() + (-y).view(1, 8, 9).sin().sum()

    model, x = Normalised(), torch.randn(2, 4, 3, 3, requires_grad=True)
    graph, *_ = compiled_graphs(model, x)
    views, whole = (
        {graph.nodes[index].name for index in saved_values(graph, True, each)} for each in (False, True)
    )
    shown = [node for node in graph.nodes if node.name in views - whole]
    bases = {graph.nodes[node.shares].name for node in shown if node.shares is not None}
    assert bases == whole - views and len(bases) == len(shown) == 2
    assert "convolution" in bases and any(name.startswith("primals") for name in bases)
    assert any(node.shares is not None for node in graph.nodes if node.name in whole)
    nodes = [replace(node, keep="a test") if node.shares is not None else node for node in graph.nodes]
    kept = replace(graph, nodes=tuple(nodes))
    assert saved_values(kept, True, True) == saved_values(kept, True)


def test_what_is_mirrored_is_not_saved() -> None:
    """tanh is computed again from mm, which takes its place among the saved values, or from the inputs."""
    graph = fxremat.capture(TwoLayers(), torch.randn(3, 4))
    assert saved_names(rewrite(graph, expand(graph, {"tanh": 1}))) == ["primals_2", "primals_3", "mm"]
    rewritten = rewrite(graph, expand(graph, {"tanh": 1, "mm": 1}))
    assert saved_names(rewritten) == ["primals_1", "primals_2", "primals_3"]
    _, backward = partition(rewritten)
    assert {"mm_mirror1", "tanh_mirror1"} <= set(operators(backward))


def test_the_backward_keeps_the_planned_order() -> None:
    """The interior of both graphs stands in the joint graph's order."""
    graph = traced(Network([("tanh", -1, -1), ("gelu", -1, -1), ("linear", -1, -1), ("add", -1, -3)]))
    new = rewrite(graph, random_schedule(graph, seed=2))
    forward, backward = partition(new)
    names = [node.name for node in new.nodes]
    assert operators(forward) == names[new.num_inputs : new.boundary]
    assert operators(backward) == names[new.boundary :]


def test_the_tuple_of_an_operator_is_never_saved() -> None:
    """Of an operator with several outputs those are saved that the backward reads, one by one."""
    graph = traced(Network([("layer_norm", -1, -1), ("sort", -1, -1), ("dropout", -1, -1)]))
    saved = [graph.fx_nodes[index] for index in saved_values(graph)]
    assert saved
    assert not any(isinstance(node.meta["val"], (tuple, list)) for node in saved)
    leaders = {graph.leader(node.name) for node in saved} - {None}
    assert {"native_layer_norm", "sort", "native_dropout"} <= leaders


def test_an_operators_tuple_that_must_be_saved_is_an_error() -> None:
    """A backward that picks an output itself is told where the fault is."""
    graph = traced(Network([("sort", -1, -1)]))
    broken = replace(graph, boundary=graph.index["getitem_1"])
    with pytest.raises(GraphError, match="tuple of the forward") as caught:
        saved_values(broken)
    assert caught.value.node == "sort"


def test_a_gradient_that_the_forward_computes_is_saved() -> None:
    """A gradient without a tangent is handed from the forward to the backward, which returns it."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.exp())
            return x.sum()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            return ctx.saved_tensors[0]  # without the tangent

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Constant.apply(x)

    x = torch.randn(4, requires_grad=True)
    graph = fxremat.capture(Model(), x)
    inputs = [x.detach(), torch.ones(())]
    assert_same(run_parts(partition(graph), graph, inputs), [x.detach().sum(), x.detach().exp()])


def test_nothing_saved() -> None:
    """A backward that needs the tangent alone gets it alone."""
    graph = fxremat.capture(nn.Identity(), torch.randn(4, requires_grad=True), loss=torch.sum)
    forward, backward = partition(graph)
    assert output_names(forward) == ["sum_1"]
    assert placeholders(backward) == ["tangents_1"]


def test_a_graph_of_mappings_cannot_be_partitioned() -> None:
    """There is no fx graph to split; nor is there one in a model."""
    with pytest.raises(GraphError, match="made of mappings"):
        partition(chain(2))
    with pytest.raises(InvalidOptionError, match=r"option 'graph': .*such as fxremat.capture\(\) makes"):
        partition(TwoLayers())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_random_operators_run_once(seed: int | None) -> None:
    """The backward draws no random numbers, though it has what the forward drew them for."""
    network = Network([("dropout", -1, -1), ("dropout", -1, -1), ("mul", -1, -2)])
    graph = traced(network)
    schedule = Schedule(graph.names) if seed is None else random_schedule(graph, seed)
    forward, backward = partition(rewrite(graph, schedule))
    assert [name for name in operators(forward) if name.startswith("native_dropout")] == [
        "native_dropout",
        "native_dropout_1",
    ]
    assert not [node for node in backward.graph.nodes if node.target is torch.ops.aten.native_dropout.default]
    assert "native_dropout.default(" in forward.code and "native_dropout.default(" not in backward.code


def test_what_the_backward_computes_again_is_not_in_the_forward() -> None:
    """Nor is it where what is drawn again, which has an effect, reads it."""
    module, inputs = fresh(case("language_model"))
    graph = fxremat.capture(module, *inputs)
    again = expand(graph, {node.name: 1 for node in graph.nodes[graph.num_inputs : graph.boundary]})
    new = rewrite(graph, again)
    forward, _ = partition(new)
    late = {node.name for node in new.nodes[new.boundary :]}
    assert any("mirror" in name for name in late)
    assert not late & {node.name for node in forward.graph.nodes}


def test_what_the_backward_draws_for_nobody_is_drawn_there() -> None:
    """It changes the random numbers behind it; the forward does not draw it."""

    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            torch.rand(4)
            return grad.expand(4)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Wasteful.apply(x)

    graph = fxremat.capture(Model(), torch.randn(4, requires_grad=True))
    assert [operators(part) for part in partition(graph)] == [["sum_1"], ["rand", "expand"]]


def test_a_constant_of_the_graph_is_not_saved() -> None:
    """Both parts have it."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    sketch.root.register_buffer("constant", torch.empty(4, device="meta"))
    constant = sketch.graph.get_attr("constant")
    constant.meta["val"] = sketch.root.constant
    outputs = [sketch.call("f", torch.ops.aten.mul.Tensor, x, constant)]
    graph = sketch.joint(outputs, [sketch.call("g", torch.ops.aten.mul.Tensor, t, constant)])
    assert saved_values(graph) == []
    assert all(graphs.find_nodes(op="get_attr") for graphs in (part.graph for part in partition(graph)))


# --- Together they are the joint graph ------------------------------------------------------------------


@few(15)
@given(networks(), st.integers(0, 9), st.booleans())
def test_the_parts_compute_what_the_joint_graph_computes(network: Network, seed: int, again: bool) -> None:
    """The forward and then the backward give the outputs and gradients of the joint graph, in every bit."""
    graph = traced(network)
    new = rewrite(graph, random_schedule(graph, seed))
    inputs = example_inputs(graph)
    assert_same(run_parts(partition(new, views_again=again), new, inputs), run(graph.module, inputs))


@few(10)
@given(networks(), st.integers(0, 9))
def test_the_forward_returns_what_the_profile_says_is_saved(network: Network, seed: int) -> None:
    """The bytes that live across the boundary are those of what the forward returns, inputs apart."""
    graph = traced(network)
    new = rewrite(graph, random_schedule(graph, seed))
    held = {storage for index in saved_values(new) for storage in new.nodes[index].views}
    held |= {s for output in new.forward_outputs if output is not None for s in new.nodes[output].views}
    assert profile(new, new.names).saved_bytes == sum(new.storage_bytes[storage] for storage in held)


@pytest.mark.parametrize("name", ["gated_mlp", "language_model"])
def test_the_zoos_parts_compute_the_same(name: str) -> None:
    """Real networks, rewritten by a random schedule and split, change no bit."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs)
    new = rewrite(graph, random_schedule(graph, seed=3))
    arguments = example_inputs(graph)
    assert_same(run_parts(partition(new), new, arguments), run(graph.module, arguments))


def test_gradients_are_those_of_autograd() -> None:
    """The oracle: forward and backward give eager autograd's loss and gradients, dropout included."""
    network = Network([("linear", -1, -1), ("dropout", -1, -1), ("layer_norm", -1, -1), ("mul", -1, -3)])
    x = batch()
    graph = traced(network)
    new = rewrite(graph, random_schedule(graph, seed=0))
    torch.manual_seed(0)
    loss = network(x)
    expected = [loss.detach(), *torch.autograd.grad(loss, [*network.parameters(), x])]
    inputs = [*(p.detach() for p in network.parameters()), x.detach(), torch.ones_like(loss)]
    assert_same(run_parts(partition(new), new, inputs), expected)


# --- The order of recomputation -------------------------------------------------------------------------


def test_each_recomputed_segment_waits_for_its_gradient() -> None:
    """The first kernel of a run of mirrors depends on what is computed last before; forwards stay.

    That is the loop behind a product, which Inductor writes over the product if nothing else waits for that.
    """
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())))
    graph = fxremat.capture(model, torch.randn(2, 4, requires_grad=True), loss=torch.sum)
    again = expand(graph, {"mm_1": 1, "tanh_1": 1, "tanh_2": 1})
    forward, backward = partition(rewrite(graph, again))
    assert (order_recomputation(forward), order_recomputation(backward)) == (0, 1)
    waiting = [node for node in backward.graph.nodes if node.target is torch.ops.higher_order.control_deps]
    names = [node.name for node in backward.graph.nodes]
    (gate,) = waiting[0].args[0]
    assert waiting[0].name == "mm_1_mirror1" and gate.target is torch.ops.aten.tanh_backward.default
    product = gate.args[0]
    assert product.target is torch.ops.aten.mm.default and list(product.users) == [gate]
    between = names[names.index(gate.name) + 1 : names.index("mm_1_mirror1")]
    assert not any(name.startswith("mm") for name in between)


def test_a_sum_is_waited_for_rather_than_its_product() -> None:
    """A product with a second reader would be computed by itself; with one it becomes an addmm."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4))
            self.b, self.c = (nn.Parameter(torch.randn(4, 4), requires_grad=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = (x @ self.a).tanh()
            return ((h @ self.b) * (h @ self.c).sigmoid()).sum()

    graph = fxremat.capture(Gated(), torch.randn(4, 4))
    _, backward = partition(rewrite(graph, expand(graph, {"mm": 1, "tanh": 1})))
    assert order_recomputation(backward) == 1
    (again,) = (node for node in backward.graph.nodes if node.name == "mm_mirror1")
    (gate,) = again.args[0]
    first, second = gate.args
    assert gate.target is torch.ops.aten.add.Tensor and second.target is torch.ops.aten.mm.default
    assert list(second.users) == [gate] and list(first.users) == [gate]


@pytest.mark.parametrize("is_last", [True, False])
def test_convolutions_that_wait_are_laid_out_as_the_others(is_last: bool) -> None:
    """Channels last where Inductor has convolutions work so; what is none is as traced."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, bias=False), nn.Tanh())))
    graph = fxremat.capture(model, torch.randn(2, 4, 9, 9, requires_grad=True), loss=torch.sum)
    _, backward = partition(rewrite(graph, expand(graph, {"convolution": 1, "tanh": 1})))
    decision = {"force_layout_optimization" if is_last else "layout_optimization": is_last}
    with torch._inductor.config.patch(decision):
        assert order_recomputation(backward) == 1
    (again,) = (node for node in backward.graph.nodes if node.name == "convolution_mirror1")
    assert again.target is not torch.ops.aten.convolution.default
    assert again.meta["val"].is_contiguous(memory_format=torch.channels_last) == is_last
    others = [node.meta["val"] for node in backward.graph.nodes if node.name.startswith("tanh")]
    assert others and all(each.is_contiguous() for each in others)


def test_what_reads_the_operator_before_it_need_not_wait() -> None:
    """It runs behind that anyway; what is waited for would not be written over by the loops between."""
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())))
    graph = fxremat.capture(model, torch.randn(2, 4, requires_grad=True), loss=torch.sum)
    behind = graph.names.index("tanh_backward_1") + 1
    again = ("mm", "tanh", "mm_1", "tanh", "tanh_1", "mm_2", "tanh_2")
    _, backward = partition(rewrite(graph, (*graph.names[:behind], *again, *graph.names[behind:])))
    assert order_recomputation(backward) == 1
    segments = {node.name: node.meta.get(SEGMENT, -1) for node in backward.graph.nodes}
    assert segments["mm_mirror1"] == segments["mm_1_mirror1"] < segments["mm_2_mirror1"]
    gates = backward.graph.find_nodes(op="call_function", target=torch.ops.higher_order.control_deps)
    assert [gate.name for gate in gates] == ["mm_mirror1"]


def test_loops_neither_wait_nor_are_waited_for() -> None:
    """A pointwise value that took part would need a buffer which it does not need otherwise."""
    model = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    graph = fxremat.capture(model, torch.randn(4, requires_grad=True), loss=torch.sum)
    _, backward = partition(rewrite(graph, expand(graph, {"tanh": 1, "tanh_2": 1})))
    assert order_recomputation(backward) == 0


def test_loops_of_two_segments_are_not_fused() -> None:
    """A buffer stands for the last of the nodes it was made for; without mirrors everything may be fused."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())))
    graph = fxremat.capture(model, torch.randn(2, 4, requires_grad=True), loss=torch.sum)
    again = expand(graph, {"mm_1": 1, "tanh_1": 1, "mm": 2, "tanh": 2})
    _, backward = partition(rewrite(graph, again))
    order_recomputation(backward)
    mirrors = [
        node for node in backward.graph.nodes if node.name.startswith("tanh") and "mirror" in node.name
    ]
    first, last = mirrors[0], mirrors[-1]
    plain = next(node for node in backward.graph.nodes if node.op == "placeholder")
    assert may_fuse([[first]], [[first]]) and may_fuse([], [[plain]]) and may_fuse([[plain]], [[plain]])
    assert not may_fuse([[first]], [[last]]) and not may_fuse([[first], [last]], [])
    assert may_fuse([[first, last]], [[last]]) and not may_fuse([[first, last]], [[first]])


def test_a_view_that_is_taken_again_computes_nothing() -> None:
    """A loop that reads what one shows is no mirror by that, and is fused across segments."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())))
    graph = fxremat.capture(model, torch.randn(2, 4, requires_grad=True), loss=torch.sum)
    _, backward = partition(rewrite(graph, expand(graph, {"tanh": 1, "t_1": 1})))
    order_recomputation(backward)
    mirrors = [node for node in backward.graph.nodes if "mirror" in node.name]
    view, loop = (next(each for each in mirrors if each.name.startswith(name)) for name in ("t_", "tanh"))
    plain = next(node for node in backward.graph.nodes if node.name.startswith("tanh_backward"))
    for node in (view, loop):
        node.meta[SEGMENT] = plain.meta[SEGMENT] + 1
    assert may_fuse([[view, plain]], [[plain]])
    assert not may_fuse([[loop, plain]], [[plain]])


def test_loops_are_not_fused_across_kernels_that_run_again() -> None:
    """A loop in front of a product that runs again is not put behind it: it would hold what it reads."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())))
    graph = fxremat.capture(model, torch.randn(2, 4, requires_grad=True), loss=torch.sum)
    _, kept = partition(graph)
    _, again = partition(rewrite(graph, expand(graph, {"mm_1": 1, "tanh_1": 1})))
    for backward, is_one in ((kept, True), (again, False)):
        order_recomputation(backward)
        plain = [node for node in backward.graph.nodes if "mirror" not in node.name]
        loops = [node for node in plain if node.name.startswith("tanh_backward")]
        assert may_fuse([[loops[0]]], [[loops[-1]]]) is is_one
