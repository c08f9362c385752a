"""Training steps of any program, compiled and not, and all that they leave behind, for comparison bit by bit.

A *program* is a module that takes tensors and returns anything. `outcome` runs one training step of it and
names all that can be seen behind: outputs, gradients, buffers, the inputs (programs may write to them) and
the state of the random generator. Two programs do the same if their outcomes agree in every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxremat
from fxremat import Problem, Report


class Program(nn.Module):
    """A function of a 4x4 weight, further modules, a buffer of 4 numbers and the inputs, as a module."""

    def __init__(self, body: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.layers = nn.ModuleList(layers)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("state", torch.randn(4))

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


def program(body: Callable[..., Any], *layers: nn.Module, seed: int = 0) -> Program:
    """The program of a body, with the weights of the seed."""
    torch.manual_seed(seed)
    return Program(body, *layers)


def square(seed: int = 1, requires_grad: bool = False) -> Tensor:
    """A 4x4 input."""
    drawn = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    return drawn.requires_grad_(requires_grad)


def everything(mirrors: int) -> Callable[[Problem], Mapping[str, int]]:
    """A planner that mirrors every node so many times: what can be computed again is."""

    def mirror_everything(problem: Problem) -> Mapping[str, int]:
        return dict.fromkeys(problem.graph.names, mirrors)

    return mirror_everything


def compiled(module: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """What ``torch.compile`` makes of a module without Inductor, so that results are exact."""
    options = {"compiler": "eager", **options}
    return torch.compile(module, backend="fxremat", dynamic=dynamic, options=options)


def outcome(module: nn.Module, inputs: Iterable[Any], seed: int = 0) -> dict[str, Tensor]:
    """What one training step leaves behind, by name. Gradients accumulate onto those that are there.

    The loss weights each number of each output differently, and a random number is drawn between the
    forward and the backward, so that it tells which of the two draws what.
    """
    torch.manual_seed(seed)
    given = [_fresh(each) for each in inputs]
    outputs = _tensors(module(*given))
    left = {f"outputs.{i}": each.detach().clone() for i, each in enumerate(outputs)}
    left["drawn between"] = torch.rand(())
    losses = [_weighted_sum(each) for each in outputs if each.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    leaves = dict(module.named_parameters())
    leaves |= {f"inputs.{i}": each for i, each in enumerate(given) if isinstance(each, Tensor)}
    left |= {
        f"{_plain(name)}.grad": each.grad.clone() for name, each in leaves.items() if each.grad is not None
    }
    left |= {_plain(name): each.detach().clone() for name, each in (*leaves.items(), *module.named_buffers())}
    return {**left, "generator": torch.get_rng_state()}


def assert_same_outcome(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two outcomes agree in every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_trains_alike(
    module: nn.Module, inputs: Iterable[Any], *, steps: int = 2, reference: str = "eager", **options: Any
) -> tuple[Report, ...]:
    """Training steps of a module are the same compiled as in eager; the reports of what was compiled.

    The steps accumulate their gradients. The module itself stays as it is. Where AOTAutograd adds up
    gradients in another order than eager does, the reference is its backend ``"aot_eager"``.
    """
    inputs = tuple(inputs)
    expected: Any = copy.deepcopy(module)
    expected = expected if reference == "eager" else torch.compile(expected, backend=reference)
    count = len(fxremat.reports())
    found = compiled(copy.deepcopy(module), **options)
    for seed in range(steps):
        assert_same_outcome(outcome(found, inputs, seed), outcome(expected, inputs, seed))
    reports = fxremat.reports()[count:]
    assert reports, "nothing was compiled with a backward"
    return reports


def _plain(name: str) -> str:
    """A parameter's name without what torch.compile puts before it."""
    return name.removeprefix("_orig_mod.")


def _fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _tensors(outputs: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(outputs) if isinstance(each, Tensor)]


def _weighted_sum(output: Tensor) -> Tensor:
    parts = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
    weights = torch.linspace(0.5, 1.5, parts.numel()).reshape(parts.shape)
    return (parts.float() * weights).sum()
