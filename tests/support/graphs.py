"""Graphs for tests: drawn by hand, drawn at random, and traced from models drawn at random.

A *drawing* of a random graph goes through ``JointGraph.from_mappings`` and then gets what mappings
cannot say: views, operators with several outputs, deferred nodes, tangents, effects. It keeps the
invariants of a captured graph: nothing is dead, a ``getitem`` stands behind its operator, a node that
depends on a tangent stands behind the boundary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import torch
from hypothesis import settings
from hypothesis import strategies as st
from programs import LAYERS, OPERATORS, Network
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxremat
from fxremat._torch import compilers, graphs
from fxremat.driver.pipeline import make_problem
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.nodes import Node, Phase
from fxremat.graph.schedule import Schedule
from fxremat.predict.problem import Problem

# --- By hand --------------------------------------------------------------------------------------------


def identity(graph: JointGraph) -> Schedule:
    """The schedule that the graph itself is: every node once, in the graph's order."""
    return Schedule(graph.names)


def unread_bytes(graph: JointGraph) -> int:
    """By how much planning may overestimate a peak: states of random numbers that no mirror draws from."""
    return sum(graph.node_bytes(graph.nodes[node].operands[-1]) for node in graph.redrawn)


def chain(
    layers: int,
    sizes: Mapping[str, int] | None = None,
    seconds: Mapping[str, float] | None = None,
    keep: Collection[str] = (),
) -> JointGraph:
    """A chain f1 -> ... -> fn and its backward gn -> ... -> g1, where gi reads f(i-1); 1 byte each.

    ``x`` is the input and ``t`` stands for the tangent; fn is the forward's output, g1 the gradient.
    """
    operands: dict[str, list[str]] = {"x": [], "t": []}
    for layer in range(1, layers + 1):
        operands[f"f{layer}"] = [f"f{layer - 1}" if layer > 1 else "x"]
    for layer in range(layers, 0, -1):
        above = f"g{layer + 1}" if layer < layers else "t"
        operands[f"g{layer}"] = [above, f"f{layer - 1}" if layer > 1 else "x"]
    body = [name for name, reads in operands.items() if reads]
    return JointGraph.from_mappings(
        operands,
        {**dict.fromkeys(body, 1), **(sizes or {})},
        forward_outputs=[f"f{layers}"],
        backward_outputs=["g1"],
        backward=[name for name in body if name.startswith("g")],
        keep=keep,
        seconds=dict.fromkeys(body, 1.0) if seconds is None else seconds,
        name="chain",
    )


def problem(graph: JointGraph, **kwargs: Any) -> Problem:
    """The planning problem of a graph in which every value has a buffer."""
    return make_problem(graph, fusion="none", **kwargs)


def with_views(graph: JointGraph, views: Mapping[str, str]) -> JointGraph:
    """The graph with each key a view of its value; keys in the graph's order."""
    nodes = list(graph.nodes)
    for name, operand in views.items():
        position, source = graph.index[name], graph.index[operand]
        nodes[position] = replace(
            nodes[position], creates=(), recreates=(), views=nodes[source].views, shares=source
        )
    return replace(graph, nodes=tuple(nodes))


def with_outputs(
    graph: JointGraph, name: str, sizes: Sequence[int], recreates: int | None = None
) -> JointGraph:
    """The graph with a node whose outputs are storages of their own, the readers ``name_i`` picking them.

    Args:
        graph: The graph; ``name_0``, ``name_1``, ... stand directly behind ``name``.
        name: The operator.
        sizes: Bytes of each output; some may have no reader.
        recreates: How many outputs a second run makes; all if it is not given.
    """
    first = len(graph.storage_bytes)
    created = tuple(range(first, first + len(sizes)))
    nodes = list(graph.nodes)
    leader = graph.index[name]
    again = created if recreates is None else created[:recreates]
    nodes[leader] = replace(nodes[leader], creates=created, recreates=again, views=created)
    for output, storage in enumerate(created):
        position = graph.index.get(f"{name}_{output}")
        if position is None:
            continue
        keep = None if storage in again else "it is an update"
        nodes[position] = replace(
            nodes[position],
            creates=(),
            recreates=(),
            views=(storage,),
            shares=leader,
            leader=leader,
            keep=keep,
        )
    return replace(graph, nodes=tuple(nodes), storage_bytes=(*graph.storage_bytes, *sizes))


def with_phases(graph: JointGraph, tangents: Collection[str], tangent_bytes: int = 0) -> JointGraph:
    """The graph with its phases found anew: what neither feeds the forward nor a tangent is deferred."""
    forward = _closure(graph, graph.forward_outputs, lambda position: graph.nodes[position].operands)
    seeds = [graph.index[name] for name in tangents]
    backward = _closure(graph, seeds, graph.users.__getitem__)

    def phase(position: int) -> Phase:
        if position < graph.num_inputs:
            return Phase.INPUT
        if position in backward:
            return Phase.BACKWARD
        return Phase.FORWARD if position in forward else Phase.DEFERRED

    nodes = tuple(replace(node, phase=phase(position)) for position, node in enumerate(graph.nodes))
    boundary = 1 + max(i for i, n in enumerate(nodes) if n.phase in (Phase.INPUT, Phase.FORWARD))
    while boundary < len(nodes) and nodes[boundary].leader is not None:
        boundary += 1
    found = replace(graph, nodes=nodes, boundary=boundary, tangent_bytes=tangent_bytes)
    found.check()
    return found


def _closure(
    graph: JointGraph, seeds: Iterable[int | None], step: Callable[[int], Iterable[int]]
) -> set[int]:
    found: set[int] = set()
    stack = [seed for seed in seeds if seed is not None]
    while stack:
        position = stack.pop()
        if position not in found:
            found.add(position)
            stack.extend(step(position))
    return found


class Sketch:
    """A joint fx graph drawn by hand; its values are on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()

    def input(self, name: str, *shape: int) -> fx.Node:
        """Add a placeholder."""
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, name: str, target: Callable[..., Any], *args: Any, **meta: Any) -> fx.Node:
        """Add the call of an operator."""
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda operand: operand.meta["val"]))
        node.meta |= meta
        return node

    def module(self, forward: Sequence[fx.Node], backward: Sequence[fx.Node | None] = ()) -> fx.GraphModule:
        """The module that returns these outputs."""
        self.graph.output((*forward, *backward))
        return fx.GraphModule(self.root, self.graph)

    def joint(self, forward: Sequence[fx.Node], backward: Sequence[fx.Node | None] = ()) -> JointGraph:
        """The joint graph that returns these outputs."""
        return JointGraph.from_fx(self.module(forward, backward), len(forward))


# --- At random ------------------------------------------------------------------------------------------


@dataclass
class _Drawing:
    """The mappings of a graph under construction."""

    operands: dict[str, list[str]]
    sizes: dict[str, int]
    views: dict[str, str]
    outputs: dict[str, tuple[list[int], int]]
    values: list[str]  # what a later node may read: everything but an operator's tuple


def _draw_node(draw: st.DrawFn, drawing: _Drawing, name: str) -> None:
    """Add one operator that reads one to three earlier values."""
    reads = draw(st.lists(st.sampled_from(drawing.values), min_size=1, max_size=3, unique=True))
    drawing.operands[name] = reads
    drawing.sizes[name] = draw(st.integers(0, 9))
    kind = draw(st.sampled_from(["plain", "plain", "plain", "view", "outputs"]))
    if kind == "outputs":
        sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        drawing.outputs[name] = (sizes, draw(st.integers(1, len(sizes))))
        picked = draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=3, unique=True))
        for output in picked:
            drawing.operands[f"{name}_{output}"] = [name]
            drawing.sizes[f"{name}_{output}"] = 0
            drawing.values.append(f"{name}_{output}")
        return
    if kind == "view":
        drawing.views[name] = reads[0]
    drawing.values.append(name)


@st.composite
def joint_graphs(draw: st.DrawFn, max_forward: int = 8, max_backward: int = 8) -> JointGraph:
    """Random joint graphs, with everything that a captured graph may have."""
    inputs = ["x", "y", "t"]
    drawing = _Drawing({name: [] for name in inputs}, {}, {}, {}, ["x", "y"])
    for layer in range(draw(st.integers(1, max_forward))):
        _draw_node(draw, drawing, f"f{layer}")
    in_forward = [name for name in drawing.operands if name not in inputs]
    drawing.values.append("t")
    for layer in range(draw(st.integers(0, max_backward))):
        _draw_node(draw, drawing, f"g{layer}")
    read = {name for reads in drawing.operands.values() for name in reads}
    pickable = [name for name in in_forward if name not in drawing.outputs]
    also_returned = draw(st.sets(st.sampled_from(pickable), max_size=2))
    forward_outputs = [name for name in pickable if name not in read or name in also_returned]
    in_backward = [name for name in drawing.operands if name not in (*inputs, *in_forward)]
    forward, rest = _by_need(drawing.operands, in_forward, forward_outputs)
    order = [*inputs, *forward, *rest, *in_backward]
    graph = JointGraph.from_mappings(
        {name: drawing.operands[name] for name in order},
        drawing.sizes,
        forward_outputs=forward_outputs,
        backward_outputs=[name for name in in_backward if name not in read],
    )
    for name, (sizes, recreates) in drawing.outputs.items():
        graph = with_outputs(graph, name, sizes, recreates)
    graph = with_views(graph, {name: drawing.views[name] for name in order if name in drawing.views})
    graph = with_phases(graph, ["t"], draw(st.integers(0, 9)))
    return replace(graph, nodes=tuple(_draw_keep(draw, graph, node) for node in graph.nodes))


def _by_need(
    operands: Mapping[str, Sequence[str]], names: Sequence[str], outputs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The names in two: those that an output needs, a ``getitem`` with its operator; and the others."""
    needed: set[str] = set(outputs)
    for name in reversed(names):
        if name in needed:
            needed.update(operands[name])
    with_followers = {
        name for name in names if name in needed or ("_" in name and name.partition("_")[0] in needed)
    }
    return [name for name in names if name in with_followers], [n for n in names if n not in with_followers]


def _draw_keep(draw: st.DrawFn, graph: JointGraph, node: Node) -> Node:
    if node.phase is Phase.INPUT or node.leader is not None or node.keep is not None:
        return node
    keep = draw(st.sampled_from([None, None, None, None, "it is forbidden", "it draws random numbers"]))
    return replace(node, keep=keep, ordered=keep == "it draws random numbers")


@st.composite
def graphs_and_counts(draw: st.DrawFn, **sizes: int) -> tuple[JointGraph, dict[str, int]]:
    """A random graph and random mirror counts."""
    graph = draw(joint_graphs(**sizes))
    counted = draw(st.lists(st.sampled_from(graph.names), unique=True))
    return graph, {name: draw(st.integers(0, 3)) for name in counted}


@st.composite
def graphs_and_schedules(draw: st.DrawFn, **sizes: int) -> tuple[JointGraph, Schedule]:
    """A random graph and a random valid schedule: mirror counts, then a few more mirrors anywhere."""
    graph, counts = draw(graphs_and_counts(**sizes))
    schedule = expand(graph, counts)
    for _ in range(draw(st.integers(0, 3))):
        places = _places_of_mirrors(graph, schedule)
        if places:
            at, name = draw(st.sampled_from(places))
            schedule = Schedule((*schedule[:at], *with_getitems(graph, name), *schedule[at:]))
    return graph, schedule


def _places_of_mirrors(graph: JointGraph, schedule: Schedule) -> list[tuple[int, str]]:
    """Where which operator may run again: behind its first run, not between an operator and its outputs."""
    places = []
    for at in range(len(schedule) + 1):
        if at < len(schedule) and graph.nodes[graph.index[schedule[at]]].leader is not None:
            continue
        for name in dict.fromkeys(schedule[:at]):
            node = graph.nodes[graph.index[name]]
            if node.keep is None and node.leader is None:
                places.append((at, name))
    return places


def with_getitems(graph: JointGraph, name: str) -> list[str]:
    """The operator and those of its outputs that may be picked again, as they stand in a schedule."""
    position = graph.index[name]
    return [name] + [node.name for node in graph.nodes if node.leader == position and node.keep is None]


# --- Models ---------------------------------------------------------------------------------------------


def few(count: int) -> settings:
    """So many examples, for tests that trace each; a failure is shrunk, but not explained, which is slow."""
    phases = [each for each in hypothesis.Phase if each is not hypothesis.Phase.explain]
    return settings(max_examples=count, deadline=None, phases=phases)


@st.composite
def networks(draw: st.DrawFn, names: Sequence[str] = (*OPERATORS, *LAYERS), max_steps: int = 8) -> Network:
    """Random models that read recent values most; the weights are those of seed 0."""
    step = st.tuples(st.sampled_from(list(names)), st.integers(-3, -1), st.integers(-3, -1))
    program = draw(st.lists(step, min_size=1, max_size=max_steps))
    torch.manual_seed(0)
    return Network([("linear", -1, -1), *program])


def random_schedule(graph: JointGraph, seed: int) -> Schedule:
    """The schedule of mirror counts from 0 to 2 that the seed gives."""
    generator = random.Random(seed)
    return expand(graph, {name: generator.choice((0, 1, 1, 2)) for name in graph.names})


# --- Running them ---------------------------------------------------------------------------------------


def example_inputs(graph: JointGraph, seed: int = 0) -> list[Any]:
    """A value for each placeholder: random numbers, zeros for integers."""
    torch.manual_seed(seed)
    given = [node for node in graph.fx_nodes[: graph.num_inputs] if node.op == "placeholder"]
    return [_example(node.meta.get("val")) for node in given]


def _example(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return graphs.hint(value)
    if not isinstance(value, Tensor):
        return value
    sizes, strides = ([graphs.hint(each) for each in found] for found in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, strides, dtype=value.dtype)
    return tensor.normal_() if value.dtype.is_floating_point else tensor.zero_()


def run(module: fx.GraphModule, inputs: Sequence[Any], seed: int = 0) -> list[Any]:
    """What the fx graph computes, from the seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return list(fx.Interpreter(module).run(*inputs))


def run_parts(
    parts: tuple[fx.GraphModule, fx.GraphModule], graph: JointGraph, inputs: Sequence[Any]
) -> list[Any]:
    """What the forward and then the backward compute: the outputs of the joint graph, in its order."""
    forward, backward = parts
    given = dict(
        zip((node.name for node in graph.module.graph.find_nodes(op="placeholder")), inputs, strict=True)
    )
    computed = run(forward, [given[name] for name in placeholders(forward)])
    count = len(graph.forward_outputs)
    given |= dict(zip(output_names(forward)[count:], computed[count:], strict=True))
    return computed[:count] + run(backward, [given[name] for name in placeholders(backward)])


def placeholders(module: fx.GraphModule) -> list[str]:
    """Names of an fx graph's inputs."""
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def output_names(module: fx.GraphModule) -> list[str | None]:
    """Names of what an fx graph returns; None for a constant."""
    leaves = graphs.leaves(next(iter(module.graph.find_nodes(op="output"))).args[0])
    return [leaf.name if isinstance(leaf, fx.Node) else None for leaf in leaves]


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Two lists of results agree in every bit."""
    assert len(found) == len(expected)
    for each, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(each, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert each == other


class Function(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class CountOperators(TorchDispatchMode):
    """Counts the operators that run, by name: ``counts["aten.mm"]``; ``relu_`` counts as ``relu``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function.overloadpacket).removesuffix("_")] += 1
        return function(*args, **(kwargs or {}))


def compiled_graphs(
    function: Callable[..., Tensor], *inputs: Any, dynamic: bool | None = None
) -> list[JointGraph]:
    """The joint graphs that ``torch.compile`` makes of a function that returns a loss, after a step of it."""
    found: list[JointGraph] = []

    def partition(module: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append(JointGraph.from_fx(module, num_fwd_outputs))
        return fxremat.partition(found[-1])

    def backend(module: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        return compilers.compile_without_inductor(module, example, partition)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs).backward()
    return found
