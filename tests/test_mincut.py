"""mincut: the cut that networkx finds, on random networks and on those of PyTorch's partitioner."""

from __future__ import annotations

import math

import models
import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat._torch import graphs
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
    found = graphs.min_cut_saved(graph.module, len(graph.forward_outputs), ())
    asked = networkx.minimum_cut
    if hasattr(graphs.partitioners, "minimum_cut"):
        monkeypatch.setattr(graphs.partitioners, "minimum_cut", minimum_cut)
    else:
        monkeypatch.setattr(graphs, "minimum_cut", asked)
    assert graphs.min_cut_saved(graph.module, len(graph.forward_outputs), ()) == found
    assert networkx.minimum_cut is asked


def test_a_deep_network_is_no_deep_recursion() -> None:
    """Paths are as long as they like."""
    network = networkx.path_graph(50_000, create_using=networkx.DiGraph)
    networkx.set_edge_attributes(network, 3, "capacity")
    assert minimum_cut(network, 0, 49_999)[0] == 3


def test_networkx_is_left_as_it_was_when_the_partitioner_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on the way does not leave our cut in place of networkx's."""
    asked = networkx.minimum_cut

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    graph = fxremat.capture(torch.nn.Linear(2, 2), torch.randn(3, 2), loss=torch.sum)
    monkeypatch.setattr(graphs.partitioners, "choose_saved_values_set", fail)
    with pytest.raises(RuntimeError):
        graphs.min_cut_saved(graph.module, 1, ())
    assert networkx.minimum_cut is asked
