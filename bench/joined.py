"""Random networks around concatenations, for ``unseen.py``: small, with all kinds of operands and readers.

Values are made of any value before, so that an operand of a concatenation is read before it, after it, by
another, or through nothing else, and the concatenation by loops, kernels or both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTHS = (8, 16, 24)
SIZES = {"images": (4, 16, 32, 32), "rows": (512, 16), "tokens": (4, 128, 16)}  # of a batch, by the kind
MAX_JOINS = 2
JOINED, ADDED = -1, -2  # in the place of a layer


class Gate(nn.Module):
    """A value times a function of itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * 2)


class Joined(nn.Module):
    """A network of a kind, which concatenates once or twice, and its mean square.

    Args:
        kind: One of ``SIZES``.
        seed: Of what is drawn.
    """

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self._choose, self._is_image = random.Random(seed), kind == "images"
        self.layers = nn.ModuleList()
        self._steps: list[tuple[int, Sequence[int]]] = []  # which layer, and the values that it reads
        self._widths = [WIDTHS[1]]
        self._take(self._mixing(WIDTHS[1], WIDTHS[1]), 0)
        for _ in range(self._choose.randint(2, 4)):
            self._take_any(self._choose.randrange(max(0, len(self._widths) - 3), len(self._widths)))
        for _ in range(self._choose.randint(1, MAX_JOINS)):
            self._join()
        self._take(self._mixing(self._widths[-1], 4), len(self._widths) - 1)

    def _join(self) -> None:
        """Concatenate two or three values, go on from there, and maybe add one of before."""
        places = range(1, len(self._widths))
        joined = self._choose.sample(places, min(self._choose.choice([2, 2, 3]), len(places)))
        self._steps.append((JOINED, joined))
        self._widths.append(sum(self._widths[place] for place in joined))
        for _ in range(self._choose.randint(1, 3)):
            last = len(self._widths) - 1
            self._take_any(self._choose.choice([last, last, self._choose.randrange(1, last + 1)]))
        last, width = len(self._widths) - 1, self._widths[-1]
        alike = [place for place in range(1, last) if self._widths[place] == width]
        if alike and self._choose.random() < 0.6:
            self._steps.append((ADDED, (self._choose.choice(alike), last)))
            self._widths.append(width)

    def _take_any(self, place: int) -> None:
        width = self._widths[place]
        make = self._choose.choice([self._mixed, self._mixed, self._activation, self._activation, self._norm])
        make = self._choose.choice([make, make, make, self._pool, lambda width: Gate()])
        self._take(make(width), place)

    def _take(self, layer: nn.Module, place: int) -> None:
        self.layers.append(layer)
        self._steps.append((len(self.layers) - 1, (place,)))
        self._widths.append(_width(layer, self._widths[place]))

    def _mixed(self, width: int) -> nn.Module:
        return self._mixing(width, self._choose.choice(WIDTHS))

    def _mixing(self, read: int, written: int) -> nn.Module:
        if not self._is_image:
            return nn.Linear(read, written)
        size = self._choose.choice([1, 3])
        return nn.Conv2d(read, written, size, padding=size // 2)

    def _activation(self, width: int) -> nn.Module:
        found: nn.Module = self._choose.choice([nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh])()
        return found

    def _norm(self, width: int) -> nn.Module:
        if not self._is_image:
            return nn.LayerNorm(width)
        return self._choose.choice([nn.GroupNorm(2, width), nn.BatchNorm2d(width)])

    def _pool(self, width: int) -> nn.Module:
        if not self._is_image:
            return nn.Dropout(0.1)
        pooling = self._choose.choice([nn.AvgPool2d(2), nn.MaxPool2d(2)])
        return nn.Sequential(
            pooling, nn.Upsample(scale_factor=2, mode=self._choose.choice(["nearest", "bilinear"]))
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, places in self._steps:
            read = [values[place] for place in places]
            if layer == JOINED:
                values.append(torch.cat(read, 1 if self._is_image else -1))
            else:
                values.append(read[0] + read[1] if layer == ADDED else self.layers[layer](read[0]))
        return values[-1].square().mean()


def _width(layer: nn.Module, read: int) -> int:
    """How many channels a layer writes that reads so many."""
    if isinstance(layer, nn.Conv2d):
        return layer.out_channels
    return layer.out_features if isinstance(layer, nn.Linear) else read


def network(kind: str, seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network of a kind and a seed, and a batch for it."""
    torch.manual_seed(0)
    return Joined(kind, seed), (torch.randn(SIZES[kind]),)
