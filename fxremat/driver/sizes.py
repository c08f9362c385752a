"""Sizes: a graph with symbolic sizes has a Runner for each of a few sizes.

A plan takes what it was planned for at most where sizes are no larger.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from fxremat._torch import compilers, graphs
from fxremat.driver.runner import Runner
from fxremat.errors import InfeasibleBudgetError
from fxremat.report.report import Report


class AnySizes:
    """A graph with symbolic sizes, planned for a few of them; each call runs what is planned for no less.

    Under a budget that is no number of bytes the first plans serve all sizes. Else, where sizes grow beyond
    all that is planned for, the next are planned that are larger by a part, so that sizes which creep up do
    not mean a compilation each; the very sizes, if no plan fits larger ones.

    Attributes:
        runners: By their sizes, the smaller first.
    """

    def __init__(self, origin: compilers.Origin, first: Runner) -> None:
        self._origin = origin
        self._symbols = origin.symbols
        traced = tuple(graphs.hint(origin.inputs[place]) or 0 for place in self._symbols)
        self.runners = {traced: first}

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph with what is planned for inputs as large as these."""
        sizes = tuple(int(inputs[place]) for place in self._symbols)
        for planned, runner in self.runners.items():
            if not runner.has_limit or all(map(operator.le, sizes, planned)):
                return runner.call(inputs, math.prod(planned) / max(1, math.prod(sizes)))
        self._plan_for_larger(sizes)
        return self(*inputs)

    def _plan_for_larger(self, sizes: tuple[int, ...]) -> None:
        for each in (tuple(map(_rounded_up, sizes)), sizes):
            named = dict(zip(self._symbols.values(), each, strict=True))
            runner = next(iter(self.runners.values())).resized(named)
            try:
                with self._origin.resumed():
                    runner.compile_first()
            except InfeasibleBudgetError:
                if each == sizes:
                    raise
                continue
            self.runners[each] = runner
            break
        self.runners = dict(sorted(self.runners.items(), key=lambda each: math.prod(each[0])))

    @property
    def reports(self) -> list[Report]:
        """The reports of its compiled plans."""
        return [report for each in self.runners.values() for report in each.reports]

    @property
    def fallbacks(self) -> list[str]:
        """Why PyTorch's partitioner took over, each time."""
        return [reason for each in self.runners.values() for reason in each.fallbacks]


def _rounded_up(size: int) -> int:
    """The next size of four in each octave.

    >>> [_rounded_up(size) for size in (1, 5, 100, 128, 129)]
    [1, 5, 107, 128, 152]
    """
    return max(size, math.floor(2 ** (math.ceil(4 * math.log2(max(1, size))) / 4)))
