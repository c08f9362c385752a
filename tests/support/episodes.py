"""Episodes that are drawn, with candidates for their calls."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from fxremat.episode.trace import Call, Candidate, Event, Trace
from fxremat.graph.schedule import Schedule

Offers = Mapping[int, Sequence[Candidate]]


def candidate(draw: random.Random) -> Candidate:
    """Any plan, which may hold an output as well."""
    held = draw.randint(0, 12)
    holds = frozenset({("outputs", 0)} if draw.random() < 0.3 else ())
    forward, backward = held + draw.randint(0, 8), held + draw.randint(0, 8)
    return Candidate(Schedule(), draw.randint(5, 25) / 10, held, forward, backward, holds)


def drawn(seed: int, calls: int = 4) -> tuple[Trace, Offers]:
    """An episode: any order of events, calls without a backward, graphs with a single candidate."""
    draw = random.Random(seed)
    graphs = draw.randint(1, 3)
    offers = {graph: [candidate(draw) for _ in range(draw.randint(1, 5))] for graph in range(graphs)}
    made = tuple(
        Call(draw.randrange(graphs), {("outputs", 0): draw.randint(0, 5)} if draw.random() < 0.5 else {})
        for _ in range(draw.randint(2, calls))
    )
    is_stack = draw.random() < 0.5
    backwards = [index for index in reversed(range(len(made))) if draw.random() < 0.9]
    if not is_stack:
        draw.shuffle(backwards)
    order = [(index, False) for index in range(len(made))]
    for index in backwards:
        behind = len(order) if is_stack else draw.randint(order.index((index, False)) + 1, len(order))
        order.insert(behind, (index, True))
    events = []
    for index, is_backward in order:
        outside = draw.randint(0, 9)
        events.append(Event(index, is_backward, outside, outside + draw.randint(0, 6)))
    return Trace(made, tuple(events), draw.randint(0, 9)), offers


def blocks(seed: int, calls: int) -> tuple[Trace, Offers]:
    """Blocks that are calls of one graph, each with an output that waits, and a head."""
    draw = random.Random(seed)
    offers = {}
    for graph, count in ((0, 12), (1, 4)):
        sizes = sorted(draw.sample(range(20, 400), count))
        offers[graph] = [
            Candidate(Schedule(), 2 + (400 - held) ** 2 / 80_000, held, held + 20, held + 60 - held // 10)
            for held in sizes
        ]
    order = [
        *((index, False) for index in range(calls + 1)),
        *((index, True) for index in range(calls, -1, -1)),
    ]
    events = tuple(Event(index, is_backward, 8 * index, 8 * index) for index, is_backward in order)
    return Trace((*(Call(0) for _ in range(calls)), Call(1)), events), offers


def chosen(trace: Trace, offers: Offers, plans: Sequence[int]) -> list[Candidate]:
    """The candidates that plans name."""
    return [offers[call.graph][plan] for call, plan in zip(trace.calls, plans, strict=True)]
