"""`Spans`: whose the rows of a batch are and where they stand, as the index arrays that every layer's kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from ..errors import InputError
from ._arrays import I64Array

START, ROWS, POS = range(3)
"""Columns of `Spans.table`: a session's first row in the batch, its rows, and the position of the first."""
SESSION, BLOCK_START, BLOCK_ROWS, BLOCK_POS, WORK_BEFORE, WORK = range(6)
"""Columns of `Spans.blocks`: a block's session, the same of its rows, the work of the blocks before it, and its own."""


class Spans:
    """The rows of a batch, session after session: `rows[i]` of them, at positions `pos[i], pos[i] + 1, ...`.

    Attributes:
        pos, rows: as given.
        ends: the position behind each session's last row.
        total: rows in all.
        table: i64 `[sessions, 3]`, columns `START`, `ROWS`, `POS`.
        on_device: a device's copy of it, for a backend to keep.

    Raises:
        InputError: a position or a number of rows is negative.
    """

    def __init__(self, pos: Sequence[int], rows: Sequence[int]) -> None:
        if min(pos, default=0) < 0 or min(rows, default=0) < 0:
            raise InputError(f"position {min(pos)}, {min(rows)} rows: neither may be negative")
        self.pos, self.rows = tuple(pos), tuple(rows)
        self.ends = tuple(map(add, self.pos, self.rows))
        starts = list(accumulate(self.rows, initial=0))
        self.total = starts.pop()
        self.table: I64Array = np.array([*zip(starts, self.rows, self.pos, strict=True)], np.int64).reshape(-1, 3)
        self.on_device: Any = None
        self._first_keys: dict[int | None, list[int]] = {}
        self._blocks: dict[tuple[int, int | None], tuple[I64Array, int]] = {}

    def blocks(self, height: int, window: int | None) -> tuple[I64Array, int]:
        """Blocks of at most `height` rows of one session, i64 `[blocks, 6]`, and the work of all; made once.

        A block's work is its rows times the keys that it reads: all before, or the last `window` a row.
        """
        key = height, window
        if key not in self._blocks:
            self._blocks[key] = self._cut(height, window)
        return self._blocks[key]

    def first_keys(self, window: int | None) -> list[int]:
        """The first absolute row that each session's rows see: all, or the last `window` up to their own; made once."""
        if window not in self._first_keys:
            self._first_keys[window] = [_first_key(pos, window) for pos in self.pos]
        return self._first_keys[window]

    def _cut(self, height: int, window: int | None) -> tuple[I64Array, int]:
        table: list[tuple[int, ...]] = []
        work = 0
        for session, (start, rows, pos) in enumerate(self.table.tolist()):
            for at in range(0, rows, height):
                count = min(height, rows - at)
                own = count * (pos + at + count - _first_key(pos + at, window))
                table.append((session, start + at, count, pos + at, work, own))
                work += own
        return np.array(table, np.int64).reshape(-1, 6), work


def _first_key(pos: int, window: int | None) -> int:
    """The first absolute row that position `pos` sees."""
    return 0 if window is None else max(0, pos - window + 1)
