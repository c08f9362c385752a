"""What the operators of a graph return that runs as it is, where PyTorch traces something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.device import calibrate
from fxremat.device.results import as_run
from fxremat.graph.joint import JointGraph
from fxremat.graph.ops import tensors
from fxremat.graph.signature import signature
from fxremat.graph.twins import UNKNOWN_LAYOUT
from fxremat.measure import held_bytes

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *inputs: Tensor, tracing_mode: str = "fake") -> JointGraph:
    """The graph of a function of tensors, which returns one."""
    return JointGraph.from_fx(make_fx(function, tracing_mode=tracing_mode)(*inputs), 1)


def strides(graph: JointGraph) -> dict[Any, tuple[int, ...]]:
    """The strides of what the operators return that return a tensor, by operator."""
    values = ((node.target, node.meta.get("val")) for node in graph.fx_nodes if node.op == "call_function")
    return {target: value.stride() for target, value in values if isinstance(value, Tensor)}


def unknown(graph: JointGraph) -> list[str]:
    """The operators whose results may lie anyhow."""
    return [str(node.target) for node in graph.fx_nodes if UNKNOWN_LAYOUT in node.meta]


def normalised(x: Tensor) -> Tensor:
    """A batch normalisation, whose result lies in the order of its sizes whatever it reads."""
    return aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0]


TURNED = torch.randn(40, 6).t()


def test_what_lies_as_it_was_traced_is_left_alone() -> None:
    """The nodes are the same."""
    graph = graph_of(lambda x: normalised(x).relu(), torch.randn(6, 40))
    assert as_run(graph).module is graph.module


class Compare(fx.Interpreter):
    """Runs a graph, and compares what each operator returns with what its node says."""

    def run_node(self, node: fx.Node) -> Any:
        """The result of a node, which is as the graph says."""
        result = super().run_node(node)
        values = node.meta.get("val", result)
        for real, said in zip(tensors(result), tensors(values), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (said.shape, said.stride(), said.dtype), node
        return result


@pytest.mark.parametrize(
    "then",
    [
        torch.relu,
        lambda x: x.view(2, 3, 40).sin(),
        lambda x: x.t().exp(),
        lambda x: x.split([4, 2])[0].cos(),
        lambda x: torch.stack([x, x]).mean(0),
        lambda x: x @ x.t(),
    ],
)
def test_each_value_lies_as_it_does_when_it_runs(then: Callable[[Tensor], Tensor]) -> None:
    """Through views, parts and operators that follow what they read."""

    def function(x: Tensor) -> Tensor:
        return then(normalised(x))

    graph = graph_of(function, TURNED)
    found = as_run(graph)
    assert strides(found) != strides(graph) and unknown(found) == []
    assert found.module is not None and found.storage_bytes == graph.storage_bytes
    Compare(found.module).run(TURNED)


def test_images_of_one_pixel_lie_as_kernels_choose() -> None:
    """Which way is no matter to what they hold, but to which way the next kernels work."""
    values = torch.randn(2, 32, 1, 1), torch.randn(2, 1, 1, 32).permute(0, 3, 1, 2)
    graph = graph_of(lambda x, y: (x + y).exp(), *values)
    module = as_run(graph).module
    assert module is not None
    Compare(module).run(*values)


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_statistics_have_the_dtype_of_the_kernel(tracing_mode: str) -> None:
    """A layer normalisation of 16 bits with weights of 32 bits keeps statistics of 32."""
    values = torch.randn(40, 6, dtype=torch.bfloat16), torch.ones(6), torch.zeros(6)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        _, mean, deviation = aten.native_layer_norm(x, [6], weight, bias, 1e-5)
        return (mean - deviation).view(40).exp()

    graph = graph_of(function, *values, tracing_mode=tracing_mode)
    found = as_run(graph)
    assert unknown(found) == [] and found.module is not None
    assert sum(found.storage_bytes) == sum(graph.storage_bytes) + 4 * 40 * 2
    if tracing_mode == "fake":
        Compare(found.module).run(*values)


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 refuses two dtypes here")
def test_scratch_memory_is_beside_the_result_as_it_is() -> None:
    """A gradient is traced in 64 bits, for its target has these, and comes in 32, as its input."""
    values = torch.ones((), dtype=torch.float64), torch.randn(300, 6), torch.randn(300, 6).double()

    def function(gradient: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return aten.mse_loss_backward(gradient, x, target, 1)

    found = as_run(graph_of(function, *values))
    assert found.node_bytes(3) == function(*values).nbytes
    peak_bytes, _ = held_bytes(lambda: function(*values), torch.device("cpu"))
    assert found.node_bytes(3) + found.scratch_bytes[3] == peak_bytes


def test_the_graph_itself_stays_as_it_was_traced() -> None:
    """It is a value."""
    graph = graph_of(normalised, TURNED)
    before = strides(graph)
    assert strides(as_run(graph)) != before and strides(graph) == before


def test_what_follows_is_unknown_where_an_operator_cannot_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is what is computed of it; the others are known."""
    is_runnable = calibrate._is_runnable
    monkeypatch.setattr(
        calibrate, "_is_runnable", lambda node: node.target is not aten.sin.default and is_runnable(node)
    )
    graph = as_run(graph_of(lambda x: normalised(x).exp().sin().cos() + x.sin(), TURNED))
    assert unknown(graph) == ["aten.sin.default", "aten.cos.default", "aten.add.Tensor"]


def test_a_view_that_has_to_copy_is_unknown() -> None:
    """It was traced as one that need not."""
    graph = as_run(graph_of(lambda x: normalised(x).t().view(10, 24), TURNED))
    assert unknown(graph) == ["aten.view.default"]


def test_symbolic_sizes_that_lie_otherwise_are_unknown() -> None:
    """Their strides would be numbers."""
    graph = as_run(graph_of(lambda x: normalised(x).exp(), TURNED, tracing_mode="symbolic"))
    assert "aten.exp.default" in unknown(graph)


def test_a_graph_is_recognised_by_what_was_traced() -> None:
    """So that a plan fits where kernels are others."""
    values = torch.randn(40, 6, dtype=torch.bfloat16), torch.ones(6), torch.zeros(6)
    graph = graph_of(lambda x, *both: aten.native_layer_norm(x, [6], *both, 1e-5)[1].exp(), *values)
    found = as_run(graph)
    assert found.storage_bytes != graph.storage_bytes and signature(found) == signature(graph)
