"""packing: blocks that live at the same time do not overlap, and the arena is little more than the load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.arena.packing import Array, Blocks, apart, best, in_time, pool

PACKINGS = (apart, pool, in_time, best)
SHARING = (pool, in_time, best)

lives = st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 12)).map(
    lambda drawn: (drawn[0], min(drawn[1:]), max(drawn[1:]))
)


def assert_packed(blocks: Blocks, offsets: Array) -> None:
    """No two blocks that live at the same time overlap, and none begins before the arena does."""
    rows = list(zip(blocks.bytes, blocks.births, blocks.deaths, offsets, strict=True))
    assert all(offset >= 0 for *_, offset in rows)
    for i, (size, birth, death, offset) in enumerate(rows):
        for other_size, other_birth, other_death, other in rows[:i]:
            meets = birth <= other_death and other_birth <= death
            assert not meets or offset + size <= other or other + other_size <= offset


def load(blocks: Blocks) -> int:
    """The most bytes that live at once, counted one by one."""
    rows = list(zip(blocks.bytes, blocks.births, blocks.deaths, strict=True))
    steps = range(max((death for _, _, death in rows), default=-1) + 1)
    return max((sum(b for b, birth, death in rows if birth <= step <= death) for step in steps), default=0)


# --- By hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", SHARING)
def test_a_dead_block_gives_its_bytes(packing: Callable[[Blocks], Array]) -> None:
    """The third block takes the first one's place; death is inclusive, so the second cannot."""
    blocks = Blocks.of([(8, 0, 1), (8, 1, 2), (8, 2, 3)])
    assert packing(blocks).tolist() == [0, 8, 0]


def test_the_pool_takes_a_buffer_of_about_the_size() -> None:
    """A block takes the least buffer that is large enough, or makes the largest grow, but none far off."""
    assert pool(Blocks.of([(8, 0, 0), (4, 0, 0), (3, 1, 1)])).tolist() == [0, 8, 8]
    grown = Blocks.of([(8, 0, 0), (4, 0, 0), (9, 1, 1)])
    assert pool(grown).tolist() == [0, 9, 0]
    assert pool(Blocks.of([(1, 0, 0), (17, 1, 1)])).tolist() == [0, 1]
    assert pool(Blocks.of([(17, 0, 0), (1, 1, 1)])).tolist() == [0, 17]


def test_the_pool_loses_what_a_block_leaves_over() -> None:
    """Two halves do not fit where a whole was; the best fit has no such borders."""
    blocks = Blocks.of([(8, 0, 0), (4, 1, 1), (4, 1, 1)])
    assert (blocks.height(pool(blocks)), blocks.height(in_time(blocks)), blocks.height(best(blocks))) == (
        12,
        8,
        8,
    )


def test_free_ranges_are_merged() -> None:
    """Behind and before; and the last one grows with the arena."""
    assert in_time(Blocks.of([(2, 0, 0), (2, 0, 1), (2, 0, 0), (6, 2, 2)])).tolist() == [0, 2, 4, 0]
    assert in_time(Blocks.of([(2, 0, 1), (2, 0, 0), (6, 1, 1)])).tolist() == [0, 2, 2]


def test_the_search_mends_what_an_order_spoils() -> None:
    """The long-lived block is put above the short-lived one, and leaves a hole there."""
    blocks = Blocks.of([(4, 0, 0), (2, 0, 2), (6, 1, 1)])
    assert blocks.height(in_time(blocks)) > blocks.height(best(blocks)) == load(blocks)


@pytest.mark.parametrize("packing", PACKINGS)
def test_nothing_takes_nothing(packing: Callable[[Blocks], Array]) -> None:
    """No blocks need no arena."""
    blocks = Blocks.of([])
    assert (packing(blocks).tolist(), blocks.height(packing(blocks)), blocks.live_bytes().tolist()) == (
        [],
        0,
        [],
    )


# --- At random ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@given(st.lists(lives, max_size=14))
def test_blocks_do_not_overlap(packing: Callable[[Blocks], Array], drawn: list[tuple[int, int, int]]) -> None:
    """And the arena is at least the load, at most the sum."""
    blocks = Blocks.of(drawn)
    offsets = packing(blocks)
    assert_packed(blocks, offsets)
    assert load(blocks) == max(blocks.live_bytes().tolist(), default=0)
    assert load(blocks) <= blocks.height(offsets) <= sum(size for size, _, _ in drawn)


@given(st.lists(lives, max_size=14))
def test_the_best_is_no_worse_than_the_first_attempt(drawn: list[tuple[int, int, int]]) -> None:
    """And it is the same each time."""
    blocks = Blocks.of(drawn)
    assert blocks.height(best(blocks)) <= blocks.height(in_time(blocks))
    assert best(blocks).tolist() == best(blocks).tolist()


def training(layers: int) -> Blocks:
    """The lives of a step: values that die in reverse, gradients of values, gradients of weights."""
    generator = random.Random(0)
    rows = []
    for layer in range(layers):
        rows.append((generator.choice((64, 256, 1024)), layer, 3 * layers - 2 * layer))
        backward = layers + 2 * layer
        rows.append((generator.choice((64, 256, 1024)), backward, backward + 2))
        rows.append((32, backward, 3 * layers + 1))
    return Blocks.of(rows)


def test_thirty_thousand_blocks_take_seconds() -> None:
    """And their arena is close to the load; a plan must not wait for it."""
    blocks = training(10_000)
    start = time.perf_counter()
    offsets = best(blocks)
    assert time.perf_counter() - start < 60  # 10 s at most on two slow cores
    assert blocks.height(offsets) <= 1.01 * blocks.live_bytes().max()


def test_many_more_take_the_linear_road() -> None:
    """Best fit in time is all that is affordable for a hundred thousand, and still close."""
    blocks = training(33_000)
    assert blocks.height(best(blocks)) <= 1.2 * blocks.live_bytes().max()
