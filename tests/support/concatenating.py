"""Small networks that concatenate, each with another use of what is concatenated, or of its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Written(nn.Module):
    """Products and loops are computed right into a concatenation that products read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(48, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = torch.cat([a, torch.tanh(a), torch.relu(a)], -1)
        return self.last(self.second(b)).square().mean()


class Dropped(nn.Module):
    """A gradient is read in parts, by a loop and by a product with a sum, which are one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a)
        c = torch.cat([b, functional.dropout(b, 0.1), a], -1)
        return self.last(functional.dropout(c, 0.1)).square().mean()


class Gated(nn.Module):
    """A loop over all elements that was fused is not fused any more with one that goes over parts of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.third, self.last = nn.Linear(32, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = torch.cat([self.second(a * torch.sigmoid(a * 2)), a], -1)
        b = functional.gelu(b * torch.sigmoid(b * 2))
        return self.last(self.third(b)).square().mean()


class Imaged(nn.Module):
    """The gradient of a concatenation is written over that of a convolution, and read in parts by others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.third, self.fourth = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(56, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.second(x)
        b = torch.cat([self.first(x), self.third(a), a], 1)
        return self.last(self.fourth(functional.gelu(b))).square().mean()


class Beside(nn.Module):
    """An image is pooled and concatenated, and its concatenation is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.mix, self.last = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.sigmoid(self.inner(functional.avg_pool2d(x, 2)))
        y = functional.interpolate(y, scale_factor=2.0)
        return self.last(torch.tanh(self.mix(torch.cat([x, y], 1)))).square().mean()


class Dense(nn.Module):
    """Each layer reads a concatenation of all before it, as in a DenseNet."""

    def __init__(self, layers: int = 8, growth: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, growth, 3, padding=1)
        widths = range(growth, growth * (layers + 1), growth)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1))
            for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1).square().mean()


Network = tuple[nn.Module, tuple[Tensor, ...]]


def rows(module: Callable[[], nn.Module]) -> Callable[[], Network]:
    """Of 512 rows of 16 numbers."""
    return lambda: (module(), (torch.randn(512, 16),))


def tokens(module: Callable[[], nn.Module]) -> Callable[[], Network]:
    """Of four sequences of 128 tokens."""
    return lambda: (module(), (torch.randn(4, 128, 16),))


def images(module: Callable[[], nn.Module], channels: int = 16) -> Callable[[], Network]:
    """Of four images of 32 x 32 points."""
    return lambda: (module(), (torch.randn(4, channels, 32, 32),))


NETWORKS = {
    "written": rows(Written),
    "dropped": rows(Dropped),
    "gated": tokens(Gated),
    "imaged": images(Imaged),
    "beside": images(Beside, 3),
    "dense": images(Dense, 3),
}
