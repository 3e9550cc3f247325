"""`Arena`: which bytes of a device's budget are free, as ranges. It knows offsets only; the bytes are the stage's."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

SHIFT = 56
"""A hole is the one number `size << SHIFT | start`: by size, then by place, and so small that thousands stay in a cache."""

_START = (1 << SHIFT) - 1


class Arena:
    """Ranges within `[0, size)`, handed out from the smallest hole that fits (the lowest of equals) and merged with their
    neighbours when they come back.

    Holes are kept sorted in bins of sizes at most a sixteenth apart, so that thousands cost little more than a few.

    Attributes:
        size: bytes in all, below 2**56.
    """

    def __init__(self, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        """`taken` are the ranges `[start, end)` that are out already."""
        self.size = size
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._bins: list[list[int]] = [[] for _ in range(_bin_of(size) + 1)]
        self._filled = 0
        free = 0
        for start, end in [*sorted(taken), (size, size)]:
            if start > free:
                self._add(free, start)
            free = end

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return self._bins[self._filled.bit_length() - 1][-1] >> SHIFT if self._filled else 0

    def take(self, n: int) -> int | None:
        """The offset of `n` bytes, theirs until `give`; None if no hole is large enough. Nothing takes no room."""
        if not 0 < n <= self.size:
            return None if n else 0
        which = _bin_of(n)
        holes = self._bins[which]
        at = bisect_left(holes, n << SHIFT) if holes else 0
        if at == len(holes):
            larger = self._filled >> which + 1
            if not larger:
                return None
            which += (larger & -larger).bit_length()
            holes, at = self._bins[which], 0
        hole = holes.pop(at)
        if not holes:
            self._filled ^= 1 << which
        start = hole & _START
        end = self._ends.pop(start)
        if end - start > n:
            self._add(start + n, end)
        else:
            del self._starts[end]
        return start

    def give(self, start: int, n: int) -> None:
        """Takes back what `take` gave."""
        if not n:
            return
        end, ends, starts = start + n, self._ends, self._starts
        if end in ends:
            after = ends.pop(end)
            self._drop(end, after)
            end = after
        if start in starts:
            before = starts.pop(start)
            self._drop(before, start)
            start = before
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        which = _bin_of(end - start)
        holes = self._bins[which]
        if holes:
            insort(holes, (end - start) << SHIFT | start)
        else:
            holes.append((end - start) << SHIFT | start)
            self._filled |= 1 << which

    def _drop(self, start: int, end: int) -> None:
        which = _bin_of(end - start)
        holes = self._bins[which]
        del holes[bisect_left(holes, (end - start) << SHIFT | start)]
        if not holes:
            self._filled ^= 1 << which


def _bin_of(size: int) -> int:
    """The number of a size's bin, which grows with the size: sixteen bins between one power of two and the next."""
    shift = size.bit_length() - 5
    return (shift << 4) + (size >> shift) if shift > 0 else size
