"""Training on a device: what the tests that run on a CPU, small, and on a GPU, large, have in common.

On a CPU results are compared bit for bit. On a GPU kernels may add up in another order from run to run, so
each tensor is compared within a part of its largest element.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import models
import torch
from torch import Tensor, nn

import fxremat
from fxremat.measure import measure_peak

__all__ = ["SCALES", "assert_close", "built", "compiled", "measured", "report_of", "threads", "training_step"]

SCALES = {"cpu": "small", "cuda": "full"}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch run that many threads on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def built(name: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network of the zoo and its inputs on the device; the generators stand at the same seed each time."""
    module, inputs = models.fresh(models.case(name, SCALES[device]))
    module = module.to(device)
    moved = (each.detach().to(device).requires_grad_(each.requires_grad) for each in inputs)
    return module, tuple(moved)


def compiled(module: nn.Module, **options: Any) -> Any:
    """What fxremat makes of a module."""
    return torch.compile(module, backend="fxremat", options=options)


def training_step(subject: Any, inputs: tuple[Tensor, ...], seed: int = 1) -> dict[str, Tensor]:
    """Copies of the loss and the gradients of a step that starts without gradients."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Inductor's own
        loss, gradients = models.train_step(subject, inputs)
    return {"loss": loss.clone(), **{name: each.clone() for name, each in gradients.items()}}


def measured(
    module: nn.Module, subject: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: str
) -> int:
    """The measured peak of a step of what is compiled and has run before."""
    module.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: models.train_step(subject, inputs), device=device).peak_bytes
    module.zero_grad(set_to_none=True)
    return peak


def report_of(action: Callable[[], object]) -> fxremat.Report:
    """The report of the one graph that an action compiles."""
    count = len(fxremat.reports())
    action()
    (report,) = fxremat.reports()[count:]
    return report


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], part: float) -> None:
    """Each tensor differs by at most so large a part of its largest element; by nothing if that is 0."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        difference = (found[name] - tensor).abs().max().item()
        assert difference <= part * scale, f"{name}: {difference} of {scale}"
