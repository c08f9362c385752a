"""Capture: from a model and example inputs to its JointGraph, without running or holding anything.

With fake tensors (``torch._subclasses``) a model of any size is captured without its memory. On the meta
device this works too, but some operators have no derivative there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxremat import given
from fxremat._torch import compilers, exports, partitioners
from fxremat.errors import CaptureError, FxrematError, InvalidOptionError, shown, told
from fxremat.graph.joint import JointGraph
from fxremat.graph.simplify import simplify
from fxremat.options.options import COMPILERS


class _WithLoss(nn.Module):
    """A model followed by a loss, as one module."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss(self.model(*args, **kwargs))


def capture(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    compiler: str = "eager",
    ignore_checkpoints: bool = False,
    **kwargs: Any,
) -> JointGraph:
    """The joint graph of one training step of a model.

    Args:
        model: The module to train; its parameters may be fake or on the meta device.
        *args: What it is called with; tensors may be fake.
        loss: Makes a scalar of what the model returns; left out where the model returns its loss.
        compiler: ``"eager"``: the operators as PyTorch runs them; ``"inductor"``: decomposed, and after
            Inductor's joint passes, as Inductor's partitioner sees them.
        ignore_checkpoints: As the backend's option: nothing of what ``torch.utils.checkpoint`` says in the
            model is in the graph.
        **kwargs: What it is called with by name.

    Returns:
        A graph whose forward outputs are the model's and whose backward outputs are the gradients of all
        parameters and inputs that require one.

    Raises:
        CaptureError: The model is no module, or cannot be traced; its error or the tracer's is chained.
        InvalidOptionError: There is no such compiler, the loss cannot be called, or ``ignore_checkpoints`` is
            neither True nor False.

    Example:
        >>> g = capture(nn.Linear(4, 2), torch.randn(3, 4), loss=torch.sum)
        >>> [node.name for node in g.nodes if node.phase.value == "forward"]
        ['t', 'addmm', 'sum_1']
    """
    decompose = given.choice("compiler", compiler, COMPILERS) == "inductor"
    is_bare = given.flag("ignore_checkpoints", ignore_checkpoints)
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{shown(model)} is no nn.Module. Call a function from the forward of one.")
    if not (loss is None or callable(loss)):
        raise InvalidOptionError.bad_value("loss", loss, ("None", "a function of what the model returns"))
    traced = model if loss is None else _WithLoss(model, loss)
    name = type(model).__name__
    with contextlib.ExitStack() as stack:
        try:
            module, num_forward_outputs = stack.enter_context(
                exports.export_joint(traced, args, kwargs, decompose, model)
            )
            if decompose:
                module = compilers.inductor_joint_passes(module)
        except FxrematError:
            raise
        except Exception as error:  # the model runs in there, and may raise anything
            raise CaptureError(
                f"{name} could not be traced into a joint graph: {told(error)}. If it runs by itself, try "
                f"torch.compile(model, backend='fxremat'), which splits a model where tracing stops."
            ) from error
        if is_bare:
            module = partitioners.without_checkpoints(module)
        simplify(module, fuses=decompose)
        graph = JointGraph.from_fx(module, num_forward_outputs, name=name, redraws=not decompose)
        _check_gradients(model, graph)
        return graph


def _check_gradients(model: nn.Module, graph: JointGraph) -> None:
    """Raise CaptureError where the meta device has swallowed the backward.

    Some operators have no derivative there, such as the loss of ``cross_entropy``: torch warns, and goes on
    without gradients.
    """
    is_trained = any(each.requires_grad and each.is_meta for each in model.parameters())
    if is_trained and all(output is None for output in graph.backward_outputs):
        raise CaptureError(
            f"{type(model).__name__} has parameters on the meta device, where some operators have no "
            f"derivative, and no gradient reaches them. Build it under torch's FakeTensorMode instead."
        )
