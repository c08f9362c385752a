"""Caches: what is planned again, what is served as it is, and that what is served still has its report."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.codecache import BypassFxGraphCache, compiled_fx_graph_hash
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx.experimental.proxy_tensor import make_fx
from training import square

import fxremat
from fxremat._torch import compilers
from fxremat.driver import partitioner
from fxremat.driver.cache import Outcome, fingerprint, listening
from fxremat.driver.compilation import Compilation
from fxremat.driver.partitioner import Partitioner
from fxremat.options.options import Options

# --- What the key tells apart ---------------------------------------------------------------------------


def key(partition: Partitioner | None, module: fx.GraphModule | None = None) -> str:
    """The key of a graph in Inductor's cache, if this partitioner split it; None stands for torch's own."""
    graph = module or fx.symbolic_trace(lambda x: torch.sin(x))
    with config.patch(custom_partitioner_fn=partition):
        return compiled_fx_graph_hash(graph, [], {}, [])[0]  # type: ignore[typeddict-item]


BASE = {"budget": 1.0, "compiler": "eager", "cost": {"tanh": 1.0}}


def test_equal_options_have_one_key() -> None:
    """Also for a partitioner that has partitioned a graph in between, and whatever the mapping's order."""
    used = fxremat.partitioner(**BASE)
    expected = key(fxremat.partitioner(**BASE))
    aot_function(torch.tanh, lambda graph, inputs: make_boxed_func(graph), partition_fn=used)(
        square(1, True)
    ).sum().backward()
    assert key(used) == expected
    some, others = ({"mm": 1.0, "tanh": 2.0}, {"tanh": 2.0, "mm": 1.0})
    assert key(fxremat.partitioner(cost=some)) == key(fxremat.partitioner(cost=others))


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 0.25},
        {"budget": "min"},
        {"budget": None},
        {"planner": "sublinear"},
        {"cost": {"tanh": 2.0}},
        {"cost": "measured"},
        {"cost": "roofline"},
        {"inplace": False},
        {"time_limit_seconds": 1.0},
        {"on_error": "fallback"},
    ],
    ids=str,
)
def test_another_option_is_another_key(change: dict[str, Any]) -> None:
    """Whatever a plan depends on is a part of the key."""
    assert key(fxremat.partitioner(**{**BASE, **change})) != key(fxremat.partitioner(**BASE))


def test_another_source_or_torch_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed line in one module, or another version of torch."""
    (tmp_path / "planners").mkdir()
    source = tmp_path / "planners" / "one.py"
    found = []
    for text, version in (("x = 1", "2.11"), ("x = 2", "2.11"), ("x = 1", "2.12"), ("x = 1", "2.11")):
        source.write_text(text)
        monkeypatch.setattr(torch, "__version__", version)
        compilers.get_hash_for_files.cache_clear()
        monkeypatch.setattr(partitioner, "__file__", str(tmp_path / "driver" / "partitioner.py"))
        found.append(fxremat.partitioner(**BASE).uuid())
    assert found[0] == found[3]
    assert len({repr(each) for each in found}) == 3


def test_inductors_options_are_left_to_inductor() -> None:
    """They are in its own key; an object among them would have another text in each process."""
    plain, with_object = (
        Partitioner(Options.parse(given)) for given in ({}, {"post_grad_custom_post_pass": key})
    )
    assert plain.uuid() == with_object.uuid()
    assert key(plain) == key(with_object)


def test_torchs_own_partitioner_has_another_key() -> None:
    """What stock Inductor compiled is not served to us, nor ours to it, though the graphs are equal."""
    assert key(None) != key(fxremat.partitioner())


def waiting(function: Any) -> fx.GraphModule:
    """A graph whose second operator waits for its first one."""
    module = make_fx(lambda x, y: (torch.sin(x), function(y)), tracing_mode="fake")(square(), square())
    first, second = (node for node in module.graph.nodes if node.op == "call_function")
    compilers.order_after(module, {second: first})
    return module


def test_what_waits_is_in_the_key() -> None:
    """Control dependencies hold an operator in a graph of its own, and are cached all the same."""
    with config.patch(compilers.cacheable({}, "key")):
        assert control_deps.cacheable()
        sigmoid, tanh, again = (key(None, waiting(each)) for each in (torch.sigmoid, torch.tanh, torch.tanh))
    assert tanh == again != sigmoid
    assert not control_deps.cacheable()


def test_marks_of_the_users_stay() -> None:
    """Operators that they declare cacheable are so along with ours."""
    mark = {"mine.operator": "1"}
    (name,) = compilers.cacheable({}, "key")
    assert compilers.cacheable({name: mark}, "key")[name].items() > mark.items()


def planner_of_a_module(problem: fxremat.Problem) -> fxremat.Solution:
    """A planner that pickles by its name."""
    return problem.identity("mine")


@pytest.mark.parametrize("planner", [planner_of_a_module, lambda problem: {}], ids=["function", "lambda"])
def test_a_planner_that_is_a_function_is_not_cached(planner: Any) -> None:
    """Its name would stay when its body changes. Others are cached as before."""
    partition = fxremat.partitioner(planner=planner)
    with pytest.raises(BypassFxGraphCache):
        key(partition)
    assert key(fxremat.partitioner(**BASE)) == key(fxremat.partitioner(**BASE))


# --- What the fingerprint adds --------------------------------------------------------------------------


def chain() -> nn.Module:
    """Two linear layers and tanh."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def fingerprint_of(function: Any, *args: Tensor) -> str:
    """The fingerprint of the graph that Dynamo makes of a function."""
    found: list[str] = []

    def look(module: fx.GraphModule, inputs: Sequence[object]) -> Any:
        found.append(fingerprint(module, inputs))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=look, fullgraph=True)(*args)
    (only,) = found
    return only


def in_region(**order: Any) -> Any:
    """A function with a region around its second operator; without an order, the same without one."""

    def body(x: Tensor) -> Tensor:
        if not order:
            return x.sin().exp().tanh()
        y = x.sin()
        with fxremat.region(**order):
            y = y.exp()
        return y.tanh()

    return body


def test_a_region_is_told_apart() -> None:
    """The operators are the same, and no cache looks at their marks."""
    orders: list[dict[str, Any]] = [{}, {"keep": True}, {"mirror": 2}, {"recompute": True}]
    found = [fingerprint_of(in_region(**order), square()) for order in orders]
    assert len(set(found)) == len(found)
    assert [fingerprint_of(in_region(**order), square()) for order in orders] == found


def test_a_region_inside_of_a_checkpoint_is_told_apart() -> None:
    """It is in a graph of its own there."""

    def checkpointed(**order: Any) -> Any:
        return lambda x: torch.utils.checkpoint.checkpoint(in_region(**order), x, use_reentrant=False)

    x = square(requires_grad=True)
    assert fingerprint_of(checkpointed(keep=True), x) != fingerprint_of(checkpointed(recompute=True), x)


def test_the_numbers_of_symbolic_sizes_are_told_apart() -> None:
    """A plan is made for the first batch; a cache keys a graph with dynamic shapes by its symbols."""

    def of_batch(size: int) -> str:
        batch = torch.randn(size, 4)
        torch._dynamo.mark_dynamic(batch, 0)
        return fingerprint_of(in_region(), batch)

    assert of_batch(8) == of_batch(8) != of_batch(16)


# --- What travels ---------------------------------------------------------------------------------------


def report_of(options: dict[str, Any]) -> fxremat.Report:
    """The report of a small graph."""
    torch.compile(chain(), backend="fxremat", options=options)(square()).sum().backward()
    return fxremat.reports()[-1]


def test_an_outcome_announces_itself_when_it_is_unpickled() -> None:
    """To whoever listens in this thread, in order; to nobody else, and to nobody when none listens."""
    outcomes = [Outcome(fallbacks=(text,)) for text in "abc"]
    texts = [pickle.dumps(each) for each in outcomes]
    assert pickle.loads(texts[0]) == outcomes[0]
    with listening() as outer, ThreadPoolExecutor(1) as another:
        pickle.loads(texts[0])
        with listening() as heard:
            pickle.loads(texts[1])
            another.submit(pickle.loads, texts[2]).result()
        pickle.loads(texts[2])
    pickle.loads(texts[1])
    assert (heard, outer) == (outcomes[1:2], [outcomes[0], outcomes[2]])


def served(outcome: Outcome | None) -> Compilation:
    """The compilation of a graph that a cache had."""
    compilation = Compilation(Options(), "", "graph 7")
    compilation.take_over(outcome)
    return compilation


def test_a_report_that_is_missing_is_said() -> None:
    """An entry without one is no error."""
    with pytest.warns(UserWarning, match="no report of graph 7"):
        assert served(None).reports == []


def test_a_fallback_is_said_again() -> None:
    """A cached graph that PyTorch's partitioner split warns as it did when it was compiled."""
    with pytest.warns(UserWarning, match="graph 7 to PyTorch's partitioner: too small"):
        assert served(Outcome((), ("too small",))).fallbacks == ["too small"]


def test_a_report_is_taken_over_by_the_graph_that_is_served() -> None:
    """Under the name that the graph has in this process, and with where its options were given here."""
    report = report_of({"compiler": "eager"})
    here = {"graph_name": "graph 7", "settings": Options().settings}
    assert served(Outcome((report,))).reports == [replace(report, from_cache=True, **here)]  # type: ignore[arg-type]


def test_a_report_from_a_cache_says_so() -> None:
    """In its text and in its JSON."""
    report = report_of({"compiler": "eager"})
    cached = replace(report, from_cache=True)
    assert "cache" in cached.summary() and "cache" not in report.summary()
    assert json.loads(cached.to_json())["from_cache"] and not json.loads(report.to_json())["from_cache"]


# --- Two processes --------------------------------------------------------------------------------------

WORKER = """
import json, pathlib, sys, warnings
import torch
import fxremat
from fxremat.driver import pipeline
from fxremat.driver.partitioner import Partitioner

backend_name, options, sizes, load, save = json.loads(sys.argv[1])
calls, waits = [], []
partition, order = Partitioner.__call__, pipeline.order_recomputation

def count_call(self, *args, **kwargs):
    calls.append(self.options.budget)
    return partition(self, *args, **kwargs)

def count_waits(graph):
    waits.append(order(graph))

Partitioner.__call__ = count_call
pipeline.order_recomputation = count_waits
if load:
    torch.compiler.load_cache_artifacts(pathlib.Path(load).read_bytes())
torch.manual_seed(0)
weights = [torch.randn(8, 8, requires_grad=True) for _ in range(6)]

def layers(x, some):
    for weight in some:
        x = (x @ weight).tanh().exp()
    return x

def step(x):
    x = layers(x, weights[:3])
    torch._dynamo.graph_break()
    return layers(x, weights[3:]).sum()

compiled = torch.compile(step, backend=backend_name, options=options)
losses = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for size in sizes:
        losses.append(compiled(torch.linspace(-1, 1, size * 8).reshape(size, 8)))
        losses[-1].backward()
if save:
    pathlib.Path(save).write_bytes(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({
    "calls": calls,
    "waits": waits,
    "reports": [json.loads(report.to_json()) for report in fxremat.reports()],
    "losses": [loss.item() for loss in losses],
    "gradients": [weight.grad.tolist() for weight in weights],
    "warnings": [str(each.message) for each in caught if "fxremat" in str(each.message)],
    "hits": torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"],
    "fx_hits": torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"],
}))
"""

SIZES = (8, 8, 12, 12)  # the second size is compiled again, with a dynamic batch


def train(
    folder: Path,
    budget: Any,
    sizes: Sequence[int] = SIZES,
    *,
    backend_name: str = "fxremat",
    load: Path | str = "",
    save: Path | str = "",
) -> dict[str, Any]:
    """What a new process reports that trains two graphs with caches in a folder."""
    options = {} if backend_name == "inductor" else {"budget": budget, "scope": "graph"}
    text = json.dumps([backend_name, options, sizes, str(load), str(save)])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    for name in (
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "TORCHINDUCTOR_FX_GRAPH_CACHE",
        "TORCHINDUCTOR_AUTOGRAD_CACHE",
    ):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, text], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the caches."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def cold(folder: Path) -> dict[str, Any]:
    """A process that finds the caches empty."""
    return train(folder / "inductor", "min", save=folder / "artifacts")


@pytest.fixture(scope="module")
def warm(folder: Path, cold: dict[str, Any]) -> dict[str, Any]:
    """Another process with the same options."""
    return train(folder / "inductor", "min")


def as_planned(report: dict[str, Any]) -> dict[str, Any]:
    """A report without the remark that it comes from a cache."""
    return {**report, "from_cache": False}


@pytest.mark.inductor
def test_a_cold_process_plans_each_graph(cold: dict[str, Any]) -> None:
    """Two graphs at two sizes; each has recomputation that waits, which is what torch would not cache."""
    assert len(cold["calls"]) == len(cold["reports"]) == 4
    assert max(cold["waits"]) > 0
    assert not any(report["from_cache"] for report in cold["reports"])
    assert cold["hits"] == 0


@pytest.mark.inductor
def test_a_warm_process_plans_nothing(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """Not for the graphs behind a graph break, nor for the recompilation, and trains alike."""
    assert warm["calls"] == [] and warm["hits"] == 4
    assert warm["losses"] == cold["losses"] and warm["gradients"] == cold["gradients"]


@pytest.mark.inductor
def test_a_warm_process_has_the_reports(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """The same ones in the same order, each marked; nothing is said to be missing."""
    assert all(report["from_cache"] for report in warm["reports"])
    assert [*map(as_planned, warm["reports"])] == cold["reports"]
    assert warm["warnings"] == []


@pytest.mark.inductor
def test_saved_artifacts_serve_a_machine_with_empty_caches(folder: Path, cold: dict[str, Any]) -> None:
    """What torch.compiler.save_cache_artifacts wrote brings the graphs and their reports."""
    moved = train(folder / "other", "min", SIZES[:1], load=folder / "artifacts")
    assert moved["calls"] == [] and moved["hits"] == 2
    assert [*map(as_planned, moved["reports"])] == cold["reports"][:2]


@pytest.mark.inductor
def test_another_budget_is_planned(folder: Path, cold: dict[str, Any]) -> None:
    """Once for each graph, beside the entries of the first budget."""
    found = train(folder / "inductor", 1.0, SIZES[:1])
    assert found["calls"] == [1.0, 1.0] and found["hits"] == 0
    assert [report["budget"] for report in found["reports"]] == [1.0, 1.0]
