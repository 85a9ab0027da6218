from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.arena import Arena


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    arena = Arena(100)
    a, b, c, d = (arena.allocate(n) for n in (10, 20, 30, 40))
    assert (a, b, c, d) == (0, 10, 30, 60)
    assert arena.allocate(1) is None
    arena.free(0)
    arena.free(30)
    assert arena.largest_hole == 30
    assert arena.allocate(20) == 30
    assert arena.allocate(10) == 0
    assert arena.allocate(10) == 50
    assert (arena.used, arena.largest_hole) == (100, 0)
    arena.check_integrity()


@pytest.mark.parametrize("order", [(0, 10, 20), (20, 10, 0), (0, 20, 10), (10, 0, 20)])
def test_neighbouring_holes_merge_whatever_the_order(order: tuple[int, ...]) -> None:
    arena = Arena(30)
    for _ in order:
        arena.allocate(10)
    for offset in order:
        arena.free(offset)
        arena.check_integrity()
    assert arena.largest_hole == 30
    assert arena.allocate(30) == 0


def test_all_or_nothing_leaves_no_trace_when_the_last_range_does_not_fit() -> None:
    arena = Arena(40)
    assert arena.allocate_all([10, 10, 10, 10]) == [0, 10, 20, 30]
    arena.free(0)
    arena.free(20)
    assert arena.allocate_all([5, 15]) is None
    assert (arena.used, arena.largest_hole) == (20, 10)
    arena.check_integrity()
    assert arena.allocate_all([5, 10, 5]) == [0, 20, 5]


def test_a_copy_does_not_share_state() -> None:
    arena = Arena(20)
    kept = arena.allocate(10)
    trial = arena.copy()
    assert kept is not None
    trial.free(kept)
    assert trial.allocate(20) == 0
    assert (arena.used, trial.used) == (10, 20)
    arena.check_integrity()
    trial.check_integrity()


def test_misuse_is_refused() -> None:
    arena = Arena(10)
    arena.allocate(4)
    with pytest.raises(ValueError, match="offset 1"):
        arena.free(1)
    arena.free(0)
    with pytest.raises(ValueError, match="offset 0"):
        arena.free(0)
    with pytest.raises(ValueError, match="not 0"):
        arena.allocate(0)
    with pytest.raises(ValueError, match="not 0"):
        Arena(0)


def test_the_integrity_check_sees_a_lost_range() -> None:
    arena = Arena(10)
    arena.allocate(4)
    arena._taken.clear()
    with pytest.raises(AssertionError):
        arena.check_integrity()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_ranges_never_overlap_and_a_refusal_means_no_hole(ops: list[tuple[bool, int]]) -> None:
    arena = Arena(100)
    taken: dict[int, int] = {}
    for allocate, n in ops:
        if allocate:
            offset = arena.allocate(n)
            cells = {cell for start, size in taken.items() for cell in range(start, start + size)}
            free = "".join("x" if cell in cells else "." for cell in range(100))
            assert (offset is None) == ("." * n not in free)
            if offset is not None:
                assert offset == free.index("." * n)
                taken[offset] = n
        elif taken:
            offset = sorted(taken)[n % len(taken)]
            arena.free(offset)
            del taken[offset]
        arena.check_integrity()
        assert arena.used == sum(taken.values())
