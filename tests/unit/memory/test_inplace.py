"""inplace: which steps write over an operand, that results stay the same, and that the bytes are saved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import pytest
import torch
from graphs import (
    CountOperators,
    Sketch,
    assert_same,
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
from models import case, fresh, train_step
from programs import Network, traced
from torch import Tensor, nn
from training import assert_trains_alike, compiled, everything, program, square

import fxremat
from fxremat.errors import InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import bind
from fxremat.measure import measure_peak
from fxremat.memory.inplace import overwrites
from fxremat.options.options import Options
from fxremat.predict.models import IN_PLACE, profile

aten = torch.ops.aten
SHAPE = (4, 4)
BYTES = 64


def written(graph: JointGraph, schedule: Sequence[str] = ()) -> dict[str, str]:
    """The names of the nodes that write over an operand, with that operand's."""
    names = schedule or graph.names
    found = overwrites(graph, bind(graph, names)).items()
    nodes = [(graph.nodes[graph.index[names[step]]], each) for step, each in found]
    return {node.name: graph.nodes[node.operands[each.operand]].name for node, each in nodes}


def forward(draw: Callable[[Sketch, Any], Any]) -> dict[str, str]:
    """What is written over in a forward of x that returns what is drawn."""
    sketch = Sketch()
    outputs = draw(sketch, sketch.input("primals_1", *SHAPE))
    return written(sketch.joint(outputs if isinstance(outputs, list) else [outputs]))


# --- By hand --------------------------------------------------------------------------------------------


def test_a_dying_operand_is_written_over() -> None:
    """x -> a -> b -> c: b takes a's place, and c takes b's; x is the caller's."""

    def draw(sketch: Sketch, x: Any) -> Any:
        a = sketch.call("a", aten.exp.default, x)
        return sketch.call("c", aten.tanh.default, sketch.call("b", aten.relu.default, a))

    assert forward(draw) == {"b": "a", "c": "b"}


def test_an_operand_with_another_reader_stays() -> None:
    """a is read by b and by c, which stands later: only the last may take its place."""

    def draw(sketch: Sketch, x: Any) -> Any:
        a = sketch.call("a", aten.exp.default, x)
        b = sketch.call("b", aten.relu.default, a)
        return sketch.call("d", aten.mul.Tensor, b, sketch.call("c", aten.tanh.default, a))

    assert forward(draw) == {"c": "a", "d": "b"}


def test_either_operand_will_do() -> None:
    """The result takes the place of the second operand where the first lives on."""

    def draw(sketch: Sketch, x: Any) -> Any:
        a, b = sketch.call("a", aten.exp.default, x), sketch.call("b", aten.sin.default, x)
        return [sketch.call("c", aten.sub.Tensor, a, b), a]

    assert forward(draw) == {"c": "b"}


def test_what_is_returned_stays() -> None:
    """An output is never written to, not even by the last step."""
    assert (
        forward(lambda s, x: [a := s.call("a", aten.exp.default, x), s.call("b", aten.relu.default, a)]) == {}
    )


def test_a_view_that_lives_on_keeps_its_storage() -> None:
    """v looks at a when b would write to it."""

    def draw(sketch: Sketch, x: Any) -> Any:
        a = sketch.call("a", aten.exp.default, x)
        v = sketch.call("v", aten.t.default, a)
        b = sketch.call("b", aten.relu.default, a)
        return sketch.call("c", aten.mm.default, b, v)

    assert forward(draw) == {}


def test_two_views_of_one_storage_are_two_operands() -> None:
    """a + a.T would read what it has written; a * a would not."""

    def transposed(sketch: Sketch, x: Any) -> Any:
        a = sketch.call("a", aten.exp.default, x)
        return sketch.call("b", aten.add.Tensor, a, sketch.call("v", aten.t.default, a))

    def same(sketch: Sketch, x: Any) -> Any:
        a = sketch.call("a", aten.exp.default, x)
        return sketch.call("b", aten.mul.Tensor, a, a)

    assert (forward(transposed), forward(same)) == ({}, {"b": "a"})


def test_a_view_is_written_over_as_a_whole() -> None:
    """A reshaped value may be, a part of one not."""

    def whole(sketch: Sketch, x: Any) -> Any:
        v = sketch.call("v", aten.view.default, sketch.call("a", aten.exp.default, x), [16])
        return sketch.call("c", aten.sum.default, sketch.call("b", aten.relu.default, v))

    def part(sketch: Sketch, x: Any) -> Any:
        v = sketch.call("v", aten.select.int, sketch.call("a", aten.exp.default, x), 0, 1)
        return sketch.call("c", aten.sum.default, sketch.call("b", aten.relu.default, v))

    assert (forward(whole), forward(part)) == ({"b": "v"}, {})


def test_a_view_is_not_returned_in_place_of_a_tensor() -> None:
    """Autograd forbids to write to a view that a custom function returned; and so on along a chain."""

    def draw(sketch: Sketch, x: Any) -> Any:
        v = sketch.call("v", aten.view.default, sketch.call("a", aten.exp.default, x), [16])
        return sketch.call("c", aten.tanh.default, sketch.call("b", aten.relu.default, v))

    assert forward(draw) == {"b": "v"}


def test_a_view_of_an_input_is_the_callers() -> None:
    """It is no more written over than the input."""

    def draw(sketch: Sketch, x: Any) -> Any:
        v = sketch.call("v", aten.view.default, x, [16])
        return sketch.call("c", aten.tanh.default, sketch.call("b", aten.relu.default, v))

    assert forward(draw) == {"c": "b"}


def test_what_has_no_bytes_is_not_written_over() -> None:
    """There is nothing to save; one byte is enough."""
    found = []
    for size in (0, 1):
        sketch = Sketch()
        x = sketch.input("primals_1", size)
        a = sketch.call("a", aten.gt.Scalar, x, 0)
        found.append(written(sketch.joint([sketch.call("b", aten.logical_not.default, a)])))
    assert found == [{}, {"b": "a"}]


def test_an_output_of_several_can_be_written_over() -> None:
    """Each is a storage of its own."""

    def draw(sketch: Sketch, x: Any) -> Any:
        norm = sketch.call("norm", aten.native_layer_norm.default, x, [4], None, None, 1e-5)
        first = sketch.call("first", operator.getitem, norm, 0)
        return sketch.call("b", aten.relu.default, first)

    assert forward(draw) == {"b": "first"}


def backward(draw: Callable[[Sketch, Any, Any], Any]) -> JointGraph:
    """The joint graph of a = exp(x), which is returned, and of a gradient drawn from a and its tangent."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", *SHAPE), sketch.input("tangents_1", *SHAPE)
    a = sketch.call("a", aten.exp.default, x)
    s = sketch.call("s", aten.sin.default, a)
    return sketch.joint([sketch.call("f", aten.cos.default, s)], [draw(sketch, s, t)])


def test_the_backward_writes_to_nothing_it_is_given() -> None:
    """Neither to a tangent nor to a saved value: it may run twice."""
    graph = backward(lambda sketch, s, t: sketch.call("g", aten.mul.Tensor, s, t))
    assert written(graph) == {"s": "a"}


def test_the_backward_writes_to_what_it_makes() -> None:
    """g is the backward's own; h takes its place."""

    def draw(sketch: Sketch, s: Any, t: Any) -> Any:
        return sketch.call("h", aten.mul.Tensor, sketch.call("g", aten.neg.default, t), s)

    assert written(backward(draw)) == {"s": "a", "h": "g"}


def test_a_gradient_may_be_written_over_a_view() -> None:
    """What the forward alone must not return; the first step of the backward is none of it."""

    def draw(sketch: Sketch, s: Any, t: Any) -> Any:
        v = sketch.call("v", aten.view.default, sketch.call("g", aten.neg.default, t), [16])
        return sketch.call("h", aten.sin.default, v)

    assert written(backward(draw)) == {"s": "a", "f": "s", "h": "v"}


def test_a_mirror_is_the_backwards_own() -> None:
    """s is dropped and computed again, in place of the mirror of a; the gradient in place of that."""
    graph = backward(lambda sketch, s, t: sketch.call("g", aten.mul.Tensor, s, t))
    names = ("a", "s", "f", "a", "s", "g")
    assert written(graph, names) == {"s": "a", "f": "s", "g": "s"}
    assert profile(graph, names, "none").live_bytes.tolist() == [
        BYTES,
        2 * BYTES,
        2 * BYTES,
        2 * BYTES + BYTES,
        3 * BYTES + BYTES,
        3 * BYTES + BYTES,
    ]
    assert profile(graph, names, "inplace").live_bytes.tolist() == [BYTES] * 3 + [3 * BYTES] * 3


@pytest.mark.parametrize(
    "target", [torch.ops.higher_order.cond, torch.relu], ids=["higher_order", "function"]
)
def test_what_others_may_hold_on_to_stays(target: Any) -> None:
    """Nothing is known of a call that is no operator of torch's: it may keep what it reads."""
    sketch = Sketch()
    x = sketch.input("primals_1", *SHAPE)
    a = sketch.call("a", aten.exp.default, x)
    other = sketch.graph.create_node("call_function", target, (a, x), name="other")
    other.meta["val"] = torch.empty(SHAPE, device="meta")
    b = sketch.call("b", aten.relu.default, a)
    assert written(sketch.joint([sketch.call("c", aten.mul.Tensor, b, other)])) == {"c": "b"}


def test_a_graph_of_mappings_writes_nothing_over() -> None:
    """Nothing is known of its operators."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"]}, {"a": 1, "b": 1}, forward_outputs=["b"]
    )
    assert written(graph) == {}
    assert IN_PLACE.lower(graph, bind(graph, graph.names)).overwrites == {}


def test_sizes_may_be_symbols() -> None:
    """Sizes that are the same symbol are the same, whatever it stands for."""
    weight = torch.randn(4, 4, requires_grad=True)
    (graph,) = compiled_graphs(lambda x: (x @ weight).sin().tanh().sum(), torch.randn(6, 4), dynamic=True)
    assert isinstance(graph.fx_nodes[graph.index["mm"]].meta["val"].shape[0], torch.SymInt)
    assert written(graph)["tanh"] == "sin"


# --- Random programs ------------------------------------------------------------------------------------


def in_place(graph: JointGraph, schedule: Sequence[str]) -> tuple[Any, Any]:
    """The two parts of a scheduled graph, results written over operands."""
    return fxremat.partition(fxremat.rewrite(graph, schedule), inplace=True)


def copies(values: Sequence[Any]) -> list[Any]:
    """The values, tensors in memory of their own."""
    return [each.clone() if isinstance(each, Tensor) else each for each in values]


def overwriting(graph: JointGraph, **options: bool) -> tuple[dict[str, str], str]:
    """Which nodes of the parts write to what they read, with the operand that they write to, and the code."""
    parts = fxremat.partition(graph, **options)
    nodes = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
    found = {}
    for node in nodes:
        for argument in node.target._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                first = not argument.kwarg_only
                found[node.name] = (node.args[0] if first else node.kwargs[argument.name]).name
    return found, "".join(part.code for part in parts)


def test_the_parts_write_over_what_was_decided() -> None:
    """Where it is asked for, and in the code, too."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Sigmoid(), nn.Tanh())
    graph = fxremat.capture(model, torch.randn(4, 4), loss=lambda y: y.exp().sum())
    decided = written(graph)
    assert {"tanh", "tanh_backward"} <= set(decided)
    found, code = overwriting(graph, inplace=True)
    assert found == decided
    assert "aten.tanh_.default(" in code and "grad_input = " in code
    found, code = overwriting(graph)
    assert not found and "aten.tanh_.default(" not in code


@few(25)
@given(networks(), st.integers(0, 5))
def test_the_results_are_the_same(network: Network, seed: int) -> None:
    """Outputs and gradients, in every bit, whatever is computed again."""
    graph = traced(network)
    inputs = example_inputs(graph)
    found = run_parts(in_place(graph, random_schedule(graph, seed)), graph, inputs)
    assert_same(found, run_parts(fxremat.partition(graph), graph, inputs))


@few(15)
@given(networks(), st.integers(0, 5))
def test_nothing_that_is_given_is_written_to(network: Network, seed: int) -> None:
    """Nor what a part returns when it runs again; but for running statistics, which the program writes to."""
    graph = traced(network)
    statistics = {node.args[0].name for node in graph.fx_nodes if node.target is aten.copy_.default}
    parts = in_place(graph, random_schedule(graph, seed))
    given_values = dict(zip(placeholders(graph.module), example_inputs(graph), strict=True))
    for module in parts:
        names = placeholders(module)
        inputs = [given_values[name] for name in names]
        before, again = copies(inputs), copies(inputs)
        results = run(module, inputs)
        kept = copies(results)
        is_read = [name not in statistics for name in names]
        assert_same(list(compress(inputs, is_read)), list(compress(before, is_read)))
        assert_same(run(module, again), kept)
        assert_same(results, kept)
        given_values |= dict(zip(output_names(module), results, strict=True))


@few(15)
@given(networks(), st.integers(0, 5))
def test_a_schedule_is_written_over_as_its_graph(network: Network, seed: int) -> None:
    """What is decided of a schedule is what the rewritten graph does, and the profile is the same."""
    graph = traced(network)
    schedule = random_schedule(graph, seed)
    new = fxremat.rewrite(graph, schedule)
    assert len(written(new)) == len(overwrites(graph, bind(graph, schedule)))
    one, other = profile(graph, schedule, "inplace"), profile(new, new.names, "inplace")
    assert one.live_bytes.tolist() == other.live_bytes.tolist()


@few(15)
@given(networks(), st.integers(0, 5))
def test_it_never_takes_more_memory(network: Network, seed: int) -> None:
    """At no step; and at each step that writes over an operand it takes the operand's bytes less."""
    graph = traced(network)
    schedule = random_schedule(graph, seed)
    plain, found = (profile(graph, schedule, fusion).live_bytes for fusion in ("none", "inplace"))
    saved = {step: each.bytes for step, each in overwrites(graph, bind(graph, schedule)).items()}
    assert (plain - found).tolist() == [saved.get(step, 0) for step in range(len(plain))]


# --- Compiled models ------------------------------------------------------------------------------------

NUMBERS_BYTES = 16  # a number that a pointwise operator reads becomes a tensor


def step_of(name: str, **options: Any) -> tuple[Callable[[], object], nn.Module]:
    """A training step of a compiled model of the zoo, run once already, from no gradients."""
    module, inputs = fresh(case(name))
    subject = compiled(module, **options)
    train_step(subject, inputs)
    module.zero_grad(set_to_none=True)
    return lambda: train_step(subject, inputs), module


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", ["tanh_mlp", "gated_mlp"])
def test_the_peak_falls_as_predicted(name: str, budget: str | None) -> None:
    """Where the peak lies between pointwise operators, writing over operands lowers it, to the byte."""
    peaks = []
    for inplace in (False, True):
        step, _ = step_of(name, budget=budget, inplace=inplace)
        predicted = fxremat.reports()[-1].peak_bytes
        measured = measure_peak(step, device="cpu").peak_bytes
        assert predicted <= measured <= predicted + NUMBERS_BYTES
        peaks.append(measured)
    assert peaks[1] < peaks[0] or (name, budget) == ("gated_mlp", None)  # whose peak is in a product


def test_gradients_are_added_up_in_one_buffer() -> None:
    """The per-step gradients of an LSTM's weights are added to the first of them (Sec. 3)."""
    graph = fxremat.capture(fresh(case("lstm"))[0], *fresh(case("lstm"))[1])
    sums = [
        node.name
        for node in graph.nodes[graph.boundary :]
        if graph.operator(node.name) == "aten.add.Tensor" and graph.node_bytes(graph.index[node.name])
    ]
    assert len(sums) > 20
    assert set(sums) <= set(written(graph))


def test_the_baseline_is_without_it() -> None:
    """A fraction is of the peak that the program has by itself."""
    baselines = []
    for inplace in (False, True):
        step_of("tanh_mlp", inplace=inplace)
        baselines.append(fxremat.reports()[-1].baseline_peak_bytes)
    assert baselines[0] == baselines[1] > fxremat.reports()[-1].peak_bytes


@pytest.mark.parametrize("planner", [everything(0), everything(1), everything(2)], ids=["0", "1", "2"])
def test_the_backward_may_run_twice(planner: Any) -> None:
    """retain_graph=True gives the same gradients again."""
    module, inputs = fresh(case("gated_mlp"))
    loss = compiled(module, planner=planner)(*inputs)
    one, other = (
        [each.clone() for each in gradients]
        for gradients in (
            torch.autograd.grad(loss, list(module.parameters()), retain_graph=True),
            torch.autograd.grad(loss, list(module.parameters())),
        )
    )
    assert_same(one, other)


def reshaped_then_written(p: Any, x: Tensor) -> Any:
    """A view of a product, activated and returned."""
    return (x @ p.weight).view(2, 2, 4).relu(), (x @ p.weight).tanh().view(16).exp()


def test_what_is_returned_may_be_written_to() -> None:
    """The caller writes to an output as it may without us."""
    module = program(reshaped_then_written)
    for each in compiled(module)(square()):
        each.mul_(2)
    torch._dynamo.reset()
    assert_trains_alike(module, [square()])


def test_it_can_be_turned_off() -> None:
    """Then no operator of the backward writes to an operand."""
    for inplace in (True, False):
        module, inputs = fresh(case("tanh_mlp"))
        loss = compiled(module, inplace=inplace)(*inputs)
        with Spelled() as spelled:
            loss.backward()
        assert ("aten.tanh_backward.grad_input" in spelled.names) is inplace


class Spelled(CountOperators):
    """Notes the operators that run, in-place ones as such."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_inductor_decides_for_itself() -> None:
    """The option is refused where it would have no effect; Inductor's own is named."""
    assert (Options.parse().fusion, Options.parse({"compiler": "eager"}).fusion) == ("inductor", "inplace")
    assert Options.parse({"compiler": "eager", "inplace": False}).fusion == "none"
    with pytest.raises(InvalidOptionError, match="inplace_buffers"):
        Options.parse({"inplace": False})
    with pytest.raises(InvalidOptionError):
        Options.parse({"compiler": "eager", "inplace": "yes"})
