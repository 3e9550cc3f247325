"""`KvRing`: the rows of a sliding-window layer in a bounded plane, always contiguous, moved to the front when it fills.

Rows carry absolute positions. Physical row 0 holds absolute row `base`; row `a` is at `a - base`. When an append does
not fit behind the rows held, the rows still needed are moved to physical row 0 (a *rebase*) and the append follows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CacheError, RingLapped

PRIME_CHUNK_MAX_TOKENS = 4096
"""With a ring on, no prefill chunk is longer: one such chunk always fits behind a window."""

VIEW_ALIGN = 32
"""A reader's view begins at a multiple of this many rows."""


def swa_ring_rows(window: int, max_ctx: int) -> int:
    """Rows of a ringed layer: a window, one longest chunk and the slack of an aligned view, at most `max_ctx`."""
    return min(max_ctx, window + PRIME_CHUNK_MAX_TOKENS + VIEW_ALIGN - 1)


@dataclass(frozen=True)
class Contiguous:
    """The append goes straight to physical row `write_row`."""

    write_row: int


@dataclass(frozen=True)
class Rebase:
    """First move `keep_rows` rows from physical row `src_row` to row 0 (the ranges may overlap: copy forward), then write
    at `write_row`; physical row 0 then holds absolute row `new_base`."""

    src_row: int
    keep_rows: int
    new_base: int
    write_row: int


KvRingAppend = Contiguous | Rebase


class KvRing:
    """Where the rows of one ringed layer are. `rows` physical rows, `window` positions visible to a row, `base`."""

    __slots__ = ("base", "rows", "window")

    def __init__(self, rows: int, window: int) -> None:
        if rows < 1 or window < 1:
            raise CacheError(f"KvRing(rows={rows}, window={window}): both must be at least 1")
        self.rows = rows
        self.window = window
        self.base = 0

    def copy(self) -> KvRing:
        """The same ring apart."""
        twin = KvRing(self.rows, self.window)
        twin.base = self.base
        return twin

    def view_start(self, length: int) -> int:
        """The first absolute row of a reader's view when `length` rows are there, aligned down to 32."""
        return max(0, length - (self.window - 1)) & ~(VIEW_ALIGN - 1)

    def append_plan(self, length: int, retain_from: int, append_rows: int) -> KvRingAppend:
        """How to append `append_rows` rows at absolute row `length`, keeping every row from `retain_from` on.

        Changes nothing.

        Raises:
            RingLapped: `retain_from` is no longer, or not yet, in the ring.
            CacheError: more rows are in use than the ring has, or the kept rows and the append do not fit.
        """
        if not self.base <= retain_from <= length:
            raise RingLapped(
                f"rows from {retain_from} are wanted, but the ring holds rows {self.base} to {length}: "
                "re-prime the session from its tokens"
            )
        used = length - self.base
        if used > self.rows or append_rows < 0:
            raise CacheError(f"an append of {append_rows} rows at row {length}: the ring holds {self.rows} from {self.base}")
        if used + append_rows <= self.rows:
            return Contiguous(write_row=used % self.rows)
        keep = length - retain_from
        if keep + append_rows > self.rows:
            raise CacheError(
                f"an append of {append_rows} rows does not fit behind {keep} kept rows in a ring of {self.rows}: "
                f"append at most {self.rows - keep} rows at a time"
            )
        return Rebase(src_row=retain_from - self.base, keep_rows=keep, new_base=retain_from, write_row=keep)

    def apply_rebase(self, new_base: int) -> None:
        """Commits a `Rebase`, after its rows have moved."""
        if new_base < self.base:
            raise CacheError(f"a rebase to row {new_base} would go back: the ring's base is {self.base}")
        self.base = new_base

    def physical_range(self, start: int, end: int) -> range:
        """The physical rows of absolute rows `[start, end)`.

        Raises:
            CacheError: the range is reversed, begins before `base`, or is longer than the ring.
        """
        if start < self.base or end < start or end - self.base > self.rows:
            raise CacheError(
                f"rows [{start}, {end}) are not in the ring: it holds up to {self.rows} rows from row {self.base} on"
            )
        return range(start - self.base, end - self.base)

    def can_rewind_to(self, length: int) -> bool:
        """Whether a reader standing at `length` rows would still find its whole view."""
        return self.view_start(length) >= self.base
