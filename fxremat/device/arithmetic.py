"""Arithmetic: the floating-point operations of a node's kernel, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from fxremat._torch import graphs
from fxremat.graph import ops

aten = torch.ops.aten

# Attention on the CPU is missing from torch's table of formulas: how many operands its formula takes.
_ATTENTION_FLOPS: dict[Any, tuple[Callable[..., int], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (flop_counter.sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (flop_counter.sdpa_backward_flop_count, 4),
}


def flops(node: fx.Node) -> int:
    """Floating-point operations of dense kernels, by torch's own formulas; 0 for all others."""
    formulas: dict[Any, Callable[..., Any]] = flop_counter.flop_registry
    formula = formulas.get(ops.packet(node))
    if formula is None:
        return _flops_of_attention(node)
    if graphs.is_higher_order(node.target):
        return 0
    args = fx.node.map_aggregate(node.args, _with_hinted_shapes)
    if "scaled_dot_product" in ops.title(node):
        args = tuple(_with_equal_heads(args))
    kwargs = fx.node.map_aggregate(node.kwargs, _with_hinted_shapes)
    return int(formula(*args, **kwargs, out_val=_hinted(node.meta.get("val"))))


def _flops_of_attention(node: fx.Node) -> int:
    if ops.packet(node) not in _ATTENTION_FLOPS:
        return 0
    formula, count = _ATTENTION_FLOPS[ops.packet(node)]
    operands = [_hinted(operand.meta.get("val")) for operand in node.args if isinstance(operand, fx.Node)]
    tensors = _with_equal_heads(
        [operand for operand in operands if isinstance(operand, torch.Tensor)][:count]
    )
    return int(formula(*(tuple(tensor.shape) for tensor in tensors)))


def _with_equal_heads(args: Sequence[Any]) -> list[Any]:
    """The operands of attention with the heads of keys and values repeated for the groups of queries."""
    heads = max(tensor.shape[1] for tensor in args[:3])
    return [
        arg.repeat_interleave(heads // arg.shape[1], dim=1)
        if isinstance(arg, torch.Tensor) and arg.dim() == 4 and arg.shape[1]
        else arg
        for arg in args
    ]


def _with_hinted_shapes(argument: Any) -> Any:
    return _hinted(argument.meta.get("val")) if isinstance(argument, fx.Node) else argument


def _hinted(value: Any) -> Any:
    """The value with symbolic sizes replaced by their hints, without data."""
    if isinstance(value, (list, tuple)):
        return type(value)(_hinted(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty([graphs.hint(size) or 1 for size in value.shape], dtype=value.dtype, device="meta")
