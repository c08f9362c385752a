"""cost: the roofline by hand, what fusion saves, given and measured seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from graphs import CountOperators, Network, Sketch, chain, graphs_and_schedules, traced
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxremat import calibrate
from fxremat.cost import CPU, Costs, costs, seconds
from fxremat.errors import InvalidOptionError
from fxremat.fusion import Lowering, lower
from fxremat.graph import JointGraph
from fxremat.schedule import Schedule, bind, identity

aten = torch.ops.aten


def product_and_tanh(size: int = 4) -> JointGraph:
    """tanh(x @ x.t()) of a square matrix."""
    sketch = Sketch()
    x = sketch.input("primals_1", size, size)
    t = sketch.call("t", aten.t.default, x)
    mm = sketch.call("mm", aten.mm.default, x, t)
    return sketch.joint([sketch.call("tanh", aten.tanh.default, mm)])


def total(graph: JointGraph, found: Costs, schedule: Schedule | None = None) -> float:
    """Seconds of a schedule with nothing fused."""
    binding = bind(graph, identity(graph) if schedule is None else schedule)
    return seconds(graph, binding, lower(graph, binding, "none"), found)


# --- The roofline ---------------------------------------------------------------------------------------


def test_a_loop_takes_its_traffic() -> None:
    """A pointwise operator reads its operand, writes its result, and is launched."""
    graph = product_and_tanh()
    traffic = 64 / CPU.bytes_per_second
    found = costs(graph)
    tanh = graph.index["tanh"]
    assert (found.fixed[tanh], found.write[tanh]) == (CPU.launch_seconds, traffic)
    assert found.of_node(graph, tanh) == pytest.approx(CPU.launch_seconds + 2 * traffic)


@pytest.mark.parametrize(("size", "bound"), [(4, "traffic"), (400, "arithmetic")])
def test_a_product_takes_the_longer_of_arithmetic_and_traffic(size: int, bound: str) -> None:
    """2 n^3 operations against 3 matrices of n^2 numbers: small ones wait for memory, large ones compute."""
    graph = product_and_tanh(size)
    arithmetic = 2 * size**3 / CPU.flops_per_second
    traffic = 3 * 4 * size**2 / CPU.bytes_per_second
    assert ("arithmetic" if arithmetic > traffic else "traffic") == bound
    expected = CPU.launch_seconds + max(arithmetic, traffic)
    assert costs(graph).of_node(graph, graph.index["mm"]) == pytest.approx(expected)


def test_a_view_and_an_input_take_nothing() -> None:
    """They run no kernel."""
    graph = product_and_tanh()
    found = costs(graph)
    assert [found.of_node(graph, position) for position in range(2)] == [0.0, 0.0]
    assert found.is_view == (True, True, False, False)


def test_an_operand_is_read_once() -> None:
    """x * x reads x once."""
    sketch = Sketch()
    x = sketch.input("primals_1", 4, 4)
    graph = sketch.joint([sketch.call("square", aten.mul.Tensor, x, x)])
    expected = CPU.launch_seconds + 2 * 64 / CPU.bytes_per_second
    assert costs(graph).of_node(graph, 1) == pytest.approx(expected)


def test_the_seconds_of_a_schedule_are_those_of_its_steps() -> None:
    """A mirror takes as long as its original."""
    graph = product_and_tanh()
    found = costs(graph)
    mm, tanh = (found.of_node(graph, graph.index[name]) for name in ("mm", "tanh"))
    assert total(graph, found) == pytest.approx(mm + tanh)
    assert total(graph, found, Schedule(("t", "mm", "mm", "tanh"))) == pytest.approx(2 * mm + tanh)


def test_what_is_not_materialised_is_neither_written_nor_read() -> None:
    """A value in registers costs its arithmetic alone."""
    graph = product_and_tanh()
    found = costs(graph)
    binding = bind(graph, identity(graph))
    fused = Lowering([True, False, True], range(3), range(3))
    saved = total(graph, found) - seconds(graph, binding, fused, found)
    assert saved == pytest.approx(2 * 64 / CPU.bytes_per_second)


# --- Given and measured ---------------------------------------------------------------------------------


def test_given_seconds_are_taken_as_they_are() -> None:
    """By name; absent names take none, and nothing can be saved by fusion."""
    graph = product_and_tanh()
    found = costs(graph, {"mm": 2.0, "tanh": 0.5})
    assert found.fixed == (0.0, 0.0, 2.0, 0.5)
    assert total(graph, found) == 2.5
    assert not any(found.read) and not any(found.write)


def test_a_graph_of_mappings_brings_its_seconds() -> None:
    """They are used unless others are given."""
    graph = chain(2, seconds={"f1": 1.0, "g1": 4.0})
    assert costs(graph).fixed == (0.0, 0.0, 1.0, 0.0, 0.0, 4.0)
    assert costs(graph, {"f2": 3.0}).fixed == (0.0, 0.0, 0.0, 3.0, 0.0, 0.0)


@pytest.mark.parametrize("graph", [chain(1), product_and_tanh()], ids=["mappings", "fx"])
def test_an_unknown_cost_is_refused(graph: JointGraph) -> None:
    """The error names the cost that was probably meant."""
    with pytest.raises(InvalidOptionError) as caught:
        costs(graph, "measurd")
    assert caught.value.option == "cost"
    assert caught.value.near_matches == ("measured",)


@given(graphs_and_schedules())
def test_seconds_add_up(drawn: tuple[JointGraph, Schedule]) -> None:
    """With a second for each run, a schedule takes as many seconds as it has steps."""
    graph, schedule = drawn
    assert total(graph, costs(graph, dict.fromkeys(graph.names, 1.0)), schedule) == len(schedule)


def test_measured_seconds() -> None:
    """Every kernel takes some time on this machine, views and inputs take none."""
    graph = traced(Network([("tanh", -1, -1), ("transpose", -1, -2)]))
    found = costs(graph, "measured")
    for position, node in enumerate(graph.nodes):
        is_kernel = position >= graph.num_inputs and graph.nodes[position].shares is None
        assert (found.of_node(graph, position) > 0) == is_kernel, node.name


def test_measuring_is_done_once_and_leaves_no_trace() -> None:
    """An operator is timed once in a process, and the random state is what it was."""
    graph = traced(Network([("dropout", -1, -1), ("softmax", -1, -1)]))
    state = torch.get_rng_state()
    first = costs(graph, "measured")
    assert torch.equal(torch.get_rng_state(), state)
    with CountOperators() as counted:
        assert costs(graph, "measured") == first
    assert counted.counts.total() == 0


def test_measuring_while_tracing_runs_real_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partitioner is called with fake tensors active; to time those would say nothing."""
    results: list[object] = []

    def time_steps(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        results.extend(step() for step in steps.values())
        return {name: [1.0] * rounds for name in steps}

    monkeypatch.setattr(calibrate, "time_steps", time_steps)
    monkeypatch.setattr(calibrate, "_seconds", {})
    graph = traced(Network([("tanh", -1, -1)]))
    with FakeTensorMode():
        costs(graph, "measured")
    assert results
    assert {type(result) for result in results} == {Tensor}
