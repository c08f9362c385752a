"""Plans of thousands of programs drawn at random, run without Dynamo, each held against its graph as it is.

``trials.py`` compiles each program as a user does, which takes a second. Here its joint graph is captured
once, and the plans for many budgets are run as the backend runs them: planned, rewritten, split, results
written in place. So tens of plans run in a second. Two kinds of programs:

- *programs*, as ``drawn.py`` draws them, whose joint graph, inputs and tangents are AOTAutograd's.
- *graphs*, as ``joints.py`` draws them, which no model has made.

The plans of a graph are those of each budget that makes a difference: the frontier of ``auto``, where each
plan gets the least budget that it serves, and that of the other planners. Then some that no planner makes:
everything again, once and twice, and mirror counts at random. Each has to leave behind what the joint graph
as it is does, in every bit: outputs, gradients, inputs and the generator's state; and must take no more
than was predicted, which is its budget.

Run as a script: ``python tests/support/campaign.py --graphs 1000 --programs 1000 --seed 0``. What fails is
printed with its seed; ``--graphs 1 --seed SEED`` tries it again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from drawn import draw_program
from joints import draw_joint
from operators import NUMBER_BYTES, is_same
from torch import Tensor, fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_module_simplified

from fxremat._torch import partitioners, profilers
from fxremat.driver.partitioner import has_backward
from fxremat.driver.pipeline import as_run, choose, make_problem, solve, split
from fxremat.emit.rewrite import rewrite
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.schedule import Schedule
from fxremat.options.options import Options
from fxremat.predict.models import model
from fxremat.predict.problem import Problem, pareto

OPTIONS = Options.parse({"compiler": "eager"})
SEARCH_SECONDS = 0.02  # of the planner, counted in steps
HOLDING = ("as predicted", "above by numbers", "below")  # what may be seen of a plan, by its measured peak
MOST_PLANS = 12  # of a frontier
RANDOM_PLANS = 4
OTHERS = ("min_cut", "drop_cheap", "sublinear", "recursive", "revolve")


@dataclass(frozen=True, eq=False)
class Ran:
    """What a joint graph was given, and what it left behind without fxremat.

    Attributes:
        module: The joint graph.
        count: How many of its outputs are the forward's.
        primals: What the forward is given.
        tangents: What the backward is given besides.
        results: Outputs and gradients.
        written: The primals behind both.
        state: The generator's.
    """

    module: fx.GraphModule
    count: int
    primals: Sequence[Any]
    tangents: Sequence[Any]
    results: Sequence[Any]
    written: Sequence[Any]
    state: Tensor


# --- Capturing ------------------------------------------------------------------------------------------


def of_joint(seed: int) -> Ran:
    """A drawn joint graph.

    Raises:
        Refused: Its indices depend on random numbers, and with these they are out of range.
    """
    drawn = draw_joint(random.Random(seed))
    ends = len(drawn.inputs) - drawn.tangents
    try:
        return as_it_is(drawn.module, drawn.outputs, drawn.inputs[:ends], drawn.inputs[ends:])
    except IndexError as error:
        raise Refused("indices drawn out of range") from error


def as_it_is(module: fx.GraphModule, count: int, primals: Sequence[Any], tangents: Sequence[Any]) -> Ran:
    """Run a joint graph without fxremat."""
    given = copies((*primals, *tangents))
    torch.manual_seed(0)
    with torch.no_grad():
        results = list(fx.Interpreter(module).run(*given))
    written = given[: len(primals)]
    return Ran(module, count, primals, tangents, results, written, torch.get_rng_state())


class Refused(Exception):
    """There is no joint graph: the program has no backward, or PyTorch refuses it."""


def of_program(seed: int) -> Ran:
    """A drawn program's joint graph, which AOTAutograd has run.

    Raises:
        Refused: There is none.
    """
    program = draw_program(random.Random(seed))
    if program is None:
        raise Refused("no program was drawn")
    caught = _Capture()
    try:
        module, batch = program.module(), program.batch()
        compiled = aot_module_simplified(
            module,
            tuple(batch.given),
            fw_compiler=caught.forward,
            bw_compiler=caught.backward,
            partition_fn=caught.partition,
            keep_inference_input_mutations=True,
        )
        torch.manual_seed(0)
        outputs = compiled(*batch.given)
        losses = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        tangents = [torch.ones_like(each).mul_(0.7) for each in losses]
        torch.autograd.backward(losses, tangents)
    except Exception as error:  # of PyTorch, whatever it is
        raise Refused(f"refused by PyTorch: {type(error).__name__}") from error
    if caught.module is None or not caught.tangents or not has_backward(caught.module, caught.count):
        raise Refused("no backward ran")
    ran = as_it_is(caught.module, caught.count, caught.primals, caught.tangents)
    if _is_torn(ran):
        raise Refused("refused: PyTorch takes apart inputs that share memory")
    again = as_it_is(ran.module, ran.count, ran.primals, ran.tangents)
    if not all(map(agree, again.results, ran.results)):
        raise Refused("refused: reads memory that nothing was written to")  # a noise that PyTorch leaves so
    return ran


def _is_torn(ran: Ran) -> bool:
    """Whether what is written lies in another input too, which only the program knows."""
    stores = [each.untyped_storage()._cdata for each in ran.primals if isinstance(each, Tensor)]
    pairs = zip(ran.primals, ran.written, strict=True)
    written = [each for each, after in pairs if isinstance(each, Tensor) and not agree(each, after)]
    return any(stores.count(each.untyped_storage()._cdata) > 1 for each in written)


class _Capture:
    """Sees what AOTAutograd traces and runs."""

    def __init__(self) -> None:
        self.module: fx.GraphModule | None = None
        self.count = 0
        self.primals: list[Any] = []
        self.tangents: list[Any] = []

    def partition(self, module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        """Keep a copy, and what PyTorch makes of it."""
        graph, found = fx.Graph(), {}
        for node in module.graph.nodes:
            found[node] = graph.node_copy(node, found.__getitem__)
        self.module, self.count = fx.GraphModule(module, graph), num_fwd_outputs
        return partitioners.min_cut_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)

    def forward(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """Run it, and note what it is given."""

        def run(given: list[Any]) -> Any:
            self.primals = copies(given)
            return fx.Interpreter(module).run(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backward(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """The same of the backward."""
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]

        def run(given: list[Any]) -> Any:
            named = zip(names, given, strict=True)
            self.tangents = copies([each for name, each in named if name.startswith("tangents")])
            return fx.Interpreter(module).run(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies that lie as the values do, and share memory as they do."""
    stores: dict[int, Any] = {}
    return [_copied(each, stores) for each in values]


def _copied(value: Any, stores: dict[int, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    store = value.untyped_storage()
    if store._cdata not in stores:
        stores[store._cdata] = store, store.clone()
    copy = torch.empty(0, dtype=value.dtype)
    copy.set_(stores[store._cdata][1], value.storage_offset(), value.shape, value.stride())
    copy = copy.conj() if value.is_conj() else copy
    return torch._neg_view(copy) if value.is_neg() else copy


# --- Running plans --------------------------------------------------------------------------------------


def problem_of(ran: Ran) -> Problem:
    """The planning problem of the joint graph, as the backend makes it."""
    partitioners.cse(ran.module)
    partitioners.force_saves(ran.module)
    graph = JointGraph.from_fx(ran.module, ran.count, redraws=True)
    graph = as_run(graph, model(OPTIONS.fusion))
    return make_problem(graph, fusion=OPTIONS.fusion, time_limit_seconds=SEARCH_SECONDS)


def plans_of(problem: Problem, seed: int) -> Iterator[tuple[Schedule, int | None]]:
    """The plans of a problem, each with the least budget that it serves, if it is made for one."""
    solutions, chance = solve(problem, "auto"), random.Random(seed)
    front = list(pareto(solutions))
    if len(front) > MOST_PLANS:
        front = [front[0], *chance.sample(front[1:-1], MOST_PLANS - 2), front[-1]]
    found: dict[Schedule, int | None] = {}
    for each in front:
        found.setdefault(
            choose(problem, solutions, each.peak_bytes, each.peak_bytes).schedule, each.peak_bytes
        )
    names = problem.graph.names
    counts = [dict.fromkeys(names, 1), dict.fromkeys(names, 2)]
    counts += [{name: chance.choice((0, 1, 1, 2)) for name in names} for _ in range(RANDOM_PLANS)]
    for count in counts:
        found.setdefault(expand(problem.graph, count), None)
    yield from found.items()


def tried(ran: Ran, problem: Problem, schedule: Schedule, budget_bytes: int | None) -> str:
    """Run a plan: how measured and predicted peak compare, or, in capitals, what does not hold."""
    predicted_bytes = problem.model.profile(problem.graph, schedule).peak_bytes
    with without_code():
        planned = rewrite(problem.graph, schedule)
        halves = split(planned, OPTIONS)
    execution = Execution(ran, *halves)
    torch.manual_seed(0)
    with torch.no_grad():
        changes = profilers.allocator_changes(execution, torch.device("cpu"))
    found = (*execution.results, *execution.primals, torch.get_rng_state())
    expected = (*ran.results, *ran.written, ran.state)
    places = [place for place, pair in enumerate(zip(found, expected, strict=True)) if not agree(*pair)]
    if places:
        return f"DIFFERS: results {places} of {len(ran.results)} and {len(ran.written)} inputs"
    measured_bytes = max(itertools.accumulate(changes), default=0)
    apart = measured_bytes - predicted_bytes
    if apart > NUMBER_BYTES * len(planned.nodes):
        return f"EXCEEDS: {measured_bytes} bytes, {predicted_bytes} predicted"
    if budget_bytes is not None and predicted_bytes > budget_bytes:
        return f"EXCEEDS THE BUDGET: {predicted_bytes} bytes predicted, budget {budget_bytes}"
    return HOLDING[0 if apart == 0 else 1 if apart > 0 else 2]


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Meanwhile graphs are not written as Python each time that they change, which takes half of the time."""
    usual = fx.GraphModule.recompile
    fx.GraphModule.recompile = lambda self: None
    try:
        yield
    finally:
        fx.GraphModule.recompile = usual


def agree(found: Any, expected: Any) -> bool:
    """Whether two results are the same in every bit."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return is_same(found, expected)
    return bool(found == expected)


class Execution:
    """A forward and then a backward, run as the backend runs them: what is not needed is let go of."""

    def __init__(self, ran: Ran, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self.primals, self.results = copies(ran.primals), []
        self._ran = ran
        self._saved = _returned(forward)[ran.count :]
        self._forward, self._backward = (boxed_nop(each, []) for each in (forward, backward))
        self._given, self._read = _names(forward), _names(backward)
        names = _names(ran.module)
        self._names = [each for each in names if not each.startswith("tangents")]
        self._tangents = [each for each in names if each.startswith("tangents")]

    def __call__(self) -> None:
        """Run both."""
        held = dict(zip(self._names, self.primals, strict=True))
        made = list(self._forward([held[each] for each in self._given]))
        held = dict(zip(self._saved, made[self._ran.count :], strict=True))
        self.results = made[: self._ran.count]
        made.clear()
        tangents = copies(self._ran.tangents)  # which are the caller's to the end
        held |= zip(self._tangents, tangents, strict=True)
        given = [held[each] for each in self._read]
        held.clear()
        self.results += self._backward(given)


def _names(module: fx.GraphModule) -> list[str]:
    """The names of a graph's inputs."""
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def _returned(module: fx.GraphModule) -> list[str]:
    """The names of what a graph returns."""
    (output,) = module.graph.find_nodes(op="output")
    return [getattr(each, "name", "") for each in output.args[0]]


# --- All of it ------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[int], Ran]] = {"graphs": of_joint, "programs": of_program}


def try_all(kind: str, seed: int) -> Iterator[tuple[bool, str]]:
    """Try the plans of what a seed draws: of each whether it is of a budget, and what was seen.

    Raises:
        Refused: There is nothing to plan.
    """
    ran = KINDS[kind](seed)
    try:
        problem = problem_of(ran)
        for schedule, budget_bytes in plans_of(problem, seed):
            yield budget_bytes is not None, tried(ran, problem, schedule, budget_bytes)
    except Exception:  # of ours
        yield True, f"RAISES: {traceback.format_exc()}"


def main() -> None:
    """Try so many of each kind, print those that fail, and count all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first of each kind; the next have the next"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop, for each kind")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    for kind in KINDS:
        failed += run_many(kind, given.seed, getattr(given, kind), given.seconds)
    sys.exit(bool(failed))


def run_many(kind: str, first: int, count: int, seconds: float = float("inf")) -> int:
    """Try so many of a kind, one seed after the other; how many plans failed."""
    counts: Counter[str] = Counter()
    began, spent = time.time(), time.process_time()
    for seed in range(first, first + count):
        if seed % 50 == 0:
            gc.collect()
            gc.freeze()  # what stands is not looked through each time
        try:
            for has_budget, seen in try_all(kind, seed):
                counts["plans of budgets" if has_budget else "plans of mirrors"] += 1
                verdict = seen.partition(":")[0]
                counts[verdict] += 1
                if verdict.isupper():
                    print(f"--- {kind}, seed {seed}: {seen}", flush=True)
            counts[kind] += 1
        except Refused as refusal:
            counts[str(refusal)] += 1
        is_late = time.time() - began > seconds
        if seed % 100 == 99 or is_late or seed == first + count - 1:
            took = f"{time.time() - began:.0f} s, {time.process_time() - spent:.0f} s of processor"
            print(f"{kind} up to seed {seed}, {took}: {dict(counts)}", flush=True)
        if is_late:
            break
    return sum(number for verdict, number in counts.items() if verdict.isupper())


if __name__ == "__main__":
    main()
