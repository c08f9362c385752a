"""signature: graphs that compute the same are told from those that do not, and how these differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graphs import Sketch, chain, compiled_graphs, few, joint_graphs
from hypothesis import given
from torch import Tensor, nn

import fxremat
from fxremat.graph.joint import JointGraph
from fxremat.graph.signature import Row, Signature, body, device_title, difference, signature

aten = torch.ops.aten


def drawn(
    scale: float = 2.0, size: int = 8, operator: Callable[..., object] = aten.sin.default, extra: bool = False
) -> JointGraph:
    """x -> operator -> mul by a number; the backward multiplies the tangent."""
    sketch = Sketch()
    x, t = sketch.input("primals_1", size), sketch.input("tangents_1", size)
    first = sketch.call("first", operator, x)
    second = sketch.call("second", aten.mul.Tensor, first, scale)
    last = sketch.call("third", aten.cos.default, second) if extra else second
    return sketch.joint([last], [sketch.call("dx", aten.mul.Tensor, t, first)])


def test_a_row_says_what_a_node_computes() -> None:
    """Operator, data type and sizes, and what becomes of it."""
    rows = signature(drawn()).nodes
    assert [(row.name, row.operator, row.value, row.use) for row in rows] == [
        ("first", "aten.sin.default", "float32[8]", ""),
        ("second", "aten.mul.Tensor", "float32[8]", "output"),
        ("dx", "aten.mul.Tensor", "float32[8]", "gradient"),
    ]
    assert signature(drawn()).inputs == ("float32[8]", "tangent float32[8]")


def test_names_do_not_count() -> None:
    """Nor does the order of the inputs."""
    other = Sketch()
    t, y = other.input("tangents_9", 8), other.input("primals_7", 8)
    sine = other.call("a", aten.sin.default, y)
    product = other.call("b", aten.mul.Tensor, sine, 2.0)
    graph = other.joint([product], [other.call("c", aten.mul.Tensor, t, sine)])
    assert difference(signature(drawn()), signature(graph)) is None


@pytest.mark.parametrize(
    ("other", "kind", "node", "text"),
    [
        (
            drawn(operator=aten.cos.default),
            "operator",
            "first",
            "aten.cos.default float32[8], expected aten.sin",
        ),
        (drawn(size=9), "size", "first", "float32[9], expected float32[8]"),
        (drawn(scale=3.0), "arguments", "second", "other arguments"),
        (drawn(extra=True), "use", "second", "expected as output"),
    ],
)
def test_the_first_difference_is_told(other: JointGraph, kind: str, node: str, text: str) -> None:
    """By its kind, its node, and in words."""
    found = difference(signature(drawn()), signature(other))
    assert found is not None
    assert (found.kind, found.node) == (kind, node)
    assert text in found.text


def test_another_data_type_is_told() -> None:
    """Of the same sizes."""
    expected, found = (
        Signature((), (Row("a", "aten.sin.default", f"{kind}[2, 3]", "0" * 12, ""),))
        for kind in ("float32", "bfloat16")
    )
    told = difference(expected, found)
    assert told is not None and told.kind == "dtype" and "bfloat16[2, 3]" in told.text


def test_nodes_that_one_graph_lacks_are_counted() -> None:
    """By operator; the rest being the same, the number is what differs."""
    whole = signature(drawn())
    part = replace(whole, nodes=whole.nodes[:-1])
    told = difference(whole, part)
    assert told is not None and (told.kind, told.nodes) == ("count", 1)
    assert "1 missing (aten.mul.Tensor float32[8])" in told.text


def test_inputs_count() -> None:
    """Even where all nodes are the same."""
    whole = signature(drawn())
    other = replace(whole, inputs=("float64[8]", *whole.inputs[1:]))
    told = difference(whole, other)
    assert told is not None and told.kind == "input" and "float64[8], expected float32[8]" in told.text


@few(20)
@given(joint_graphs(), joint_graphs())
def test_a_graph_without_tensors_has_a_signature(first: JointGraph, second: JointGraph) -> None:
    """Of what its nodes read and how many bytes they take."""
    assert difference(signature(first), signature(first)) is None
    is_same = signature(first).fingerprint == signature(second).fingerprint
    assert is_same == (difference(signature(first), signature(second)) is None)
    assert is_same or first is not second
    assert device_title(first) == ""


class Network(nn.Module):
    """Convolution, statistics that are written back, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.project = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        q, k, v = self.project(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


def test_a_captured_graph_is_the_compiled_one() -> None:
    """Whatever Dynamo calls its inputs, and in which order they come."""
    model, x = Network(), torch.randn(2, 2, 4, 4)
    captured = fxremat.capture(model, x)
    (compiled,) = compiled_graphs(model, x)
    assert difference(signature(captured), signature(compiled)) is None
    assert device_title(captured) == "cpu"


def test_writes_to_inputs_are_no_part_of_the_body() -> None:
    """What writes back to an input is told by what is written."""
    model, x = Network(), torch.randn(2, 2, 4, 4)
    graph = fxremat.capture(model, x)
    written = [row.name for row in signature(graph).nodes if "written" in row.use]
    assert len(written) == 3  # mean, variance, and how many batches there were
    assert len(body(graph)) == len(graph.nodes) - graph.num_inputs - len(written)


def test_a_chain_without_operators() -> None:
    """Longer chains are others."""
    told = difference(signature(chain(3)), signature(chain(4)))
    assert told is not None
    assert told.nodes == 2
