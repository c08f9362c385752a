"""``fxremat paper``: make one of the paper's figures, print it, and write it to files."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from fxremat.errors import InvalidOptionError
from fxremat.paper.figures import Figure, default_sweep, make_figure, stages
from fxremat.paper.plots import check_plot, plot_figure
from fxremat.paper.tables import format_figure

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
        _write(json_path, "")
    with tqdm(total=stages(sweep), file=sys.stderr, disable=None, unit="stage") as bar:

        def begin(stage: str) -> None:
            bar.set_description(stage, refresh=False)
            bar.update()

        figure = make_figure(number, sweep, begin)
    print(format_figure(figure))
    if json_path is not None:
        _write(json_path, _with_command(figure, quick, full))
    if plot_path is not None:
        plot_figure(figure, plot_path)
    return 0


def _with_command(figure: Figure, quick: bool, full: bool) -> str:
    """The figure's JSON, with the command that makes it again."""
    flags = [*(["--quick"] if quick else []), *(["--full"] if full else [])]
    command = shlex.join(["fxremat", "paper", "--figure", str(figure.number), *flags])
    return json.dumps({"command": command, **json.loads(figure.to_json())}, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidOptionError("json", f"{str(path)!r} can't be written: {error.strerror}.") from error
