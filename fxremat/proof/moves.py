"""Moves: a joint graph as operators over sets of values, which is what a search over schedules needs.

Terms:
    value: what may be live: a storage, or what a node without a storage computes. Sets of values, and sets
        of runs, are bits of an integer.
    operator: a node with the ``getitem`` that follow it and the free views of what it makes. A *free* view
        takes no time, may run whenever its value is live and is not what ends the forward; it runs behind
        each run of its operator.
    view operator: any other view. It has a value of its own, without bytes, that holds the storage.
    twins: two values for one storage that the user orders to be computed again: what the first run makes,
        and what a mirror makes. Behind the boundary the nodes of that order read the second one.

That one instance of a storage is enough is why a state is a set of values. Let an operator run again while
an instance of its storage is live. If what reads the older one behind that step reads the newer one
instead, the older one dies before the step and no step has more live bytes. Three things stay with the
older one: forward outputs behind the boundary, view operators, and outputs that may not be picked again.
For these the newer one is a transient of its step: as long as the older one is live nothing needs another,
but that of an ordered value, which is a twin. A mirror of an operator with several outputs therefore makes
all of them again, in place of those that are live, and what nobody will read dies at once.

This is another contraction than that of ``search/condensed.py``, which weighs plans. There a view is free
wherever it holds no memory of its own, and is put into a plan afterwards where it is needed. A proof cannot
leave that open. Where a view is what ends the forward, may not run again, or is ordered otherwise than its
operator, whether it has run and which instance it holds are part of a state, and decide what may run next. So
here a view is free only if running it behind its operator allows all that running it elsewhere does. With
this rule the search would have more operators, and with the other one the proof would miss schedules. Here
there are sets of values besides, and twins, which a plan that keeps nearly to one order has no use for; there
inlined nodes and results in place, whose bytes are not a sum over a set.

Left out: schedules in which an output of an operator is not picked behind the operator's first run, but
behind a mirror for the first time. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxremat.errors import InvalidOptionError
from fxremat.graph.nodes import Phase
from fxremat.memory.liveness import mirror_scratch_bytes
from fxremat.predict.problem import Problem
from fxremat.proof.sets import bits, indices, union


@dataclass(frozen=True, slots=True)
class Move:
    """What one operator needs and makes.

    Attributes:
        members: The operator and what follows each of its runs, in order.
        reads: Values that must be live, before and behind the boundary.
        restores: Values that must be live for a mirror besides: the state that it draws random numbers from.
        either: Sets of which one value must be live, before and behind the boundary.
        makes: Values of the first run.
        remakes: Values of a mirror.
        replaces: For each value of a mirror that is a twin, the set of the first run's.
        allocates_bytes: What a first run and a mirror allocate, scratch memory included.
        seconds: Of each run.
        runs: The bits that its runs set in the set of runs, one after the other; the last one is set again
            and again where mirrors are not limited.
        is_limited: Whether it may run no more often than it has bits.
        after: First runs that must stand before its own: both have effects, or draw random numbers.
        is_backward: Whether it runs behind the boundary only.
    """

    members: tuple[int, ...]
    reads: tuple[int, int]
    restores: int
    either: tuple[tuple[int, ...], tuple[int, ...]]
    makes: int
    remakes: int
    replaces: int
    allocates_bytes: tuple[int, int]
    seconds: float
    runs: tuple[int, ...]
    is_limited: bool
    after: int
    is_backward: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """All operators of a graph.

    Attributes:
        operators: In the graph's order.
        value_bytes: Bytes of each value.
        holders: For each value, the view operators' values that hold it.
        twin: For each value that a first run makes and a mirror makes anew, the set of the latter; else 0.
        masks: For each node, the values that a read of it needs, those of first runs.
        forward_runs: The runs that end the forward when all are done.
        all_runs: The first runs of all operators.
        forward_outputs: Values that live on when the forward has ended.
        outputs: Values that are live at the end, forward outputs included.
        early: Free views of inputs, which run first.
        late: Free views of tangents, which run at the boundary.
    """

    operators: tuple[Move, ...]
    value_bytes: tuple[int, ...]
    holders: tuple[int, ...]
    twin: tuple[int, ...]
    masks: tuple[int, ...]
    forward_runs: int
    all_runs: int
    forward_outputs: int
    outputs: int
    early: tuple[int, ...]
    late: tuple[int, ...]


def moves(problem: Problem) -> Moves:
    """The operators of a problem's graph, its memory being that of graphs that run as they are.

    Raises:
        InvalidOptionError: Orders or costs are such that these moves would not tell the whole truth.
    """
    return _Contraction(problem).moves()


class _Contraction:
    """Gives each node its operator, each operator its values."""

    def __init__(self, problem: Problem) -> None:
        self.graph = graph = problem.graph
        self.nodes = graph.nodes
        self.body = range(graph.num_inputs, len(graph.nodes))
        self.seconds = [problem.costs.of_node(graph, index) for index in range(len(graph.nodes))]
        self.home: list[int | None] = [None] * len(graph.nodes)  # the operator; None for early, late, inputs
        self.groups: dict[int, list[int]] = {}
        self.free_inputs: list[int] = []
        for index in self.body:
            self._assign(index)
        self.value_bytes: list[int] = []
        self.holders: list[int] = []
        self.twin: list[int] = []
        self.values: dict[int, int] = {}  # of storages
        self.masks = [0] * len(graph.nodes)
        self.makes = dict.fromkeys(self.groups, 0)
        for index in self.body:
            self._evaluate(index)
        self._refuse()

    # -- which node belongs to which operator

    def _assign(self, index: int) -> None:
        node = self.nodes[index]
        if node.leader is not None:
            home = self.home[node.leader]
        elif node.shares is not None and self._is_free(index):
            home = self.home[node.shares]
        else:
            home = index
        self.home[index] = home
        if home is None:
            self.free_inputs.append(index)
        else:
            self.groups.setdefault(home, []).append(index)

    def _is_free(self, index: int) -> bool:
        """Whether a view may run behind its operator, as often as that does, at no cost."""
        node = self.nodes[index]
        assert node.shares is not None
        home = self.home[node.shares]
        available = {None, home}
        if node.ordered or self._takes_something(index) or self._ends_forward(index):
            return False
        if any(self.home[operand] not in available for operand in node.operands):
            return False
        if home is None:
            is_late = any(operand in self.free_inputs and self._is_late(operand) for operand in node.operands)
            return node.at_least == 0 and (node.phase is Phase.BACKWARD or not is_late)
        operator = self.nodes[home]
        if (node.phase is Phase.BACKWARD) != (operator.phase is Phase.BACKWARD):
            return False
        if operator.keep is not None:
            return node.at_least == 0
        if node.keep is not None or (node.at_least > 0 and operator.at_least == 0):
            return False
        return node.at_most is None or (operator.at_most is not None and operator.at_most <= node.at_most)

    def _ends_forward(self, index: int) -> bool:
        """Whether the forward may end with a view, however long ago its value was made."""
        if self.nodes[index].phase is not Phase.FORWARD:
            return False
        users = [user for user in self.graph.users[index] if self.nodes[user].phase is Phase.FORWARD]
        return all(self.nodes[user].leader == index and self._ends_forward(user) for user in users)

    def _takes_something(self, index: int) -> bool:
        scratch = self.graph.scratch_bytes
        return self.seconds[index] > 0 or bool(scratch and scratch[index])

    def _is_late(self, index: int) -> bool:
        return self.nodes[index].phase is Phase.BACKWARD

    def _is_ordered_again(self, home: int) -> bool:
        return self.nodes[home].at_least > 0 and self.nodes[home].keep is None

    # -- values

    def _new(self, size: int, holds: int = 0) -> int:
        """A value that holds others; returns the set of it."""
        made = 1 << len(self.value_bytes)
        self.value_bytes.append(size)
        self.holders.append(0)
        self.twin.append(0)
        for value in indices(holds):
            self.holders[value] |= made
        return made

    def _evaluate(self, index: int) -> None:
        """Find the values that a read of a node needs."""
        home, node = self.home[index], self.nodes[index]
        if home is None:
            return
        if home == index:
            self._evaluate_operator(index)
            return
        if node.leader is None:
            assert node.shares is not None
            self.masks[index] = self.masks[node.shares]
            return
        is_split = self.nodes[home].shares is not None or node.leader != home
        self.masks[index] = self.masks[node.leader]
        if not is_split and node.views:
            self.masks[index] = bits(self.values[storage] for storage in node.views)
        if node.keep is not None and self.nodes[home].keep is None:
            own = self._new(0, self.masks[index])
            self.masks[index] |= own
            self.makes[home] |= own

    def _evaluate_operator(self, index: int) -> None:
        node = self.nodes[index]
        again = self._is_ordered_again(index)
        held = bits(self.values[storage] for storage in node.views) if node.shares is not None else 0
        made = 0
        for storage in node.creates:
            made |= self._new_pair(self.graph.storage_bytes[storage], again and storage in node.recreates)
            self.values[storage] = made.bit_length() - 1 - (again and storage in node.recreates)
        if not node.creates:
            made = self._new_pair(0, again, held)
        firsts = bits(value for value in indices(made) if not self._is_second(value))
        self.masks[index] = firsts | held
        self.makes[index] |= firsts

    def _new_pair(self, size: int, has_twin: bool, holds: int = 0) -> int:
        first = self._new(size, holds)
        if not has_twin:
            return first
        second = self._new(size, holds)
        self.twin[first.bit_length() - 1] = second
        return first | second

    def _is_second(self, value: int) -> bool:
        return value > 0 and self.twin[value - 1] == 1 << value

    def _seconds_of(self, values: int) -> int:
        """The set with each first twin replaced by the second."""
        return union(self.twin[value] or 1 << value for value in indices(values))

    # -- operators

    def moves(self) -> Moves:
        """All of it."""
        ordered = [home for home in self.groups if any(self.nodes[i].ordered for i in self.groups[home])]
        first_run = {home: 1 << number for number, home in enumerate(self.groups)}
        limits = self._limits()
        operators = []
        for home in self.groups:
            earlier = ordered[: ordered.index(home)] if home in ordered else []
            after = union(map(first_run.__getitem__, earlier))
            operators.append(self._operator(home, (first_run[home], *limits.get(home, ())), after))
        forward = [home for home, group in self.groups.items() if self._runs_in_forward(group)]
        forward_outputs = [output for output in self.graph.forward_outputs if output is not None]
        early = self._early()
        return Moves(
            tuple(operators),
            tuple(self.value_bytes),
            tuple(self.holders),
            tuple(self.twin),
            tuple(self.masks),
            union(map(first_run.__getitem__, forward)),
            union(first_run.values()),
            union(map(self.masks.__getitem__, forward_outputs)),
            union(map(self.masks.__getitem__, self.graph.outputs)),
            early,
            tuple(index for index in self.free_inputs if index not in early),
        )

    def _limits(self) -> dict[int, tuple[int, ...]]:
        """For each operator whose mirrors the user limits, the bits of its mirrors."""
        found: dict[int, tuple[int, ...]] = {}
        at = len(self.groups)
        for home in self.groups:
            limit = self.nodes[home].at_most
            if limit and self.nodes[home].keep is None:
                found[home] = tuple(1 << at + number for number in range(limit))
                at += limit
        return found

    def _operator(self, home: int, runs: tuple[int, ...], after: int) -> Move:
        node, group = self.nodes[home], self.groups[home]
        again = 0 if node.keep is not None else self._remakes(home)
        scratch, again_scratch = self._scratch(home)
        reads, either = zip(*(self._reads(group, behind) for behind in (False, True)), strict=True)
        return Move(
            tuple(group),
            reads=reads,
            restores=self._restores(home),
            either=either,
            makes=self.makes[home],
            remakes=again,
            replaces=bits(value for value, twin in enumerate(self.twin) if twin & again),
            allocates_bytes=(
                scratch + sum(self.graph.storage_bytes[storage] for storage in node.creates),
                again_scratch + sum(self.graph.storage_bytes[storage] for storage in node.recreates),
            ),
            seconds=self.seconds[home],
            runs=runs,
            is_limited=bool(node.at_most),
            after=after,
            is_backward=node.phase is Phase.BACKWARD,
        )

    def _remakes(self, home: int) -> int:
        node = self.nodes[home]
        if node.creates:
            return self._seconds_of(bits(self.values[storage] for storage in node.recreates))
        held = bits(self.values[storage] for storage in node.views)
        return self._seconds_of(self.makes[home] & self.masks[home] & ~held)

    def _scratch(self, home: int) -> tuple[int, int]:
        """The scratch memory of a first run and of a mirror."""
        if not self.graph.scratch_bytes:
            return 0, 0
        return self.graph.scratch_bytes[home], mirror_scratch_bytes(self.graph, home)

    def _restores(self, home: int) -> int:
        is_redrawn = home in self.graph.redrawn
        return self.masks[self.nodes[home].operands[-1]] if is_redrawn else 0

    def _reads(self, group: Iterable[int], behind: bool) -> tuple[int, tuple[int, ...]]:
        """The values that an operator needs, and the twins of which it needs one."""
        members = set(group)
        reads = 0
        either: dict[int, None] = {}
        operands = {operand for index in members for operand in self.nodes[index].operands}
        states = {self.nodes[index].operands[-1] for index in members & self.graph.redrawn}
        for operand in sorted(operands - members - states):
            for value in indices(self.masks[operand]):
                if not self.twin[value]:
                    reads |= 1 << value
                elif behind and self.nodes[operand].at_least > 0:
                    reads |= self.twin[value]
                else:
                    either[1 << value | self.twin[value]] = None
        return reads, tuple(either)

    def _runs_in_forward(self, group: Iterable[int]) -> bool:
        return any(self.nodes[index].phase is Phase.FORWARD for index in group)

    def _early(self) -> tuple[int, ...]:
        """The free views of inputs in an order in which the boundary is as late as it can be."""
        left = [index for index in self.free_inputs if not self._is_late(index)]
        found: list[int] = []
        while left:
            ready = [i for i in left if not any(operand in left for operand in self.nodes[i].operands)]
            following = [i for i in ready if found and self.nodes[i].leader is not None]
            deferred = [i for i in ready if self.nodes[i].phase is Phase.DEFERRED]
            found.append((following or deferred or ready)[0])
            left.remove(found[-1])
        return tuple(found)

    # -- what is not modelled

    def _refuse(self) -> None:
        """Raise InvalidOptionError where the moves would leave out schedules, or misjudge them."""
        graph = self.graph
        for home, group in self.groups.items():
            again = self._is_ordered_again(home)
            has_deferred = any(self.nodes[i].phase is Phase.DEFERRED for i in group[1:])
            is_last = not any(
                self.nodes[user].phase is Phase.FORWARD and user not in group
                for i in group
                for user in graph.users[i]
            )
            if again and has_deferred and is_last and self._runs_in_forward(group):
                self._refuse_orders(home)
            for index in group:
                node = self.nodes[index]
                if node.leader is not None and self._takes_something(index):
                    problem = f"'exact' needs outputs such as {node.name!r} to cost nothing."
                    raise InvalidOptionError("cost", problem)
                is_other = node.leader == home and (node.at_least, node.at_most) != (
                    self.nodes[home].at_least,
                    self.nodes[home].at_most,
                )
                if is_other and node.keep is None:
                    self._refuse_orders(index)
                if again and index in graph.backward_outputs:
                    self._refuse_orders(index)
            if self.nodes[home].shares is not None and any(
                self.twin[self.values[storage]] for storage in self.nodes[home].views
            ):
                self._refuse_orders(home)

    def _refuse_orders(self, index: int) -> None:
        name = self.nodes[index].name
        problem = (
            f"'exact' cannot plan what is ordered for {name!r} ({self.graph.source(name)}); take 'auto'."
        )
        raise InvalidOptionError("planner", problem)
