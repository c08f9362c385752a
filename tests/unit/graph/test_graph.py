"""graph: storages, what may not run again, sizes, and the invariants that check() guards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import (
    Function,
    Sketch,
    assert_same,
    chain,
    compiled_graphs,
    example_inputs,
    few,
    networks,
    run,
    run_parts,
)
from hypothesis import given
from models import case, fresh
from programs import LAYERS, OPERATORS, Network, traced
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxremat
from fxremat.errors import CaptureError, GraphError, InvalidOptionError
from fxremat.graph import ops
from fxremat.graph.generators import STATE, random_state
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import bind, validate

aten = torch.ops.aten


def captured(function: Callable[..., Tensor], *inputs: Tensor) -> JointGraph:
    """The joint graph of a function."""
    return fxremat.capture(Function(function), *inputs)


def leaf(*shape: int) -> Tensor:
    """An input that takes a gradient."""
    return torch.randn(shape, requires_grad=True)


def reasons(graph: JointGraph) -> dict[str, str]:
    """Why nodes may not run again, by name."""
    return {node.name: node.keep for node in graph.nodes if node.keep is not None}


# --- From mappings --------------------------------------------------------------------------------------


def test_a_graph_of_mappings() -> None:
    """Inputs come first, bytes and operands are as given, the forward is what its output needs."""
    graph = JointGraph.from_mappings(
        {"a": ["x"], "x": (), "b": ["a", "x", "a"], "late": ["a"], "db": ["b"], "da": ["db", "late"]},
        {"a": 4, "b": 2, "late": 1, "db": 8, "da": 16},
        forward_outputs=["b"],
        backward_outputs=["da"],
        backward=["db", "da"],
        keep=["a"],
        seconds={"a": 2.5},
        name="drawn",
    )
    assert [node.name for node in graph.nodes] == ["x", "a", "b", "late", "db", "da"]
    assert graph.names == ("a", "b", "late", "db", "da")
    assert [node.phase.value for node in graph.nodes] == [
        *("input", "forward", "forward", "deferred", "backward", "backward")
    ]
    assert graph.nodes[2].operands == (1, 0)
    assert [graph.node_bytes(position) for position in range(6)] == [0, 4, 2, 1, 8, 16]
    assert (graph.num_inputs, graph.boundary, graph.outputs) == (1, 4, (2, 5))
    assert graph.users == ((1, 2), (2, 3), (4,), (5,), (5,), ())
    assert (graph.given_seconds, graph.name) == ({"a": 2.5}, "drawn")
    assert reasons(graph) == {"a": "it is forbidden"}
    assert [graph.is_backward(position) for position in range(6)] == [False] * 4 + [True] * 2
    assert (graph.operator("a"), graph.source("a"), graph.module_path("a")) == ("", "", "")


def test_a_source_of_its_own_is_no_input() -> None:
    """A node that reads nothing and takes bytes is computed, such as a mask of zeros."""
    graph = JointGraph.from_mappings({"zeros": (), "a": ["zeros"]}, {"zeros": 4, "a": 4}, forward_outputs="a")
    assert (graph.num_inputs, graph.names) == (0, ("zeros", "a"))


@pytest.mark.parametrize(
    ("operands", "outputs", "node", "problem"),
    [
        ({"x": (), "a": ["b"], "b": ["x"]}, [], "a", "reads 'b', which is computed later"),
        ({"x": (), "a": ["y"]}, [], "y", "no node of the graph"),
        ({"x": (), "a": ["x"]}, ["z"], "z", "no node of the graph"),
    ],
)
def test_mappings_that_are_no_graph(
    operands: dict[str, list[str]], outputs: list[str], node: str, problem: str
) -> None:
    """An order that is none and names that are none are GraphErrors."""
    with pytest.raises(GraphError, match=problem) as caught:
        JointGraph.from_mappings(operands, {"a": 1, "b": 1}, forward_outputs=outputs)
    assert caught.value.node == node


def test_a_backward_in_the_forward_is_no_graph() -> None:
    """The forward stands first and reads nothing of the backward."""
    with pytest.raises(GraphError, match="depends on a tangent and stands in the forward"):
        JointGraph.from_mappings(
            {"x": (), "a": ["x"], "b": ["x"]}, {"a": 1, "b": 1}, forward_outputs=["b"], backward=["a"]
        )


# --- Invariants -----------------------------------------------------------------------------------------


def broken(position: int, **changes: Any) -> Callable[[JointGraph], JointGraph]:
    """A graph with one node changed."""

    def change(graph: JointGraph) -> JointGraph:
        nodes = list(graph.nodes)
        nodes[position] = replace(nodes[position], **changes)
        return replace(graph, nodes=tuple(nodes))

    return change


@pytest.mark.parametrize(
    ("change", "node", "problem"),
    [
        (broken(3, operands=(5,)), "f2", "it reads 'f3'|it reads 'g3', which is computed later"),
        (broken(3, operands=(3,)), "f2", "reads 'f2', which is computed later"),
        (broken(0, phase=Phase.FORWARD), "x", "inputs must stand first"),
        (broken(3, phase=Phase.INPUT), "f2", "inputs must stand first"),
        (broken(6, phase=Phase.FORWARD), "g2", "stands in the backward"),
        (broken(3, phase=Phase.BACKWARD), "f2", "depends on a tangent and stands in the forward"),
        (broken(6, phase=Phase.DEFERRED), "g2", "a deferred node reads the backward's 'g3'"),
        (broken(3, leader=4), "f2", "before the operator whose output it is"),
        (lambda graph: replace(graph, forward_outputs=(6,)), "g2", "the forward returns it"),
    ],
)
def test_check_finds_each_broken_invariant(
    change: Callable[[JointGraph], JointGraph], node: str, problem: str
) -> None:
    """x t | f1 f2 f3 | g3 g2 g1, with one thing wrong."""
    graph = chain(3)
    graph.check()
    with pytest.raises(GraphError, match=problem) as caught:
        change(graph).check()
    assert caught.value.node == node


def test_a_graph_is_a_value() -> None:
    """Neither a graph nor its nodes can be assigned to."""
    graph = chain(1)
    with pytest.raises(AttributeError):
        graph.boundary = 0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        graph.nodes[0].name = "y"  # type: ignore[misc]


# --- Storages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.t(),
        lambda a: a.view(-1),
        lambda a: a.unsqueeze(0).expand(3, 4, 6),
        lambda a: a.detach(),
        lambda a: a[1:, ::2],
        lambda a: aten._unsafe_view(a, [6, 4]),
        lambda a: a.unflatten(1, (2, 3)).transpose(0, 1),
        lambda a: aten.alias(a),
    ],
)
def test_a_view_shares_the_storage_of_its_operand(view: Callable[[Tensor], Tensor]) -> None:
    """Whatever views a value is in its alias set and creates nothing."""
    graph = captured(lambda x: view(x.exp()).sin().sum() + x.sum(), leaf(4, 6))
    sin = graph.nodes[graph.index["sin"]]
    (viewed,) = sin.operands
    assert graph.nodes[viewed].views == graph.nodes[graph.index["exp"]].creates
    assert graph.node_bytes(viewed) == (96 if graph.nodes[viewed].name == "exp" else 0)


def test_a_view_of_an_input_views_nothing_that_counts() -> None:
    """The caller holds the storage; the view has none in the graph."""
    graph = captured(lambda x: x.t().sin().sum(), leaf(4, 6))
    view = graph.nodes[graph.index["t"]]
    assert (view.creates, view.views, view.shares) == ((), (), graph.index["primals_1"])


@pytest.mark.parametrize("split", ["split", "chunk", "unbind", "unsafe_chunk", "tensor_split"])
def test_the_parts_of_a_split_share_one_storage(split: str) -> None:
    """A split is a view, and so is each part that is picked from it."""
    arguments = () if split == "unbind" else (2,)
    graph = captured(lambda x: sum(p.sin().sum() for p in getattr(x.exp(), split)(*arguments)), leaf(4, 6))
    storage = graph.nodes[graph.index["exp"]].creates
    parts = [node for node in graph.nodes if node.name.startswith("getitem")]
    picked = [graph.nodes[operand] for n in graph.nodes if n.name.startswith("sin") for operand in n.operands]
    assert picked
    assert all(node.views == storage and node.creates == () for node in [*parts, *picked])


def test_each_output_of_an_operator_is_its_own_storage() -> None:
    """sort makes 96 bytes of values and 192 of indices, which its getitem nodes view."""
    graph = captured(lambda x: (x.sort(1).values.sin()).sum(), leaf(4, 6))
    sort, values, indices = (graph.nodes[graph.index[name]] for name in ("sort", "getitem", "getitem_1"))
    assert [graph.storage_bytes[storage] for storage in sort.creates] == [96, 192]
    assert (values.views, indices.views) == (sort.creates[:1], sort.creates[1:])
    assert (values.leader, values.shares) == (graph.index["sort"], graph.index["sort"])
    assert [values.phase, indices.phase] == [Phase.FORWARD, Phase.DEFERRED]


def test_tangents_are_counted_apart() -> None:
    """Their bytes are the backward's, not a storage's."""
    graph = captured(lambda x: x.exp(), leaf(4, 6))
    assert graph.tangent_bytes == 96
    assert graph.nodes[graph.index["tangents_1"]].creates == ()


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.values[node.name] = super().run_node(node)
        return self.values[node.name]


def assert_storages_are_real(graph: JointGraph) -> None:
    """The storages of the graph are those that running it makes, in their bytes and in who shares them."""
    recorder = Recorder(graph.module)
    with torch.no_grad():
        recorder.run(*example_inputs(graph))
    made: dict[int, int | None] = {}
    for position, node in enumerate(graph.nodes):
        real = [tensor.untyped_storage() for tensor in ops.tensors(recorder.values[node.name])]
        if position < graph.num_inputs:
            made |= {storage.data_ptr(): None for storage in real}
        elif node.creates:
            assert not made.keys() & {storage.data_ptr() for storage in real if storage.nbytes()}, node
            assert [s.nbytes() for s in real] == [graph.storage_bytes[s] for s in node.creates], node
            made |= {each.data_ptr(): storage for each, storage in zip(real, node.creates, strict=True)}
        else:
            viewed = {made[storage.data_ptr()] for storage in real if storage.nbytes()}
            assert viewed <= (set(node.views) or {None}), node


@pytest.mark.parametrize(
    ("write", "shape"),
    [
        (lambda a, y: a[1].copy_(y), (6,)),
        (lambda a, y: a[1:3].copy_(y), (2, 6)),
        (lambda a, y: torch.select_scatter(a[1:3], y, 0, 1), (6,)),
        (lambda a, y: torch.slice_scatter(a[1:3], y, 0, 1, 2), (1, 6)),
        (lambda a, y: torch.diagonal_scatter(a[1:3], y), (2,)),
        (lambda a, y: torch.as_strided_scatter(a[1:3], y, (2,), (1,), 6), (2,)),
        (lambda a, y: torch.select_scatter(a[1].expand(3, 6), y, 0, 1), (6,)),
        (lambda a, y: torch.select_scatter(a.as_strided((1, 6), (0, 1)), y, 0, 0), (6,)),
    ],
    ids=["row", "rows", "select", "slice", "diagonal", "as_strided", "expanded", "single"],
)
@pytest.mark.parametrize("is_input", [False, True])
def test_a_write_to_a_view_clones_its_whole_storage(
    write: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], is_input: bool
) -> None:
    """However little of it the view shows; of an expanded view the elements alone."""
    graph = captured(lambda x, y: write(x if is_input else x.neg(), y).sin().sum(), leaf(4, 6), leaf(*shape))
    assert_storages_are_real(graph)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss", ["binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"]
)
def test_a_loss_keeps_the_memory_of_its_terms(loss: str, reduction: str) -> None:
    """Some losses are the first element of a tensor that was as large as their operands, and hold it."""
    function = getattr(functional, loss)
    terms = lambda x, y: function(x.sigmoid(), y.sigmoid().detach(), reduction=reduction).sum()  # noqa: E731
    assert_storages_are_real(captured(terms, leaf(4, 6), leaf(4, 6)))


def test_folded_columns_keep_their_memory() -> None:
    """The image that columns are folded to lies in memory as large as the columns."""
    columns = leaf(2, 36, 16)
    assert_storages_are_real(captured(lambda x: functional.fold(x.exp(), (6, 6), 3).sin().sum(), columns))


@pytest.mark.parametrize("name", [*OPERATORS, *LAYERS])
def test_storages_are_those_of_torch(name: str) -> None:
    """The oracle: run for real, an operator allocates and aliases as the graph says."""
    assert_storages_are_real(traced(Network([("linear", -1, -1), (name, -1, -2), ("mul", -1, -2)])))


@few(10)
@given(networks())
def test_storages_of_random_models_are_those_of_torch(network: Network) -> None:
    """The same for operators in random company."""
    assert_storages_are_real(traced(network))


@pytest.mark.parametrize("name", ["densenet", "llama", "unet"])
def test_storages_of_the_zoo_are_those_of_torch(name: str) -> None:
    """The same for convolutions, attention, pooling, embeddings."""
    module, inputs = fresh(case(name))
    assert_storages_are_real(fxremat.capture(module, *inputs))


def test_storages_of_channels_last_are_those_of_torch() -> None:
    """Bytes follow strides, whatever the memory format."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Upsample(scale_factor=2))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    assert_storages_are_real(fxremat.capture(model, x, loss=torch.sum))


# --- What may not run again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: functional.dropout(x, 0.5).sum(), "native_dropout"),
        (lambda x: (torch.bernoulli(x.sigmoid()) * x).sum(), "bernoulli"),
        (lambda x: (torch.rand_like(x) * x).sum(), "rand_like"),
        (lambda x: (x * torch.randn(4, 6)).sum(), "randn"),
    ],
)
def test_random_operators_run_once(function: Callable[[Tensor], Tensor], kept: str) -> None:
    """A second run would draw other numbers; they also keep their order."""
    module = captured(function, leaf(4, 6)).module
    assert module is not None
    for node in module.graph.find_nodes(op="call_function", target=random_state):
        module.graph.erase_node(node)
    for node in module.graph.nodes:
        node.meta.pop(STATE, None)
    graph = JointGraph.from_fx(module, 1)
    assert reasons(graph) == {kept: "it draws random numbers"}
    assert [node.name for node in graph.nodes if node.ordered] == [kept]


@pytest.mark.parametrize(
    ("function", "drawn"),
    [
        (lambda x: functional.dropout(x, 0.5).sum(), "native_dropout"),
        (lambda x: (torch.bernoulli(x.sigmoid()) * x).sum(), "bernoulli"),
    ],
)
def test_random_operators_run_again_from_a_state(function: Callable[[Tensor], Tensor], drawn: str) -> None:
    """The state is read once, right before the numbers are first drawn, and read again by each mirror."""
    graph = captured(function, leaf(4, 6))
    assert reasons(graph) == {"random_state": "it is a state of random numbers"}
    assert [node.name for node in graph.nodes if node.ordered] == ["random_state", drawn]
    state, node = (graph.index[name] for name in ("random_state", drawn))
    assert node == state + 1 and state in graph.nodes[node].operands
    assert graph.node_bytes(state) == torch.get_rng_state().nbytes


def test_numbers_that_only_the_backward_reads_are_kept() -> None:
    """Drawn again they would not be needed in the forward, where torch would not draw them at all."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.rand_like(x))
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    graph = captured(lambda x: Noisy.apply(x).sum(), leaf(4, 6))
    assert reasons(graph) == {"rand_like": "it draws random numbers"}


def test_attention_without_dropout_is_not_random() -> None:
    """Its operator is tagged random for the sake of its dropout, which is off."""

    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0).sum()

    graph = captured(attend, leaf(1, 2, 3, 4))
    assert any("scaled_dot_product" in graph.operator(name) for name in graph.names)
    assert reasons(graph) == {}
    assert not any(node.ordered for node in graph.nodes)


def test_running_statistics_are_updated_once() -> None:
    """BatchNorm may run again, the updates that it returns may not; a mirror makes its first outputs only."""
    graph = fxremat.capture(nn.BatchNorm1d(6), leaf(4, 6), loss=torch.sum)
    norm = graph.nodes[graph.index["_native_batch_norm_legit_functional"]]
    assert norm.keep is None
    assert norm.recreates == norm.creates[:3]
    updates = ["getitem_3", "getitem_4"]
    assert [graph.nodes[graph.index[name]].keep for name in updates] == [
        "it is an update of running statistics"
    ] * 2
    assert reasons(graph)["add"] == "it reads an input that the program writes to"


class Counting(nn.Module):
    """A model that reads a buffer, through a view and in parts as well, and then writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.count.view(2, 2).exp() + self.count.sin().view(2, 2)
        y = y * self.count.chunk(2)[1].cos()
        self.count.add_(1)
        return (y * y).sum()


def test_readers_of_an_input_that_is_written_to_run_once() -> None:
    """Run again they would read the new value; what reads their results may run again."""
    graph = fxremat.capture(Counting(), leaf(2, 2))
    problem = "it reads an input that the program writes to"
    names = ("view", "exp", "sin", "split", "getitem_1", "cos", "add_2", "copy_")
    assert reasons(graph) == dict.fromkeys(names, problem)


def test_readers_of_an_input_that_is_copied_to_run_once() -> None:
    """The same where the write is a node of the graph."""
    sketch = Sketch()
    x, buffer = sketch.input("primals_1", 4), sketch.input("primals_2", 4)
    view = sketch.call("view", aten.view.default, buffer, [2, 2])
    a = sketch.call("a", aten.exp.default, view)
    b = sketch.call("b", aten.sin.default, a)
    new = sketch.call("new", aten.exp.default, x)
    sketch.call("write", aten.copy_.default, buffer, new)
    graph = sketch.joint([b])
    problem = "it reads an input that the program writes to"
    assert reasons(graph) == {"view": problem, "a": problem, "write": problem}
    assert [each.name for each in graph.nodes if each.ordered] == ["view", "a", "write"]
    late = [*(name for name in graph.names if name not in ("a", "b")), "a", "b"]
    with pytest.raises(fxremat.ScheduleError, match="it must run before 'write'"):
        validate(graph, late)


@torch.library.custom_op("fxremat_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator of the user's."""
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)


def test_custom_operators_run_once() -> None:
    """Nothing is known of them."""
    graph = captured(lambda x: twice(x.exp()).sin().sum(), leaf(4))
    assert reasons(graph) == {"twice": "it is a custom operator, not known to be pure"}


def test_must_save_is_an_order() -> None:
    """What a checkpoint policy says must be saved is kept, what it prefers to recompute is free."""

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin() @ w).tanh()

    def model(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(layer, x, w, use_reentrant=False, context_fn=contexts).sum()

    (graph,) = compiled_graphs(model, leaf(4, 4), leaf(4, 4))
    assert reasons(graph) == {"mm": "its checkpoint policy is MUST_SAVE"}


def test_nodes_may_be_forbidden_by_name() -> None:
    """What the caller names runs once."""
    module = captured(lambda x: x.exp().sin().sum(), leaf(4)).module
    graph = JointGraph.from_fx(module, 1, keep=["exp"])
    assert reasons(graph) == {"exp": "it is forbidden"}


def test_an_unknown_callable_runs_once() -> None:
    """A function without a schema may do anything."""

    def unknown(x: Tensor) -> Tensor:
        return x + 1

    sketch = Sketch()
    a = sketch.call("a", unknown, sketch.input("primals_1", 4))
    assert reasons(sketch.joint([a])) == {"a": "it is a call of which nothing is known"}


# --- Symbolic sizes -------------------------------------------------------------------------------------


def two_layers(x: Tensor, w: Tensor) -> Tensor:
    """A model with a size that is symbolic under ``dynamic=True``."""
    return (x @ w).tanh().view(-1).exp().sum()


def test_symbolic_sizes_count_by_their_hints() -> None:
    """A dynamic graph has the bytes of the sizes that it was traced with."""
    inputs = leaf(3, 4), leaf(4, 5)
    (static,) = compiled_graphs(two_layers, *inputs, dynamic=False)
    (dynamic,) = compiled_graphs(two_layers, *inputs, dynamic=True)
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in dynamic.fx_nodes)
    sizes = {name: dynamic.node_bytes(dynamic.index[name]) for name in ("mm", "tanh", "exp", "sum_1")}
    assert sizes == {"mm": 60, "tanh": 60, "exp": 60, "sum_1": 4}
    for name in sizes:
        assert sizes[name] == static.node_bytes(static.index[name])
    assert dynamic.tangent_bytes == static.tangent_bytes == 4


def test_numbers_are_kept() -> None:
    """A size that the backward reads is saved; computed again it would ask for the tensor it is a size of."""
    (graph,) = compiled_graphs(two_layers, leaf(3, 4), leaf(4, 5), dynamic=True)
    numbers = [n.name for n in graph.fx_nodes if isinstance(n.meta["val"], torch.SymInt)]
    computed = [name for name in graph.names if name in numbers]
    assert computed
    assert {reasons(graph)[name] for name in computed} == {"it is a number, which takes no memory"}
    schedule = expand(graph, dict.fromkeys(graph.names, 1))
    assert set(computed) <= set(schedule[: bind(graph, schedule).boundary])


@pytest.mark.parametrize("rows", [3, 7])
def test_a_dynamic_graph_computes_the_same_for_other_sizes(rows: int) -> None:
    """Rewritten with everything mirrored and split, it takes sizes that it was not traced with."""
    results = []

    def partition(module: fx.GraphModule, inputs: object, *, num_fwd_outputs: int, **_: Any) -> Any:
        graph = JointGraph.from_fx(module, num_fwd_outputs)
        new = fxremat.rewrite(graph, expand(graph, dict.fromkeys(graph.names, 1)))
        results.append(new.names)
        return fxremat.partition(new)

    def backend(module: fx.GraphModule, example: Any) -> Any:
        return fxremat._torch.compilers.compile_without_inductor(module, example, partition)

    torch._dynamo.reset()
    compiled = torch.compile(two_layers, backend=backend, dynamic=True)
    compiled(leaf(3, 4), leaf(4, 5)).backward()
    x, w = leaf(rows, 4), leaf(4, 5)
    expected = torch.autograd.grad(two_layers(x, w), [x, w])
    assert_same(torch.autograd.grad(compiled(x, w), [x, w]), expected)
    assert len(results) == 1
    assert any("mirror" in name for name in results[0])


def test_values_of_unknown_size_run_once() -> None:
    """A size that depends on data has no hint; what has such a size is kept and counts nothing."""

    def model(x: Tensor) -> Tensor:
        return x.index_select(0, torch.nonzero(x > 0).squeeze(1)).exp().sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (graph,) = compiled_graphs(model, torch.ones(4, requires_grad=True))
    unknown = ("nonzero", "index_select", "exp", "sin")
    assert {name: reasons(graph).get(name) for name in unknown} == dict.fromkeys(
        unknown, "its size is not known"
    )
    assert [graph.node_bytes(graph.index[name]) for name in unknown] == [0, 0, 0, 0]
    assert "gt" not in reasons(graph)


def test_a_graph_with_other_outputs_than_tensors() -> None:
    """A None among the gradients stays a None."""
    graph = captured(lambda x, mask: (x * mask).sum(), leaf(4), torch.ones(4))
    assert graph.backward_outputs[1] is None
    inputs = example_inputs(graph)
    assert_same(run_parts(fxremat.partition(graph), graph, inputs), run(graph.module, inputs))


# --- Mappings that make no graph ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "node", "text"),
    [
        ({"bytes": {"a": -1}}, "a", "got -1, expected bytes"),
        ({"bytes": {"a": float("nan")}}, "a", "got nan, expected bytes"),
        ({"bytes": {"a": 1.5}}, "a", "got 1.5, expected bytes"),
        ({"bytes": {"a": "1"}}, "a", "got '1', expected bytes"),
        ({"bytes": {"a": 10**30}}, "a", "expected bytes"),
        ({"bytes": {"a": 2**62, "b": 2**62}}, "drawn", "more bytes than can be counted"),
        ({"bytes": {"aa": 1}}, "aa", "it has bytes but is no node"),
        ({"seconds": {"a": -1}}, "a", "got -1, expected seconds"),
        ({"seconds": {"a": float("nan")}}, "a", "got nan, expected seconds"),
        ({"seconds": {"a": float("inf")}}, "a", "got inf, expected seconds"),
        ({"seconds": {"aa": 1}}, "aa", "it has seconds but is no node"),
        ({"keep": ["aa"]}, "aa", "is no node of the graph"),
        ({"backward": ["aa"]}, "aa", "is no node of the graph"),
        ({"operands": {"x": (), "a": "x"}}, "a", "got 'x', expected the names"),
        ({"operands": {"x": None}}, "x", "got None, expected the names"),
        ({"operands": {1: ()}}, "1", "the name of a node is a text"),
    ],
    ids=str,
)
def test_mappings_that_make_no_graph_are_refused(wrong: dict[str, Any], node: str, text: str) -> None:
    """The error names the node; nothing negative or undefined reaches a peak or a time."""
    right: dict[str, Any] = {"operands": {"x": (), "a": ["x"], "b": ["a"]}, "bytes": {}, "name": "drawn"}
    with pytest.raises(GraphError) as caught:
        JointGraph.from_mappings(**{**right, **wrong})
    assert str(caught.value.node) == node
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["operands", "bytes", "seconds"])
def test_mappings_are_mappings(name: str) -> None:
    """What is none is refused by its name."""
    right: dict[str, Any] = {"operands": {"x": ()}, "bytes": {}, "seconds": {}}
    with pytest.raises(InvalidOptionError, match="expected a mapping") as caught:
        JointGraph.from_mappings(**{**right, name: 3})
    assert caught.value.option == name


@pytest.mark.parametrize(
    ("module", "count", "text"),
    [
        (None, 1, "expected a joint graph"),
        ("drawn", 9, "the forward's part of 1"),
        ("drawn", None, "got None"),
    ],
)
def test_what_is_no_joint_fx_graph_is_refused(module: Any, count: Any, text: str) -> None:
    """Nor is one that returns less than the forward is said to return."""
    if module == "drawn":
        module = fx.symbolic_trace(nn.Tanh())
    with pytest.raises(CaptureError, match=text):
        JointGraph.from_fx(module, count)
