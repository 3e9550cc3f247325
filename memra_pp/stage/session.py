"""`StageSession`: one session on one stage. Checks a step against its books, then applies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..admission import SessionShape
from ..cache import Cache, CachePlan, CacheSnapshot, SnapshotMark
from ..cache.sizing import Kind
from ..errors import StageError
from ..kernels.memory import Slab
from .frames import Entry
from .spec import StageSpec

Captures = tuple[tuple[int, CacheSnapshot], ...]
"""`(r, snapshot)`: the state after a step's first `r` rows goes into the snapshot."""


@dataclass(slots=True)
class StageSession:
    """A session's slab and the cache slice in it, the `seq` of the step it takes next, the fault of the step before, if any,
    and whether that one broke it: then its state is undefined until it is reset.

    `slots` are its snapshots: the user's, then those for the states that a verify keeps.
    """

    name: str
    shape: SessionShape
    slab: Slab
    cache: Cache
    slots: list[CacheSnapshot]
    seq: int = 1
    fault: list[Any] | None = None
    broken: bool = False

    @classmethod
    def open(cls, slab: Slab, spec: StageSpec, number: int, shape: SessionShape) -> StageSession:
        """Allocates every buffer of `spec.layout(shape)` in an empty slab, which is the session's from then on.

        Raises:
            CapacityExceeded: the slab has not that many bytes.
        """
        layers, name = spec.layers, f"{spec}: session {number}"
        cache = Cache.new_ppn_slice(slab, layers.start, layers.stop, spec.cfg, shape.ctx, policy=spec.policy)
        return cls(name, shape, slab, cache, [cache.new_snapshot() for _ in range(shape.slots)])

    def base(self, entry: Entry) -> int | None:
        """The row at which a step's rows begin, after its rollback; None if it names a slot that holds no live snapshot."""
        if not entry.restore:
            return self.cache.plan.pos
        mark = self._live(entry.restore - 1)
        if mark is None:
            return None
        return mark.pos if self.cache.cfg.recurrent else mark.pos + entry.accept

    def begin(self, entry: Entry) -> Captures:
        """Checks the whole step, then applies what comes before its rows.

        Raises:
            StageError: a field that cannot be; nothing has changed.
            CacheError: the books refuse the rollback or the rows; nothing has changed.
        """
        if not (entry.restore or entry.drop or entry.snapshot or entry.keep):
            self.cache.plan.check_append(entry.rows)
            return ()
        self._require_slots(entry)
        dropped = [snap for slot, snap in enumerate(self.slots) if entry.drop >> slot & 1] if entry.drop else ()
        if entry.rows:
            self._plan_after(entry, dropped).check_append(entry.rows)
        if entry.restore:
            self.cache.rollback(self.slots[entry.restore - 1], entry.accept)
            self.cache.pos = entry.base_len
        for snap in dropped:
            snap.drop()
        if entry.snapshot and not entry.snapshot_at:
            self.cache.snapshot_into(self.slots[entry.snapshot - 1], entry.pin > 0)
        return self._captures(entry) if entry.snapshot_at or entry.keep else ()

    def commit(self, entry: Entry, captures: Captures) -> None:
        """Moves `pos` behind the step's rows, which the forward has appended, and takes the snapshots it has filled."""
        self.cache.plan.pos += entry.rows
        for at, snap in captures:
            pinned = entry.snapshot > 0 and entry.pin > 0 and snap is self.slots[entry.snapshot - 1]
            self.cache.mark_snapshot(snap, entry.base_len + at, pinned)

    def _plan_after(self, entry: Entry, dropped: Sequence[CacheSnapshot]) -> CachePlan:
        """The books as they are when the step's rows come."""
        plan = self.cache.plan
        if not (entry.restore or dropped):
            return plan
        after = plan.copy()
        if entry.restore and (mark := self._live(entry.restore - 1)) is not None:
            after.rollback(mark, entry.accept)
            after.pos = entry.base_len
        for snap in dropped:
            if snap.mark is not None:
                after.drop(snap.mark)
        return after

    def _captures(self, entry: Entry) -> Captures:
        """The states to take after some of the step's rows."""
        first, user = entry.rows - entry.keep, self.shape.snapshots
        captures = [(entry.snapshot_at, self.slots[entry.snapshot - 1])] if entry.snapshot and entry.snapshot_at else []
        captures += [(first + i, self.slots[user + i]) for i in range(entry.keep)]
        return tuple(sorted(captures, key=lambda capture: capture[0]))

    def _require_slots(self, entry: Entry) -> None:
        user, kept = self.shape.snapshots, len(self.slots) - self.shape.snapshots
        if not (
            entry.snapshot <= user
            and entry.snapshot_at <= entry.rows
            and entry.drop < 1 << user
            and entry.keep <= kept
            and entry.keep < max(1, entry.rows)
        ):
            raise StageError(
                f"{self.name} has {user} snapshots and {kept} kept states, and a step of {entry.rows} rows takes slot "
                f"{entry.snapshot} at row {entry.snapshot_at}, drops {entry.drop:#x} and keeps {entry.keep}: refused"
            )

    def _live(self, slot: int) -> SnapshotMark | None:
        mark = self.slots[slot].mark if slot < len(self.slots) else None
        return mark if mark in self.cache.plan.live else None


def bytes_by_kind(sessions: Iterable[StageSession], charge: Callable[[SessionShape], Mapping[Kind, int]]) -> dict[Kind, int]:
    """What the slabs of sessions are for; `charge` says it of one of a shape."""
    total: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
    for shape, alike in Counter(session.shape for session in sessions).items():
        for kind, size in charge(shape).items():
            total[kind] += alike * size
    return total
