"""How long does planning take? CPU seconds of plans for graphs of many kinds, beside PyTorch's partitioner.

    OMP_NUM_THREADS=1 python bench/planning.py --nodes 6000 12000 --json planning.json

Each row is the joint graph of one kind of network, small in bytes and so deep that it has about so many
nodes, under one memory model. Its columns are what ``fxremat.plan`` takes without a budget, for half of the
peak and for the least peak, bounds included, and what PyTorch's partitioner takes for the same graph at
``activation_memory_budget=0.5``. Seconds are the processor's, which other processes disturb less than the
clock. The ratio is that of the slowest plan to PyTorch's. A plan that does not exist counts like one that
does: it was looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import attention
import networks
import torch
from functorch.compile import min_cut_rematerialization_partition
from networks import Built, Residual, Scored
from provenance import provenance
from tabulate import tabulate
from torch import Tensor, nn

import fxremat
from fxremat.options.options import Budget

BUDGETS: tuple[Budget, ...] = (None, 0.5, "min")
COMPILERS = {"inductor": "inductor", "inplace": "eager"}  # for whose graphs a memory model is made


class Experts(nn.Module):
    """A mixture of experts: each token's sum of all of them, weighted by a gate."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum."""
        weights = self.gate(x).softmax(-1).unbind(-1)
        parts = [weight[:, None] * each(x) for weight, each in zip(weights, self.experts, strict=True)]
        return torch.stack(parts).sum(0)


def experts(blocks: int) -> Built:
    """Residual mixtures of eight experts."""
    layers = [Residual(nn.LayerNorm(32), Experts(32, 8)) for _ in range(blocks)]
    return Scored(nn.Sequential(*layers)), (torch.randn(64, 32),)


class Mixed(nn.Module):
    """Many small operators, no two steps alike: each reads two of the latest values."""

    FUNCTIONS = (torch.sin, torch.tanh, torch.exp, torch.sigmoid, torch.abs, torch.relu, torch.cos)

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        """A value that depends on all steps."""
        values = [x * self.scale]
        for step in range(self.steps):
            other = values[-1 - (step * step + 3 * step) % min(len(values), 23)]
            value = self.FUNCTIONS[step % 7](values[-1]) * 0.5 + other
            values.append(value.softmax(-1) if step % 11 == 5 else value)
        return values[-1]


def mixed(steps: int) -> Built:
    """Small operators in an irregular graph."""
    return Scored(Mixed(steps)), (torch.randn(64, 32),)


def unets(count: int) -> Built:
    """U-Nets of four levels, one behind the other."""
    chain = [networks.UNet(8 if each else 3, 8, 4) for each in range(count)]
    return Scored(nn.Sequential(*chain)), (torch.randn(2, 3, 32, 32),)


KINDS: dict[str, tuple[Callable[[int], Built], int]] = {  # with the nodes that one more unit of depth adds
    "chain": (lambda layers: networks.tanh_mlp(layers, 32, 64), 14),
    "transformer": (lambda blocks: attention.transformer(blocks, 32, 2, 2, 32), 149),
    "llama": (lambda blocks: attention.llama(blocks, 32, 2, 2, 32), 190),
    "lstm": (lambda steps: networks.lstm(4, steps, 16, 8), 205),
    "resnet": (lambda blocks: networks.resnet(blocks, 8, 4, 16), 384),
    "densenet": (lambda layers: networks.densenet(layers, 4, 2, 8), 134),
    "unet": (unets, 546),
    "experts": (experts, 396),
    "mixed": (mixed, 8),
}


def cpu_seconds(function: Callable[[], object]) -> float:
    """What a call takes of the processor."""
    start = time.process_time()
    function()
    return time.process_time() - start


def capture(kind: str, nodes: int, fusion: str) -> fxremat.JointGraph:
    """The joint graph of a kind of network, with about so many nodes."""
    build, each = KINDS[kind]
    torch.manual_seed(0)
    module, inputs = build(max(1, round(nodes / each)))
    return fxremat.capture(module, *inputs, compiler=COMPILERS[fusion])


def pytorch_seconds(graph: fxremat.JointGraph) -> float:
    """What PyTorch's partitioner takes for half of the memory."""
    module, outputs = copy.deepcopy(graph.module), len(graph.forward_outputs)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        return cpu_seconds(lambda: min_cut_rematerialization_partition(module, (), num_fwd_outputs=outputs))


def plan_seconds(graph: fxremat.JointGraph, budget: Budget, fusion: str) -> float:
    """What a plan takes, or finding out that there is none."""

    def plan() -> None:
        with contextlib.suppress(fxremat.InfeasibleBudgetError):
            fxremat.plan(graph, budget=budget, fusion=fusion)

    return cpu_seconds(plan)


def row_of(kind: str, nodes: int, fusion: str) -> dict[str, Any]:
    """The seconds of one graph."""
    graph = capture(kind, nodes, fusion)
    seconds = {str(budget): plan_seconds(graph, budget, fusion) for budget in BUDGETS}
    return {
        "kind": kind,
        "fusion": fusion,
        "nodes": len(graph.nodes),
        "seconds": seconds,
        "pytorch_seconds": pytorch_seconds(graph),
    }


def shown(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    seconds, unit = row["seconds"].values(), row["pytorch_seconds"]
    figures = (f"{each:.1f}" for each in (*seconds, unit))
    return row["kind"], row["fusion"], f"{row['nodes']:,}", *figures, f"{max(seconds) / unit:.2f}"


def main() -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--nodes", nargs="+", type=int, default=[1_500, 6_000, 12_000])
    parser.add_argument("--fusion", nargs="+", choices=tuple(COMPILERS), default=tuple(COMPILERS))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    header, rows = provenance(__file__), list[dict[str, Any]]()
    for case in itertools.product(arguments.kinds, arguments.nodes, arguments.fusion):
        rows.append(row_of(*case))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", "utf-8")
    headers = ("network", "memory model", "nodes", *map(str, BUDGETS), "PyTorch", "ratio")
    print(tabulate(map(shown, rows), headers, disable_numparse=True))


if __name__ == "__main__":
    main()
