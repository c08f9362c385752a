"""Checkpoints in the model: their orders hold, or ``ignore_checkpoints`` leaves the choice to the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
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
from fxremat._torch import partitioners
from fxremat.errors import InvalidOptionError
from fxremat.graph.signature import signature

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compiled graphs of one test are nothing to the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer, activations, and random numbers."""
    return functional.dropout(layer(x).tanh().exp(), 0.4)


def plain(p: Program, x: Tensor) -> Tensor:
    """Three blocks."""
    for layer in p.layers:
        x = block(layer, x)
    return x.sin()


def checkpointed(**keywords: Any) -> Callable[[Program, Tensor], Tensor]:
    """The same with a checkpoint around each block."""

    def body(p: Program, x: Tensor) -> Tensor:
        for layer in p.layers:
            x = checkpoint(block, layer, x, **{"use_reentrant": False, **keywords})
        return x.sin()

    return body


def nested(p: Program, x: Tensor) -> Tensor:
    """The same with a checkpoint around all, and one around each."""
    inner = functools.partial(checkpointed(), p)
    return checkpoint(inner, x, use_reentrant=False)


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products must be kept, all else must be computed again."""
    is_product = operator in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, policy)
BODIES = {
    "each": checkpointed(),
    "selective": checkpointed(context_fn=SELECTIVE),
    "nested": nested,
    "reentrant": checkpointed(use_reentrant=True),
    "not preserved": checkpointed(preserve_rng_state=False),
}


def network(body: Callable[..., Any]) -> Program:
    """Three layers under a body, the same for each."""
    torch.manual_seed(0)
    return program(body, *(nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.parametrize("ignore_checkpoints", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"budget": "min"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"planner": everything(2)}, marks=pytest.mark.slow),
    ],
    ids=["min", "none", "everything"],
)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_checkpointed_blocks_train_like_the_model_without(
    body: Callable[..., Any], options: dict[str, Any], ignore_checkpoints: bool
) -> None:
    """Bit for bit, dropout included, even where ``preserve_rng_state=False`` would draw other numbers."""
    inputs = [square(requires_grad=True)]
    expected = outcome(network(plain), inputs)
    found = compiled(network(body), ignore_checkpoints=ignore_checkpoints, **options)
    assert_same_outcome(outcome(found, inputs), expected)


@pytest.mark.parametrize("name", ["each", "selective", "nested"])
def test_what_is_planned_is_the_model_without_its_checkpoints(name: str) -> None:
    """The same graph, of whose values no more is said."""
    made = [
        fxremat.capture(network(body), square(), loss=torch.sum, ignore_checkpoints=is_ignored)
        for body, is_ignored in ((plain, False), (BODIES[name], True))
    ]
    without, ignored = (signature(graph).fingerprint for graph in made)
    assert ignored == without
    said = {(node.at_least, node.at_most, node.wish, node.keep) for node in made[1].nodes}
    assert said == {(node.at_least, node.at_most, node.wish, node.keep) for node in made[0].nodes}


def test_a_captured_policy_holds() -> None:
    """Traced without Dynamo, which would number the checkpoints, orders are those of the compiled model."""
    graph = fxremat.capture(network(BODIES["selective"]), square(), loss=torch.sum)
    counts = fxremat.plan(graph, "min", fusion="inplace").mirror_counts
    assert {"tanh", "exp"} <= counts.keys() and not any(name.startswith("addmm") for name in counts)


def test_orders_are_dropped() -> None:
    """What a policy must save may be computed again then, and what it must compute again may be kept."""
    options = {"ignore_checkpoints": True}
    (lowest,) = assert_trains_alike(network(BODIES["selective"]), [square()], budget="min", **options)
    (free,) = assert_trains_alike(network(BODIES["selective"]), [square()], budget="1MiB", **options)
    assert any(name.startswith("addmm") for name in lowest.solution.mirror_counts)
    assert free.solution.mirror_counts == {}
    assert not any("policy" in value.reason for report in (lowest, free) for value in report.values)


def test_regions_stay_in_force() -> None:
    """They are fxremat's own."""

    def body(p: Program, x: Tensor) -> Tensor:
        with fxremat.region(keep=True):
            return checkpoint(lambda y: (y @ p.weight).tanh().exp().sin(), x, use_reentrant=False)

    (report,) = assert_trains_alike(
        program(body), [square()], planner=everything(1), ignore_checkpoints=True, budget=None
    )
    assert not {"tanh", "exp", "mm"} & report.solution.mirror_counts.keys()


def test_an_effect_in_a_checkpoint_happens_once(capfd: pytest.CaptureFixture[str]) -> None:
    """As often as in the forward, where eager's checkpoint prints again in the backward."""

    def part(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh()
        torch.ops.aten._print("inside")
        return y.exp()

    def body(p: Program, x: Tensor) -> Tensor:
        return checkpoint(part, p, x, use_reentrant=False).sin()

    subject = compiled(program(body), planner=everything(1), ignore_checkpoints=True)
    subject(square()).sum().backward()
    assert capfd.readouterr().out.count("inside") == 1


def test_a_fallback_finds_the_checkpoints_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's partitioner, which takes over where planning fails, gets the model as it is."""
    tagged = []
    partition = partitioners.min_cut_partition

    def seen(module: Any, inputs: Any, **keywords: Any) -> Any:
        tagged.append([node for node in module.graph.nodes if "recompute" in node.meta])
        return partition(module, inputs, **keywords)

    monkeypatch.setattr(partitioners, "min_cut_partition", seen)
    options = {"budget": 1, "on_error": "fallback", "ignore_checkpoints": True, "scope": "graph"}
    subject = compiled(network(checkpointed()), **options)
    with pytest.warns(UserWarning, match="leaves .* to PyTorch's partitioner"):
        subject(square()).sum().backward()
    assert tagged and tagged[0]


@pytest.mark.slow
@pytest.mark.inductor
def test_ignored_checkpoints_reach_inductor() -> None:
    """Behind its decompositions and joint passes, without dropout, whose numbers are Inductor's own."""

    def body(p: Program, x: Tensor) -> Tensor:
        keywords: Any = {"use_reentrant": False, "context_fn": SELECTIVE}
        for layer in p.layers:
            x = checkpoint(lambda y, layer=layer: layer(y).tanh().exp(), x, **keywords)
        return x.sin()

    subject = network(body)
    expected = outcome(subject, [square()])
    subject.zero_grad()
    found = compiled(subject, compiler="inductor", budget="min", ignore_checkpoints=True)
    for key, tensor in outcome(found, [square()]).items():
        torch.testing.assert_close(tensor, expected[key], msg=lambda text, key=key: f"{key}: {text}")
    assert not any("policy" in value.reason for value in fxremat.reports()[-1].values)


def test_a_plan_of_a_captured_graph_ignores_no_more() -> None:
    """The graph is made by then: the option is refused, not left out in silence."""
    graph = fxremat.capture(network(plain), square(), loss=torch.sum)
    with pytest.raises(InvalidOptionError, match=r"fxremat\.capture"):
        fxremat.make_plan(graph, ignore_checkpoints=True)


def test_an_estimate_runs_no_checkpoint() -> None:
    """Under a profiler a step is estimated from what autograd holds; a checkpoint is computed again once."""
    layer, runs = compiled(nn.Linear(4, 4), budget="1MiB"), []

    def part(x: Tensor) -> Tensor:
        runs.append(x)
        return (x @ x).tanh()

    with profile(activities=[ProfilerActivity.CPU]):
        y = checkpoint(part, layer(square()), use_reentrant=False, context_fn=SELECTIVE)
        y.sum().backward()
    assert len(runs) == 2
