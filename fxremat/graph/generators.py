"""Generators: random numbers that can be drawn a second time, since the state they were drawn from is kept.

A *state* is what a generator's next numbers depend on: a tensor of some thousand bytes for a CPU, of 16 for
a GPU. A node of its own reads it right before an operator draws (``random_state``). A mirror draws from it,
and leaves the generator as it was (``redraw``). Both are for graphs that run as they are: no compiler takes
them.

Left out: operators that are given a generator of their own, and devices that are neither CPU nor CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

__all__ = ["STATE", "add_state", "can_keep_state", "random_state", "redraw", "state_of"]

STATE = "fxremat_random_state"  # key in the fx meta of a node that draws: the name of the node of its state

_STATE_BYTES = {"cpu": 5056, "cuda": 16}  # what ``get_state`` of a generator returns, on the CPU


@fx.has_side_effect  # it must stay where it is, before what draws
def random_state(device: torch.device) -> torch.Tensor:
    """What the next random numbers of a device depend on."""
    return _generator(device).get_state()


def redraw(
    state: torch.Tensor, device: torch.device, operator: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """What an operator returned when it drew from a state."""
    generator = _generator(device)
    # NumPy's memory is none of the allocator's, and so no part of the step's peak.
    before = generator.get_state().numpy().copy()
    generator.set_state(state)
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_state(torch.from_numpy(before))


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def can_keep_state(node: fx.Node) -> bool:
    """Whether a node that draws does so from the generator of a device whose state can be kept."""
    drawn = _drawn(node)
    return drawn is not None and drawn.device.type in _STATE_BYTES and node.kwargs.get("generator") is None


def add_state(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A new node at the end of a graph: the state that a node, of another graph, will draw from."""
    drawn = _drawn(node)
    assert drawn is not None, "it returns no tensor"
    state = graph.call_function(random_state, (drawn.device,))
    size = (_STATE_BYTES[drawn.device.type],)
    state.meta["val"] = drawn.new_empty(size, dtype=torch.uint8, device="cpu")  # fake, if that is
    for key in ("stack_trace", "nn_module_stack"):
        state.meta[key] = node.meta.get(key)
    return state


def _drawn(node: fx.Node) -> torch.Tensor | None:
    """The first tensor that a node returns."""
    value = node.meta.get("val")
    found = value if isinstance(value, (list, tuple)) else [value]
    return next((each for each in found if isinstance(each, torch.Tensor)), None)


def state_of(node: fx.Node) -> fx.Node | None:
    """The node of the state that a node draws from; None if it is not kept."""
    name = node.meta.get(STATE)
    if name is None:
        return None
    states: Iterable[fx.Node] = node.graph.find_nodes(op="call_function", target=random_state)
    return next(each for each in states if each.name == name)
