"""``fxremat paper``: make one of the paper's figures, print it, and write it to files."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from fxremat.errors import InvalidOptionError
from fxremat.paper.figures import default_sweep, make_figure, stages
from fxremat.paper.plots import plot_figure
from fxremat.paper.tables import format_figure
from fxremat.plots.canvas import check_plot

__all__ = ["main"]


def main(
    number: int,
    *,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    quick: bool = False,
    full: bool = False,
    device: str | None = None,
) -> int:
    """Make a figure, print its tables, write its files; the result is the exit status.

    Raises:
        InvalidOptionError: There is no such figure, a file can't be written, or matplotlib is missing.
            It is raised before anything is planned.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    sweep = default_sweep(number, quick=quick, full=full, device=device)
    if plot_path is not None:
        check_plot(plot_path)
    if json_path is not None:
        _write(json_path, "", mode="a")  # an earlier result stays until the new one is there
    start = time.perf_counter()
    with tqdm(total=stages(sweep), file=sys.stderr, disable=None, unit="stage") as bar:

        def begin(stage: str) -> None:
            bar.set_description(stage, refresh=False)
            bar.update()

        figure = make_figure(number, sweep, begin)
    print(format_figure(figure))
    if json_path is not None:
        header = {
            "command": _command(number, quick, full),
            "wall_seconds": time.perf_counter() - start,
            "host_peak_bytes": _host_peak_bytes(),
        }
        _write(json_path, json.dumps({**header, **json.loads(figure.to_json())}, indent=1) + "\n")
    if plot_path is not None:
        plot_figure(figure, plot_path)
    return 0


def _command(number: int, quick: bool, full: bool) -> str:
    """What makes the figure again."""
    flags = [*(["--quick"] if quick else []), *(["--full"] if full else [])]
    return shlex.join(["fxremat", "paper", "--figure", str(number), *flags])


def _host_peak_bytes() -> int | None:
    """The most memory that this process has held, where the system tells."""
    if sys.platform == "win32":
        return None
    import resource

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024  # Linux counts in KiB


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidOptionError("json", f"{str(path)!r} can't be written: {error.strerror}.") from error
