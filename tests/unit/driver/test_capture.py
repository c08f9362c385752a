"""capture: a model becomes its joint graph without running and without being changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Sketch, assert_same, run
from models import case, fresh, train_step
from programs import Network, batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.errors import CaptureError, GraphError, InvalidOptionError
from fxremat.graph.joint import JointGraph
from fxremat.graph.nodes import Phase
from fxremat.graph.places import Origin
from fxremat.paper.networks import LSTM, LSTMSizes
from fxremat.predict.models import profile


def phase_names(graph: JointGraph, phase: Phase) -> list[str]:
    """Names of the nodes of a phase."""
    return [node.name for node in graph.nodes if node.phase is phase]


def test_a_linear_layer() -> None:
    """Two parameters, a batch and a tangent in; the loss and two gradients out."""
    graph = fxremat.capture(nn.Linear(4, 2), torch.randn(3, 4), loss=torch.sum)
    assert phase_names(graph, Phase.INPUT) == ["primals_1", "primals_2", "primals_3", "tangents_1"]
    assert phase_names(graph, Phase.FORWARD) == ["t", "addmm", "sum_1"]
    assert [graph.nodes[output].name for output in graph.forward_outputs] == ["sum_1"]
    assert [output is None for output in graph.backward_outputs] == [False, False, True]
    assert graph.name == "Linear"


def test_a_model_that_returns_its_loss_needs_none() -> None:
    """Without a loss the model's own outputs are the forward's."""
    module, inputs = fresh(case("tanh_mlp"))
    graph = fxremat.capture(module, *inputs)
    assert len(graph.forward_outputs) == 1
    assert graph.name == "Scored"


class Block(nn.Module):
    """A block of a network, with modules of torch in it, and functions on lines of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8)])

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        scaled = self.norms[0](x)
        return x + torch.tanh(self.linear(scaled)).square()


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_nodes_know_their_places(compiler: str) -> None:
    """Module and source line of each, forward and backward, are those that Dynamo tells when compiling."""

    def loss(x: Tensor) -> Tensor:
        return x.mean()

    model, inputs = nn.Sequential(Block(), Block()), torch.randn(4, 8)
    graph = fxremat.capture(model, inputs, loss=loss, compiler=compiler)
    torch.compiler.reset()
    options = {"compiler": compiler, "scope": "graph"}
    compiled = torch.compile(
        lambda self: loss(self(inputs)), backend="fxremat", options=options, fullgraph=True
    )
    compiled(model).backward()
    traced = [step.origin for step in fxremat.reports()[-1].baseline_timeline.steps]

    def places(origins: Iterable[Origin]) -> set[tuple[str, str, str]]:
        found = {(each.operator, each.module, each.source) for each in origins}
        return {each for each in found if each[:2] != ("aten.add.Tensor", "")}  # sums of gradients

    captured = places(graph.origins[graph.num_inputs :])
    assert captured == places(traced)
    modules = {module for _, module, _ in captured}
    assert modules >= {"0", "0.linear", "0.norms.0", "1", "1.linear", "1.norms.0"}
    assert len({source for _, _, source in captured if Path(__file__).name in source}) > 2


def test_a_node_has_no_place_in_the_callers_program() -> None:
    """A model that is torch's own has modules, and no lines: the line that captures it made nothing."""
    graph = fxremat.capture(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4), loss=torch.sum)
    assert (graph.module_path("addmm"), graph.source("addmm")) == ("0", "")


def test_several_outputs_have_a_tangent_each() -> None:
    """A model that returns two tensors is captured with both."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin(), x.cos()

    graph = fxremat.capture(Two(), torch.randn(4, requires_grad=True))
    assert len(graph.forward_outputs) == 2
    assert [n for n in phase_names(graph, Phase.INPUT) if "tangents" in n] == ["tangents_1", "tangents_2"]
    assert graph.tangent_bytes == 32


def test_arguments_by_name() -> None:
    """Keyword arguments reach the model."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return (x * scale).sum()

    graph = fxremat.capture(Scaled(), torch.randn(4, requires_grad=True), scale=torch.ones(4))
    assert len([n for n in phase_names(graph, Phase.INPUT) if "primals" in n]) == 2


def test_inputs_that_require_a_gradient_get_one() -> None:
    """The gradients are those of parameters and of such inputs, in the order of the inputs."""
    graph = fxremat.capture(nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True), loss=torch.sum)
    assert [output is None for output in graph.backward_outputs] == [False, False, False]


def test_the_graph_computes_the_models_gradients() -> None:
    """The oracle: run on the model's parameters it gives eager autograd's loss and gradients."""
    module, inputs = fresh(case("gated_mlp"))
    graph = fxremat.capture(module, *inputs)
    loss, gradients = train_step(module, inputs)
    parameters = [parameter.detach() for parameter in module.parameters()]
    results = run(graph.module, [*parameters, *inputs, torch.ones(())])
    assert_same(results[:1], [loss])
    found = dict(zip((name for name, _ in module.named_parameters()), results[1:], strict=False))
    assert_same([found[name] for name in gradients], list(gradients.values()))


def test_the_model_is_left_alone() -> None:
    """Capturing runs nothing: no gradient, no statistics, no random number, no mode is changed."""
    network = Network([("batch_norm", -1, -1), ("dropout", -1, -1)])
    before = copy.deepcopy(network.state_dict())
    state = torch.get_rng_state()
    x = batch()
    fxremat.capture(network, x)
    assert_same(list(network.state_dict().values()), list(before.values()))
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.training


def test_a_model_on_the_meta_device() -> None:
    """A model without memory has the graph and the profile of a real one."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))

    real = fxremat.capture(model(), torch.randn(2, 8), loss=torch.sum)
    with torch.device("meta"):
        meta = fxremat.capture(model(), torch.randn(2, 8), loss=torch.sum)
    assert meta.nodes == real.nodes
    assert meta.storage_bytes == real.storage_bytes


def test_a_model_of_fake_tensors() -> None:
    """A model of 4 TB is captured in no time, and its peak is known."""
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(2**18, 2**18, bias=False) for _ in range(4)))
        graph = fxremat.capture(model, torch.randn(4, 2**18), loss=torch.sum)
    gradients = 4 * 4 * 2**36
    assert gradients < profile(graph, graph.names).peak_bytes < 1.01 * gradients


@pytest.mark.filterwarnings("ignore:aten..nll_loss")
def test_a_backward_that_meta_swallows() -> None:
    """On the meta device cross_entropy has no derivative; a graph without gradients is refused."""
    with torch.device("meta"):
        model = LSTM(LSTMSizes(layers=1, hidden=4, batch=2, inputs=3, classes=5))
        batch = torch.randn(2, 2, 3), torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(CaptureError, match="FakeTensorMode"):
        fxremat.capture(model, *batch)


def test_inductors_view_of_a_model() -> None:
    """For Inductor operators are decomposed: a LayerNorm becomes its arithmetic."""
    model = nn.LayerNorm(8)
    eager = fxremat.capture(model, torch.randn(2, 8), loss=torch.sum)
    inductor = fxremat.capture(model, torch.randn(2, 8), loss=torch.sum, compiler="inductor")
    assert "native_layer_norm" in eager.names
    assert "rsqrt" in inductor.names
    assert "native_layer_norm" not in inductor.names
    assert len(inductor.backward_outputs) == len(eager.backward_outputs)


def test_equal_nodes_are_merged() -> None:
    """What is computed twice in the program is one node."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.exp() * x.exp()).sum()

    graph = fxremat.capture(Twice(), torch.randn(4, requires_grad=True))
    assert phase_names(graph, Phase.FORWARD) == ["exp", "mul", "sum_1"]


def test_a_model_that_cannot_be_traced() -> None:
    """Control flow that hangs on data is a CaptureError with the tracer's error as its cause."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sum() if x.sum() > 0 else x.sum()

    with pytest.raises(CaptureError, match=r"Branching could not be traced.*torch\.compile") as caught:
        fxremat.capture(Branching(), torch.randn(4, requires_grad=True))
    assert caught.value.__cause__ is not None


def test_a_misspelt_compiler_is_refused() -> None:
    """It is not taken for the other one."""
    with pytest.raises(InvalidOptionError) as caught:
        fxremat.capture(nn.Linear(4, 2), torch.randn(3, 4), loss=torch.sum, compiler="inductr")
    assert caught.value.near_matches == ("inductor",)


def test_a_model_without_gradients_is_captured_but_not_partitioned() -> None:
    """There is a forward and nothing else."""
    graph = fxremat.capture(nn.Tanh(), torch.randn(4))
    assert (graph.names, graph.backward_outputs) == (("tanh",), ())
    with pytest.raises(GraphError, match="no gradient"):
        fxremat.partition(graph)


def test_a_graph_of_another_tracer() -> None:
    """from_fx takes any joint fx graph whose placeholders are primals and tangents."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    a = sketch.call("a", torch.ops.aten.exp.default, x)
    module = sketch.module([a], [sketch.call("da", torch.ops.aten.mul.Tensor, t, a)])
    graph = JointGraph.from_fx(module, 1, name="other")
    assert (graph.name, graph.names, graph.tangent_bytes) == ("other", ("a", "da"), 16)
    assert graph.module is not module


class Raising(nn.Module):
    """Raises in its forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error", [KeyError("width"), AttributeError("width"), IndexError("width"), AssertionError("width")]
)
def test_what_a_model_raises_is_told_with_its_line(error: Exception) -> None:
    """Whatever it is; the error itself is chained."""
    told = rf"Raising could not be traced.*{type(error).__name__}: .*width.*test_capture\.py:\d+\)"
    with pytest.raises(CaptureError, match=told) as caught:
        fxremat.capture(Raising(error), torch.ones(2))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("model", [torch.sum, lambda x: x, nn.Linear, nn.Linear(2, 2).forward, None])
def test_what_is_no_module_is_refused(model: Any) -> None:
    """A function has no parameters to train; the error says to call it from a module."""
    with pytest.raises(CaptureError, match=r"is no nn\.Module\. Call a function from the forward of one"):
        fxremat.capture(model, torch.ones(2, requires_grad=True))


def test_a_loss_that_cannot_be_called_is_refused() -> None:
    """By its name."""
    with pytest.raises(InvalidOptionError, match="option 'loss': got 3"):
        fxremat.capture(nn.Linear(2, 2), torch.ones(2), loss=3)  # type: ignore[arg-type]


def test_a_model_is_told_that_it_is_compiled() -> None:
    """What it does for real numbers alone, it leaves out; as under torch.compile."""

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and x.sum().item() > 0:
                return x
            return x.sin()

    graph = fxremat.capture(Asks(), torch.ones(3, requires_grad=True), loss=torch.sum)
    assert "sin" in graph.index
    assert not torch.compiler.is_compiling()
