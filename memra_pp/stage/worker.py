"""`StageWorker`: one stage's sessions and model. A plain object: the same worker runs in a Ray actor and in the caller's
process."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from time import monotonic
from typing import Any

import numpy as np

from ..admission import Device, SessionShape
from ..cache import slab_bytes_by_kind
from ..errors import CapacityExceeded, InputError, MemraError, StageError, checked_int, require
from ..kernels.backend import Rows
from ..kernels.devices import open_device
from ..kernels.memory import ArenaDev
from ..models.protocol import Array, Segment, StageModel, StepBatch
from . import carry, frames, taps
from .answers import answers
from .boundary import Boundary
from .frames import ARGMAX, READ, STEP, WRITE, Entry, Frame, Note
from .session import Captures, StageSession, bytes_by_kind
from .spans import Spans
from .spec import StageSpec

log = logging.getLogger(__name__)

RESERVE_BYTES = 128 << 20
"""Left free beside weights, workspace and caches."""

MAX_SESSIONS = 65536
KEPT_SHAPES = 1024
"""Shapes whose bytes are kept: sessions come in a few."""
MAX_FAULT_BYTES = 1000
_F32 = np.dtype(np.float32)


@dataclass(slots=True)
class StageCounters:
    """What a stage has done since it was loaded."""

    steps: int = 0
    rows: int = 0
    faults: int = 0


_Step = tuple[int, Entry, StageSession, Captures, int]
"""An admitted entry's index, the entry, its session, what it captures, and where its rows begin in the frame's array."""

_segment_of: Any = partial(tuple.__new__, Segment)
"""A segment of its fields, made without the steps of `Segment.__new__`, on every hop of a token."""


@dataclass
class StageWorker:
    """Applies frames to one stage's sessions, in order, and answers each entry."""

    spec: StageSpec
    model: StageModel
    device: ArenaDev
    epoch: int = 1
    counters: StageCounters = field(default_factory=StageCounters)
    sessions: dict[int, StageSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = Spans(self.spec.stages)
        self._last = self.spec.last
        self._newest = 0
        self._loaded_bytes = 0
        self._torn = False
        self._width = self.spec.cfg.n_vocab if self._last else self.spec.cfg.n_embd
        self._most_wanted = ARGMAX + self.spec.cfg.n_vocab
        self.boundary = Boundary(self.spec, self.device)
        layout, granularity = self.spec.layout, self.device.granularity
        self._charge = lru_cache(KEPT_SHAPES)(lambda shape: slab_bytes_by_kind(layout(shape), granularity))

    @classmethod
    def load(cls, spec: StageSpec, model: type[StageModel], gpu: int | None = None) -> StageWorker:
        """Loads the stage's weights. `gpu` is the place of its GPU among those that this process sees (None: as it is named).

        Raises:
            ConfigError: the weights are missing, damaged or not of this model, or the device is not there.
        """
        device = open_device(spec.device, spec.threads, gpu)
        try:
            return cls(spec=spec, model=model.load(spec.model, spec.layers, device), device=device)
        except BaseException:
            device.close()
            raise

    def share(self) -> Device:
        """This stage's part of its device: bytes for sessions, once every stage on the machine has loaded its weights.

        Raises:
            StageError: nothing is left after the weights and the workspace.
        """
        budget = self.spec.budget_bytes
        if budget is None:
            budget = self.device.spare_bytes() // self.spec.share - self._workspace - RESERVE_BYTES
            if budget < 1:
                raise StageError(f"{self.spec}: no memory is left for caches: {-budget} bytes short; use more devices")
        return Device(self.spec.pool, budget, self.device.granularity)

    def reserve(self, budget: int) -> None:
        """Reserves the arena of this stage's device, `budget` bytes. What stages share, each of them maps.

        Raises:
            StageError: it cannot be had.
        """
        try:
            self.device.reserve(budget)
        except CapacityExceeded as error:
            raise StageError(f"{self.spec}: {error}") from error
        self._loaded_bytes = self.device.allocated_bytes

    @property
    def learned_bytes(self) -> int:
        """The most bytes that the device has handed out beside slabs since, beyond the workspace that was planned."""
        return max(0, self.device.peak_bytes - self._loaded_bytes - self._workspace)

    def begin(self, epoch: int) -> None:
        """Begins an epoch, the lanes wired anew: every session of the one before is gone, and its bytes are free."""
        for session in self.sessions.values():
            session.slab.close()
        self.sessions.clear()
        self.device.keep_only(())
        self.epoch, self._newest, self._torn = epoch, 0, False

    def apply(self, frame: Frame) -> None:
        """Applies a frame in place: its rows become this stage's, its notes gain what this stage has to say.

        Nothing is raised for a bad or failed entry: it travels on as a tombstone, and the others are not touched. What is
        raised ends the stage: its device is lost, or a neighbour.
        """
        began = monotonic()
        notes, arrays, slot = frame.notes, frame.arrays, frame.slot
        frame.slot = 0
        there = self.boundary.room(slot) if slot else len(arrays[0]) if arrays else 0
        steps: dict[int, _Step] = {}
        start = rows = 0
        for i, entry in enumerate(frame.entries):
            end = start + entry.rows
            try:
                if notes and frame.fault(i) is not None:
                    self._pass_tombstone(frame, i)
                elif entry.session in steps:
                    raise StageError(
                        f"{self.spec}: session {entry.session} has a step in this frame already: one a frame is allowed"
                    )
                elif entry.op != STEP:
                    self._control(frame, i)
                elif (begun := self._begin(frame, i, entry, end <= there)) is not None and end > start:
                    steps[entry.session] = i, entry, *begun, start
                    rows += end - start
            except MemraError as error:
                self._bury(frame, i, error)
            except Exception as error:
                log.exception("%s: an entry failed", self.spec)
                self._bury(frame, i, error)
            start = end
        if slot and rows:
            arrays = [self.boundary.rows(slot, start), *arrays]
        if rows:
            frame.arrays = self._run(frame, [*steps.values()], arrays, rows)
        elif not frame.entries or frame.entries[0].op not in (READ, WRITE):
            frame.arrays = []
        if slot:
            self.boundary.done(slot)
        frame.hops += 1
        if frame.id > self._newest:
            self._newest = frame.id
        self.spans.computed(frame, began)

    def stats(self) -> dict[str, Any]:
        """Counters and bytes of this stage, as msgpack can carry them. `bytes` says what sessions' bytes are for; they add up
        to `allocated_bytes`, but for a session that is opened or closed in this very moment."""
        return {
            "stage": self.spec.stage,
            "layers": [self.spec.layers.start, self.spec.layers.stop],
            "device": f"{self.spec.device} {self.device.label}",
            "node": self.spec.node,
            "pid": os.getpid(),
            "arena_bytes": self.device.arena_bytes,
            "allocated_bytes": self.device.slab_bytes,
            "bytes": bytes_by_kind([*self.sessions.values()], self._charge),
            "learned_bytes": self.learned_bytes,
            "sessions": len(self.sessions),
            "boundary": self.boundary.kind,
            **self.spans.totals(),
            **asdict(self.counters),
        }

    def close(self) -> None:
        """Closes every session and the device."""
        for session in self.sessions.values():
            session.slab.close()
        self.sessions.clear()
        self.device.close()

    @cached_property
    def _workspace(self) -> int:
        return self.model.workspace_bytes(self.spec.max_rows)

    def _begin(self, frame: Frame, i: int, entry: Entry, has_rows: bool) -> tuple[StageSession, Captures] | None:
        """Checks a step as a whole, and applies what comes before its rows: its session, which takes another step then, and
        what it captures. None for a repeat of the session's last step, which is answered as the first time."""
        session = self.sessions.get(entry.session)
        if session is None:
            raise StageError(f"{self.spec} has no session {entry.session}: open it first")
        base = session.base(entry) if entry.restore else session.cache.plan.pos
        if entry.seq != session.seq or entry.epoch != self.epoch or entry.base_len != base:
            self._answer_repeat(frame, i, session)
            return None
        if session.broken:
            raise StageError(f"{self.spec}: session {entry.session} broke in the step before: reset it first")
        if not (
            has_rows
            and entry.logits <= entry.rows
            and (entry.rows or entry.snapshot or entry.restore)
            and entry.want <= self._most_wanted
        ):
            raise StageError(
                f"{self.spec}: a step of {entry.rows} rows (there: {has_rows}), logits={entry.logits}, want={entry.want}: it "
                f"must do something, ask for no more answers than rows, and want at most {self._most_wanted}"
            )
        tapped = taps.own_layers(self.spec, entry, note) if frame.notes and (note := frame.notes.get(i)) else ()
        captures = session.begin(entry)
        if tapped:
            taps.arm(session, tapped, entry.rows)
        session.seq += 1
        session.fault = None
        return session, captures

    def _answer_repeat(self, frame: Frame, i: int, session: StageSession) -> None:
        """Answers a repeat of the session's last step as the first time; anything else out of turn is refused."""
        entry = frame.entries[i]
        self._require_epoch(entry)
        if not 1 <= entry.seq == session.seq - 1:
            base = session.base(entry)
            stands = f"slot {entry.restore - 1} holds no live snapshot" if base is None else f"row {base}"
            raise StageError(
                f"{self.spec}: session {entry.session} stands at seq {session.seq}, {stands}; "
                f"an entry with seq {entry.seq}, row {entry.base_len} is refused"
            )
        frame.entries[i] = entry._replace(rows=0)
        if session.fault is not None:
            frame.bury(i, session.fault)

    def _control(self, frame: Frame, i: int) -> None:
        """Applies an entry that has no rows."""
        entry = frame.entries[i]
        self._require_epoch(entry)
        if entry.rows:
            raise StageError(f"{self.spec}: an entry of op {entry.op} with {entry.rows} rows: only a step has rows")
        if frame.id <= self._newest:
            raise StageError(f"{self.spec}: frame {frame.id} comes after frame {self._newest}: it is late or a repeat, refused")
        note = frame.notes.get(i, {})
        if self._torn:
            self.device.keep_only(session.slab for session in self.sessions.values())
        self._torn = True
        match entry.op:
            case frames.OPEN:
                self._open(entry.session, note)
                self._report_bytes(note)
            case frames.CLOSE:
                self._close(entry.session)
                self._report_bytes(note)
            case frames.RESET:
                self._reset(entry)
            case frames.SEAT | frames.READ | frames.WRITE:
                carry.apply(self.spec, self.device, self.sessions.get(entry.session), entry, note, frame)
            case _:
                raise StageError(f"{self.spec}: an entry of op {entry.op}: it is none that rides the chain")
        self._torn = False

    def _require_epoch(self, entry: Entry) -> None:
        if entry.epoch != self.epoch:
            raise StageError(f"an entry of epoch {entry.epoch}, but {self.spec} is wired in epoch {self.epoch}: refused")

    def _open(self, number: int, note: Note) -> None:
        """Allocates a session as the `args` of its note say, in the slab of this stage that it names."""
        if number in self.sessions or len(self.sessions) >= MAX_SESSIONS:
            raise StageError(f"{self.spec}: session {number} is open already, or {MAX_SESSIONS} are")
        of, cfg = f"{self.spec}: a session with ", self.spec.cfg
        shape = SessionShape.checked(note.get("args"), of, cfg.max_ctx, self.spec.max_rows)
        offset, size = (self._own_number(note, name) for name in ("offsets", "charges"))
        need = sum(self._charge(shape).values())
        if size != need:
            raise StageError(f"{self.spec}: session {number} was charged {size} bytes and takes {need}: this is a bug")
        slab = self.device.slab(offset, size)
        try:
            self.sessions[number] = StageSession.open(slab, self.spec, number, shape)
        except Exception:
            slab.close()
            raise

    def _own_number(self, note: Note, name: str) -> int:
        """This stage's entry in a list of a note, one number of bytes a stage."""
        given: Any = note.get(name)
        require(isinstance(given, list) and len(given) == self.spec.stages, InputError, name, given, "a number for every stage")
        return checked_int(InputError, name, given[self.spec.stage], 0, self.device.arena_bytes)

    def _reset(self, entry: Entry) -> None:
        """Empties a session that broke, in the very bytes it had; it goes on with the `seq` after the entry's."""
        session = self.sessions.get(entry.session)
        if session is None or entry.seq < session.seq:
            raise StageError(f"{self.spec}: a reset of session {entry.session}, seq {entry.seq}: it is not open, or further on")
        session.slab.clear()
        fresh = StageSession.open(session.slab, self.spec, entry.session, session.shape)
        fresh.seq = entry.seq + 1
        self.sessions[entry.session] = fresh

    def _close(self, number: int) -> None:
        session = self.sessions.pop(number, None)
        if session is not None:
            session.slab.close()

    def _report_bytes(self, note: Note) -> None:
        """Adds to the note of an open or a close what sessions hold here now, and what was learned, in bytes."""
        if isinstance(held := note.get("held"), list):
            held.append([self.device.slab_bytes, self.learned_bytes])

    def _run(self, frame: Frame, steps: list[_Step], given: list[Rows], rows: int) -> list[Array]:
        """One forward over every admitted step, `rows` of the given ones; the rows of the next stage, or the answers on the
        last, then the taps."""
        segments, caches = [], []
        for _, e, session, captures, _ in steps:
            segments.append(_segment_of((e.base_len, e.rows, e.logits, captures)))
            caches.append(session.cache)
        batch = StepBatch(tuple(segments))
        x, *tapped = given
        if rows != len(x):
            kept = np.concatenate([np.arange(at, at + e.rows) for _, e, _, _, at in steps])
            x = x[kept] if isinstance(x, np.ndarray) else self.device.backend.take(x, kept)
        backend, counters = self.device.backend, self.counters
        counters.steps += 1
        counters.rows += rows
        try:
            backend.begin()
            y = self.model.forward(batch, x, caches)
            shape = (batch.n_logits if self._last else rows, self._width)
            if y.shape != shape or y.dtype != _F32:
                raise StageError(f"{self.spec}: the model returned {y.dtype} {y.shape} where float32 {shape} belongs")
            backend.settle()
            out = answers(batch, [entry.want for _, entry, _, _, _ in steps], y) if self._last else []
        except Exception as error:
            log.exception("%s: a step failed", self.spec)
            if self.device.lost(error):
                raise
            for i, _, session, *_ in steps:
                self._break(frame, i, error, session)
            return []
        for i, entry, session, captures, _ in steps:
            session.commit(entry, captures)
            if frame.notes:
                taps.collect(session, frame.notes.get(i, {}), tapped)
        if not self._last:
            out = self.boundary.give(frame, y)
        return out + tapped

    def refuse(self, frame: Frame, error: MemraError) -> None:
        """Makes tombstones of all entries of a frame that has been applied and cannot travel on."""
        for i, entry in enumerate(frame.entries):
            session = self.sessions.get(entry.session) if entry.op == STEP else None
            if frame.fault(i) is None and session is not None:
                self._break(frame, i, error, session)
            elif frame.fault(i) is None:
                self._bury(frame, i, error)
        frame.arrays = []
        self.boundary.take_back(frame)

    def _break(self, frame: Frame, i: int, error: Exception, session: StageSession) -> None:
        """Buries a step that may have changed its session: until that is reset, it takes no other."""
        self._bury(frame, i, error)
        session.fault, session.broken = frame.fault(i), True

    def _bury(self, frame: Frame, i: int, error: Exception) -> None:
        """Turns an entry into a tombstone: it takes its turn on every stage, and is applied on none."""
        self.counters.faults += 1
        message = str(error).encode(errors="replace")[:MAX_FAULT_BYTES].decode(errors="ignore")
        frame.bury(i, [self.spec.stage, type(error).__name__, message])
        self._pass_tombstone(frame, i)

    def _pass_tombstone(self, frame: Frame, i: int) -> None:
        """A tombstone takes its session's turn if it is its turn in every respect: no other entry changes a session."""
        entry = frame.entries[i] = frame.entries[i]._replace(rows=0)
        session = self.sessions.get(entry.session)
        if session is None or entry.op != STEP:
            return
        if (entry.epoch, entry.seq, entry.base_len) == (self.epoch, session.seq, session.base(entry)):
            session.seq += 1
            session.fault = frame.fault(i)
