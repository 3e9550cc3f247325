"""`CachePlan`: a cache without its bytes. Positions, rings, pins and snapshots are deterministic, so whoever holds one can
say beforehand whether an append, a snapshot or a rollback will succeed on every stage.

Each `Cache` keeps its own books in one, over its layers' rings; the driver keeps another a session, over one ring a
distinct window, and prepares every entry there before it sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import KvPlan, ModelConfig
from ..errors import CacheError, CapacityExceeded, RingLapped, SnapshotPinned
from .formats import KvPolicy
from .ring import KvRing, Rebase
from .sizing import kv_layout


@dataclass(slots=True, eq=False)
class SnapshotMark:
    """A live snapshot in the books: its number, its position, and whether it pins the rows it needs."""

    number: int
    pos: int
    pin: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"snapshot {self.number} at row {self.pos}"


class CachePlan:
    """The books of one session's cache: `pos`, the rings' bases and the live snapshots.

    `rings` are shared with their owner: a `Cache` passes its layers' rings, whose bases `kernels.append` moves.
    """

    def __init__(self, max_ctx: int, rings: Sequence[KvRing]) -> None:
        self.max_ctx = max_ctx
        self.pos = 0
        self._rings = list(rings)
        self._live: list[SnapshotMark] = []
        self._taken = 0

    @classmethod
    def of(cls, cfg: ModelConfig, max_ctx: int, policy: KvPolicy) -> CachePlan:
        """The plan of a whole model: one ring stands for all layers with the same window."""
        layouts = (kv_layout(plan, max_ctx, policy) for plan in cfg.layers if isinstance(plan, KvPlan))
        shapes = {(kv.rows, kv.ring_window) for kv in layouts if kv.ring_window is not None}
        return cls(max_ctx, [KvRing(rows, window) for rows, window in sorted(shapes)])

    def copy(self) -> CachePlan:
        """The same books apart, to try on them what may be refused; marks are shared, they never change."""
        twin = CachePlan(self.max_ctx, [ring.copy() for ring in self._rings])
        twin.pos, twin._live, twin._taken = self.pos, list(self._live), self._taken
        return twin

    @property
    def live(self) -> tuple[SnapshotMark, ...]:
        """The live snapshots, oldest first."""
        return tuple(self._live)

    def retain_from(self, ring: KvRing) -> int:
        """The first absolute row of `ring` that an append at `pos` must keep: the view there, and every pinned one."""
        return min(ring.view_start(p) for p in (self.pos, *(m.pos for m in self._live if m.pin)))

    def rows_possible(self) -> int:
        """How many rows the next append may have at most."""
        rings = (ring.rows - (self.pos - self.retain_from(ring)) for ring in self._rings)
        return min([self.max_ctx - self.pos, *rings])

    def check_append(self, rows: int, chunk: int | None = None, replayed: int = 0) -> None:
        """Whether `replayed` rows and then `rows` new ones can be appended at `pos`, in appends of at most `chunk` (None: in
        one); changes nothing.

        Raises:
            CapacityExceeded: the context is too short.
            SnapshotPinned: the rows would overwrite what a pinned snapshot needs.
            CacheError: one append does not fit a ring.
        """
        at = self.pos + replayed
        if at + rows > self.max_ctx:
            raise CapacityExceeded(
                f"{rows} more rows at row {at} exceed the {self.max_ctx} rows this session was opened for: "
                f"feed at most {self.max_ctx - at}, or open it with a larger max_new_tokens"
            )
        if not self._rings:
            return
        one = replayed + rows if chunk is None else min(replayed + rows, chunk)
        pinned = min((m for m in self._live if m.pin), key=lambda m: m.pos, default=None)
        for ring in self._rings:
            if pinned is not None and at + rows - ring.view_start(pinned.pos) > ring.rows:
                raise SnapshotPinned(
                    f"{rows} more rows at row {at} would overwrite rows that {pinned.name} needs: feed at most "
                    f"{self.rows_possible() - replayed} rows, or close the snapshot first"
                )
            free = ring.rows - (self.pos - ring.view_start(self.pos))
            if one > free:
                raise CacheError(f"{one} rows in one append to a ring of {ring.rows}: append at most {free} at a time")

    def append(self, rows: int) -> None:
        """Appends `rows` rows to the books: checks, rebases the rings as the stages will, and moves `pos`.

        Raises:
            CapacityExceeded, SnapshotPinned, CacheError: as `check_append`; nothing has changed.
        """
        self.check_append(rows)
        plans = [ring.append_plan(self.pos, self.retain_from(ring), rows) for ring in self._rings]
        for ring, plan in zip(self._rings, plans, strict=True):
            if isinstance(plan, Rebase):
                ring.apply_rebase(plan.new_base)
        self.pos += rows

    def seat(self, pos: int) -> None:
        """Stands at `pos`, in books without rows or snapshots: of each ring no row is there before a reader's view."""
        for ring in self._rings:
            ring.base = ring.view_start(pos)
        self.pos = pos

    def snapshot(self, pin: bool = True, pos: int | None = None) -> SnapshotMark:
        """Takes a snapshot at `pos` (None: here); an earlier row is one of the step just appended, so its view is whole."""
        self._taken += 1
        pos = self.pos if pos is None else pos
        mark = SnapshotMark(self._taken, pos, pin)
        self._live.append(mark)
        return mark

    def drop(self, mark: SnapshotMark) -> None:
        """Ends a snapshot and its pin; one that has ended already stays so."""
        if mark in self._live:
            self._live.remove(mark)

    def can_rollback(self, mark: SnapshotMark, accept: int) -> bool:
        """Whether the session can return to `mark` and keep `accept` of the rows fed since."""
        return self._rollback_error(mark, accept) is None

    def check_rollback(self, mark: SnapshotMark, accept: int) -> None:
        """Whether `rollback` will succeed; changes nothing.

        Raises:
            RingLapped: the rows that `mark` needs are overwritten.
            CacheError: the snapshot has ended, or `accept` is not 0 to the rows fed since.
        """
        error = self._rollback_error(mark, accept)
        if error is not None:
            raise error

    def rollback(self, mark: SnapshotMark, accept: int) -> None:
        """Returns to `mark`: `pos` is the snapshot's, and the snapshots taken since have ended.

        Raises:
            RingLapped, CacheError: as `check_rollback`; nothing has changed.
        """
        self.check_rollback(mark, accept)
        del self._live[self._live.index(mark) + 1 :]
        self.pos = mark.pos

    def _rollback_error(self, mark: SnapshotMark, accept: int) -> CacheError | None:
        if mark not in self._live:
            return CacheError(f"{mark.name} has ended: it was closed, or an older one was restored; take a new one")
        fed = self.pos - mark.pos
        if not 0 <= accept <= fed:
            return CacheError(f"accept={accept}: {fed} rows were fed since {mark.name}, so accept 0 to {fed}")
        if not all(ring.can_rewind_to(mark.pos) for ring in self._rings):
            return RingLapped(f"{mark.name} has been lapped by later rows: full re-prime required")
        return None
