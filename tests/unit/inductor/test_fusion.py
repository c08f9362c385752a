"""The fusion model: what gets a buffer, when kernels run, and what Inductor copies on a CPU.

The figures that it is good for are measured in bench/budgets.py and test_lowered.py; here stand the
rules.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from devices import threads
from graphs import Function
from torch import fx, nn
from torch._inductor import inductor_prims
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import fxremat
from fxremat._torch import compilers, scheduling
from fxremat.errors import InvalidOptionError
from fxremat.graph.collector import collector_paused
from fxremat.graph.joint import JointGraph
from fxremat.graph.loops import Kind, Loop, Reduction
from fxremat.graph.nodes import MIRROR, Phase
from fxremat.graph.schedule import bind
from fxremat.inductor.facts import facts
from fxremat.inductor.grouping import MAX_DISTANCE, Grouping, group
from fxremat.inductor.inlining import Inlining
from fxremat.inductor.kernels import Kernel, leads_to
from fxremat.inductor.layout import channels_last, input_copies
from fxremat.inductor.order import KERNELS, SEGMENT, STRETCH, may_fuse
from fxremat.inductor.pooling import inlined_offsets
from fxremat.inductor.segments import segments, waiting
from fxremat.inductor.timing import in_order, spread
from fxremat.memory.lowering import Lowering
from fxremat.predict.models import FUSIONS, INDUCTOR, model


def captured(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> JointGraph:
    """The joint graph of a function's sum over inputs of these shapes."""
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return fxremat.capture(Function(function), *args, loss=torch.sum)


def on_cuda(graph: JointGraph) -> JointGraph:
    """The graph as if its tensors were on a GPU, with or without one."""
    mode, device = FakeTensorMode(), torch.device("cuda", 0)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        strided = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, strided, device)

    for node in graph.fx_nodes:
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, moved, node.meta["val"])
    return replace(graph)


def lowered(graph: JointGraph) -> tuple[Lowering, dict[str, int]]:
    """The graph's own order lowered, and the step of each name."""
    lowering = INDUCTOR.lower(graph, bind(graph, graph.names))
    return lowering, {name: step for step, name in enumerate(graph.names)}


def copies(graph: JointGraph) -> list[tuple[str, str, int]]:
    """Positive extra bytes, with the names of the steps."""
    lowering, _ = lowered(graph)
    names = graph.names
    return [(names[first], names[last], size) for first, last, size in lowering.extra_bytes if size > 0]


def test_unknown_models_are_refused() -> None:
    """With the names that there are."""
    with pytest.raises(InvalidOptionError, match="inductor"):
        model("inducter")


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_graph_made_of_mappings_has_one_model(fusion: str) -> None:
    """Nothing is known of its operators that could be fused, or that could write over an operand."""
    graph = JointGraph.from_mappings({"x": (), "a": ["x"], "b": ["a"]}, {"a": 4, "b": 4})
    assert model(fusion).on(graph).name == "none"
    assert model(fusion).lower(graph, bind(graph, graph.names)).materialised == [True, True]
    assert model(fusion).profile(graph, graph.names).live_bytes.tolist() == [4, 8]


def test_the_baseline_writes_nothing_in_place() -> None:
    """Unless the compiler does so by itself."""
    assert [model(fusion).baseline.name for fusion in FUSIONS] == ["none", "none", "inductor"]


def test_facts_go_with_their_graph() -> None:
    """They are found once, and keep no graph alive."""
    graph = captured(torch.tanh, (4,))
    found = weakref.ref(graph)
    assert facts(graph) is facts(graph)
    del graph
    gc.collect()
    assert found() is None


def test_lowering_leaves_nothing_to_the_collector() -> None:
    """It is paused while thousands of schedules are lowered: no kernel of one is in a cycle, nor inlining."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(torch.cat([x.relu(), x.exp()], 1), weight, padding=1)

    graph = captured(function, (2, 4, 8, 8), (4, 8, 3, 3))
    binding = bind(graph, fxremat.expand(graph, {"relu": 1}))
    with collector_paused():
        found = group(graph, binding)
        assert found.inlining.slices.cats and any(kernel and kernel.producers for kernel in found.kernels)
        del found
        left = [each for each in gc.get_objects() if isinstance(each, (Grouping, Inlining, Kernel))]
    assert not left


# --- Kernels ----------------------------------------------------------------------------------------------


def kernel(step: int, *producers: Kernel, is_loop: bool = True) -> Kernel:
    """A kernel of one step."""
    found = Kernel(4, None, is_loop=is_loop, runs_at=step)
    found.take(step, Loop(Kind.POINTWISE, 4), step, producers, step)
    return found


def test_a_kernel_waits_for_all_that_it_reads() -> None:
    """Its first loop stands at step 1, but a loop of it reads what step 3 makes."""
    late = kernel(3)
    early = kernel(1, late)
    assert in_order([early, late]) == [late, early] and early.runs_at == 3


def test_kernels_that_waited_run_behind_each_other() -> None:
    """Loops and products at 3, of which those behind the first have waited, the last in the forward's end."""
    loops = kernel(3), kernel(3)
    waiting_ones = [kernel(3, is_loop=False), kernel(3, is_loop=False)]
    last = kernel(7, is_loop=False)
    spread([*loops, *waiting_ones, last], 6, 8)
    assert [each.runs_at for each in (*loops, *waiting_ones, last)] == [3, 4, 5, 5, 7]


def test_what_windows_alone_read_is_computed_there() -> None:
    """Behind the product that stands between; what something else reads, too, is computed where it stands."""

    def function(x: torch.Tensor, w: torch.Tensor, is_alone: bool) -> torch.Tensor:
        y = x * w.mean()
        z = torch.mm(w, w) if is_alone else torch.mm(w, w) + y.sum()
        return nn.functional.avg_pool2d(y, 2) + z.mean()

    for is_alone in (True, False):
        graph = captured(lambda x, w, alone=is_alone: function(x, w, alone), (2, 3, 8, 8), (6, 6))
        binding = bind(graph, fxremat.expand(graph, {"mul": 1}))
        step = next(
            step for step, node in enumerate(binding.nodes) if graph.names[node - graph.num_inputs] == "mul"
        )
        inlining = Inlining(graph, binding)
        pool = graph.names.index("avg_pool2d")
        assert (inlining.realized_at[step] == pool) == is_alone


def test_paths_between_kernels_are_found() -> None:
    """A kernel leads to what reads it, directly or not; never to what is older."""
    a = kernel(0)
    b = kernel(1, a)
    c = kernel(2, b)
    assert leads_to(a, [a, c]) and leads_to(a, [b]) and not leads_to(b, [b, a]) and not leads_to(c, [])


def test_a_path_through_a_step_that_came_late_is_found() -> None:
    """``b``, which is older than ``c``, has read of ``a``; then ``a`` takes a step that reads ``c``."""
    a = kernel(0)
    b, c = kernel(1, a), kernel(2)
    assert not leads_to(c, [b])
    a.take(3, Loop(Kind.POINTWISE, 4), 3, [c], 3)
    assert leads_to(c, [b, c])


def test_outer_reductions_run_with_their_like() -> None:
    """A loop over what they read goes through it in another order; one over what they write does not."""
    inner, outer = Reduction(24, 4), Reduction(24, 6, is_inner=False)
    loop = Kernel(24, None, [0])
    assert loop.admits(24, inner) and not loop.admits(24, outer)
    rows, columns = Kernel(24, inner, [0]), Kernel(24, outer, [0])
    assert rows.admits(24, None) and rows.admits(4, None) and not columns.admits(24, None)
    assert columns.admits(6, None) and columns.admits(24, outer) and not columns.admits(24, inner)


def test_what_an_expensive_function_is_part_of_is_stored() -> None:
    """Where two loops read it; the exponential itself is inlined. A cheap value is computed in both.

    The error function is as cheap as a sum.
    """

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        dear, cheap = torch.exp(a) + 1, torch.erf(a) + 1
        first = torch.mm(dear / 3 + cheap, w)
        return torch.mm(first, dear * 4 - cheap + first)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    lowering, step = lowered(graph)
    assert [lowering.materialised[step[name]] for name in ("exp", "add", "add_1")] == [False, True, False]


def test_an_expensive_function_that_is_broadcast_is_stored() -> None:
    """Each of its elements is read several times; one that is read once by each of its rows is inlined."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        first = torch.mm(a * torch.sigmoid(a.sum(1, keepdim=True)), w)
        return torch.mm(first * torch.sigmoid(a), w)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    assert [inlining.realized[graph.names.index(name)] for name in ("sigmoid", "sigmoid_1")] == [True, False]


@pytest.mark.parametrize("rounds", [10, 20, 30])
@pytest.mark.parametrize("place", [lambda graph: graph, on_cuda])
def test_what_takes_many_operations_is_stored(rounds: int, place: Callable[[JointGraph], JointGraph]) -> None:
    """On a GPU of fewer than on a CPU. Two a round, a sum, two buffers, and a number that counts once."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        for _ in range(rounds):
            a = torch.abs(a) * 2.0
        return torch.mm(torch.abs(a + w), x)

    graph = place(fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6)))
    inlining = Inlining(graph, bind(graph, graph.names))
    is_stored = inlining.realized[graph.names.index("add")]
    assert is_stored == (2 * rounds + 4 > compilers.max_operations(graph.is_on_cpu))


@pytest.mark.parametrize(("first", "is_stored"), [(0, False), (3, True)])
def test_other_parts_of_a_value_are_other_operations(first: int, is_stored: bool) -> None:
    """What is computed in two places of a loop counts once; twice where these are other parts of it."""
    rounds = compilers.max_operations(on_cpu=True) // 3

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        for _ in range(rounds):
            a = torch.abs(a) + w
        both = torch.abs(a[:3] + a[first : first + 3])
        return torch.mm(both * both.sum(), x)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    total = graph.names.index(f"add_{rounds}")
    assert not inlining.realized[graph.names.index(f"add_{rounds - 1}")]
    assert (inlining._operations.counts[total] > compilers.max_operations(on_cpu=True)) == is_stored


@pytest.mark.parametrize("is_other", [False, True])
def test_elements_at_other_places_are_other_operations(is_other: bool) -> None:
    """What is computed of elements that are picked counts for each of the places, these do once."""
    rounds = compilers.max_operations(on_cpu=True) // 3

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, places = torch.mm(x, w), (torch.arange(12) * 5 % 6).view(2, 6)
        for _ in range(rounds):
            a = torch.abs(a) + w
        first = a[places[0]]
        both = torch.abs(first + (a[places[1]] if is_other else first))
        return torch.mm(both * both.sum(), x)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    total = graph.names.index(f"add_{rounds}")
    assert (inlining._operations.counts[total] > compilers.max_operations(on_cpu=True)) == is_other


def test_what_is_stored_before_counts_where_it_is_computed_again() -> None:
    """A loop that computes all again from the product on is as long as that, whatever the forward stored."""
    rounds = compilers.max_operations(on_cpu=True) // 6

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        for _ in range(rounds):
            a = torch.abs(a) + w
        stored = torch.mm(a, x)
        for _ in range(rounds):
            a = torch.abs(a) + w
        last = torch.mm(a * stored, x)
        both = torch.abs(a * last)
        return torch.mm(both * both.sum(), x)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    names = list(graph.names)
    sums = [name for name in names if name.startswith("add")]
    factor = names.index("mul_1")
    again = [name for name in names[:factor] if name.startswith(("abs", "add"))]
    inlining = Inlining(graph, bind(graph, names[:factor] + again + names[factor:]))
    assert inlining.realized[names.index(sums[rounds - 1])] and not inlining.realized[factor + len(again) - 1]
    total = factor + len(again) + 1
    assert inlining._operations.counts[total] == 4 * rounds + 5  # these, abs and mul, two products, and w


@pytest.mark.parametrize("parts", [3, 5, 10])
def test_short_sums_are_computed_inside_unless_they_read_much(parts: int) -> None:
    """Inductor makes no reduction of them; each of a buffer's places that they read counts."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = torch.mm(x, w).view(-1, parts, 6).sum(1)
        return torch.mm(torch.abs(total), w) + torch.cos(total)

    graph = fxremat.capture(Function(function), torch.randn(30, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    total = graph.names.index("sum_1")
    assert inlining.realized[total] == (parts > 4)
    assert (inlining.kinds[total] is Kind.REDUCTION) == (parts == 10)


def test_what_a_view_names_the_strides_of_is_stored() -> None:
    """Where it stands; what another view shows is computed inside of the sum that reads both."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        strided, viewed = torch.abs(x), torch.abs(w)
        a = torch.mm(w, w)
        b = strided.as_strided((6, 6), (1, 6)) + viewed.view(36).view(6, 6)
        return torch.mm(torch.abs(a + b), a)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    at = [graph.names.index(name) for name in ("abs_1", "abs_2")]
    assert [inlining.realized[step] for step in at] == [True, False]
    assert inlining.realized_at[at[0]] == at[0]


def test_what_products_alone_read_is_computed_for_the_first() -> None:
    """Not where it stands, before another product."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.abs(x)
        b = torch.mm(w, w)
        return torch.mm(torch.mm(b, a), a)

    graph = on_cuda(fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6)))
    lowering, step = lowered(graph)
    assert step["abs_1"] < step["mm"] and lowering.runs_at[step["abs_1"]] == step["mm_1"]


def test_loops_before_the_product_that_a_value_is_realized_for_compute_it_themselves() -> None:
    """The product reads it through a view, so that nobody knows of it when the sum is made."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        b = torch.abs(a) * 2
        total = torch.mm(b.sum(0, keepdim=True), w)
        return torch.mm(b.view(12, 3), total.view(3, 2)).sum() + b.sum()

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    at = graph.names.index
    assert inlining.early_readers[at("mul")] == [at("sum_1")]
    assert inlining.leaves[at("sum_1")] == (at("mm"),)
    assert inlining.realized_at[at("mul")] == at("mm_2")


@pytest.mark.parametrize("is_sum", [False, True])
def test_a_sum_with_a_product_says_nothing_of_what_it_will_read(is_sum: bool) -> None:
    """Of a value that a product reads, and others do, Inductor knows where it is computed."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        b = torch.abs(torch.mm(x, w)) + x
        total = torch.mm(b.sum(0, keepdim=True).expand(6, 6), w)
        return torch.addmm(b, total, w) if is_sum else torch.mm(b, total)

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    at = graph.names.index
    assert inlining.realized_at[at("add")] == at("addmm" if is_sum else "add")
    assert (at("add") in inlining.leaves[at("sum_1")]) != is_sum


@pytest.mark.parametrize("reads_twice", [False, True])
def test_a_loop_that_runs_again_for_one_kernel_is_made_there(reads_twice: bool) -> None:
    """Inductor computes it for the kernel; where it stands, it would be held meanwhile."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4, bias=False), nn.GELU())]
    if reads_twice:
        layers[1] = nn.Tanh()  # whose gradient is a loop that reads its result, as the product does
    graph = fxremat.capture(nn.Sequential(*layers), torch.randn(2, 4, requires_grad=True), loss=torch.sum)
    name, at = "tanh" if reads_twice else "gelu", graph.names.index("gelu_backward") + 1
    schedule = (*graph.names[:at], name, *graph.names[at:])
    inlining = Inlining(graph, bind(graph, schedule))
    is_stored = reads_twice and graph.loops[graph.index[name]].is_expensive  # to some versions of torch
    assert inlining.realized_at[at] == (at if is_stored else schedule.index("mm_5"))


@pytest.mark.parametrize("several", [False, True])
def test_a_view_with_several_readers_says_that_a_product_will_read_it(several: bool) -> None:
    """Inductor stores there what is computed of several buffers, but not of one and of single numbers."""

    def function(x: torch.Tensor, w: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        b = a * (x if several else number)
        view = b.view(12, 3)
        first = torch.mm(torch.mm(w, w)[:, :3].reshape(3, 6), w)
        return torch.mm(view.t(), view) @ first + b.sum()

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6), torch.randn(()))
    inlining = Inlining(graph, bind(graph, graph.names))
    at = graph.names.index
    step, view = at("mul"), at("view")
    assert graph.operator("view") == "aten.view.default"
    product = next(each for each in range(view, len(graph.names)) if step in inlining.leaves[each])
    assert inlining.realized_at[step] == (view if several else product) != step


@pytest.mark.parametrize(("is_number", "place"), [(False, "mul"), (True, "mm_2")])
def test_single_numbers_are_no_buffers_that_a_product_would_want(is_number: bool, place: str) -> None:
    """Inductor stores at once what a product and others read, if it is computed of several buffers."""

    def function(x: torch.Tensor, w: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        b = torch.mm(x, w) * (number if is_number else x)
        return torch.mm(b, torch.mm(w, w)).sum() + b.sum()

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6), torch.randn(()))
    inlining = Inlining(graph, bind(graph, graph.names))
    assert inlining.realized_at[graph.names.index("mul")] == graph.names.index(place)


@pytest.mark.parametrize("is_read_twice", [False, True])
def test_what_a_product_and_others_read_through_a_view_is_copied(is_read_twice: bool) -> None:
    """Loops compute it themselves, also behind the product."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        b = torch.relu(torch.mm(x, w))
        view = b.view(12, 3)
        first = torch.mm(view, w[:3, :3])
        second = torch.mm(view.t(), first) if is_read_twice else first
        return torch.mm(torch.abs(b), w).sum() + second.sum()

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    inlining = Inlining(graph, bind(graph, graph.names))
    at = graph.names.index
    assert inlining.leaves[at("abs_1")] == (at("mm" if is_read_twice else "relu"),)
    assert inlining.realized_at[at("relu")] == at("mm_1")


def test_a_loop_that_is_late_joins_those_before() -> None:
    """It is there for a product, reads what a kernel of rows does, and has the ranges of one of its loops."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b, bias = torch.mm(x, w), torch.mm(w, x), torch.mm(w, w).sum(0)
        late, dear = torch.abs(a + bias), torch.exp(b * bias)
        rows = dear * (dear * a).sum(1, keepdim=True)
        return torch.mm(torch.mm(rows, w), late.t())

    graph = fxremat.capture(Function(function), torch.randn(8, 8), torch.randn(8, 8))
    kernels, at = group(graph, bind(graph, graph.names)).kernels, graph.names.index
    assert at("abs_1") < at("exp") and kernels[at("abs_1")] is kernels[at("sum_2")] is kernels[at("exp")]


def test_a_loop_that_recomputation_waits_for_is_computed_before_it() -> None:
    """What a product reads of it would else be held while others are computed again."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.abs(torch.mm(torch.sin(torch.mm(x, w)), w)), w)

    inputs = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)
    graph = fxremat.capture(Function(function), *inputs, loss=torch.sum)
    behind = graph.names.index("mul") + 1
    plain, again = graph.names, [*graph.names[:behind], "mm", "sin", *graph.names[behind:]]
    reader = next(name for name in plain[behind:] if name.startswith("mm"))
    for schedule, runs_at in ((plain, plain.index(reader)), (again, behind)):
        lowering = INDUCTOR.lower(graph, bind(graph, schedule))
        assert lowering.runs_at[schedule.index("mul")] == runs_at


def test_loops_behind_what_waits_for_a_kernel_are_no_part_of_it() -> None:
    """The product that runs again waits for a gradient, and the next gradient reads that product."""

    def function(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.sigmoid(torch.mm(x, u)) * torch.mm(x, v), w)

    graph = captured(function, *[(6, 6)] * 4)
    behind = graph.names.index("mul_1") + 1
    plain, again = graph.names, [*graph.names[:behind], "mm_1", *graph.names[behind:]]
    for schedule, is_one in ((plain, True), (again, False)):
        kernels = group(graph, bind(graph, schedule)).kernels
        assert (kernels[behind - 1] is kernels[schedule.index("sigmoid_backward")]) == is_one


def test_a_loop_that_runs_again_is_not_put_off_past_a_product() -> None:
    """For a gradient that reads it, too, and another product."""

    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.exp(torch.mm(x, v)), w)

    graph = captured(function, *[(6, 6)] * 3)
    first = graph.names.index("expand") + 1
    schedule = [*graph.names[:first], "mm", "exp", *graph.names[first:]]
    kernels = group(graph, bind(graph, schedule)).kernels
    assert kernels[first + 1] is not None and kernels[first + 1] is not kernels[schedule.index("mul")]
    marks = {SEGMENT: 1, STRETCH: 1}
    backward = fx.Graph()
    x = backward.placeholder("x")
    one, other = (backward.call_function(torch.ops.aten.exp.default, (x,)) for _ in range(2))
    mirror = {MIRROR: "exp"}
    for again, number, is_one in ((mirror, 1, True), (mirror, 2, False), ({}, 2, True)):
        one.meta, other.meta = {**marks, KERNELS: 1, **again}, {**marks, KERNELS: number}
        assert may_fuse([[one]], [[other]]) == is_one


def test_nothing_is_written_over_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the waiting is over, as by a loop between two runs of a product."""

    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, v)
        return torch.mm(torch.exp(product), w) * torch.sin(product)

    graph = captured(function, *[(6, 6)] * 3)
    first = graph.names.index("expand") + 1
    schedule = [*graph.names[:first], "mm", "exp", "mm", *graph.names[first:]]
    binding = bind(graph, schedule)
    assert first + 1 not in INDUCTOR.lower(graph, binding).replaces
    monkeypatch.setattr(Inlining, "waited_by", lambda self, step: ())
    assert INDUCTOR.lower(graph, binding).replaces[first + 1] == first


def test_kernels_are_put_where_their_first_buffer_stands() -> None:
    """Or behind what they read: the one of 0 and 5 reads 4, and does not pull it before 1."""

    def node(name: str, order: int, *reads: str) -> SimpleNamespace:
        found = [SimpleNamespace(name=read) for read in (*reads, "of another graph")]
        return SimpleNamespace(place=order, get_buffer_names=lambda: [name], unmet_dependencies=found)

    inductors = [node("e", 4), node("a", 0, "e"), node("b", 1), node("c", 2, "b")]
    ordered = scheduling.by_place(inductors, attrgetter("place"))
    assert [each.get_buffer_names()[0] for each in ordered] == ["b", "c", "e", "a"]
    other = inductors[::-1]
    assert scheduling.by_place(other, attrgetter("place")) == other  # no order to begin with


def test_what_is_read_in_another_order_is_made_where_it_stands() -> None:
    """A kernel that was made for the reading in another order does not wait for that."""
    graph = fx.Graph()
    first = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    second = graph.call_function(torch.ops.aten.neg.default, (first,))
    laid = graph.call_function(inductor_prims.force_stride_order, (first, [0, 1]))
    graph.output((second, laid))

    kernels = [_kernel_of("second", second), _kernel_of("first", laid)]
    assert _ordered(kernels, graph, ()) == ["first", "second"]


def test_a_later_view_says_nothing_of_where_a_buffer_is_made() -> None:
    """Inductor says that the buffer was made for it, though it is none of what the buffer computes."""
    graph = fx.Graph()
    first = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    second = graph.call_function(torch.ops.aten.neg.default, (first,))
    later = graph.call_function(torch.ops.aten.expand.default, (first, [2, 3]))
    graph.output((second, later))
    kernel = _kernel_of("first", later, computed=first)
    assert scheduling._origins(kernel) == [[first]]
    assert _ordered([_kernel_of("second", second), kernel], graph, ()) == ["first", "second"]


def test_what_is_made_for_a_product_runs_right_before_it() -> None:
    """And behind what stands between, as Inductor makes them; nothing runs before it stands there."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.relu.default, (x,))
    second = graph.call_function(torch.ops.aten.sum.default, (first,))
    product = graph.call_function(torch.ops.aten.mm.default, (first, x))
    graph.output((second, product))
    for step, node in enumerate((first, second, product)):
        node.meta["step"] = step
    kernels = [_kernel_of("second", second), _kernel_of("first", first)]
    kernels.append(_kernel_of("product", product, "first"))
    assert _ordered(kernels, graph, (2, 1, 2)) == ["second", "first", "product"]
    assert _ordered(kernels, graph, (0, 1, 2)) == ["first", "second", "product"]
    assert _ordered(kernels, graph, (0, 0, 0)) == ["first", "second", "product"]


def test_a_kernel_is_of_the_group_of_what_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of what stands where it runs, which may be of the next one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.relu.default, (x,))
    second = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((first, second))
    for step, node in enumerate((first, second)):
        node.meta["step"] = step
    seen: list[Sequence[int | None]] = []
    monkeypatch.setattr(scheduling, "_end_groups", lambda nodes, numbers: seen.append(numbers))
    kernels = [_kernel_of("first", first), _kernel_of("second", second)]
    assert _ordered(kernels, graph, (1, 1), (4, 5)) == ["first", "second"] and seen == [[4, 5]]


def _kernel_of(name: str, node: fx.Node, *reads: str, computed: fx.Node | None = None) -> SimpleNamespace:
    buffer = SimpleNamespace(get_origin_node=lambda: node, get_origins=lambda: {computed or node})
    return SimpleNamespace(
        name=name,
        get_nodes=lambda: [SimpleNamespace(node=buffer, get_outputs=list)],
        get_buffer_names=lambda: [name],
        unmet_dependencies=[SimpleNamespace(name=read) for read in reads],
    )


def _ordered(
    kernels: list[SimpleNamespace], graph: fx.Graph, made_at: Sequence[int], groups: Sequence[int] = ()
) -> list[str]:
    """The names of kernels in the order in which Inductor is made to run them."""
    settings = scheduling.running(scheduling.Order({}, made_at, groups, frozenset(), "step"))
    with settings, V.set_graph_handler(SimpleNamespace(graph=graph)):
        return [each.name for each in torch._inductor.config._post_fusion_custom_pass(kernels)]


@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_loop_that_writes_to_a_concatenation_is_of_it(is_read_before: bool) -> None:
    """It runs there and is fused there, unless a kernel reads before what it computes."""
    graph = fx.Graph()
    first = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    second = graph.call_function(torch.ops.aten.neg.default, (first,))
    cat = graph.call_function(torch.ops.aten.cat.default, ([first],))
    after = graph.call_function(torch.ops.aten.abs.default, (first,))

    def reads(node: fx.Node, kind: type) -> SimpleNamespace:
        reader = object.__new__(kind)
        reader.node = SimpleNamespace(get_origin_node=lambda: node)
        return SimpleNamespace(node=reader)

    buffer = SimpleNamespace(get_origin_node=lambda: first, get_origins=lambda: {first})
    loop = SimpleNamespace(node=buffer)
    readers = [reads(cat, NopKernelSchedulerNode), reads(after, BaseSchedulerNode)]
    readers += [reads(second, BaseSchedulerNode)] if is_read_before else []
    loop.get_outputs = lambda: [SimpleNamespace(users=readers)]
    kernel = SimpleNamespace(get_nodes=lambda: [loop])
    assert scheduling._origins(kernel) == [[first if is_read_before else cat]]


def test_loops_of_different_sizes_free_their_operands_one_after_the_other() -> None:
    """Between two products, too, where Inductor runs them in one call on a CPU as long as no plan ends it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = torch.mm(x, w), torch.mm(x[:3], w)
        return torch.mm(torch.tanh(b), torch.tanh(a))

    graph = captured(function, (6, 6), (6, 6))
    lowering, step = lowered(graph)
    assert lowering.runs_at[step["tanh"]] == lowering.read_until[step["tanh"]] == step["tanh"]
    assert lowering.runs_at[step["tanh_1"]] == step["tanh_1"]


def test_sequences_are_freed_when_they_are_copied() -> None:
    """A gradient reads copies of what does not lie in order, in place of it unless it is read behind that."""

    def extra_bytes(activation: Callable[[torch.Tensor], torch.Tensor]) -> int:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv1d(activation(x).mT, w)

        lowering, step = lowered(captured(function, (2, 6, 4), (4, 4, 1)))
        place = lowering.runs_at[step["convolution_backward"]]
        return sum(size for first, _, size in lowering.extra_bytes if first == place)

    assert extra_bytes(torch.tanh) - extra_bytes(lambda x: 2 * x) == 4 * 2 * 6 * 4


def test_sequences_are_copied_together_on_a_cpu_alone() -> None:
    """On a GPU the first is freed before the second is copied, and neither counts beside the results."""

    def function(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d((x @ y).mT, w).mT @ y

    def extra_bytes(graph: JointGraph) -> int:
        lowering, step = lowered(graph)
        place = lowering.runs_at[step["convolution_backward"]]
        return sum(size for first, _, size in lowering.extra_bytes if first == place)

    shapes = (2, 6, 4), (4, 4, 1), (4, 4)
    one_bytes = 2 * 6 * 4 * 4
    results_bytes = one_bytes + 4 * 4 * 4
    assert extra_bytes(captured(function, *shapes)) == 2 * one_bytes - results_bytes
    assert extra_bytes(on_cuda(captured(function, *shapes))) == 0


def test_a_loop_that_puts_runs_apart_from_those_around_it() -> None:
    """On a CPU it is fused with none, and none with it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6) % 4
        a = torch.sigmoid(torch.mm(x, w))
        put = torch.zeros(4, 6).index_put((places,), a * 2, accumulate=True)
        return torch.mm(torch.tanh(put), torch.mm(w, a))

    lowering, step = lowered(captured(function, (6, 6), (6, 6)))
    assert lowering.runs_at[step["sigmoid"]] < lowering.runs_at[step["index_put"]]
    assert lowering.materialised[step["index_put"]]


@pytest.mark.parametrize("place", [lambda graph: graph, on_cuda])
def test_a_loop_that_puts_joins_on_a_gpu_what_computes_its_values(
    place: Callable[[JointGraph], JointGraph],
) -> None:
    """And runs with it, before the product between. What reads its result is computed behind it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6) % 4
        a = torch.sigmoid(torch.mm(x, w))
        b = torch.mm(w, x)
        put = torch.zeros(6, 6).index_put((places,), a * 2, accumulate=True)
        return torch.mm(torch.tanh(put), b)

    graph = place(captured(function, (6, 6), (6, 6)))
    lowering, step = lowered(graph)
    is_with_values = lowering.runs_at[step["sigmoid"]] == lowering.runs_at[step["index_put"]]
    assert is_with_values != graph.is_on_cpu
    assert lowering.materialised[step["index_put"]]
    assert lowering.runs_at[step["tanh"]] > lowering.runs_at[step["mm_1"]]


# --- Concatenations ---------------------------------------------------------------------------------------


def doubled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A value that is read by a concatenation and, later, by another operator."""
    a = torch.sigmoid(torch.mm(x, w))
    return torch.cat([a, torch.mm(x, w)]).sum() + a.sum()


def test_what_is_put_in_places_is_computed_there() -> None:
    """By the loop that puts it; nor have the zeros that it is added to a buffer besides the result."""

    def function(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6) % 4
        return torch.zeros(4, 6).index_put((places,), torch.abs(x) * 2, accumulate=True)

    lowering, step = lowered(captured(function, (6, 6)))
    assert [lowering.materialised[step[name]] for name in ("zeros", "mul", "index_put")] == [
        False,
        False,
        True,
    ]


def test_operands_are_computed_into_a_concatenation() -> None:
    """Neither the product nor the sigmoid has a buffer of its own; the cat is there with the first."""
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    graph = fxremat.capture(Function(doubled), x, w)
    lowering, step = lowered(graph)
    assert lowering.held_in == {step["mm"]: step["cat"], step["sigmoid"]: step["cat"]}
    assert [lowering.materialised[step[name]] for name in ("mm", "sigmoid", "cat")] == [False, False, True]
    assert lowering.runs_at[step["cat"]] == lowering.runs_at[step["mm"]]


def test_a_concatenation_is_there_with_what_it_holds() -> None:
    """However many kernels run between: a loop reads the sigmoid at once, and it is concatenated later."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.sigmoid(torch.mm(x, w))
        b = a * 2
        for _ in range(2 * MAX_DISTANCE):
            b = torch.mm(b, w)
        return torch.cat([a, b]).sum() + a.sum()

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    lowering, step = lowered(graph)
    last = f"mm_{2 * MAX_DISTANCE}"
    assert lowering.held_in == {step["sigmoid"]: step["cat"], step[last]: step["cat"]}
    assert lowering.runs_at[step["cat"]] == lowering.runs_at[step["sigmoid"]]


def test_what_the_backward_reads_has_its_own_buffer() -> None:
    """With gradients the sigmoid is saved, so that it is copied to the concatenation; the product is not."""
    graph = captured(doubled, (6, 6), (6, 6))
    lowering, step = lowered(graph)
    assert lowering.held_in == {step["mm"]: step["cat"]} and lowering.materialised[step["sigmoid"]]
    assert (step["sigmoid"], lowering.runs_at[step["sigmoid"]]) in lowering.read_later  # copied at once


class Chain(nn.Module):
    """Concatenations of concatenations, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.third = nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = torch.cat([a, self.second(torch.tanh(a))], 1)
        c = torch.cat([b, self.third(torch.tanh(b))], 1)
        return c.square()


def test_a_concatenation_is_not_held_in_another() -> None:
    """Its layout is fixed when it is made, so both have buffers of their own, also where they run again."""
    graph = fxremat.capture(Chain(), torch.randn(2, 3, 8, 8), loss=torch.sum)
    again = fxremat.expand(graph, {"cat": 1, "cat_1": 1, "tanh_1": 1})
    binding = bind(graph, again)
    lowering = INDUCTOR.lower(graph, binding)
    cats = [step for step, name in enumerate(again) if name in ("cat", "cat_1")]
    assert len(cats) == 4
    assert lowering.held_in == {} and all(lowering.materialised[step] for step in cats)


def test_what_is_read_through_a_view_is_copied() -> None:
    """A slice of the sigmoid is concatenated: the sigmoid has a buffer of its own."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.sigmoid(torch.mm(x, w))
        return torch.cat([a[:3], torch.mm(x, w)]).sum() + a.sum()

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6, 6))
    lowering, step = lowered(graph)
    assert lowering.held_in == {step["mm"]: step["cat"]} and lowering.materialised[step["sigmoid"]]


# --- What is computed where it is read --------------------------------------------------------------------


class Pooled(nn.Module):
    """A pooling between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.third = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.last = nn.Conv2d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(torch.tanh(self.first(x)), 2)
        return self.last(torch.tanh(self.third(torch.tanh(self.second(pooled)))))


def test_offsets_of_a_pooling_that_runs_again_hold_what_was_pooled() -> None:
    """Saved offsets have a buffer; those of a mirror are computed where the gradient reads them."""
    graph = fxremat.capture(Pooled(), torch.randn(2, 3, 8, 8), loss=torch.sum, compiler="inductor")
    name, indices = "_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices"
    saved = fxremat.expand(graph, {indices: 1})
    assert list(inlined_offsets(graph, bind(graph, saved))) == []
    again = list(fxremat.expand(graph, {name: 1, indices: 1, "tanh_1": 1, "tanh_2": 1}))
    boundary = bind(graph, again).boundary
    mirror = len(again) - 1 - again[::-1].index(name)
    pooled = again[mirror : mirror + 3]
    del again[mirror : mirror + 3]
    again[boundary:boundary] = pooled  # so that other segments lie between pooling and reader
    binding = bind(graph, again)
    ((pooling, readers),) = inlined_offsets(graph, binding)
    assert again[pooling] == name and pooling >= binding.boundary
    lowering = INDUCTOR.lower(graph, binding)
    assert lowering.read_until[pooling] >= max(readers) > pooling


def test_outputs_of_an_operator_are_told_apart() -> None:
    """A normalisation reads five buffers, mean and variance among them: used twice, it is stored."""

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, 1, keepdim=True)
        y = (x - mean) * (variance + 1).rsqrt() * weight + bias
        return torch.mm(y * 2, x) * y

    graph = fxremat.capture(Function(function), torch.randn(6, 6), torch.randn(6), torch.randn(6))
    lowering, step = lowered(graph)
    assert lowering.materialised[step["add_1"]]


def test_of_two_products_the_second_goes_with_their_sum() -> None:
    """The first has a buffer, to which the second is added."""
    graph = captured(lambda x, w: torch.mm(x, w) + torch.mm(w, x), (6, 6), (6, 6))
    lowering, step = lowered(graph)
    assert lowering.materialised[step["mm"]] and not lowering.materialised[step["mm_1"]]


def test_what_a_product_with_its_sum_reads_is_stored() -> None:
    """Though the product has no buffer of its own."""
    graph = captured(lambda x, w: torch.mm(x * 2.0, w) + x, (6, 6), (6, 6))
    again = fxremat.expand(graph, {"mul": 1})
    lowering = INDUCTOR.lower(graph, bind(graph, again))
    assert lowering.materialised[again.index("mul")] and not lowering.materialised[again.index("mm")]


@pytest.mark.parametrize(("factor", "is_stored"), [(lambda y: 2.0, False), (lambda y: y, True)])
def test_what_windows_read_often_is_stored(
    factor: Callable[[torch.Tensor], torch.Tensor | float], is_stored: bool
) -> None:
    """Unless it is computed from a single buffer, which might as well be read often; saved values are."""
    shape = (2, 3, 8, 8)
    graph = captured(lambda x, y: nn.functional.avg_pool2d(x * factor(y), 2) + y[..., :4, :4], shape, shape)
    again = fxremat.expand(graph, {"mul": 1})
    assert INDUCTOR.lower(graph, bind(graph, again)).materialised[again.index("mul")] == is_stored


def test_what_a_scatter_adds_to_is_computed_for_it() -> None:
    """Zeros have no buffer besides that of the result."""

    def function(x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(6).reshape(2, 3) % 2
        return torch.zeros(2, 3).scatter_add(0, index, x * 2)

    lowering, step = lowered(captured(function, (2, 3)))
    assert lowering.materialised[step["scatter_add"]]
    assert not any(lowering.materialised[step[name]] for name in step if name.startswith(("full", "zeros")))


@pytest.mark.parametrize("count", [1, 2])
def test_one_thread_scatters_in_a_loop(count: int) -> None:
    """It computes where it adds and what; for several threads an operator reads both."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, 3).scatter_add(0, (x > 0).long(), x * 2)

    with threads(count):
        lowering, step = lowered(captured(function, (2, 3)))
    assert lowering.materialised[step["scatter_add"]]
    assert lowering.materialised[step["mul"]] == (count > 1)


# --- Layout -----------------------------------------------------------------------------------------------


class Joined(nn.Module):
    """A convolution of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 2, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.first(x))
        return self.second(torch.cat([a, a * 2], 1))


def recomputed_cat() -> tuple[JointGraph, tuple[str, ...]]:
    """The graph of Joined, and a schedule that makes the concatenation again in the backward."""
    graph = fxremat.capture(Joined(), torch.randn(2, 3, 8, 8), loss=torch.sum)
    return graph, fxremat.expand(graph, {"cat": 1, "mul": 1})


def test_images_and_weights_are_copied_channels_last() -> None:
    """From the start until the gradients have read them."""
    graph = fxremat.capture(Joined(), torch.randn(2, 3, 8, 8), loss=torch.sum)
    found = sorted((max(steps), size) for _, steps, size in input_copies(graph, bind(graph, graph.names)))
    sizes = [2 * 3 * 8 * 8 * 4, 4 * 3 * 3 * 3 * 4, 2 * 8 * 3 * 3 * 4]
    assert sorted(size for _, size in found) == sorted(sizes)
    first_backward = graph.names.index("convolution_1") + 1
    assert all(last >= first_backward for last, _ in found)


class Rounded(nn.Module):
    """A convolution of an image and weights in fewer bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x.bfloat16(), self.weight.bfloat16())


def test_what_leads_to_a_convolution_is_copied_where_it_is_saved() -> None:
    """Not where the convolution's operands are saved in its place."""
    graph = fxremat.capture(Rounded(), torch.randn(2, 3, 8, 8), loss=torch.sum)
    kept = list(input_copies(graph, bind(graph, graph.names)))
    assert kept == []
    operands = {each.name: 1 for each in graph.nodes if each.phase is Phase.FORWARD and "copy" in each.name}
    again = bind(graph, fxremat.expand(graph, operands))
    copies = list(input_copies(graph, again))
    assert sorted(size for *_, size in copies) == sorted([4 * 2 * 3 * 8 * 8, 4 * 4 * 3 * 3 * 3])
    assert all(first == 0 and min(steps) >= again.boundary for first, steps, _ in copies)


class Narrowing(nn.Module):
    """Two convolutions, the second with fewer channels if need be."""

    def __init__(self, channels: int, last: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, last, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    ("channels", "last", "is_copied"), [(72, 72, True), (16, 16, False), (72, 36, False)]
)
def test_inductor_says_where_convolutions_work_channels_last(
    channels: int, last: int, is_copied: bool
) -> None:
    """On a GPU not where all are small, or one has half as many channels, whatever runs again."""
    graph = on_cuda(
        fxremat.capture(Narrowing(channels, last), torch.randn(2, channels, 4, 4), loss=torch.sum)
    )
    for again in ({}, {"convolution": 1, "tanh": 1}):
        found = list(input_copies(graph, bind(graph, fxremat.expand(graph, again))))
        assert bool(found) == is_copied
        assert all(first == 0 for first, *_ in found)


def test_a_recomputed_concatenation_lies_as_its_convolutions_work() -> None:
    """None of these gets a copy, and no operand is held in it."""
    graph = fxremat.capture(Joined(), torch.randn(2, 3, 8, 8), loss=lambda y: torch.tanh(y).sum())
    both = fxremat.expand(graph, {"cat": 1, "mul": 1, "convolution_1": 1, "tanh_1": 1})
    size = 2 * 8 * 8 * 8 * 4
    for made, schedule in (recomputed_cat(), (graph, both)):
        binding = bind(made, schedule)
        lowering = INDUCTOR.lower(made, binding)
        assert size not in [bytes_ for *_, bytes_ in lowering.extra_bytes]
        assert not any(cat >= binding.boundary for cat in lowering.held_in.values())


def test_a_part_of_a_gradient_is_copied_alone() -> None:
    """The convolution's gradient reads half of the channels of what is expanded and divided."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, weight, padding=1)
        return torch.cat([x, y], 1).mean((2, 3)) ** 2

    graph = captured(function, (2, 4, 8, 8), (4, 4, 3, 3))
    lowering, step = lowered(graph)
    assert not lowering.materialised[step["div"]]
    assert ("slice_2", "convolution_backward", 2 * 4 * 8 * 8 * 4) in copies(graph)


def test_what_leads_to_a_convolution_lies_channels_last() -> None:
    """In the forward all does; a backward without a recomputed convolution has no such values."""
    graph, again = recomputed_cat()
    binding = bind(graph, again)
    found = channels_last(graph, binding)
    assert found and max(found) < binding.boundary


def test_no_layout_follows_from_convolutions_that_wait() -> None:
    """Inductor does not see them as convolutions; nor does it go on behind the last that it sees."""
    graph = fxremat.capture(Chain(), torch.randn(2, 3, 8, 8), loss=torch.sum)
    binding = bind(graph, graph.names)
    names = [graph.names[step] for step in sorted(channels_last(graph, binding))]
    assert {"tanh", "cat", "tanh_1"} <= set(names) and "pow_1" not in names
    convolutions = [step for step, name in enumerate(graph.names) if name.startswith("convolution")]
    assert channels_last(graph, binding, convolutions) == frozenset()


def test_the_first_operator_of_each_segment_waits() -> None:
    """Loops do not wait, nor does the first operator of all, which has nothing to wait for."""
    steps = [("a", True), (None, True), ("b", False), ("c", True), ("d", True), (None, True), ("c", True)]
    assert waiting(steps, segments(steps), lambda step: ()) == [3, 6]
