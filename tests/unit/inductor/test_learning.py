"""What code has shown: it makes predictions right, of its own plan and of others, and finds lower plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from devices import threads
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from unseen import no_loops

import fxremat
from fxremat._torch.lowered import GeneratedCode
from fxremat.driver import compilation
from fxremat.driver.correction import Correction
from fxremat.driver.pipeline import Choice
from fxremat.graph.joint import JointGraph
from fxremat.graph.schedule import Schedule, bind
from fxremat.inductor.facts import facts, informed, like
from fxremat.inductor.generated import CodeMemory, Handed, read
from fxremat.inductor.learning import learn
from fxremat.inductor.shown import NOTHING, Shown, Spot, State
from fxremat.predict.models import INDUCTOR

# --- Spots ------------------------------------------------------------------------------------------------


def chain() -> JointGraph:
    """Two values, of which the gradient reads the first."""
    return JointGraph.from_mappings(
        {"x": (), "a": ["x"], "b": ["a"], "db": ["b"], "da": ["db", "a"]},
        {"a": 4, "b": 2, "db": 2, "da": 4},
        backward=["db", "da"],
        backward_outputs=["da"],
    )


def readers_of(schedule: Schedule) -> list[list[int]]:
    """For each step, those that read it."""
    reads = bind(chain(), schedule).reads
    return [[step for step, read in enumerate(reads) if of in read] for of in range(len(reads))]


def test_what_is_known_holds_where_the_same_nodes_read_a_value() -> None:
    """Be it computed again or not; and nowhere else."""
    kept, again = Schedule(("a", "b", "db", "da")), Schedule(("a", "b", "db", "a", "da"))
    at = Spot(1, False, (2,))
    shown = Shown({at: State.STORED}, {(Spot(1, True, (4,)), 4): 16}, {at: frozenset({0})})
    binding, readers = bind(chain(), kept), readers_of(kept)
    assert not shown.states_of(binding, readers) and not list(shown.copies_of(binding, readers))
    assert not any(shown.never_of(binding, readers).values())
    binding, readers = bind(chain(), again), readers_of(again)
    assert shown.states_of(binding, readers) == {0: State.STORED}
    assert list(shown.copies_of(binding, readers)) == [(3, 4, 16)]
    assert shown.never_of(binding, readers)[0] == {0}


def test_a_state_of_its_own_comes_before_that_of_the_other_run() -> None:
    """A value that is computed again may become something else."""
    schedule = Schedule(("a", "b", "db", "a", "da"))
    binding, readers = bind(chain(), schedule), readers_of(schedule)
    spots = {Spot(1, True, (4,)): State.INLINED, Spot(1, False, (4,)): State.STORED}
    assert Shown(spots).states_of(binding, readers) == {3: State.INLINED}


# --- Learning ---------------------------------------------------------------------------------------------


class Gates(nn.Module):
    """Convolutions whose inputs their gradients read in another layout than gates do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(4))
        self.mixes = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, mix, norm in zip(self.layers, self.mixes, self.norms, strict=True):
            x = x + mix(torch.sigmoid(norm(layer(x))))
        return x.square().mean()


class Softmax(nn.Module):
    """Sums of rows, whose summands a CPU keeps; under bfloat16, or of layers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.softmax(layer(x).float(), -1).bfloat16()
        return x.float().square().mean()


class Layer(nn.Module):
    """What no other plan takes less memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean()


Network = tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]  # and the shape of its input

GATES: Network = Gates, (2, 8, 32, 32), torch.float32
SOFTMAX: Network = Softmax, (256, 64), torch.bfloat16
LAYER: Network = Layer, (256, 64), torch.float32

MUCH = 1 << 20  # bytes, beside those of any network


@pytest.fixture(autouse=True)
def no_kernels() -> Iterator[None]:
    """Loops do nothing, so that no C++ compiler runs; and are those of one thread, on any machine."""
    torch._dynamo.reset()
    with no_loops(), threads(1):
        yield
    torch._dynamo.reset()


def compiled(network: Network, budget: Any) -> fxremat.Report:
    """The report of a network under a budget."""
    make, shape, dtype = network
    module = make().to(dtype)
    options = {"budget": budget, "scope": "graph", "fx_graph_cache": False, "time_limit_seconds": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(module, backend="fxremat", options=options)(torch.ones(shape, dtype=dtype)).backward()
    return fxremat.reports()[-1]


class Seen:
    """What a compilation has learnt from, plan by plan: the choice, its codes, and what became of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[tuple[Choice, list[tuple[GeneratedCode, CodeMemory]]]] = []
        self.were_as_usual: list[bool] = []
        usual = Correction._compare

        def compare(this: Correction, choice: Choice, peak_bytes: int, is_whole: bool) -> None:
            if is_whole:
                self.plans.append((choice, list(this._codes)))
                self.were_as_usual.append(this.is_as_usual)
            usual(this, choice, peak_bytes, is_whole)

        monkeypatch.setattr(Correction, "_compare", compare)


def error(graph: JointGraph, schedule: Schedule, code: CodeMemory) -> float:
    """By how much of it a backward's code is off its prediction."""
    profile = INDUCTOR.profile(graph, schedule)
    return abs(int(profile.live_bytes[profile.boundary :].max()) / code.peak_bytes - 1)


@pytest.mark.parametrize(
    "network",
    [pytest.param(GATES, id="gates"), pytest.param(SOFTMAX, id="softmax")],
)
def test_predictions_get_right(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a plan from its own code, and that of other plans from code without a budget."""
    seen = Seen(monkeypatch)
    compiled(network, None)
    (default, codes), *_ = seen.plans
    compiled(network, "min")
    (least, least_codes), *_ = seen.plans[1:]
    graph, schedule = least.problem.graph, least.solution.schedule
    backward = least_codes[-1][1]
    before = error(graph, schedule, backward)
    own = learn(graph, bind(graph, schedule), least_codes)
    assert error(own, schedule, backward) <= min(0.02, before)
    taught = learn(default.problem.graph, bind(default.problem.graph, default.solution.schedule), codes)
    assert error(taught, default.solution.schedule, codes[-1][1]) <= 0.02
    assert error(like(graph, taught), schedule, backward) <= before


def test_what_explains_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code whose peak is as it was predicted teaches nothing."""
    seen = Seen(monkeypatch)
    compiled(GATES, None)
    (choice, codes), *_ = seen.plans
    graph, binding = choice.problem.graph, bind(choice.problem.graph, choice.solution.schedule)
    live = INDUCTOR.profile(graph, choice.solution.schedule).live_bytes
    parts = live[: binding.boundary], live[binding.boundary :]
    as_told = [
        (code, replace(memory, peak_bytes=int(part.max())))
        for (code, memory), part in zip(codes, parts, strict=True)
    ]
    assert learn(graph, binding, as_told) is graph
    assert facts(informed(graph, NOTHING, graph.scratch_bytes)).shown == NOTHING


# --- Plans ------------------------------------------------------------------------------------------------


def needing(*sizes: int) -> Callable[[GeneratedCode, Handed], CodeMemory | None]:
    """What ``read`` would say if a convolution's gradient took scratch memory: of a plan each, then none."""
    left = iter(sizes)

    def read_more(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        found = read(given, held)
        if found is None or not given.is_backward:
            return found
        size = next(left, 0)
        scratch_bytes = {**found.scratch_bytes, "convolution_backward": size}
        return replace(found, peak_bytes=found.peak_bytes + size, scratch_bytes=scratch_bytes)

    return read_more


def test_kernels_are_those_of_the_last_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those before, none has been compiled when their backward's code asks for another."""
    seen = Seen(monkeypatch)
    monkeypatch.setattr(compilation, "read", needing(MUCH))
    compile_usual, sources = AsyncCompile.cpp_pybinding, list[str]()

    def compile_kernel(*args: Any) -> Any:
        sources.append(args[-1])
        return compile_usual(*args)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", compile_kernel):  # left before that of the fixture
        compiled(GATES, "min")
    first, last = ("".join(code.text for code, _ in codes) for _, codes in (seen.plans[0], seen.plans[-1]))
    assert first != last
    assert len(sources) == last.count("async_compile.cpp_pybinding(")
    assert all(source in last for source in sources)


@pytest.mark.parametrize("sizes", [pytest.param((MUCH,), id="second"), pytest.param((MUCH,) * 9, id="first")])
def test_the_least_memory_is_that_of_the_code(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all plans that were looked at, the one stays whose code holds the least."""
    seen = Seen(monkeypatch)
    monkeypatch.setattr(compilation, "read", needing(*sizes))
    report = compiled(GATES, "min")
    peaks = [max(memory.peak_bytes for _, memory in codes) for _, codes in seen.plans]
    assert report.lowered_peak_bytes == min(peaks) < max(peaks)
    assert (peaks[0] == min(peaks)) is (len(sizes) > 1)


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (2, 3)])
def test_the_least_plan_runs_as_without_a_budget(
    parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is preferred without one; and in its own order only where its code holds less than that does."""
    predicted = compiled(LAYER, "min").solution.peak_bytes
    seen = Seen(monkeypatch)

    def found(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        memory = read(given, held)
        part = parts[len(seen.plans) == 1]
        return memory and replace(memory, peak_bytes=part * predicted)

    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "read", found)
    report = compiled(LAYER, "min")
    assert seen.were_as_usual == {(1, 1): [True], (2, 1): [True, False], (2, 3): [True, False, True]}[parts]
    assert report.lowered_peak_bytes == min(parts) * predicted


def test_a_budget_is_found_again_with_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget stays the part of the peak that was predicted first."""
    first: list[int | None] = []

    def more(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        found = read(given, held)
        if found is not None and not first:
            found = replace(found, peak_bytes=2 * found.peak_bytes)
        first.append(None)
        return found

    plain = compiled(SOFTMAX, 0.8)
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "read", more)
    report = compiled(SOFTMAX, 0.8)
    assert report.budget_bytes == plain.budget_bytes and report.lowered_peak_bytes is not None
    assert report.budget_bytes is not None and report.lowered_peak_bytes <= report.budget_bytes


def test_a_budget_is_refused_where_the_least_memory_takes_more() -> None:
    """And what the error says is what the least memory takes, and works as the budget."""
    least = compiled(SOFTMAX, "min").lowered_peak_bytes
    assert least is not None
    torch._dynamo.reset()
    with pytest.raises(fxremat.InfeasibleBudgetError) as raised:
        compiled(SOFTMAX, least // 2)
    assert raised.value.lowest_peak_bytes == least
    torch._dynamo.reset()
    report = compiled(SOFTMAX, raised.value.lowest_peak_bytes)
    assert report.lowered_peak_bytes is not None and report.lowered_peak_bytes <= least


def test_a_budget_that_only_the_code_keeps_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is predicted to fit; the code of the lowest takes less than was predicted."""
    seen = Seen(monkeypatch)
    compiled(SOFTMAX, "min")
    (_, codes), *_ = seen.plans
    budget = max(memory.peak_bytes for _, memory in codes) // 2

    def less(given: GeneratedCode, held: Handed) -> CodeMemory | None:
        found = read(given, held)
        return found and replace(found, peak_bytes=found.peak_bytes // 2)

    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "read", less)
    report = compiled(SOFTMAX, budget)
    assert report.lowered_peak_bytes is not None and report.budget_bytes == budget
    assert report.lowered_peak_bytes <= budget < report.solution.peak_bytes
