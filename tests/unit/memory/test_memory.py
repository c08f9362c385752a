"""memory: live bytes by hand, against a simulation with reference counts, and against the allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from graphs import (
    chain,
    example_inputs,
    few,
    graphs_and_schedules,
    identity,
    joint_graphs,
    networks,
    output_names,
    placeholders,
    random_schedule,
    with_outputs,
    with_phases,
    with_views,
)
from hypothesis import given
from hypothesis import strategies as st
from programs import Network, traced
from torch import Tensor, nn

import fxremat
from fxremat._torch import compilers
from fxremat.device.results import as_run
from fxremat.errors import ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import Schedule, bind
from fxremat.measure import measure_peak
from fxremat.memory.liveness import Interval, profile_of
from fxremat.memory.lowering import Lowering
from fxremat.predict.models import profile


def live(graph: JointGraph, schedule: str) -> list[int]:
    """Live bytes of a schedule written with blanks."""
    return profile(graph, schedule.split()).live_bytes.tolist()


# --- By hand --------------------------------------------------------------------------------------------


def test_a_value_dies_at_its_last_use() -> None:
    """On a chain all forward values are live at the boundary, and each goes with its gradient."""
    #  f1..f4 pile up; g4 reads f3, g3 reads f2 and g4, ...; f4 is returned and stays
    assert live(chain(4), "f1 f2 f3 f4 g4 g3 g2 g1") == [1, 2, 3, 4, 5, 5, 4, 3]


def test_a_mirror_is_an_instance_of_its_own() -> None:
    """A dropped value dies in the forward with its last reader, and lives again from its mirror on."""
    #  f2 dies when f3 has run; it is born again for g3
    assert live(chain(4), "f1 f2 f3 f4 g4 f2 g3 g2 g1") == [1, 2, 3, 3, 4, 4, 5, 4, 3]


def test_operands_are_live_while_their_last_reader_runs() -> None:
    """The result is allocated before the operand is freed."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "c": ["b"]}, {"a": 8, "b": 4, "c": 2}, forward_outputs=["c"]
    )
    assert live(graph, "a b c") == [8, 12, 6]


def test_a_value_without_a_use_dies_at_once() -> None:
    """What nobody reads holds bytes for one step."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["x"]}, {"a": 8, "b": 4}, forward_outputs=["b"]
    )
    assert live(graph, "a b") == [8, 4]


def test_outputs_live_on() -> None:
    """A forward output and a gradient are live to the end, however early they are made."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "dw": ["a"], "da": ["b", "a"]},
        {"a": 1, "b": 10, "dw": 100, "da": 1000},
        forward_outputs=["b"],
        backward_outputs=["dw", "da"],
        backward=["dw", "da"],
    )
    assert live(graph, "a b dw da") == [1, 11, 111, 1111]
    assert live(graph, "a b da dw") == [1, 11, 1011, 1111]


def test_inputs_are_the_callers() -> None:
    """Inputs count nothing, nor do views of them."""
    graph = JointGraph.from_mappings(
        {"x": (), "t": ["x"], "a": ["t"]}, {"t": 50, "a": 4}, forward_outputs=["a"]
    )
    assert live(with_views(graph, {"t": "x"}), "t a") == [0, 4]


def test_a_view_keeps_its_base() -> None:
    """A storage dies with the last reader of any value that views it, and counts once."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "v": ["a"], "vv": ["v"], "b": ["a"], "c": ["b"], "d": ["vv", "c"]},
        {"a": 8, "v": 99, "vv": 99, "b": 1, "c": 2, "d": 4},
        forward_outputs=["d"],
    )
    graph = with_views(graph, {"v": "a", "vv": "v"})
    assert live(graph, "a v vv b c d") == [8, 8, 8, 9, 11, 14]
    assert live(graph, "a b c v vv d") == [8, 9, 11, 10, 10, 14]


def test_a_view_that_is_returned_keeps_its_base() -> None:
    """The storage of a returned view is the caller's to the end."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "v": ["a"], "b": ["a"]}, {"a": 8, "b": 1}, forward_outputs=["v", "b"]
    )
    assert live(with_views(graph, {"v": "a"}), "a v b") == [8, 8, 9]


def test_a_mirrored_view_views_the_mirror() -> None:
    """A view that runs again keeps the storage of the operand's latest occurrence."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "v": ["a"], "b": ["v"], "db": ["b"], "da": ["db", "v"]},
        {"a": 8, "b": 1, "db": 2, "da": 4},
        forward_outputs=["b"],
        backward_outputs=["da"],
        backward=["db", "da"],
    )
    graph = with_views(graph, {"v": "a"})
    assert live(graph, "a v b db da") == [8, 8, 9, 11, 15]
    assert live(graph, "a v b db a v da") == [8, 8, 9, 3, 11, 11, 15]


def test_each_output_is_a_storage_of_its_own() -> None:
    """The outputs of one operator die one by one; one without a reader dies behind the last getitem."""
    graph = JointGraph.from_mappings(
        {"x": (), "s": ["x"], "s_0": ["s"], "s_2": ["s"], "a": ["s_0"], "b": ["a"], "c": ["s_2", "b"]},
        dict.fromkeys(["s", "s_0", "s_2", "a", "b", "c"], 0),
        forward_outputs=["c"],
    )
    graph = with_outputs(graph, "s", [1, 10, 100])
    assert live(graph, "s s_0 s_2 a b c") == [111, 111, 111, 101, 100, 100]


def test_a_mirror_makes_what_it_recreates() -> None:
    """A second run of a stateful operator leaves out the outputs that update its state."""
    graph = JointGraph.from_mappings(
        {"x": (), "t": (), "n": ["x"], "n_0": ["n"], "n_1": ["n"], "b": ["n_0"], "g": ["t", "n_0", "b"]},
        {"n": 0, "n_0": 0, "n_1": 0, "b": 5, "g": 7},
        forward_outputs=["b", "n_1"],
        backward_outputs=["g"],
        backward=["g"],
    )
    graph = with_outputs(graph, "n", [10, 1], recreates=1)
    assert live(graph, "n n_0 n_1 b g") == [11, 11, 11, 16, 23]
    assert live(graph, "n n_0 n_1 b n n_0 g") == [11, 11, 11, 16, 16, 16, 23]


class Copying(nn.Module):
    """What has the tangent for its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


@pytest.mark.parametrize("budget", [None, "min"])
def test_tangents_count_where_the_backward_returns_them_as_they_are(budget: str | None) -> None:
    """Beside what the forward returned: no plan takes less."""
    graph = fxremat.capture(Copying(), torch.ones(100, requires_grad=True))
    assert graph.boundary == len(graph.nodes)
    assert profile(graph, graph.names).peak_bytes == graph.bytes_at_the_end == 800
    assert fxremat.plan(graph, budget=budget).peak_bytes == 800


def test_tangents_count_from_the_boundary_to_the_end() -> None:
    """The caller makes them, but not before the backward begins."""
    graph = with_phases(chain(3), ["t"], tangent_bytes=100)
    assert live(graph, "f1 f2 f3 g3 g2 g1") == [1, 2, 3, 104, 104, 103]


def test_scratch_is_live_at_its_own_step() -> None:
    """What an operator allocates and frees while it runs counts there, in a mirror too."""
    graph = chain(2)
    scratch = tuple(100 if node.name == "f1" else 0 for node in graph.nodes)
    graph = replace(graph, scratch_bytes=scratch)
    assert live(graph, "f1 f2 g2 g1") == [101, 2, 3, 3]
    assert live(graph, "f1 f2 f1 g2 g1") == [101, 2, 102, 3, 3]


class Drawing(nn.Module):
    """What draws 1000 numbers, with an operand besides the generator's state and without."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        return y * torch.rand(1000) if self.name == "rand" else nn.functional.dropout(y)


def drawing(name: str) -> tuple[JointGraph, Schedule]:
    """The graph, and a schedule in which the numbers are drawn again for the operator that reads them."""
    graph = fxremat.capture(Drawing(name), torch.randn(1000, requires_grad=True), loss=torch.sum)
    at = graph.names.index("expand") + 1
    names = [each for each in graph.names if each == name or graph.leader(each) == name]
    return graph, Schedule((*graph.names[:at], *names, *graph.names[at:]))


@pytest.mark.parametrize(
    ("name", "live"),
    [
        ("native_dropout", [4000, 9056, 9000, 5000, 5000, 5004, 1008, 5008, 8008, 12008]),
        ("rand", [4000, 9056, 8000, 12000, 8004, 4008, 8008, 8008, 12008]),
    ],
)
def test_a_state_of_random_numbers_is_held_for_mirrors_alone(name: str, live: list[int]) -> None:
    """The first run draws from the generator itself: without a mirror the state dies at once."""
    graph, again = drawing(name)
    assert profile(graph, graph.names).live_bytes.tolist() == live
    (state,) = (life for life in profile(graph, again).intervals if life.name == "random_state")
    assert (state.birth, state.death) == (1, again.index("expand") + 1)


@pytest.mark.parametrize(
    ("name", "scratch", "mirror"),
    [("native_dropout", 1, 56), ("native_dropout", 100, 100), ("rand", 1, 1056)],
)
def test_a_mirror_that_draws_again_copies_the_generators_state(name: str, scratch: int, mirror: int) -> None:
    """Before its results are there: of the 5056 bytes those count that are more than results and scratch."""
    graph, again = drawing(name)
    told = replace(graph, scratch_bytes=tuple(scratch * (each.name == name) for each in graph.nodes))
    for names, expected in ((graph.names, [scratch]), (again, [scratch, mirror])):
        more = profile(told, names).live_bytes - profile(graph, names).live_bytes
        assert more[more > 0].tolist() == expected


def test_the_profile_of_nothing() -> None:
    """An empty schedule has no bytes and no peak."""
    found = profile(chain(1), ())
    assert (found.peak_bytes, found.peak_step, found.boundary, found.intervals) == (0, 0, 0, ())


def test_a_profile_says_who_is_live_when() -> None:
    """Intervals hold both ends; the first step of the peak is named; the largest come first."""
    graph = chain(3, sizes={"f1": 5, "g2": 2})
    found = profile(graph, graph.names)
    assert found.intervals == (
        Interval("f1", 0, 5, 0, 4),
        Interval("f2", 1, 1, 1, 3),
        Interval("f3", 2, 1, 2, 5),
        Interval("g3", 3, 1, 3, 4),
        Interval("g2", 4, 2, 4, 5),
        Interval("g1", 5, 1, 5, 5),
    )
    assert (found.peak_bytes, found.peak_step, found.boundary) == (9, 4, 3)
    assert [life.name for life in found.live_at(4)] == ["f1", "g2", "f3", "g3"]
    assert [life.name for life in found.saved] == ["f1", "f2", "f3"]
    assert found.saved_bytes == 7


def test_what_is_saved_lives_across_the_boundary() -> None:
    """f2 dies in the forward, and its mirror is born behind it."""
    found = profile(chain(4), ["f1", "f2", "f3", "f4", "g4", "f2", "g3", "g2", "g1"])
    assert [life.name for life in found.saved] == ["f1", "f3", "f4"]


def test_storages_without_bytes_are_no_intervals() -> None:
    """What holds nothing is not listed."""
    graph = chain(2, sizes={"f1": 0})
    assert [life.name for life in profile(graph, graph.names).intervals] == ["f2", "g2", "g1"]


def test_a_schedule_that_reads_too_early_has_no_profile() -> None:
    """The error is the schedule's."""
    with pytest.raises(ScheduleError):
        profile(chain(2), ["f2", "f1"])


# --- What a code generator makes of it ------------------------------------------------------------------


def lowered(**changes: object) -> list[int]:
    """Live bytes of a -> b -> c, of 8, 4 and 2 bytes, lowered as given."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "c": ["b"]}, {"a": 8, "b": 4, "c": 2}, forward_outputs=["c"]
    )
    plain = Lowering([True] * 3, [0, 1, 2], [0, 1, 2])
    return profile_of(graph, bind(graph, graph.names), replace(plain, **changes)).live_bytes.tolist()


def test_without_fusion_every_value_has_a_buffer() -> None:
    """Each step is a kernel."""
    assert lowered() == [8, 12, 6]


def test_a_value_in_registers_holds_nothing() -> None:
    """b has no buffer, and a is read until c's kernel has run."""
    assert lowered(materialised=[True, False, True], read_until=[0, 2, 2]) == [8, 8, 10]


def test_a_value_lives_until_the_last_kernel_that_reads_it() -> None:
    """b is computed where d is, and reads a there, behind c."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "c": ["a"], "d": ["b", "c"]},
        {"a": 8, "b": 4, "c": 2, "d": 1},
        forward_outputs=["d"],
    )
    fused = Lowering([True, False, True, True], range(4), [0, 3, 2, 3])
    assert profile_of(graph, bind(graph, graph.names), fused).live_bytes.tolist() == [8, 8, 10, 11]


def test_a_value_is_born_when_its_kernel_runs() -> None:
    """a and b come from one kernel, which runs where a stands."""
    assert lowered(runs_at=[0, 0, 2], read_until=[0, 0, 2]) == [12, 4, 6]


def test_a_kernel_may_write_over_an_operand() -> None:
    """The bytes that it reuses count once while it runs."""
    assert lowered(extra_bytes=[(2, 2, -2)]) == [8, 12, 4]


def test_a_copy_is_held_from_its_first_to_its_last_step() -> None:
    """A copy of 3 bytes besides the values, at the first two steps."""
    assert lowered(extra_bytes=[(0, 1, 3)]) == [11, 15, 6]


def test_a_value_may_be_read_later_too() -> None:
    """a, which b reads, is read at the last step as well; that it is read before b does changes nothing."""
    assert lowered(read_later=[(0, 2)]) == [8, 12, 14]
    assert lowered(read_later=[(0, 0)]) == [8, 12, 6]


def test_a_value_in_a_later_buffer_keeps_that_buffer() -> None:
    """b's bytes are a part of c's, which are born with them and live as long as either."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "c": ["b"], "d": ["c"], "e": ["b"]},
        {"a": 8, "b": 4, "c": 6, "d": 1, "e": 1},
        forward_outputs=["d", "e"],
    )
    plain = Lowering([True, False, True, True, True], [0, 1, 1, 3, 4], range(5))
    held = replace(plain, held_in={1: 2})
    live = [profile_of(graph, bind(graph, graph.names), each).live_bytes.tolist() for each in (plain, held)]
    assert live == [[8, 14, 6, 7, 2], [8, 14, 6, 7, 8]]
    part_ends_first = bind(graph, ("a", "b", "c", "e", "d"))
    live = [profile_of(graph, part_ends_first, each).live_bytes.tolist() for each in (plain, held)]
    assert live == [[8, 14, 6, 7, 8]] * 2


# --- Against a simulation -------------------------------------------------------------------------------


@dataclass
class Buffer:
    """A piece of memory and how many values hold it."""

    bytes: int
    holders: int = 0


def simulate(graph: JointGraph, schedule: Schedule) -> list[int]:
    """Live bytes at each step, found by running the schedule with reference counts.

    A value holds its buffers while a use of it is still to come. Each use was counted beforehand, outputs
    and the end of the forward as uses that never come.
    """
    remaining, boundary = _count_uses(graph, schedule)
    held: dict[str, tuple[int, list[Buffer]]] = {}  # name -> step of its latest occurrence, its buffers
    values: list[list[Buffer]] = []
    memory = 0
    found = []
    for step, name in enumerate(schedule):
        node = graph.nodes[graph.index[name]]
        operands = [graph.nodes[operand].name for operand in node.operands]
        read = [held[operand] for operand in operands if operand in held]
        buffers = _run(graph, name, again=name in schedule[:step], held=held)
        memory += sum(buffer.bytes for buffer in buffers if not buffer.holders)
        for buffer in buffers:
            buffer.holders += 1
        values.append(buffers)
        held[name] = step, buffers
        found.append(memory + (graph.tangent_bytes if step >= boundary else 0))
        for used, _ in read:
            remaining[used] -= 1
        for ended in {step, *(used for used, _ in read)}:
            if not remaining[ended]:
                memory -= _release(values[ended])
                values[ended] = []
    if graph.boundary == len(graph.nodes) and graph.backward_outputs:  # which returns tangents as they are
        found[-1] = max(found[-1], memory + graph.tangent_bytes)
    return found


def _count_uses(graph: JointGraph, schedule: Schedule) -> tuple[list[int], int]:
    remaining = [0] * len(schedule)
    latest: dict[int, int] = {}
    to_come = {i for i, node in enumerate(graph.nodes) if node.phase is Phase.FORWARD}
    boundary = 0
    for step, name in enumerate(schedule):
        position = graph.index[name]
        for operand in graph.nodes[position].operands:
            if operand in latest:
                remaining[latest[operand]] += 1
        is_getitem_at_boundary = boundary == step and graph.nodes[position].leader is not None and not to_come
        if position in to_come or is_getitem_at_boundary:
            to_come.discard(position)
            boundary = step + 1
        latest[position] = step
        if boundary == step + 1:
            at_boundary = dict(latest)
    for output in graph.forward_outputs:
        remaining[at_boundary[output]] += 1
    for output in graph.backward_outputs:
        remaining[latest[output]] += 1
    return remaining, boundary


def _run(
    graph: JointGraph, name: str, again: bool, held: dict[str, tuple[int, list[Buffer]]]
) -> list[Buffer]:
    node = graph.nodes[graph.index[name]]
    if node.shares is None:
        return [Buffer(graph.storage_bytes[each]) for each in (node.recreates if again else node.creates)]
    source = graph.nodes[node.shares].name
    buffers = held[source][1] if source in held else []
    if node.leader is None:
        return list(buffers)
    return [buffers[graph.nodes[node.leader].creates.index(storage)] for storage in node.views]


def _release(buffers: list[Buffer]) -> int:
    freed = 0
    for buffer in buffers:
        buffer.holders -= 1
        freed += 0 if buffer.holders else buffer.bytes
    return freed


@given(graphs_and_schedules())
def test_live_bytes_are_those_of_a_simulation(drawn: tuple[JointGraph, Schedule]) -> None:
    """At each step of any valid schedule, views, several outputs, tangents and all."""
    graph, schedule = drawn
    assert profile(graph, schedule).live_bytes.tolist() == simulate(graph, schedule)


@given(graphs_and_schedules())
def test_the_intervals_are_the_live_bytes(drawn: tuple[JointGraph, Schedule]) -> None:
    """Summing who is live gives the live bytes, tangents apart."""
    graph, schedule = drawn
    found = profile(graph, schedule)
    for step, bytes_there in enumerate(found.live_bytes.tolist()):
        tangents = graph.tangent_bytes if step >= found.boundary else 0
        assert sum(life.bytes for life in found.live_at(step)) + tangents == bytes_there


@given(joint_graphs())
def test_outputs_alone_are_live_at_the_end(graph: JointGraph) -> None:
    """Behind the last step nothing but outputs, tangents and that step's operands is live."""
    found = profile(graph, identity(graph))
    last = graph.nodes[-1]
    kept = {storage for output in graph.outputs for storage in graph.nodes[output].views}
    kept |= {*last.creates, *last.views}
    kept |= {storage for operand in last.operands for storage in graph.nodes[operand].views}
    assert {life.storage for life in found.live_at(len(graph.names) - 1)} <= kept


# --- Against the allocator ------------------------------------------------------------------------------

SCALAR_BYTES = 12  # a number that a pointwise operator reads becomes a tensor, in two dtypes at worst


def measured_peak(graph: JointGraph, fusion: str) -> int:
    """The peak of the partitioned graph's forward and backward, boxed as ``compiler="eager"`` runs them."""
    forward, backward = fxremat.partition(graph, inplace=fusion == "inplace")
    given = dict(zip(placeholders(graph.module), example_inputs(graph), strict=True))
    primals = [given[name] for name in placeholders(forward)]
    count = len(graph.forward_outputs)
    names = output_names(forward)[count:]
    run_forward, run_backward = (
        compilers.boxed_nop(forward, primals),
        compilers.boxed_nop(backward, primals),
    )

    def step() -> object:
        results = run_forward(list(primals))
        outputs, known = results[:count], {**given, **dict(zip(names, results[count:], strict=True))}
        del results
        tangents = {name: given[name].clone() for name in given if name.startswith("tangents")}
        arguments = [(known | tangents)[name] for name in placeholders(backward)]
        del known
        return outputs, tangents, run_backward(arguments)

    with torch.no_grad():
        step()
        return measure_peak(step, device="cpu").peak_bytes


@pytest.mark.parametrize("fusion", ["none", "inplace"])
@few(8)
@given(networks(), st.integers(0, 3))
def test_the_peak_is_the_allocators(fusion: str, network: Network, seed: int) -> None:
    """The forward and the backward of a random model allocate what was predicted."""
    graph = as_run(traced(network))
    schedule = random_schedule(graph, seed)
    measured = measured_peak(fxremat.rewrite(graph, schedule), fusion)
    assert 0 <= measured - profile(graph, schedule, fusion).peak_bytes <= SCALAR_BYTES
