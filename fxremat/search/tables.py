"""Plans of least time for all memory sizes at once, by a dynamic programme over blocks.

The forward is cut into blocks (``blocks.py``), whose options are weighed by themselves (``shapes.py``). The
dynamic programme over them (``table.py``) knows the least time for every memory size. It is solved for finer
and coarser blocks, and with finer and coarser units of bytes; every plan is measured exactly, and those are
returned that no other beats. Where a graph has more blocks than a table of all sizes can tell apart, one of
a few small sizes still can; that is where fine blocks count, for the least peaks need them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fxremat.predict.problem import pareto
from fxremat.search.blocks import Division, cuts, divide, narrowest
from fxremat.search.condensed import Condensed
from fxremat.search.profile import Plan
from fxremat.search.shapes import Shape
from fxremat.search.table import Intervals, Table

SLOTS = 320  # memory sizes that are told apart, unless a few more make all bytes whole numbers of them
EXACT_SLOTS = 1200
FINER = 6  # a second table serves budgets below this part of the first one's, for which its units are coarse
MAX_WORK = 8e6  # additions in a table; bounds the planner's time
COARSER = 8  # how much less work the coarser blocks make
REACH = 1.5  # still finer blocks serve so many times the size that plans of fewer blocks take at least
FEW_SLOTS = 48  # memory sizes that are told apart there
MAX_FINE_WORK = 2e8  # additions in the table of the finest blocks, calls included
CALL_WORK = 20_000  # additions that take as long as the calls for one sequence of shapes
POINTS = 24  # plans between the least and the most that plans can use


def spread(tables: Sequence[Table]) -> list[Plan]:
    """About ``POINTS`` plans between the least and the most that plans can use, by falling peak, rising time.

    All plans of a table of few sizes are among them if it rounds nothing.
    """
    found = [tables[table].plan(size) for table, size in _spread(tables)]
    for table in tables:
        is_small = table.slots <= FEW_SLOTS and table.unit == _divisor(table.blocks)
        found += map(table.plan, table.steps if is_small else table.steps[:1])
    return pareto(found)


def fitting(tables: Sequence[Table], budget: int) -> list[Plan]:
    """The fastest plan of each table that fits a budget."""
    return [plan for table in tables for plan in table.fitting(budget)]


def _spread(tables: Sequence[Table]) -> list[tuple[int, int]]:
    """Tables and sizes whose plans lie evenly on the best curve of log seconds over log bytes."""
    points = [(*point, number) for number, table in enumerate(tables) for point in table.curve()]
    best = pareto(points, operator.itemgetter(0, 1))[::-1]
    places: Sequence[int] = range(len(best))
    if len(best) > POINTS:
        steps = [np.diff(np.log(np.maximum([point[axis] for point in best], 1e-12))) for axis in (0, 1)]
        way = np.hypot(*(step / abs(step.sum()) for step in steps)).cumsum()
        near = np.searchsorted(way, np.linspace(0.0, way[-1], POINTS)).tolist()
        places = sorted({0, len(best) - 1, *near})
    return [(best[place][3], best[place][2]) for place in places]


def solve(condensed: Condensed) -> list[Table]:
    """Tables of finer and coarser blocks, each for all sizes and, if those are rounded, for small ones."""
    tables: list[Table] = []
    if condensed.boundary == 0:
        return tables
    every = cuts(condensed)

    @functools.cache
    def divided(stride: int) -> Division:
        return divide(condensed, narrowest(every, stride))

    for blocks in _granularities(divided, len(every)):
        most = _keep_all_bytes(blocks)
        unit, slots = _unit(blocks, most)
        tables.append(Table(blocks, unit, slots))
        if unit > _divisor(blocks):
            tables.append(Table(blocks, *_unit(blocks, most // FINER)))
    if len(every) + 1 > tables[0].count:
        tables += _finest(divided, tables)
    return tables


def _granularities(divided: Callable[[int], Division], count: int) -> list[Division]:
    """The graph in blocks: so many of the narrow cuts used that the table stays small, and far fewer."""
    found: list[Division] = []
    for work in (MAX_WORK, MAX_WORK / COARSER):
        most = max(1, math.isqrt(2 * int(work) // SLOTS))  # blocks in a table, even if all are of one shape
        for blocks in _finer_to_coarser(divided, count // most):
            if _work(blocks.kinds, SLOTS, 0, work) <= work:
                break
        if not found or len(blocks.kinds) < len(found[-1].kinds):
            found.append(blocks)
    return found


def _finer_to_coarser(divided: Callable[[int], Division], least: int = 1) -> Iterator[Division]:
    """The graph in fewer and fewer blocks, at last in one.

    Args:
        divided: Makes blocks of every so many cuts.
        least: The fewest cuts in a block that are tried.
    """
    stride = 1
    while True:
        if stride >= least:
            blocks = divided(stride)
            yield blocks
            if len(blocks.kinds) == 1:
                return
        stride += 1 + stride // 4


def _finest(divided: Callable[[int], Division], tables: Sequence[Table]) -> Iterator[Table]:
    """A table of more blocks than the others', for what those serve with their least sizes and for less."""
    most = math.ceil(REACH * min((table.unit * table.steps[0] for table in tables if table.steps), default=0))
    for blocks in _finer_to_coarser(divided):
        if not most or len(blocks.kinds) <= tables[0].count:
            return
        if (
            _work(blocks.kinds, 1, CALL_WORK, MAX_FINE_WORK) > MAX_FINE_WORK
        ):  # so that no shapes need be analysed
            continue
        slots = min(FEW_SLOTS, most // _divisor(blocks) + 1)
        if _work(blocks.kinds, slots, CALL_WORK, MAX_FINE_WORK) <= MAX_FINE_WORK:
            yield Table(blocks, *_unit(blocks, most, FEW_SLOTS, FEW_SLOTS))
            return


def _work(kinds: Sequence[int], slots: int, each: int, limit: float) -> int:
    """The additions in a table and ``each`` for a distinct sequence of shapes, at least up to a limit."""
    total, ids = 0, Intervals(kinds)
    for length in range(1, len(kinds) + 1):
        total += (length * slots + each) * len(ids.distinct(length))
        if total > limit:
            break
    return total


def _keep_all_bytes(blocks: Division) -> int:
    """What is free at the end, at most, if a plan recomputes nothing from some block on."""
    need = grown = most = 0
    for kind in reversed(blocks.kinds):
        shape = blocks.shapes[kind]
        option = shape.options[-1]
        need = max(need + option.kept_bytes, option.forward_bytes, option.backward_bytes + grown)
        grown += shape.grown_bytes
        most = max(most, need - grown)
    return most


def _sizes(blocks: Division) -> npt.NDArray[np.int64]:
    """All bytes that are rounded, each as often as it counts."""
    of_shapes = [_rounded(shape) for shape in blocks.shapes]
    return np.array([size for kind in blocks.kinds for size in of_shapes[kind] if size], dtype=np.int64)


def _rounded(shape: Shape) -> list[int]:
    """The bytes of a shape that are rounded."""
    found = [size for size, _ in shape.leaving]
    found += [abs(shape.grown_bytes), shape.advance.forward_bytes, shape.alone.backward_bytes]
    for option in shape.options:
        found += [option.kept_bytes, option.forward_bytes, option.backward_bytes]
    return found


def _divisor(blocks: Division) -> int:
    return math.gcd(*(size for shape in blocks.shapes for size in _rounded(shape))) or 1


def _unit(
    blocks: Division, most: int, slots: int = SLOTS, exact_slots: int = EXACT_SLOTS
) -> tuple[float, int]:
    """Bytes of a slot and their number: those between half of ``slots`` and ``slots`` that round best."""
    divisor = _divisor(blocks)
    if most <= divisor * exact_slots:
        return divisor, most // divisor + 1
    sizes = _sizes(blocks)
    sizes = sizes[sizes <= most]
    coarsest = 2 * most / slots
    large = sizes[sizes >= coarsest / 2]
    common = np.unique(large, return_counts=True)
    wholes = common[0][np.argsort(-common[1], kind="stable")[:8]]
    parts = [size / count for size in wholes for count in range(1, 65)]
    tried = [*parts, *np.linspace(coarsest / 2, coarsest, 64)]
    tried = [float(unit) for unit in tried if coarsest / 2 <= unit <= coarsest]
    errors = [np.abs(np.rint(sizes / unit) * unit - sizes).sum() for unit in tried]
    unit = tried[int(np.argmin(errors))]
    return unit, int(most / unit) + 1
