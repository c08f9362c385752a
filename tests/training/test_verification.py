"""Verification: a compiled graph is held against itself without fxremat, and what is wrong is found."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import attention
import networks
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from training import Program, assert_same_outcome, compiled, outcome, program, square

import fxremat
from fxremat import InvalidOptionError, Verification, VerificationError
from fxremat.driver import compilation
from fxremat.driver.verification import _difference, obstacle
from fxremat.graph.joint import JointGraph

aten = torch.ops.aten


def chain() -> nn.Module:
    """Layers whose activations are computed again at the least budget."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))))


def batch() -> Tensor:
    """A batch that is large beside the parameters."""
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def verified(module: nn.Module, *inputs: Any, steps: int = 1, **options: Any) -> Verification:
    """What was found when a module was trained."""
    run = compiled(module, **{"budget": "min", "scope": "graph", "verify": 1, **options})
    for _ in range(steps):
        returned = run(*inputs)
        leaves = [each for each in torch.utils._pytree.tree_leaves(returned) if isinstance(each, Tensor)]
        torch.stack([each.real.float().sum() for each in leaves if each.requires_grad]).sum().backward()
    found = fxremat.reports()[-1].verified
    assert found is not None
    return found


# --- What is right ------------------------------------------------------------------------------------


NETWORKS: dict[str, Callable[[], Any]] = {
    "resnet": lambda: networks.resnet(blocks=1, width=8, batch=4, size=16),
    "transformer": lambda: attention.transformer(blocks=1, width=32, heads=2, batch=4, time=32),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_verified(name: str) -> None:
    """Bit for bit, with the gradient's norm and the peak, which is the predicted one."""
    model, inputs = NETWORKS[name]()
    found = verified(model, *inputs)
    assert (found.calls, found.difference, found.place, found.reason) == (1, 0.0, "", "")
    assert found.gradient_norm == found.reference_norm > 0
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes == pytest.approx(fxremat.reports()[-1].peak_bytes, rel=0.01)


@pytest.mark.parametrize("scope", ["graph", "step"])
def test_it_leaves_nothing_behind(scope: str) -> None:
    """Two steps of a program that draws, writes to its input and has statistics are those of eager."""

    def body(self: Program, x: Tensor) -> Tensor:
        x = x * 1.0
        y = torch.tanh(self.layers[0](x @ self.weight))
        self.state.add_(1)
        return nn.functional.dropout(y, 0.5) + torch.rand(()) + self.state

    module = program(body, nn.BatchNorm1d(4))
    expected, run = copy.deepcopy(module), compiled(module, budget="min", scope=scope, verify=2)
    for seed in range(3):
        assert_same_outcome(outcome(run, [square()], seed), outcome(expected, [square()], seed))
    (report,) = (each for each in fxremat.reports()[-1:])
    assert report.verified is not None
    assert (report.verified.calls, report.verified.difference) == (2, 0.0)
    assert "2 calls compared: equal" in report.summary()


def test_what_is_written_to_inputs_is_compared() -> None:
    """An input that is a result of autograd's is written to, as in the program."""

    def body(self: Program, x: Tensor) -> Tensor:
        x.mul_(2)
        return torch.tanh(torch.tanh(x @ self.weight)) * x

    module = program(body)
    run = compiled(module, budget="min", scope="graph", verify=1)
    leaf = square(requires_grad=True)
    run(leaf * 1.0).sum().backward()
    found = fxremat.reports()[-1].verified
    assert found is not None and (found.calls, found.difference) == (1, 0.0)
    again = square(requires_grad=True)
    copy.deepcopy(module)(again * 1.0).sum().backward()
    assert leaf.grad is not None and again.grad is not None
    assert torch.equal(leaf.grad, again.grad)


class Block(nn.Module):
    """What is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


def test_each_plan_of_a_step_is_verified() -> None:
    """A step that is settled for other plans compiles them, and these are verified, too."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    for each in model:
        each.compile(backend="fxremat", options={"budget": 0.8, "compiler": "eager", "verify": 1})
    count = len(fxremat.reports())
    for _ in range(3):
        model(batch()).sum().backward()
    found = fxremat.reports()[count:]
    assert len({each.peak_bytes for each in found}) > 1, "the step was to have several plans"
    assert [each.verified and (each.verified.calls, each.verified.difference) for each in found] == [
        (1, 0.0)
    ] * len(found)


def test_without_gradients_nothing_is_counted() -> None:
    """Validation before training leaves the verification to the first training step."""
    run = compiled(chain(), budget="min", verify=1)
    with torch.no_grad():
        run(batch())
    run(batch()).sum().backward()
    found = fxremat.reports()[-1].verified
    assert found is not None and found.calls == 1


@pytest.mark.inductor
def test_under_inductor_rounding_is_allowed() -> None:
    """The masks of dropout are those of the reference; the tolerance is stated."""
    found = verified(chain(), batch(), compiler="inductor")
    assert found.calls == 1 and not found.reason
    assert found.difference <= found.tolerance == math.sqrt(torch.finfo(torch.float32).eps)
    assert found.gradient_norm == pytest.approx(found.reference_norm, rel=1e-4)


def test_a_step_is_measured_without_it() -> None:
    """Copies, references and their steps are no part of the step's peak."""
    peaks = []
    for calls in (0, 2):
        torch._dynamo.reset()
        model = Block()
        run = compiled(model, budget="min", verify=calls)
        for _ in range(3):
            run(batch()).sum().backward()
            model.zero_grad()
        peaks.append(fxremat.steps()[-1].measured_peak_bytes)
    assert peaks[0] is not None and peaks[0] == peaks[1]


# --- What is wrong ------------------------------------------------------------------------------------


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is computed again is another function than the first time."""
    rewritten = compilation.rewritten

    def broken(*args: Any, **kwargs: Any) -> tuple[JointGraph, Any]:
        graph, report = rewritten(*args, **kwargs)
        mirrors = [each for each in graph.fx_nodes if "_mirror" in each.name]
        for node in mirrors:
            if node.target is aten.tanh.default:
                node.target = aten.sigmoid.default
        assert any(each.target is aten.sigmoid.default for each in mirrors)
        return graph, report

    monkeypatch.setattr(compilation, "rewritten", broken)
    yield


@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]
)
@pytest.mark.usefixtures("breaking")
def test_a_wrong_rewrite_is_found(compiler: str) -> None:
    """Before its gradients reach anybody; the error says of what they are."""
    with torch.compiler.config.patch(force_disable_caches=True):
        run = compiled(chain(), budget="min", verify=1, compiler=compiler)
        with pytest.raises(VerificationError, match=r"gradient of fn\.\d\.weight differs") as caught:
            run(batch())
    assert caught.value.difference > caught.value.tolerance
    assert caught.value.graph_name == fxremat.reports()[-1].graph_name


@pytest.mark.usefixtures("breaking")
def test_without_verification_it_is_not_found() -> None:
    """So the tests above find it by what they test."""
    model = chain()
    expected = outcome(copy.deepcopy(model), [batch()])
    found = outcome(compiled(model, budget="min"), [batch()])
    assert any(not torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("breaking")
def test_a_fallback_goes_on_without_what_is_wrong() -> None:
    """With a warning, and the gradients of eager from the first step on."""
    model = chain()
    expected = copy.deepcopy(model)
    run = compiled(model, budget="min", verify=1, on_error="fallback", scope="graph")
    with pytest.warns(UserWarning, match="partitioner: graph .* differs by"):
        found = outcome(run, [batch()])
    assert_same_outcome(found, outcome(expected, [batch()]))
    assert_same_outcome(outcome(run, [batch()]), outcome(expected, [batch()]))
    report = fxremat.reports()[-1]
    assert report.verified is not None and not report.verified.is_kept


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, 4.0], [1.0, 5.0], 0.25),
        ([1.0], [1.0, 1.0], math.inf),
        ([1, 4], [1, 4], 0.0),
        ([1, 4], [1, 5], math.inf),
        ([1.0, 4.0], [1, 4], math.inf),
        ([1.0, 4.0j], [1.0, 5.0j], 0.25),
        ([], [], 0.0),
    ],
)
def test_differences(ours: list[Any], theirs: list[Any], expected: float) -> None:
    """Relative to a scale, here 4; what is not a number is equal to itself, and whole numbers are exact."""
    assert _difference(torch.tensor(ours), torch.tensor(theirs), 4.0) == expected


def test_results_that_are_no_tensors_are_equal_or_not() -> None:
    """Of one type as well: True is not 1."""
    pairs = {(3, 3): 0.0, (3, 4): math.inf, (True, 1): math.inf, (None, None): 0.0, (None, 0): math.inf}
    assert [_difference(*pair, 4.0) for pair in pairs] == list(pairs.values())
    assert _difference(torch.tensor(3), 3, 4.0) == math.inf


# --- What can't be verified ---------------------------------------------------------------------------


def test_graphs_with_tensors_of_their_own_are_not_run_again() -> None:
    """A step of the copy would reach them."""
    module = torch.fx.symbolic_trace(nn.Linear(4, 4))
    assert obstacle(module).startswith("the graph has tensors of its own")
    assert obstacle(torch.fx.symbolic_trace(nn.Tanh())) == ""


def test_inputs_that_are_no_plain_tensors_are_not_copied() -> None:
    """A tensor of a class that wraps others."""

    def body(self: Program, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.weight))

    found = verified(program(body), TwoTensor(square(), square()))
    assert (found.calls, found.reason) == (0, "an input is no plain tensor")


def test_custom_operators_are_not_run_again() -> None:
    """The report says why nothing was compared, and the program runs the operator once."""
    calls = []

    @torch.library.custom_op("fxremat_tests::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda ctx, gradient: gradient * 2)

    def body(self: Program, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(torch.ops.fxremat_tests.counted(x @ self.weight)))

    calls.clear()
    found = verified(program(body), square(), steps=2)
    assert found.calls == 0
    assert found.reason == "fxremat_tests.counted is a custom operator, which may have effects"
    assert len(calls) == 2
    assert f"not verified: {found.reason}" in fxremat.reports()[-1].summary()


def test_inputs_that_share_memory_are_not_copied() -> None:
    """Two views of one tensor; the program goes on."""

    def body(self: Program, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.weight) + y)

    both = torch.randn(8, 4)
    assert verified(program(body), both[:4], both[4:]).reason == "two of the inputs share memory"


def test_calls_inside_of_a_checkpoint_wait() -> None:
    """What is saved there is counted by the checkpoint: the next call outside is verified."""
    run = compiled(chain(), budget="min", scope="graph", verify=1)
    checkpoint(run, batch(), use_reentrant=False).sum().backward()
    found = fxremat.reports()[-1].verified
    assert found is not None and "checkpoint" in found.reason
    run(batch()).sum().backward()
    found = fxremat.reports()[-1].verified
    assert found is not None and (found.calls, found.reason) == (1, "")


# --- The option ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, -1, 1.5, "often"])
def test_it_is_a_number_of_calls(value: object) -> None:
    """Or False; nothing else."""
    with pytest.raises(InvalidOptionError, match="a number of calls"):
        compiled(chain(), verify=value)(batch())


def test_false_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python and in the environment."""
    with fxremat.enabled(verify=False):
        assert _setting() == "0"
    for text, expected in {"3": "3", "false": "0", "0": "0"}.items():
        monkeypatch.setenv("FXREMAT_VERIFY", text)
        assert _setting() == expected


def _setting() -> str:
    return next(each.value for each in fxremat.settings() if each.name == "verify")


def test_a_partitioner_verifies_nothing() -> None:
    """It splits graphs and does not run them."""
    with pytest.raises(InvalidOptionError, match="for backend='fxremat'"):
        fxremat.partitioner(verify=1)
