"""annotate: regions and checkpoint policies are obeyed by every planner, at every budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training import assert_same_outcome

import fxremat
from fxremat.driver.pipeline import make_problem, solve
from fxremat.errors import GraphError, InvalidOptionError, ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.graph.region import regions_outside
from fxremat.planners import PLANNERS

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compiled graphs of one test are nothing to the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Marked(nn.Module):
    """A chain whose tanh is to be computed again, its sigmoid kept, and its sine mirrored."""

    def __init__(self, mirror: int = 1) -> None:
        super().__init__()
        self.mirror = mirror
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fxremat.region(recompute=True):
            x = torch.tanh(self.layers[0](x))
        x = torch.relu(self.layers[1](x))
        with fxremat.region(keep=True):
            x = torch.sigmoid(self.layers[2](x))
        with fxremat.region(mirror=self.mirror):
            y = torch.sin(self.layers[3](x))
        return (x * y).sum()


def marked(mirror: int = 1) -> JointGraph:
    """The graph of ``Marked``, captured."""
    torch.manual_seed(0)
    return fxremat.capture(Marked(mirror), torch.randn(4, 8))


def step(model: nn.Module, compiled: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = compiled(x)
    loss.backward()
    return {"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}}


# --- Regions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "exact"])  # see test_exact.py
def test_every_planner_obeys(planner: str) -> None:
    """At no point of its frontier is a kept value computed again, or a dropped one read by the backward."""
    problem = make_problem(marked(), fusion="none")
    for solution in solve(problem, planner):
        problem.check(solution)
        counts = solution.mirror_counts
        assert "sigmoid" not in counts and counts["tanh"] >= 1 and counts["sin"] == 1


@pytest.mark.parametrize("budget", [None, "1MiB", "min"])
def test_regions_reach_the_compiled_graph(budget: float | str | None) -> None:
    """Through Dynamo and AOTAutograd; loss and gradients are those of the plain model, bit for bit."""
    torch.manual_seed(0)
    model, x = Marked(), torch.randn(4, 8)
    expected = step(model, model, x)
    options = {"budget": budget, "compiler": "eager"}
    found = step(model, torch.compile(model, backend="fxremat", options=options), x)
    assert_same_outcome(found, expected)
    counts = fxremat.reports()[-1].solution.mirror_counts
    assert "sigmoid" not in counts and counts["tanh"] >= 1 and counts["sin"] == 1


@pytest.mark.parametrize("planner", ["auto", "drop_cheap", "min_cut"])
def test_values_without_a_number_may_be_ordered(planner: str) -> None:
    """A normalisation by running statistics has empty results beside its own, which cost no bytes."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).eval()

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(mirror=2):
                x = self.norm(x)
            return x.exp().sum()

    model = Normalised()
    x = torch.randn(3, 4)
    expected = step(model, model, x)
    options = {"compiler": "eager", "budget": "min", "planner": planner}
    found = step(model, torch.compile(model, backend="fxremat", options=options), x)
    assert_same_outcome(found, expected)


@pytest.mark.inductor
def test_regions_reach_inductor() -> None:
    """Behind its decompositions and joint passes."""
    torch.manual_seed(0)
    model, x = Marked(), torch.randn(4, 8)
    expected = step(model, model, x)
    found = step(model, torch.compile(model, backend="fxremat", options={"budget": "min"}), x)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    counts = fxremat.reports()[-1].solution.mirror_counts
    assert "sigmoid" not in counts and counts["tanh"] >= 1 and counts["sin"] == 1


def test_a_mirror_count_of_zero_keeps() -> None:
    """As in the paper: m(v) = 0 keeps v's output."""
    counts = fxremat.plan(marked(mirror=0), "min", fusion="none").mirror_counts
    assert "sin" not in counts and "tanh" in counts


def test_the_innermost_region_counts() -> None:
    """A region inside another replaces it."""

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(recompute=True):
                x = torch.tanh(x)
                with fxremat.region(keep=True):
                    x = torch.sigmoid(x)
                return torch.sin(x).sum()

    graph = fxremat.capture(Nested(), torch.randn(4, requires_grad=True))
    orders = {node.name: (node.at_least, node.at_most) for node in graph.nodes}
    assert orders["tanh"] == orders["sin"] == (1, None) and orders["sigmoid"] == (0, 0)


def test_outside_of_a_graph_a_region_does_nothing_and_is_reported() -> None:
    """The line of the ``with`` is in the notes of the reports."""
    with fxremat.region(recompute=True):
        assert torch.tanh(torch.zeros(1)).item() == 0.0
    model = Marked()
    step(model, torch.compile(model, backend="fxremat", options={"compiler": "eager"}), torch.randn(4, 8))
    notes = [note for note in fxremat.reports()[-1].notes if "outside of any graph" in note]
    assert any("test_regions.py" in note for note in notes)


def test_a_region_with_a_graph_break_inside_of_it_runs() -> None:
    """Dynamo leaves what calls it as it is, and does not compile it by itself."""

    def branch(x: Tensor) -> Tensor:
        with fxremat.region(keep=True):
            y = x.exp() * (2 if x.sum() > 0 else 3)
        return y.sin()

    x = torch.ones(4, requires_grad=True)
    compiled = torch.compile(branch, backend="fxremat", options={"budget": "min", "compiler": "eager"})
    for _ in range(2):
        torch.testing.assert_close(compiled(x), branch(x))


def test_a_region_that_runs_while_capturing_is_not_outside() -> None:
    """Neither is one that AOTAutograd runs on fake tensors to learn what the model does."""
    before = regions_outside()
    marked()
    assert regions_outside() == before


def test_what_cannot_be_computed_again_is_kept_and_noted() -> None:
    """What reads a buffer would read what was written to it since; the note has the user's line."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("steps", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(recompute=True):
                x = torch.add(torch.tanh(self.linear(x)), self.steps)
            self.steps *= 1  # written to, and the same in every step
            return (x * x).sum()

    model, x = Counted(), torch.randn(4, 8)
    expected = step(model, model, x)
    found = step(model, torch.compile(model, backend="fxremat", options={"compiler": "eager"}), x)
    assert_same_outcome(found, expected)
    (note,) = (note for note in fxremat.reports()[-1].notes if "is kept although" in note)
    assert "add" in note and "test_regions.py:" in note and "writes to" in note
    assert note in fxremat.reports()[-1].summary()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"keep": True, "mirror": 1},
        {"mirror": -1},
        {"mirror": 1.5},
        {"mirror": True},
        {"mirror": "2"},
        {"mirror": torch.tensor(2)},
        {"keep": False},
        {"keep": True, "recompute": True},
        {"recompute": 1, "keep": 1},
        *(
            {name: value}
            for name in ("keep", "recompute")
            for value in (None, 0, 1, "no", torch.tensor(True))
        ),
    ],
    ids=str,
)
def test_regions_without_a_meaning_are_refused(arguments: dict[str, Any]) -> None:
    """Exactly one of the three, True or False, and a whole number of mirrors."""
    with pytest.raises(InvalidOptionError):
        fxremat.region(**arguments)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("arguments", [{"keep": 0}, {"recompute": "no"}, {"mirror": -1}, {}], ids=str)
def test_regions_without_a_meaning_are_refused_where_they_are_compiled(
    arguments: dict[str, Any], fullgraph: bool
) -> None:
    """The same error, with the line of the model."""

    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(**arguments):
                return torch.tanh(x).sum()

    options = {"compiler": "eager"}
    subject = torch.compile(Wrong(), backend="fxremat", fullgraph=fullgraph, options=options)
    with pytest.raises(InvalidOptionError, match=r"test_regions\.py.*\n.*fxremat\.region"):
        subject(torch.ones(2, requires_grad=True))


def test_a_schedule_that_disobeys_is_refused() -> None:
    """A planner's own schedule is checked; the error names the node."""
    graph = marked()
    with pytest.raises(ScheduleError, match="region or checkpoint policy"):
        fxremat.plan(graph, planner=lambda problem: graph.names, fusion="none")


# --- A function from node to mirror count ---------------------------------------------------------------


def test_a_function_of_a_node_is_a_planner() -> None:
    """It is given fx nodes, so that it sees targets; the rest of the forward stays."""

    def cheap(node: torch.fx.Node) -> int:
        return int(node.target in (aten.relu.default, aten.sin.default))

    solution = fxremat.plan(marked(), planner=cheap, fusion="none")
    assert solution.planner == "cheap"
    assert {name for name, count in solution.mirror_counts.items() if count} >= {"relu", "sin", "tanh"}
    assert "sigmoid" not in solution.mirror_counts


def test_a_function_of_a_node_works_on_mappings() -> None:
    """Without an fx graph it is given the graph's own nodes."""
    graph = JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "db": ["b"], "da": ["db", "a"]},
        {"a": 4, "b": 4, "db": 4, "da": 4},
        backward=["db", "da"],
        backward_outputs=["da"],
    )
    solution = fxremat.plan(graph, planner=lambda node: int(node.name == "a"), fusion="none")
    assert solution.mirror_counts == {"a": 1}


# --- Policies of torch.utils.checkpoint -----------------------------------------------------------------


def orders(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Matrix products must be saved, tanh must be computed again."""
    if operator is aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    is_tanh = operator is aten.tanh.default
    return CheckpointPolicy.MUST_RECOMPUTE if is_tanh else CheckpointPolicy.PREFER_RECOMPUTE


def wishes(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Everything had better be computed again."""
    return CheckpointPolicy.PREFER_RECOMPUTE


ORDERS = functools.partial(create_selective_checkpoint_contexts, orders)
WISHES = functools.partial(create_selective_checkpoint_contexts, wishes)


class Selective(nn.Module):
    """Two linear layers under selective checkpointing."""

    def __init__(self, contexts: Any) -> None:
        super().__init__()
        self.contexts = contexts
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """What is checkpointed."""
        return torch.sin(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(checkpoint(self.part, x, use_reentrant=False, context_fn=self.contexts)).sum()


@pytest.mark.parametrize("budget", [None, "min"])
def test_checkpoint_policies_are_orders(budget: str | None) -> None:
    """MUST_SAVE and MUST_RECOMPUTE hold with no budget and with the tightest; results stay the same."""
    torch.manual_seed(0)
    model, x = Selective(ORDERS), torch.randn(4, 8)
    expected = step(model, model, x)
    options = {"budget": budget, "compiler": "eager"}
    found = step(model, torch.compile(model, backend="fxremat", options=options), x)
    assert_same_outcome(found, expected)
    report = fxremat.reports()[-1]
    counts = report.solution.mirror_counts
    assert not any(name.startswith("addmm") for name in counts)
    assert {name for name in counts if name.startswith("tanh")} == {"tanh", "tanh_1"}
    assert "MUST_SAVE" in {value.reason.rpartition(" ")[2] for value in report.values if value.saved_bytes}


def test_wishes_hold_where_the_budget_leaves_a_choice() -> None:
    """PREFER_RECOMPUTE is followed without a budget, and not where a generous one lets everything be kept."""
    torch.manual_seed(0)
    model, x = Selective(WISHES), torch.randn(4, 8)
    step(model, torch.compile(model, backend="fxremat", options={"compiler": "eager"}), x)
    assert fxremat.reports()[-1].solution.mirror_counts.keys() >= {"tanh", "addmm_1"}
    torch._dynamo.reset()
    generous = {"compiler": "eager", "budget": "1MiB"}
    step(model, torch.compile(model, backend="fxremat", options=generous), x)
    assert fxremat.reports()[-1].solution.mirror_counts == {}


def test_contradicting_orders_are_errors() -> None:
    """A region that keeps what a policy must compute again; the error names both."""

    class Torn(Selective):
        def part(self, x: torch.Tensor) -> torch.Tensor:
            with fxremat.region(keep=True):
                return super().part(x)

    model = Torn(ORDERS)
    compiled = torch.compile(model, backend="fxremat", options={"compiler": "eager"})
    with pytest.raises(GraphError, match=r"region says keep.*MUST_RECOMPUTE"):
        step(model, compiled, torch.randn(4, 8))
