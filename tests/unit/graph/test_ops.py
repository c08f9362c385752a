"""ops: what is known of each operator."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Sketch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.device.arithmetic import flops
from fxremat.graph import loops, ops
from fxremat.graph.loops import Kind, Loop, Reduction
from fxremat.graph.replays import replay

aten = torch.ops.aten

X = torch.empty(4, 6, device="meta")
LONG = torch.empty(8, 9, device="meta")
MASK = torch.empty(4, 6, dtype=torch.bool, device="meta")


def node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of the operator, meta tensors standing for operands; its value is computed if it can be."""
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        placeholder = graph.placeholder("x")
        placeholder.meta["val"] = value
        return placeholder

    drawn = fx.node.map_aggregate((args, kwargs), operand)
    made = graph.call_function(target, *drawn)
    if hasattr(target, "_schema") and not target._schema.is_mutable:
        made.meta["val"] = target(*args, **kwargs)
    return made


# --- Views ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.t.default, (X,)),
        (aten.view.default, (X, [24])),
        (aten.expand.default, (X, [2, 4, 6])),
        (aten.slice.Tensor, (X, 0, 1, 3)),
        (aten.split.Tensor, (X, 2)),
        (aten.unbind.int, (X,)),
        (aten.detach.default, (X,)),
        (aten._unsafe_view.default, (X, [24])),
        (aten.unsafe_split.Tensor, (X, 2)),
        (aten.unsafe_split_with_sizes.default, (X, [1, 3])),
        (aten.as_strided.default, (X, [2], [3])),
        (aten.relu_.default, (X,)),
    ],
    ids=str,
)
def test_views(target: Any, args: tuple[Any, ...]) -> None:
    """A view's operand is the one whose storage it shares; it runs no kernel and moves nothing."""
    view = node(target, *args)
    assert ops.viewed_operand(view) is view.all_input_nodes[0]
    assert loops.kind(view) is Kind.VIEW
    assert loops.moved_bytes(view) == 0


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.clone.default, (X,)),
        (aten.mm.default, (X, X.t())),
        (aten._to_copy.default, (X,)),
        (aten.sort.default, (X,)),
        (aten.cat.default, ([X, X],)),
    ],
    ids=str,
)
def test_new_storages(target: Any, args: tuple[Any, ...]) -> None:
    """An operator that is no view shares nothing."""
    assert ops.viewed_operand(node(target, *args)) is None


def test_a_getitem_is_no_view_by_itself() -> None:
    """Whether it shares is its operator's matter; it runs no kernel."""
    sketch = Sketch()
    sort = sketch.call("sort", aten.sort.default, sketch.input("primals_1", 4))
    values = sketch.call("values", operator.getitem, sort, 0)
    assert ops.is_getitem(values)
    assert not ops.is_getitem(sort)
    assert ops.viewed_operand(values) is None
    assert loops.kind(values) is Kind.VIEW


# --- Kinds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "target", "args"),
    [
        (Kind.POINTWISE, aten.add.Tensor, (X, X)),
        (Kind.POINTWISE, aten.gelu.default, (X,)),
        (Kind.POINTWISE, aten.cat.default, ([X, X],)),
        (Kind.POINTWISE, aten.embedding.default, (X, MASK.long())),
        (Kind.REDUCTION, aten.sum.dim_IntList, (LONG, [0])),
        (Kind.POINTWISE, aten.sum.dim_IntList, (X, [0])),
        (Kind.REDUCTION, aten.var_mean.correction, (X, [0])),
        (Kind.KERNEL, aten.mm.default, (X, X.t())),
        (Kind.KERNEL, aten.sort.default, (X,)),
        (Kind.KERNEL, aten.mul.Tensor, (X.cfloat(), X)),
        (Kind.KERNEL, aten.abs.default, (X.cfloat(),)),
        (Kind.VIEW, aten.view_as_real.default, (X.cfloat(),)),
        (Kind.KERNEL, aten.convolution.default, None),
    ],
    ids=str,
)
def test_kinds(expected: Kind, target: Any, args: tuple[Any, ...] | None) -> None:
    """Loops, loops with a reduction, and kernels of their own."""
    if args is None:
        image, weight = torch.empty(1, 3, 8, 8, device="meta"), torch.empty(4, 3, 3, 3, device="meta")
        args = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert loops.kind(node(target, *args)) is expected


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.add.Tensor, (X, X), Loop(Kind.POINTWISE, 24, is_sum=True)),
        (aten.exp.default, (X,), Loop(Kind.POINTWISE, 24, is_expensive=True)),
        (aten.sum.dim_IntList, (LONG, [1]), Loop(Kind.REDUCTION, 72, Reduction(72, 8, is_inner=True))),
        (aten.sum.dim_IntList, (LONG, [0]), Loop(Kind.REDUCTION, 72, Reduction(72, 9, is_inner=False))),
        (aten.sum.dim_IntList, (X, [0]), Loop(Kind.POINTWISE, 6, is_moving=True, unrolled=4, operations=3)),
        (aten.mean.dim, (X, [1]), Loop(Kind.POINTWISE, 4, is_moving=True, unrolled=6, operations=6)),
        (aten.amax.default, (torch.zeros(3), [0]), Loop(Kind.REDUCTION, 3, Reduction(3, 1))),
        (aten.mm.default, (X, X.t()), Loop(Kind.KERNEL, 16, is_product=True)),
        (aten.cat.default, ([X, X],), Loop(Kind.POINTWISE, 48, is_cat=True, is_moving=True, operations=12)),
        (
            aten.slice_scatter.default,
            (X, X),
            Loop(Kind.POINTWISE, 24, is_moving=True, is_overlay=True, operations=2),
        ),
        (
            aten.slice_scatter.default,
            (X, X[1:3], 0, 1, 3),
            Loop(
                Kind.POINTWISE,
                24,
                is_moving=True,
                is_overlay=True,
                operations=3,
                shared=("place in 0", "bound 1", "start 1 in 0", "bound 3", "end 3 in 0"),
            ),
        ),
        (
            aten.select_scatter.default,
            (X, X[0], 0, 0),
            Loop(Kind.POINTWISE, 24, shared=("place in 0", "bound 0", "index 0 in 0")),
        ),
        (
            aten.constant_pad_nd.default,
            (X, [1, 0, 2, 2]),
            Loop(Kind.POINTWISE, 56, is_moving=True, operations=12),
        ),
        (
            aten.gather.default,
            (X, 0, MASK.long()),
            Loop(Kind.POINTWISE, 24, is_moving=True, is_gather=True, operations=0),
        ),
        (
            aten.full.default,
            ([4, 6], 1.5),
            Loop(Kind.POINTWISE, 24, operations=0, shared=("1.5 torch.float32",)),
        ),
        (aten.t.default, (X,), Loop(Kind.VIEW, 24, operations=0)),
    ],
    ids=str,
)
def test_loops(target: Any, args: tuple[Any, ...], expected: Loop) -> None:
    """A loop runs over what it writes, a reduction over what it reads, unless that is short."""
    assert loops.loop(node(target, *args)) == expected


@pytest.mark.parametrize(("mode", "expected"), [("fake", 4), ("symbolic", 1)])
def test_reductions_of_sizes_that_may_change_have_a_loop(mode: str, expected: int) -> None:
    """Their size when they were traced says nothing of how long they are."""
    traced = make_fx(lambda x: x.sum(0), tracing_mode=mode)(torch.empty(4, 6))
    assert [loops.unrolled(each) for each in traced.graph.nodes if ops.packet(each) is aten.sum] == [expected]


def test_batched_products_with_a_vector_are_loops_on_a_cpu() -> None:
    """They reduce the innermost dimension if the second factor is the vector."""
    matrices, column, row = torch.ones(2, 9, 9), torch.ones(2, 9, 1), torch.ones(2, 1, 9)
    inner = loops.loop(node(aten.bmm.default, matrices, column))
    assert (inner.kind, inner.reduction) == (Kind.REDUCTION, Reduction(162, 18, is_inner=True))
    outer = loops.loop(node(aten.bmm.default, row, matrices))
    assert (outer.kind, outer.reduction) == (Kind.REDUCTION, Reduction(162, 18, is_inner=False))
    short = loops.loop(node(aten.bmm.default, matrices[:, :, :4], column[:, :4]))
    assert (short.kind, short.unrolled, short.operations) == (Kind.POINTWISE, 4, 7)
    assert loops.kind(node(aten.bmm.default, matrices, matrices.mT)) is Kind.KERNEL
    elsewhere = (matrices.to("meta"), column.to("meta"))
    assert loops.kind(node(aten.bmm.default, *elsewhere)) is Kind.KERNEL


def test_images_lie_channels_first_or_last() -> None:
    """What a convolution would have to copy: four dimensions, unless the order makes no difference."""
    image = torch.empty(2, 3, 4, 5)
    assert loops.is_channels_first(image)
    assert not loops.is_channels_first(image.to(memory_format=torch.channels_last))
    assert not loops.is_channels_first(torch.empty(2, 3, 1, 1))
    assert not loops.is_channels_first(torch.empty(2, 3))


def test_titles() -> None:
    """An operator is called by its name and overload, an input by what it is."""

    def function(x: Tensor) -> Tensor:
        return x

    assert ops.title(node(aten.mm.default, X, X.t())) == "aten.mm.default"
    assert ops.title(node(operator.getitem, (X, X), 0)) == "getitem"
    assert ops.title(node(function, X)) == "function"
    assert ops.title(fx.Graph().placeholder("x")) == "placeholder"
    assert ops.title(fx.Graph().get_attr("weight")) == "get_attr"


def test_an_argument_is_found_wherever_it_was_given() -> None:
    """By position, by name, by default; None where the operator has none of that name."""
    assert ops.argument(node(aten.sum.dim_IntList, X, [0], True), "keepdim") is True
    assert ops.argument(node(aten.sum.dim_IntList, X, [0], keepdim=True), "keepdim") is True
    assert ops.argument(node(aten.sum.dim_IntList, X, [0]), "keepdim") is False
    assert ops.argument(node(aten.sum.dim_IntList, X, [0]), "no_such") is None
    assert ops.argument(node(operator.getitem, (X, X), 0), "index") is None


# --- What runs once -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (aten.mm.default, (X, X.t()), None),
        (aten.native_layer_norm.default, (X, [6], None, None, 1e-5), None),
        (aten.native_dropout_backward.default, (X, MASK, 2.0), None),
        (aten.native_dropout.default, (X, 0.5, True), "it draws random numbers"),
        (aten.rand.default, ([4],), "it draws random numbers"),
        (aten.randperm.default, (4,), "it draws random numbers"),
        (aten.multinomial.default, (X, 2), "it draws random numbers"),
        (aten.copy_.default, (X, X), "it has an effect"),
        (aten.relu_.default, (X,), "it has an effect"),
        (aten._assert_async.msg, (X, "no"), "it has an effect"),
    ],
    ids=str,
)
def test_keep_reasons(target: Any, args: tuple[Any, ...], reason: str | None) -> None:
    """Pure operators may run again; random and writing ones may not."""
    assert ops.keep_reason(node(target, *args)) == reason


def test_every_operator_with_a_generator_is_random() -> None:
    """The oracle is torch's own list: what takes a generator draws random numbers, dropout given."""
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [
        getattr(packet, name)
        for packet in packets
        if hasattr(packet, "overloads")
        for name in packet.overloads()
    ]
    drawing = [each for each in overloads if any(a.name == "generator" for a in each._schema.arguments)]
    assert len(drawing) > 50
    assert [each for each in drawing if not ops.is_random(fx.Graph().call_function(each))] == []


@pytest.mark.parametrize(("dropout_p", "expected"), [(0.0, False), (0.1, True)])
def test_attention_is_random_by_its_dropout(dropout_p: float, expected: bool) -> None:
    """Given by position or by name, or left out."""
    q = torch.empty(1, 2, 3, 4, device="meta")
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert ops.is_random(node(attention, q, q, q, dropout_p)) is expected
    assert ops.is_random(node(attention, q, q, q, dropout_p=dropout_p)) is expected
    assert not ops.is_random(node(attention, q, q, q))


def test_an_item_becomes_a_number_of_the_program() -> None:
    """Control flow may hang on it."""
    scalar = torch.empty((), device="meta")
    drawn = fx.Graph()
    placeholder = drawn.placeholder("x")
    placeholder.meta["val"] = scalar
    item = drawn.call_function(aten._local_scalar_dense.default, (placeholder,))
    assert ops.keep_reason(item) == "its value becomes a number of the program"


def test_higher_order_operators_run_once() -> None:
    """What they run inside is not looked at."""
    called = fx.Graph().call_function(torch.ops.higher_order.cond, ())
    assert ops.keep_reason(called) == "it is a higher-order operator"


def test_inputs_do_not_run() -> None:
    """A placeholder has nothing to run again."""
    assert ops.keep_reason(fx.Graph().placeholder("x")) == "it is an input"


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs a torch that was built with distributed"
)
def test_collectives_are_effects() -> None:
    """Every rank must call them, in one order."""
    called = fx.Graph().call_function(torch.ops._c10d_functional.all_reduce.default, ())
    assert ops.is_collective(called)
    assert ops.has_effect(called)
    assert not ops.is_collective(node(aten.mm.default, X, X.t()))


def test_batch_norm_is_replayed_without_its_state() -> None:
    """In training: the same input, weights, momentum and eps; in evaluation it runs as it did."""
    channels = torch.empty(6, device="meta")
    target = aten._native_batch_norm_legit_functional.default
    norm = node(target, X, channels, None, channels, channels, True, 0.1, 1e-5)
    replayed, args, kwargs, outputs = replay(norm)
    assert outputs == 3
    assert replayed is aten._native_batch_norm_legit.no_stats
    assert args == (norm.args[0], norm.args[1], None, True, 0.1, 1e-5)
    assert kwargs == {}
    plain = node(target, X, channels, None, channels, channels, False, 0.1, 1e-5)
    assert replay(plain) == (plain.target, plain.args, plain.kwargs, None)
    assert replay(norm).operands == [norm.args[0], norm.args[1]]


def test_a_replay_equals_its_original() -> None:
    """The oracle is torch: result, mean and deviation agree in every bit, and no state is read."""
    x, weight, bias = torch.randn(4, 6), torch.randn(6), torch.randn(6)
    mean, variance = torch.randn(6), torch.rand(6)
    target = aten._native_batch_norm_legit_functional.default
    original = target(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    norm = node(target, *(t.to("meta") for t in (x, weight, bias, mean, variance)), True, 0.1, 1e-5)
    replayed, args, _, outputs = replay(norm)
    real = dict(zip(norm.args[:3], (x, weight, bias), strict=True))
    again = replayed(*(real.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in args))
    assert len(again) == outputs
    for each, expected in zip(again, original, strict=False):
        assert torch.equal(each, expected)


# --- Bytes and arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(4, 6), 96),
        (torch.empty(4, 6).t(), 96),
        (torch.empty(4, 6, dtype=torch.bool), 24),
        (torch.empty(4, 6, dtype=torch.bfloat16), 48),
        (torch.empty(()), 4),
        (torch.empty(0, 6), 0),
        (torch.empty(6).expand(4, 6), 24),
        (torch.empty_strided((4, 6), (8, 1)), 120),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), 480),
        (torch.eye(3).to_sparse(), 0),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else str(value),
)
def test_storage_bytes(tensor: Tensor, expected: int) -> None:
    """Bytes follow from sizes, strides and dtype: those of a storage that ends with the last element."""
    assert ops.storage_bytes(tensor) == expected


def test_bytes_of_values() -> None:
    """Those of all outputs; moved are operands and results, each operand once."""
    sort = node(aten.sort.default, X)
    assert ops.value_bytes(sort) == 96 + 192
    assert loops.moved_bytes(sort) == 96 + 96 + 192
    sketch = Sketch()
    x = sketch.input("primals_1", 4, 6)
    assert loops.moved_bytes(sketch.call("square", aten.mul.Tensor, x, x)) == 192


def test_tensors_of_a_value() -> None:
    """Nested tuples and lists are looked through; what is no tensor is left out."""
    a, b, c = (torch.empty(size) for size in (1, 2, 3))
    assert [tensor.shape[0] for tensor in ops.tensors((a, [b, None, 3], (c,)))] == [1, 2, 3]
    assert list(ops.tensors(None)) == []


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.mm.default, (X, X.t()), 2 * 4 * 6 * 4),
        (aten.addmm.default, (torch.empty(4, device="meta"), X, X.t()), 2 * 4 * 6 * 4),
        (aten.bmm.default, (X[None], X.t()[None]), 2 * 4 * 6 * 4),
        (aten.add.Tensor, (X, X), 0),
        (aten.native_layer_norm.default, (X, [6], None, None, 1e-5), 0),
    ],
    ids=str,
)
def test_flops(target: Any, args: tuple[Any, ...], expected: int) -> None:
    """A product of (m, k) and (k, n) takes 2 m k n operations; what is no dense kernel takes none."""
    assert flops(node(target, *args)) == expected


def test_flops_of_a_convolution() -> None:
    """2 * batch * outputs * channels * window."""
    image, weight = torch.empty(2, 3, 8, 8, device="meta"), torch.empty(4, 3, 3, 3, device="meta")
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert flops(node(aten.convolution.default, *args)) == 2 * 2 * (4 * 8 * 8) * 3 * 9


def test_flops_of_attention_on_a_cpu() -> None:
    """Two products forward and five backward, of sequences of 5 with 3 heads of 4."""
    q = torch.empty(2, 3, 5, 4, device="meta")
    product = 2 * 2 * 3 * 5 * 5 * 4
    attention = node(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    assert flops(attention) == 2 * product
    logsumexp = torch.empty(2, 3, 5, device="meta")
    gradient = node(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        q,
        q,
        q,
        q,
        q,
        logsumexp,
        0.0,
        False,
    )
    assert flops(gradient) == 5 * product


# --- Against torch's own database of operators ----------------------------------------------------------

# Their gradients do not return under a dispatch mode; jiterator's need a GPU.
SKIPPED = ("angle", "sgn", "sign", "jiterator")


def run_database(mode: TorchDispatchMode) -> None:
    """Run two samples of each differentiable operator that torch's own tests have, forward and backward."""
    pytest.importorskip("expecttest", reason="torch's database of operators needs expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    for each in op_db:
        if torch.float32 not in each.dtypes or each.name.startswith(SKIPPED):
            continue
        for sample in list(each.sample_inputs("cpu", torch.float32, requires_grad=True))[:2]:
            arguments = (sample.input, *sample.args)
            with mode, contextlib.suppress(RuntimeError, NotImplementedError):  # what has no gradient
                result = each(*arguments, **sample.kwargs)
                leaves = [leaf for leaf in ops.tensors(result) if leaf.requires_grad]
                sums = [leaf.abs().sum() for leaf in leaves]
                wanted = [leaf for leaf in ops.tensors(arguments) if leaf.requires_grad]
                torch.autograd.grad(sums, wanted, allow_unused=True)


class Judging(TorchDispatchMode):
    """Collects the operators of which ``fault`` finds something wrong."""

    def __init__(self, fault: Callable[[fx.Node, Any, Any, Any], bool]) -> None:
        super().__init__()
        self.fault = fault
        self.seen: set[str] = set()
        self.faults: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        graph = fx.Graph()
        x = graph.placeholder("x")
        drawn = pytree.tree_map_only(Tensor, lambda _: x, (args, kwargs))
        self.seen.add(str(function))
        if self.fault(graph.call_function(function, *drawn), (args, kwargs), result, function):
            self.faults.add(str(function))
        return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_aliases_are_those_of_every_operator_of_torch() -> None:
    """An operator's result shares a storage with an operand only where it is judged a view."""

    def fault(node: fx.Node, arguments: Any, result: Any, function: Any) -> bool:
        strided = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        operands = [each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)]
        is_sparse = any(each.layout is not torch.strided for each in (*strided, *operands))
        if is_sparse or function._schema.is_mutable:  # a traced graph has no operator that writes
            return False
        held = {storage.data_ptr() for each in operands if (storage := each.untyped_storage()).nbytes()}
        shares = any(each.untyped_storage().data_ptr() in held for each in strided)
        return shares and ops.viewed_operand(node) is None

    mode = Judging(fault)
    run_database(mode)
    assert len(mode.seen) > 500
    assert mode.faults == set()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_may_run_again_gives_the_same_again() -> None:
    """Every operator without a reason to be kept gives equal results twice, and draws no random numbers."""

    def fault(node: fx.Node, arguments: Any, result: Any, function: Any) -> bool:
        if ops.keep_reason(node) is not None or "empty" in str(function):
            return False
        state = torch.get_rng_state()
        torch.rand(3)
        elsewhere = torch.get_rng_state()
        again = function(*arguments[0], **arguments[1])
        has_drawn = not torch.equal(torch.get_rng_state(), elsewhere)
        torch.set_rng_state(state)
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True)
        return has_drawn or not all(_equal(each, other) for each, other in pairs)

    mode = Judging(fault)
    run_database(mode)
    unread = {"aten._ctc_loss.default", "aten._ctc_loss.Tensor"}  # leave what lies behind a length as it was
    assert mode.faults - unread == set()


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    one, other = (
        torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (one, other)
    )
    return torch.equal(one.nan_to_num(), other.nan_to_num())
