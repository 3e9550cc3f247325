"""`Arena` against a plain list of bytes: no range twice, holes merge, nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.admission import Arena


class Model:
    """Which bytes are free, one flag each."""

    def __init__(self, size: int) -> None:
        self.free = [True] * size

    def holes(self) -> list[tuple[int, int]]:
        """`(size, start)` of every hole."""
        found, start = [], None
        for at, free in enumerate([*self.free, False]):
            if free and start is None:
                start = at
            elif not free and start is not None:
                found.append((at - start, start))
                start = None
        return found


@given(
    size=st.integers(0, 120),
    script=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_the_smallest_hole_that_fits_is_taken_and_what_comes_back_is_one_with_its_neighbours(size, script):
    arena, model, out = Arena(size), Model(size), []
    for give, n in script:
        if give and out:
            start, length = out.pop(n % len(out))
            arena.give(start, length)
            model.free[start : start + length] = [True] * length
        elif not give:
            fitting = sorted(hole for hole in model.holes() if hole[0] >= n)
            start = arena.take(n)
            if n == 0:
                assert start == 0
            elif fitting:
                assert start == fitting[0][1]
                model.free[start : start + n] = [False] * n
                out.append((start, n))
            else:
                assert start is None
        assert arena.largest == max([0, *(hole[0] for hole in model.holes())])
        assert sorted(arena._ends.items()) == sorted((start, start + n) for n, start in model.holes())
    for start, length in out:
        arena.give(start, length)
    assert arena.largest == size and arena.take(size) == 0


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1 << 20, (1 << 40) + 7])
def test_exactly_everything_fits_and_one_byte_more_does_not(size):
    arena = Arena(size)
    assert arena.take(size + 1) is None
    assert arena.take(size) == 0 and arena.largest == 0 and arena.take(1) is None
    arena.give(0, size)
    assert arena.largest == size


def test_the_bins_of_sizes_keep_their_order():
    from memra_pp.admission.arena import _bin_of

    sizes = sorted({*range(200), *(2**k + d for k in range(5, 50) for d in (-1, 0, 1)), *range(10**6, 10**6 + 300)})
    bins = [_bin_of(size) for size in sizes]
    assert bins == sorted(bins) and all(b - a <= 1 for a, b in pairwise(bins[:200]))
