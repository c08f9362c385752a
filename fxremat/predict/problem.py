"""What every planner takes and gives: a Problem and a Solution.

A planner is a function from a Problem to a Solution. It makes schedules and never touches a graph.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from fxremat.errors import InvalidOptionError, ScheduleError
from fxremat.graph.joint import JointGraph
from fxremat.graph.mirrors import expand_bound
from fxremat.graph.schedule import Binding, Schedule, bind, bind_needed, bind_nodes, pruned, validate
from fxremat.memory.liveness import profile_of
from fxremat.memory.lowering import Lowering
from fxremat.memory.timeline import Timeline, timeline_of
from fxremat.predict.cost import Costs, seconds, seconds_by_step
from fxremat.predict.models import MemoryModel, model

Item = TypeVar("Item")
LEAST = 0  # a budget: the least peak there is
PEAK_AND_SECONDS = operator.attrgetter("peak_bytes", "seconds")
MAX_STEPS_AT_HAND = 1 << 18  # of the latest schedules that were evaluated, together: some 60 MiB


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule with what it is predicted to take.

    Attributes:
        schedule: The execution order.
        peak_bytes: Predicted peak, tangents included, above what the caller holds at the start.
        seconds: Predicted time of the forward and the backward.
        lower_bound_seconds: No schedule at all takes less: every node runs at least once.
        planner: Which planner made it.
        note: What the planner has to say of it, such as what is proved; empty for nothing.
    """

    schedule: Schedule
    peak_bytes: int
    seconds: float
    lower_bound_seconds: float
    planner: str
    note: str = ""

    @property
    def mirror_counts(self) -> dict[str, int]:
        """How often each node runs again; nodes that run once are left out."""
        return self.schedule.mirror_counts

    def to_json(self) -> str:
        """The solution as JSON; ``Solution.from_json`` reads it back."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Solution:
        """Read what ``to_json`` wrote.

        Raises:
            InvalidOptionError: It wrote something else.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "schedule": Schedule(fields["schedule"])})
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidOptionError("text", f"is no solution that to_json wrote: {error!r}.") from error


class _Evaluated(NamedTuple):
    """A solution that was evaluated, and of what."""

    graph: JointGraph
    costs: Costs
    fusion: str
    solution: Solution
    binding: Binding
    lowering: Lowering


@dataclass(frozen=True, eq=False)
class Problem:
    """What a planner has to solve.

    Attributes:
        graph: The joint graph.
        costs: Seconds of its nodes.
        fusion: The name of the memory model: ``"none"``, ``"inplace"`` or ``"inductor"``.
        min_cut_saved: Makes the names of the values that PyTorch's min-cut keeps.
        time_limit_seconds: About how long a search may take; None: as the planner sees fit for the graph's
            size. It is turned into a number of steps, so that a plan does not depend on the machine's load.
        budgets: The bytes that plans are asked for, ``LEAST`` for the least that any takes; None: all that
            may be asked for.
    """

    graph: JointGraph
    costs: Costs
    fusion: str
    min_cut_saved: Callable[[], Sequence[str]] = tuple
    time_limit_seconds: float | None = None
    budgets: tuple[int, ...] | None = None
    _latest: dict[Schedule, _Evaluated] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def model(self) -> MemoryModel:
        """The memory model."""
        return model(self.fusion)

    @functools.cached_property
    def as_usual(self) -> Problem:
        """The problem of what runs where no budget is given."""
        graph = self.model.as_usual(self.graph)
        return self if graph is self.graph else replace(self, graph=graph)

    @property
    def without(self) -> Problem:
        """The problem of what runs without fxremat."""
        return replace(self.as_usual, fusion=self.model.baseline.name)

    @functools.cached_property
    def lower_bound_seconds(self) -> float:
        """Every node once, nothing read or written that fusion could save."""
        nodes = range(self.graph.num_inputs, len(self.graph.nodes))
        return sum(self.model.least_seconds(self.graph, self.costs, node) for node in nodes)

    def evaluate(self, schedule: Sequence[str], planner: str) -> Solution:
        """The solution that a schedule is."""
        return self._evaluate(bind(self.graph, schedule), planner)

    def evaluate_needed(self, schedule: Sequence[str], planner: str) -> Solution:
        """The solution that a schedule is without what nobody reads; see ``prune``."""
        return self._evaluate(bind_needed(self.graph, schedule), planner)

    def evaluate_nodes(self, nodes: Sequence[int], planner: str) -> Solution:
        """The same of nodes by index."""
        return self._evaluate(pruned(self.graph, bind_nodes(self.graph, nodes)), planner)

    def mirror(self, counts: Mapping[str, int], planner: str, early: Sequence[str] = ()) -> Solution:
        """The solution of mirror counts, by Algorithm 2; see ``expand``."""
        return self._evaluate(expand_bound(self.graph, counts, early), planner)

    def _evaluate(self, binding: Binding, planner: str) -> Solution:
        """The solution that a resolved schedule is; its lowering is at hand for a while."""
        schedule = binding.schedule(self.graph)
        known = self._known(schedule)
        if known is not None:
            return replace(known.solution, planner=planner)
        lowering = self.model.lower(self.graph, binding)
        taken = seconds(self.graph, binding, lowering, self.costs)
        peak = profile_of(self.graph, binding, lowering).peak_bytes
        solution = Solution(schedule, peak, taken, min(self.lower_bound_seconds, taken), planner)
        self._latest[schedule] = _Evaluated(self.graph, self.costs, self.fusion, solution, binding, lowering)
        while len(self._latest) > 1 and sum(map(len, self._latest)) > MAX_STEPS_AT_HAND:
            del self._latest[next(iter(self._latest))]
        return solution

    def _known(self, schedule: Schedule) -> _Evaluated | None:
        """The evaluation of this schedule, if it is among the latest and was of a problem like this one."""
        found = self._latest.get(schedule)
        if found is None:
            return None
        is_alike = found.graph is self.graph and found.costs is self.costs and found.fusion == self.fusion
        return found if is_alike else None

    def rest(self) -> None:
        """Give up the lowerings that are at hand, which take many times the memory of the graph."""
        self._latest.clear()

    def lowered(self, solution: Solution) -> tuple[Binding, Lowering]:
        """The schedule of a solution, resolved and lowered; at hand if it is among the latest evaluated."""
        known = self._known(solution.schedule)
        if known is not None:
            return known.binding, known.lowering
        binding = bind(self.graph, solution.schedule)
        return binding, self.model.lower(self.graph, binding)

    def timeline(self, solution: Solution) -> Timeline:
        """What is live when under a solution; its highest bytes are the solution's peak."""
        binding, lowering = self.lowered(solution)
        spent = seconds_by_step(self.graph, binding, lowering, self.costs)
        return timeline_of(self.graph, binding, lowering, spent)

    def check(self, solution: Solution) -> Solution:
        """The same solution, its schedule found valid and obedient; ScheduleError otherwise."""
        name = self._disobedient(validate(self.graph, solution.schedule))
        if name is not None:
            source = self.graph.source(name)
            problem = f"its region or checkpoint policy orders otherwise ({source})"
            raise ScheduleError(name, None, problem)
        return solution

    def allows(self, schedule: Sequence[str]) -> bool:
        """Whether a schedule obeys what the user ordered (``fxremat.region``)."""
        return not self._has_orders or self._disobedient(bind(self.graph, schedule)) is None

    @functools.cached_property
    def _has_orders(self) -> bool:
        return any(node.at_least or node.at_most is not None for node in self.graph.nodes)

    def identity(self, planner: str) -> Solution:
        """Every node once, in the graph's order, but for what the user ordered."""
        return self.mirror({}, planner)

    def _disobedient(self, binding: Binding) -> str | None:
        """The first node whose order the schedule breaks."""
        nodes = [self.graph.nodes[node] for node in binding.nodes]
        runs = Counter(binding.nodes)
        for step, reads in enumerate(binding.reads):
            node = nodes[step]
            if node.at_most is not None and runs[binding.nodes[step]] > node.at_most + 1:
                return node.name
            for read in reads if step >= binding.boundary else ():
                if read is not None and not binding.is_mirror[read] and nodes[read].at_least > 0:
                    return nodes[read].name
        return None


def progress(items: Iterable[Item], title: str) -> Iterable[Item]:
    """The items, with a bar on a terminal once they have taken a second."""
    bar: Iterable[Item] = tqdm(items, title, disable=None, leave=False, delay=1.0)
    return bar


def margin(problem: Problem) -> float:
    """The part of a budget that is left free because the memory model is not exact."""
    return problem.model.margin(problem.graph)


def pareto(
    items: Iterable[Item], bytes_and_seconds: Callable[[Item], tuple[float, float]] = PEAK_AND_SECONDS
) -> list[Item]:
    """Those that no other beats in both bytes and seconds: bytes strictly falling, seconds strictly rising.

    Args:
        items: Solutions, plans, or whatever takes memory and time; of equals the first counts.
        bytes_and_seconds: What an item takes; its ``peak_bytes`` and ``seconds`` by default.
    """
    best: list[Item] = []
    least = math.inf
    for item in sorted(items, key=bytes_and_seconds):
        _, seconds = bytes_and_seconds(item)
        if not best or seconds < least:
            best.append(item)
            least = seconds
    return best[::-1]
