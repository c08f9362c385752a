"""reach: options from elsewhere than the call, and graphs that Inductor was to compile."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.driver.partitioner import Partitioner
from fxremat.errors import InvalidOptionError
from fxremat.options.options import OWN, Options
from fxremat.options.settings import VARIABLES

EAGER = {"compiler": "eager"}
_Wrapper = torch._TorchCompileInductorWrapper


@pytest.fixture(autouse=True)
def nothing_set() -> Iterator[None]:
    """Each test leaves torch and the process's defaults as they were."""
    before = _Wrapper.__call__
    yield
    fxremat.configure()
    fxremat.uninstall()
    assert _Wrapper.__call__ is before


def chain() -> nn.Module:
    """A model with something to recompute."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(4)))


def step(model: Any, size: int = 4) -> list[fxremat.Report]:
    """A training step; the reports of what was compiled for it."""
    seen = len(fxremat.reports())
    model(torch.ones(size, 8)).sum().backward()
    return list(fxremat.reports()[seen:])


def held(name: str) -> tuple[str, str]:
    """The value of an option here and now, and where it was given."""
    (found,) = (each for each in fxremat.settings() if each.name == name)
    return found.value, found.source


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each graph that Inductor compiles, as far as it is asked; it generates no code here."""
    compiled: list[dict[str, Any]] = []

    def compile_fx(module: torch.fx.GraphModule, inputs: object, **kwargs: Any) -> Any:
        compiled.append(kwargs["config_patches"])
        return module.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return compiled


# --- Where options are given ----------------------------------------------------------------------------


def test_each_place_holds_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call, the backend, the block, what is installed, what is configured, the environment."""
    found = [held("budget")]
    monkeypatch.setenv("FXREMAT_BUDGET", "0.1")
    found.append(held("budget"))
    fxremat.configure(budget=0.2)
    found.append(held("budget"))
    fxremat.install(budget=0.3)
    found.append(held("budget"))
    with fxremat.enabled(budget=0.9, **EAGER):
        found.append(held("budget"))
        backend = fxremat.backend(budget=0.95)
        reports = step(torch.compile(chain(), backend=backend))
        reports += step(torch.compile(chain(), backend=backend, options={"budget": None}))
    found += [(each.settings[0].value, each.settings[0].source) for each in reports]
    assert found == [
        ("None", "default"),
        ("0.1", "FXREMAT_BUDGET"),
        ("0.2", "fxremat.configure()"),
        ("0.3", "fxremat.install()"),
        ("0.9", "fxremat.enabled()"),
        ("0.95", "fxremat.backend()"),
        ("None", "options"),
    ]


def test_each_option_is_looked_up_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a nearer place leaves out is taken from the next; what none gives is the default."""
    monkeypatch.setenv("FXREMAT_COMPILER", "eager")
    fxremat.configure(on_error="fallback")
    with fxremat.enabled(budget="1MiB", planner="sublinear"), fxremat.enabled(budget="2MiB"):
        assert [held(name)[0] for name in ("budget", "planner", "on_error", "compiler", "scope")] == [
            "'2MiB'",
            "'sublinear'",
            "'fallback'",
            "'eager'",
            "'step'",
        ]


def test_a_mode_of_a_nearer_place_holds_before_options_of_another() -> None:
    """A mode is the options that it stands for."""
    fxremat.configure(max_autotune=False)
    with fxremat.enabled(mode="max-autotune"):
        assert held("max_autotune") == ("True", "fxremat.enabled()")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("budget", "8GiB", "8GiB"),
        ("budget", " 1024 ", 1024),
        ("budget", "0.5", 0.5),
        ("budget", "None", None),
        ("planner", "min_cut", "min_cut"),
        ("compiler", "eager", "eager"),
        ("cost", "measured", "measured"),
        ("on_error", "fallback", "fallback"),
        ("inplace", "True", True),
        ("detect_writes", "1", True),
        ("verify", "2", 2),
        ("time_limit_seconds", "2.5", 2.5),
        ("time_limit_seconds", "3", 3.0),
        ("ignore_checkpoints", "true", True),
        ("scope", "graph", "graph"),
        ("scope", "", "step"),
    ],
)
def test_every_option_has_a_variable(
    name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named after it; an empty one is absent."""
    assert tuple(VARIABLES.values()) == OWN
    variable = f"FXREMAT_{name.upper()}"
    monkeypatch.setenv(variable, text)
    assert held(name) == (repr(value), variable if text else "default")


@pytest.mark.parametrize(
    ("variable", "text", "near"),
    [
        ("FXREMAT_BUGDET", "1MiB", "FXREMAT_BUDGET"),
        ("FXREMAT_CACHE", "/tmp", "FXREMAT_CACHE_DIR"),
        ("FXREMAT_PLANNER", "min_cuts", "min_cut"),
        ("FXREMAT_BUDGET", "much", ""),
        ("FXREMAT_INPLACE", "yes", ""),
        ("FXREMAT_TIME_LIMIT_SECONDS", "0", ""),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, text: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name or its value, when a graph is compiled, with what may be meant."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidOptionError, match=variable) as caught:
        step(torch.compile(chain(), backend="fxremat", options=EAGER))
    assert caught.value.option == variable
    assert caught.value.near_matches[:1] == ((near,) if near else caught.value.near_matches[:1])


def test_a_variable_of_somebody_elses_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It resembles none of ours."""
    monkeypatch.setenv("FXREMAT_NIGHTLY_RUN", "1")
    assert held("budget") == ("None", "default")


def test_options_that_exclude_each_other_are_told_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone may be right."""
    monkeypatch.setenv("FXREMAT_INPLACE", "0")
    with pytest.raises(InvalidOptionError, match="False from FXREMAT_INPLACE"):
        fxremat.settings()
    fxremat.configure(compiler="eager")
    assert held("inplace") == ("False", "FXREMAT_INPLACE")


@pytest.mark.parametrize("give", [fxremat.configure, fxremat.install, fxremat.enabled, fxremat.backend])
def test_options_are_checked_where_they_are_given(give: Any) -> None:
    """At once, and what was set before stays."""
    fxremat.configure(budget="1MiB")
    fxremat.install(budget="2MiB")
    for wrong in ({"bugdet": "3MiB"}, {"budget": "3MoB"}, {"mode": "fast"}):
        with pytest.raises(InvalidOptionError):
            give(**wrong)
    assert held("budget") == ("'2MiB'", "fxremat.install()")
    fxremat.uninstall()
    assert held("budget") == ("'1MiB'", "fxremat.configure()")


def test_configure_replaces_what_it_has_set() -> None:
    """All of it, so that without options nothing is set."""
    fxremat.configure(budget="1MiB", planner="sublinear")
    fxremat.configure(budget="2MiB")
    assert (held("budget")[0], held("planner")[0]) == ("'2MiB'", "'auto'")
    fxremat.configure()
    assert held("budget") == ("None", "default")


def test_what_is_compiled_stays() -> None:
    """Another default holds for graphs that are compiled later, those of another size among them."""
    fxremat.configure(budget=0.9, **EAGER)
    model = torch.compile(chain(), backend="fxremat")
    (first,) = step(model)
    fxremat.configure(budget=0.8, **EAGER)
    assert step(model) == []
    (second,) = step(model, size=6)
    assert (first.budget, second.budget) == (0.9, 0.8)


def test_values_are_a_part_of_a_cache_key_and_places_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another budget in a variable is another key; the same budget from elsewhere is the same."""

    def key() -> str:
        from fxremat.options.settings import in_force

        return Partitioner(in_force()).key()

    keys = []
    for text in ("1MiB", "2MiB"):
        monkeypatch.setenv("FXREMAT_BUDGET", text)
        keys.append(key())
    monkeypatch.delenv("FXREMAT_BUDGET")
    fxremat.configure(budget="2MiB")
    assert keys[0] != keys[1] == key() == Partitioner(Options.parse({"budget": "2MiB"})).key()
    states = [
        pickle.dumps(Partitioner(options)) for options in (Options(budget=1), Options.parse({"budget": 1}))
    ]
    assert states[0] == states[1]


@pytest.mark.inductor
def test_a_changed_variable_is_not_served_the_code_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph under another budget is compiled anew; under the same, a cache has it, and says so."""
    reports = []
    for text in ("1MiB", "min", "1MiB"):
        torch.compiler.reset()
        monkeypatch.setenv("FXREMAT_BUDGET", text)
        with fxremat.enabled(scope="graph"), torch._inductor.config.patch(fx_graph_cache=True):
            reports += step(torch.compile(chain()))
    assert [(each.settings[0].value, each.settings[0].source) for each in reports] == [
        (value, "FXREMAT_BUDGET") for value in ("'1MiB'", "'min'", "'1MiB'")
    ]
    assert not reports[1].from_cache and reports[2].from_cache


def test_a_report_says_what_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All options with their places; the summary those that the call did not give."""
    monkeypatch.setenv("FXREMAT_BUDGET", "0.9")
    (report,) = step(torch.compile(chain(), backend="fxremat", options=EAGER))
    assert report.settings[0] == fxremat.settings()[0]
    assert "budget=0.9 from FXREMAT_BUDGET\n" in report.summary() + "\n"
    assert '{"name": "compiler", "value": "\'eager\'", "source": "options"}' in report.to_json()


# --- The backend with options ---------------------------------------------------------------------------


def planner(problem: object) -> dict[str, int]:
    """A planner that can be pickled."""
    return {}


def test_equal_backends_are_one() -> None:
    """By their options, in any order; also as copies and as pickles."""
    some = fxremat.backend(budget="1MiB", planner=planner, max_autotune=False)
    same = fxremat.backend(max_autotune=False, planner=planner, budget="1MiB")
    copies = [same, copy.copy(some), copy.deepcopy(some), pickle.loads(pickle.dumps(some))]
    assert {some, *copies} == {some}
    assert [repr(each) for each in copies[1:]] == 3 * [repr(some)]
    assert repr(fxremat.backend(budget="1MiB")) == "fxremat.backend(budget='1MiB')"


def test_other_backends_are_others() -> None:
    """A byte and all of the peak are two budgets, though Python's numbers are equal."""
    backends = [fxremat.backend(), *(fxremat.backend(budget=each) for each in (1, 1.0, "1"))]
    assert len({*backends}) == 4
    assert backends[0] != "fxremat"


def test_an_equal_backend_compiles_nothing_again() -> None:
    """A compiled model that is copied shares code; another budget is compiled anew."""
    model = chain()
    assert len(step(torch.compile(model, backend=fxremat.backend(budget=0.9, **EAGER)))) == 1
    assert step(torch.compile(model, backend=fxremat.backend(budget=0.9, **EAGER))) == []
    assert len(step(torch.compile(model, backend=fxremat.backend(budget=0.8, **EAGER)))) == 1


def test_a_compiled_model_can_be_copied() -> None:
    """With its backend, as Fabric does it."""
    compiled = torch.compile(chain(), backend=fxremat.backend(budget=0.9, **EAGER))
    (report,) = step(copy.deepcopy(compiled))
    assert report.budget == 0.9


# --- What Inductor was to compile -----------------------------------------------------------------------


def test_a_block_takes_what_is_compiled_inside(inductor: list[dict[str, Any]]) -> None:
    """Wherever torch.compile was called; what is compiled stays, and serves all models of that shape."""
    early, equal = torch.compile(chain()), torch.compile(chain())
    with fxremat.enabled(budget=0.9, **EAGER):
        (report,) = step(early)
        assert report.budget == 0.9
    assert step(early) == step(equal) == inductor == []
    torch.compiler.reset()
    assert step(early) == [] and len(inductor) == 1
    with fxremat.enabled(**EAGER):
        assert step(equal) == [] and len(inductor) == 1


def test_what_is_made_inside_and_first_called_behind_is_inductors(inductor: list[dict[str, Any]]) -> None:
    """Who compiles is decided when a graph is compiled."""
    with fxremat.enabled(**EAGER):
        model = torch.compile(chain())
    assert step(model) == []
    assert inductor == [{}]


def test_gradients_are_those_of_inductors_way() -> None:
    """Taken graphs are compiled as by the backend's name, bit for bit."""
    gradients = []
    for named in (True, False):
        model = chain()
        options = {"budget": "min", **EAGER}
        with fxremat.enabled(**({} if named else options)):
            step(torch.compile(model, **({"backend": "fxremat", "options": options} if named else {})))
        gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))  # type: ignore[arg-type]


def test_inductors_own_options_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the call and of its mode, before those of the block."""
    found: list[Options] = []

    def compile_under(options: Options, module: torch.fx.GraphModule, inputs: object) -> Any:
        found.append(options)
        return module.forward

    monkeypatch.setattr("fxremat.driver.reach.compile_under", compile_under)
    with fxremat.enabled(budget="1MiB", epilogue_fusion=True):
        step(torch.compile(chain(), mode="max-autotune-no-cudagraphs"))
        torch.compiler.reset()
        step(torch.compile(chain(), options={"epilogue_fusion": False}))
    mode = Options.parse(mode="max-autotune-no-cudagraphs").inductor
    assert [each.inductor for each in found] == [
        {"epilogue_fusion": True, **mode},
        {"epilogue_fusion": False},
    ]
    assert {each.budget for each in found} == {"1MiB"}
    assert found[1].sources["epilogue_fusion"] == "options"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_are_let_alone(backend: str) -> None:
    """Only Inductor's graphs are taken."""
    with fxremat.enabled(**EAGER):
        assert step(torch.compile(chain(), backend=backend)) == []


def test_install_holds_in_every_thread_and_enabled_in_its_own(inductor: list[dict[str, Any]]) -> None:
    """A thread that is started inside of a block has none of it."""

    def reports_of_thread() -> int:
        torch.compiler.reset()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(len(step(torch.compile(chain())))))
        thread.start()
        thread.join()
        return found[0]

    with fxremat.enabled(**EAGER):
        counts = [reports_of_thread()]
    fxremat.install(**EAGER)
    counts.append(reports_of_thread())
    fxremat.uninstall()
    counts.append(reports_of_thread())
    assert counts == [0, 1, 0]


def test_torch_is_as_before_behind_the_last() -> None:
    """Blocks and installations in any order; each of both once."""
    before = _Wrapper.__call__
    with fxremat.enabled():
        fxremat.install()
        fxremat.install(budget="1MiB")
        with fxremat.enabled():
            assert _Wrapper.__call__ is not before
    assert held("budget") == ("'1MiB'", "fxremat.install()")
    fxremat.uninstall()
    assert _Wrapper.__call__ is before
    fxremat.uninstall()
    assert held("budget") == ("None", "default")


def test_who_else_stands_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that another has put upon ours is not taken away, and ours beneath it lets all pass."""
    calls = []
    with fxremat.enabled(**EAGER):
        ours = _Wrapper.__call__

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            return ours(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(_Wrapper, "__call__", theirs)
            assert len(step(torch.compile(chain()))) == 1
    assert len(calls) == 1
    monkeypatch.setattr(_Wrapper, "__call__", _Wrapper.__call__)


def test_a_block_ends_with_an_error_inside() -> None:
    """And can be used as a decorator."""

    @fxremat.enabled(budget="1MiB")
    def fail() -> Tensor:
        assert held("budget")[0] == "'1MiB'"
        raise RuntimeError("inside")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="inside"):
            fail()
    assert held("budget") == ("None", "default")


def test_parts_share_a_budget() -> None:
    """Blocks that are compiled one by one are one step, as by the backend's name."""
    model = chain()
    with fxremat.enabled(budget="1MiB", **EAGER):
        for block in model.children():
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        step(model)
    assert len(fxremat.steps()[-1].calls) == 4
