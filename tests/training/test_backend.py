"""The backend as a user meets it: its name, its reports, its errors, graphs and recompilations, Inductor."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module, make_boxed_func
from models import case, fresh, train_step
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V
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
from fxremat import FxrematError, InfeasibleBudgetError, InvalidOptionError
from fxremat._torch import compilers, scheduling
from fxremat.driver import journal


def chain(layers: int = 6) -> nn.Module:
    """A chain of linear layers and tanh."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(4, 4), nn.Tanh())))


def reports_of(action: Any) -> tuple[fxremat.Report, ...]:
    """The reports that an action adds."""
    count = len(fxremat.reports())
    action()
    return fxremat.reports()[count:]


# --- By name --------------------------------------------------------------------------------------------

BY_NAME = """
import sys, torch
assert "fxremat" not in sys.modules
options = {"compiler": "eager", "budget": "min"}
model = torch.compile(torch.nn.Linear(4, 4), backend="fxremat", options=options)
model(torch.ones(2, 4)).sum().backward()
print(len(sys.modules["fxremat"].reports()))
"""


def test_the_name_is_known_without_an_import() -> None:
    """The package's entry point registers the backend: torch.compile finds it in a fresh process."""
    done = subprocess.run([sys.executable, "-c", BY_NAME], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


def test_it_is_listed_among_the_backends() -> None:
    """torch.compile's list of backends has it."""
    assert "fxremat" in torch.compiler.list_backends(exclude_tags=())


# --- Options and errors ---------------------------------------------------------------------------------


def test_an_unknown_option_reaches_the_user_with_its_near_match() -> None:
    """As it is, not wrapped in one of the compiler's errors."""
    with pytest.raises(InvalidOptionError, match="Did you mean 'budget'") as caught:
        compiled(chain(), budgt="min")(square())
    assert caught.value.option == "budgt"
    assert "budget" in caught.value.near_matches


@pytest.mark.parametrize(
    "options",
    [{"budget": "8 parsecs"}, {"planner": "atuo"}, {"compiler": "gcc"}, {"on_error": "ignore"}],
    ids=str,
)
def test_a_wrong_value_reaches_the_user(options: dict[str, Any]) -> None:
    """Every option's value is checked before anything is compiled."""
    with pytest.raises(InvalidOptionError):
        compiled(chain(), **options)(square())


def test_a_partitioner_detects_no_writes() -> None:
    """It splits graphs and does not run them: the option is refused, not left out in silence."""
    with pytest.raises(InvalidOptionError, match="for backend='fxremat'"):
        fxremat.partitioner(detect_writes=True)


def test_an_impossible_budget_tells_the_lowest_peak_which_then_works() -> None:
    """The error's fields are numbers, and the lowest peak given as the budget is kept."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        compiled(chain(), budget=100)(square())
    error = caught.value
    assert error.budget_bytes == 100 < error.lowest_peak_bytes
    assert isinstance(error, FxrematError) and isinstance(error, MemoryError)
    (report,) = assert_trains_alike(chain(), [square()], budget=error.lowest_peak_bytes)
    assert report.peak_bytes == error.lowest_peak_bytes == report.budget_bytes


def test_the_error_comes_again_and_another_budget_works_behind_it() -> None:
    """A failed compilation leaves nothing behind."""
    module = chain()
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError):
            compiled(module, budget=100)(square())
    assert_trains_alike(module, [square()], budget="min")


def test_fallback_warns_and_trains() -> None:
    """With on_error="fallback" PyTorch's partitioner takes over, and there is no report."""
    module = chain()
    subject = compiled(copy.deepcopy(module), budget=100, on_error="fallback")
    count = len(fxremat.reports())
    with pytest.warns(UserWarning, match="PyTorch's partitioner.*lowest peak found"):
        found = outcome(subject, [square()])
    assert_same_outcome(found, outcome(module, [square()]))
    assert len(fxremat.reports()) == count


@pytest.mark.parametrize(
    "plan",
    [lambda problem: {"none_such": 1}, lambda problem: [], lambda problem: ("mm", "mm")],
    ids=["unknown_name", "empty_schedule", "no_schedule"],
)
def test_a_planner_that_errs_is_told_so(plan: Any) -> None:
    """A callable's names and schedules are checked."""
    with pytest.raises(FxrematError):
        compiled(chain(), planner=plan)(square())


# --- Reports --------------------------------------------------------------------------------------------


def test_a_report_says_what_was_asked_and_what_was_done() -> None:
    """Budget, peak and graph of one compilation."""
    (report,) = reports_of(lambda: compiled(chain(), budget=0.9)(torch.randn(64, 4)))
    assert report.budget == 0.9 and report.compiler == "eager"
    assert report.budget_bytes == int(0.9 * report.baseline_peak_bytes)
    assert report.solution.peak_bytes == report.peak_bytes <= report.budget_bytes
    assert report.num_nodes > 0


def test_a_graph_break_makes_two_graphs_with_a_report_each() -> None:
    """Each says its own name and the budget; gradients flow through both."""

    def body(p: Program, x: Tensor) -> Tensor:
        y = (x @ p.weight).tanh().exp()
        torch._dynamo.graph_break()
        return (y @ p.weight).sin().exp()

    first, second = assert_trains_alike(program(body), [square()], budget="min")
    assert first.graph_name != second.graph_name
    assert first.budget == second.budget == "min"


def test_two_models_keep_their_own_budgets() -> None:
    """In one process, compiled and run in turn."""
    free, tight = chain(), chain()
    subjects = compiled(free, budget=None), compiled(tight, budget="min")
    first, second = reports_of(lambda: [outcome(subject, [square()]) for subject in subjects])
    assert (first.budget, second.budget) == (None, "min")
    assert first.peak_bytes >= second.peak_bytes
    assert reports_of(lambda: [outcome(subject, [square(2)]) for subject in subjects]) == ()
    assert_same_outcome(
        {name: each.grad for name, each in free.named_parameters()},
        {name: each.grad for name, each in tight.named_parameters()},
    )


def test_the_same_model_may_be_compiled_twice() -> None:
    """With two budgets: both train the same parameters, each with its own plan."""
    module = chain()
    loose, tight = compiled(module, planner="keep_all"), compiled(module, planner=everything(1))
    loose(square()).sum().backward()
    expected = module[0].weight.grad.clone()
    module.zero_grad()
    (report,) = reports_of(lambda: tight(square()).sum().backward())
    assert report.solution.mirror_counts
    torch.testing.assert_close(module[0].weight.grad, expected, rtol=0, atol=0)


def test_a_function_is_compiled_like_a_module() -> None:
    """torch.compile as a decorator of a loss."""

    @torch.compile(backend="fxremat", options={"compiler": "eager", "budget": "min"})
    def loss(x: Tensor) -> Tensor:
        return x.tanh().exp().sin().sum()

    x, other = square(requires_grad=True), square(requires_grad=True)
    loss(x).backward()
    other.tanh().exp().sin().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=0)


def test_an_optimizer_trains_to_the_same_weights() -> None:
    """Five steps of Adam, gradients set to None between them."""
    modules = chain(), chain()
    subjects = modules[0], compiled(modules[1], budget="min")
    for module, subject in zip(modules, subjects, strict=True):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for seed in range(5):
            optimizer.zero_grad(set_to_none=True)
            subject(square(seed)).square().sum().backward()
            optimizer.step()
    assert_same_outcome(dict(modules[1].named_parameters()), dict(modules[0].named_parameters()))


# --- Compilations that fail -----------------------------------------------------------------------------


class Refused(Exception):
    """What a compiler behind the partitioner raises."""


@pytest.mark.parametrize("error", [Refused, KeyboardInterrupt])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_graph_that_its_compiler_refuses_has_no_report(
    monkeypatch: pytest.MonkeyPatch, compiler: str, error: type[BaseException]
) -> None:
    """It was planned, and never ran. Those from before stay, and those that come."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    kept = reports_of(lambda: compiled(chain())(square()))
    count = len(fxremat.reports())
    with monkeypatch.context() as patch, pytest.raises((error, BackendCompilerFailed)):
        patch.setattr(compilers, "boxed_nop", refuse)
        patch.setattr(compile_fx, "compile_fx_inner", refuse)
        torch._dynamo.reset()
        compiled(chain(), compiler=compiler)(square())
    assert fxremat.reports()[count - 1 :] == kept
    torch._dynamo.reset()
    assert len(reports_of(lambda: compiled(chain())(square()))) == 1


def test_a_graph_that_runs_uncompiled_has_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """With suppress_errors Dynamo goes on without the backend; nothing remains, of a fallback neither."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Refused

    monkeypatch.setattr(compilers, "boxed_nop", refuse)
    module = chain()
    for options in ({"budget": "min"}, {"budget": 100, "on_error": "fallback"}):
        fallbacks = journal.fallbacks()
        with torch._dynamo.config.patch(suppress_errors=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the fallback
            assert reports_of(lambda options=options: compiled(module, **options)(square())) == ()
        assert journal.fallbacks() == fallbacks


# --- Other compilers ------------------------------------------------------------------------------------


def as_it_is(module: fx.GraphModule, inputs: Any) -> Any:
    """A compiler that runs the graph."""
    return make_boxed_func(module.forward)


def test_the_partitioner_serves_aot_function() -> None:
    """AOTAutograd's functional front end takes it as its partition function."""
    partition = fxremat.partitioner(budget="min", compiler="eager")
    body = lambda x, w: ((x @ w).tanh() @ w).sin().exp().sum()  # noqa: E731
    inputs, others = ([square(1, True), square(2, True)] for _ in range(2))
    (report,) = reports_of(
        lambda: aot_function(body, as_it_is, as_it_is, partition_fn=partition)(*inputs).backward()
    )
    body(*others).backward()
    assert report.budget == "min"
    for each, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(each.grad, other.grad, rtol=0, atol=0)


def test_the_partitioner_serves_aot_module() -> None:
    """And so does its front end for modules."""
    module = chain()
    partition = fxremat.partitioner(planner=everything(1), compiler="eager")
    subject = aot_module(copy.deepcopy(module), as_it_is, as_it_is, partition_fn=partition)
    (report,) = reports_of(lambda: subject(square()).sum().backward())
    module(square()).sum().backward()
    assert report.solution.mirror_counts
    for each, other in zip(subject.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(each.grad, other.grad, rtol=0, atol=0)


def test_partitioners_of_equal_options_are_equal_to_a_cache() -> None:
    """What a cache hashes depends on the options alone; a planner that is a function is not cached."""
    first, second = (fxremat.partitioner(budget="min") for _ in range(2))
    assert first.uuid() == second.uuid() != fxremat.partitioner(budget=0.5).uuid()
    assert fxremat.partitioner(planner=everything(1)).uuid() is None


def test_graphs_that_run_as_they_are_are_not_for_inductor() -> None:
    """It says that it asks; and would compile graphs that write in place."""
    partition = fxremat.partitioner(budget="min", compiler="eager")
    with pytest.raises(InvalidOptionError, match=r"Use partitioner\(compiler='inductor'\)"):
        partition(fx.symbolic_trace(nn.Tanh()), (), compiler="inductor", num_fwd_outputs=1)


def test_options_of_inductors_are_not_for_a_partitioner() -> None:
    """They would be ignored."""
    with pytest.raises(InvalidOptionError, match="Give it to torch") as caught:
        fxremat.partitioner(max_autotune=True)
    assert caught.value.option == "max_autotune"


def test_another_partitioner_is_refused() -> None:
    """It reaches the user before anything is compiled."""
    with pytest.raises(InvalidOptionError, match="Give planner="):
        compiled(chain(), custom_partitioner_fn=len)(square())


# --- Inductor -------------------------------------------------------------------------------------------


@pytest.mark.inductor
@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), "min"])
def test_inductor_trains_to_eagers_gradients(budget: Any) -> None:
    """Within float32's rounding: Inductor adds up in another order."""
    module, inputs = fresh(case("gated_mlp"))
    expected, gradients = train_step(module, inputs)
    subject = torch.compile(module, backend="fxremat", options={"budget": budget})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Inductor's own
        loss, found = train_step(subject, inputs)
    assert fxremat.reports()[-1].compiler == "inductor"
    torch.testing.assert_close(loss, expected)
    for name, each in gradients.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-5)


class Limited(InductorChoices):
    """Choices of a user's, with a state and an order to fuse."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.asked: list[str] = []

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:  # type: ignore[override]
        self.asked.append(node1)
        return shared_data_score < self.limit

    def fuses(self, score: int) -> bool:
        """Whether a method of theirs that asks the object itself gets our answer."""
        self.last = score
        return self.can_fuse(None, Buffers(), Buffers(), score)


class Buffers:
    """A node of a scheduler's, without buffers."""

    def get_nodes(self) -> list[Any]:
        """None."""
        return []


def test_choices_of_the_users_stay_theirs() -> None:
    """The same class and the same state, whatever they were constructed with; fxremat has the first word."""
    theirs = Limited(3)
    ours = scheduling.choices(theirs, lambda first, second: True)
    never = scheduling.choices(theirs, lambda first, second: False)
    assert isinstance(ours, Limited) and ours.limit == 3
    assert [ours.fuses(2), ours.fuses(4), never.fuses(2)] == [True, False, False]
    assert len(theirs.asked) == 2 and theirs.last == 2
    for static in (InductorChoices(), type("Static", (InductorChoices,), {"can_fuse": staticmethod(max)})()):
        assert isinstance(scheduling.choices(static, lambda first, second: False), type(static))
        assert not scheduling.choices(static, lambda first, second: False).can_fuse(
            None, Buffers(), Buffers(), 1
        )


@pytest.mark.inductor
def test_inductor_asks_the_choices_of_the_user() -> None:
    """Ones whose constructor takes arguments were a TypeError."""
    theirs = Limited(-1)
    x, w = torch.linspace(0.1, 1, 64), torch.ones(64, requires_grad=True)
    with V.set_choices_handler(theirs):
        subject = torch.compile(lambda x, w: (x * w).softmax(0).sin().sum(), backend="fxremat")
        subject(x, w).backward()
        assert V.choices is theirs
    assert theirs.asked
