"""canonical: the order of a joint graph, the phase of each node, and where the user wrote it."""

from __future__ import annotations

import operator

import pytest
import torch
from graphs import Sketch, compiled_graphs, example_inputs, few, networks, run
from hypothesis import given
from programs import Network, batch
from torch import Tensor, fx, nn

import fxremat
from fxremat.errors import CaptureError
from fxremat.graph.canonical import canonical_copy
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase

aten = torch.ops.aten


def phases(module: fx.GraphModule, num_forward_outputs: int) -> dict[str, str]:
    """The phase of each node but the inputs, in canonical order."""
    copy, found = canonical_copy(module, num_forward_outputs)
    *nodes, _ = copy.graph.nodes
    named = zip(nodes, found, strict=True)
    return {node.name: phase.value for node, phase in named if phase is not Phase.INPUT}


def order(module: fx.GraphModule, num_forward_outputs: int) -> list[str]:
    """The canonical order without the inputs."""
    return list(phases(module, num_forward_outputs))


# --- Phases ---------------------------------------------------------------------------------------------


def test_the_three_phases() -> None:
    """What an output needs is forward, what needs a tangent backward, and what neither does deferred."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a = sketch.call("a", aten.exp.default, x)
    b = sketch.call("b", aten.sin.default, a)
    late = sketch.call("late", aten.cos.default, a)
    db = sketch.call("db", aten.mul.Tensor, t, late)
    da = sketch.call("da", aten.mul.Tensor, db, a)
    assert phases(sketch.module([b], [da]), 1) == {
        "a": "forward",
        "b": "forward",
        "late": "deferred",
        "db": "backward",
        "da": "backward",
    }


def test_inputs_are_placeholders_and_attributes() -> None:
    """Both stand first, however late an attribute is read."""
    sketch = Sketch()
    sketch.root.register_buffer("constant", torch.ones(4))
    x, _ = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a = sketch.call("a", aten.exp.default, x)
    constant = sketch.graph.get_attr("constant")
    constant.meta["val"] = torch.empty(4, device="meta")
    b = sketch.call("b", aten.add.Tensor, a, constant)
    copy, found = canonical_copy(sketch.module([b]), 1)
    assert [node.name for node in copy.graph.nodes][:3] == ["primals_1", "tangents_1", "constant"]
    assert found == (Phase.INPUT, Phase.INPUT, Phase.INPUT, Phase.FORWARD, Phase.FORWARD)


def test_an_effect_of_the_forward_is_forward() -> None:
    """A write to an input is no output's operand, and runs in the forward nevertheless."""
    sketch = Sketch()
    x, buffer = sketch.input("primals_1", 4), sketch.input("primals_2", 4)
    new = sketch.call("new", aten.add.Tensor, buffer, x)
    sketch.call("write", aten.copy_.default, buffer, new)
    a = sketch.call("a", aten.exp.default, x)
    assert phases(sketch.module([a]), 1) == {"new": "forward", "write": "forward", "a": "forward"}


def test_an_effect_of_the_backward_is_backward() -> None:
    """A write that AOTAutograd placed in the backward stays there, though it reads no tangent."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    buffer = sketch.input("primals_2", 4)
    a = sketch.call("a", aten.exp.default, x)
    new = sketch.call("new", aten.add.Tensor, buffer, a)
    sketch.call("write", aten.copy_.default, buffer, new, partitioner_tag="must_be_in_backward")
    da = sketch.call("da", aten.mul.Tensor, t, a)
    found = phases(sketch.module([a], [da]), 1)
    assert found == {"a": "forward", "new": "deferred", "write": "backward", "da": "backward"}


def test_a_number_of_the_forward_is_forward() -> None:
    """A size that only the backward reads is taken where its tensor is, wherever it was traced."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh().view(-1).exp().sum()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    (graph,) = compiled_graphs(model, x, w, dynamic=True)
    is_number = [isinstance(node.meta["val"], torch.SymInt) for node in graph.fx_nodes]
    found = [node.phase for node, number in zip(graph.nodes, is_number, strict=True) if number]
    assert set(found) == {Phase.INPUT, Phase.FORWARD}


def test_a_forward_output_that_needs_a_tangent_is_an_error() -> None:
    """Such a graph cannot be split; the error names the node and the user's line."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    trace = 'File "model.py", line 7, in forward\n    return a * t'
    a = sketch.call("a", aten.mul.Tensor, x, t, stack_trace=trace)
    with pytest.raises(CaptureError, match=r"'a' \(model.py:7\).*fallback"):
        canonical_copy(sketch.module([a]), 1)


# --- Order ----------------------------------------------------------------------------------------------


def test_the_forward_stands_before_the_backward() -> None:
    """A forward node that was traced behind the first gradient is moved before it; the rest stays."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a = sketch.call("a", aten.exp.default, x)
    da = sketch.call("da", aten.mul.Tensor, t, a)
    late = sketch.call("late", aten.cos.default, a)
    b = sketch.call("b", aten.sin.default, x)
    db = sketch.call("db", aten.mul.Tensor, da, late)
    assert order(sketch.module([a, b], [da, db]), 2) == ["a", "b", "da", "late", "db"]


def test_a_getitem_stands_behind_its_operator() -> None:
    """However far away it was traced; several keep their order."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    sort = sketch.call("sort", aten.sort.default, x)
    values = sketch.call("values", operator.getitem, sort, 0)
    a = sketch.call("a", aten.exp.default, values)
    da = sketch.call("da", aten.mul.Tensor, t, a)
    indices = sketch.call("indices", operator.getitem, sort, 1)
    dx = sketch.call("dx", aten.gather.default, da, 0, indices)
    graph = sketch.module([a], [dx])
    assert order(graph, 1) == ["sort", "values", "indices", "a", "da", "dx"]
    assert phases(graph, 1)["indices"] == "deferred"


def test_a_getitem_of_a_getitem_stands_behind_its_operator_too() -> None:
    """Nested outputs are one group with their operator."""

    def nested(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return x, (x + 1, x + 2)

    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    op = sketch.call("op", nested, x)
    first = sketch.call("first", operator.getitem, op, 0)
    a = sketch.call("a", aten.exp.default, first)
    pair = sketch.call("pair", operator.getitem, op, 1)
    b = sketch.call("b", aten.exp.default, a)
    second = sketch.call("second", operator.getitem, pair, 1)
    graph = sketch.module([b, second])
    assert order(graph, 2) == ["op", "first", "pair", "second", "a", "b"]
    joint = JointGraph.from_fx(graph, 2)
    assert [joint.leader(name) for name in joint.names] == [None, "op", "op", "op", None, None]


def test_a_detach_is_left_out() -> None:
    """An inner detach is a view and its readers read what it viewed; one that is returned stays."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a = sketch.call("a", aten.exp.default, x)
    inner = sketch.call("inner", aten.detach.default, a)
    inner2 = sketch.call("inner2", aten.detach.default, inner)
    returned = sketch.call("returned", aten.detach.default, a)
    da = sketch.call("da", aten.mul.Tensor, t, inner2)
    graph = sketch.module([a, returned], [da])
    assert order(graph, 2) == ["a", "returned", "da"]
    copy, _ = canonical_copy(graph, 2)
    assert [node.args[1].name for node in copy.graph.nodes if node.name == "da"] == ["a"]


def test_dead_nodes_are_left_out() -> None:
    """What no output and no effect needs is gone; an input that nobody reads stays."""
    sketch = Sketch()
    x, unread = sketch.input("primals_1", 4), sketch.input("primals_2", 4)
    a = sketch.call("a", aten.exp.default, x)
    dead = sketch.call("dead", aten.sin.default, x)
    sketch.call("dead_too", aten.mul.Tensor, dead, unread)
    copy, _ = canonical_copy(sketch.module([a]), 1)
    assert [node.name for node in copy.graph.nodes] == ["primals_1", "primals_2", "a", "output"]


def test_a_random_operator_is_never_dead() -> None:
    """Without it later operators would draw other numbers."""
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    a = sketch.call("a", aten.exp.default, x)
    sketch.call("unread", aten.rand_like.default, x)
    assert order(sketch.module([a]), 1) == ["a", "unread"]


def test_the_module_is_left_alone() -> None:
    """The canonical graph is a copy; it keeps the module's and the nodes' meta."""
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    a = sketch.call("a", aten.exp.default, x, custom={"mark": 1})
    sketch.call("dead", aten.sin.default, x)
    graph = sketch.module([a])
    graph.meta["mark"] = 2
    before = str(graph.graph)
    copy, _ = canonical_copy(graph, 1)
    assert str(graph.graph) == before
    assert copy.meta["mark"] == 2
    assert next(node for node in copy.graph.nodes if node.name == "a").meta["custom"] == {"mark": 1}


@few(10)
@given(networks())
def test_the_order_is_its_own_canonical_order(network: Network) -> None:
    """The canonical copy of a canonical graph has the same nodes and phases, and computes the same."""
    graph = fxremat.capture(network, batch())
    again = JointGraph.from_fx(graph.module, len(graph.forward_outputs))
    assert again.nodes == graph.nodes
    assert str(again.module.graph) == str(graph.module.graph)
    inputs = example_inputs(graph)
    assert len(run(again.module, inputs)) == len(graph.forward_outputs) + len(graph.backward_outputs)


# --- Where the user wrote it ----------------------------------------------------------------------------


class Inner(nn.Module):
    """One operator with a line of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Outer(nn.Module):
    """A module inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x).exp()


def test_a_node_knows_its_source_and_its_module() -> None:
    """Under torch.compile a node names the innermost line and module, a gradient those of its forward."""
    model = Outer()
    (graph,) = compiled_graphs(lambda x: model(x).sum(), torch.randn(3, requires_grad=True))
    inner, outer = (f"{__file__}:{_line(kind)}" for kind in (Inner, Outer))
    assert [graph.source(name) for name in ("tanh", "exp", "tanh_backward")] == [inner, outer, inner]
    assert [graph.module_path(name) for name in ("tanh", "exp", "tanh_backward")] == [
        "blocks.0",
        "",
        "blocks.0",
    ]


def _line(kind: type[nn.Module]) -> int:
    """The line of the return in a module's forward."""
    return kind.forward.__code__.co_firstlineno + 1


def test_a_node_without_a_trace_has_no_source() -> None:
    """What the trace does not tell is empty."""
    sketch = Sketch()
    a = sketch.call("a", aten.exp.default, sketch.input("primals_1", 4))
    graph = sketch.joint([a])
    assert (graph.source("a"), graph.module_path("a")) == ("", "")
