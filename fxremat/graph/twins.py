"""Twins: how an operator can be told to write its result over one of its operands.

A *twin* of an operator does the same arithmetic and stores the result in a tensor that it is given. Torch has
two kinds, both found by their schemas:

- the *in-place* operator of the same name and arguments: ``relu_`` of ``relu``, ``add_`` of ``add``. It
  writes over its first argument.
- the *out* operator with one more argument, which names the tensor to write to: ``add.out``,
  ``tanh_backward.grad_input``. It can write over any tensor argument.

Only operators count whose element i of the result depends on element i of each operand alone: torch tags
them pointwise. The tag ``generated`` marks an out operator that allocates the result all the same and copies
it; it is none. A library's gradient kernel promises no more than that the gradient may be written over, so a
twin that calls its result ``grad_input`` takes the place of its first argument alone.

What is written over lies as the result would, which is where the operator puts it and not always where it was
traced (``device/results.py``). A result of unknown layout is written over nothing.

An operator that is tagged to return an operand as it is, now and then, is not touched, nor what it reads.

Whether the operand is dead by then is another question (``memory/inplace.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat._torch import graphs
from fxremat.graph import ops
from fxremat.graph.generators import redraw

# Their twins compute the result in memory of their own and copy it.
_COPYING = frozenset({torch.ops.aten.mvlgamma.default})

UNKNOWN_LAYOUT = "fxremat_unknown_layout"  # in the ``meta`` of a node whose result may be anyhow

# In 16 bits they round the number first that they are given, which the operator does not.
_ROUNDING = frozenset({torch.ops.aten.mul_.Scalar})


@dataclass(frozen=True, slots=True)
class Twin:
    """An operator that writes over an argument.

    Attributes:
        target: The operator.
        argument: Position of the argument that is written over.
        keyword: The keyword under which that argument is given once more; None for an in-place operator.
    """

    target: Any
    argument: int
    keyword: str | None = None


def twins(node: fx.Node) -> tuple[Twin, ...]:
    """The twins of the node's operator, in-place operators first; none for what is not pointwise.

    Example:
        >>> graph = fx.Graph()
        >>> x, y = graph.placeholder("x"), graph.placeholder("y")
        >>> total = graph.call_function(torch.ops.aten.add.Tensor, (x, y))
        >>> [(str(twin.target), twin.argument, twin.keyword) for twin in twins(total)]
        [('aten.add_.Tensor', 0, None), ('aten.add.out', 0, 'out'), ('aten.add.out', 1, 'out')]
    """
    if not graphs.is_operator(node.target) or node.target.namespace != "aten":
        return ()
    if torch.Tag.pointwise not in node.target.tags or ops.is_random(node) or not is_plain(node):
        return ()
    return _twins_of(node.target)


def is_plain(node: fx.Node) -> bool:
    """Whether the node has let go of its operands and its results when it returns, but for declared views."""
    if ops.is_getitem(node):
        return True
    operator = node.args[2] if node.target is redraw else node.target
    if not graphs.is_operator(operator) or operator.namespace not in ops.PURE_NAMESPACES:
        return False
    return torch.Tag.maybe_aliasing_or_mutating not in operator.tags


def writable_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands that a twin could write over: they are tensors laid out exactly as the result is."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not _is_dense(result) or UNKNOWN_LAYOUT in node.meta:
        return ()
    exact = (twin for twin in twins(node) if twin.target not in _ROUNDING or result.dtype.itemsize > 2)
    places = [twin.argument for twin in exact if twin.argument < len(node.args)]
    found = (node.args[place] for place in places)
    operands = dict.fromkeys(operand for operand in found if isinstance(operand, fx.Node))
    return tuple(operand for operand in operands if _has_layout_of(operand.meta.get("val"), result))


def write_over(node: fx.Node, operand: fx.Node) -> None:
    """Turn the node into the twin that writes over this operand; its name and its users stay."""
    twin = next(
        twin for twin in twins(node) if twin.argument < len(node.args) and node.args[twin.argument] is operand
    )
    node.target = twin.target
    if twin.keyword is not None:
        node.kwargs = {**node.kwargs, twin.keyword: operand}


@functools.cache
def _twins_of(operator: Any) -> tuple[Twin, ...]:
    return () if operator in _COPYING else (*_in_place(operator), *_with_out(operator))


def _in_place(operator: Any) -> Iterator[Twin]:
    packet = getattr(torch.ops.aten, operator._schema.name.partition("::")[2] + "_", None)
    for twin in _overloads(packet):
        written = [argument for argument in twin._schema.arguments if _is_written(argument)]
        if _types(twin._schema.arguments) == _types(operator._schema.arguments) and (
            written == twin._schema.arguments[:1]
        ):
            yield Twin(twin, 0)


def _with_out(operator: Any) -> Iterator[Twin]:
    arguments = operator._schema.arguments
    for twin in _overloads(operator.overloadpacket):
        *same, last = twin._schema.arguments
        if torch.Tag.generated in twin.tags or not (last.kwarg_only and _is_written(last)):
            continue
        if _types(same) != _types(arguments) or str(last.type) != "Tensor":
            continue
        for position, argument in enumerate(arguments):
            is_gradient = position == 0 or last.name != "grad_input"
            if str(argument.type) == "Tensor" and not argument.kwarg_only and is_gradient:
                yield Twin(twin, position, last.name)


def _overloads(packet: Any) -> Iterator[Any]:
    for name in packet.overloads() if packet is not None else ():
        overload = getattr(packet, name)
        if overload._schema.arguments:
            yield overload


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _types(arguments: Iterable[torch.Argument]) -> list[tuple[str, str, bool]]:
    """What a call has to match: names and types, and which arguments go by name."""
    return [(argument.name, str(argument.type), argument.kwarg_only) for argument in arguments]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own, without gaps, and numbers are what memory holds."""
    if tensor.layout is not torch.strided or tensor.is_complex():  # a complex view may be lazily conjugated
        return False
    sizes, steps = ([graphs.hint(each) for each in found] for found in (tensor.shape, tensor.stride()))
    expected = 1
    for step, size in sorted((step or 0, size or 0) for size, step in zip(sizes, steps, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _has_layout_of(operand: object, result: torch.Tensor) -> bool:
    return (
        isinstance(operand, torch.Tensor)
        and (operand.dtype, operand.device, operand.layout) == (result.dtype, result.device, result.layout)
        and graphs.same_sizes(operand.shape, result.shape)
        and graphs.same_sizes(operand.stride(), result.stride())
    )
