"""Where plots come from: matplotlib, an optional dependency, used without a display.

A plot is written twice, as PNG and as SVG; the same data give the same SVG. The colours are those of Okabe
and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fxremat.errors import InvalidOptionError

__all__ = ["BLACK", "COLOURS", "VERMILION", "canvas", "check_plot", "write_plot"]

BLACK = "#000000"
VERMILION = "#D55E00"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
"""The others, from dark to light as they take turns; yellow is left out, too light for a thin line."""


def check_plot(path: Path) -> None:
    """Raise InvalidOptionError unless a plot can be drawn and written there."""
    if find_spec("matplotlib") is None:
        raise InvalidOptionError(
            "plot", "matplotlib is not installed. Install it with: pip install 'fxremat[plot]'."
        )
    if path.suffix != ".png":
        raise InvalidOptionError("plot", f"got {str(path)!r}, expected a name that ends in .png.")
    if not path.absolute().parent.is_dir():
        raise InvalidOptionError("plot", f"{str(path.parent)!r} is no directory.")


def canvas(panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure with so many panels side by side, and their axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if panels == 1 else 10, 4.8), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def write_plot(figure: Any, path: Path) -> tuple[Path, Path]:
    """Write a figure as PNG, and as SVG beside it; returns both paths.

    Raises:
        InvalidOptionError: A file can't be written.
    """
    import matplotlib

    vector = path.with_suffix(".svg")
    try:
        figure.savefig(path, dpi=144)
        with matplotlib.rc_context({"svg.hashsalt": "fxremat"}):  # or else ids would be random
            figure.savefig(vector, metadata={"Date": None})
    except OSError as error:
        raise InvalidOptionError("plot", f"{str(path)!r} can't be written: {error.strerror}.") from error
    return path, vector
