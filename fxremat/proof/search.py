"""The whole frontier of a small graph, proved: the least time for each peak, the order of all nodes free.

A state of an execution is a pair of sets: the values that are live, and the operators that have run
(``moves.py``). Every operator may be next whose operands are live. Where its results do not fit, values are
dropped before it, in every way that drops no more than is necessary: what needs not be dropped now may be
dropped later. A* (Hart, Nilsson and Raphael 1968) finds the least time within a budget. Three things keep
the states few:

1. Values that nothing can read any more are not part of a state.
2. A state is dominated by one with the same runs, all of its values, and no more seconds.
3. The bound on the seconds that are left: every operator that has not run, and every one that must run again
   for its value is needed and not live, and so on through the operands of those.

The peak of the plan within a budget, less a byte, is the next budget, until none fits. Seconds are added as
whole numbers of a unit that divides them all, so that equal sums are equal, and among equals fewer runs win.
Every run then has its price, so the best schedule reads each value that it makes: what nothing has read yet
is not dropped (but where a first run allocates more than a mirror, and so has a use of its own, or makes the
state that a mirror may draw random numbers from).

Exponential in operators, so the states are bounded, and a graph that takes more is refused. Left out: results
in place and fused kernels, whose memory is not one of sets, and what ``moves.py`` leaves out.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fxremat.errors import InvalidOptionError
from fxremat.graph.nodes import Phase, boundary_of
from fxremat.graph.schedule import Schedule, bind, validate
from fxremat.predict.problem import Problem, Solution
from fxremat.proof.moves import Move, Moves, moves
from fxremat.proof.sets import bits, enough, indices, union

MAX_OPERATORS = 40  # beyond this no search is begun: none that large was seen to end
MAX_STATES = 40_000  # of all searches together, a few milliseconds each; bounds the planner's time
RUN = 1 << 32  # a unit of time in units of runs: of two plans that take the same time, that of fewer runs


def plan(problem: Problem, max_states: int = MAX_STATES) -> tuple[Solution, ...]:
    """All solutions that no schedule beats in both peak and time, by falling peak.

    Raises:
        TooLargeError: The graph is too large to be searched.
        InvalidOptionError: Its memory is not that of graphs that run as they are, or it has odd orders.
    """
    if problem.model.on(problem.graph).overwrites:
        raise InvalidOptionError(
            "planner",
            f"'exact' plans graphs that run as they are, not fusion={problem.fusion!r}: take fusion='none', "
            f"or compiler='eager' with inplace=False; or take planner='auto'.",
        )
    search = AStar(problem, moves(problem), max_states)
    found: list[Solution] = []
    units: list[int] = []
    budget = search.everything_bytes
    while (label := search.run(budget)) is not None:
        solution = problem.evaluate(search.schedule(label), "exact")
        assert solution.peak_bytes <= budget  # what the search counts is what the memory model does
        if units and label.units // RUN == units[-1]:
            del found[-1], units[-1]
        found.append(solution)
        units.append(label.units // RUN)
        budget = solution.peak_bytes - 1
    return tuple(found)


@dataclass(slots=True, eq=False)
class _Label:
    """A way to a state: what it took, and the last move with what it left alone."""

    live: int
    ran: int
    units: int
    peak_bytes: int
    unread: int
    parent: _Label | None = None
    operator: int = -1
    stays: int = 0
    is_dominated: bool = False


class AStar:
    """A* over pairs (live values, runs)."""

    def __init__(self, problem: Problem, moves: Moves, max_states: int) -> None:
        if len(moves.operators) > MAX_OPERATORS:
            count = len(moves.operators)
            raise TooLargeError(f"this graph has {count} operators, and {MAX_OPERATORS} are the most")
        self.graph = problem.graph
        self.moves = moves
        self.max_states = max_states
        self.operators = moves.operators
        self.units = _units([operator.seconds for operator in moves.operators])
        self.producer = {
            v: i for i, each in enumerate(self.operators) for v in indices(each.makes | each.remakes)
        }
        self.alone = _union_alone(self.operators)
        self.twins = [1 << value | twin for value, twin in enumerate(moves.twin) if twin]
        self.useful = functools.cache(self._useful)
        self.missing = functools.cache(self._missing)
        self.bytes = functools.cache(self._bytes)
        self.everything_bytes = problem.graph.tangent_bytes + sum(
            2 * sum(operator.allocates_bytes) for operator in self.operators
        )
        self.least_bytes_behind = self.bytes(moves.outputs) + problem.graph.tangent_bytes
        self.least_bytes = self._least_peak_of_one_step()
        self.states = 0

    # -- the searches

    def run(self, budget: int) -> _Label | None:
        """The fastest execution whose peak is at most so many bytes; None if there is none."""
        start = _Label(0, 0, 0, 0, 0)
        labels: dict[int, list[_Label]] = {0: [start]}
        if budget < self.least_bytes:
            return None
        heap: list[tuple[float, int, int, int, _Label]] = [(0, 0, 0, 0, start)]
        count = 0
        while heap:
            label = heapq.heappop(heap)[-1]
            if label.is_dominated:
                continue
            has_run = label.ran & self.moves.all_runs == self.moves.all_runs
            if has_run and self._lives(self.moves.outputs, label.live):
                return label
            for after in self._moves(label, budget):
                bound = self._bound(after)
                if bound == math.inf or not _enter(labels.setdefault(after.ran, []), after):
                    continue
                count += 1
                progress = -(after.ran & self.moves.all_runs).bit_count()
                heapq.heappush(heap, (after.units + bound, progress, after.peak_bytes, count, after))
            self.states += 1
            if self.states > self.max_states:
                raise TooLargeError(f"it gave up after {self.max_states:,} states")
        return None

    def _lives(self, values: int, live: int) -> bool:
        """Whether values are live, of twins either."""
        missing = values & ~live
        return not missing or all(self.moves.twin[value] & live for value in indices(missing))

    # -- moves

    def _moves(self, label: _Label, budget: int) -> Iterator[_Label]:
        """What may run next, and the state behind it."""
        live, ran = label.live, label.ran
        behind = self._is_behind(ran)
        pinned = self._pinned(live) if behind else 0
        room = budget - (self.graph.tangent_bytes if behind else 0)
        outputs = self.moves.forward_outputs
        for index, operator in enumerate(self.operators):
            is_first = not ran & operator.runs[0]
            if not _may_run(operator, live, ran, behind):
                continue
            made = operator.makes if is_first else operator.remakes
            next_ran = ran | _next_run(operator, ran)
            ends_forward = not behind and self._is_behind(next_ran)
            if ends_forward and self._has_trailing_views(operator) and budget < self.least_bytes_behind:
                continue
            useful = self.useful(next_ran)
            if not is_first and not made & useful & ~live:
                continue
            read = self._read(operator, live, behind) | (0 if is_first else operator.restores)
            held = read | pinned | (label.unread & self.alone)
            allocated = operator.allocates_bytes[not is_first]
            again = 0 if is_first else made | operator.replaces
            replaced = self._replaced(live, again, pinned)
            size = self.bytes(live & ~replaced) + allocated
            for dropped in self._drops(live & ~held & ~replaced, size - room):
                left = live & ~dropped
                left &= ~self._replaced(left, again, pinned)
                after = (left | made) & useful
                if not is_first and not after & ~live:
                    continue
                if ends_forward and not self._lives(outputs, after):
                    continue
                peak = max(label.peak_bytes, self.bytes(left) + allocated + budget - room)
                taken = label.units + self.units[index]
                unread = (label.unread & ~read | made) & after
                yield _Label(after, next_ran, taken, peak, unread, label, index, left & again)

    def _is_behind(self, ran: int) -> bool:
        return ran & self.moves.forward_runs == self.moves.forward_runs

    def _has_trailing_views(self, operator: Move) -> bool:
        """Whether free views follow its outputs: they run behind the boundary if it ends the forward."""
        nodes = map(self.graph.nodes.__getitem__, operator.members[1:])
        return any(node.phase is Phase.DEFERRED and node.leader is None for node in nodes)

    def _pinned(self, live: int) -> int:
        """Behind the boundary: the forward outputs, of twins the first if it is there."""
        outputs = self.moves.forward_outputs
        missing = outputs & ~live
        return outputs & live | union(self.moves.twin[value] for value in indices(missing))

    def _read(self, operator: Move, live: int, behind: bool) -> int:
        """The live values that an operator reads."""
        found = operator.reads[behind]
        for pair in operator.either[behind]:
            both = pair & live
            found |= both if both & (both - 1) == 0 else 0  # of two the first is a forward output, and held
        return found

    def _replaced(self, live: int, made: int, pinned: int) -> int:
        """The live values that a mirror makes anew and nothing else holds."""
        found = 0
        for value in indices(made & live & ~pinned):
            if not self.moves.holders[value] & live:
                found |= 1 << value
        return found

    def _drops(self, droppable: int, needed_bytes: int) -> Iterator[int]:
        """What may be dropped to free so many bytes: as little as will do, along with the views of it."""
        for dropped in enough(droppable, self.moves.value_bytes, needed_bytes):
            yield dropped | union(self.moves.holders[value] for value in indices(dropped))

    def _bytes(self, live: int) -> int:
        return sum(self.moves.value_bytes[value] for value in indices(live))

    # -- what can and what must still happen

    def _useful(self, ran: int) -> int:
        """The values that something may read when these runs are done."""
        found = self._with_twins(self.moves.outputs)
        behind = self._is_behind(ran)
        waiting = list(self.operators)
        while True:
            running = [each for each in waiting if not ran & each.runs[0]]
            running += [each for each in waiting if each.remakes & found and _may_repeat(each, ran)]
            if not running:
                return found
            waiting = [each for each in waiting if each not in running]
            for each in running:
                found |= each.restores
                for place in (True,) if behind or each.is_backward else (False, True):
                    found |= each.reads[place] | union(each.either[place])

    def _with_twins(self, values: int) -> int:
        return values | union(self.moves.twin[value] for value in indices(values))

    def _missing(self, ran: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """What the operators that have not run need of those that have: values, pairs; and who they are."""
        behind = self._is_behind(ran)
        waiting = tuple(i for i, each in enumerate(self.operators) if not ran & each.runs[0])
        made = union(self.operators[index].makes for index in waiting)
        twins = [pair for pair in self.twins if pair & self.moves.outputs]
        values = self.moves.outputs & ~union(twins)
        pairs = dict.fromkeys(twins)
        for index in waiting:
            place = behind or self.operators[index].is_backward
            values |= self.operators[index].reads[place]
            pairs.update(dict.fromkeys(self.operators[index].either[place]))
        return values & ~made, tuple(pair for pair in pairs if not pair & made), waiting

    def _bound(self, label: _Label) -> float:
        """No execution takes less from this state to the end; infinite where none gets there."""
        live, ran = label.live, label.ran
        values, pairs, waiting = self.missing(ran)
        behind = self._is_behind(ran)
        total = sum(self.units[index] for index in waiting)
        stack = _absent(values, pairs, live)
        seen = bits(waiting)
        while stack:
            wanted = stack.pop()
            index = self.producer[wanted.bit_length() - 1]
            operator = self.operators[index]
            if ran & operator.runs[0] and not (wanted & operator.remakes and _may_repeat(operator, ran)):
                return math.inf
            if not seen >> index & 1:
                seen |= 1 << index
                total += self.units[index]
                needed = operator.reads[behind] | operator.restores  # it has run, or would have been seen
                stack += _absent(needed, operator.either[behind], live)
        return total

    def _least_peak_of_one_step(self) -> int:
        """The most bytes that an operator and what it reads take by themselves, or all outputs at the end."""
        found = self.least_bytes_behind if self._views_end() else self.bytes(self.moves.outputs)
        for operator in self.operators:
            behind = operator.is_backward
            held = operator.reads[behind]
            if behind:
                held |= self.moves.forward_outputs & ~union(self.twins)
            size = self.bytes(held) + operator.allocates_bytes[0]
            found = max(found, size + (self.graph.tangent_bytes if behind else 0))
        return found

    def _views_end(self) -> bool:
        """Whether free views of inputs or tangents run behind the boundary in every schedule."""
        early = [self.graph.nodes[index] for index in self.moves.early]
        return bool(self.moves.late) or (self._is_behind(0) and boundary_of(early) < len(early))

    # -- back to a schedule

    def schedule(self, label: _Label) -> Schedule:
        """The schedule that leads to a state, without runs of views and outputs that nobody reads."""
        path: list[_Label] = []
        at: _Label | None = label
        while at is not None:
            path.append(at)
            at = at.parent
        order = list(self.moves.early)
        if self._is_behind(0):
            order += self.moves.late
        for before, after in zip(path[::-1], path[-2::-1], strict=False):
            order += self._members(before, after)
            if not self._is_behind(before.ran) and self._is_behind(after.ran):
                order += self.moves.late
        return self._without_idle(order)

    def _members(self, before: _Label, after: _Label) -> Iterable[int]:
        """The nodes that a move runs: the operator, and its outputs and views that are made anew."""
        operator = self.operators[after.operator]
        if not before.ran & operator.runs[0]:
            return operator.members
        not_again = operator.makes & ~(operator.remakes | operator.replaces)
        masks, nodes = self.moves.masks, self.graph.nodes

        def runs_again(member: int) -> bool:
            stays = after.stays & ~(operator.replaces if nodes[member].at_least else 0)
            return not masks[member] & (not_again | stays)

        first, *others = operator.members
        return (first, *filter(runs_again, others))

    def _without_idle(self, order: Sequence[int]) -> Schedule:
        """The nodes' names, without occurrences whose value nobody reads and that need not be there."""
        nodes = self.graph.nodes
        binding = bind(self.graph, [nodes[index].name for index in order])
        left = Counter(order)
        needed = [False] * len(order)
        for step in binding.outputs:
            needed[step] = True
        for step in reversed(range(len(order))):
            node = nodes[order[step]]
            has_mark = node.phase is Phase.FORWARD or node.ordered or node.creates != node.recreates
            is_first = has_mark and not binding.is_mirror[step]  # another first run would change something
            if not (needed[step] or is_first or left[order[step]] == 1):
                left[order[step]] -= 1
                continue
            needed[step] = True
            for read in binding.reads[step]:
                if read is not None:
                    needed[read] = True
        schedule = Schedule(itertools.compress((nodes[index].name for index in order), needed))
        validate(self.graph, schedule)
        return schedule


def _may_run(operator: Move, live: int, ran: int, behind: bool) -> bool:
    """Whether an operator's turn may be now, as far as bytes are not asked for."""
    if operator.reads[behind] & ~live or any(not pair & live for pair in operator.either[behind]):
        return False
    if ran & operator.runs[0]:
        return _may_repeat(operator, ran) and not operator.restores & ~live
    return not operator.after & ~ran and (behind or not operator.is_backward)


def _may_repeat(operator: Move, ran: int) -> bool:
    """Whether an operator that has run may run again, now or later."""
    if not operator.remakes:
        return False
    return not operator.is_limited or any(not ran & run for run in operator.runs)


def _next_run(operator: Move, ran: int) -> int:
    return next((run for run in operator.runs if not ran & run), operator.runs[-1])


def _absent(values: int, pairs: Iterable[int], live: int) -> list[int]:
    """Each value that is not live, and each pair of which none is."""
    return [1 << value for value in indices(values & ~live)] + [pair for pair in pairs if not pair & live]


def _enter(labels: list[_Label], new: _Label) -> bool:
    """Add a label unless one dominates it; whether it was added. Those that it dominates leave."""
    for label in labels:
        if label.units <= new.units and not new.live & ~label.live:
            return False
    for label in labels:
        label.is_dominated = label.units >= new.units and not label.live & ~new.live
    labels[:] = [label for label in labels if not label.is_dominated]
    labels.append(new)
    return True


def _union_alone(operators: Sequence[Move]) -> int:
    """The values that are all that their operator makes, as many bytes each time, and that must be read."""
    found = union(
        each.makes
        for each in operators
        if each.makes.bit_count() == 1 and len(set(each.allocates_bytes)) == 1
    )
    return found & ~union(each.restores for each in operators)


def _units(seconds: Iterable[float]) -> list[int]:
    """The seconds as whole numbers of a unit that divides them all."""
    exact = [Fraction(each) for each in seconds]
    unit = math.lcm(*(each.denominator for each in exact))
    return [int(each * unit) * RUN + 1 for each in exact]


class TooLargeError(InvalidOptionError):
    """A graph is too large to be searched."""

    def __init__(self, problem: str) -> None:
        super().__init__("planner", f"'exact' proves plans of small graphs; {problem}. Take 'auto'.")
