"""Deep chains trained for real: memory that falls with recursion, and gradients that stay what they are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import fxremat
from fxremat.driver.pipeline import make_problem
from fxremat.measure import measure_peak
from fxremat.planners import recursive, revolve, sublinear
from fxremat.predict.models import profile
from fxremat.search.cuts import forward_lives, narrow_places

WIDTH, BATCH = 16, 4096
OUTPUT_BYTES = WIDTH * BATCH * 4


class Layer(nn.Module):
    """A linear map and a sine: its gradient reads the map's result, and the map's its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x))


def deep(layers: int) -> tuple[nn.Sequential, torch.Tensor]:
    """A chain of so many layers, and its input."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers))), torch.randn(BATCH, WIDTH)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of one step."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("layers", "outputs"),
    [(24, 14), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((100, 20), (1000, 30)))],
)
def test_a_deep_chain_trains_within_a_few_outputs(layers: int, outputs: int) -> None:
    """The measured peak is within the budget, gradients and the loss included, and no bit is different."""
    model, x = deep(layers)
    expected = [gradient.clone() for gradient in step(model, x)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        options = {"compiler": "eager", "budget": outputs * OUTPUT_BYTES}
        compiled = torch.compile(model, backend="fxremat", options=options)
        found = [gradient.clone() for gradient in step(compiled, x)]
    assert len(found) == layers and all(map(torch.equal, found, expected))
    del found, expected
    model.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: step(compiled, x), device="cpu").peak_bytes
    assert measured <= outputs * OUTPUT_BYTES


def test_the_memory_of_recursion_grows_with_the_logarithm() -> None:
    """Peaks over doublings of the depth: the root for one level, the logarithm for recursion."""
    depths = (32, 64, 128, 256)
    peaks: dict[str, list[float]] = {"sublinear": [], "recursive": []}
    for layers in depths:
        model, x = deep(layers)
        problem = make_problem(
            fxremat.capture(model.requires_grad_(False), x.requires_grad_()), fusion="none"
        )
        peaks["sublinear"].append(sublinear.plan(problem)[0].peak_bytes / OUTPUT_BYTES)
        peaks["recursive"].append(recursive.with_cuts(problem, 1)[0].peak_bytes / OUTPUT_BYTES)
    rises = [later - earlier for earlier, later in itertools.pairwise(peaks["recursive"])]
    assert max(rises) <= 2
    slope = math.log(peaks["sublinear"][-1] / peaks["sublinear"][0]) / math.log(depths[-1] / depths[0])
    assert 0.4 <= slope <= 0.6
    assert peaks["recursive"][-1] < peaks["sublinear"][-1] / 2


def test_revolve_holds_its_checkpoints_on_a_network() -> None:
    """Whatever the depth, the peak is that of the checkpoints and of one segment."""
    found = {}
    for layers in (32, 128):
        model, x = deep(layers)
        graph = fxremat.capture(model.requires_grad_(False), x.requires_grad_())
        places = list(narrow_places(forward_lives(graph)))[-1]
        found[layers] = profile(graph, revolve.schedule(graph, places, 4)).peak_bytes
    assert found[128] <= found[32] + OUTPUT_BYTES
