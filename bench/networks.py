"""Chains and convolutional networks of the zoo; `models` lists them with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxremat.paper.networks import PreActivationResNet, ResNetSizes, stage_blocks

Built = tuple[nn.Module, tuple[Tensor, ...]]


# --- Around a network, and inside of one ----------------------------------------------------------


def mean_square(output: Tensor) -> Tensor:
    """The loss of networks without labels."""
    return output.square().mean()


class Scored(nn.Module):
    """A network with a loss that needs no labels."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor], Tensor] = mean_square) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss."""
        return self.loss(self.network(*inputs))


class Classified(nn.Module):
    """A network with the cross entropy of its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss; the logits' classes come last."""
        return functional.cross_entropy(self.network(x).flatten(0, -2), labels.flatten())


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        """The input plus the branch's output."""
        return x + self.branch(x)


# --- Chains ---------------------------------------------------------------------------------------


def scale_weights(chain: Iterable[nn.Module], gain: float) -> None:
    """Draw the linear layers' weights anew, so that a deep chain keeps the size of its signal."""
    for layer in chain:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, gain)


def tanh_mlp(layers: int, width: int, batch: int) -> Built:
    """A chain of Linear and tanh."""
    chain = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.Tanh())]
    scale_weights(chain, gain=5 / 3)
    return Scored(nn.Sequential(*chain)), (torch.randn(batch, width),)


class GatedUnit(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The gated output."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def gated_mlp(blocks: int, width: int, batch: int) -> Built:
    """Residual SwiGLU blocks with RMSNorm."""
    layers = [Residual(nn.RMSNorm(width), GatedUnit(width, 2 * width)) for _ in range(blocks)]
    return Scored(nn.Sequential(*layers)), (torch.randn(batch, width),)


def dropout_mlp(blocks: int, width: int, batch: int) -> Built:
    """LayerNorm, Linear, GELU and dropout of 0.3, in residual blocks."""
    layers = [
        Residual(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3))
        for _ in range(blocks)
    ]
    return Scored(nn.Sequential(*layers)), (torch.randn(batch, width),)


def homogeneous(layers: int, width: int, batch: int) -> Built:
    """ReLU and dropout without biases: y(cx) = c y(x), so Euler's <dy/dx, x> = y if masks agree."""
    chain = [
        each
        for _ in range(layers)
        for each in (nn.Linear(width, width, bias=False), nn.ReLU(), nn.Dropout(0.3))
    ]
    scale_weights(chain, gain=(2 * 0.7) ** 0.5)
    return Scored(nn.Sequential(*chain), torch.sum), (torch.randn(batch, width, requires_grad=True),)


class UnrolledLSTM(nn.Module):
    """Stacked LSTM cells written out in plain operators, unrolled over time."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.given = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(layers))
        self.state = nn.ModuleList(nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Time comes first in x."""
        steps = list(x.unbind(0))
        for given, state in zip(self.given, self.state, strict=True):
            h = c = torch.zeros_like(steps[0])
            for time, below in enumerate(steps):
                i, f, g, o = (given(below) + state(h)).chunk(4, dim=-1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                steps[time] = h = o.sigmoid() * c.tanh()
        return torch.stack(steps)


def lstm(layers: int, steps: int, hidden: int, batch: int) -> Built:
    """Layers of unrolled LSTM cells."""
    return Scored(UnrolledLSTM(layers, hidden)), (torch.randn(steps, batch, hidden),)


# --- Convolutions ---------------------------------------------------------------------------------


def convolution(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    """A 3x3 convolution with its BatchNorm."""
    return [
        nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outside),
    ]


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is a strided 1x1 convolution where shapes differ."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(inside, outside, stride), convolution(outside, outside)
        self.branch = nn.Sequential(*first, nn.ReLU(), *second)
        same = inside == outside and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return functional.relu(self.branch(x) + self.shortcut(x))


def resnet(blocks: int, width: int, batch: int, size: int) -> Built:
    """A stem and three stages of basic blocks with BatchNorm."""
    layers = [*convolution(3, width), nn.ReLU()]
    inside = width
    for stage in range(3):
        outside = width << stage
        for block in range(blocks):
            layers.append(BasicBlock(inside, outside, 2 if stage and not block else 1))
            inside = outside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10)]
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Classified(nn.Sequential(*layers)), (images, labels)


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, convolution; the result is appended to the input's channels."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inside)
        self.convolution = nn.Conv2d(inside, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input's channels and the new ones."""
        return torch.cat([x, self.convolution(functional.relu(self.norm(x)))], dim=1)


def densenet(layers: int, growth: int, batch: int, size: int) -> Built:
    """Two dense blocks with a pooling between them."""
    chain: list[nn.Module] = [nn.Conv2d(3, growth, 3, padding=1)]
    for layer in range(2 * layers):
        if layer == layers:
            chain.append(nn.AvgPool2d(2))
        chain.append(DenseLayer((layer + 1) * growth, growth))
    chain += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear((2 * layers + 1) * growth, 10)]
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Classified(nn.Sequential(*chain)), (images, labels)


class UNet(nn.Module):
    """One level of a U-Net around the next: down, inner level, up, and a skip beside them."""

    def __init__(self, inside: int, width: int, levels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(*convolution(inside, width), nn.ReLU())
        self.inner = UNet(width, 2 * width, levels - 1) if levels > 1 else None
        above = 3 * width if self.inner else width
        self.up = nn.Sequential(*convolution(above, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """As many pixels as x, of the level's width."""
        skip = self.down(x)
        if self.inner is None:
            return self.up(skip)
        inner = functional.interpolate(self.inner(functional.max_pool2d(skip, 2)), scale_factor=2.0)
        return self.up(torch.cat([skip, inner], dim=1))


def unet(levels: int, width: int, batch: int, size: int) -> Built:
    """A U-Net with BatchNorm; each level's skip is used early and late."""
    return Scored(UNet(3, width, levels)), (torch.randn(batch, 3, size, size),)


def bottleneck_resnet(depth: int, width: int, batch: int, size: int, classes: int) -> Built:
    """A pre-activation ResNet of bottlenecks, as in the paper's experiments."""
    network = PreActivationResNet(stage_blocks(depth), ResNetSizes(width, batch, size, classes))
    return network, (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))
