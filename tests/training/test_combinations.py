"""What training scripts combine with the backend: loops, parts, hooks, attention, precision, distribution."""

from __future__ import annotations

import copy
import importlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import (
    Program,
    assert_same_outcome,
    assert_trains_alike,
    compiled,
    everything,
    outcome,
    program,
    square,
)

import fxremat
from fxremat import InfeasibleBudgetError, JointGraph
from fxremat.device import calibrate
from fxremat.emit.partition import partition
from fxremat.graph import ops
from fxremat.options.options import Options

RUNS: Counter[str] = Counter()  # how often the custom operators below ran on real tensors
OPTIONS = {"planner": everything(1), "compiler": "eager"}


@pytest.fixture(autouse=True)
def runs() -> Iterator[None]:
    """Each test counts from zero."""
    RUNS.clear()
    yield


class Layer(nn.Module):
    """A linear layer and two functions, of which the backward reads what the first gave."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sin()


class Layers(nn.Module):
    """Some layers in a row."""

    def __init__(self, count: int = 3, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def twins(make: Callable[[], nn.Module] = Layers) -> tuple[nn.Module, nn.Module]:
    """A module and a copy of it."""
    module = make()
    return module, copy.deepcopy(module)


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    """Every parameter has the same gradient in both, bit for bit, and there are some."""
    gradients = {name: each.grad for name, each in expected.named_parameters() if each.grad is not None}
    assert gradients
    assert_same_outcome(
        {name: each.grad for name, each in found.named_parameters() if each.grad is not None}, gradients
    )


def reports_of(action: Callable[[], Any]) -> tuple[fxremat.Report, ...]:
    """The reports that an action adds."""
    count = len(fxremat.reports())
    action()
    return fxremat.reports()[count:]


# --- Training loops -------------------------------------------------------------------------------------

LOOPS: dict[str, Callable[[nn.Module, Any], None]] = {}


def loop(function: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any], None]:
    """Register a loop that trains a module, which is called as the second argument."""
    LOOPS[function.__name__] = function
    return function


@loop
def with_everything(module: nn.Module, call: Any) -> None:
    """Autocast to float16, a scaler, two batches a step, clipped gradients, a schedule of rates."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = call(square(2 * step + part)).float().square().mean() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


@loop
def with_a_closure(module: nn.Module, call: Any) -> None:
    """LBFGS runs the step as often as its line search likes."""
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = call(square()).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@loop
def with_an_average_and_evaluations(module: nn.Module, call: Any) -> None:
    """Weights are averaged in a copy of what is compiled, which is evaluated between the steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(call)
    for seed in range(3):
        optimizer.zero_grad()
        call(square(seed)).square().sum().backward()
        optimizer.step()
        average.update_parameters(call)
        call.eval()
        with torch.no_grad():
            assert average(square()).isfinite().all() and call(square()).isfinite().all()
        call.train()


@loop
def with_a_state_that_is_carried_on(module: nn.Module, call: Any) -> None:
    """Truncated backpropagation: what one call returns enters the next as a value that is no leaf."""
    state = square()
    for seed in range(3):
        state = call(call(state) + square(seed))
        state.sum().backward()
        state = state.detach()


@loop
def adversarial(module: nn.Module, call: Any) -> None:
    """The parameters are frozen for every other call, whose input gets the gradient."""
    for seed in range(2):
        x = square(seed, requires_grad=True)
        module.requires_grad_(False)
        (gradient,) = torch.autograd.grad(call(x).sum(), x)
        module.requires_grad_(True)
        call(x.detach() + gradient).sum().backward()


@pytest.mark.parametrize("name", LOOPS)
def test_training_loops_reach_the_same_weights(name: str) -> None:
    """With everything computed again; the last gradients are the same, too."""
    module, subject = twins()
    LOOPS[name](module, module)
    assert reports_of(lambda: LOOPS[name](subject, compiled(subject, planner=everything(1))))
    assert_same_outcome(dict(subject.named_parameters()), dict(module.named_parameters()))
    assert_same_gradients(subject, module)


def test_a_compiled_optimizer_has_no_backward() -> None:
    """The step of an optimizer may be compiled with the same options; there is nothing to plan."""
    module, subject = twins()
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, subject))
    step = torch.compile(second.step, backend="fxremat", options=OPTIONS)
    for each in (module, subject):
        each(square()).sum().backward()
    torch.compile(first.step, backend="aot_eager")()  # which rounds as it does, in every version of torch
    assert reports_of(step) == ()
    assert_same_outcome(dict(subject.named_parameters()), dict(module.named_parameters()))


def test_a_whole_step_may_be_compiled() -> None:
    """Dynamo breaks the graph at the backward: the forward with its backward is planned, the rest runs."""
    module, subject = twins()

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    plain = torch.compile(step, backend="aot_eager")
    fast = torch.compile(step, backend="fxremat", options=OPTIONS)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, subject))
    for seed in range(2):
        expected = plain(module, first, square(seed))
        found = fast(subject, second, square(seed))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_same_gradients(subject, module)


# --- What is compiled -----------------------------------------------------------------------------------


def test_parts_of_a_model_are_graphs_of_their_own() -> None:
    """``Module.compile`` on each layer: two plans serve three layers, one with a gradient of its input."""
    module, subject = twins()
    for layer in subject.layers:
        layer.compile(backend="fxremat", options=OPTIONS)
    reports = reports_of(lambda: subject(square()).sum().backward())
    module(square()).sum().backward()
    assert len(reports) == 2
    assert_same_gradients(subject, module)


def test_a_part_that_is_compiled_inside_of_a_whole_follows_the_whole() -> None:
    """The options of the inner torch.compile, which could not be served, are not looked at."""
    module, subject = twins()
    subject.layers[1] = compiled(subject.layers[1], budget=1)
    (report,) = reports_of(lambda: compiled(subject, budget="min")(square()).sum().backward())
    module(square()).sum().backward()
    assert report.budget == "min"
    for found, expected in zip(subject.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


def test_fullgraph_refuses_what_would_be_several_budgets() -> None:
    """With fullgraph=True one graph is compiled, or none."""
    broken = lambda x: (x.tanh(), torch._dynamo.graph_break(), x.sin())[0]  # noqa: E731
    whole = torch.compile(Layers(), backend="fxremat", fullgraph=True, options=OPTIONS)
    assert len(reports_of(lambda: whole(square()).sum().backward())) == 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="fxremat", fullgraph=True, options=OPTIONS)(square(1, True))


def test_sizes_that_change_are_planned_anew_with_the_same_budget() -> None:
    """The second size makes the graph dynamic; the fraction is taken of each graph's own peak."""
    module, subject = twins(lambda: Layers(6))
    call = compiled(subject, budget=0.9)
    count = len(fxremat.reports())
    for rows in (64, 48, 96, 80):
        x = torch.randn(rows, 4)
        assert_same_outcome(outcome(call, [x]), outcome(module, [x]))
    first, second = fxremat.reports()[count:]
    for report in (first, second):
        assert report.budget_bytes == int(0.9 * report.baseline_peak_bytes)
        assert report.peak_bytes <= report.budget_bytes
    assert second.peak_bytes < first.peak_bytes


def test_bytes_that_serve_one_size_may_not_serve_a_larger_one() -> None:
    """The larger batch is refused with an error that says what it takes; the smaller one still trains."""
    module, subject = twins()
    module(torch.ones(8, 4)).sum().backward()
    call = compiled(subject, dynamic=False, budget=1500)
    call(torch.ones(8, 4)).sum().backward()
    with pytest.raises(InfeasibleBudgetError, match="make the batch smaller"):
        call(torch.ones(64, 4))
    assert_same_gradients(subject, module)


def test_numbers_and_indices_among_the_inputs() -> None:
    """Python numbers that change, integers and a value that is no leaf, by position and by name."""
    body = lambda p, x, rows, scale, *, shift: ((x @ p.weight).tanh()[rows] * scale + shift).exp()  # noqa: E731

    class Named(Program):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            return self.body(self, *inputs, **named)

    module, subject = twins(lambda: Named(body))
    call = compiled(subject, planner=everything(1))
    for scale in (2, 3, 0.5, 1.5):
        for each in (module, call):
            each(square().requires_grad_().sin(), torch.tensor([0, 2]), scale, shift=1).sum().backward()
    assert_same_gradients(subject, module)


def test_a_transform_inside_of_what_is_compiled() -> None:
    """torch.func.grad of a functional call, all of it in one graph."""
    module, x = Layers(), square()
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,)).exp().sum()

    expected = torch.func.grad(loss)(parameters, x)
    found = torch.compile(torch.func.grad(loss), backend="fxremat", options=OPTIONS)(parameters, x)
    assert_same_outcome(found, expected)


# --- Layers ---------------------------------------------------------------------------------------------


class OfIndices(nn.Module):
    """A table that is looked up by the input."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layer = Layer()

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(self.table(rows).tanh())


def weight_normalised() -> nn.Module:
    """Two layers whose weights are computed in each forward."""
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(normed(nn.Linear(4, 4)), nn.Tanh(), normed(nn.Linear(4, 4)), nn.Tanh())


def convolutional() -> nn.Module:
    """An image network, to be laid out channels last."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Sigmoid(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    ).to(memory_format=torch.channels_last)


ROWS = torch.tensor([[1, 2], [1, 4]])
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), square()[None]),
    "weight norm": (weight_normalised, square()),
    "embedding": (lambda: OfIndices(nn.Embedding(6, 4, padding_idx=1)), ROWS),
    "sparse embedding": (lambda: OfIndices(nn.Embedding(6, 4, sparse=True)), ROWS),
    "embedding bag": (lambda: OfIndices(nn.EmbeddingBag(6, 4, mode="mean")), ROWS),
    "channels last": (
        convolutional,
        torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(
            memory_format=torch.channels_last
        ),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_alike(name: str) -> None:
    """Of their kind in torch.nn, with everything computed again; also where the gradient is sparse."""
    build, x = LAYERS[name]
    torch.manual_seed(0)
    (report,) = assert_trains_alike(build(), [x], planner=everything(1))
    assert report.solution.mirror_counts


def test_the_gradients_of_double_numbers_are_those_of_differences() -> None:
    """gradcheck, an oracle that knows nothing of autograd."""
    body = lambda x, y: (x @ y).tanh().exp().sin() * x  # noqa: E731
    inputs = tuple(square(seed).double().requires_grad_() for seed in (1, 2))
    assert torch.autograd.gradcheck(torch.compile(body, backend="fxremat", options=OPTIONS), inputs)


def test_anomalies_are_detected_and_algorithms_deterministic() -> None:
    """Two debugging modes of torch's that change what runs."""
    body = lambda p, x: (x @ p.weight).tanh().exp()[torch.tensor([0, 0, 1])].sin()  # noqa: E731
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            assert_trains_alike(program(body), [square()], planner=everything(1))
    finally:
        torch.use_deterministic_algorithms(False)


def test_nested_tensors_train_alike() -> None:
    """Batches of rows of different lengths, which AOTAutograd takes apart."""
    module, subject = twins()
    rows = torch.nested.nested_tensor([square()[:2], square()[:3]], layout=torch.jagged)
    for each in (module, compiled(subject, planner=everything(1))):
        each(rows).values().sum().backward()
    assert_same_gradients(subject, module)


def test_recurrent_layers_need_dynamos_leave() -> None:
    """An LSTM is in no graph unless Dynamo may compile it; then it trains alike."""
    torch.manual_seed(0)
    module = nn.LSTM(4, 4, batch_first=True)
    body = lambda p, x: p.layers[0]((x @ p.weight)[None].tanh())[0].exp()  # noqa: E731
    subject = compiled(program(body, copy.deepcopy(module)), planner=everything(1))
    reports = reports_of(lambda: subject(square()).sum().backward())
    planned = [name for report in reports for name in report.solution.schedule]  # what is around it
    assert not any(part in name for name in planned for part in ("rnn", "lstm", "sigmoid"))
    with torch._dynamo.config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=False):
        assert_trains_alike(program(body, module), [square()], planner=everything(1))


def test_an_operator_that_trusts_its_workspace_is_not_run_on_an_example() -> None:
    """On a CPU the trace does not even know the workspace's size: the backward of an LSTM would crash."""
    module = nn.LSTM(4, 4, batch_first=True)
    graph = fxremat.capture(module, square()[None], loss=lambda outputs: outputs[0].sum())
    operators = {node.name: ops.title(node) for node in graph.fx_nodes}
    run = [operators[node.name] for node in calibrate._runnable(graph)]
    assert "aten.mkldnn_rnn_layer_backward.default" in operators.values()
    assert "aten.mkldnn_rnn_layer.default" in run
    assert "aten.mkldnn_rnn_layer_backward.default" not in run


ATTENTION: dict[str, tuple[SDPBackend, dict[str, Any]]] = {
    "math": (SDPBackend.MATH, {}),
    "math, causal": (SDPBackend.MATH, {"is_causal": True}),
    "math, dropout": (SDPBackend.MATH, {"dropout_p": 0.3}),
    "math, truth values": (SDPBackend.MATH, {"attn_mask": torch.ones(2, 2, dtype=torch.bool).tril()}),
    "flash": (SDPBackend.FLASH_ATTENTION, {}),
    "flash, causal": (SDPBackend.FLASH_ATTENTION, {"is_causal": True}),
    "flash, numbers": (SDPBackend.FLASH_ATTENTION, {"attn_mask": torch.ones(2, 2).triu(), "scale": 0.3}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_every_kind_trains_alike(name: str) -> None:
    """The fused kernel and its formula, with masks; dropout draws once."""
    kernel, keywords = ATTENTION[name]

    def body(p: Program, x: Tensor) -> Tensor:
        q, k, v = ((x @ p.weight).tanh().view(1, 2, 2, 4) * scale for scale in (1, 2, 3))
        with sdpa_kernel(kernel):
            return functional.scaled_dot_product_attention(q, k, v, **keywords).exp()

    assert_trains_alike(program(body), [square()], planner=everything(1))


def test_grouped_queries_train_alike() -> None:
    """Fewer keys than queries."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        k = y[:2].view(1, 2, 2, 2)
        return functional.scaled_dot_product_attention(y.view(1, 4, 2, 2), k, k.sin(), enable_gqa=True).exp()

    assert_trains_alike(program(body), [square()], planner=everything(1))


@pytest.mark.parametrize("masked", [False, True])
def test_flexible_attention_is_kept(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds graphs of its own, so that it runs once; torch lets it train on a CPU only if unasked."""
    flexible = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flexible, "_validate_device", lambda *tensors: None)
    causal = flexible.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 4, 4, device="cpu", BLOCK_SIZE=4)

    def body(p: Program, x: Tensor) -> Tensor:
        q, k, v = ((x @ p.weight).tanh()[None, None] * scale for scale in (1, 2, 3))
        if masked:
            return flexible.flex_attention(q, k, v, block_mask=causal).exp().sin()
        return flexible.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + p.state[i]).exp().sin()

    (report,) = assert_trains_alike(program(body), [square()], reference="aot_eager", planner=everything(1))
    (value,) = (each for each in report.values if each.operator == "flex_attention")
    assert (value.recomputed, value.reason) == (0, "it is a higher-order operator")


# --- Hooks ----------------------------------------------------------------------------------------------


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(max=0.5)


def hooked() -> Layers:
    """Layers with every hook that a script may set."""
    module = Layers()
    first, second, third = module.layers
    first.register_forward_hook(lambda _, inputs, output: 2 * output)
    first.register_forward_pre_hook(lambda _, inputs: (inputs[0].sin(),))
    second.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 2,))
    third.linear.weight.register_hook(lambda gradient: gradient * 3)
    third.linear.bias.register_post_accumulate_grad_hook(_clamp)
    return module


def test_hooks_run_as_without() -> None:
    """Of modules, on values, on gradients, and behind their accumulation."""
    module, subject = hooked(), hooked()
    bias = subject.layers[2].linear.bias
    for each in (module, compiled(subject, planner=everything(1))):
        each(square()).sum().backward()
    assert_same_gradients(subject, module)
    assert bias.grad.max() <= 0.5


def test_saved_values_may_be_packed() -> None:
    """saved_tensors_hooks see what is saved, and get it back unpacked: such as to keep it elsewhere."""
    module, subject = twins()
    call, packed = compiled(subject, planner=everything(1)), []

    def pack(value: Tensor) -> Tensor:
        packed.append(value.shape)
        return value.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value.clone()):
        loss = call(square()).sum()
    loss.backward()
    module(square()).sum().backward()
    assert packed
    assert_same_gradients(subject, module)


def test_compiled_autograd_trains_alike() -> None:
    """The backward is traced once more, with all that runs around it."""
    module, subject = twins()
    call = compiled(subject, planner=everything(1))
    module(square()).sum().backward()
    with torch._dynamo.config.patch(compiled_autograd=True):
        loss = call(square()).sum()
        torch.compile(lambda: loss.backward(), backend="fxremat", options=OPTIONS)()
    assert_same_gradients(subject, module)


# --- Several processes ----------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_gradients_in_buckets_share_the_budget_of_the_step(group: None) -> None:
    """Dynamo splits what is in DDP by its buckets: each part is a graph, and the budget is that of all."""
    module, subject = twins(lambda: Layers(3, 512))
    call = compiled(nn.parallel.DistributedDataParallel(subject, bucket_cap_mb=1), budget="min")
    x = torch.randn(512, 512)
    reports = reports_of(lambda: call(x).sum().backward())
    with call.no_sync():
        call(x).sum().backward()
    for _ in range(2):
        module(x).sum().backward()
    names = [report.graph_name for report in reports]
    first, step = (each for each in fxremat.steps() if [call.graph_name for call in each.calls] == names)
    assert len(reports) == 3
    assert {report.budget for report in reports} == {step.budget} == {"min"}
    assert first.peak_bytes < first.baseline_peak_bytes
    assert step.peak_bytes == step.lowest_peak_bytes < step.baseline_peak_bytes
    assert step.measured_peak_bytes is not None
    assert step.measured_peak_bytes <= step.measured_plans_peak_bytes
    assert_same_gradients(subject, module)


def test_without_dynamos_buckets_a_model_in_ddp_has_one_budget(group: None) -> None:
    """Dynamo's setting, also where the model is compiled first and then wrapped."""
    module, subject = twins(lambda: Layers(3, 512))
    call = nn.parallel.DistributedDataParallel(compiled(subject, budget="min"), bucket_cap_mb=1)
    x = torch.randn(2, 512)
    with torch._dynamo.config.patch(optimize_ddp=False):
        (report,) = reports_of(lambda: call(x).sum().backward())
    module(x).sum().backward()
    assert report.budget == "min"
    assert_same_gradients(subject, module)


def test_blocks_of_a_sharded_model_train_alike(group: None) -> None:
    """Each block is compiled and then sharded: gathering its parameters stays outside of the graphs."""
    from torch.distributed.fsdp import fully_shard

    module, subject = twins()
    for layer in subject.layers:
        layer.compile(backend="fxremat", options=OPTIONS)
        fully_shard(layer)
    fully_shard(subject)
    assert reports_of(lambda: subject(square()).sum().backward())
    module(square()).sum().backward()
    for found, expected in zip(subject.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=0, atol=0)


# --- Custom operators and kernels -----------------------------------------------------------------------


@torch.library.custom_op("fxremat_combinations::ripple", mutates_args=())
def ripple(x: Tensor) -> Tensor:
    """sin, which its author knows to be pure."""
    RUNS["ripple"] += 1
    return x.sin()


@ripple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _ripple_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * ctx.saved_tensors[0].cos()


ripple.register_autograd(_ripple_backward, setup_context=_keep_input)


@pytest.mark.parametrize("declared", [False, True])
def test_a_custom_operator_runs_again_where_it_is_declared_pure(declared: bool) -> None:
    """By an order to compute it again; elsewhere it is kept, and the report says why."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        if declared:
            with fxremat.region(recompute=True):
                y = ripple(y)
        else:
            y = ripple(y)
        return (y.exp() @ p.weight).sin()

    module = program(body)
    (report,) = assert_trains_alike(module, [square()], steps=1, planner=everything(1))
    assert RUNS["ripple"] == (3 if declared else 2)  # eager's, the forward's, and once more in the backward
    (value,) = (each for each in report.values if "ripple" in each.operator)
    assert (value.recomputed > 0) is declared
    assert ("not known to be pure" in value.reason) is not declared


def of_kernel() -> fx.GraphModule:
    """A joint graph with a Triton kernel of the user's, whose outputs are a mapping by name."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    aten, graph, value = torch.ops.aten, fx.Graph(), torch.empty(8, device="meta")
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    kernel = graph.call_function(
        triton_kernel_wrapper_functional,
        kwargs={
            **{"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}},
            **{"kwargs": {"read": x, "written": x}, "tensors_to_clone": ["written"]},
        },
    )
    written = graph.call_function(operator.getitem, (kernel, "written"))
    result = graph.call_function(aten.sin.default, (written,))
    slope = graph.call_function(aten.cos.default, (written,))
    gradient = graph.call_function(aten.mul.Tensor, (slope, tangent))
    graph.output((result, gradient))
    for node in graph.nodes:
        node.meta["val"] = value
    kernel.meta["val"] = {"written": value}
    return fx.GraphModule({}, graph)


def test_the_outputs_of_a_kernel_of_the_users_are_saved_and_counted() -> None:
    """It is no operator of which anything is known: kept, with the bytes of its outputs."""
    graph = JointGraph.from_fx(of_kernel(), 1)
    kernel, written = (graph.nodes[index] for index in (2, 3))
    assert kernel.keep == "it is a higher-order operator"
    assert [graph.storage_bytes[storage] for storage in kernel.creates] == [32]
    assert written.views == kernel.creates
    forward, backward = partition(graph)
    (saved,) = forward.graph.output_node().args[0][1:]
    assert saved.name == written.name
    assert [node.name for node in backward.graph.find_nodes(op="placeholder")] == [written.name, "tangents_1"]


# --- Inductor -------------------------------------------------------------------------------------------


def test_a_mode_may_stand_among_the_options() -> None:
    """torch.compile refuses mode= beside options=; here it is one of them."""
    parsed = Options.parse({"mode": "reduce-overhead", "budget": "min"})
    assert parsed.budget == "min"
    assert parsed.inductor == Options.parse(mode="reduce-overhead").inductor != {}


@pytest.mark.inductor
def test_the_options_of_a_mode_hold_while_inductor_compiles() -> None:
    """The planner, which runs inside of Inductor, finds them set."""
    from torch._inductor import config, list_mode_options

    expected, seen = list_mode_options()["reduce-overhead"], []

    def planner(problem: fxremat.Problem) -> dict[str, int]:
        seen.append({name: config.get_config_copy()[name] for name in expected})
        return dict.fromkeys(problem.graph.names, 1)

    module, subject = twins()
    options = {"mode": "reduce-overhead", "planner": planner}
    assert_trained_nearly(torch.compile(subject, backend="fxremat", options=options), subject, module)
    assert seen == [expected]


def assert_trained_nearly(call: Any, subject: nn.Module, module: nn.Module, **keywords: Any) -> None:
    """One step of Inductor's gives eager's gradients but for the order in which numbers are added up."""
    call(square()).sum().backward(**keywords)
    module(square()).sum().backward()
    for found, expected in zip(subject.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.inductor
def test_a_backward_that_runs_twice_is_refused_behind_one_that_ran_once() -> None:
    """Under Inductor a backward may write over what is saved: torch says what to set, which works."""
    module, subject = twins()
    options = {"planner": "keep_all"}
    call = torch.compile(subject, backend="fxremat", options=options)
    assert_trained_nearly(call, subject, module)
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        call(square()).sum().backward(retain_graph=True)
    torch._dynamo.reset()
    for each in (module, subject):
        each.zero_grad()
    with torch._functorch.config.patch(donated_buffer=False):
        call = torch.compile(subject, backend="fxremat", options=options)
        assert_trained_nearly(call, subject, module, retain_graph=True)


@pytest.mark.parametrize("mirrors", [0, 1, 2])
def test_the_backward_gets_what_is_saved_before_its_tangents(mirrors: int) -> None:
    """CUDA graphs take it for static by its place: Inductor's own count is that of what is saved."""
    from torch._inductor.utils import count_tangents

    graph = fxremat.capture(Layers(), square(), loss=torch.sum, compiler="inductor")
    solution = fxremat.plan(graph, planner=everything(mirrors))
    forward, backward = partition(fxremat.rewrite(graph, solution.schedule))
    saved = forward.graph.output_node().args[0][len(graph.forward_outputs) :]
    placeholders = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert placeholders[: count_tangents(backward)] == [node.name for node in saved]
