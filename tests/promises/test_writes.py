"""writes: what recomputation reads again is as it was, or the backward says what was written to."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from training import Program, assert_same_outcome, compiled, everything, program, square

import fxremat
from fxremat import ModifiedInputError
from fxremat.emit.writes import ReadAgain, checksum, guarded


def reading(p: Program, x: Tensor) -> Tensor:
    """Everything that is read here is read again when all is computed again."""
    return ((x @ p.weight).sin() + p.state).exp().tanh().sin()


def subject(body: Callable[..., Any] = reading, **options: Any) -> tuple[Program, Any]:
    """A program, and the same compiled so that all is computed again that can be."""
    module = program(body)
    return module, compiled(module, **{"planner": everything(1), **options})


def written(tensor: Tensor) -> None:
    """A write that autograd counts."""
    with torch.no_grad():
        tensor.add_(1)


def silently_written(tensor: Tensor) -> None:
    """A write that autograd does not count."""
    tensor.data.add_(1)


TENSORS: dict[str, Callable[[Program, Tensor], Tensor]] = {
    "inputs[0]": lambda module, x: x,
    "self.weight": lambda module, x: module.weight,
    "self.state": lambda module, x: module.state,
}

# --- Writes that are counted ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_was_written_to_is_named(name: str) -> None:
    """As the user calls it, with its shape and the line that reads it."""
    module, run = subject()
    x = square()
    y = run(x)
    written(TENSORS[name](module, x))
    with pytest.raises(ModifiedInputError, match="keep=True") as caught:
        y.sum().backward()
    error = caught.value
    assert error.tensor == name and error.shape == tuple(TENSORS[name](module, x).shape)
    assert error.operator in ("aten.mm.default", "aten.add.Tensor")
    assert "test_writes.py:" in error.source and error.source in str(error)
    assert all(each.grad is None for each in module.parameters())


def test_names_are_those_of_the_users_frame() -> None:
    """Through modules, containers and closures."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.layers(batch["x"].sin()).exp().sin()  # type: ignore[no-any-return]

    run = compiled(Net(), planner=everything(1))
    expected = {"batch['x']", *(f"self.layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias"))}
    found = set()
    for write in (
        lambda batch: written(batch["x"]),
        *(lambda batch, each=each: written(each) for each in run.parameters()),
    ):
        batch = {"x": square()}
        y = run(batch)
        write(batch)
        with pytest.raises(ModifiedInputError) as caught:
            y.sum().backward()
        found.add(caught.value.tensor)
    assert found == expected


def test_the_error_is_one_of_the_family() -> None:
    """A RuntimeError, as autograd's own, that goes from process to process."""
    error = ModifiedInputError("self.weight", (4, 4), "aten.mm.default", "net.py:3")
    assert isinstance(error, RuntimeError) and isinstance(error, fxremat.FxrematError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.tensor, again.shape, str(again)) == ("self.weight", (4, 4), str(error))


class Scaled(torch.autograd.Function):
    """A product whose factor is not saved by autograd, which therefore does not look after it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.x = x
        return w * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.x, None


def test_a_write_that_autograd_does_not_look_after_is_found() -> None:
    """Gradients were wrong, without a word, where a Function holds its operand by itself."""

    def body(p: Program, x: Tensor) -> Tensor:
        return (Scaled.apply(p.weight, x) * x.sin().exp()).sin()  # type: ignore[no-any-return]

    _, run = subject(body)
    x = square()
    y = run(x)
    written(x)
    with pytest.raises(ModifiedInputError, match=r"^inputs\[0\],"):
        y.sum().backward()


def test_an_output_that_was_written_to_is_named() -> None:
    """What the forward returned may be what the backward starts from."""

    def body(p: Program, x: Tensor) -> tuple[Tensor, Tensor]:
        with fxremat.region(keep=True):
            y = (x @ p.weight).tanh()
        return y, y.view(-1).exp().sin().exp()

    module, run = subject(body)
    y, z = run(square())
    written(y.detach())
    with pytest.raises(ModifiedInputError) as caught:
        z.sum().backward()
    assert caught.value.tensor.startswith("output 0 of graph")
    assert all(each.grad is None for each in module.parameters())


def test_a_write_behind_the_backward_is_fine() -> None:
    """As an optimizer's, in every step; and one before the forward."""
    module, run = subject()
    for _ in range(3):
        x = square()
        run(x).sum().backward()
        written(x), written(module.weight), written(module.state)


def test_a_tensor_that_is_not_read_again_may_be_written_to() -> None:
    """With all kept, only autograd's own rules hold."""
    module, run = subject(planner="keep_all")
    expected = program(reading)
    for each, call in ((module, run), (expected, expected)):
        y = call(square())
        written(each.state)
        y.sum().backward()
    assert fxremat.reports()[-1].reads_again == ()
    assert_same_outcome({"w": module.weight.grad}, {"w": expected.weight.grad})


def test_the_second_of_two_backwards_looks_again() -> None:
    """With retain_graph, what is read again is looked after until the graph goes."""
    module, run = subject()
    y = run(square()).sum()
    y.backward(retain_graph=True)
    first = module.weight.grad.clone()
    y.backward(retain_graph=True)
    torch.testing.assert_close(module.weight.grad, 2 * first, rtol=0, atol=0)
    written(module.state)
    with pytest.raises(ModifiedInputError, match=r"self\.state"):
        y.backward()


def test_two_forwards_before_their_backwards_look_after_their_own() -> None:
    """A write between them is known to the second."""
    _, run = subject()
    x, other = square(), square(2)
    first = run(x)
    written(x)
    second = run(other)
    second.sum().backward()
    with pytest.raises(ModifiedInputError, match=r"^inputs\[0\],"):
        first.sum().backward()


# --- Which node the check is put on ---------------------------------------------------------------------


def test_each_output_leads_to_the_check() -> None:
    """Views of results, results of several, and those that no gradient flows through."""

    def body(p: Program, x: Tensor) -> tuple[Any, ...]:
        y = (x @ p.weight).sin().exp()
        return x.sin() > 0, y.view(-1)[:3], y.t(), y.sum().exp()

    for index in (1, 2, 3):
        _, run = subject(body)
        x = square()
        outputs = run(x)
        written(x)
        with pytest.raises(ModifiedInputError):
            outputs[index].sum().backward()


def test_an_input_that_is_returned_has_a_backward_of_its_own() -> None:
    """It doesn't run what was compiled, and is not refused."""

    def body(p: Program, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), (x @ p.weight).sin().exp()

    _, run = subject(body)
    leaf = square(requires_grad=True)
    x = leaf * 2
    same, _ = run(x)
    written(x)
    same.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full((4, 4), 2.0))


def test_an_input_that_the_graph_writes_to_may_lead_to_the_check() -> None:
    """Nothing else is returned."""

    def body(p: Program, x: Tensor, y: Tensor) -> None:
        y.mul_((x @ p.weight).sin().exp())

    _, run = subject(body)
    x, y = square(), torch.ones(4, 4)
    run(x, y)
    written(x)
    with pytest.raises(ModifiedInputError, match=r"^inputs\[0\],"):
        y.sum().backward()


def test_without_gradients_nothing_is_looked_after() -> None:
    """The forward runs alone."""
    _, run = subject()
    run(square()).sum().backward()
    with torch.no_grad():
        assert not run(square()).requires_grad


def test_sizes_that_change_and_numbers_among_the_inputs() -> None:
    """Positions are those of the graph's inputs, sizes among them."""

    def body(p: Program, x: Tensor, factor: float) -> Tensor:
        return reading(p, x) * factor

    _, run = subject(body, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 4)
        run(x, 1.5).sum().backward()
        y = run(x, 2.5)
        written(x)
        with pytest.raises(ModifiedInputError) as caught:
            y.sum().backward()
        assert (caught.value.tensor, caught.value.shape) == ("inputs[0]", (size, 4))


def test_views_of_one_tensor_count_together() -> None:
    """A write to the base is one to what the graph was given, although that is gone."""
    _, run = subject()
    base = torch.randn(8, 4)
    y = run(base[:4])
    written(base)
    with pytest.raises(ModifiedInputError, match=r"^inputs\[0\],"):
        y.sum().backward()


def test_a_tensor_of_tensors_counts_its_own_writes() -> None:
    """The graph sees its parts; the user writes to the whole."""
    for detect_writes in (False, True):
        _, run = subject(detect_writes=detect_writes)
        x = TwoTensor(square(), square(2))
        run(x).sum().backward()
        y = run(x)
        silently_written(x.b) if detect_writes else written(x)
        with pytest.raises(ModifiedInputError, match=r"^inputs\[0\],"):
            y.sum().backward()


# --- Nothing is held, nothing is in the way -------------------------------------------------------------


def test_nothing_is_held_longer_than_by_autograd() -> None:
    """Behind the backward, although the output lives; and where no backward runs, as long as the output."""
    _, run = subject()
    for with_backward in (True, False):
        x = square()
        watched = weakref.ref(x)
        y = run(x)
        if with_backward:
            y.sum().backward()
        else:
            del y
        del x
        assert watched() is None
        y = None


def test_an_output_is_not_held_by_its_own_backward() -> None:
    """No cycle through the output that is read again: it goes without the collector."""

    def body(p: Program, x: Tensor) -> tuple[Tensor, Tensor]:
        with fxremat.region(keep=True):
            y = (x @ p.weight).tanh()
        return y, y.exp().sin().exp()

    _, run = subject(body)
    gc.disable()
    try:
        y, z = run(square())
        assert "outputs" in [each.kind for each in fxremat.reports()[-1].reads_again]
        watched = weakref.ref(z)
        del y, z
        assert watched() is None
    finally:
        gc.enable()


def test_hooks_for_saved_tensors_have_the_say() -> None:
    """What a checkpoint around the compiled region computes anew, from what was written, is not refused."""
    module, run = subject()
    x = square(requires_grad=True) * 1
    y = checkpoint(run, x, use_reentrant=False)
    y.sum().backward()
    copied = lambda saved: saved.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(copied, lambda kept: kept):
        y = run(x)
    expected = torch.autograd.grad(run(x).sum(), module.weight)
    written(module.state)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), module.weight), expected, rtol=0, atol=0)


def test_compiled_autograd_traces_no_check() -> None:
    """It reads the hook as nothing, and autograd's own check is what there is."""
    module, run = subject()
    recompile = torch.compile(backend="eager", fullgraph=True)
    y = run(square()).sum()
    with torch._dynamo.compiled_autograd._enable(recompile):
        y.backward()
    expected = program(reading)
    expected(square()).sum().backward()
    torch.testing.assert_close(module.weight.grad, expected.weight.grad, rtol=0, atol=0)
    y = run(square()).sum()
    written(module.state)
    with torch._dynamo.compiled_autograd._enable(recompile), pytest.raises(RuntimeError, match="modified"):
        y.backward()


def test_what_compilers_put_on_the_callable_stays() -> None:
    """Its attributes are there on what is returned; where nothing is read again, it is returned as it is."""

    def run(*args: Any) -> None: ...

    run.zero_grad = 3  # type: ignore[attr-defined]
    read = ReadAgain("inputs", 0, "aten.mm.default", "")
    assert guarded(run, {read: "x"}, {}, False).zero_grad == 3  # type: ignore[attr-defined]
    assert guarded(run, {}, {}, True) is run


# --- Checksums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
def test_a_write_through_data_is_found_if_asked_for(name: str) -> None:
    """With detect_writes the numbers themselves are compared; nothing is refused where nobody writes."""
    module, run = subject(detect_writes=True)
    run(square()).sum().backward()
    x = square()
    y = run(x)
    silently_written(TENSORS[name](module, x))
    with pytest.raises(ModifiedInputError) as caught:
        y.sum().backward()
    assert caught.value.tensor == name


def test_another_tensor_behind_the_data_is_found() -> None:
    """``parameter.data = ...`` is a write, too."""
    module, run = subject(detect_writes=True)
    y = run(square())
    module.weight.data = torch.zeros(4, 4)
    with pytest.raises(ModifiedInputError, match=r"self\.weight"):
        y.sum().backward()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(4).bfloat16(),
        torch.tensor(True),
        torch.ones(3, 1).expand(3, 4),
        torch.arange(4),
    ],
    ids=("constant", "strided", "conjugate", "bfloat16", "bool", "expanded", "integers"),
)
def test_checksums_tell_numbers_apart(tensor: Tensor) -> None:
    """Of every dtype and layout; equal numbers have the same, and their order counts."""
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    assert checksum(tensor.logical_not()) != before
    rolled = tensor.roll(1)
    assert (checksum(rolled) == before) == torch.equal(rolled, tensor)


# --- Inductor -------------------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without Inductor's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.inductor
@pytest.mark.usefixtures("quiet")
def test_a_graph_from_a_cache_looks_as_well() -> None:
    """What is read again travels with the report."""

    def body(p: Program, x: Tensor) -> Tensor:
        with fxremat.region(recompute=True):
            return reading(p, x)

    module = program(body)
    with fresh_cache():
        for is_cached in (False, True):
            torch._dynamo.reset()
            run = torch.compile(module, backend="fxremat", options={"budget": "min"})
            run(square()).sum().backward()
            report = fxremat.reports()[-1]
            assert report.from_cache is is_cached and report.reads_again
            y = run(square())
            written(module.weight)
            with pytest.raises(ModifiedInputError, match=r"^self\.weight,"):
                y.sum().backward()
            del y  # a call that waits for its backward would make the next a part of its step


@pytest.mark.inductor
@pytest.mark.usefixtures("quiet")
def test_a_write_below_a_view_of_inductors_is_found() -> None:
    """Its code saves a view of an input that has a count of its own: autograd did not see the write."""

    def again(problem: fxremat.Problem) -> dict[str, int]:
        return {name: 1 for name in problem.graph.names if "permute" not in name}

    def body(w: Tensor, x: Tensor) -> Tensor:
        return (w.tanh().exp() * (x.t() + 1).sin()).sin()

    w, x = square(1, True), square(2)
    y = torch.compile(body, backend="fxremat", options={"planner": again})(w, x.detach())
    written(x)
    with pytest.raises(ModifiedInputError, match=r"^x,"):
        y.sum().backward()
