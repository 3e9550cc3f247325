"""`Books`: what the driver knows of one session on every stage. It prepares each step before it is sent, so that what is
refused has changed nothing, and writes it down once it is sent: every stage applies it as it was prepared, or tells of a fault.

Neither a snapshot nor a rollback is sent by itself: it is owed, and rides in front of the next rows, with the accepted rows to
be replayed where the model has recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..admission import SessionShape
from ..cache import CachePlan, KvPolicy, SnapshotMark
from ..config import ModelConfig
from ..errors import CacheError, CapacityExceeded
from ..stage.frames import LOGITS, STEP, Entry


@dataclass(eq=False)
class Slot:
    """A live snapshot of the user's: which slot holds it on every stage."""

    index: int
    mark: SnapshotMark


@dataclass(frozen=True)
class Owed:
    """What the stages have not been told: a rollback (`restore` as in `Entry`, 0 if they have) and the tokens from row `base`
    on, which are to be replayed."""

    restore: int
    accept: int
    base: int


class Take(NamedTuple):
    """A snapshot to take: into which slot, after how many rows of the step, whether it pins, and whether the books have it."""

    slot: int
    at: int
    pin: bool
    fresh: Slot | None = None


@dataclass(frozen=True)
class Step:
    """A step that can be sent: its entry, the tokens of its rows, and the books as they are once it is applied.

    `stood` is how many tokens had been fed, and `held` what the slots held, before it.
    """

    entry: Entry
    rows: list[int]
    fed: list[int]
    plan: CachePlan
    slot: Slot | None
    stood: int
    held: tuple[Slot | None, ...]


@dataclass
class Books:
    """One session's tokens, positions, snapshots and turn in an epoch. `plan.pos` is where the caller stands, whatever is owed.

    `kept` says in which slot the stages keep the state at a row. `retake` lists snapshots to be taken again in a replay, and
    `fresh` those taken where the caller stands, of which the stages have not been told.
    """

    cfg: ModelConfig
    policy: KvPolicy
    shape: SessionShape
    session: int
    epoch: int
    seq: int = 1
    tokens: list[int] = field(default_factory=list)
    owed: Owed | None = None
    drop: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    retake: list[Slot] = field(default_factory=list)
    fresh: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = CachePlan.of(self.cfg, self.shape.ctx, self.policy)
        self.slots: list[Slot | None] = [None] * self.shape.snapshots

    @property
    def replay(self) -> list[int]:
        """The tokens that ride in front of the next rows."""
        return [] if self.owed is None else self.tokens[self.owed.base :]

    def check(self, rows: int, chunk: int) -> None:
        """Whether `rows` new rows can be fed in steps of at most `chunk`.

        Raises:
            CapacityExceeded, SnapshotPinned, CacheError: as `CachePlan.check_append`.
        """
        self._stood().check_append(rows, chunk, replayed=len(self.replay))

    def rows_possible(self) -> int:
        """How many new rows the next step may have at most."""
        return self._stood().rows_possible() - len(self.replay)

    def ahead(self, rows: int, chunk: int, takes: bool) -> tuple[int, Slot | None] | None:
        """How many rows of the replay must go before a step of `rows` new ones, and the snapshot to take behind them; None if
        all that is owed fits in front of them. `takes` says whether the step takes a snapshot itself."""
        base = len(self.tokens) if self.owed is None else self.owed.base
        if self.retake:
            to_mark = self.retake[0].mark.pos - base
            return (to_mark, self.retake[0]) if to_mark <= chunk else (chunk, None)
        replay = len(self.tokens) - base
        if replay and replay + rows > chunk:
            return min(chunk, replay), None
        return (replay, self.fresh[0]) if len(self.fresh) > (not takes) else None

    def free_slot(self) -> int:
        """A slot for one more snapshot.

        Raises:
            CapacityExceeded: as many are live as the session was opened with.
        """
        if None not in self.slots:
            raise CapacityExceeded(
                f"{len(self.slots)} snapshots are live and the session was opened with snapshots={len(self.slots)}: "
                "close one first, or open with more"
            )
        return self.slots.index(None)

    def held(self, index: int) -> Slot:
        """The live snapshot of a slot.

        Raises:
            CacheError: it holds none.
        """
        slot = self.slots[index]
        if slot is None:
            raise CacheError(f"slot {index} of session {self.session} holds no live snapshot: take a new one")
        return slot

    def step(
        self,
        tokens: list[int],
        *,
        logits: int = 0,
        want: int = LOGITS,
        snapshot_at: int | None = None,
        pin: bool = True,
        keep: int = 0,
    ) -> Step:
        """Prepares a step of everything owed and `tokens`; `snapshot_at` counts the new rows.

        Raises:
            CacheError: the rows or the snapshot do not fit; nothing has changed.
        """
        replay, take = self.replay, None
        if snapshot_at is not None:
            take = Take(self.free_slot(), len(replay) + snapshot_at, pin)
        elif self.fresh:
            take = self._take(self.fresh[0], len(replay))
        return self._prepare(replay + tokens, tokens, take, logits=logits, want=want, keep=keep)

    def replay_step(self, rows: int, slot: Slot | None) -> Step:
        """Prepares a step of the first `rows` rows of the replay, taking `slot` again behind them."""
        take = None if slot is None else self._take(slot, rows)
        return self._prepare(self.replay[:rows], [], take)

    def commit(self, step: Step) -> None:
        """Writes down a step that is sent."""
        entry = step.entry
        done = entry.base_len + entry.rows
        self.plan = step.plan
        self.tokens += step.fed
        self.seq += 1
        self.drop = 0
        if entry.keep:
            first = done - entry.keep
            self.kept = {first + i: self.shape.snapshots + i for i in range(entry.keep)}
        if step.slot is not None:
            if step.slot in self.fresh:
                self.fresh.remove(step.slot)
            elif self.retake and step.slot.index == self.retake[0].index:
                self.retake.pop(0).mark = step.slot.mark
            else:
                self.slots[step.slot.index] = step.slot
        self.owed = Owed(0, 0, done) if self.retake or done < len(self.tokens) else None

    def snapshot(self, pin: bool) -> Slot:
        """Takes a snapshot where the caller stands; the stages are told with the next rows.

        Raises:
            CapacityExceeded: as `free_slot`.
        """
        index = self.free_slot()
        slot = self.slots[index] = Slot(index, self.plan.snapshot(pin))
        self.fresh.append(slot)
        return slot

    def rollback(self, slot: Slot, accept: int) -> None:
        """Goes back to a snapshot and keeps `accept` rows after it; the stages are told with the next rows.

        Raises:
            RingLapped, CacheError: as `CachePlan.check_rollback`; nothing has changed.
        """
        mark, pos = slot.mark, self.plan.pos
        self.plan.rollback(mark, accept)
        target = self.plan.pos = mark.pos + accept
        for newer in [s for s in self.slots if s is not None and s.mark not in self.plan.live]:
            self.end(newer)
        if target == pos:
            return
        if target > mark.pos and target in self.kept:
            self.owed = Owed(1 + self.kept[target], 0, target)
            self.kept = {row: kept for row, kept in self.kept.items() if row <= target}
        else:
            self.owed = Owed(1 + slot.index, accept, mark.pos if self.cfg.recurrent else target)
            self.kept = {}
        del self.tokens[target:]

    def adopt(self, tokens: list[int], epoch: int) -> None:
        """The stages have the session fresh, to be filled with what tokens have left elsewhere; snapshots have ended."""
        self.tokens, self.epoch, self.seq = tokens, epoch, 1
        self.plan = CachePlan.of(self.cfg, self.shape.ctx, self.policy)
        self.plan.seat(len(tokens))
        self.slots = [None] * self.shape.snapshots
        self.owed, self.drop, self.kept, self.retake, self.fresh = None, 0, {}, [], []

    @property
    def untold(self) -> bool:
        """Whether there is anything that the stages have not been told."""
        return self.owed is not None or bool(self.fresh)

    def end(self, slot: Slot) -> None:
        """Ends a snapshot; its slot is free at once, and the stages are told with the next step."""
        if self.slots[slot.index] is slot:
            self.slots[slot.index] = None
            self.plan.drop(slot.mark)
            if slot in self.fresh:
                self.fresh.remove(slot)
            else:
                self.drop |= 1 << slot.index

    def restart(self, lost: Step | None, epoch: int, seq: int) -> None:
        """The stages have the session empty, in turn `seq` of `epoch`. What a step that was lost and those behind it did is
        undone, every token before it is to be replayed, every live snapshot to be taken again."""
        if lost is not None:
            del self.tokens[lost.stood :]
            self.slots = list(lost.held)
        live = [slot for slot in self.slots if slot is not None]
        self.retake = sorted(live, key=lambda slot: self.plan.live.index(slot.mark))
        self.plan = CachePlan.of(self.cfg, self.shape.ctx, self.policy)
        self.plan.pos = len(self.tokens)
        self.epoch, self.seq = epoch, seq
        self.drop, self.kept, self.fresh, self.owed = 0, {}, [], Owed(0, 0, 0)

    def _take(self, slot: Slot, at: int) -> Take:
        return Take(slot.index, at, slot.mark.pin, slot if slot in self.fresh else None)

    def _stood(self) -> CachePlan:
        """The books at the row where the next step begins."""
        if self.owed is None:
            return self.plan
        plan = self.plan.copy()
        plan.pos = self.owed.base
        return plan

    def _prepare(self, rows: list[int], fed: list[int], take: Take | None, **asked: int) -> Step:
        """A step of `rows`, of which `fed` are new, behind whatever rollback is owed."""
        owed = self.owed or Owed(0, 0, self.plan.pos)
        plan = self.plan.copy()
        plan.pos = owed.base
        plan.append(len(rows))
        entry = Entry(
            op=STEP,
            session=self.session,
            seq=self.seq,
            epoch=self.epoch,
            base_len=owed.base,
            rows=len(rows),
            restore=owed.restore,
            accept=owed.accept,
            drop=self.drop,
            **asked,
        )
        slot = None
        if take is not None:
            slot = take.fresh or Slot(take.slot, plan.snapshot(take.pin, owed.base + take.at))
            entry = entry._replace(snapshot=1 + take.slot, snapshot_at=take.at, pin=int(take.pin))
        plan.pos = len(self.tokens) + len(fed)
        return Step(entry, rows, fed, plan, slot, len(self.tokens), tuple(self.slots))
