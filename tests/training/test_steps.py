"""Steps of several graphs: gradients are eager's bit for bit, and the budget bounds the whole step's peak."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training import compiled

import fxremat
from fxremat import InfeasibleBudgetError, StepReport
from fxremat.driver import runner
from fxremat.driver.correction import Correction
from fxremat.driver.runner import Runner
from fxremat.graph.collector import collector_paused
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Binding
from fxremat.measure import measure_peak
from fxremat.step.step import steps

WIDTH, ROWS = 16, 64
SLACK_BYTES = 512  # that a step may take beyond its budget

Wrap = Callable[[nn.Module], Any]  # what makes of a module what a program calls: it is compiled, or stays
Step = Callable[[], Tensor]  # one training step, which returns its loss
Built = tuple[nn.ModuleList, Step]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Breaking(nn.Module):
    """Blocks in a forward that breaks into a graph for each."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def blocks(count: int = 3) -> nn.ModuleList:
    """Blocks with the same weights each time."""
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


@functools.cache  # what a step makes itself is a part of its peak
def rows(count: int = ROWS, seed: int = 1) -> Tensor:
    """A batch."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def run(calls: list[Any], x: Tensor) -> Tensor:
    """One call after the other."""
    for call in calls:
        x = call(x)
    return x


def trained(calls: list[Any], *batches: Tensor) -> Tensor:
    """A forward and a backward for each batch, gradients accumulated; the sum of the losses."""
    total = torch.zeros(())
    for batch in batches:
        loss = run(calls, batch).square().mean()
        loss.backward()
        total += loss.detach()
    return total


# --- Programs -----------------------------------------------------------------------------------------


def blocks_one_by_one(wrap: Wrap) -> Built:
    """Each block is a graph of its own, and the loss is outside."""
    modules = blocks()
    calls = [wrap(block) for block in modules]
    return modules, lambda: trained(calls, rows())


def graph_breaks(wrap: Wrap) -> Built:
    """The whole model is compiled, and falls into parts."""
    modules = blocks()
    call = wrap(Breaking(modules))
    return modules, lambda: trained([call], rows())


def one_block_many_times(wrap: Wrap) -> Built:
    """The calls of one graph get plans of their own."""
    modules = blocks(1)
    call = wrap(modules[0])
    return modules, lambda: trained([call] * 3, rows())


def accumulation(wrap: Wrap) -> Built:
    """Gradients of one batch are live while the next is trained on."""
    modules = blocks()
    call = wrap(nn.Sequential(*modules))
    return modules, lambda: trained([call], *(rows(seed=seed) for seed in range(3)))


def accumulation_by_blocks(wrap: Wrap) -> Built:
    """The same, one graph for each block."""
    modules = blocks(3)
    calls = [wrap(block) for block in modules]
    return modules, lambda: trained(calls, *(rows(seed=seed) for seed in range(3)))


def one_backward_for_two_batches(wrap: Wrap) -> Built:
    """All calls wait until the losses are added up."""
    modules = blocks(3)
    calls = [wrap(block) for block in modules]

    def step() -> Tensor:
        loss = sum(run(calls, rows(seed=seed)).square().mean() for seed in range(2))
        loss.backward()
        return loss.detach()

    return modules, step


def adversaries(wrap: Wrap) -> Built:
    """A GAN: two models, three backwards of two losses, and a call that waits through one of them."""
    modules = blocks(4)
    generator, critic = wrap(nn.Sequential(*modules[:2])), wrap(nn.Sequential(*modules[2:]))

    def step() -> Tensor:
        made = generator(rows())
        found = critic(rows(seed=2)).sigmoid().mean() - critic(made.detach()).sigmoid().mean()
        found.backward()
        fooled = critic(made).sigmoid().mean()
        fooled.backward()
        return found.detach() + fooled.detach()

    return modules, step


def validation_between(wrap: Wrap) -> Built:
    """Without gradients behind each step, of fewer rows: what it takes is not the step's."""
    modules = blocks(3)
    calls = [wrap(block) for block in modules]

    def step() -> Tensor:
        loss = trained(calls, rows())
        with torch.no_grad():
            return loss + run(calls, rows(seed=2)[: ROWS // 4]).mean()

    return modules, step


def forwards_that_nobody_needs(wrap: Wrap) -> Built:
    """Their backward never comes."""
    modules = blocks(3)
    calls = [wrap(block) for block in modules]

    def step() -> Tensor:
        ignored = run(calls, rows(seed=2)).detach().mean()
        return trained(calls, rows()) + ignored

    return modules, step


def optimizer(wrap: Wrap) -> Built:
    """Parameters change from step to step, and gradients are set to zero, not let go."""
    modules = blocks(3)
    calls = [wrap(block) for block in modules]
    sgd = torch.optim.SGD(modules.parameters(), 0.1)

    def step() -> Tensor:
        loss = trained(calls, rows())
        sgd.step()
        return loss

    return modules, step


PROGRAMS = (
    blocks_one_by_one,
    graph_breaks,
    one_block_many_times,
    accumulation,
    accumulation_by_blocks,
    one_backward_for_two_batches,
    adversaries,
    validation_between,
    forwards_that_nobody_needs,
    optimizer,
)
# What the highest moment of a step consists of is all known there.
EXACT = (blocks_one_by_one, graph_breaks, one_block_many_times, accumulation, optimizer)


def wrapped(**options: Any) -> Wrap:
    """Compile a module, and search little."""
    return lambda module: compiled(module, time_limit_seconds=0.02, **options)


def step_alike(found: Built, expected: Built) -> None:
    """Take a step of both, from no gradients: losses and gradients are the same."""
    for modules, _ in (found, expected):
        modules.zero_grad()
    assert torch.equal(found[1](), expected[1]())
    for own, other in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)


def peak(built: Built) -> int:
    """The measured peak of a step that begins without gradients."""
    modules, step = built
    modules.zero_grad()
    found = measure_peak(step, device="cpu").peak_bytes
    modules.zero_grad()
    return found


def learnt(program: Callable[[Wrap], Built], **options: Any) -> tuple[Built, tuple[StepReport, ...]]:
    """The program after two steps, which are eager's, and the reports of its steps."""
    count = len(fxremat.steps())
    found, expected = program(wrapped(**options)), program(lambda module: module)
    for _ in range(2):
        step_alike(found, expected)
    return found, fxremat.steps()[count:]


# --- What holds for all -------------------------------------------------------------------------------


def one_budget_each() -> list[Any]:
    """Programs and budgets; of each program one takes part in every run."""
    pairs = itertools.product(enumerate(PROGRAMS), enumerate((0.6, "min")))
    return [
        pytest.param(program, budget, marks=() if (turn + place) % 2 == 0 else pytest.mark.slow)
        for (turn, program), (place, budget) in pairs
    ]


@pytest.mark.parametrize(
    ("program", "budget"), one_budget_each(), ids=lambda each: getattr(each, "__name__", str(each))
)
def test_a_step_keeps_its_budget(program: Callable[[Wrap], Built], budget: float | str) -> None:
    """After two steps to learn from the measured peak is as predicted, or lower; gradients are eager's."""
    without = peak(program(lambda module: module))
    try:
        found, reports = learnt(program, budget=budget)
    except InfeasibleBudgetError as error:
        assert error.lowest_peak_bytes > error.budget_bytes
        found, reports = learnt(program, budget=error.lowest_peak_bytes)
    highest = max(reports, key=lambda report: report.peak_bytes)
    measured = peak(found)
    assert measured <= highest.peak_bytes + SLACK_BYTES
    if program in EXACT and budget != "min":
        assert highest.peak_bytes <= measured + SLACK_BYTES
    assert all(each.budget_bytes is None or measured <= each.budget_bytes + SLACK_BYTES for each in reports)
    assert highest.peak_bytes < highest.baseline_peak_bytes
    assert highest.baseline_peak_bytes <= without + SLACK_BYTES


@pytest.mark.parametrize(
    "program",
    [blocks_one_by_one, pytest.param(adversaries, marks=pytest.mark.slow)],
    ids=lambda program: program.__name__,
)
def test_a_smaller_budget_takes_no_more(program: Callable[[Wrap], Built]) -> None:
    """Down to the least, than which no budget does better."""
    peaks = [max(each.peak_bytes for each in learnt(program, budget=b)[1]) for b in (0.7, "min")]
    assert peaks == sorted(peaks, reverse=True)


def test_what_code_shows_of_settled_plans_is_known_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan's code is looked at once; all plans of the graph are weighed with what it shows."""
    extra, heard = 1 << 20, []

    def taught(graph: JointGraph, binding: Binding, codes: object) -> JointGraph:
        heard.append(binding)
        scratch = graph.scratch_bytes or (0,) * len(graph.nodes)
        return replace(graph, scratch_bytes=tuple(size + extra for size in scratch))

    found, _ = learnt(blocks_one_by_one, budget=0.7)
    graphs = {known.graph for family in steps.families.values() for known in family.calls()}
    graph = next(each for each in graphs if each.options.budget == 0.7 and isinstance(each, Runner))
    before = graph.candidates
    assert [graph.seen(each) for each in before] == list(before)
    monkeypatch.setattr(runner, "learn", taught)
    monkeypatch.setattr(Correction, "surprises", property(lambda self: ("code",)))
    for _ in range(2):
        seen = graph.candidates
        assert [each.schedule for each in seen] == [each.schedule for each in before]
        assert all(new.forward_bytes > old.forward_bytes for new, old in zip(seen, before, strict=True))
        assert all(new.backward_bytes > old.backward_bytes for new, old in zip(seen, before, strict=True))
        assert all(new.held_bytes == old.held_bytes for new, old in zip(seen, before, strict=True))
        assert len(heard) == len(graph.variants)
    step_alike(found, blocks_one_by_one(lambda module: module))


# --- What is refused ----------------------------------------------------------------------------------


def test_a_part_that_is_too_little_for_a_block_may_be_enough_for_the_step() -> None:
    """A budget is refused for the step, not for the first of its graphs by itself."""
    _, (report,) = learnt(blocks_one_by_one, budget="min")
    part = report.lowest_peak_bytes / report.baseline_peak_bytes + 0.01
    with pytest.raises(InfeasibleBudgetError):  # a block has less to drop than many have
        compiled_alone = compiled(blocks()[0], budget=part, scope="graph")
        compiled_alone(rows())
    found, (report,) = learnt(blocks_one_by_one, budget=part)
    assert report.budget_bytes is not None and peak(found) <= report.budget_bytes + SLACK_BYTES


def test_an_impossible_budget_is_refused_each_time_with_one_that_works() -> None:
    """It takes a step to know; the error says what the least is."""
    _, step = blocks_one_by_one(wrapped(budget=0.05))
    step()
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError, match="the step") as caught:
            step()
    fxremat.steps()  # and reports of other steps are there
    found, (report,) = learnt(blocks_one_by_one, budget=caught.value.lowest_peak_bytes)
    assert report.peak_bytes <= caught.value.lowest_peak_bytes + SLACK_BYTES
    assert peak(found) <= caught.value.lowest_peak_bytes + SLACK_BYTES


def test_a_graph_that_is_not_the_first_may_take_what_others_can_give_back() -> None:
    """The first model fills the budget when it is compiled; the second is not refused for that."""
    modules = blocks(4)
    halves = [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])]
    lowest = max(each.lowest_peak_bytes for each in learnt(_in_halves, budget="min")[1])
    calls = [wrapped(budget=lowest + SLACK_BYTES)(half) for half in halves]
    for _ in range(2):
        modules.zero_grad()
        trained(calls, rows())
    assert peak((modules, lambda: trained(calls, rows()))) <= lowest + 2 * SLACK_BYTES


def _in_halves(wrap: Wrap) -> Built:
    modules = blocks(4)
    calls = [wrap(nn.Sequential(*modules[:2])), wrap(nn.Sequential(*modules[2:]))]
    return modules, lambda: trained(calls, rows())


# --- Steps that differ --------------------------------------------------------------------------------


def test_gradients_that_stay_are_a_part_of_the_peak() -> None:
    """The second batch trains beside the gradients of the first."""
    once, thrice = blocks_one_by_one(lambda module: module), accumulation(lambda module: module)
    assert peak(thrice) > peak(once)
    _, reports = learnt(accumulation, budget="min")
    _, (report,) = learnt(blocks_one_by_one, budget="min")
    gradients = sum(4 * each.numel() for each in blocks().parameters())
    assert max(each.peak_bytes for each in reports) >= report.peak_bytes + gradients // 2


def test_garbage_is_not_counted_upon_to_be_collected() -> None:
    """Where that of the step before is, in the step that is recorded, the budget is kept all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))
    compiled_model = wrapped(budget=0.7)(model)
    x = torch.randn(4 * ROWS, WIDTH)

    def step(collects: bool = False) -> None:
        model.zero_grad()
        y = compiled_model(x)
        garbage: list[object] = [torch.zeros(3 * x.numel())]
        garbage.append(garbage)  # it refers to itself: the collector alone finds it
        del garbage
        if collects:
            gc.collect()
        y.square().mean().backward()

    gc.collect()
    with collector_paused():
        for collects in (False, True):
            step(collects)
        model.zero_grad()
        measured = measure_peak(step, device="cpu").peak_bytes
    (report,) = fxremat.steps()[-1:]
    assert report.peak_bytes == measured
    assert report.budget_bytes is not None and measured <= report.budget_bytes


@pytest.mark.slow
def test_a_smaller_last_batch_is_a_step_of_its_own() -> None:
    """Its graphs are compiled for it, and both keep the budget."""
    budget = 3 * peak(blocks_one_by_one(lambda module: module)) // 5
    modules, others = blocks(), blocks()
    calls = [wrapped(budget=budget)(block) for block in modules]
    for count in (ROWS, ROWS, ROWS // 4, ROWS, ROWS // 4, ROWS):
        found: Built = (modules, lambda count=count: trained(calls, rows(count)))  # type: ignore[misc]
        step_alike(found, (others, lambda count=count: trained(list(others), rows(count))))  # type: ignore[misc]
    for count in (ROWS, ROWS // 4):
        assert peak((modules, lambda count=count: trained(calls, rows(count)))) <= budget + SLACK_BYTES  # type: ignore[misc]


@pytest.mark.slow
def test_lengths_that_grow_keep_a_budget_of_bytes() -> None:
    """Symbolic sizes are planned for anew where they grow, and again for smaller ones nothing is."""
    sizes = (16, 24, 40, 64, 64, 64, 48)
    budget = 3 * peak(blocks_one_by_one(lambda module: module)) // 4
    modules, others = blocks(), blocks()
    wrap = lambda block: compiled(block, dynamic=True, time_limit_seconds=0.02, budget=budget)  # noqa: E731
    calls = [wrap(block) for block in modules]
    for size in sizes:
        step_alike(
            (modules, lambda size=size: trained(calls, rows(size))),  # type: ignore[misc]
            (others, lambda size=size: trained(list(others), rows(size))),  # type: ignore[misc]
        )
    for size in (64, 48, 16):
        assert peak((modules, lambda size=size: trained(calls, rows(size)))) <= budget + SLACK_BYTES  # type: ignore[misc]


def test_two_models_with_budgets_of_their_own() -> None:
    """The tighter one is kept; plans of the other are chosen for its own."""
    budgets = iter((0.9, 0.6))
    modules, calls = blocks(4), []
    for half in (nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])):
        calls.append(wrapped(budget=next(budgets))(half))
    others = blocks(4)
    count = len(fxremat.steps())
    for _ in range(3):
        step_alike((modules, lambda: trained(calls, rows())), (others, lambda: trained(list(others), rows())))
    (report,) = fxremat.steps()[count:]
    assert report.budget == 0.6 and report.budget_bytes is not None
    assert peak((modules, lambda: trained(calls, rows()))) <= report.budget_bytes + SLACK_BYTES


class Classifier(nn.Module):
    """Blocks and the logits of many classes; it may have the loss inside, and gives the logits as well."""

    def __init__(self, is_loss_inside: bool) -> None:
        super().__init__()
        self.blocks, self.head = blocks(), nn.Linear(WIDTH, 200)
        self.is_loss_inside = is_loss_inside

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(run(list(self.blocks), x))
        return functional.cross_entropy(logits, target) if self.is_loss_inside else logits.sum(), logits


def classifier(is_loss_inside: bool, wrap: Wrap) -> Built:
    """A classifier whose logits the program keeps until the end of the step."""
    model = Classifier(is_loss_inside)
    call, target = wrap(model), torch.zeros(ROWS, dtype=torch.long)

    def step() -> Tensor:
        loss, logits = call(rows(), target)
        loss = loss if is_loss_inside else functional.cross_entropy(logits, target)
        loss.backward()
        return loss.detach()

    return nn.ModuleList([model]), step


@pytest.mark.parametrize("is_loss_inside", [True, False], ids=["loss inside", "loss outside"])
def test_what_the_program_keeps_and_what_the_backward_lets_go_of(is_loss_inside: bool) -> None:
    """Logits that the program keeps, zeros for the gradient that nobody has, a gradient needed once."""
    (modules, step), (report,) = learnt(functools.partial(classifier, is_loss_inside), budget="min")
    modules.zero_grad()
    assert report.peak_bytes == report.measured_peak_bytes == measure_peak(step, device="cpu").peak_bytes
