"""kernel_groups: a program's loops are in as few as its peak allows, and so they are in Inductor's code."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from unseen import no_loops

import fxremat
from fxremat.graph import ops
from fxremat.graph.schedule import bind
from fxremat.inductor import kernel_order
from fxremat.inductor.kernel_groups import _copied_bytes, kernel_groups, together
from fxremat.predict.models import INDUCTOR, INDUCTOR_MARGIN


class Dense(nn.Module):
    """Layers that each read all before them, by concatenations."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1))
            for width in range(8, 8 + 4 * layers, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


Step = tuple[bool | None, int, int]  # whether a loop runs, what it makes, and what is freed behind it


@given(st.lists(st.tuples(st.sampled_from([True, True, None, False]), st.integers(0, 4), st.integers(0, 4))))
def test_groups_are_as_few_as_the_peak_allows(steps: list[Step]) -> None:
    """Each holds what was live before it and all that it makes; nothing is freed within."""
    live_bytes, live = [], 0
    for _, made, freed in steps:
        live += made
        live_bytes.append(live)
        live -= min(live, freed)
    is_loop, made_bytes, _ = zip(*steps, strict=True) if steps else ((), (), ())
    numbers = together(is_loop, live_bytes, made_bytes, [0] * len(steps))
    peak_bytes = max(live_bytes, default=0)

    def held(first: int, last: int) -> int:
        return live_bytes[first] + sum(made_bytes[first + 1 : last + 1])

    places = [place for place, each in enumerate(is_loop) if each]
    parts = [[place for place in places if numbers[place] == number] for number in range(len(steps))]
    parts = [part for part in parts if part]
    assert numbers == sorted(numbers)
    assert all(held(part[0], part[-1]) <= peak_bytes for part in parts)
    assert all(False not in is_loop[part[0] : part[-1]] for part in parts)
    for part, after in itertools.pairwise(parts):  # no group could have taken one loop more
        is_apart = False in is_loop[part[0] : after[0]]
        assert is_apart or held(part[0], after[0]) > peak_bytes


def test_code_ends_groups_where_the_plan_needs_it(tmp_path: Path) -> None:
    """A network with long groups takes what was predicted for the least memory, and more where none ends."""
    model, images = Dense(5), torch.randn(4, 8, 16, 16)

    def report(**options: object) -> fxremat.Report:
        torch.compiler.reset()
        with fresh_cache(), no_loops():
            compiled = torch.compile(model, backend="fxremat", options={"budget": "min", **options})
            compiled(images).square().mean().backward()
        return fxremat.reports()[-1]

    least = report()
    plan = tmp_path / "plan.json"
    fxremat.save_plan(plan, [least])
    with mock.patch.object(kernel_order, "kernel_groups", lambda *given: [0] * len(kernel_groups(*given))):
        none_ends = report(plan=str(plan), budget=None)
    margin = 0.01 if torch.__version__.startswith("2.13") else INDUCTOR_MARGIN
    assert least.lowered_peak_bytes <= (1 + margin) * least.solution.peak_bytes
    assert none_ends.solution.schedule == least.solution.schedule
    assert none_ends.lowered_peak_bytes > 1.05 * least.lowered_peak_bytes


@pytest.mark.parametrize("groups", [1, 4])
def test_copies_for_gradients_of_single_channels_are_made_by_loops(groups: int) -> None:
    """They count as scratch memory of the gradient; loops make them, before which a group may have to end."""
    model = nn.Conv2d(4, 4, 3, groups=groups)
    graph = fxremat.capture(model, torch.randn(2, 4, 8, 8, requires_grad=True), loss=torch.sum)
    (gradient,) = (place for place, node in enumerate(graph.fx_nodes) if ops.is_convolution_gradient(node))
    sizes = tuple(1000 if place == gradient else 0 for place in range(len(graph.nodes)))
    binding = bind(graph, graph.names)
    lowering = INDUCTOR.lower(graph, binding)
    place = lowering.runs_at[binding.nodes.index(gradient)]
    before, after = (
        _copied_bytes(replace(graph, scratch_bytes=told), binding, lowering) for told in ((), sizes)
    )
    assert after[place] - before[place] == (1000 if groups > 1 else 0)
    assert sum(after) - sum(before) == after[place] - before[place]
