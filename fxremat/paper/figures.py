"""The paper's figures 5, 6 and 7 (Chen et al. 2016, Sec. 5) as data: what is planned and what is measured.

    5   feature maps of a pre-activation ResNet against its layers
    6   feature maps of an unrolled LSTM against its steps
    7   extra time of recomputation, predicted for both at full size and measured on this machine

Networks are captured with fake tensors, so the paper's sizes are planned on any machine. The slope of a
strategy is the exponent e of memory ~ size**e, by least squares over the logarithms: 1 where memory grows
as the depth does, 1/2 for its root.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fxremat._torch import compilers
from fxremat.driver.capture import capture
from fxremat.errors import InvalidOptionError
from fxremat.paper.networks import LSTM, LSTMSizes, PreActivationResNet, ResNetSizes, stage_blocks
from fxremat.paper.speed import Timing, time_network
from fxremat.paper.strategies import Planned, Strategy, plan_strategies, strategies_for

__all__ = ["FIGURES", "Figure", "Point", "Sweep", "default_sweep", "make_figure", "plan_point", "slope"]

FIGURES = (5, 6, 7)
NETWORKS = {"resnet": "layers", "lstm": "steps"}  # each with what its size counts

_FULL_RESNET = ResNetSizes()
_FULL_LSTM = LSTMSizes()

Built = tuple[nn.Module, tuple[Tensor, ...]]
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Point:
    """A network at one size, planned by every strategy.

    Attributes:
        network: ``"resnet"`` or ``"lstm"``.
        size: Its layers, or its steps.
        nodes: Nodes of its joint graph.
        parameter_bytes: Bytes of its parameters.
        capture_seconds: How long capturing the joint graph took.
        planned: One entry per strategy, in the paper's order.
    """

    network: str
    size: int
    nodes: int
    parameter_bytes: int
    capture_seconds: float
    planned: tuple[Planned, ...]

    def of(self, strategy: str) -> Planned | None:
        """What a strategy is predicted to take; None where it was not planned."""
        return next((each for each in self.planned if each.strategy == strategy), None)


@dataclass(frozen=True, slots=True)
class Sweep:
    """At which sizes and widths a figure is made.

    Attributes:
        planned: For each network the sizes that are planned.
        timed: For each network the sizes that are run.
        resnet: Widths of the ResNet that is planned.
        lstm: Widths of the LSTM that is planned.
        timed_resnet: Widths of the ResNet that is run.
        timed_lstm: Widths of the LSTM that is run.
        rounds: How many steps each strategy is timed for.
        device: Where networks are run.
    """

    planned: Mapping[str, tuple[int, ...]]
    timed: Mapping[str, tuple[int, ...]]
    resnet: ResNetSizes = _FULL_RESNET
    lstm: LSTMSizes = _FULL_LSTM
    timed_resnet: ResNetSizes = _FULL_RESNET
    timed_lstm: LSTMSizes = _FULL_LSTM
    rounds: int = 20  # as in the paper
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure's data and where they come from."""

    number: int
    points: tuple[Point, ...]
    timings: tuple[Timing, ...]
    device: str
    date: str
    torch: str

    def to_json(self) -> str:
        """The figure as JSON; ``Figure.from_json`` reads it back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Figure:
        """Read what ``to_json`` wrote; other keys are left aside."""
        fields = json.loads(text)
        points = tuple(
            Point(**{**each, "planned": tuple(Planned(**planned) for planned in each["planned"])})
            for each in fields["points"]
        )
        timings = tuple(Timing(**each) for each in fields["timings"])
        kept = {name: fields[name] for name in ("number", "device", "date", "torch")}
        return cls(points=points, timings=timings, **kept)

    def networks(self) -> tuple[str, ...]:
        """The networks that were planned, in order."""
        return tuple(dict.fromkeys(point.network for point in self.points))

    def curve(self, network: str, strategy: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and feature-map bytes of a strategy, where it was planned."""
        points = [point for point in self.points if point.network == network]
        found = [(point.size, each.feature_map_bytes) for point in points if (each := point.of(strategy))]
        return tuple(size for size, _ in found), tuple(size_bytes for _, size_bytes in found)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent e of the power law values ~ sizes**e that fits best; nan below two sizes.

    >>> round(slope([1, 4, 16], [3, 6, 12]), 3)
    0.5
    """
    if len(set(sizes)) < 2:
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


# --- At which sizes -----------------------------------------------------------------------------------

_MEMORY_FIGURE = {"resnet": 5, "lstm": 6}
_DEPTHS = (50, 101, 200, 401, 1001)
_STEPS = (64, 128, 256, 512)


def default_sweep(number: int, *, quick: bool = False, full: bool = False, device: str = "cpu") -> Sweep:
    """The sizes of a figure: the paper's, or small ones that take seconds.

    Args:
        number: 5, 6 or 7.
        quick: Small widths and few layers.
        full: Up to 1024 steps of the LSTM.
        device: Where networks are run: at the paper's widths on CUDA, at reduced ones on a CPU.

    Raises:
        InvalidOptionError: There is no such figure.
    """
    if number not in FIGURES:
        raise InvalidOptionError.bad_value("figure", number, map(str, FIGURES))
    if quick:
        return _quick(number, device)
    steps = (*_STEPS, 1024) if full else _STEPS
    sizes: dict[str, tuple[int, ...]] = {"resnet": _DEPTHS, "lstm": steps}
    if number == 7:  # the largest are in the tables of figures 5 and 6
        sizes = {"resnet": _DEPTHS[:-1], "lstm": _STEPS[:-1]}
    planned = {name: each for name, each in sizes.items() if number in (_MEMORY_FIGURE[name], 7)}
    if number != 7:
        return Sweep(planned, {}, device=device)
    timed = {"resnet": (50, 101, 152, 200), "lstm": (32, 64, 128)}
    if torch.device(device).type == "cuda":
        return Sweep(planned, timed, device=device)
    return Sweep(
        planned,
        {"resnet": (50, 101), "lstm": (8, 16, 32)},
        timed_resnet=ResNetSizes(width=16, batch=8, pixels=96, classes=100),
        timed_lstm=LSTMSizes(hidden=128, batch=32, classes=500),
        rounds=9,
        device=device,
    )


def _quick(number: int, device: str) -> Sweep:
    resnet = ResNetSizes(width=4, batch=2, pixels=32, classes=10)
    lstm = LSTMSizes(layers=2, hidden=16, batch=4, inputs=5, classes=20)
    planned = {"resnet": (14, 26, 50), "lstm": (4, 8, 16)}
    planned = {name: sizes for name, sizes in planned.items() if number in (_MEMORY_FIGURE[name], 7)}
    timed = {"resnet": (14,), "lstm": (4,)} if number == 7 else {}
    return Sweep(planned, timed, resnet, lstm, resnet, lstm, rounds=2, device=device)


# --- Making one ---------------------------------------------------------------------------------------


def make_figure(number: int, sweep: Sweep, progress: Progress = lambda stage: None) -> Figure:
    """Plan and measure all points of a figure; ``progress`` is told what comes next, `stages` times."""
    points = [
        plan_point(network, size, sweep, progress)
        for network, sizes in sweep.planned.items()
        for size in sizes
    ]
    timings: list[Timing] = []
    for network, sizes in sweep.timed.items():
        for size in sizes:
            progress(f"{network} {size}, running")
            build = _builder(network, size, sweep.timed_resnet, sweep.timed_lstm)
            timings += time_network(network, size, build, sweep.device, sweep.rounds)
    device = _device_name(sweep.device) if timings else "none, planned with fake tensors"
    return Figure(number, tuple(points), tuple(timings), device, time.strftime("%Y-%m-%d"), torch.__version__)


def stages(sweep: Sweep) -> int:
    """How often `make_figure` reports progress."""
    planned = sum(len(sizes) * (1 + len(_strategies(network))) for network, sizes in sweep.planned.items())
    return planned + sum(map(len, sweep.timed.values()))


def plan_point(network: str, size: int, sweep: Sweep, progress: Progress = lambda stage: None) -> Point:
    """Capture a network at one size with fake tensors and plan it by every strategy."""
    progress(f"{network} {size}, capturing")
    start = time.perf_counter()
    with compilers.fake_tensors():
        model, inputs = _builder(network, size, sweep.resnet, sweep.lstm)()
        parameter_bytes = sum(each.nbytes for each in model.parameters())
    graph = capture(model, *inputs)
    capture_seconds = time.perf_counter() - start
    planned = plan_strategies(
        graph, _strategies(network), lambda strategy: progress(f"{network} {size}, {strategy}")
    )
    return Point(network, size, len(graph.nodes), parameter_bytes, capture_seconds, planned)


def _strategies(network: str) -> tuple[Strategy, ...]:
    return strategies_for(convolutional=network == "resnet")


def _builder(network: str, size: int, resnet: ResNetSizes, lstm: LSTMSizes) -> Callable[[], Built]:
    """Makes a network and a batch, on torch's default device."""

    def build_resnet() -> Built:
        images = torch.randn(resnet.batch, 3, resnet.pixels, resnet.pixels)
        labels = torch.zeros(resnet.batch, dtype=torch.long)
        return PreActivationResNet(stage_blocks(size), resnet), (images, labels)

    def build_lstm() -> Built:
        series = torch.randn(size, lstm.batch, lstm.inputs)
        labels = torch.zeros(size, lstm.batch, dtype=torch.long)
        return LSTM(lstm), (series, labels)

    return build_resnet if network == "resnet" else build_lstm


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.processor() or platform.machine()}, one thread"
