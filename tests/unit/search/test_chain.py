"""Reference schedules of chains: Algorithm 1 and revolve, against closed forms and against Algorithm 2."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optima import algorithm_1, forwards

from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand
from fxremat.graph.schedule import validate
from fxremat.predict.models import profile
from fxremat.search.chain import Step, beta, revolve


def plain_chain(layers: int) -> JointGraph:
    """Layer i makes f_i of f_(i-1); its gradient reads f_(i-1)."""
    operands: dict[str, list[str]] = {"x": []}
    operands |= {f"f{i}": [f"f{i - 1}" if i else "x"] for i in range(layers)}
    for i in reversed(range(layers)):
        operands[f"g{i}"] = [f"f{i - 1}" if i else "x", f"g{i + 1}" if i + 1 < layers else f"f{i}"]
    backward = [f"g{i}" for i in reversed(range(layers))]
    sizes = {name: 1 for name in operands if name != "x"}
    return JointGraph.from_mappings(operands, sizes, backward=backward, backward_outputs=["g0"])


def chain_graph(layers: int) -> JointGraph:
    """Layer i makes t_i, which its gradient reads, and x_i, which the next layer reads."""
    operands: dict[str, list[str]] = {"x": []}
    for i in range(layers):
        operands |= {f"t{i}": [f"x{i - 1}" if i else "x"], f"x{i}": [f"t{i}"]}
    for i in reversed(range(layers)):
        operands[f"g{i}"] = [f"t{i}", f"g{i + 1}" if i + 1 < layers else f"x{i}"]
    backward = [f"g{i}" for i in reversed(range(layers))]
    sizes = {name: int(not name.startswith("g")) for name in operands if name != "x"}
    return JointGraph.from_mappings(operands, sizes, backward=backward, backward_outputs=["g0"])


def names(steps: Iterable[Step]) -> list[str]:
    """The nodes of ``chain_graph`` that the steps run."""
    return [name for i, is_gradient in steps for name in ([f"g{i}"] if is_gradient else [f"t{i}", f"x{i}"])]


# --- Algorithm 1 ------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.data())
def test_algorithm_2_on_a_chain_runs_algorithm_1(layers: int, data: st.DataObject) -> None:
    """Exactly, step by step: what segments start from and the last value are kept, the rest runs again."""
    cuts = data.draw(st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set()))
    segments = [0, *sorted(cuts)]
    kept = {first - 1 for first in segments} | {layers - 1}
    counts = {f"f{i}": int(i not in kept) for i in range(layers)}
    steps = algorithm_1(layers, segments)
    expected = [f"{'g' if is_gradient else 'f'}{i}" for i, is_gradient in steps]
    assert list(expand(plain_chain(layers), counts)) == expected


def test_algorithm_1_runs_gradients_once_from_the_last_layer() -> None:
    """And each forward twice, but for the last of each segment."""
    steps = algorithm_1(7, [0, 3, 5])
    assert [step.layer for step in steps if step.is_gradient] == [6, 5, 4, 3, 2, 1, 0]
    forwards_run = Counter(step.layer for step in steps if not step.is_gradient)
    assert forwards_run == {0: 2, 1: 2, 2: 1, 3: 2, 4: 1, 5: 2, 6: 1}


# --- Revolve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "checkpoints", "total"),
    [(10, 2, 30), (10, 3, 25), (16, 3, 49), (20, 3, 65), (32, 4, 107), (100, 5, 416), (1000, 10, 4636)],
)
def test_revolve_runs_as_many_forwards_as_the_closed_form(layers: int, checkpoints: int, total: int) -> None:
    """Counted by executing the schedule on the chain's graph; the totals are those of the literature."""
    graph = chain_graph(layers)
    order = names(revolve(layers, checkpoints))
    validate(graph, order)
    assert sum(name.startswith("t") for name in order) == forwards(layers, checkpoints) == total


@given(st.integers(1, 40), st.integers(1, 6))
def test_revolve_is_optimal(layers: int, checkpoints: int) -> None:
    """Against the recurrence over all first checkpoints."""

    @functools.cache
    def extra(length: int, slots: int) -> int:
        if length == 1:
            return 0
        if slots == 1:
            return length * (length - 1) // 2
        return min(m + extra(length - m, slots - 1) + extra(m, slots) for m in range(1, length))

    assert forwards(layers, checkpoints) == layers + extra(layers, checkpoints)


@given(st.integers(2, 40), st.integers(1, 6))
def test_revolve_holds_no_more_than_its_checkpoints(layers: int, checkpoints: int) -> None:
    """The input is one of them; besides there is the value just computed, and what it was computed from."""
    graph = chain_graph(layers)
    peak = profile(graph, names(revolve(layers, checkpoints))).peak_bytes
    assert peak <= (checkpoints - 1) + 2


def test_the_reach_of_checkpoints_is_binomial() -> None:
    """beta(s, r) = C(s + r, s), and nothing is reached by a negative number of repetitions."""
    assert (beta(3, 2), beta(2, 0), beta(2, -1)) == (10, 1, 0)
