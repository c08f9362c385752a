"""The peak of generated code: read right, close to what is measured, and corrected where it is too high."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import attention
import crossed
import models
import pytest
import torch
from devices import threads
from known import off_with
from models import train_step
from networks import Residual, Scored, tanh_mlp
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from unseen import Gated, LowPrecision, no_loops

import fxremat
from fxremat._torch import compilers
from fxremat._torch.lowered import GeneratedCode, gradients_keep_layouts
from fxremat.driver import compilation, pipeline
from fxremat.driver.correction import Correction
from fxremat.driver.pipeline import Choice, planned
from fxremat.graph.schedule import bind
from fxremat.inductor.generated import CodeMemory, Handed, handed, read
from fxremat.measure import measure_peak
from fxremat.predict.models import INDUCTOR, INDUCTOR_MARGIN
from fxremat.predict.problem import Problem

# How far predictions may be off where that is more than 3 %: without a budget dead buffers are held, and what
# the gradient of a convolution reads may be copied.
OFF = {"unet": 0.035}
GRADIENTS_DECIDE = not torch.__version__.startswith(("2.11", "2.12", "2.13", "2.14"))  # layouts, as well
if GRADIENTS_DECIDE:
    OFF["vision_transformer"] = 0.04

NOTHING = Handed({}, {}, 0, {})
NO_VIEWS: Mapping[str, Sequence[str]] = {}


def code(
    body: str,
    sizes: Mapping[str, int],
    is_backward: bool = False,
    viewed: Mapping[str, Sequence[str]] = NO_VIEWS,
) -> GeneratedCode:
    """Generated code with these statements; a buffer's one origin has its name."""
    lines = "".join(f"        {line}\n" for line in body.split("\n"))
    origins = {name: fx.Graph().create_node("placeholder", name, name=name) for name in sizes}
    text = f"class Runner:\n    def call(self, args):\n{lines}"
    return GeneratedCode(
        text, is_backward, sizes.get, lambda name: [origins[name]], lambda name: viewed.get(name, ())
    )


def peak_of(code: GeneratedCode, given: Handed) -> int | None:
    """The peak of generated code; None if it can't be read."""
    lowered = read(code, given)
    return None if lowered is None else lowered.peak_bytes


# --- Reading ----------------------------------------------------------------------------------------------


def test_a_buffer_lives_from_its_allocation_to_its_last_name() -> None:
    """A reuse is another name of the same memory; what is freed counts no more."""
    body = """a = empty_strided_cpu((4,), (1,), torch.float32)
b = reinterpret_tensor(a, (2, 2), (2, 1), 0); del a  # reuse
c = empty_strided_cpu((2,), (1,), torch.float32)
del b
d = empty_strided_cpu((3,), (1,), torch.float32)"""
    assert peak_of(code(body, {"a": 16, "b": 16, "c": 8, "d": 12}), NOTHING) == 24


def test_what_an_operator_returns_goes_with_its_tuple() -> None:
    """Each output is a piece of its own, held by its name and by the tuple's."""
    body = """t = torch.ops.aten.topk.default(x)
a = t[0]
b = t[1]
del t
del a
c = empty_strided_cpu((3,), (1,), torch.float32)"""
    assert peak_of(code(body, {"t": 0, "a": 16, "b": 8, "c": 4}), NOTHING) == 24
    held = body.replace("del t\n", "")
    assert peak_of(code(held, {"t": 0, "a": 16, "b": 8, "c": 4}), NOTHING) == 28


def test_what_an_operator_returns_alone_gets_its_name_later() -> None:
    """It is there from the operator on, once, under both names."""
    body = """t = torch.ops.aten.cumsum.default(x)
a = t
del t
b = empty_strided_cpu((2,), (1,), torch.float32)
del a
c = empty_strided_cpu((5,), (1,), torch.float32)"""
    assert peak_of(code(body, {"t": 0, "a": 16, "b": 8, "c": 20}), NOTHING) == 28


def test_a_view_that_an_operator_returns_keeps_what_it_views() -> None:
    """It has no memory of its own, and that of its operand goes with it."""
    body = """a = empty_strided_cpu((4,), (1,), torch.float32)
t = torch.ops.aten.view_as_real.default(a)
v = t
del t
del a
b = empty_strided_cpu((2,), (1,), torch.float32)
del v
c = empty_strided_cpu((3,), (1,), torch.float32)"""
    sizes = {"a": 16, "t": 0, "v": 16, "b": 8, "c": 12}
    assert peak_of(code(body, sizes, viewed={"v": ["a"]}), NOTHING) == 24


def test_the_backward_begins_with_what_was_saved() -> None:
    """Two values in one storage count once; the storage is freed with the second. The caller's count 0."""
    given = Handed({"v": (5,), "w": (5,), "primals_1": (0,)}, {5: 32, 0: 0}, 4, {})
    body = """v, w, primals_1, tangents_1 = args
args.clear()
del v
a = empty_strided_cpu((4,), (1,), torch.float32)
del w
b = empty_strided_cpu((5,), (1,), torch.float32)"""
    sizes = {"a": 16, "b": 20}
    assert peak_of(code(body, sizes, is_backward=True), given) == 4 + 32 + 16
    assert peak_of(code(body, sizes), given) == 36


def test_scratch_memory_counts_while_its_operator_runs() -> None:
    """Whether the operator returns its result or writes it where it is told to; also under ``with``."""
    given = Handed({}, {}, 0, {"a": 100, "b": 7})
    body = """with torch.cuda._DeviceGuard(0):
    a = extern_kernels.convolution(x, w)
    del a
    b = empty_strided_cuda((4,), (1,), torch.float32)
    extern_kernels.mm(x, y, out=b)"""
    assert peak_of(code(body, {"a": 8, "b": 16}), given) == 108
    assert peak_of(code(body, {"a": 8, "b": 16}), Handed({}, {}, 0, {"b": 7})) == 23


def test_all_outputs_of_an_operator_are_there_while_its_operands_are() -> None:
    """The operands are freed before the items get their names, but only behind the operator."""
    body = """a = empty_strided_cpu((4,), (1,), torch.float32)
t = torch.ops.aten.topk.default(a)
del a
b = t[0]
c = t[1]
del t"""
    assert peak_of(code(body, {"a": 16, "t": 0, "b": 8, "c": 4}), NOTHING) == 28


@pytest.mark.parametrize("is_view", [False, True])
def test_inputs_that_are_saved_as_copies_are_held_by_the_backward(is_view: bool) -> None:
    """The forward returns a buffer in an input's place, or that of a view; the backward frees it like any."""
    graph = fx.Graph()
    weight, image = graph.placeholder("w"), graph.placeholder("x")
    if is_view:
        weight = graph.call_function(print, (weight,), name="w_1")
    given = Handed({weight.name: (), "x": ()}, {}, 0, {})
    forward = replace(
        code("a = empty_strided_cpu((4,), (1,), torch.float32)\nreturn (a, x)", {"a": 16}),
        outputs=[weight, image],
    )
    lowered = read(forward, given)
    assert lowered is not None and lowered.peak_bytes == 16
    backward = f"""{weight.name}, x = args
a = empty_strided_cpu((1,), (1,), torch.float32)
del {weight.name}
b = empty_strided_cpu((4,), (1,), torch.float32)"""
    held = code(backward, {"a": 4, "b": 16}, is_backward=True)
    assert peak_of(held, lowered.given) == 20


def test_outputs_that_are_saved_as_copies_are_held_by_the_backward() -> None:
    """A view whose layout the value's buffer has not is a buffer of its own, as is one of the caller's."""
    graph = fx.Graph()
    mine, saved, viewed = (graph.call_function(print, name=name) for name in ("o", "v", "w"))
    given = Handed({"o": (1,), "v": (1,), "w": (1,)}, {1: 0}, 16, {})
    body = """a = empty_strided_cpu((4,), (1,), torch.float32)
b = empty_strided_cpu((4,), (1,), torch.float32)
return (a, reinterpret_tensor(a, (4,), (1,), 0), b)"""
    forward = replace(code(body, {"a": 16, "b": 16}), outputs=[mine, saved, viewed])
    lowered = read(forward, given)
    assert lowered is not None and lowered.peak_bytes == 32
    backward = """v, w = args
c = empty_strided_cpu((1,), (1,), torch.float32)
del w
d = empty_strided_cpu((4,), (1,), torch.float32)"""
    held = code(backward, {"c": 4, "d": 16}, is_backward=True)
    assert peak_of(held, lowered.given) == 16 + 4 + 16


@pytest.mark.parametrize(
    ("returned", "peak"),
    [
        ("reinterpret_tensor(a, (4, 3, 2, 2), (12, 1, 6, 3), 0)", 8 + 192 + 192),
        ("reinterpret_tensor(a, (4, 3, 2, 2), (12, 4, 2, 1), 0)", 8 + 192),
        ("reinterpret_tensor(a, (s0, 3, 2, 2), (s1, 1, 6, 3), 0)", 8 + 192),  # nobody knows
        ("a", 8 + 192 + 192),
    ],
)
def test_a_gradient_that_lies_otherwise_than_its_weights_is_copied(returned: str, peak: int) -> None:
    """By autograd, when the code has run."""
    weights = fx.Graph().placeholder("w")
    weights.meta["val"] = torch.empty(4, 3, 2, 2, device="meta")
    given = Handed({}, {}, 8, {}, weights={1: weights})
    text = f"a = empty_strided_cpu((48,), (1,), torch.float32)\nreturn (None, {returned})"
    generated = replace(
        code(text, {"a": 192}, is_backward=True), strides={"a": (12, 1, 6, 3)}.get, outputs=[None, None]
    )
    assert peak_of(generated, given) == peak
    assert peak_of(generated, replace(given, weights={})) == 200


def test_code_in_partitions_is_not_read() -> None:
    """It is split for CUDA graphs; a peak of one part would say nothing."""
    whole = code("a = empty_strided_cpu((4,), (1,), torch.float32)", {"a": 16})
    split = f"def partition_0(args):\n    pass\n{whole.text}"
    assert peak_of(replace(whole, text=split), NOTHING) is None


def test_returned_values_are_handed_over_once() -> None:
    """A forward output that the backward reads is live to the end, and no saved value besides."""
    graph = fxremat.JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "da": ["b", "a"]},
        {"a": 4, "b": 2, "da": 4},
        forward_outputs=["b"],
        backward=["da"],
        backward_outputs=["da"],
    )
    given = handed(graph)
    assert given.constant_bytes == 2
    assert [given.storage_bytes[given.storages[name][0]] for name in ("a", "b")] == [4, 0]


# --- Compiled ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_kernels() -> Iterator[None]:
    """Loops do nothing, so that no C++ compiler runs; buffers are those of the real code.

    On one thread no operator reads indices that a loop has computed.
    """
    with no_loops(), threads(1):
        yield


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GeneratedCode]]:
    """The code of each graph that is compiled, in order."""
    found: list[GeneratedCode] = []

    def note(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        found.append(given)
        return read(given, held)

    monkeypatch.setattr(compilation, "read", note)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def trained(name: str, **options: object) -> tuple[fxremat.Report, int]:
    """The report of a small model that took two steps, and the measured peak of a third."""
    module, inputs = models.fresh(models.case(name))
    return stepped(module, *inputs, **options)


def trained_chain(**options: object) -> tuple[fxremat.Report, int]:
    """The same of a few layers, between which a budget has plans to choose from."""
    torch.manual_seed(0)
    module, inputs = tanh_mlp(layers=8, width=32, batch=256)
    return stepped(module, *inputs, **options)


def stepped(module: nn.Module, *inputs: torch.Tensor, **options: object) -> tuple[fxremat.Report, int]:
    """The same of any module."""
    compiled = torch.compile(module, backend="fxremat", options={"fx_graph_cache": False, **options})
    measured = taken(compiled, *inputs)
    return fxremat.reports()[-1], measured


def taken(compiled: nn.Module, *inputs: torch.Tensor) -> int:
    """The measured peak of a training step behind two others."""

    def step() -> None:
        train_step(compiled, inputs)

    for _ in range(2):
        step()
        compiled.zero_grad(set_to_none=True)
    return measure_peak(step, device="cpu").peak_bytes


ALLOCATION = re.compile(r"^ +(\w+) = (?:empty_strided\w*\(|extern_kernels\.|torch\.ops\.|\w+\[\d+\]$)", re.M)


def allocated(code: GeneratedCode) -> Iterator[int]:
    """Bytes of each buffer that a graph's code allocates, be it that an operator does."""
    sizes = (code.buffer_bytes(name) for name in ALLOCATION.findall(code.text))
    return (size for size in sizes if size)


def planned_buffers(graph: fxremat.JointGraph, schedule: Sequence[str]) -> Iterable[int]:
    """Bytes of each buffer that the fusion model expects; a loop that writes over another's has none."""
    lowering = INDUCTOR.lower(graph, bind(graph, schedule))
    assert all(first <= last for first, last, _ in lowering.extra_bytes)
    copies = [size for *_, size in lowering.extra_bytes]
    reused = Counter(-size for size in copies if size < 0)
    sizes = Counter(life.bytes for life in fxremat.profile(graph, schedule, "inductor").intervals)
    return (sizes + Counter(size for size in copies if size > 0) - reused).elements()


def scaled(*factors: float) -> Callable[[GeneratedCode, Handed], CodeMemory | None]:
    """What ``read`` would say of more buffers than there are, or of fewer, by turns; then what it says."""
    left = iter(factors)

    def read_more(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        found, factor = read(given, held), next(left, 1.0)
        return None if found is None else replace(found, peak_bytes=int(found.peak_bytes * factor))

    return read_more


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gated_mlp", "min"),
        ("unet", "min"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("transformer", None),
                ("transformer", "min"),
                ("gated_mlp", None),
                ("unet", None),
                *itertools.product(["resnet", "dropout_mlp"], [None, "min"]),
                ("densenet", "min"),
            )
        ),
    ],
)
def test_the_lowered_peak_is_the_measured_one(name: str, budget: str | None) -> None:
    """Copies of weights in another layout and scratch memory included; and close to the predicted one."""
    report, measured = trained(name, budget=budget)
    assert report.lowered_peak_bytes == measured
    assert abs(report.solution.peak_bytes - measured) <= OFF.get(name, 0.03) * measured
    assert report.peak_bytes == report.lowered_peak_bytes and "the generated code" in report.summary()


@pytest.mark.slow
@pytest.mark.usefixtures("no_kernels", "codes")
def test_a_concatenation_that_runs_again_is_not_copied() -> None:
    """It lies as the gradient of the convolution works that reads it; an operand is read later as well."""
    module, inputs = models.fresh(models.case("unet", "full"))
    report, measured = stepped(module, *inputs, budget="min")
    assert any(name.startswith("cat") for name in report.solution.mirror_counts)
    assert report.solution.peak_bytes == report.lowered_peak_bytes == measured


class Around(nn.Module):
    """An image is concatenated with what comes of its points in fewer places, as in a U-Net."""

    def __init__(self, activation: Callable[[Tensor], Tensor], mode: str) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(32, 8, 1)
        self.activation, self.mode = activation, mode

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        y = torch.sigmoid(self.inner(functional.avg_pool2d(x, 2)))
        y = functional.interpolate(y, scale_factor=2.0, mode=self.mode)
        return torch.tanh(self.last(torch.cat([x, y], 1))).square().mean()


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("activation", "mode", "again"),
    [
        pytest.param(torch.relu, "nearest", (), id="copied to be saved"),
        pytest.param(functional.gelu, "bilinear", (), id="operand of many reads"),
        pytest.param(torch.relu, "bilinear", ("cat",), id="copied, and made again"),
        pytest.param(torch.relu, "nearest", ("cat", "relu"), id="operand that is read later"),
    ],
)
def test_concatenations_of_images(
    activation: Callable[[Tensor], Tensor], mode: str, again: tuple[str, ...], codes: list[GeneratedCode]
) -> None:
    """Those of a forward lie in the order of their sizes where no operand is known to lie otherwise.

    A backward's lie as these work, and what is read later is not held in them.
    """

    def chosen(problem: Problem) -> dict[str, int]:
        graphs.append(problem.graph)
        return {name: 1 for name in problem.graph.names if name in again}

    graphs: list[fxremat.JointGraph] = []
    report, measured = stepped(Around(activation, mode), torch.randn(4, 3, 32, 32), planner=chosen)
    assert report.solution.peak_bytes == report.lowered_peak_bytes == measured
    found = Counter(size for code in codes[-2:] for size in allocated(code))
    told = Counter(planned_buffers(graphs[-1], report.solution.schedule))
    assert found == told


class Messages(nn.Module):
    """Messages along edges, of what the edges were at first and of all messages before."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.second = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            message = second(functional.silu(first(torch.cat((nodes, edges), -1))))
            nodes = nodes + message.sum(1, keepdim=True).expand_as(nodes)
            edges = edges + functional.silu(message)
        return nodes.square().mean()


def test_concatenations_that_run_again_are_written_where_they_do() -> None:
    """Their operands are at hand long before, in the loop that computes the edges of the last of them."""
    compiled = torch.compile(Messages(), backend="fxremat", options={"budget": "min"})
    with fresh_cache(), no_loops():
        compiled(torch.randn(32, 16, 8), torch.randn(32, 16, 8)).backward()
    report = fxremat.reports()[-1]
    ratio = report.peak_bytes / report.baseline_peak_bytes
    assert ratio < 0.55  # 0.48; 0.59 if they are there at once


class Again(nn.Module):
    """A network whose layers are one block, so that gradients of each parameter are added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.block = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + self.block(self.norm(x))
        return x.square().mean()


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize(
    "gate", [torch.tanh, pytest.param(functional.silu, marks=pytest.mark.slow), functional.gelu]
)
def test_what_gradients_of_biases_read_is_written_over(gate: Callable[[Tensor], Tensor]) -> None:
    """A product's operand is made behind the sums that read the same, and takes their place."""
    blocks = [Residual(nn.Sequential(nn.RMSNorm(64), Gated(64, 128, gate))) for _ in range(3)]
    model, inputs = nn.Sequential(*blocks, nn.LayerNorm(64)), torch.randn(4, 128, 64)
    compiled = torch.compile(model, backend="fxremat", options={"budget": 0.85, "fx_graph_cache": False})
    with no_loops():
        compiled(inputs).sum().backward()
    report = fxremat.reports()[-1]
    assert report.lowered_peak_bytes == pytest.approx(report.solution.peak_bytes, rel=0.002)
    assert not any("planned again" in note for note in report.notes)


@pytest.mark.usefixtures("no_kernels", "codes")
def test_gradients_of_one_parameter_are_summed_where_they_are_computed() -> None:
    """Not with their own sum, at the end, until when all that they are summed of would be live."""
    report, measured = stepped(Again(), torch.randn(512, 32), budget=0.7)
    assert report.solution.peak_bytes == pytest.approx(measured, rel=0.002)
    assert report.budget_bytes is not None and measured <= report.budget_bytes
    assert not report.notes


def normalised(before: int, after: int, activation: nn.Module, affine: bool = False) -> nn.Sequential:
    """A convolution of images that are normalised one by one."""
    convolution = nn.Conv2d(before, after, 3, padding=1)
    return nn.Sequential(convolution, nn.InstanceNorm2d(after, affine=affine), activation)


class Normalised(nn.Module):
    """A U-Net of one level, with the same normalisation everywhere."""

    def __init__(self) -> None:
        super().__init__()
        relu = nn.LeakyReLU(0.01)
        self.down = nn.Sequential(normalised(3, 16, relu, True), normalised(16, 16, relu, True))
        self.below = nn.Sequential(normalised(16, 32, relu, True), normalised(32, 32, relu, True))
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Sequential(
            normalised(32, 16, relu, True), normalised(16, 16, relu, True), nn.Conv2d(16, 4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        below = self.up(self.below(functional.max_pool2d(y, 2)))
        return self.last(torch.cat([below, y], 1)).square().mean()


def in_a_row() -> nn.Module:
    """Convolutions and such normalisations under bfloat16."""
    blocks = (normalised(8, 8, nn.SiLU()) for _ in range(4))
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Conv2d(8, 4, 1))
    return Scored(LowPrecision(network))


class Branched(nn.Module):
    """Images that are normalised so, and then read by two convolutions, whose gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(normalised(8, 8, nn.ReLU()) for _ in range(3))
        self.others = nn.ModuleList(nn.Conv2d(8, 8, 5, padding=2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, other in zip(self.layers, self.others, strict=True):
            x = layer(x)
            x = torch.tanh(other(x)) * x
        return x.square().mean()


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            Branched,
            marks=pytest.mark.skipif(
                not torch.__version__.startswith("2.13"),
                reason="others store gradients otherwise: see the limits",
            ),
        ),
        pytest.param(
            in_a_row,
            marks=pytest.mark.skipif(
                gradients_keep_layouts(), reason="torch 2.11 lays out gradients otherwise: see the limits"
            ),
        ),
        pytest.param(Normalised, marks=pytest.mark.slow),
    ],
)
def test_images_that_are_normalised_one_by_one_lie_otherwise(make: Callable[[], nn.Module]) -> None:
    """The channels of all are those of one there: other loops, and nothing written over, but copies."""
    channels = 8 if make is Branched else 3
    report, measured = stepped(make(), torch.randn(4, channels, 64, 64), budget="min")
    assert report.solution.peak_bytes == report.lowered_peak_bytes == report.timeline.peak_bytes == measured
    assert not report.notes


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize(
    ("groups", "activation", "size", "has_sums"),
    [
        pytest.param(4, nn.ReLU, 3, False, marks=pytest.mark.slow),
        (8, nn.ReLU, 5, True),
        pytest.param(
            2,
            nn.SiLU,
            3,
            False,
            marks=pytest.mark.skipif(
                gradients_keep_layouts(), reason="torch 2.11 lays out gradients otherwise: see the limits"
            ),
        ),
    ],
)
def test_what_group_normalisations_take_is_predicted(
    groups: int, activation: Callable[[], nn.Module], size: int, has_sums: bool
) -> None:
    """Their factors are stored, as Inductor does what a view shows that names strides.

    Sums over the channels of small groups are no loops, and much that a gradient reads gets it a buffer.
    """
    layers = ((nn.Conv2d(16, 16, size, padding="same"), nn.GroupNorm(groups, 16)) for _ in range(3))
    parts = [(*each, activation()) for each in layers]
    blocks = [Residual(*each) if has_sums else nn.Sequential(*each) for each in parts]
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Conv2d(16, 4, 1))
    report, measured = stepped(Scored(network), torch.randn(4, 3, 64, 64), budget="min")
    assert [report.solution.peak_bytes, report.lowered_peak_bytes] == pytest.approx([measured] * 2, rel=0.002)
    assert not report.notes


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("none.mish.row", 4.2),  # beside 5.1 where a loop that a gradient reads is no part of its kernel
        ("batches.silu.residual", 6.2),
        ("groups4.relu.residual", 5.2),  # beside 7.1 where sums of gradients are computed where they are read
        ("batches.mish.row", 4.2),
        ("groups1.silu.row", 4.2),  # beside 5.1 where a gradient is taken for a part of sums before it
        # beside 5.1 where views of convolutions' images are saved
        pytest.param("instances.leaky_relu.row", 4.2, marks=off_with("2.15")),
        ("instances_plain.silu.before", 6.2),  # beside 7.1 where a view of the caller's is saved
        # beside 7.1 where merged images are taken for others
        pytest.param("instances.silu.residual", 6.2, marks=off_with("2.11", "2.15")),
        pytest.param("groups1.tanh.residual", 5.2, marks=pytest.mark.slow),
        pytest.param("instances.mish.residual", 5.2, marks=pytest.mark.slow),
    ],
)
def test_images_of_both_orders_take_what_is_predicted(name: str, images: float) -> None:
    """Small blocks, of which some values lie as they were traced: other loops are one than elsewhere."""
    module, (x,) = crossed.network(name)
    report, measured = stepped(module, x, budget="min")
    assert report.solution.peak_bytes == pytest.approx(measured, rel=0.01)
    assert measured < images * x.nbytes
    assert not report.notes or not torch.__version__.startswith("2.13")  # others find it with other plans


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("budget", "is_view"), [(None, True), ("min", False)])
def test_without_a_budget_the_same_views_are_saved(
    budget: str | None, is_view: bool, codes: list[GeneratedCode]
) -> None:
    """As without fxremat, of images that convolutions make; for a budget these images are."""
    module, inputs = crossed.network("instances_plain.silu.before")
    stepped(module, *inputs, budget=budget)
    forward = next(code for code in reversed(codes) if not code.is_backward)
    saved = [node for node in forward.outputs if isinstance(node, fx.Node) and node.name.startswith("view")]
    assert bool(saved) is is_view


@pytest.mark.usefixtures("no_kernels", "codes")
def test_nothing_is_written_over_what_the_gradient_of_pooling_has_added_up() -> None:
    """That lies in the order of its sizes, and images channels last."""
    blocks = (
        nn.Sequential(nn.Conv2d(before, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.01))
        for before in (3, 16, 16)
    )
    first, second, below = blocks
    network = nn.Sequential(first, second, nn.MaxPool2d(2), below, nn.Conv2d(16, 4, 1))
    report, measured = stepped(Scored(network), torch.randn(4, 3, 64, 64), budget="min")
    assert report.solution.peak_bytes == report.lowered_peak_bytes == measured
    assert not report.notes


class Patches(nn.Module):
    """A convolution that works channels last, with weights that are larger than all that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 64), nn.LayerNorm(64)
        self.merge, self.last = nn.Conv2d(64, 128, 2, 2), nn.Linear(128, 2048)

    def forward(self, x: Tensor) -> Tensor:
        """Of images that lie channels last, as those of a network of patches do."""
        patches = self.merge(self.norm(self.first(x)).permute(0, 3, 1, 2))
        return self.last(functional.gelu(patches.mean((2, 3)))).square().mean()


@pytest.mark.usefixtures("no_kernels", "codes")
def test_the_copy_of_a_gradient_is_predicted_and_read() -> None:
    """Where it is the peak: the gradients are all there, and autograd copies one."""
    module = Patches()
    report, measured = stepped(module, torch.randn(2, 4, 4, 8), budget="min")
    weights = sum(4 * each.numel() for each in module.parameters())
    copied = 4 * module.merge.weight.numel()
    assert report.lowered_peak_bytes == measured == report.solution.peak_bytes == weights + copied + 8


class Scaled(nn.Module):
    """A weight, and an operator that Inductor leaves to torch."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32, 64), 0.1))
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(torch.tanh(x * self.weight))


class Energy(nn.Module):
    """Several of them, and a loss."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(Scaled(operator) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x).square().mean()


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize(
    ("operator", "budget"),
    [
        (lambda x: x.cumsum(0), None),
        (lambda x: x.logcumsumexp(0), "min"),
        (lambda x: (torch.complex(x, x) * torch.complex(x, -x)).real.contiguous(), "min"),
        (lambda x: torch.fft.rfft(torch.cat([x, x], -1))[..., :64].abs(), None),
    ],
)
def test_what_operators_return_is_in_the_lowered_peak(
    operator: Callable[[Tensor], Tensor], budget: str | None
) -> None:
    """Results without a tuple, views that only an operator can make, scratch memory."""
    report, measured = stepped(Energy(operator), torch.full((32, 64), 0.5), budget=budget)
    assert report.lowered_peak_bytes == measured


@pytest.mark.usefixtures("no_kernels", "codes")
def test_a_graph_that_another_plan_has_is_read_again() -> None:
    """A cache of single graphs that served it would leave it out of the lowered peak."""
    net, x = Energy(lambda x: x.cumsum(0)), torch.full((32, 64), 0.5)
    with fresh_cache():
        for limit in (1.0, 2.0):
            report, measured = stepped(net, x, fx_graph_cache=True, time_limit_seconds=limit)
            assert report.lowered_peak_bytes == measured and not report.from_cache


@off_with("2.11", "2.15")
@pytest.mark.usefixtures("no_kernels", "codes")
def test_scratch_memory_of_convolutions_of_one_channel() -> None:
    """Their images may be channels first and last at once: it is that of the worse."""
    channels = [1, 4] * 3 + [1]
    layers = [(nn.Conv2d(*each, 3, padding=1), nn.GELU()) for each in itertools.pairwise(channels)]
    net = nn.Sequential(*itertools.chain.from_iterable(layers), nn.Flatten(0), nn.Linear(4 * 128 * 128, 1))
    report, measured = stepped(net, torch.ones(4, 1, 128, 128), budget="min")
    assert report.lowered_peak_bytes == measured
    assert abs(report.solution.peak_bytes - measured) <= 0.03 * measured


@off_with("2.11")
@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize("groups", [1, 64])
def test_scratch_memory_of_convolutions_over_sequences(groups: int) -> None:
    """Inductor copies what lies channels last for them, so that the operator does not."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(64, 64, 5, padding=2, groups=groups)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.mT).mT.tanh()

    head = nn.Flatten(0), nn.Linear(4 * 96 * 64, 1)
    net = nn.Sequential(nn.Linear(64, 64), Mixed(), nn.Linear(64, 64), Mixed(), *head)
    report, measured = stepped(net, torch.ones(4, 96, 64), budget="min")
    assert report.lowered_peak_bytes == measured <= 1.03 * report.solution.peak_bytes


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), "min"])
def test_a_backward_needs_no_more_than_without_a_plan(budget: str | None) -> None:
    """Convolutions of single channels need many times the memory of their operands channels last."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone = nn.Conv2d(128, 128, 7, padding=3, groups=128)
            self.norm = nn.LayerNorm(128)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.alone(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).relu()

    head = nn.Conv2d(3, 128, 4, stride=4), Block(), Block()
    net = nn.Sequential(*head, nn.Flatten(0), nn.Linear(4 * 128 * 4 * 4, 1))
    images = torch.ones(4, 3, 16, 16)
    without = taken(torch.compile(net, backend="inductor"), images)
    report, measured = stepped(net, images, budget=budget)
    assert report.lowered_peak_bytes == measured <= without
    assert measured < 128 * 128 * 7 * 7 * 4 and measured <= 1.03 * report.solution.peak_bytes


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("budget", [None, 0.9])
def test_no_image_is_copied_for_the_gradients_of_single_channels(
    budget: float | None, codes: list[GeneratedCode]
) -> None:
    """Nor is anything that the backward computes: the order of their weights' gradient is not asked for."""
    layers = [(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    net = nn.Sequential(nn.Conv2d(3, 8, 3), *itertools.chain.from_iterable(layers), nn.Flatten(0))
    compiled = torch.compile(net, backend="fxremat", options={"budget": budget, "scope": "graph"})
    compiled(torch.randn(2, 3, 18, 18)).sum().backward()
    backward = codes[-1]
    gradients = [each for each in backward.operations.values() if each.layouts and not each.is_loop]
    read = [layout for each in gradients[:3] for layout in each.layouts[:2]]
    assert len(gradients) == 4 and set(read) == {((2, 8, 16, 16), (2048, 1, 128, 8))}


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("gated_mlp", "min"),
        ("transformer", 0.7),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("gated_mlp", 0.7),
                ("transformer", "min"),
                *itertools.product(["vision_transformer", "resnet", "encoder_decoder"], [0.7, "min"]),
            )
        ),
    ],
)
def test_buffers_are_those_that_the_code_allocates(
    name: str, budget: float | str, codes: list[GeneratedCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by size, of both graphs; those that the model has and the code has not, and the reverse."""
    graphs = []
    monkeypatch.setattr(
        pipeline, "planned", lambda graph, *rest: planned(graphs.append(graph) or graph, *rest)
    )
    report, _ = trained(name, budget=budget)
    found = Counter(size for code in codes[-2:] for size in allocated(code))
    told = Counter(planned_buffers(graphs[-1], report.solution.schedule))
    different = sum(size * count for size, count in ((found - told) + (told - found)).items())
    assert different <= OFF.get(name, 0.03) * sum(size * count for size, count in found.items())


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.usefixtures("codes")
def test_the_gradient_of_pooling_on_several_threads() -> None:
    """An operator reads copies of an index and of summands, and writes where a loop has put zeros."""
    with threads(2):
        report, measured = trained("unet", budget="min")
    assert report.lowered_peak_bytes == measured
    assert abs(report.solution.peak_bytes - measured) <= 0.01 * measured


@pytest.mark.usefixtures("no_kernels", "codes")
def test_the_lowered_peak_of_a_budget_is_the_measured_one() -> None:
    """Where both graphs are compiled at once; it is within the budget."""
    report, measured = trained("gated_mlp", budget=0.7)
    assert report.lowered_peak_bytes == measured
    assert report.budget_bytes is not None and measured <= report.budget_bytes


@pytest.mark.usefixtures("no_kernels", "codes")
def test_code_above_the_budget_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan that is lower by the excess, which the report notes; the given up ones leave no report."""
    count = len(fxremat.reports())
    plain, _ = trained_chain(budget=0.7)
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "read", scaled(2.0))
    report, measured = trained_chain(budget=0.7)
    assert report.budget_bytes is not None and measured <= report.budget_bytes
    assert report.solution.peak_bytes < plain.solution.peak_bytes
    assert any("planned again" in note for note in report.notes)
    assert len(fxremat.reports()) == count + 2


@pytest.mark.usefixtures("no_kernels", "codes")
def test_code_without_a_lower_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells what the code would take."""
    monkeypatch.setattr(compilation, "read", scaled(*[100.0] * 99))
    with pytest.raises(Exception, match=r"no plan fits a budget of .* code that Inductor generates"):
        trained_chain(budget=0.7)


@pytest.mark.usefixtures("no_kernels", "codes")
def test_code_below_the_budget_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan that is faster, and whose code is within the budget as well."""
    plain, _ = trained_chain(budget=0.7)
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "read", scaled(*[0.8] * 99))
    report, _ = trained_chain(budget=0.7)
    assert report.solution.peak_bytes > plain.solution.peak_bytes
    assert report.solution.seconds < plain.solution.seconds
    assert (report.lowered_peak_bytes or 0) <= (report.budget_bytes or 0)
    assert any("planned again" in note for note in report.notes)


@pytest.mark.usefixtures("no_kernels", "codes")
def test_a_faster_plan_whose_code_is_too_much_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that was there before is compiled."""
    plain, _ = trained_chain(budget=0.7)
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "read", scaled(0.8, 0.8, 1.5))
    report, _ = trained_chain(budget=0.7)
    assert report.solution.schedule == plain.solution.schedule


@pytest.mark.usefixtures("no_kernels", "codes")
@pytest.mark.parametrize("is_within", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_between_the_least_and_what_was_too_much(is_within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plan keeps the budget but the least, which leaves much of it, one plan between is tried."""
    least, _ = trained_chain(budget="min")
    too_much = int(0.95 * least.baseline_peak_bytes)
    lowest, choose = least.solution.schedule, Correction.choose
    chosen: list[tuple[str, ...]] = []

    def note(correction: Correction, problem: Problem) -> Choice:
        choice = choose(correction, problem)
        chosen.append(choice.solution.schedule)
        return choice

    def read_more(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        found = read(given, held)
        is_low = chosen[-1] == lowest or (is_within and lowest in chosen)
        return found if found is None or is_low else replace(found, peak_bytes=too_much)

    torch._dynamo.reset()
    monkeypatch.setattr(Correction, "choose", note)
    monkeypatch.setattr(compilation, "read", read_more)
    report, measured = trained_chain(budget=0.9)
    assert report.budget_bytes is not None and measured <= report.budget_bytes < too_much
    assert len(set(chosen)) > 2 and chosen.count(lowest) == (1 if is_within else 2)
    assert (report.solution.schedule == lowest) == (not is_within)
    assert report.solution.seconds <= least.solution.seconds


@pytest.mark.usefixtures("no_kernels", "codes")
def test_code_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a budget a part of it is left free; without one nothing is compiled again."""
    monkeypatch.setattr(compilation, "read", lambda *_: None)
    free, _ = trained_chain(budget=None)
    assert free.lowered_peak_bytes is None and not free.notes
    torch._dynamo.reset()
    report, _ = trained_chain(budget=0.7)
    assert report.lowered_peak_bytes is None
    assert report.peak_bytes <= (1 - INDUCTOR_MARGIN) * (report.budget_bytes or 0)


@pytest.mark.usefixtures("no_kernels", "codes")
def test_a_budget_that_needs_nothing_gives_the_usual_code(codes: list[GeneratedCode]) -> None:
    """That of no budget, to the letter; the first line has the number of the graph."""
    trained_chain(budget=None)
    torch._dynamo.reset()
    trained_chain(budget="1GiB")
    usual, found = ([each.text.split("\n", 1)[1] for each in part] for part in (codes[:2], codes[2:]))
    assert found == usual


def occurrences(schedule: Sequence[str]) -> list[str]:
    """The steps of a schedule, by the names that nodes have in the rewritten graph."""
    seen: Counter[str] = Counter()
    found = []
    for name in schedule:
        found.append(f"{name}_mirror{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def external_kernels(given: GeneratedCode) -> list[str]:
    """The nodes that the external kernels of some code were made for, in its order."""
    calls = re.finditer(r"(?:(\w+) = )?(?:extern_kernels|torch\.ops\.aten)\.(?:.*\bout=(\w+))?", given.text)
    buffers = [call[2] or call[1] for call in calls]
    return [given.origins(buffer)[0].name for buffer in buffers if buffer and given.origins(buffer)]


class Products(nn.Module):
    """Products with loops between them, so that those of the backward are each the operand of one product."""

    def __init__(self) -> None:
        super().__init__()
        trained = [True, False, False, False]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8, each) for each in trained)

    def forward(self, x: Tensor) -> Tensor:
        for weights in self.weights:
            x = torch.sin(torch.mm(x, weights))
        return x.sum()


@pytest.mark.usefixtures("no_kernels", "codes")
def test_a_loop_that_recomputation_waits_for_is_computed_before_it() -> None:
    """Right behind the product that it reads, before others are computed again: so the code has it."""

    def again(problem: Problem) -> list[str]:
        graph = problem.graph
        products = [name for name in graph.names[: graph.boundary] if name.startswith("mm")]
        behind = graph.names.index("mul_1") + 1
        again = (products[0], "sin", products[1], "sin_1")
        return [*graph.names[:behind], *again, *graph.names[behind:]]

    report, measured = stepped(Products(), torch.randn(4096, 64), planner=again)
    assert report.solution.peak_bytes == report.lowered_peak_bytes == measured


@pytest.mark.slow
@pytest.mark.usefixtures("no_kernels")
def test_kernels_run_again_where_the_schedule_has_them(codes: list[GeneratedCode]) -> None:
    """In the code of a transformer's backward all external kernels are in the schedule's order."""
    torch.manual_seed(0)
    module, inputs = attention.transformer(blocks=12, width=32, heads=2, batch=16, time=64)
    options = {"budget": 0.3, "fx_graph_cache": False}
    torch.compile(module, backend="fxremat", options=options)(*inputs)
    (backward,) = (each for each in codes if each.is_backward)
    order = external_kernels(backward)
    scheduled = [name for name in occurrences(fxremat.reports()[-1].solution.schedule) if name in set(order)]
    assert len([name for name in order if "_mirror" in name]) > 12 and len(order) == len(set(order))
    assert order == scheduled


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("is_left", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_code_of_both_halves_is_read(
    codes: list[GeneratedCode], monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """Where Inductor's cache has the forward of a plan that was given up, its peak is no forgotten part."""
    if is_left:  # as behind a process that was killed
        monkeypatch.setattr(compilers, "_uncached_on_error", lambda graphs: contextlib.nullcontext())
    note = compilation.read
    module = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    )
    halves = []
    with fresh_cache():
        for _ in range(2):
            factors = iter([1.0, 1.1])  # the first plan's backward holds too much

            def read_more(given: GeneratedCode, held: Handed) -> CodeMemory | None:
                found, factor = note(given, held), next(factors, 1.0)  # noqa: B023
                return None if found is None else replace(found, peak_bytes=int(found.peak_bytes * factor))

            monkeypatch.setattr(compilation, "read", read_more)
            torch._dynamo.reset()
            compilers._remembered.clear()
            compiled = torch.compile(module, backend="fxremat", options={"budget": 0.8})
            compiled(torch.randn(64, 32)).sum().backward()
            halves.append([each.is_backward for each in codes])
            codes.clear()
    plans = len(halves[0]) // 2
    assert plans > 1 and halves[0] == plans * [False, True]
    assert halves[1] == (plans if is_left else plans - 1) * [False, True]  # the last is a cache's, if it may
