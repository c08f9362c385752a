"""cost: the roofline by hand, what fusion saves, given and measured seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from graphs import CountOperators, Sketch, chain, graphs_and_schedules, identity
from hypothesis import given
from programs import Network, traced
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.device import calibrate, ledger, rates
from fxremat.device.calibrate import fingerprint
from fxremat.device.rates import CPU, PINNED, Rates
from fxremat.driver.pipeline import planned
from fxremat.errors import InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, bind
from fxremat.memory.lowering import Lowering
from fxremat.options.options import Options
from fxremat.predict.cost import Costs, costs, roofline, seconds
from fxremat.predict.models import EVERY_VALUE
from fxremat.predict.problem import Problem, Solution

aten = torch.ops.aten


def product_and_tanh(size: int = 4, device: str = "meta") -> JointGraph:
    """tanh(x @ x.t()) of a square matrix."""
    sketch = Sketch()
    x = sketch.input("primals_1", size, size)
    x.meta["val"] = torch.empty((size, size), device=device)
    t = sketch.call("t", aten.t.default, x)
    mm = sketch.call("mm", aten.mm.default, x, t)
    return sketch.joint([sketch.call("tanh", aten.tanh.default, mm)])


def total(graph: JointGraph, found: Costs, schedule: Schedule | None = None) -> float:
    """Seconds of a schedule with nothing fused."""
    binding = bind(graph, identity(graph) if schedule is None else schedule)
    return seconds(graph, binding, EVERY_VALUE.lower(graph, binding), found)


# --- The roofline ---------------------------------------------------------------------------------------


def test_a_loop_takes_its_traffic() -> None:
    """A pointwise operator reads its operand, writes its result, and is launched."""
    graph = product_and_tanh()
    traffic = 64 / CPU.bytes_per_second
    found = costs(graph)
    tanh = graph.index["tanh"]
    assert (found.fixed[tanh], found.write[tanh]) == (0.0, pytest.approx(CPU.launch_seconds + traffic))
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


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing was measured yet, with the rates of the table."""
    (tmp_path / PINNED).write_text(json.dumps({"cpu": asdict(CPU)}), encoding="utf-8")
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path))
    return tmp_path


def counted(monkeypatch: pytest.MonkeyPatch, refuses: bool = False) -> list[object]:
    """What timed operators return, one result for each time an operator is timed; they take a second."""
    results: list[object] = []

    def seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
        results.append(call())
        if refuses:
            raise RuntimeError("no memory")
        return 1.0

    monkeypatch.setattr(calibrate, "seconds_per_call", seconds_per_call)
    return results


def other_process() -> None:
    """Forget what a process holds in memory, as a new one would not know it."""
    ledger._ledger.cache_clear()
    calibrate._refused.clear()


def test_measuring_leaves_no_trace(calibration: Path) -> None:
    """The random state is what it was, and the same graph is not timed again."""
    graph = traced(Network([("dropout", -1, -1), ("softmax", -1, -1)]))
    state = torch.get_rng_state()
    first = costs(graph, "measured")
    assert torch.equal(torch.get_rng_state(), state)
    with CountOperators() as ran:
        assert costs(graph, "measured") == first
    assert ran.counts.total() == 0


def test_an_operator_is_timed_once_for_all_processes(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process finds it on disk; an operator of other sizes is another."""
    timed = counted(monkeypatch)
    first = costs(product_and_tanh(device="cpu"), "measured")
    assert first.fixed == (0.0, 0.0, 1.0, 1.0) and len(timed) == 2
    other_process()
    assert costs(product_and_tanh(device="cpu"), "measured") == first
    assert len(timed) == 2
    costs(product_and_tanh(5, device="cpu"), "measured")
    assert len(timed) == 4


def test_a_compiler_that_fuses_leaves_loops_to_the_roofline(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop alone is not what its kernel takes; an external kernel takes what was measured."""
    timed, graph = counted(monkeypatch), product_and_tanh(device="cpu")
    found, estimated = costs(graph, "measured", fuses=True), costs(graph)
    mm, tanh = graph.index["mm"], graph.index["tanh"]
    assert len(timed) == 1 and found.untimed == 0
    assert found.of_node(graph, mm) == 1.0
    assert found.of_node(graph, tanh) == estimated.of_node(graph, tanh)
    assert found.fixed[tanh] == 0.0  # in registers it is neither launched nor read nor written


@pytest.mark.parametrize("useless", ['"fast"', "true", "-1", "NaN", "1e999", "1" + "0" * 400])
def test_seconds_of_no_use_are_measured_again(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, useless: str
) -> None:
    """Once for all processes, whatever was written to the file."""
    timed, graph = counted(monkeypatch), product_and_tanh(device="cpu")
    path = ledger.open_ledger(rates.facts(torch.device("cpu"))).path
    lines = [f"[{json.dumps(calibrate.signature(node))}, {useless}]\n" for node in graph.fx_nodes]
    path.write_text(path.read_text() + "".join(lines))
    for _ in range(2):
        other_process()
        assert costs(graph, "measured").fixed == (0.0, 0.0, 1.0, 1.0) and len(timed) == 2
    assert re.search(r"^operators timed +2$", calibrate.summaries()[0], re.MULTILINE)


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are then kept for the process."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path / "file"))
    timed = counted(monkeypatch)
    graph = product_and_tanh(device="cpu")
    monkeypatch.setattr(rates, "_measured", lambda device: CPU)
    assert costs(graph, "measured") == costs(graph, "measured")
    assert len(timed) == 2


def test_what_cannot_be_timed_takes_what_the_roofline_says(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted, and tried once in a process; the next may have the memory for it."""
    tried = counted(monkeypatch, refuses=True)
    graph = product_and_tanh(device="cpu")
    found, estimated = costs(graph, "measured"), costs(graph)
    assert found.untimed == len(tried) == 2
    for index in range(len(graph.nodes)):
        assert found.of_node(graph, index) == estimated.of_node(graph, index)
    assert costs(graph, "measured") == found and len(tried) == 2
    other_process()
    timed = counted(monkeypatch)
    assert costs(graph, "measured").untimed == 0 and len(timed) == 2


def test_the_report_says_how_much_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a profiler nothing is timed: all of it is the roofline's."""
    graph = product_and_tanh(device="cpu")
    monkeypatch.setattr("fxremat._torch.profilers.is_profiling", lambda: True)
    notes = planned(graph, Options(cost="measured", compiler="eager")).notes
    assert notes == ("2 of 3 nodes could not be timed alone; their seconds are the roofline's",)
    assert planned(graph, Options(compiler="eager")).notes == ()


def test_measuring_while_tracing_runs_real_operators(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partitioner is called with fake tensors active; to time those would say nothing."""
    results = counted(monkeypatch)
    graph = traced(Network([("tanh", -1, -1)]))
    with FakeTensorMode():
        costs(graph, "measured")
    assert results
    assert {type(result) for result in results} == {Tensor}


# --- Rates and the fingerprint --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(torch.float32, 1e9), (torch.bfloat16, 2e9), (torch.float16, 2e9), (torch.float64, 5e8)],
)
def test_a_product_goes_at_the_rate_of_its_precision(dtype: torch.dtype, rate: float) -> None:
    """Given rates are used on any device."""
    sketch = Sketch()
    x = sketch.input("primals_1", 64, 64)
    x.meta["val"] = x.meta["val"].to(dtype)
    graph = sketch.joint([sketch.call("mm", aten.mm.default, x, x)])
    found = roofline(graph, Rates(1e9, 2e9, 5e8, 1e15, 1e-9))
    assert found.of_node(graph, 1) == pytest.approx(1e-9 + 2 * 64**3 / rate)


def test_a_plan_follows_the_rates_of_the_device(calibration: Path) -> None:
    """Those that are pinned, here: twice the bandwidth, half the seconds of traffic."""
    graph = product_and_tanh(device="cpu")
    before = costs(graph)
    faster = {**asdict(CPU), "bytes_per_second": 2 * CPU.bytes_per_second}
    (calibration / PINNED).write_text(json.dumps({"cpu": faster}), encoding="utf-8")
    assert costs(graph).read == tuple(each / 2 for each in before.read)


def test_a_number_runs_no_kernel() -> None:
    """A size that a graph computes takes no time, with either cost."""

    class Reshaped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).reshape(x.shape[0] * 2, 2).tanh()

    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    seen: list[JointGraph] = []

    def planner(problem: Problem) -> Solution:
        seen.append(problem.graph)
        return problem.identity("seen")

    compiled = torch.compile(
        Reshaped(), backend=fxremat.fxremat_backend, options={"planner": planner, "compiler": "eager"}
    )
    compiled(x).sum().backward()
    numbers = [
        index
        for index, node in enumerate(seen[0].fx_nodes)
        if index >= seen[0].num_inputs and isinstance(node.meta.get("val"), torch.SymInt)
    ]
    assert numbers
    for index in numbers:
        assert roofline(seen[0]).of_node(seen[0], index) == 0.0


def test_the_fingerprint_follows_the_calibration(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rates, another ledger, or a profiler: caches miss. Seconds that are added change nothing."""
    counted(monkeypatch)
    first = {cost: fingerprint(cost) for cost in ("roofline", "measured")}
    assert first["roofline"] != first["measured"]
    costs(product_and_tanh(device="cpu"), "measured")
    other_process()
    assert {cost: fingerprint(cost) for cost in first} == first
    ledger.forget(rates.facts(torch.device("cpu")))
    assert fingerprint("roofline") == first["roofline"]
    assert fingerprint("measured") != first["measured"]
    (calibration / PINNED).write_text(
        json.dumps({"cpu": {**asdict(CPU), "launch_seconds": 1.0}}), encoding="utf-8"
    )
    assert fingerprint("roofline") != first["roofline"]
    slower, given = fingerprint("roofline"), fingerprint({"a": 1.0})
    monkeypatch.setattr("fxremat._torch.profilers.is_profiling", lambda: True)
    assert fingerprint("roofline") != slower
    assert fingerprint({"a": 1.0}) == given


def test_compiled_graphs_are_cached_by_the_calibration(calibration: Path) -> None:
    """The partitioner's name in caches changes with it."""
    first = fxremat.partitioner().uuid()
    assert first == fxremat.partitioner().uuid()
    slower = {**asdict(CPU), "flops_per_second": 1e9}
    (calibration / PINNED).write_text(json.dumps({"cpu": slower}), encoding="utf-8")
    assert fxremat.partitioner().uuid() != first


@pytest.mark.parametrize(
    "given_seconds",
    [
        {1: 1.0},
        {"f1": -1.0},
        {"f1": float("nan")},
        {"f1": float("inf")},
        {"f1": "1"},
        {"f1": None},
        {"f1": 10**400},
    ],
    ids=lambda value: str(value)[:20],
)
def test_given_costs_that_are_no_seconds_are_refused(given_seconds: dict[str, float]) -> None:
    """They would spoil every time that is predicted."""
    with pytest.raises(InvalidOptionError, match=r"option 'cost': got \{"):
        fxremat.plan(chain(2), cost=given_seconds, fusion="none")


def test_a_misspelt_node_of_a_given_cost_is_named() -> None:
    """With the nodes that resemble it; nodes that are left out take nothing."""
    with pytest.raises(InvalidOptionError, match="there is no node 'f11' in chain") as caught:
        costs(chain(2), {"f11": 1.0})
    assert caught.value.near_matches[0] == "f1"
    assert costs(chain(2), {}).fixed == (0.0,) * len(chain(2).nodes)
