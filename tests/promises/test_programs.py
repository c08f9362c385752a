"""Programs that alias, write and return whatever they like train alike, with everything computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
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

# --- What is returned -----------------------------------------------------------------------------------


def views_of_inputs(p: Program, x: Tensor) -> Any:
    """A view of an input, a view of a parameter, and both as they are."""
    return x.t(), p.weight[1:], x, p.weight, (x @ p.weight).tanh().exp()


def views_of_values(p: Program, x: Tensor) -> Any:
    """Two views of one value that other outputs are computed from."""
    y = (x @ p.weight).tanh()
    return y.t(), y[1:], y.exp().sin()


def one_value_twice(p: Program, x: Tensor) -> Any:
    """The same value under two names, and its successor."""
    y = (x @ p.weight).tanh().sin()
    return y, y, y.exp()


def a_detached_value(p: Program, x: Tensor) -> Any:
    """Outputs without a gradient beside those with one; a detached value that others read."""
    y = (x @ p.weight).tanh()
    z = y.detach()
    return z, z.exp(), (y * z).sin().exp(), y.detach()


def not_only_floats(p: Program, x: Tensor) -> Any:
    """Integers, truth values, None, text and numbers in nested containers."""
    y = (x @ p.weight).tanh().sin()
    return {"y": [y, y.argmax()], "more": (y > 0, None, 3, "text", 0.5), "none": {"y": y.exp()}}


def conditions(p: Program, x: Tensor) -> Any:
    """A value that only chooses, and one that is chosen."""
    y = (x @ p.weight).tanh()
    return torch.where(y > 0, y.exp(), x.sin()).masked_fill(y > 0.5, 0.0).cumsum(0)


def overlapping_views(p: Program, x: Tensor) -> Any:
    """Views whose numbers share their place."""
    y = (x @ p.weight).tanh()
    windows = y.unfold(1, 2, 1).exp().sin()
    return windows.sum(-1), y.expand(3, 4, 4).exp(), y.as_strided((3, 3), (1, 4), 1).exp().sin()


def a_parameter_twice(p: Program, x: Tensor) -> Any:
    """A parameter used early and late."""
    return ((x @ p.weight).tanh() @ p.weight).sin() * p.weight.sum()


def constants(p: Program, x: Tensor) -> Any:
    """Tensors made inside."""
    return ((x @ p.weight).tanh() * torch.tensor([1.0, 2.0, 3.0, 4.0])).exp() + torch.arange(4)


def without_rows(p: Program, x: Tensor) -> Any:
    """Values without a single number."""
    return (x[:0] @ p.weight).tanh().exp()


def picked_rows(p: Program, x: Tensor) -> Any:
    """Rows by index: gathered, scattered, written to."""
    rows = torch.tensor([2, 0, 2])
    y = (x @ p.weight).tanh()
    scattered = torch.zeros(4, 4).index_add(0, rows, y[rows].exp())
    return scattered.sin(), y.index_put((rows,), y[:3] * 2, accumulate=True).exp()


def bags_of_weighted_rows(p: Program, x: Tensor) -> Any:
    """An operator whose results are empty for its gradient, which trusts that they are."""
    weights = (p.weight * 2).flatten()[:6]
    rows, bags = torch.tensor([3, 1, 0, 2, 2, 3]), torch.tensor([0, 2, 5])
    return functional.embedding_bag(rows, x @ p.weight, bags, mode="sum", per_sample_weights=weights).exp()


OTHER_ORDER = (views_of_inputs, views_of_values)  # AOTAutograd adds up their gradients in another order
PURE = (
    views_of_inputs,
    views_of_values,
    one_value_twice,
    a_detached_value,
    not_only_floats,
    conditions,
    overlapping_views,
    a_parameter_twice,
    constants,
    without_rows,
    picked_rows,
    bags_of_weighted_rows,
)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["data", "input_gradient"])
@pytest.mark.parametrize("body", PURE)
def test_pure_programs_train_alike(body: Callable[..., Any], requires_grad: bool) -> None:
    """Whatever a program returns, everything that can be is computed again, up to twice."""
    reference = "aot_eager" if body in OTHER_ORDER else "eager"
    inputs = [square(requires_grad=requires_grad)]
    assert_trains_alike(program(body), inputs, planner=everything(2), reference=reference)


# --- What is written ------------------------------------------------------------------------------------


def a_value_written_to(p: Program, x: Tensor) -> Any:
    """In-place operators on values, through views as well."""
    y = x @ p.weight
    y.add_(1).relu_()
    y = y.sin() * 2
    y.t()[0].mul_(3)
    y[:, 1:3].add_(p.weight[0, 0])
    return y.exp().sin()


def rows_written_one_by_one(p: Program, x: Tensor) -> Any:
    """A tensor filled slice by slice."""
    filled = torch.empty(3, 4, 4)
    for row in range(3):
        x = (x @ p.weight).tanh()
        filled[row] = x
    return filled.exp().sin()


def an_input_written_to(p: Program, x: Tensor) -> Any:
    """The input is read, written to and read again."""
    y = (x.clone() @ p.weight).tanh()
    x.add_(1)
    z = ((x * 1) @ p.weight).sin().exp()
    x[0].mul_(2)
    return y * z


def an_input_overwritten_at_the_end(p: Program, x: Tensor) -> Any:
    """A value of the input's is needed by the backward after the input is gone."""
    y = (x.exp() * p.weight).tanh().sin().exp()
    x.zero_()
    return y


def a_buffer_updated_first(p: Program, x: Tensor) -> Any:
    """A moving average that the program reads behind its update."""
    with torch.no_grad():
        p.state.mul_(0.9).add_(x.mean(0))
    return ((x - p.state) @ p.weight).tanh().exp()


def a_buffer_updated_last(p: Program, x: Tensor) -> Any:
    """A moving average that is read before and behind its update, which depends on the result."""
    y = ((x - p.state) @ p.weight).tanh().exp().sin()
    with torch.no_grad():
        p.state[1:].copy_(y.mean(0)[1:])
    return y * (p.state + 1).tanh(), p.state


def a_parameter_updated(p: Program, x: Tensor) -> Any:
    """A parameter that decays before it is used."""
    with torch.no_grad():
        p.weight.mul_(0.9)
    return (x @ p.weight).tanh().exp().sin()


WRITING = (
    a_value_written_to,
    rows_written_one_by_one,
    an_input_written_to,
    an_input_overwritten_at_the_end,
    a_buffer_updated_first,
    a_buffer_updated_last,
    a_parameter_updated,
)


@pytest.mark.parametrize(
    "options", [{"budget": "min"}, {"planner": everything(1)}], ids=["min", "everything"]
)
@pytest.mark.parametrize("body", WRITING)
def test_writing_programs_train_alike(body: Callable[..., Any], options: dict[str, Any]) -> None:
    """What reads a tensor before it is written to is never computed again behind that."""
    assert_trains_alike(program(body), [square()], **options)


def test_an_input_with_a_gradient_may_be_written_to() -> None:
    """An inner value that enters a second graph is changed there; its gradient flows through both."""

    def body(p: Program, x: Tensor) -> Any:
        inner = x * p.weight
        torch._dynamo.graph_break()
        y = inner.clone().tanh() @ p.weight
        inner.mul_(2)
        return y.exp() * inner.sin(), inner

    assert len(assert_trains_alike(program(body), [square()], planner=everything(1))) == 2


def test_an_input_that_is_only_written_to_has_no_gradient() -> None:
    """A write under ``no_grad`` to a value that autograd knows: nothing else reads it, so it has none."""

    def body(p: Program, x: Tensor) -> Any:
        with torch.no_grad():
            x.add_(1)
        return (p.weight @ p.weight).tanh().exp()

    leaf = square(requires_grad=True)
    written = leaf * 1
    compiled(program(body), budget="min")(written).sum().backward()
    assert leaf.grad is None
    torch.testing.assert_close(written, leaf + 1, rtol=0, atol=0)


def test_one_tensor_given_twice_is_two_inputs() -> None:
    """Aliased inputs have a graph of their own."""
    x = square()
    body = lambda p, a, b: ((a @ p.weight).tanh() * b.t()).exp().sin()  # noqa: E731
    assert_trains_alike(program(body), [x, x], planner=everything(2))


# --- Parameters -----------------------------------------------------------------------------------------


def test_tied_parameters_get_the_sum_of_their_gradients() -> None:
    """A weight of two layers, and a layer that stands twice."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first)
    assert_trains_alike(module, [square()], planner=everything(2))


def test_an_unused_parameter_gets_no_gradient() -> None:
    """Its gradient stays None, and so does that of a frozen one."""
    module = program(lambda p, x: p.layers[0]((x @ p.weight).tanh()).sin(), nn.Linear(4, 4), nn.Linear(4, 4))
    module.layers[0].weight.requires_grad_(False)
    assert_trains_alike(module, [square()], planner=everything(2))


def test_no_parameter_at_all_still_gives_the_inputs_their_gradients() -> None:
    """A function of its inputs alone."""
    body = lambda p, x: (x @ p.weight.detach()).tanh().exp().sin()  # noqa: E731
    assert_trains_alike(program(body), [square(requires_grad=True), 3, None][:1], planner=everything(2))


# --- How the backward is called -------------------------------------------------------------------------


def two_losses(p: Program, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs that share their beginning."""
    y = (x @ p.weight).tanh().exp()
    return y.sin().sum(), (y * y).sum()


def gradient_after(module: nn.Module, steps: Callable[[Any], None]) -> Tensor:
    """The weight's gradient after some steps that are given the module."""
    steps(module)
    return module.weight.grad


BACKWARDS: dict[str, Callable[[Any], None]] = {}


def backwards(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Register a way to call the backward."""
    BACKWARDS[function.__name__] = function
    return function


@backwards
def one_after_the_other(module: Any) -> None:
    """A backward for each output."""
    first, second = module(square())
    first.backward(retain_graph=True)
    second.backward()


@backwards
def only_the_second(module: Any) -> None:
    """An output without a backward."""
    module(square())[1].backward()


@backwards
def the_same_twice(module: Any) -> None:
    """The backward of one output runs twice."""
    first, _ = module(square())
    first.backward(retain_graph=True)
    first.backward()


@backwards
def accumulated(module: Any) -> None:
    """Two batches before the gradients are read."""
    for seed in (1, 2):
        sum(module(square(seed))).backward()


@backwards
def two_forwards_first(module: Any) -> None:
    """Two forwards are under way at once, and the later one ends first."""
    early, late = module(square(1)), module(square(2))
    sum(late).backward()
    sum(early).backward()


@backwards
def a_loss_outside(module: Any) -> None:
    """The loss is no part of what is compiled."""
    first, second = module(square())
    (first.sin() * second.tanh()).backward()


@pytest.mark.parametrize("name", BACKWARDS)
def test_the_backward_may_be_called_in_any_way(name: str) -> None:
    """Gradients are eager's, whichever outputs have a backward, how often, and in which order."""
    module = program(two_losses)
    subject = copy.deepcopy(module)
    expected = gradient_after(module, BACKWARDS[name])
    BACKWARDS[name](compiled(subject, planner=everything(2)))
    torch.testing.assert_close(subject.weight.grad, expected, rtol=0, atol=0)


def test_gradients_of_gradients_are_refused_as_pytorch_refuses_them() -> None:
    """AOTAutograd's own error for double backward reaches the user as it is."""
    subject = compiled(program(two_losses), planner=everything(1))
    (gradient,) = torch.autograd.grad(sum(subject(square())), subject.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


def test_a_saved_output_that_the_caller_changes_is_an_error_not_a_wrong_gradient() -> None:
    """What the caller holds may be read again: the error names it."""

    def body(p: Program, x: Tensor) -> Any:
        y = x @ p.weight
        return y, (y + 1).exp().sin()

    subject = compiled(program(body), planner=lambda problem: {"add": 1, "exp": 1})  # mm, and so y, is saved
    y, z = subject(square())
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(fxremat.ModifiedInputError, match=r"output 0 of graph 0/0.* was written to"):
        z.sum().backward()


# --- Without a backward ---------------------------------------------------------------------------------


def frozen(module: Any, x: Tensor) -> Any:
    """Call a module none of whose parameters requires a gradient."""
    return module.requires_grad_(False).eval()(x)


MODES = {"no_grad": torch.no_grad(), "inference_mode": torch.inference_mode(), "frozen": None}


@pytest.mark.parametrize("mode", MODES)
def test_without_a_backward_there_is_nothing_to_plan(mode: str) -> None:
    """A forward alone gives eager's result and no report."""
    module = program(views_of_values)
    count = len(fxremat.reports())
    subject = compiled(copy.deepcopy(module).requires_grad_(mode != "frozen"), budget="min")
    if mode == "frozen":
        found, expected = subject(square()), module(square())
    else:
        with MODES[mode]:
            found, expected = subject(square()), module(square())
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=0)
        assert not each.requires_grad
    assert len(fxremat.reports()) == count


def test_training_goes_on_behind_an_evaluation() -> None:
    """The same compiled module without and then with a backward: the latter has the report."""
    module = program(one_value_twice)
    subject = compiled(copy.deepcopy(module), budget="min")
    with torch.no_grad():
        subject(square())
    count = len(fxremat.reports())
    assert_same_outcome(outcome(subject, [square()]), outcome(module, [square()]))
    assert len(fxremat.reports()) == count + 1
