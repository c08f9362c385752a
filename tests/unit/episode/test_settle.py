"""settle: the choice for an episode, held against all choices of small ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from episodes import Offers, blocks, chosen, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from fxremat.episode.settle import settle
from fxremat.episode.trace import Call, Candidate, Event, Trace, peak_bytes
from fxremat.errors import InfeasibleBudgetError
from fxremat.graph.schedule import Schedule


def variants(trace: Trace, plans: Sequence[int]) -> int:
    """The most variants of any graph."""
    used = set(zip((call.graph for call in trace.calls), plans, strict=True))
    return max(sum(each == graph for each, _ in used) for graph, _ in used)


def every_choice(trace: Trace, offers: Offers) -> list[tuple[int, float, int]]:
    """Peak, seconds and number of variants of every choice."""
    ranges = [range(len(offers[call.graph])) for call in trace.calls]
    return [
        (
            peak_bytes(trace, chosen(trace, offers, plans)),
            sum(each.seconds for each in chosen(trace, offers, plans)),
            variants(trace, plans),
        )
        for plans in itertools.product(*ranges)
    ]


def check(trace: Trace, offers: Offers, budget: int | None, most: int) -> tuple[int, float]:
    """Settle, look at what is said of the answer, and return its peak and seconds."""
    found = settle(trace, offers, budget, most)
    plans = chosen(trace, offers, found.plans)
    assert found.peak_bytes == peak_bytes(trace, plans)
    assert budget is None or found.peak_bytes <= budget
    assert found.seconds == pytest.approx(sum(each.seconds for each in plans))
    assert found.lowest_peak_bytes <= found.peak_bytes
    assert found.lower_bound_seconds <= found.seconds
    assert variants(trace, found.plans) <= most
    return found.peak_bytes, found.seconds


@pytest.mark.parametrize(("most", "worst"), [(1, 1.5), (2, 1.25), (4, 1.25)])
def test_small_episodes_against_every_choice(most: int, worst: float) -> None:
    """What fits is known exactly, times are near the least, bounds hold without the limit on variants."""
    ratios = []
    for seed in range(25):
        trace, offers = drawn(seed)
        known = every_choice(trace, offers)
        allowed = [(peak, seconds) for peak, seconds, count in known if count <= most]
        lowest = min(peak for peak, _ in allowed)
        with pytest.raises(InfeasibleBudgetError, match="the step") as error:
            settle(trace, offers, lowest - 1, most)
        assert error.value.lowest_peak_bytes == lowest
        assert check(trace, offers, None, most)[0] == lowest
        for budget in sorted({lowest, *(peak for peak, _ in allowed)})[:8:3]:
            _, seconds = check(trace, offers, budget, most)
            found = settle(trace, offers, budget, most)
            assert found.lowest_peak_bytes == lowest
            assert found.lower_bound_seconds <= min(s for p, s, _ in known if p <= budget) + 1e-9
            ratios.append(seconds / min(s for p, s in allowed if p <= budget))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.03
    assert max(ratios) < worst


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 40), min_size=2, max_size=8), st.integers(1, 4))
def test_budgets_are_monotone(seed: int, above: list[int], most: int) -> None:
    """A larger budget never takes longer, nor has a smaller one a higher peak."""
    trace, offers = drawn(seed, calls=6)
    lowest, _ = check(trace, offers, None, most)
    found = [check(trace, offers, lowest + more, most) for more in sorted(above)]
    for (peak, seconds), (next_peak, next_seconds) in itertools.pairwise(found):
        assert peak <= next_peak and seconds >= next_seconds


def test_blocks_take_several_variants_near_the_bound() -> None:
    """Calls of one graph have different plans where that is faster, and times are monotone throughout."""
    trace, offers = blocks(1, 12)
    lowest = settle(trace, offers, None).peak_bytes
    highest = settle(trace, offers, 10**9).peak_bytes
    found = []
    for step in range(16):
        budget = lowest + (highest - lowest) * step // 15
        answer = settle(trace, offers, budget)
        found.append((answer.peak_bytes, answer.seconds))
        assert answer.seconds <= 1.03 * answer.lower_bound_seconds
    assert [peak for peak, _ in found] == sorted(peak for peak, _ in found)
    assert [seconds for _, seconds in found] == sorted((s for _, s in found), reverse=True)
    budget = (lowest + highest) // 2
    assert settle(trace, offers, budget).seconds < settle(trace, offers, budget, max_variants=1).seconds
    assert settle(trace, offers, budget) == settle(trace, offers, budget)


@pytest.mark.parametrize("graphs", [(0, 0), (0, 1), (0, 1, 2)])
def test_few_calls_take_what_lies_above_the_hull(graphs: tuple[int, ...]) -> None:
    """Where time falls slowly at first, plans lie above the line of two others; they may be all that fits."""
    draw = random.Random(len(graphs))
    offers = {}
    for graph in set(graphs):
        sizes = sorted(draw.sample(range(100, 600), 24))
        offers[graph] = [
            Candidate(Schedule(), 3 - (held / 600) ** 2, held, held + 5, held + draw.randint(5, 60))
            for held in sizes
        ]
    order = [(call, False) for call in range(len(graphs))]
    order += [(call, True) for call in reversed(range(len(graphs)))]
    events = tuple(Event(call, is_backward, 0, 0) for call, is_backward in order)
    trace = Trace(tuple(map(Call, graphs)), events)
    known = every_choice(trace, offers)
    lowest, highest = min(peak for peak, _, _ in known), settle(trace, offers, 10**9).peak_bytes
    for part in range(1, 10):
        budget = lowest + (highest - lowest) * part // 10
        _, seconds = check(trace, offers, budget, 4)
        assert seconds <= 1.01 * min(s for p, s, _ in known if p <= budget)


def test_nothing_to_choose() -> None:
    """An episode of single candidates is what it is."""
    only = Candidate(Schedule(), 1.0, 3, 4, 5)
    trace = Trace((Call(7),), (Event(0, False, 1, 0), Event(0, True, 2, 6)))
    found = settle(trace, {7: [only]}, None)
    assert (found.plans, found.peak_bytes, found.seconds) == ((0,), 9, 1.0)
    assert math.isclose(found.lower_bound_seconds, 1.0, rel_tol=1e-6)


@pytest.mark.parametrize(("backward", "peak"), [(True, 20), (False, 23)])
def test_what_is_behind_the_last_event_counts(backward: bool, peak: int) -> None:
    """With what is held for a backward that does not come, and without what that would take."""
    only = Candidate(Schedule(), 1.0, 3, 4, 5)
    events = (Event(0, False, 1, 0), Event(0, True, 2, 6))[: 1 + backward]
    assert settle(Trace((Call(7),), events, 20), {7: [only]}, None).peak_bytes == peak
