"""Random programs: small networks of operators that read the latest values, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat

ROWS, COLUMNS = 4, 6


def _gate(a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, dim=-1)
    return torch.cat([left * right.sigmoid(), b[:, : COLUMNS // 2]], dim=-1)


def _cell(a: Tensor, b: Tensor) -> Tensor:
    left, right = (a + b).unsafe_chunk(2, dim=-1)
    return torch.stack([left.sigmoid(), right.tanh()], dim=-1).flatten(-2)


# What a step of a random model computes of two earlier values; all have the same shape and are contiguous,
# for the gradient that torch traces of a batch normalisation is right for such inputs alone.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "tanh": lambda a, b: a.tanh(),
    "gelu": lambda a, b: functional.gelu(a),
    "softmax": lambda a, b: a.softmax(-1),
    "layer_norm": lambda a, b: functional.layer_norm(a, (COLUMNS,)),
    "dropout": lambda a, b: functional.dropout(a, 0.5),
    "gate": _gate,
    "cell": _cell,
    "transpose": lambda a, b: a @ (b.t() @ a),
    "max": lambda a, b: b * a.max(1, keepdim=True).values,
    "sort": lambda a, b: a.sort(1).values + b,
    "expand": lambda a, b: a + b.mean(0, keepdim=True).expand_as(a),
    "view": lambda a, b: a.flatten().view(COLUMNS, ROWS).t().contiguous() - b,
    "detach": lambda a, b: a.detach().exp() * b,
    "inplace": lambda a, b: a.clone().mul_(2).add_(b),
    "scan": lambda a, b: a.cumsum(0) + b,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(COLUMNS, COLUMNS),
    "batch_norm": lambda: nn.BatchNorm1d(COLUMNS),
}
DETERMINISTIC = tuple(name for name in (*OPERATORS, *LAYERS) if name != "dropout")


class Network(nn.Module):
    """A straight-line program; its loss is the sum of the last value's squares."""

    def __init__(self, program: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self.program = tuple(program)
        self.layers = nn.ModuleDict(
            {str(step): LAYERS[name]() for step, (name, _, _) in enumerate(program) if name in LAYERS}
        )

    def __repr__(self) -> str:
        return f"Network({self.program})"

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step, (name, first, second) in enumerate(self.program):
            a, b = values[first % len(values)], values[second % len(values)]
            layer = str(step)
            values.append(self.layers[layer](a) if layer in self.layers else OPERATORS[name](a, b))
        return (values[-1] * values[-1]).sum()


def batch() -> Tensor:
    """The input of a random model; it takes a gradient."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).requires_grad_()


def traced(network: nn.Module) -> fxremat.JointGraph:
    """The joint graph of a random model."""
    return fxremat.capture(network, batch())
