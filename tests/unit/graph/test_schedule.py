"""schedule: what a schedule means, which are valid, and Algorithm 2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from graphs import (
    chain,
    graphs_and_counts,
    graphs_and_schedules,
    identity,
    joint_graphs,
    with_outputs,
    with_phases,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fxremat.errors import InvalidOptionError, ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.nodes import Phase
from fxremat.graph.schedule import Binding, Schedule, bind, prune, validate


def words(text: str) -> Schedule:
    """A schedule written with blanks."""
    return Schedule(text.split())


def two_outputs() -> JointGraph:
    """f1 has two outputs: f2 reads the first one, the backward both."""
    graph = JointGraph.from_mappings(
        {
            "x": (),
            "t": (),
            "f1": ["x"],
            "f1_0": ["f1"],
            "f1_1": ["f1"],
            "f2": ["f1_0"],
            "f3": ["f2"],
            "g3": ["t", "f2"],
            "g1": ["g3", "f1_0", "f1_1"],
        },
        dict.fromkeys(["f1", "f1_0", "f1_1", "f2", "f3", "g3", "g1"], 1),
        forward_outputs=["f3"],
        backward_outputs=["g1"],
        backward=["g3", "g1"],
    )
    return with_phases(with_outputs(graph, "f1", [4, 2]), ["t"])


def with_order(graph: JointGraph, *names: str) -> JointGraph:
    """The graph with these nodes keeping their order, as effects do."""
    nodes = [replace(n, ordered=True, keep="it has an effect") if n.name in names else n for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


# --- What a schedule means ------------------------------------------------------------------------------


def test_mirror_counts_are_repetitions() -> None:
    """A name that stands three times has two mirrors; one that stands once is left out."""
    assert words("f1 f2 f1 g2 f1 f2 g1").mirror_counts == {"f1": 2, "f2": 1}
    assert Schedule().mirror_counts == {}


def test_a_use_reads_the_latest_earlier_occurrence() -> None:
    """Behind a mirror its readers read the mirror; an input's reader reads no step."""
    binding = bind(chain(2), words("f1 f2 g2 f1 g1"))
    assert binding.reads == ((None,), (0,), (None, 0), (None,), (2, None))
    binding = bind(chain(2), words("f1 f2 f1 g2 g1"))
    assert binding.reads == ((None,), (0,), (None,), (None, 2), (3, None))
    assert binding.is_mirror == (False, False, True, False, False)


def test_the_backward_begins_behind_the_last_first_run_of_the_forward() -> None:
    """A mirror in the forward does not move the boundary, one in the backward neither."""
    assert bind(chain(3), words("f1 f2 f3 f1 f2 g3 g2 g1")).boundary == 3
    assert bind(chain(3), words("f1 f1 f2 f1 f3 g3 g2 g1")).boundary == 5
    assert bind(chain(3), ()).boundary == 0


def test_getitems_of_the_last_operator_are_in_the_forward() -> None:
    """A deferred ``getitem`` behind the last forward operator stands before the boundary."""
    graph = JointGraph.from_mappings(
        {"x": (), "t": (), "f1": ["x"], "f1_0": ["f1"], "f1_1": ["f1"], "g1": ["t", "f1_1"]},
        {"f1": 1, "f1_0": 0, "f1_1": 0, "g1": 1},
        forward_outputs=["f1_0"],
        backward_outputs=["g1"],
        backward=["g1"],
    )
    graph = with_phases(with_outputs(graph, "f1", [4, 2]), ["t"])
    assert [node.phase for node in graph.nodes[3:]] == [Phase.FORWARD, Phase.DEFERRED, Phase.BACKWARD]
    assert graph.boundary == bind(graph, identity(graph)).boundary + graph.num_inputs == 5


def test_a_forward_output_is_the_latest_before_the_boundary() -> None:
    """What the forward returns is not replaced by a mirror in the backward, a gradient is."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "da": ["b"]},
        {"a": 1, "b": 1, "da": 1},
        forward_outputs=["a", "b"],
        backward_outputs=["a", "da"],
        backward=["da"],
    )
    assert bind(graph, words("a b a da")).outputs == (0, 1, 2, 3)
    assert bind(graph, words("a a b da")).outputs == (1, 2, 3)


def test_an_output_that_no_step_computes_has_none() -> None:
    """An input that is returned, and an output or a gradient that is None."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "da": ["a"]},
        {"a": 1, "da": 1},
        forward_outputs=["x", "a"],
        backward_outputs=["x", "da"],
        backward=["da"],
    )
    assert bind(graph, words("a da")).outputs == (0, 1)
    graph = replace(
        graph, forward_outputs=(None, graph.index["a"]), backward_outputs=(None, graph.index["da"])
    )
    assert bind(graph, words("a da")).outputs == (0, 1)


# --- Which schedules are valid --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "node", "step", "problem"),
    [
        ("f1 f9 f2", "f9", 1, "no such node"),
        ("x f1 f2 g2 g1", "x", 0, "no such node"),
        ("f2 f1 g2 g1", "f2", 0, "reads 'f1', which has not run"),
        ("f1 f2 g2", "g1", None, "never runs"),
        ("f1 f2 g2 f2 g1", "f2", 3, "may not run again: it is forbidden"),
        ("f1 g2 g1 f2", "g2", 1, "the forward has not ended"),
    ],
)
def test_each_fault_is_named(schedule: str, node: str, step: int | None, problem: str) -> None:
    """The error holds the node at fault and its step."""
    with pytest.raises(ScheduleError, match=problem) as caught:
        validate(chain(2, keep=["f2"]), words(schedule))
    assert (caught.value.node, caught.value.step) == (node, step)


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        ("f1 f1_0 f2 f1_1 f3 g3 g1", 3),
        ("f1 f1_1 f1_0 f2 f3 g3 f1_1 g1", 6),
    ],
)
def test_a_getitem_is_not_torn_from_its_operator(schedule: str, step: int) -> None:
    """A ``getitem`` stands behind its operator or behind another one of the same operator."""
    with pytest.raises(ScheduleError, match="must follow 'f1'") as caught:
        validate(two_outputs(), words(schedule))
    assert (caught.value.node, caught.value.step) == ("f1_1", step)


def test_a_getitem_does_not_follow_that_of_another_operator() -> None:
    """Behind a ``getitem`` of f2, one of f1 is torn from f1."""
    graph = JointGraph.from_mappings(
        {"x": (), "f1": ["x"], "f1_0": ["f1"], "f2": ["x"], "f2_0": ["f2"]},
        dict.fromkeys(["f1", "f1_0", "f2", "f2_0"], 1),
        forward_outputs=["f1_0", "f2_0"],
    )
    graph = with_outputs(with_outputs(graph, "f1", [1]), "f2", [1])
    validate(graph, words("f1 f1_0 f2 f2_0"))
    validate(graph, words("f2 f2_0 f1 f1_0"))
    with pytest.raises(ScheduleError, match="must follow 'f1'"):
        validate(graph, words("f1 f2 f2_0 f1_0"))


def test_effects_keep_their_order() -> None:
    """Two nodes with effects do not change places, two without may."""
    operands = {"x": (), "a": ["x"], "b": ["x"]}
    graph = JointGraph.from_mappings(operands, {"a": 1, "b": 1}, forward_outputs=["a", "b"])
    validate(graph, words("b a"))
    with pytest.raises(ScheduleError, match="it must run before 'b', having an effect"):
        validate(with_order(graph, "a", "b"), words("b a"))


def test_a_mirror_changes_no_order() -> None:
    """What draws random numbers draws the same again, between two that follow it, too."""
    operands = {"x": (), "a": ["x"], "b": ["x"], "c": ["x"]}
    graph = JointGraph.from_mappings(operands, {"a": 1, "b": 1, "c": 1}, forward_outputs=["a", "b", "c"])
    graph = replace(graph, nodes=tuple(replace(node, ordered=True) for node in graph.nodes))
    assert validate(graph, words("a b a c b")).is_mirror == (False, False, True, False, True)


@given(graphs_and_schedules())
def test_random_schedules_are_valid(drawn: tuple[JointGraph, Schedule]) -> None:
    """Expanded mirror counts, with mirrors put in wherever their operands have run, are executions."""
    graph, schedule = drawn
    binding = validate(graph, schedule)
    assert [graph.nodes[node].name for node in binding.nodes] == list(schedule)


# --- Leaving out what nobody reads ----------------------------------------------------------------------


def test_prune_leaves_out_what_nobody_reads() -> None:
    """An occurrence without a reader goes, and then what only it had read."""
    assert prune(chain(3), words("f1 f2 f3 f1 f2 f1 f2 g3 g2 g1")) == words("f1 f2 f3 f1 f2 g3 g2 g1")
    assert prune(chain(3), words("f1 f2 f3 g3 g2 g1 f1 f2")) == words("f1 f2 f3 g3 g2 g1")


def test_prune_keeps_effects_and_what_they_read() -> None:
    """A node with an effect runs although nobody reads it."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "print": ["a"], "b": ["x"], "dead": ["b"]},
        dict.fromkeys(["a", "print", "b", "dead"], 1),
        forward_outputs=["b"],
    )
    assert prune(graph, graph.names) == words("b")
    assert prune(with_order(graph, "print"), graph.names) == words("a print b")


def test_prune_leaves_out_mirrors_of_what_has_its_order() -> None:
    """A random number that is drawn again for nobody."""
    graph = chain(2)
    graph = replace(graph, nodes=tuple(replace(node, ordered=True) for node in graph.nodes))
    assert prune(graph, words("f1 f2 f1 g2 f2 g1")) == words("f1 f2 f1 g2 g1")


@given(graphs_and_schedules())
def test_prune_is_done_in_one_go(drawn: tuple[JointGraph, Schedule]) -> None:
    """What is pruned is valid, holds every node, and has nothing left to prune."""
    graph, schedule = drawn
    pruned = prune(graph, schedule)
    validate(graph, pruned)
    assert prune(graph, pruned) == pruned
    assert set(pruned) == set(schedule)


# --- Algorithm 2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "counts", "expected"),
    [
        (2, {}, "f1 f2 g2 g1"),
        (4, {"f1": 0, "f3": 0}, "f1 f2 f3 f4 g4 g3 g2 g1"),
        # one value dropped: it runs just before the first gradient that reads it
        (4, {"f2": 1}, "f1 f2 f3 f4 g4 f2 g3 g2 g1"),
        # two segments
        (4, {"f1": 1, "f3": 1}, "f1 f2 f3 f4 f3 g4 g3 f1 g2 g1"),
        # all of it
        (4, {"f1": 1, "f2": 1, "f3": 1}, "f1 f2 f3 f4 f1 f2 f3 g4 g3 g2 g1"),
        # the forward output's count has no effect: the backward does not read it
        (3, {"f3": 2}, "f1 f2 f3 g3 g2 g1"),
        # f1 falls due again for g2; g3 reads copy 1 of f2, which had read copy 1 of f1
        (4, {"f1": 2, "f2": 1, "f3": 2}, "f1 f2 f3 f4 f1 f2 f3 g4 g3 f1 g2 g1"),
        # g3 reads copy 2 of f2, and g2 copy 1 of f1
        (4, {"f1": 1, "f2": 2, "f3": 1}, "f1 f2 f3 f4 f1 f2 f3 g4 f2 g3 g2 g1"),
        # recursion: from the second half's start, f3, and then the first half again
        (
            6,
            {"f1": 2, "f2": 2, "f3": 1, "f4": 2, "f5": 2},
            "f1 f2 f3 f4 f5 f6 f1 f2 f3 f4 f5 g6 g5 g4 f1 f2 g3 g2 g1",
        ),
    ],
)
def test_expand_on_a_chain(layers: int, counts: dict[str, int], expected: str) -> None:
    """Sequences of Algorithm 2, worked out by hand."""
    assert expand(chain(layers), counts) == words(expected)


def test_a_getitem_follows_its_operator() -> None:
    """The count of an operator is that of its outputs, whatever theirs says; each copy picks anew."""
    expected = words("f1 f1_0 f2 f3 f1 f1_0 f1_1 f2 g3 g1")
    assert expand(two_outputs(), {"f1": 1, "f2": 1}) == expected
    assert expand(two_outputs(), {"f1": 1, "f2": 1, "f1_1": 0}) == expected
    assert expand(two_outputs(), {"f1_0": 3, "f1_1": 1}) == identity(two_outputs())


def test_a_deferred_node_runs_where_it_is_first_needed() -> None:
    """What only the backward reads is no root that pulls recomputation to the backward's start."""
    graph = JointGraph.from_mappings(
        {
            "x": (),
            "t": (),
            "f1": ["x"],
            "f2": ["f1"],
            "late": ["f1"],
            "g2": ["t"],
            "g1": ["g2", "late"],
        },
        dict.fromkeys(["f1", "f2", "late", "g2", "g1"], 1),
        forward_outputs=["f2"],
        backward_outputs=["g1"],
        backward=["late", "g2", "g1"],
    )
    graph = with_phases(graph, ["t"])
    assert graph.nodes[graph.index["late"]].phase is Phase.DEFERRED
    assert expand(graph, {"f1": 1}) == words("f1 f2 g2 f1 late g1")


@pytest.mark.parametrize("name", ["x", "t", "g2", "g1", "f2"])
def test_counts_that_mean_nothing_are_taken_as_zero(name: str) -> None:
    """Inputs, gradients and nodes that may not run again are never mirrored."""
    graph = chain(3, keep=["f2"])
    assert expand(graph, {name: 2}) == identity(graph)


def test_a_kept_node_cuts_the_recomputation() -> None:
    """Behind a node that may not run again, a copy reads its only run."""
    assert expand(chain(4, keep=["f2"]), dict.fromkeys(["f1", "f2", "f3"], 1)) == words(
        "f1 f2 f3 f4 f3 g4 g3 f1 g2 g1"
    )


@pytest.mark.parametrize(
    ("counts", "node", "problem"),
    [
        ({"f9": 1}, "f9", "no such node"),
        ({"f1": -1}, "f1", "0 or more, got -1"),
        ({"f1": 1.0}, "f1", "0 or more, got 1.0"),
        ({"f1": "1"}, "f1", "0 or more, got '1'"),
        ({"f1": None}, "f1", "0 or more, got None"),
    ],
)
def test_impossible_counts_are_refused(counts: dict[str, int], node: str, problem: str) -> None:
    """An unknown name, a negative count and one that is not whole are ScheduleErrors."""
    with pytest.raises(ScheduleError, match=problem) as caught:
        expand(chain(2), counts)
    assert (caught.value.node, caught.value.step) == (node, None)


@pytest.mark.parametrize("graph", [None, "f1", torch.nn.Linear(1, 1)])
def test_what_is_no_joint_graph_is_refused(graph: Any) -> None:
    """With a word on where to get one."""
    for function, other in ((bind, ()), (expand, {})):
        with pytest.raises(
            InvalidOptionError, match=r"option 'graph': got .*such as fxremat.capture\(\) makes"
        ):
            function(graph, other)


@pytest.mark.parametrize("schedule", [None, 3, "f1"])
def test_a_schedule_is_a_sequence_of_names(schedule: Any) -> None:
    """One name is none."""
    with pytest.raises(InvalidOptionError, match="expected names of nodes in the order"):
        bind(chain(2), schedule)


@pytest.mark.parametrize("name", [None, 1, ["f1"]])
def test_a_name_that_is_no_text_is_no_node(name: Any) -> None:
    """Unhashable or not."""
    with pytest.raises(ScheduleError, match="at step 0: the graph has no such node to run"):
        bind(chain(2), [name])


def test_counts_are_a_mapping() -> None:
    """What is none is refused as such."""
    with pytest.raises(InvalidOptionError, match="option 'mirror_counts'"):
        expand(chain(2), 3)  # type: ignore[arg-type]


def late_values() -> JointGraph:
    """late and later are deferred and stand in the backward; later needs late."""
    graph = JointGraph.from_mappings(
        {
            **{"x": (), "t": (), "f1": ["x"], "f2": ["f1"]},
            **{"g2": ["t"], "late": ["f1"], "later": ["late", "x"], "g1": ["g2", "later"]},
        },
        dict.fromkeys(["f1", "f2", "late", "later", "g2", "g1"], 1),
        forward_outputs=["f2"],
        backward_outputs=["g1"],
        backward=["late", "later", "g2", "g1"],
    )
    return with_phases(graph, ["t"])


@pytest.mark.parametrize(
    ("counts", "early", "expected"),
    [
        ({}, [], "f1 f2 g2 late later g1"),
        ({}, ["late"], "f1 late f2 g2 later g1"),
        ({}, ["later"], "f1 late later f2 g2 g1"),
        ({"f1": 1}, [], "f1 f2 g2 f1 late later g1"),
        ({"f1": 1}, ["later"], "f1 late later f2 g2 g1"),
        ({"f1": 1}, ["f1"], "f1 f2 g2 f1 late later g1"),
    ],
)
def test_a_deferred_node_may_run_early(counts: dict[str, int], early: list[str], expected: str) -> None:
    """Named early it runs behind its operands in the forward, with the deferred nodes that it needs."""
    graph = late_values()
    assert expand(graph, counts, early) == words(expected)
    validate(graph, words(expected))


@pytest.mark.parametrize(("name", "problem"), [("g1", "only a deferred node"), ("g9", "no such node")])
def test_only_deferred_nodes_may_run_early(name: str, problem: str) -> None:
    """A gradient and an unknown name are ScheduleErrors."""
    with pytest.raises(ScheduleError, match=problem) as caught:
        expand(late_values(), {}, [name])
    assert caught.value.node == name


def test_what_needs_an_ordered_node_does_not_run_early() -> None:
    """The ordered node keeps its place, and so does what reads it."""
    graph = with_order(late_values(), "late")
    assert expand(graph, {}, ["later"]) == identity(graph)


@given(graphs_and_counts(), st.randoms(use_true_random=False))
def test_early_nodes_run_once_and_the_schedule_is_valid(
    drawn: tuple[JointGraph, dict[str, int]], random: Random
) -> None:
    """Any deferred nodes of the backward may be named early, with any mirror counts."""
    graph, counts = drawn
    late = [node.name for node in graph.nodes[graph.boundary :] if node.phase is Phase.DEFERRED]
    early = [name for name in late if random.random() < 0.5]
    schedule = expand(graph, counts, early)
    validate(graph, schedule)
    assert all(schedule.count(name) == 1 for name in early)


def algorithm_1(ends: Sequence[int]) -> list[str]:
    """Algorithm 1 of the paper on a chain whose segments end behind these layers."""
    order = [f"f{layer}" for layer in range(1, ends[-1] + 1)]
    for first, last in reversed(list(zip([0, *ends], ends, strict=False))):
        order += [f"f{layer}" for layer in range(first + 1, last)]  # from the segment's input, recording
        order += [f"g{layer}" for layer in range(last, first, -1)]
    return order


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_expand_is_algorithm_1_on_a_chain(lengths: list[int]) -> None:
    """Mirror count 1 inside of segments and 0 at their ends gives the order of Algorithm 1."""
    ends = [sum(lengths[: segment + 1]) for segment in range(len(lengths))]
    inside = {f"f{layer}": 1 for layer in range(1, ends[-1]) if layer not in ends}
    assert list(expand(chain(ends[-1]), inside)) == algorithm_1(ends)


Copy = tuple[str, int]


def algorithm_2(
    operands: Mapping[str, Sequence[str]],
    forward: Sequence[str],
    backward: Sequence[str],
    m: Mapping[str, int],
) -> list[Copy]:
    """V' of Algorithm 2 as the paper has it; a copy is (name, k), those that nobody reads included."""
    a = {name: (name, 0) for name in operands}
    reads = {(name, 0): [a[operand] for operand in operands[name]] for name in (*forward, *backward)}
    for k in range(1, max(m.values(), default=0) + 1):
        for name in forward:
            if k <= m.get(name, 0):
                copy = (name, k)
                reads[copy] = [a[operand] for operand in operands[name]]
                a[name] = copy
    order = [(name, 0) for name in forward]
    for name in backward:
        reads[name, 0] = [a[operand] for operand in operands[name]]
        order += _ancestors((name, 0), reads, order)
    return order


def _ancestors(copy: Copy, reads: Mapping[Copy, Sequence[Copy]], order: Sequence[Copy]) -> list[Copy]:
    """The copy and those of its ancestors that are not in the order yet, in the order of the names."""
    found: set[Copy] = set()
    stack = [copy]
    while stack:
        each = stack.pop()
        if each in reads and each not in order:
            found.add(each)
            stack += reads[each]
    return sorted(found)


@given(st.data())
def test_expand_is_algorithm_2(data: st.DataObject) -> None:
    """On plain random DAGs expand has the copies of Algorithm 2, those that nobody reads left out."""
    forward = [f"f{layer}" for layer in range(1, data.draw(st.integers(1, 6)) + 1)]
    backward = [f"g{layer}" for layer in range(1, data.draw(st.integers(1, 6)) + 1)]
    operands: dict[str, list[str]] = {"x": [], "t": []}
    for name in forward:
        known = [each for each in operands if each != "t"]
        operands[name] = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    for name in backward:
        above = next(reversed([each for each in operands if each[0] in "gt"]))
        more = data.draw(st.lists(st.sampled_from(["x", *forward]), max_size=2, unique=True))
        operands[name] = [above, *more]
    counts = {name: data.draw(st.integers(0, 3)) for name in forward}
    unread = [name for name in forward if not any(name in reads for reads in operands.values())]
    graph = JointGraph.from_mappings(
        operands,
        dict.fromkeys([*forward, *backward], 1),
        forward_outputs=unread or forward[-1:],
        backward_outputs=backward[-1:],
        backward=backward,
    )
    schedule = expand(graph, counts)
    validate(graph, schedule)
    unpruned = [name for name, _ in algorithm_2(operands, forward, backward, counts)]
    assert prune(graph, unpruned) == schedule


@given(joint_graphs())
def test_no_counts_change_nothing(graph: JointGraph) -> None:
    """With all counts 0 the order is the graph's own."""
    assert expand(graph, {}) == expand(graph, dict.fromkeys(graph.names, 0)) == Schedule(graph.names)


@given(graphs_and_counts())
def test_a_node_runs_no_more_often_than_its_count(drawn: tuple[JointGraph, dict[str, int]]) -> None:
    """A node with count m runs at most 1 + m times, and a kept one once."""
    graph, counts = drawn
    for name, times in Counter(expand(graph, counts)).items():
        node = graph.nodes[graph.index[name]]
        count = counts.get(graph.leader(name) or name, 0)
        assert times <= 1 + (0 if node.keep is not None else count)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(graphs_and_counts())
def test_mirrors_wait_for_the_gradient_that_needs_them(drawn: tuple[JointGraph, dict[str, int]]) -> None:
    """What runs between two gradients is needed by the second one."""
    graph, counts = drawn
    graph = replace(graph, nodes=tuple(replace(node, ordered=False) for node in graph.nodes))
    schedule = expand(graph, counts)
    assume(schedule != identity(graph))  # which keeps the graph's own order, deferred nodes included
    binding = bind(graph, schedule)
    waiting: list[int] = []
    for step in range(binding.boundary, len(binding.nodes)):
        node = graph.nodes[binding.nodes[step]]
        if node.phase is Phase.BACKWARD:
            assert set(waiting) <= _needed(binding, step)
            waiting = []
        elif node.leader is None:
            waiting.append(step)


def _needed(binding: Binding, step: int) -> set[int]:
    """The steps that a step needs, directly or through others."""
    found: set[int] = set()
    stack = [step]
    while stack:
        reads = {read for read in binding.reads[stack.pop()] if read is not None}
        stack += reads - found
        found |= reads
    return found


def test_expand_is_linear() -> None:
    """A chain of 20,000 layers in segments of 100 is expanded, bound and pruned without recursion."""
    graph = chain(20_000)
    schedule = expand(graph, {f"f{layer}": 1 for layer in range(1, 20_000) if layer % 100})
    assert len(schedule) == 40_000 + 20_000 - 200
