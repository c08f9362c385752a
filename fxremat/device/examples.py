"""Examples: real tensors that an operator runs on alone, for the fake ones that it was traced with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxremat._torch import graphs
from fxremat.graph import ops

Strides = tuple[int, ...]


def tensor_like(
    value: torch.Tensor, device: torch.device, strides: Strides | None, definite: bool
) -> torch.Tensor:
    """A real tensor for a fake one, sizes by their hints; with the strides of that one if none are given."""
    shape = list(map(size_of, value.shape))
    strides = strides or tuple(graphs.hint(step) or 0 for step in value.stride())
    count = ops.extent(shape, strides) if all(shape) else 0
    found = numbers(count, value.dtype, device).as_strided(shape, strides)
    if definite and len(shape) > 1 and (found.is_floating_point() or found.is_complex()):
        found.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    elif definite:
        found.fill_(1)
    return found.conj() if value.is_conj() else found


def take(value: torch.Tensor, mask: torch.Tensor, source: torch.Tensor | Sequence[int]) -> None:
    """Let a mask take all numbers of a source, or all but one, which costs most: the gradient fills that up.

    Args:
        value: What the mask is for.
        mask: The mask; each of its own elements may be for many of the value.
        source: The source, or its sizes.
    """
    sizes = [size if step else 1 for size, step in zip(mask.shape, mask.stride(), strict=True)]
    own = mask.as_strided(sizes, mask.stride())
    times = math.prod(torch.broadcast_shapes(value.shape, mask.shape)) // max(1, own.numel())
    count = source.numel() if isinstance(source, torch.Tensor) else math.prod(source)
    taken = own.new_zeros(own.numel())
    taken[: max(0, count // times if times > 1 else count - 1)] = True
    own.copy_(taken.view(sizes))


def size_of(size: int | torch.SymInt) -> int:
    """What a size stands for, 0 as well, since operators trust that sizes fit; 1 where it is not known."""
    hint = graphs.hint(size)
    return 1 if hint is None else hint


def numbers(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers that most operators take and that cost them most: true, an index of 0, no two of them alike."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.linspace(0.25, 0.75, count, device=device).to(dtype)
    return torch.full((count,), dtype is torch.bool, dtype=dtype, device=device)
