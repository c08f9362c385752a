"""The door to private torch names of the autograd engine: what a forward leaves behind, and counts of writes.

See ``graphs.py`` for the other doors.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "WeakStorage",
    "around_graphs",
    "backward_of",
    "clock",
    "count_of_writes",
    "gradients_of",
    "has_saved_tensor_hooks",
    "is_in_pass",
    "keeps_graph",
    "leaves",
    "nodes_behind",
    "parts",
    "saved",
    "storage_bytes",
    "storage_of",
    "zeros_bytes",
]


def clock() -> int:
    """The number that the next node of autograd's gets in this thread; they ascend."""
    return torch.autograd._get_sequence_nr()


def backward_of(values: Iterable[object], since: int) -> Node | None:
    """The node that runs a compiled backward, found from what the forward returned; None if there is none.

    Only nodes made since then are looked at: the function's own, and those of views that AOTAutograd takes
    of its results. What was there before belongs to whoever made the inputs.
    """
    waiting = [value.grad_fn for value in values if isinstance(value, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node._sequence_nr() < since:
            continue
        if isinstance(node, BackwardCFunction):
            return node
        waiting.extend(following for following, _ in node.next_functions)
    return None


def nodes_behind(node: Node) -> list[Node]:
    """What the gradients of a node go to, each once."""
    return list(dict.fromkeys(after for after, _ in node.next_functions if after is not None))


def leaves(node: Node) -> list[Tensor]:
    """The leaves that the gradients of a node stay with."""
    return [after.variable for after in nodes_behind(node) if hasattr(after, "variable")]


def zeros_bytes(node: Node, tangents: Sequence[Tensor | None]) -> int:
    """Bytes of the zeros that a node is given in place of the gradients that nobody has."""
    pairs = zip(node._input_metadata, tangents, strict=False)
    missing = (of for of, tangent in pairs if tangent is None and of.shape)
    return sum(math.prod(of.shape) * of.dtype.itemsize for of in missing)


def released(node: Node, tangents: Sequence[Tensor | None]) -> tuple[tuple[WeakStorage, int], ...] | None:
    """The memory of tangents, and its bytes, each once; None if a backward can't let go of them."""
    made_by = getattr(type(node), "_forward_cls", None)
    if not getattr(made_by, "boxed_grads_call", False):
        return None
    storages = (storage_of(each) for each in tangents if each is not None)
    found = {each._cdata: each for each in storages if each is not None}
    return tuple((WeakStorage(each), each.nbytes()) for each in found.values())


def gradients_of(roots: Iterable[object]) -> dict[int, int]:
    """The gradients that leaves have already, of which tensors are computed: bytes, by storage."""
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor)]
    seen: set[Node] = set()
    found: dict[int, int] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        gradient: Any = getattr(getattr(node, "variable", None), "grad", None)
        if gradient is not None and gradient.layout is torch.strided:
            storage = gradient.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def around_graphs(nodes: Iterable[Node | None], known: Container[int]) -> tuple[int, int]:
    """What the eager part of autograd's graph holds, and the bytes of the largest gradient in it.

    Args:
        nodes: Where the graph is gone into, down to its leaves.
        known: Storages, by ``_cdata``, that are counted elsewhere; so are parameters.
    """
    waiting = [node for node in nodes if node is not None]
    seen = set(waiting)
    saved: dict[int, int] = {}
    widest = 0
    while waiting:
        node = waiting.pop()
        following = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(following)
        waiting += following
        if isinstance(node, BackwardCFunction):
            continue
        for tensor in _saved_tensors(node):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if not (tensor.is_leaf and tensor.requires_grad) and storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
        widest = max([widest, *map(_gradient_bytes, getattr(node, "_input_metadata", ()))])
    return sum(saved.values()), widest


def _saved_tensors(node: Node) -> Iterable[Tensor]:
    """What an eager node of autograd's holds; nothing any more where its backward has run.

    Where hooks have a say, it is what they made of the tensor. None is run: a checkpoint would compute again.
    """
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                value = getattr(node, name)
                held = [each.data for each in (value if isinstance(value, tuple) else [value])]
            except RuntimeError:
                return
            yield from (each for each in held if type(each) in (Tensor, torch.nn.Parameter))


def _gradient_bytes(metadata: Any) -> int:
    """Bytes of a gradient that a node is given."""
    shape: Any = getattr(metadata, "shape", ())
    known = all(isinstance(size, int) for size in shape)
    return math.prod(shape) * int(metadata.dtype.itemsize) if known else 0


def is_in_pass() -> bool:
    """Whether a backward pass is under way in this thread: a checkpoint's forward runs inside of one."""
    return torch._C._current_graph_task_id() != -1


def has_saved_tensor_hooks() -> bool:
    """Whether hooks of the user's, or of a checkpoint, have a say in what is saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def keeps_graph() -> bool:
    """Whether the backward that is under way may run again (``retain_graph``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saved(tensor: Tensor, is_output: bool) -> Tensor:
    """The tensor as autograd would hold it between forward and backward: without a way back to itself."""
    return tensor.detach() if is_output or tensor._is_view() else tensor


def count_of_writes(tensor: Tensor) -> int:
    """How often the tensor, or another that shares its count, was written to; constant in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of: itself, unless its class wraps others."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(tensor, name))]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for one that has none of its own, such as one of ``torch.func``."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors, each storage once; fake tensors have storages, too."""
    storages = map(storage_of, tensors)
    return sum({each._cdata: each.nbytes() for each in storages if each is not None}.values())
