"""How long planning takes, and how it grows with the graph: seconds per node, beside PyTorch's partitioner.

    pytest bench/bench_planning.py --benchmark-json planning.json
    pytest bench/bench_planning.py -m slow      # the largest graph, where PyTorch's partitioner takes minutes

The graphs are joint graphs of transformers of growing depth. Each case is timed once after a first run at
the smallest size: planning is deterministic, and its first run imports what it needs.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import attention
from functorch.compile import min_cut_rematerialization_partition
from pytest_benchmark.fixture import BenchmarkFixture

import fxremat

BLOCKS = {"1,400 nodes": 10, "5,600 nodes": 42, "11,000 nodes": 84, "44,000 nodes": 336}
SIZES = ["1,400 nodes", "5,600 nodes", "11,000 nodes", pytest.param("44,000 nodes", marks=pytest.mark.slow)]


@functools.cache
def joint_graph(blocks: int, compiler: str) -> fxremat.JointGraph:
    """The joint graph of a transformer, small in bytes and as deep as asked for."""
    torch.manual_seed(0)
    module, inputs = attention.transformer(blocks=blocks, width=32, heads=2, batch=2, time=32)
    return fxremat.capture(module, *inputs, compiler=compiler)


def record(benchmark: BenchmarkFixture, nodes: int) -> None:
    """Put the seconds per node beside the benchmark's own figures."""
    benchmark.extra_info["nodes"] = nodes
    benchmark.extra_info["microseconds_per_node"] = benchmark.stats.stats.min / nodes * 1e6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fusion", ["none", "inductor"])
@pytest.mark.parametrize("planner", ["sublinear", "auto"])
def test_planning(benchmark: BenchmarkFixture, planner: str, fusion: str, size: str) -> None:
    """A plan for the least peak."""
    graph = joint_graph(BLOCKS[size], "eager" if fusion == "none" else "inductor")
    plan = functools.partial(fxremat.plan, budget="min", planner=planner, fusion=fusion)
    solution = benchmark.pedantic(plan, (graph,), rounds=1, iterations=1)
    assert solution.peak_bytes < fxremat.profile(graph, graph.names, fusion).peak_bytes
    record(benchmark, len(graph.nodes))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_pytorch(benchmark: BenchmarkFixture, budget: float, size: str) -> None:
    """PyTorch's own partitioner on the same graph."""
    graph = joint_graph(BLOCKS[size], "inductor")
    assert graph.module is not None
    module = copy.deepcopy(graph.module)

    def partition() -> object:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return min_cut_rematerialization_partition(module, (), num_fwd_outputs=len(graph.forward_outputs))

    benchmark.pedantic(partition, rounds=1, iterations=1)
    record(benchmark, len(graph.nodes))
