"""twins: which operators can write over an operand, and that they compute the same when they do."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphs import Sketch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.device.results import as_run
from fxremat.graph.joint import JointGraph
from fxremat.graph.ops import viewed_operand
from fxremat.graph.twins import UNKNOWN_LAYOUT, Twin, is_plain, twins, writable_operands, write_over
from fxremat.measure import measure_peak

aten = torch.ops.aten
SHAPE = (33, 7)
NUMBERS_BYTES = 16


def call(target: Any, *args: Any) -> fx.Node:
    """A node that calls the operator on placeholders and numbers; the names say which is which."""
    graph = fx.Graph()
    return graph.call_function(
        target, tuple(graph.placeholder(each) if isinstance(each, str) else each for each in args)
    )


def pointwise_operators() -> Iterator[Any]:
    """Every operator of aten that has a twin."""
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            if not operator._schema.is_mutable and twins(call(operator)):
                yield operator


OPERATORS = tuple(pointwise_operators())

# --- Which there are ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (aten.relu.default, [Twin(aten.relu_.default, 0)]),
        (aten.gelu_backward.default, [Twin(aten.gelu_backward.grad_input, 0, "grad_input")]),
        (aten.masked_fill.Scalar, [Twin(aten.masked_fill_.Scalar, 0)]),
        (
            aten.mul.Tensor,
            [Twin(aten.mul_.Tensor, 0), Twin(aten.mul.out, 0, "out"), Twin(aten.mul.out, 1, "out")],
        ),
        (
            aten.pow.Tensor_Scalar,  # whose twin has another overload's name
            [Twin(aten.pow_.Scalar, 0), Twin(aten.pow.Tensor_Scalar_out, 0, "out")],
        ),
        (aten.native_dropout_backward.default, []),  # its out operator allocates all the same
        (aten.clone.default, []),
        (aten.cumsum.default, []),  # cumsum_ exists, but an element of it depends on others
        (aten.bernoulli.Tensor, []),
        (aten.native_layer_norm.default, []),
        (aten.conj_physical.default, []),  # of real numbers it returns its operand
        (torch.ops.prims.convert_element_type.default, []),
    ],
    ids=str,
)
def test_the_schemas_tell_the_twins(operator: Any, expected: list[Twin]) -> None:
    """In-place operators first; generated, random and not pointwise ones are none."""
    assert list(twins(call(operator))) == expected


def test_there_are_many() -> None:
    """The common activations, arithmetic and their gradients are among them."""
    names = {str(operator) for operator in OPERATORS}
    assert len(names) > 150
    assert names >= {
        f"aten.{name}"
        for name in (
            "add.Tensor",
            "tanh.default",
            "sigmoid.default",
            "gelu.default",
            "silu.default",
            "threshold_backward.default",
            "tanh_backward.default",
            "sigmoid_backward.default",
            "silu_backward.default",
        )
    }


# --- Which operands they can take -----------------------------------------------------------------------


def drawn(operator: Any, *shapes: tuple[int, ...], **values: Tensor) -> list[str]:
    """Names of the operands, called a, b, ..., that a twin could write over."""
    sketch = Sketch()
    inputs = [sketch.input(name, *shape) for name, shape in zip("abc", shapes, strict=False)]
    for node in inputs:
        node.meta["val"] = values.get(node.name, node.meta["val"])
    return [node.name for node in writable_operands(sketch.call("y", operator, *inputs))]


def test_the_operand_has_the_results_layout() -> None:
    """Sizes, strides and dtype are the result's."""
    assert drawn(aten.add.Tensor, (4, 4), (4, 4)) == ["a", "b"]
    assert drawn(aten.add.Tensor, (4, 4), (4,)) == ["a"]
    assert drawn(aten.add.Tensor, (4,), (4, 4)) == ["b"]
    assert drawn(aten.add.Tensor, (4, 1), (1, 4)) == []
    assert drawn(aten.add.Tensor, (4, 4), (4, 4), b=torch.empty(4, 4, device="meta").t()) == ["a"]
    assert drawn(aten.add.Tensor, (4,), (4,), a=torch.empty(4, device="meta", dtype=torch.half)) == ["b"]
    assert drawn(aten.lt.Tensor, (4,), (4,)) == []


def test_an_expanded_operand_cannot_be_written_over() -> None:
    """Its elements share their places."""
    assert drawn(aten.relu.default, (4, 4), a=torch.empty(4, 1, device="meta").expand(4, 4)) == []
    assert drawn(aten.relu.default, (4, 4), a=torch.empty(4, 8, device="meta")[:, ::2]) == []


def test_what_may_lie_anyhow_is_written_over_nothing() -> None:
    """Nor is what reads it, which is said of that as well (``device/results.py``)."""
    sketch = Sketch()
    node = sketch.call("y", aten.relu.default, sketch.input("x", 4, 4))
    assert writable_operands(node)
    node.meta[UNKNOWN_LAYOUT] = True
    assert writable_operands(node) == ()


def test_complex_numbers_stay_where_they_are() -> None:
    """What a complex view holds in memory may be conjugated."""
    assert drawn(aten.neg.default, (4,), a=torch.empty(4, device="meta", dtype=torch.cfloat)) == []


def test_a_node_becomes_its_twin() -> None:
    """The name stays; the operand is given once more to an out operator."""
    node = call(aten.mul.Tensor, "a", "b")
    name, (a, b) = node.name, node.args
    write_over(node, b)
    assert (node.name, node.target, node.args, node.kwargs) == (name, aten.mul.out, (a, b), {"out": b})
    node = call(aten.mul.Tensor, "a", "b")
    write_over(node, node.args[0])
    assert (node.target, node.kwargs) == (aten.mul_.Tensor, {})


def test_who_may_hold_on_to_an_operand() -> None:
    """Operators of torch let go of it, others may not."""
    assert is_plain(call(aten.mm.default, "a", "b"))
    assert not is_plain(call(torch.ops.higher_order.cond, "a"))
    assert not is_plain(call(torch.relu, "a"))
    assert not is_plain(call(aten.conj_physical.default, "a"))


@pytest.mark.parametrize(
    ("dtype", "is_exact"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)], ids=str
)
def test_a_number_is_not_rounded_before_it_is_multiplied(dtype: torch.dtype, is_exact: bool) -> None:
    """As the operator does in place, in 16 bits."""
    value = (torch.arange(1, 1000) / 7).to(dtype)
    node = recorded(aten.mul.Scalar, [value, 0.008368200836820083])
    assert bool(writable_operands(node)) is is_exact
    same = aten.mul.Scalar(value, 0.008368200836820083)
    assert torch.equal(same, aten.mul_.Scalar(value, 0.008368200836820083)) is is_exact


def recorded(target: Any, values: list[Any]) -> fx.Node:
    """A node that calls the operator on these tensors and numbers, and what it makes of them."""
    graph, operands = fx.Graph(), []
    for place, value in enumerate(values):
        operands.append(graph.placeholder(f"x{place}") if isinstance(value, Tensor) else value)
        if isinstance(value, Tensor):
            operands[-1].meta["val"] = value
    args, kwargs = given(target, operands)
    node = graph.call_function(target, tuple(args), kwargs)
    args, kwargs = given(target, values)
    node.meta["val"] = target(*args, **kwargs)
    return node


def layouts_of(target: Any) -> Iterator[list[Any]]:
    """Arguments with matrices, some of which are transposed."""
    arguments = target._schema.arguments
    tensors = [place for place, each in enumerate(arguments) if str(each.type) == "Tensor"]
    for turned in itertools.islice(itertools.product((False, True), repeat=len(tensors)), 1, 8):
        torch.manual_seed(0)
        values = [_example(each, torch.float32, transposed=False, has_nan=False) for each in arguments]
        for place, is_turned in zip(tensors, turned, strict=True):
            square = (torch.randn(6, 6) * 3).to(values[place].dtype)
            values[place] = square.t() if is_turned else square
        yield values


def traced(target: Any, values: list[Any]) -> JointGraph | None:
    """A graph that returns what the operator makes of these values; None if it takes no such values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in values]
        try:
            node = recorded(target, fakes)
        except (RuntimeError, NotImplementedError, ValueError):
            return None
    node.graph.output((node,))
    return JointGraph.from_fx(fx.GraphModule({}, node.graph), 1)


def test_results_lie_as_it_is_found() -> None:
    """Those of all operators that have twins, also where they are traced otherwise."""
    compared, found = 0, set()
    for target, values in ((each, values) for each in OPERATORS for values in layouts_of(each)):
        real, graph = result_of(target, values), traced(target, values)
        if graph is None or not isinstance(real, Tensor):
            continue
        laid = as_run(graph)
        compared += 1
        if real.stride() != laid.fx_nodes[-1].meta["val"].stride():
            found.add(str(target))
    assert compared > 300 and found == set()


# --- That they compute the same -------------------------------------------------------------------------


def examples(operator: Any) -> Iterator[list[Any]]:
    """Arguments by the schema: numbers of several dtypes, contiguous and transposed, special values too."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        for transposed in (False, True):
            torch.manual_seed(0)
            arguments = operator._schema.arguments
            # torch's polynomials of degree NaN read what happens to be in memory
            has_nan = dtype.is_floating_point and "polynomial" not in str(operator)
            yield [_example(argument, dtype, transposed, has_nan) for argument in arguments]


def _example(argument: Any, dtype: torch.dtype, transposed: bool, has_nan: bool) -> Any:
    kind = str(argument.type)
    if argument.has_default_value() and kind != "Tensor":
        return argument.default_value
    if kind != "Tensor":
        return {"number": 2, "float": 0.5, "int": 1, "bool": True, "str": "none"}.get(kind)
    shape = SHAPE[::-1] if transposed else SHAPE
    drawn = torch.randn(shape) * 3
    drawn[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0]) if has_nan else 1.0
    needs_bool = argument.name in ("mask", "condition")
    tensor = drawn > 0 if needs_bool else drawn.to(dtype)
    return tensor.t() if transposed else tensor


def given(operator: Any, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Values as positional and keyword arguments."""
    named = list(zip(operator._schema.arguments, values, strict=False))
    by_name = {argument.name: value for argument, value in named if argument.kwarg_only}
    return [value for argument, value in named if not argument.kwarg_only], by_name


def copies(values: list[Any]) -> list[Any]:
    """The same values in memory of their own."""
    return [each.clone() if isinstance(each, Tensor) else each for each in values]


def result_of(operator: Any, values: list[Any]) -> Tensor | None:
    """What the operator returns; None where it refuses the values."""
    args, kwargs = given(operator, values)
    try:
        return operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError):
        return None


def cases(operator: Any) -> Iterator[tuple[Twin, list[Any], Tensor]]:
    """Each twin with values whose written argument has the result's layout, and the result."""
    for values in examples(operator):
        expected = result_of(operator, values)
        for twin in twins(call(operator)) if isinstance(expected, Tensor) else ():
            operand = given(operator, values)[0][twin.argument]
            if (operand.dtype, operand.shape, operand.stride()) == (
                expected.dtype,
                expected.shape,
                expected.stride(),
            ):
                yield twin, values, expected


def run_twin(operator: Any, twin: Twin, values: list[Any]) -> tuple[Tensor, Tensor]:
    """What the twin returns, and what it was to write over."""
    args, kwargs = given(operator, values)
    if twin.keyword is not None:
        kwargs = {**kwargs, twin.keyword: args[twin.argument]}
    return twin.target(*args, **kwargs), args[twin.argument]


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_twin_computes_the_same(operator: Any) -> None:
    """In every bit, in the operand's own memory, and no other operand is touched."""
    for twin, values, expected in cases(operator):
        before, now = copies(values), copies(values)
        found, operand = run_twin(operator, twin, now)
        assert found.data_ptr() == operand.data_ptr()
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        others = [pair for pair in zip(now, before, strict=True) if pair[0] is not operand]
        for each, was in others:
            if isinstance(each, Tensor):
                torch.testing.assert_close(each, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_twin_may_read_its_operand_twice(operator: Any) -> None:
    """Where the same tensor is given for all of its dtype, the result is still the same."""
    for twin, values, result in cases(operator):
        shared = given(operator, values)[0][twin.argument]
        now = [shared if isinstance(each, Tensor) and each.dtype == result.dtype else each for each in values]
        expected = result_of(operator, now)
        if expected is not None:
            found, _ = run_twin(operator, twin, now)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_twin_saves_the_result(operator: Any) -> None:
    """It allocates less than the operator does, by the result; numbers become tensors of a few bytes."""
    found = {twin: (values, result) for twin, values, result in cases(operator) if is_float(result)}
    for twin, (values, result) in found.items():
        peaks = [
            measure_peak(
                functools.partial(function, operator, *more, copies(values)), device="cpu"
            ).peak_bytes
            for function, more in ((result_of, ()), (run_twin, (twin,)))
        ]
        assert peaks[1] <= peaks[0] - result.numel() * result.itemsize + NUMBERS_BYTES


REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError)


class Aliases(TorchDispatchMode):
    """Notes the operators that are plain, declare no view, and return memory of an operand all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()
        self.found: set[Any] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        node = call(function, "a", "b")
        if is_plain(node) and not function._schema.is_mutable and viewed_operand(node) is None:
            self.seen.add(function)
            read, made = memory_of((args, kwargs)), memory_of(returned)
            if len({*read, *made}) < len({*read}) + len(made):
                self.found.add(function)
        return returned


def memory_of(values: Any) -> list[int]:
    """The addresses of the storages of all tensors among nested values."""
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return [storage.data_ptr() for storage in storages if storage.nbytes()]


@pytest.mark.slow
def test_plain_operators_return_memory_of_their_own() -> None:
    """Among all operators that torch's own test database runs, gradients included."""
    pytest.importorskip("expecttest", reason="torch's database of operators needs expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    aliases = Aliases()
    for each in op_db:
        if torch.float32 not in each.dtypes:
            continue
        samples = each.sample_inputs("cpu", torch.float32, requires_grad=each.supports_autograd)
        for sample in itertools.islice(samples, 5):
            with aliases, contextlib.suppress(*REFUSALS):
                results = pytree.tree_leaves(each(sample.input, *sample.args, **sample.kwargs))
                losses = [each.sum() for each in results if isinstance(each, Tensor) and each.requires_grad]
                if losses:
                    sum(losses).backward()
    assert len(aliases.seen) > 400
    assert aliases.found == set()


def is_float(tensor: Tensor) -> bool:
    """Whether its numbers are torch's default ones."""
    return tensor.dtype == torch.float32
