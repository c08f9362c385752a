"""Joint graphs drawn at random, of operators that run: such as autograd makes, and such as it never does.

A *drawn* graph has a few inputs, a forward, tangents of those of its outputs that are floating, and a
backward that reads any of these values. Operators are those of ATen without side effects: pointwise,
copies, views, operators with several outputs, reductions, products, random numbers; the values are of
several types, some complex, empty, of no dimension, or not contiguous. Outputs may be inputs, stand twice,
and be views of each other; a gradient may be none, a forward value, an output or a tangent.

Left out: random numbers that the backward draws for no tangent's sake, which PyTorch draws in the forward;
backwards that compute nothing; operators of mixed types of which PyTorch traces another type than they make;
and dropout of what is empty, which returns its operand.

The same random numbers give the same graph.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

__all__ = ["Drawn", "draw_joint"]

aten = torch.ops.aten
MOST_NUMBERS = 1 << 13  # of a value
_NOTHING = object()

# A target, and what stands in the places of its arguments: a kind of values, or what is taken as it is.
# "f" is any floating value, "s" one of the shape of the first, "m" one of two dimensions, "v" any value.
Template = tuple[Any, tuple[Any, ...]]
POINTWISE: tuple[Template, ...] = (
    *(
        (each, ("f",))
        for each in (aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.sin.default)
    ),
    *((each, ("f",)) for each in (aten.neg.default, aten.abs.default, aten.sgn.default, aten.gelu.default)),
    *(
        (each, ("f", "s"))
        for each in (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default)
    ),
    (aten.mul.Tensor, ("f", "f")),
    (aten.add.Tensor, ("f", "f")),
    (aten.mul.Tensor, ("f", 0.5)),
    (aten.gt.Scalar, ("f", 0)),
    (aten.where.self, ("b", "f", "f")),
    (aten.mul.Tensor, ("f", "b")),
    (aten.logical_not.default, ("b",)),
    (aten.threshold_backward.default, ("f", "s", 0)),
    (aten.tanh_backward.default, ("f", "s")),
    (aten.sigmoid_backward.default, ("f", "s")),
    (aten._to_copy.default, ("f", {"dtype": torch.float64})),
    (aten._to_copy.default, ("f", {"dtype": torch.bfloat16})),
    (aten._to_copy.default, ("f", {"dtype": torch.float32})),
    (aten._to_copy.default, ("b", {"dtype": torch.int64})),
    (aten.complex.default, ("f", "s")),
    (aten.mul.Tensor, ("c", "c")),
    (aten.abs.default, ("c",)),
)
VIEWS: tuple[Template, ...] = (
    (aten.permute.default, ("m", [1, 0])),
    (aten.t.default, ("m",)),
    (aten.slice.Tensor, ("v", 0, 1, 3)),
    (aten.slice.Tensor, ("v", -1, 0, 9, 2)),
    (aten.slice.Tensor, ("v", 0, 0, 0)),
    (aten.select.int, ("v", 0, 1)),
    (aten.unsqueeze.default, ("v", 0)),
    (aten.squeeze.dim, ("v", 0)),
    (aten.expand.default, ("f", [2, -1, -1])),
    (aten.view.default, ("v", [-1])),
    (aten.view.default, ("v", [6, -1])),
    (aten.view.default, ("v", [-1, 6])),
    (aten.alias.default, ("v",)),
    (aten.detach.default, ("f",)),
    (aten.as_strided.default, ("f", [2, 3], [1, 2])),
    (aten.view_as_real.default, ("c",)),
    (aten.diagonal.default, ("m",)),
)
COPIES: tuple[Template, ...] = (
    (aten.clone.default, ("v",)),
    (aten.clone.default, ("v", {"memory_format": torch.contiguous_format})),
    (aten.cat.default, (["f", "s"],)),
    (aten.cat.default, (["m", "m"], 1)),
    (aten.stack.default, (["f", "s"], -1)),
    (aten.index_select.default, ("m", 0, "i")),
    (aten.embedding.default, ("m", "i")),
    (aten.select_backward.default, ("f", [5, 6], 0, 2)),
    (aten.slice_backward.default, ("f", [9, 6], 0, 0, 3, 1)),
    (aten.constant_pad_nd.default, ("f", [1, 1], 0.5)),
    (aten.zeros_like.default, ("f",)),
    (aten.full.default, ([6], 0.5)),
    (aten.repeat.default, ("f", [2, 1, 1])),
)
SEVERAL: tuple[Template, ...] = (
    (aten.split.Tensor, ("f", 2, -1)),
    (aten.split_with_sizes.default, ("m", [2, 4], 1)),
    (aten.unbind.int, ("f", 0)),
    (aten.topk.default, ("m", 2)),
    (aten.max.dim, ("f", -1)),
    (aten.sort.default, ("f",)),
    (aten.var_mean.correction, ("f", [-1])),
    (aten.aminmax.default, ("f",)),
    (aten.native_layer_norm.default, ("m", [6], None, None, 1e-5)),
    (aten._log_softmax.default, ("f", -1, False)),
    (aten.frexp.Tensor, ("f",)),
    (aten.cummax.default, ("f", -1)),
)
SUMS: tuple[Template, ...] = (
    (aten.sum.default, ("f",)),
    (aten.sum.dim_IntList, ("f", [0])),
    (aten.sum.dim_IntList, ("f", [-1], True)),
    (aten.mean.dim, ("f", [-1])),
    (aten.amax.default, ("f", [-1], True)),
    (aten._softmax.default, ("f", -1, False)),
    (aten._softmax_backward_data.default, ("f", "s", -1, torch.float32)),
    (aten.cumsum.default, ("f", 0)),
    (aten.mm.default, ("m", "m")),
    (aten.addmm.default, ("f", "m", "m")),
    (aten.argmax.default, ("f",)),
)
RANDOM: tuple[Template, ...] = (
    (aten.native_dropout.default, ("f", 0.4, True)),
    (aten.bernoulli.p, ("f", 0.5)),
    (aten.rand_like.default, ("f",)),
)
GROUPS = ((POINTWISE, 9), (VIEWS, 5), (COPIES, 3), (SEVERAL, 3), (SUMS, 4), (RANDOM, 1))

KINDS: dict[str, Callable[[Tensor], bool]] = {
    "f": lambda x: x.is_floating_point(),
    "m": lambda x: x.is_floating_point() and x.dim() == 2,
    "b": lambda x: x.dtype == torch.bool,
    "i": lambda x: x.dtype == torch.int64 and x.dim() == 1,
    "c": lambda x: x.is_complex(),
    "v": lambda x: True,
}
INPUTS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.randn(5, 6),
    lambda: torch.randn(6, 6),
    lambda: torch.randn(6, 40).t(),
    lambda: torch.randn(40, 6),
    lambda: torch.randn(10, 6)[::2],
    lambda: torch.randn(6),
    lambda: torch.randn(()),
    lambda: torch.randn(0, 6),
    lambda: torch.randn(5, 6, dtype=torch.float64),
    lambda: torch.randn(5, 6).bfloat16(),
    lambda: torch.randn(5, 6) > 0,
    lambda: torch.arange(3),
    lambda: torch.randn(5, 6, dtype=torch.complex64),
    lambda: torch.randn(1, 6).expand(5, 6),
)


@dataclass(frozen=True)
class Drawn:
    """A drawn joint graph.

    Attributes:
        module: The graph; its tangents are the last inputs.
        outputs: How many of its outputs are the forward's.
        inputs: A value for each placeholder.
        tangents: How many of them are tangents.
    """

    module: fx.GraphModule
    outputs: int
    inputs: tuple[Tensor, ...]
    tangents: int


class _Drawing:
    """A graph that grows."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.mode, self.graph = chance, FakeTensorMode(), fx.Graph()
        self.values: list[fx.Node] = []
        self.inputs: list[Tensor] = []
        self.known: dict[fx.Node, Any] = {}  # what each node is for these inputs
        self.behind: set[fx.Node] = set()  # what depends on a tangent
        self.depth = chance.choice((0.5, 0.8, 0.95))  # how often the latest value is read

    def take(self, name: str, value: Tensor) -> fx.Node:
        """Add an input."""
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(value)
        self.known[node] = value
        if name.startswith("tangents"):
            self.behind.add(node)
        self.inputs.append(value)
        self.values.append(node)
        return node

    def add(self) -> None:
        """Add an operator of random operands, if it takes them."""
        groups, weights = zip(*GROUPS, strict=True)
        (group,) = self.chance.choices(groups, weights)
        (target, places), is_random = self.chance.choice(group), group is RANDOM
        kwargs = places[-1] if isinstance(places[-1], dict) else {}
        args = [self._filled(each) for each in places if not isinstance(each, dict)]
        if _NOTHING in args or (is_random and not self._may_draw(args[0])):
            return
        self._call(target, args, kwargs)

    def _may_draw(self, operand: fx.Node) -> bool:
        return operand.meta["val"].numel() > 0 and (not self.behind or operand in self.behind)

    def _filled(self, place: Any) -> Any:
        """What stands in the place of an argument; ``_NOTHING`` where there is no such value."""
        if isinstance(place, list) and all(isinstance(each, str) for each in place):
            filled = [self._filled(each) for each in place]
            return _NOTHING if _NOTHING in filled else filled
        if not isinstance(place, str):
            return place
        shape = self.first.meta["val"].shape if place == "s" else None
        fits = KINDS["f" if place == "s" else place]
        found = [
            each for each in self.values if fits(each.meta["val"]) and shape in (None, each.meta["val"].shape)
        ]
        if not found:
            return _NOTHING
        chosen = self.chance.choice(found[-1:] if self.chance.random() < self.depth else found)
        if place != "s":
            self.first = chosen
        return chosen

    def _call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            known = target(*fx.node.map_arg(tuple(args), self.known.__getitem__), **kwargs)
        except Exception:  # of the operator, whatever it is
            return
        with self.mode:
            value = target(*fx.node.map_arg(tuple(args), lambda node: node.meta["val"]), **kwargs)
        made = list(value) if isinstance(value, (tuple, list)) else [value]
        ran = list(known) if isinstance(known, (tuple, list)) else [known]
        if not made or not all(map(_is_as_traced, ran, made)):
            return
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["val"], self.known[node] = value, known
        is_behind = bool(self.behind & set(node.all_input_nodes))
        if is_behind:
            self.behind.add(node)
        if made[0] is value:
            self.values.append(node)
            return
        for place in self.chance.sample(range(len(made)), self.chance.randint(1, len(made))):
            picked = self.graph.call_function(operator.getitem, (node, place))
            picked.meta["val"], self.known[picked] = made[place], known[place]
            if is_behind:
                self.behind.add(picked)
            self.values.append(picked)

    def read_again(self, value: fx.Node) -> None:
        """Add to the backward what reads a value of the forward, as most gradients do."""
        gradient = [each for each in self.values if each in self.behind and KINDS["f"](each.meta["val"])][-1]
        if value.meta["val"].shape != gradient.meta["val"].shape:
            self._call(aten.sum.default, (gradient,), {})
            self._call(aten.mul.Tensor, (value, self.values[-1]), {})
        else:
            target = self.chance.choice((aten.mul.Tensor, aten.tanh_backward.default))
            self._call(target, (gradient, value), {})

    def last_of_backward(self) -> fx.Node:
        """A value that is computed of a tangent; a late one, where there is any."""
        found = [each for each in self.values if each in self.behind and each.op != "placeholder"]
        if not found:
            (tangent, *_) = (each for each in self.values if each in self.behind)
            self._call(aten.neg.default, (tangent,), {})
            found = self.values
        return found[-1]

    def chosen(self, count: int) -> list[fx.Node]:
        """So many values, the last ones more often."""
        late = self.values[-3:]
        return [self.chance.choice(late if self.chance.random() < 0.8 else self.values) for _ in range(count)]


def _is_as_traced(value: Any, traced: Any) -> bool:
    """Whether a value is a small tensor, of the sizes and the type that PyTorch traces."""
    if not isinstance(value, Tensor) or value.numel() > MOST_NUMBERS or value.dim() > 4:
        return False
    return value.shape == traced.shape and value.dtype == traced.dtype


@torch.no_grad()
def draw_joint(chance: random.Random, most: int = 20) -> Drawn:
    """A joint graph of at most so many operators on either side."""
    drawing = _Drawing(chance)
    torch.manual_seed(chance.randrange(1 << 30))
    for place in range(chance.randint(1, 4)):
        drawing.take(f"primals_{place + 1}", chance.choice(INPUTS if place else INPUTS[:4])())
    primals = len(drawing.inputs)
    for _ in range(chance.randint(2, most)):
        drawing.add()
    forward = list(drawing.values)
    outputs = drawing.chosen(chance.choice((1, 1, 2, 3)))
    last = list(drawing.graph.nodes)[primals - 1]
    floating = [each for each in outputs if each.meta["val"].is_floating_point()]
    if not floating:
        floating = [node for node in drawing.values if node.meta["val"].is_floating_point()][-1:]
        outputs += floating
    with drawing.graph.inserting_after(last):
        for place, each in reversed(list(enumerate(floating, 1))):
            drawing.take(f"tangents_{place}", torch.randn(each.meta["val"].shape))
    tangents = drawing.inputs[primals:][::-1]
    drawing.inputs[primals:] = tangents
    for value in reversed([each for each in forward if KINDS["f"](each.meta["val"])]):
        if chance.random() < 0.8:
            drawing.read_again(value)
        if chance.random() < 0.4:
            drawing.add()
    gradients: list[fx.Node | None] = list(drawing.chosen(chance.choice((0, 0, 1, 2))))
    gradients += [drawing.last_of_backward(), *[None] * chance.randint(0, 1)]
    chance.shuffle(gradients)
    drawing.graph.output((*outputs, *gradients))
    module = fx.GraphModule(nn.Module(), drawing.graph)
    return Drawn(module, len(outputs), tuple(drawing.inputs), len(tangents))
