"""rewrite: a schedule becomes a graph that computes the same, and says what it recomputes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from graphs import (
    CountOperators,
    assert_same,
    chain,
    example_inputs,
    few,
    identity,
    networks,
    random_schedule,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from models import case, fresh
from programs import Network, batch, traced
from torch import nn

import fxremat
from fxremat.emit.rewrite import rewrite
from fxremat.errors import GraphError, ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.nodes import MIRROR
from fxremat.graph.schedule import Schedule
from fxremat.predict.models import profile


def three_tanh() -> JointGraph:
    """x -> tanh -> tanh_1 -> tanh_2 -> sum."""
    model = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())
    return fxremat.capture(model, torch.randn(4, requires_grad=True), loss=torch.sum)


def mirror_everything(graph: JointGraph) -> Schedule:
    """The schedule in which every count is 1."""
    return expand(graph, dict.fromkeys(graph.names, 1))


# --- By hand --------------------------------------------------------------------------------------------


def test_no_mirrors_rewrite_to_the_same_nodes() -> None:
    """The graph's own order gives the same nodes with the same operands."""
    graph = three_tanh()
    assert rewrite(graph, identity(graph)).nodes == graph.nodes


def test_mirrors_are_named_after_what_they_compute_again() -> None:
    """The first occurrence keeps the name, further ones are counted; readers read the latest."""
    graph = three_tanh()
    backward = ("expand", "tanh_backward", "tanh_backward_1", "tanh_backward_2")
    assert graph.names == ("tanh", "tanh_1", "tanh_2", "sum_1", *backward)
    schedule = ("tanh", "tanh_1", "tanh_2", "sum_1", "expand", "tanh_backward")
    schedule += ("tanh", "tanh_1", "tanh_backward_1", "tanh", "tanh_backward_2")
    new = rewrite(graph, schedule)
    assert new.names == (
        *("tanh", "tanh_1", "tanh_2", "sum_1", "expand", "tanh_backward"),
        *("tanh_mirror1", "tanh_1_mirror1", "tanh_backward_1", "tanh_mirror2", "tanh_backward_2"),
    )
    reads = {node.name: [new.nodes[operand].name for operand in node.operands] for node in new.nodes}
    assert reads["tanh_1"] == ["tanh"]
    assert reads["tanh_1_mirror1"] == ["tanh_mirror1"]
    assert reads["tanh_backward_1"] == ["tanh_backward", "tanh_1_mirror1"]
    assert reads["tanh_backward_2"] == ["tanh_backward_1", "tanh_mirror2"]


def test_a_mirror_says_whose_it_is() -> None:
    """The fx node of a mirror names its original, and keeps where the user wrote it."""
    graph = three_tanh()
    new = rewrite(graph, mirror_everything(graph))
    marked = {node.name: node.meta[MIRROR] for node in new.fx_nodes if MIRROR in node.meta}
    assert marked == {"tanh_mirror1": "tanh", "tanh_1_mirror1": "tanh_1", "tanh_2_mirror1": "tanh_2"}
    assert new.source("tanh_1_mirror1") == graph.source("tanh_1")
    assert new.module_path("tanh_1_mirror1") == graph.module_path("tanh_1")


def test_a_name_that_is_taken_is_left_alone() -> None:
    """A node of the program that is called like a mirror keeps its name."""
    graph = three_tanh()
    module = graph.module
    node = next(node for node in module.graph.nodes if node.name == "tanh_2")
    node.name = "tanh_mirror1"
    graph = JointGraph.from_fx(module, 1)
    new = rewrite(graph, mirror_everything(graph))
    assert new.names.count("tanh_mirror1") == 1
    assert len(set(new.names)) == len(new.names)
    assert_same(run(new.module, example_inputs(new)), run(graph.module, example_inputs(graph)))


def test_the_graph_is_left_alone() -> None:
    """Rewriting edits a copy."""
    graph = three_tanh()
    before = str(graph.module.graph), graph.nodes
    rewrite(graph, mirror_everything(graph))
    assert (str(graph.module.graph), graph.nodes) == before


def test_the_interface_stays() -> None:
    """Inputs, forward outputs and gradients are those of the graph, in order."""
    graph = traced(Network([("linear", -1, -1), ("batch_norm", -1, -1), ("tanh", -1, -1)]))
    new = rewrite(graph, mirror_everything(graph))
    assert new.num_inputs == graph.num_inputs
    assert [n.name for n in new.nodes[: new.num_inputs]] == [n.name for n in graph.nodes[: graph.num_inputs]]
    names = [None if output is None else new.nodes[output].name for output in new.forward_outputs]
    assert names == [None if output is None else graph.nodes[output].name for output in graph.forward_outputs]
    assert [output is None for output in new.backward_outputs] == [o is None for o in graph.backward_outputs]


def test_what_the_forward_returns_is_not_what_is_computed_again() -> None:
    """An output that the backward computes once more is returned as the forward had it."""
    graph = three_tanh()
    (output,) = graph.module.graph.find_nodes(op="output")
    returned = next(node for node in graph.fx_nodes if node.name == "tanh_1")
    output.args = ([output.args[0][0], returned, *output.args[0][1:]],)
    graph = JointGraph.from_fx(graph.module, 2)
    new = rewrite(graph, mirror_everything(graph))
    assert "tanh_1_mirror1" in new.names
    names = [new.nodes[index].name for index in new.forward_outputs if index is not None]
    assert names == ["sum_1", "tanh_1"]


def test_batch_norm_is_replayed_without_its_running_statistics() -> None:
    """The mirror normalises with the batch's statistics and reads no buffer that its original updates."""
    graph = traced(Network([("batch_norm", -1, -1), ("tanh", -1, -1)]))
    new = rewrite(graph, mirror_everything(graph))
    (mirror,) = (node for node in new.fx_nodes if node.name == "_native_batch_norm_legit_functional_mirror1")
    (original,) = (node for node in new.fx_nodes if node.name == "_native_batch_norm_legit_functional")
    assert mirror.target is torch.ops.aten._native_batch_norm_legit.no_stats
    running = [original.args[3], original.args[4]]
    assert not set(running) & set(mirror.all_input_nodes)


def test_a_graph_of_mappings_cannot_be_rewritten() -> None:
    """There is no fx graph to transcribe."""
    with pytest.raises(GraphError, match="made of mappings"):
        rewrite(chain(2), chain(2).names)


def test_an_invalid_schedule_is_refused() -> None:
    """The schedule is validated before anything is made of it."""
    graph = three_tanh()
    with pytest.raises(ScheduleError, match="never runs"):
        rewrite(graph, graph.names[:-1])


# --- Recomputation runs ---------------------------------------------------------------------------------


def test_mirrors_are_operators_that_run() -> None:
    """Three tanh run three times without mirrors, and the two that a gradient reads again with them."""
    graph = three_tanh()
    inputs = example_inputs(graph)
    with CountOperators() as plain:
        run(graph.module, inputs)
    new = rewrite(graph, expand(graph, {"tanh": 1, "tanh_1": 1}))
    with CountOperators() as mirrored:
        run(new.module, inputs)
    assert (plain.counts["aten.tanh"], plain.counts["aten.tanh_backward"]) == (3, 3)
    assert (mirrored.counts["aten.tanh"], mirrored.counts["aten.tanh_backward"]) == (5, 3)


@few(10)
@given(networks(), st.integers(0, 9))
def test_as_many_operators_run_as_the_schedule_says(network: Network, seed: int) -> None:
    """What runs is what the schedule lists, operator by operator."""
    graph = traced(network)
    schedule = random_schedule(graph, seed)
    new = rewrite(graph, schedule)
    inputs = example_inputs(new)
    with CountOperators() as counted:
        run(new.module, inputs)
    targets = [graph.fx_nodes[graph.index[name]].target for name in schedule]
    packets = [str(target.overloadpacket) for target in targets if hasattr(target, "overloadpacket")]
    expected = Counter(packet.removesuffix("_") for packet in packets)  # what is written back, too
    for view in ("aten.detach", "aten.lift_fresh"):  # of a generator's state, where numbers are drawn again
        counted.counts.pop(view, None)
    assert _merge_batch_norms(counted.counts) == _merge_batch_norms(expected)


def _merge_batch_norms(counts: Counter[str]) -> Counter[str]:
    """Batch normalisation and its replay counted as one operator."""
    norm = "aten._native_batch_norm_legit"
    return Counter({**counts, norm: counts[norm] + counts[f"{norm}_functional"], f"{norm}_functional": 0})


# --- The same numbers, the predicted memory -------------------------------------------------------------


@few(15)
@given(networks(), st.integers(0, 9))
def test_a_random_model_computes_the_same(network: Network, seed: int) -> None:
    """Outputs and gradients agree in every bit, dropout's masks and running statistics included."""
    graph = traced(network)
    new = rewrite(graph, random_schedule(graph, seed))
    inputs = example_inputs(graph)
    assert_same(run(new.module, inputs), run(graph.module, inputs))


@few(10)
@given(networks(), st.integers(0, 9))
def test_the_new_graph_is_the_schedule(network: Network, seed: int) -> None:
    """The new graph's own order has the memory, the boundary and the phases that the schedule had."""
    graph = traced(network)
    schedule = random_schedule(graph, seed)
    new = rewrite(graph, schedule)
    found, expected = profile(new, new.names), profile(graph, schedule)
    assert found.live_bytes.tolist() == expected.live_bytes.tolist()
    assert found.boundary == expected.boundary
    origins = [node.meta.get(MIRROR, node.name) for node in new.fx_nodes[new.num_inputs :]]
    assert origins == list(schedule)


@pytest.mark.parametrize("name", ["dropout_mlp", "resnet", "transformer", "unet"])
def test_the_zoo_computes_the_same(name: str) -> None:
    """Random schedules of real networks change no bit, and have the memory that was predicted."""
    module, inputs = fresh(case(name))
    graph = fxremat.capture(module, *inputs)
    schedule = random_schedule(graph, seed=1)
    new = rewrite(graph, schedule)
    arguments = example_inputs(graph)
    assert_same(run(new.module, arguments), run(graph.module, arguments))
    assert profile(new, new.names).live_bytes.tolist() == profile(graph, schedule).live_bytes.tolist()


def test_rewriting_twice_is_fine() -> None:
    """A rewritten graph is a graph: its mirrors may be mirrored again."""
    graph = three_tanh()
    once = rewrite(graph, expand(graph, {"tanh": 1}))
    twice = rewrite(once, mirror_everything(once))
    assert len(set(twice.names)) == len(twice.names)
    assert_same(run(twice.module, example_inputs(graph)), run(graph.module, example_inputs(graph)))


def test_gradients_are_those_of_autograd() -> None:
    """The oracle: the rewritten graph's gradients are those of eager autograd."""
    network = Network([("linear", -1, -1), ("gelu", -1, -1), ("layer_norm", -1, -1), ("gate", -1, -2)])
    graph = traced(network)
    new = rewrite(graph, mirror_everything(graph))
    x = batch()
    loss = network(x)
    expected = torch.autograd.grad(loss, [*network.parameters(), x])
    inputs = [*network.parameters(), x, torch.ones_like(loss)]
    assert_same(run(new.module, inputs), [loss.detach(), *expected])
