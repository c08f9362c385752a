"""A step as a plot: what is live when, by who holds it, under the line of the budget."""

from __future__ import annotations

from pathlib import Path

from fxremat.plots.canvas import BLACK, COLOURS, VERMILION, canvas, check_plot, write_plot
from fxremat.report.step_report import StepReport

__all__ = ["plot_step"]

MIB = 2**20


def plot_step(report: StepReport, path: Path, title: str = "a training step") -> tuple[Path, Path]:
    """Draw the timeline of a step; returns the PNG and the SVG.

    Bars are its moments in order, forwards first: what is outside of plans, what waiting calls hold, and what
    the running call takes. Not to scale in time.

    Args:
        report: The step.
        path: Where to; ends in ``.png``.
        title: What stands above.

    Raises:
        InvalidOptionError: matplotlib is missing, or a file can't be written.
    """
    check_plot(path)
    drawn, (axes,) = canvas()
    moments = report.timeline
    places = range(len(moments))
    parts = (
        ("outside of plans", COLOURS[4], [each.outside_bytes / MIB for each in moments]),
        ("held by waiting calls", COLOURS[0], [sum(each.held_bytes.values()) / MIB for each in moments]),
        ("the running call's", COLOURS[1], [each.own_bytes / MIB for each in moments]),
    )
    below = [0.0] * len(moments)
    for label, colour, sizes in parts:
        axes.bar(places, sizes, width=1.0, bottom=below, color=colour, label=label)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    lines = [("budget", VERMILION, "-", report.budget_bytes)]
    if report.measured_plans_peak_bytes == report.peak_bytes:  # and not with other plans
        lines.append(("measured peak", BLACK, ":", report.measured_peak_bytes))
    for label, colour, style, size in lines:
        if size is not None:
            axes.axhline(size / MIB, color=colour, linestyle=style, label=label)
    first = next((place for place, each in enumerate(moments) if each.is_backward), None)
    if first is not None:
        axes.axvline(first - 0.5, color="grey", linewidth=1)
        axes.annotate("backward", (first - 0.3, axes.get_ylim()[1]), va="top", fontsize="small", color="grey")
    axes.set_xlabel(f"forwards and backwards of {len(report.calls)} calls, and what is between, in order")
    axes.set_ylabel("live (MiB)")
    axes.set_title(title)
    drawn.legend(loc="outside lower center", ncols=3, fontsize="small")
    return write_plot(drawn, path)
