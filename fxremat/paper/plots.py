"""The paper's figures as plots: memory log-log against size, extra time against size.

A strategy has one colour and one marker in all figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxremat.paper.figures import NETWORKS, Figure, slope
from fxremat.plots.canvas import canvas, check_plot, write_plot

__all__ = ["plot_figure"]

_GIB = 2**30
_STYLES = {
    "none": ("#000000", "o"),
    "in-place": ("#E69F00", "v"),
    "sharing": ("#56B4E9", "s"),
    "drop bn-relu": ("#CC79A7", "P"),
    "sublinear": ("#0072B2", "D"),
    "recursive": ("#009E73", "^"),
    "auto": ("#D55E00", "X"),
    "auto at sublinear's peak": ("#D55E00", "X"),
}
_BEHIND = {"markersize": 10, "linewidth": 3, "alpha": 0.7}
_TITLES = {"resnet": "Pre-activation ResNet", "lstm": "Unrolled LSTM"}
_TIMED = ("sublinear", "recursive", "auto at sublinear's peak")
_PAPER_EXTRA = 30  # percent


def plot_figure(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Draw the figure; returns the PNG and the SVG that were written.

    Raises:
        InvalidOptionError: matplotlib is missing, or the file can't be written.
    """
    check_plot(path)
    return write_plot(_memory(figure) if figure.number != 7 else _times(figure), path)


def _memory(figure: Figure) -> Any:
    """Figures 5 and 6: feature-map bytes against size."""
    from matplotlib.ticker import LogLocator

    (network,) = figure.networks()
    drawn, (axes,) = canvas()
    for name, (colour, marker) in _STYLES.items():
        sizes, values = figure.curve(network, name)
        if not sizes or name == _TIMED[-1]:
            continue
        label = f"{name} (slope {slope(sizes, values):.2f})"
        heights = [value / _GIB for value in values]
        style = _BEHIND if name == "sublinear" else {}  # auto is often the same, and drawn upon it
        axes.loglog(sizes, heights, color=colour, marker=marker, label=label, **style)
    _label_sizes(axes, network, sorted({point.size for point in figure.points}))
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("feature maps (GiB)")
    axes.set_title(_TITLES[network])
    axes.grid(True, which="major", alpha=0.3)
    drawn.legend(loc="outside lower center", ncols=3, fontsize="small")
    return drawn


def _label_sizes(axes: Any, network: str, sizes: list[int]) -> None:
    axes.set_xlabel(NETWORKS[network] if network == "resnet" else "unrolled steps")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)


def _times(figure: Figure) -> Any:
    """Figure 7: extra time against size, one panel per network."""
    networks = figure.networks()
    drawn, panels = canvas(len(networks))
    for axes, network in zip(panels, networks, strict=True):
        for name in _TIMED:
            _draw_times(axes, figure, network, name)
        axes.axhline(_PAPER_EXTRA, color="grey", linewidth=1, linestyle=":", label="paper, about 30 %")
        axes.set_xscale("log")
        timed = {timing.size for timing in figure.timings if timing.network == network}
        planned = {point.size for point in figure.points if point.network == network}
        _label_sizes(axes, network, _apart(sorted(planned | timed)))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.set_title(_TITLES[network])
        axes.grid(True, which="major", alpha=0.3)
    panels[0].set_ylabel("extra time (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    return drawn


def _draw_times(axes: Any, figure: Figure, network: str, name: str) -> None:
    colour, marker = _STYLES[name]
    points = [point for point in figure.points if point.network == network]
    pairs = [(point.size, point.of(name), point.of("none")) for point in points]
    predicted = [(size, 100 * (own.seconds / base.seconds - 1)) for size, own, base in pairs if own and base]
    timings = [each for each in figure.timings if (each.network, each.strategy) == (network, name)]
    measured = [(each.size, 100 * (each.ratio - 1)) for each in timings]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), color=colour, marker=marker, label=f"{name}, predicted")
    if measured:
        style = {"color": colour, "marker": marker, "linestyle": "--", "markerfacecolor": "white"}
        axes.plot(*zip(*measured, strict=True), label=f"{name}, measured", **style)


def _apart(sizes: list[int]) -> list[int]:
    """Sizes without those whose labels would touch the one before on a log axis."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 1.4 * kept[-1]:
            kept.append(size)
    return kept
