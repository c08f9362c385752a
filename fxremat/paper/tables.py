"""The paper's figures as tables that a person reads, with what the paper found beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from fxremat.paper.figures import NETWORKS, Figure, Point, slope
from fxremat.paper.speed import Timing
from fxremat.paper.strategies import NAMES

__all__ = ["format_figure"]

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_COPIES = 3  # of the parameters on the device: themselves, their gradients, SGD's momentum
_RECOMPUTING = ("sublinear", "recursive", "auto at sublinear's peak", "auto")
_TITLES = {"resnet": "Pre-activation ResNet", "lstm": "Unrolled LSTM"}


def format_figure(figure: Figure) -> str:
    """The figure's tables and a few sentences."""
    if figure.number == 7:
        parts = [_predicted_times(figure), *([_measured_times(figure)] if figure.timings else [])]
        return "\n\n".join(parts)
    (network,) = figure.networks()
    parts = [_feature_maps(figure, network), _ratios(figure, network), _predicted_times(figure)]
    if network == "resnet":
        parts.insert(1, _device_totals(figure))
    return "\n\n".join(parts)


# --- Figures 5 and 6 ----------------------------------------------------------------------------------


def _feature_maps(figure: Figure, network: str) -> str:
    points = figure.points
    names = [name for name in _planned_names(points) if name in NAMES[:-1]]
    unit = _unit(points)
    rows = [
        [str(point.size), f"{point.nodes:,}", *(_memory(point, name, unit) for name in names)]
        for point in points
    ]
    slopes = [f"{slope(*figure.curve(network, name)):.2f}" for name in names]
    table = _table((NETWORKS[network], "nodes", *names), [*rows, ["slope", "", *slopes]])
    return f"{_TITLES[network]}: feature maps, {unit}, without parameters and their gradients\n{table}"


def _device_totals(figure: Figure) -> str:
    names = [name for name in ("sharing", *_RECOMPUTING[:2], "auto") if name in _planned_names(figure.points)]
    unit = _unit(figure.points)
    rows = []
    for point in figure.points:
        fixed = f"{_COPIES * point.parameter_bytes / _UNITS[unit]:.3f}"
        totals = [_memory(point, name, unit, _COPIES) for name in names]
        rows.append([str(point.size), fixed, *totals])
    paper = {"sharing": "48 GB", "sublinear": "7 GB"}
    rows.append(["paper, 1000", "-", *(paper.get(name, "-") for name in names)])
    head = (
        "Total, GiB: feature maps, parameters, their gradients and SGD's momentum (the last three: 'fixed')"
    )
    return f"{head}\n{_table(('layers', 'fixed', *names), rows)}"


def _ratios(figure: Figure, network: str) -> str:
    """How many times one strategy is below another, at each size."""
    pairs = [
        ("none", "in-place"),
        ("none", "sharing"),
        *(("sharing", name) for name in ("drop bn-relu", *_RECOMPUTING)),
    ]
    names = _planned_names(figure.points)
    pairs = [pair for pair in pairs if pair[1] in names and pair[1] != NAMES[-1]]
    rows = [[str(point.size), *(_ratio(point, *pair) for pair in pairs)] for point in figure.points]
    headers = (NETWORKS[network], *(f"{high} / {low}" for high, low in pairs))
    return f"How many times less\n{_table(headers, rows)}"


def _planned_names(points: Iterable[Point]) -> list[str]:
    """The strategies that were planned at any point, in the paper's order."""
    planned = {each.strategy for point in points for each in point.planned}
    return [name for name in NAMES if name in planned]


def _unit(points: Iterable[Point]) -> str:
    """The unit in which the most bytes of all points are 1 or more."""
    most = max(each.feature_map_bytes for point in points for each in point.planned)
    return next((unit for unit, size_bytes in _UNITS.items() if most >= size_bytes), "KiB")


def _memory(point: Point, name: str, unit: str, copies: int = 0) -> str:
    """Feature maps, and so many copies of the parameters."""
    planned = point.of(name)
    if planned is None:
        return "-"
    return f"{(planned.feature_map_bytes + copies * point.parameter_bytes) / _UNITS[unit]:.3f}"


def _ratio(point: Point, high: str, low: str) -> str:
    above, below = point.of(high), point.of(low)
    if above is None or below is None:
        return "-"
    return f"{above.feature_map_bytes / max(1, below.feature_map_bytes):.1f}x"


# --- Figure 7 -----------------------------------------------------------------------------------------


def _predicted_times(figure: Figure) -> str:
    names = [name for name in ("drop bn-relu", *_RECOMPUTING) if name in _planned_names(figure.points)]
    rows = [
        [point.network, str(point.size), *(_extra_time(point, name) for name in names)]
        for point in figure.points
    ]
    head = "Extra time to no recomputation, predicted for a GPU at full size (paper: about 30%)"
    return f"{head}\n{_table(('network', 'size', *names), rows)}"


def _extra_time(point: Point, name: str) -> str:
    planned, base = point.of(name), point.of("none")
    if planned is None or base is None:
        return "-"
    return f"{planned.seconds / base.seconds - 1:+.1%}"


def _measured_times(figure: Figure) -> str:
    rows = [_timed(timing) for timing in figure.timings]
    headers = ("network", "size", "strategy", "step ms", "extra", "predicted", "peak MiB", "predicted")
    return f"Measured: {figure.device}\n{_table(headers, rows)}"


def _timed(timing: Timing) -> list[str]:
    return [
        timing.network,
        str(timing.size),
        timing.strategy,
        f"{timing.step_seconds * 1e3:.1f}",
        f"{timing.ratio - 1:+.1%}",
        f"{timing.predicted_ratio - 1:+.1%}",
        f"{timing.peak_bytes / 2**20:.2f}",
        f"{timing.predicted_peak_bytes / 2**20:.2f}",
    ]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers, disable_numparse=True, stralign="right")
