"""Joint graphs of any size, drawn operator by operator: tracing 100,000 nodes takes minutes, this seconds.

A ``Tape`` writes a network's forward as an fx graph of aten's operators on fake tensors of the CPU. Behind it
stands the backward as autograd runs it: from the last operator to the first, gradients of a value added as
they come. ``KINDS`` are the networks.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import fxremat

aten = torch.ops.aten
Backward = Callable[[fx.Node], None]  # given an operator's gradient, gives those of its operands

ROWS, WIDTH = 256, 32  # of sequences
SIZE = 8  # of images, and their channels


class Tape:
    """A joint graph under construction."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.parameters: list[fx.Node] = []
        self.inputs = 0
        self.first: fx.Node | None = None  # of the operators
        self.backwards: list[tuple[fx.Node, Backward]] = []
        self.gradients: dict[fx.Node, fx.Node] = {}
        self.known: dict[Any, Any] = {}

    def input(self, *shape: int, name: str = "primals") -> fx.Node:
        """A placeholder, in front of everything else."""
        self.inputs += 1
        with self.graph.inserting_before(self.first or self.graph._root), self.mode:
            node = self.graph.placeholder(f"{name}_{self.inputs}")
            node.meta["val"] = torch.empty(shape)
        return node

    def parameter(self, *shape: int) -> fx.Node:
        """A placeholder whose gradient is returned."""
        self.parameters.append(self.input(*shape))
        return self.parameters[-1]

    def call(self, target: Any, *args: Any) -> fx.Node:
        """An operator, without a gradient."""
        node = self.graph.call_function(target, args)
        self.first = self.first or node
        key = (target, repr(fx.node.map_arg(args, _text)))
        with self.mode:
            if key not in self.known:
                self.known[key] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
            made = self.known[key]
            node.meta["val"] = tuple(map(_another, made)) if isinstance(made, tuple) else _another(made)
        return node

    def pick(self, node: fx.Node, *indices: int) -> list[fx.Node]:
        """Some of an operator's results."""
        found = [self.graph.call_function(operator.getitem, (node, index)) for index in indices]
        for each, index in zip(found, indices, strict=True):
            each.meta["val"] = node.meta["val"][index]
        return found

    def then(self, node: fx.Node, backward: Backward) -> fx.Node:
        """Remember how an operator's gradient goes on."""
        self.backwards.append((node, backward))
        return node

    def give(self, nodes: Sequence[fx.Node], gradients: Sequence[fx.Node]) -> None:
        """Add to the gradients of values."""
        for node, gradient in zip(nodes, gradients, strict=True):
            before = self.gradients.get(node)
            whole = gradient if before is None else self.call(aten.add.Tensor, before, gradient)
            self.gradients[node] = whole

    def joint(self, output: fx.Node, name: str) -> fxremat.JointGraph:
        """The joint graph that returns a value and the parameters' gradients."""
        self.gradients[output] = self.input(*output.meta["val"].shape, name="tangents")
        for node, backward in reversed(self.backwards):
            backward(self.gradients[node])
        gradients = [self.gradients[each] for each in self.parameters]
        self.graph.output((output, *gradients))
        return fxremat.JointGraph.from_fx(fx.GraphModule(nn.Module(), self.graph), 1, name=name)

    # -- operators with gradients

    def add(self, x: fx.Node, y: fx.Node) -> fx.Node:
        """The sum."""
        return self.then(self.call(aten.add.Tensor, x, y), lambda g: self.give((x, y), (g, g)))

    def product(self, x: fx.Node, y: fx.Node) -> fx.Node:
        """The product of matrices."""

        def backward(gradient: fx.Node) -> None:
            turned = [self.call(aten.t.default, each) for each in (y, x)]
            self.give((x,), (self.call(aten.mm.default, gradient, turned[0]),))
            self.give((y,), (self.call(aten.mm.default, turned[1], gradient),))

        return self.then(self.call(aten.mm.default, x, y), backward)

    def turned(self, x: fx.Node) -> fx.Node:
        """The transpose, a view."""
        return self.then(
            self.call(aten.t.default, x), lambda g: self.give((x,), (self.call(aten.t.default, g),))
        )

    def softmax(self, x: fx.Node) -> fx.Node:
        """Each row as weights."""

        def backward(gradient: fx.Node) -> None:
            self.give((x,), (self.call(aten._softmax_backward_data.default, gradient, y, -1, torch.float32),))

        y = self.then(self.call(aten._softmax.default, x, -1, False), backward)
        return y

    def function(self, target: Any, slope: Any, x: fx.Node, *others: Any, of_result: bool = False) -> fx.Node:
        """A function of each element; ``slope`` takes the gradient and the operand, or the result."""

        def backward(gradient: fx.Node) -> None:
            self.give((x,), (self.call(slope, gradient, y if of_result else x, *others),))

        y = self.then(self.call(target, x), backward)
        return y

    def gelu(self, x: fx.Node) -> fx.Node:
        """GELU, whose gradient reads its operand."""
        return self.function(aten.gelu.default, aten.gelu_backward.default, x)

    def relu(self, x: fx.Node) -> fx.Node:
        """ReLU, whose gradient reads its result."""
        return self.function(aten.relu.default, aten.threshold_backward.default, x, 0, of_result=True)

    def tanh(self, x: fx.Node) -> fx.Node:
        """The hyperbolic tangent, whose gradient reads its result."""
        return self.function(aten.tanh.default, aten.tanh_backward.default, x, of_result=True)

    def layer_norm(self, x: fx.Node) -> fx.Node:
        """A normalisation of each row."""
        weight, bias, shape = self.parameter(WIDTH), self.parameter(WIDTH), [WIDTH]
        y, mean, scale = self.pick(
            self.call(aten.native_layer_norm.default, x, shape, weight, bias, 1e-5), 0, 1, 2
        )

        def backward(gradient: fx.Node) -> None:
            operands = (gradient, x, shape, mean, scale, weight, bias, [True] * 3)
            made = self.call(aten.native_layer_norm_backward.default, *operands)
            self.give((x, weight, bias), self.pick(made, 0, 1, 2))

        return self.then(y, backward)

    def batch_norm(self, x: fx.Node) -> fx.Node:
        """A normalisation of each channel."""
        weight, bias = self.parameter(SIZE), self.parameter(SIZE)
        made = self.call(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
        y, mean, scale = self.pick(made, 0, 1, 2)

        def backward(gradient: fx.Node) -> None:
            operands = (gradient, x, weight, None, None, mean, scale, True, 1e-5, [True] * 3)
            self.give(
                (x, weight, bias),
                self.pick(self.call(aten.native_batch_norm_backward.default, *operands), 0, 1, 2),
            )

        return self.then(y, backward)

    def convolution(self, x: fx.Node) -> fx.Node:
        """A convolution of 3 x 3 that keeps the size."""
        weight = self.parameter(SIZE, SIZE, 3, 3)
        options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

        def backward(gradient: fx.Node) -> None:
            operands = (gradient, x, weight, None, *options, [True, True, False])
            self.give((x, weight), self.pick(self.call(aten.convolution_backward.default, *operands), 0, 1))

        return self.then(self.call(aten.convolution.default, x, weight, None, *options), backward)


def _text(node: fx.Node) -> str:
    """The layout of a value."""
    value = node.meta["val"]
    return f"{tuple(value.shape)}{tuple(value.stride())}"


def _another(value: Tensor | None) -> Tensor | None:
    """A tensor of its own with the same layout."""
    return None if value is None else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


# --- Networks -------------------------------------------------------------------------------------------


def transformer(blocks: int) -> fxremat.JointGraph:
    """Residual blocks of attention with one head and of two linear layers, each behind a normalisation."""
    tape = Tape()
    x = tape.input(ROWS, WIDTH)
    for _ in range(blocks):
        y = tape.layer_norm(x)
        query, key, value = (tape.product(y, tape.parameter(WIDTH, WIDTH)) for _ in range(3))
        weights = tape.softmax(tape.product(query, tape.turned(key)))
        x = tape.add(x, tape.product(tape.product(weights, value), tape.parameter(WIDTH, WIDTH)))
        wide = tape.gelu(tape.product(tape.layer_norm(x), tape.parameter(WIDTH, 4 * WIDTH)))
        x = tape.add(x, tape.product(wide, tape.parameter(4 * WIDTH, WIDTH)))
    return tape.joint(x, "transformer")


def resnet(blocks: int) -> fxremat.JointGraph:
    """Residual blocks of two normalisations, ReLUs and convolutions."""
    tape = Tape()
    x = tape.input(2, SIZE, SIZE, SIZE)
    for _ in range(blocks):
        y = x
        for _ in range(2):
            y = tape.convolution(tape.relu(tape.batch_norm(y)))
        x = tape.add(x, y)
    return tape.joint(x, "resnet")


def irregular(steps: int) -> fxremat.JointGraph:
    """Small operators on the value before, each added to one a random way back: no two parts are alike."""
    tape, draw = Tape(), random.Random(0)
    values = [tape.add(tape.input(ROWS, WIDTH), tape.parameter(ROWS, WIDTH))]
    functions = (tape.gelu, tape.relu, tape.tanh, tape.softmax)
    for _ in range(steps):
        way = min(len(values), 1 + int(draw.expovariate(1 / 8)))
        x = draw.choice(functions)(values[-1])
        if draw.random() < 0.1:
            x = tape.product(x, tape.parameter(WIDTH, WIDTH))
        values.append(tape.add(x, values[-way]))
    return tape.joint(values[-1], "irregular")


KINDS: dict[str, tuple[Callable[[int], fxremat.JointGraph], int]] = {  # with the nodes of one more unit
    "transformer": (transformer, 72),
    "resnet": (resnet, 34),
    "irregular": (irregular, 5),
}


def drawn(kind: str, nodes: int) -> fxremat.JointGraph:
    """The joint graph of a kind of network, with about so many nodes."""
    build, each = KINDS[kind]
    return build(max(1, round(nodes / each)))
