"""operations: what loops are too long for is what Inductor itself finds too long, whatever they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import Function
from torch import Tensor, fx
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from unseen import no_loops

from fxremat.driver.correction import Correction
from fxremat.driver.policy import Choice
from fxremat.graph.loops import Kind
from fxremat.graph.schedule import bind
from fxremat.inductor.inlining import Inlining


def scanned(x: Tensor, w: Tensor) -> Tensor:
    """A scan over the rows of several values: each is read at other places, and its gradient put together."""
    a, b, c, h, rows = torch.mm(x, w), torch.mm(w, x), torch.mm(w, w), torch.zeros(16), []
    for row in range(16):
        h = torch.exp(-a[row].abs()) * h + a[row] * b[row]
        rows.append((h * c[:, row]).cumsum(0))
    return torch.mm(torch.stack(rows), w)


def sampled(x: Tensor, w: Tensor) -> Tensor:
    """Images at places between their points: each is the sum of four that are gathered."""
    image, places = torch.mm(x, w).view(1, 4, 8, 8), torch.mm(w, x).tanh()[:, :8].reshape(1, 8, 8, 2)
    for _ in range(2):
        image = functional.grid_sample(image, places, align_corners=False)
    return torch.mm(image.view(16, 16), w)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    """Sums of few products, which are computed where they are read, and what is picked by its place."""
    experts, gates = torch.mm(x, w).view(4, 16, 4), torch.mm(w, x)[:, :4].softmax(1)
    best, at = gates.topk(2)
    chosen = torch.zeros(16, 4).scatter(1, at, best / best.sum(1, keepdim=True))
    first = torch.einsum("enf,ne->nf", experts, chosen)
    return torch.mm(torch.cat([first.abs() * 2.0, first + 1.0, first, chosen], 1), w)


def transformed(x: Tensor, w: Tensor) -> Tensor:
    """Complex numbers, of which Inductor generates no loops."""
    spectrum = torch.fft.rfft(torch.mm(x, w)) * torch.fft.rfft(w, dim=1) * 0.5
    return torch.mm(torch.fft.irfft(spectrum + spectrum.conj(), n=16), w).abs()


def pooled(x: Tensor, w: Tensor) -> Tensor:
    """Averages of windows, which are computed inside of what reads them, as their gradients are."""
    image = torch.mm(x, w).view(1, 4, 8, 8)
    small = functional.hardswish(functional.avg_pool2d(image, 2) + 3)
    wide = functional.avg_pool2d(image, 3, 1, 1).abs() * 3.0
    return torch.mm(torch.mm(w, (image + wide).view(16, 16)) * small.mean(), w)


class Lowering:
    """What Inductor stores of the first plan for a function, and what was planned."""

    def __init__(self, function: Callable[..., Tensor], budget: str | None) -> None:
        self._boxes: dict[str, ir.StorageBox] = {}  # of the loops, by the names of their nodes
        self.plans: list[Choice | None] = []
        self.is_stored: dict[str, bool] = {}
        run_node, take = GraphLowering.run_node, Correction.take

        def recorded(graph: GraphLowering, node: fx.Node) -> Any:
            found = run_node(graph, node)
            box = found.data if isinstance(found, ir.TensorBox) else None
            if isinstance(box, ir.StorageBox):
                self._boxes[node.name] = box
            return found

        def taken(correction: Correction, *given: Any) -> None:
            self.plans.append(correction.choice)
            if len(self.plans) == 2:  # the forward and the backward
                boxes = self._boxes.items()
                self.is_stored = {name: not isinstance(box.data, ir.Pointwise) for name, box in boxes}
            take(correction, *given)

        torch.compiler.reset()
        compiled = torch.compile(Function(function), backend="fxremat", options={"budget": budget})
        args = [torch.randn(16, 16, requires_grad=True) for _ in range(2)]
        with (
            fresh_cache(),
            no_loops(),
            mock.patch.object(GraphLowering, "run_node", recorded),
            mock.patch.object(Correction, "take", taken),
        ):
            compiled(*args).square().sum().backward()


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="each version stores a few others")
@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("function", [scanned, sampled, weighted, transformed, pooled])
def test_inductor_stores_what_is_predicted_to_be_too_long(
    function: Callable[..., Tensor], budget: str | None
) -> None:
    """Of all loops that nobody needs stored: those that cost too much inside of others, and no more."""
    lowering = Lowering(function, budget)
    choice = lowering.plans[0]
    assert choice is not None
    graph = choice.problem.graph
    binding = bind(graph, choice.solution.schedule)
    inlining = Inlining(graph, binding)
    runs, differing, compared = Counter[str](), [], 0
    for step, position in enumerate(binding.nodes):
        name = graph.nodes[position].name
        name, runs[name] = f"{name}_mirror{runs[name]}" if binding.is_mirror[step] else name, runs[name] + 1
        is_needed = inlining.pinned[step] or inlining.realized_at[step] != step
        if inlining.kinds[step] is Kind.POINTWISE and not is_needed and name in lowering.is_stored:
            compared += 1
            if inlining.realized[step] != lowering.is_stored[name]:
                differing.append(name)
    assert compared
    assert not differing
