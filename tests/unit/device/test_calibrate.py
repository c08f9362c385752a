"""What operators allocate and free again, found by running each alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxremat
from fxremat._torch import graphs
from fxremat.device import calibrate, examples
from fxremat.device.calibrate import UNSEEN, Seen
from fxremat.device.results import as_run
from fxremat.graph import ops
from fxremat.graph.joint import JointGraph
from fxremat.measure import held_bytes
from fxremat.predict.models import model

aten = torch.ops.aten


class Factored(nn.Module):
    """A factorisation without a gradient, which looks for errors behind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.ldl_factor(x.detach()).LD.sum() * self.scale


@pytest.mark.skipif(
    not graphs.has_registered_effect(aten._linalg_check_errors.default),
    reason="this torch knows no effect of the look for errors, and leaves it out of the graph",
)
def test_a_look_for_errors_has_scratch_memory() -> None:
    """PyTorch takes it for an effect and orders it by a token; the operator itself runs alone."""
    graph = fxremat.capture(Factored(), torch.eye(4).expand(256, 4, 4))
    found = [
        scratch
        for node, scratch in zip(graph.fx_nodes, as_run(graph).scratch_bytes, strict=True)
        if graphs.is_effectful(node.target)
    ]
    assert len(found) == 1 and found[0] >= 256  # a truth value for each matrix


@pytest.mark.parametrize("is_arranged", [True, False])
def test_convolutions_run_on_images_as_inductor_lays_them_out(
    is_arranged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels last where they work so: always with oneDNN on a CPU, else, as on a GPU, if that pays."""
    seen: dict[str, tuple[tuple[int, ...], ...]] = {}

    def note(example: Any) -> Seen:
        seen[example.node.name] = example.strides
        return UNSEEN

    monkeypatch.setattr(calibrate, "_seen", {})
    monkeypatch.setattr(calibrate, "_see", note)
    network = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3))
    with torch.backends.mkldnn.flags(enabled=is_arranged):
        graph = fxremat.capture(network, torch.randn(2, 4, 16, 16))
        model("inductor").as_run(graph)
    convolutions = [node for node in graph.fx_nodes if ops.has_convolution(node)]
    assert len(convolutions) == 4
    for node in convolutions:
        for strides, operand in zip(seen[node.name], calibrate._operands(node), strict=True):
            if operand.dim() == 4:
                assert (strides[1] == 1) is is_arranged
                assert is_arranged or strides == operand.stride()


def test_a_seed_is_on_the_host_where_it_is_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the gradient of torch's memory-efficient attention, though it was traced on the GPU."""
    with FakeTensorMode():
        heads = torch.empty(1, 2, 8, 16, device="cuda")
        attention = aten._scaled_dot_product_efficient_attention(heads, heads, heads, None, True, 0.1)
    graph = fx.Graph()
    places = [graph.placeholder(f"x{place}") for place in range(8)]
    for place, value in zip(places, (*[heads] * 4, *attention), strict=True):
        place.meta["val"] = value
    arguments = *places[:4], None, *places[4:], 0.1, [True, True, True, False]
    gradient = graph.call_function(aten._scaled_dot_product_efficient_attention_backward.default, arguments)
    devices: list[str] = []

    def numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        devices.append(device.type)
        return torch.zeros(count, dtype=dtype)

    monkeypatch.setattr(examples, "numbers", numbers)
    calibrate._Example(gradient).call()
    assert devices == ["cuda"] * 6 + ["cpu"] * 2


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "of its own": lambda rows: rows[:, None].repeat(1, 6),
    "with gaps": lambda rows: rows[:, None].repeat(1, 12)[:, ::2],
    "one for a row": lambda rows: rows[:, None],
    "expanded": lambda rows: rows[:, None].expand(300, 6),
}


@pytest.mark.parametrize("source", [torch.rand(300), torch.rand(300, 6).double(), torch.rand(2, 1200)])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_takes_no_more_than_a_source_has(
    kind: str, source: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All true, it would be refused; and the gradient allocates as with the numbers that cost it most."""

    def function(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return aten.masked_scatter_backward(aten.masked_scatter(x, mask, source), mask, source.shape)

    monkeypatch.setattr(calibrate, "_seen", {})
    x = torch.randn(300, 6, dtype=source.dtype)
    masks = [MASKS[kind](torch.arange(300) < count) for count in (0, 1, 49, 50, 299, 300)]
    masks = [mask for mask in masks if mask.expand(300, 6).sum() <= source.numel()]
    graph = JointGraph.from_fx(make_fx(function, tracing_mode="fake")(x, masks[0], source), 1)
    assert None not in [each.forms for each in calibrate.run_alone(graph.fx_nodes[3:])]
    found = [
        held_bytes(functools.partial(aten.masked_scatter_backward, x, mask, source.shape), x.device)
        for mask in masks
    ]
    most = max(peak_bytes - end_bytes for peak_bytes, end_bytes in found)
    assert 0 < most - source.itemsize <= as_run(graph).scratch_bytes[-1] <= most
