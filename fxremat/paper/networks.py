"""The two networks of the paper's experiments (Chen et al. 2016, Sec. 5), at any size.

Both return their loss. Under fake tensors they take no memory, however deep they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LSTM", "LSTMSizes", "PreActivationResNet", "ResNetSizes", "stage_blocks"]


# --- ResNet (Fig. 5) ------------------------------------------------------------------------------------

_SHARES = (3, 4, 6, 3)  # of the blocks in each stage: those of the 50-layer network
_LAYERS_PER_BLOCK = 3  # convolutions of a bottleneck
_LAYERS_AROUND = 2  # the first convolution and the classifier
_EXPANSION = 4  # a bottleneck's outer width in its inner ones


@dataclass(frozen=True, slots=True)
class ResNetSizes:
    """How wide the network is, and its batch; the default is the paper's."""

    width: int = 64
    batch: int = 32
    pixels: int = 224
    classes: int = 1000


def stage_blocks(depth: int) -> tuple[int, ...]:
    """How many bottlenecks each stage has, so that all layers are about ``depth``.

    Every stage is deepened alike: the shares of the 50-layer network are kept.

    >>> stage_blocks(50), stage_blocks(1000)
    ((3, 4, 6, 3), (62, 83, 126, 62))
    """
    blocks = max(len(_SHARES), round((depth - _LAYERS_AROUND) / _LAYERS_PER_BLOCK))
    total = sum(_SHARES)
    counts = [max(1, blocks * share // total) for share in _SHARES]
    counts[2] += blocks - sum(counts)  # as in the family's deep members, the third stage takes the rest
    return tuple(counts)


class _Bottleneck(nn.Module):
    """Three times normalise, rectify, convolve; then add what came in."""

    def __init__(self, wide_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide = _EXPANSION * width
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (wide_in, width, width)))
        self.convolutions = nn.ModuleList(
            (
                nn.Conv2d(wide_in, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, wide, 1, bias=False),
            )
        )
        changes = stride > 1 or wide_in != wide
        self.shortcut = nn.Conv2d(wide_in, wide, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.norms[0](x))
        across = x if self.shortcut is None else self.shortcut(active)
        inner = self.convolutions[0](active)
        for norm, convolution in list(zip(self.norms, self.convolutions, strict=True))[1:]:
            inner = convolution(functional.relu(norm(inner)))
        total: Tensor = inner + across
        return total


class PreActivationResNet(nn.Module):
    """The residual network of He et al. 2016 with bottlenecks; its forward returns the loss."""

    def __init__(self, blocks: Sequence[int], sizes: ResNetSizes) -> None:
        super().__init__()
        width = sizes.width
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        wide = width
        body: list[nn.Module] = []
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                body.append(_Bottleneck(wide, inner, 2 if stage and not block else 1))
                wide = _EXPANSION * inner
        self.body = nn.Sequential(*body)
        self.norm = nn.BatchNorm2d(wide)
        self.classifier = nn.Linear(wide, sizes.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        x = functional.max_pool2d(self.stem(images), 3, 2, 1)
        x = functional.relu(self.norm(self.body(x)))
        return functional.cross_entropy(self.classifier(x.mean((2, 3))), labels)


# --- LSTM (Fig. 6) --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LSTMSizes:
    """How wide the network is, and its batch; the default is the paper's."""

    layers: int = 4
    hidden: int = 1024
    batch: int = 64
    inputs: int = 50
    classes: int = 5000


class _Cell(nn.Module):
    """One layer's step, written out in plain operators."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        spread = hidden**-0.5
        self.given = nn.Parameter(torch.empty(inputs, 4 * hidden).uniform_(-spread, spread))
        self.state = nn.Parameter(torch.empty(hidden, 4 * hidden).uniform_(-spread, spread))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.mm(x, self.given) + torch.mm(h, self.state) + self.bias
        write, forget, candidate, read = gates.chunk(4, 1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(candidate)
        return torch.sigmoid(read) * torch.tanh(c), c


class LSTM(nn.Module):
    """Stacked cells unrolled over time, with a softmax and a loss at every step; returns the mean loss."""

    def __init__(self, sizes: LSTMSizes) -> None:
        super().__init__()
        inputs = (sizes.inputs, *[sizes.hidden] * (sizes.layers - 1))
        self.cells = nn.ModuleList(_Cell(each, sizes.hidden) for each in inputs)
        self.classifier = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, series: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch; time comes first in both."""
        zero = series.new_zeros(series.shape[1], self.classifier.in_features)
        states = [(zero, zero)] * len(self.cells)
        loss = series.new_zeros(())
        for x, label in zip(series.unbind(0), labels.unbind(0), strict=True):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            loss = loss + functional.cross_entropy(self.classifier(x), label)
        return loss / len(series)
