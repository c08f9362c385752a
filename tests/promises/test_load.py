"""Load: what holds when the product is used hard: large graphs, threads, Ctrl-C, caches that fail."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import resource
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import large
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch.autograd import profiler
from torch.fx.proxy import TracerBase

import fxremat
from fxremat.measure import measure_peak
from fxremat.step import stored
from fxremat.step.step import steps

STEPS = 3
SLACK_BYTES = 4096  # of a step's peak, for the scalars around the graph
FOLDER = os.path.dirname(fxremat.__file__)


@pytest.fixture(autouse=True)
def no_steps_before() -> Iterator[None]:
    """No test goes on with the steps of another."""
    steps.families.clear()
    yield
    steps.families.clear()


def network(seed: int = 0, width: int = 64) -> nn.Sequential:
    """Some layers that hold enough between forward and backward to plan for."""
    torch.manual_seed(seed)
    layers = (
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.GELU())
        for _ in range(4)
    )
    return nn.Sequential(*layers)


def batch(width: int = 64) -> Tensor:
    """Its input."""
    return torch.randn(256, width, generator=torch.Generator().manual_seed(1))


def compiled(model: nn.Module, budget: Any = 0.6) -> Any:
    """The model under a budget, planned in little time."""
    options = {"compiler": "eager", "budget": budget, "planner": "recursive"}
    return torch.compile(model, backend="fxremat", options=options)


def trained(model: Any, x: Tensor, count: int = STEPS) -> list[Tensor]:
    """The gradients of the last of some steps."""
    for _ in range(count):
        model.zero_grad()
        model(x).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]


def assert_trains_as_planned(model: Any, x: Tensor, expected: list[Tensor]) -> None:
    """Steps have these gradients in every bit, and then the peak of the budget."""
    for found, right in zip(trained(model, x), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    peak_bytes = measure_peak(lambda: trained(model, x, 1), device="cpu").peak_bytes
    budget_bytes = fxremat.steps()[-1].budget_bytes
    gradient_bytes = sum(4 * each.numel() for each in expected)  # that the test has copied
    assert budget_bytes is not None and peak_bytes - gradient_bytes <= budget_bytes + SLACK_BYTES


# --- Large graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", large.KINDS)
def test_a_drawn_graph_is_planned_and_rewritten(kind: str) -> None:
    """The least plan is valid, and the graph that it is rewritten to keeps all invariants."""
    graph = large.drawn(kind, 600)
    solution = fxremat.plan(graph, budget="min", planner="recursive")
    new = fxremat.rewrite(graph, solution.schedule)
    new.check()
    forward, backward = fxremat.partition(new)
    assert len(forward.graph.nodes) + len(backward.graph.nodes) >= len(new.names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", large.KINDS)
def test_graphs_of_100_000_nodes_are_planned(kind: str) -> None:
    """Within 4 GiB, at Python's usual limit of recursion; then rewritten, checked and split."""
    graph = large.drawn(kind, 100_000)
    assert len(graph.nodes) > 90_000
    solution = fxremat.plan(graph, budget="min")
    new = fxremat.rewrite(graph, solution.schedule)
    new.check()
    fxremat.partition(new)
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < 4 << 30


# --- Many graphs --------------------------------------------------------------------------------------------


def compiled_graphs(count: int) -> tuple[list[Any], list[weakref.ref[Tensor]]]:
    """Train so many models, none like another; what the steps know of their graphs, and the parameters."""
    parameters = []
    limits = {"recompile_limit": count + 1, "accumulated_recompile_limit": count + 1}
    with torch._dynamo.config.patch(**limits):
        for width in range(32, 32 + count):
            model, x = network(width, width), batch(width)
            right = trained(copy.deepcopy(model), x, 1)
            found = trained(compiled(model), x)
            assert all(map(torch.equal, found, right))
            parameters += [weakref.ref(each) for each in model.parameters()]
    return [family.first.graph for family in steps.families.values()], parameters


def test_compiled_graphs_hold_little() -> None:
    """No parameter outlives its model, and of the planning no lowering is held."""
    graphs, parameters = compiled_graphs(3)
    torch._dynamo.reset()
    gc.collect()
    assert len(graphs) == 3 and not any(each() is not None for each in parameters)
    for graph in graphs:
        assert len(graph.planning_problem.graph.nodes) > 50 and not graph.planning_problem._latest


@pytest.mark.slow
def test_200_graphs_train_in_a_process() -> None:
    """Each has the gradients of its model, and a report."""
    before = len(fxremat.reports())
    graphs, _ = compiled_graphs(200)
    assert len(graphs) == len(fxremat.reports()) - before == 200


# --- Ctrl-C -------------------------------------------------------------------------------------------------

Site = tuple[str, str, int, str]  # file, function, line and what happens there
OURS = ("_torch", "driver", "emit", "episode", "step", "measure.py")  # whose work may be left half-done


class Interruption:
    """Interrupts a thread when it comes to a place of our code for the k-th time; counts them if to none.

    Python looks for signals when a function begins and behind each call: what is called in C has returned.
    """

    def __init__(self, site: Site | None = None, times: int = 0) -> None:
        self.site = site
        self.times = times
        self.seen: dict[Site, int] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "c_call" or not path.startswith(FOLDER):
            return
        site = os.path.relpath(path, FOLDER), frame.f_code.co_name, frame.f_lineno, event
        self.seen[site] = self.seen.get(site, 0) + 1
        if site == self.site and self.seen[site] == self.times:
            sys.setprofile(None)
            raise KeyboardInterrupt


def watched(interruption: Interruption, function: Callable[[], object]) -> bool:
    """Whether a call was interrupted."""
    sys.setprofile(interruption)
    try:
        function()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)


def patched() -> tuple[object, ...]:
    """All of torch that fxremat changes for a while."""
    return (
        GraphLowering.save_output_code,
        torch.autograd._engine_run_backward,
        profiler._prepare_profiler,
        profiler._enable_profiler,
        TracerBase.create_node,
        torch._C._autograd._profiler_enabled(),
    )


def interrupt_at(chosen: Callable[[list[Site]], list[Site]]) -> None:
    """Interrupt training at these of all places; each time the same process then trains right."""
    x = batch()
    expected = trained(network(), x, 1)
    trained(compiled(network()), x)  # what is imported and measured once is no part of it
    torch._dynamo.reset()
    before, counted = patched(), Interruption()
    model = compiled(network())
    watched(counted, lambda: trained(model, x))
    sites = sorted(site for site in counted.seen if site[0].startswith(OURS))
    interrupted = 0
    for site in chosen(sites):
        torch._dynamo.reset()
        model = compiled(network())
        times = random.Random(repr(site)).randint(1, counted.seen[site])
        interrupted += watched(Interruption(site, times), lambda each=model: trained(each, x))  # type: ignore[misc]
        try:
            assert_trains_as_planned(model, x, expected)
            assert patched() == before
        except Exception as error:
            raise AssertionError(f"after an interrupt at {site}, time {times}") from error
    assert interrupted > 0


@pytest.mark.slow
def test_ctrl_c_where_torch_is_changed_leaves_nothing_behind() -> None:
    """In the recording of steps, at some of its calls: a profiler and two patches are under way there."""
    names = ("resume", "pause", "making_way", "watching_passes")
    interrupt_at(
        lambda sites: random.Random(0).sample([s for s in sites if s[1] in names and s[3] == "c_return"], 3)
    )


@pytest.mark.slow
def test_ctrl_c_anywhere_leaves_nothing_behind() -> None:
    """At places that are drawn from all."""
    interrupt_at(lambda sites: random.Random(0).sample(sites, 60))


# --- Threads ------------------------------------------------------------------------------------------------


def test_threads_train_models_of_their_own() -> None:
    """At once, each under its own budget: the gradients and the steps of each are its own.

    They compile one after the other: while PyTorch traces in one thread, no other can call a module.
    """
    widths, budgets = (32, 48, 64), (0.6, 0.8, "min")
    turn, start, failures = threading.Lock(), threading.Barrier(len(widths)), list[str]()

    def work(width: int, budget: Any) -> None:
        try:
            x, plain = batch(width), network(width, width)
            with turn:
                expected = trained(copy.deepcopy(plain), x, 1)
                model = compiled(plain, budget)
                trained(model, x)
            start.wait(60)
            for _ in range(20):
                for found, right in zip(trained(model, x, 1), expected, strict=True):
                    torch.testing.assert_close(found, right, rtol=0, atol=0)
            (step,) = fxremat.steps()
            assert step.budget == budget and step.measured_peak_bytes is not None
            assert step.budget_bytes is None or step.measured_peak_bytes <= step.budget_bytes + SLACK_BYTES
        except Exception:
            failures.append(traceback.format_exc())
            start.abort()

    threads = [threading.Thread(target=work, args=each) for each in zip(widths, budgets, strict=True)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures, "\n".join(failures)


# --- Caches that fail ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["full", "a file", "read-only", "random bytes", "empty", "older"])
def test_training_goes_on_where_steps_cannot_be_stored(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is full or none, or what is in it can't be read: gradients and budget are the same."""
    folder = tmp_path / "steps"
    monkeypatch.setattr(stored, "folder", lambda: folder)
    x = batch()
    expected = trained(network(), x, 1)
    if fault == "a file":
        folder.write_text("no folder")
    elif fault in ("full", "read-only"):
        number = errno.ENOSPC if fault == "full" else errno.EROFS
        name = "replace" if fault == "full" else "open"

        def failing(*args: Any, **kwargs: Any) -> Any:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(
            stored.os if name == "replace" else stored.tempfile,
            "replace" if name == "replace" else "mkstemp",
            failing,
        )
    else:
        folder.mkdir()
        content = {"random bytes": random.Random(0).randbytes(200), "empty": b"", "older": b'{"calls": []}'}
        monkeypatch.setattr(stored, "_name", lambda key: "any")
        (folder / "any").write_bytes(content[fault])
    assert_trains_as_planned(compiled(network()), x, expected)
    left = list(folder.iterdir()) if folder.is_dir() else []
    assert [each for each in left if each.name != "any"] == []
