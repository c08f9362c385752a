"""mincut: the cut that networkx finds, on random networks and on those of PyTorch's partitioner."""

from __future__ import annotations

import math
from typing import Any

import models
import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._functorch import partitioners as torch_partitioners

import fxremat
from fxremat._torch import partitioners
from fxremat._torch.mincut import minimum_cut

CAPACITIES = st.sampled_from([0, 1, 2, 3, 5, 8.0, 2**40, math.inf])


@st.composite
def drawn_networks(draw: st.DrawFn) -> networkx.DiGraph:
    """Networks of up to nine nodes, 0 being the source and the last one the sink."""
    size = draw(st.integers(2, 9))
    ends = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    network = networkx.DiGraph()
    network.add_nodes_from(range(size))
    for (tail, head), capacity in draw(st.dictionaries(ends, CAPACITIES, max_size=25)).items():
        network.add_edge(tail, head, capacity=capacity)
    return network


def test_what_is_not_in_the_network_has_no_edges() -> None:
    """Nothing leads to a backward that reads nothing: the cut is empty."""
    network = networkx.DiGraph()
    network.add_edge("source", "x", capacity=1)
    assert minimum_cut(network, "source", "sink") == (0, ({"source", "x"}, {"sink"}))


@given(drawn_networks())
def test_the_cut_is_that_of_networkx(network: networkx.DiGraph) -> None:
    """Its capacity and both of its sides, also where several cuts are least; or neither finds any."""
    sink = len(network) - 1
    try:
        expected = networkx.minimum_cut(network, 0, sink)
    except networkx.NetworkXUnbounded:
        with pytest.raises(networkx.NetworkXUnbounded):
            minimum_cut(network, 0, sink)
        return
    assert minimum_cut(network, 0, sink) == expected


@pytest.mark.parametrize("name", models.NAMES)
def test_pytorch_saves_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our cut and with the one that this version of PyTorch takes."""
    module, inputs = models.fresh(models.case(name))
    graph = fxremat.capture(module, *inputs, compiler="inductor")
    found = partitioners.min_cut_saved(graph.module, len(graph.forward_outputs), ())
    cuts = []
    theirs = getattr(torch_partitioners, "minimum_cut", networkx.minimum_cut)
    monkeypatch.setattr(partitioners, "minimum_cut", lambda *args: cuts.append(args) or theirs(*args))
    assert partitioners.min_cut_saved(graph.module, len(graph.forward_outputs), ()) == found
    assert len(cuts) == 1


def test_nobody_else_gets_our_cut() -> None:
    """Neither torch nor networkx is changed, not even while PyTorch chooses."""
    asked, chosen = networkx.minimum_cut, vars(torch_partitioners).copy()
    seen = []

    def cut(*network: Any) -> Any:
        seen.append(networkx.minimum_cut is asked and vars(torch_partitioners) == chosen)
        return minimum_cut(*network)

    graph = fxremat.capture(torch.nn.Linear(2, 2), torch.randn(3, 2), loss=torch.sum)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioners, "minimum_cut", cut)
        partitioners.min_cut_saved(graph.module, 1, ())
    assert seen == [True]


def test_a_deep_network_is_no_deep_recursion() -> None:
    """Paths are as long as they like."""
    network = networkx.path_graph(50_000, create_using=networkx.DiGraph)
    networkx.set_edge_attributes(network, 3, "capacity")
    assert minimum_cut(network, 0, 49_999)[0] == 3
