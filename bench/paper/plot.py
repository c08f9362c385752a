"""Draw the figures of results again from their JSON, without planning or measuring anything.

python bench/paper/plot.py bench/results/figure5.json docs/images/figure5.png
"""

from __future__ import annotations

import argparse
import pathlib

from fxremat.paper.figures import Figure
from fxremat.paper.plots import plot_figure
from fxremat.paper.tables import format_figure


def main() -> None:
    """Print the tables of a result and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=pathlib.Path, help="what fxremat paper --json wrote")
    parser.add_argument("plot", type=pathlib.Path, help="FILE.png; FILE.svg is written beside it")
    arguments = parser.parse_args()
    figure = Figure.from_json(arguments.result.read_text(encoding="utf-8"))
    print(format_figure(figure))
    plot_figure(figure, arguments.plot)


if __name__ == "__main__":
    main()
