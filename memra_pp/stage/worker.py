"""`StageWorker`: one stage's sessions and model. A plain object: the same worker runs in a Ray actor and in the caller's
process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np

from ..cache import Cache, CacheSnapshot
from ..cache.sizing import Recurrent, state_copies
from ..errors import InputError, MemraError, StageError
from ..kernels import CpuDev
from ..kernels.cpu import available_bytes
from ..models.protocol import Array, LogitRows, Segment, StageModel, StepBatch
from .frames import Entry, Frame
from .spec import StageSpec

log = logging.getLogger(__name__)

RESERVE_BYTES = 128 << 20
"""Left free beside weights, workspace and caches."""

MAX_SESSIONS = 65536
MAX_SNAPSHOTS = 64
MAX_FAULT_BYTES = 1000
_F32 = np.dtype(np.float32)
_NO_ROWS = np.empty(0, np.int32)
_LOGIT_ROWS = get_args(LogitRows)
_WANTS = ("logits", "argmax")


@dataclass
class StageSession:
    """A session on this stage: its cache slice, the next `seq` it takes, and what the one before was answered with."""

    cache: Cache
    snapshots: list[CacheSnapshot]
    bytes: int
    seq: int = 1
    ack: Any = None
    fault: list[Any] | None = None

    def close(self) -> None:
        """Gives the slice's bytes back."""
        self.cache.close()


@dataclass
class StageCounters:
    """What a stage has done: seconds computing and waiting, steps and rows."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    rows: int = 0
    faults: int = 0


_Step = tuple[Entry, StageSession, int]
"""An admitted entry, its session and where its rows begin in the frame's array."""


@dataclass
class StageWorker:
    """Applies frames to one stage's sessions, in order, and answers with each entry's ack."""

    spec: StageSpec
    model: StageModel
    device: CpuDev
    epoch: int = 1
    counters: StageCounters = field(default_factory=StageCounters)
    sessions: dict[int, StageSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last = self.spec.last
        self._width = self.spec.cfg.n_vocab if self._last else self.spec.cfg.n_embd

    @classmethod
    def load(cls, spec: StageSpec, model: type[StageModel]) -> StageWorker:
        """Loads the stage's weights.

        Raises:
            ConfigError: the weights are missing, damaged or not of this model.
        """
        device = CpuDev(threads=spec.threads)
        return cls(spec=spec, model=model.load(spec.model, spec.layers, device), device=device)

    def settle_budget(self) -> int:
        """Fixes the bytes this stage's caches may take, once every stage on the machine has loaded its weights.

        Raises:
            StageError: nothing is left after the weights and the workspace.
        """
        budget = self.spec.budget_bytes
        if budget is None:
            workspace = self.model.workspace_bytes(self.spec.max_rows)
            budget = available_bytes() // self.spec.share - workspace - RESERVE_BYTES
            if budget < 1:
                raise StageError(f"{self.spec}: no memory is left for caches: {-budget} bytes short; use more machines")
        self.device.budget_bytes = budget
        return budget

    def apply(self, frame: Frame) -> None:
        """Applies a frame in place: its rows become this stage's, its entries gain this stage's acks.

        Nothing is raised for a bad or failed entry: it travels on as a tombstone, and the others are not touched.
        """
        x = frame.arrays[0] if frame.arrays else _NO_ROWS
        steps: list[_Step] = []
        start = rows = 0
        for entry in frame.entries:
            end = start + entry.rows
            try:
                if entry.fault is not None:
                    self._pass_tombstone(entry)
                elif entry.op == "step":
                    session = self._admit(entry, end <= len(x))
                    if session is not None:
                        steps.append((entry, session, start))
                        rows += entry.rows
                else:
                    self._control(entry, steps)
            except MemraError as error:
                self._bury(entry, error)
            except Exception as error:
                log.exception("%s: an entry failed", self.spec)
                self._bury(entry, error)
            start = end
        if steps and rows != len(x):
            x = np.concatenate([x[at : at + entry.rows] for entry, _, at in steps])
        frame.arrays = self._run(steps, x) if steps else []

    def stats(self) -> dict[str, Any]:
        """Counters, bytes and lengths of this stage, as msgpack can carry them."""
        return {
            "stage": self.spec.stage,
            "layers": [self.spec.layers.start, self.spec.layers.stop],
            "device": f"cpu x{self.spec.threads}",
            "pid": os.getpid(),
            "budget_bytes": self.device.budget_bytes,
            "allocated_bytes": self.device.allocated_bytes,
            "sessions": len(self.sessions),
            **asdict(self.counters),
        }

    def close(self) -> None:
        """Closes every session and the device."""
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
        self.device.close()

    def _admit(self, entry: Entry, has_rows: bool) -> StageSession | None:
        """Checks a step; the session whose rows are to run, None for a repeat, which is answered as the first time."""
        session = self._session(entry)
        plan = session.cache.plan
        if entry.seq != session.seq or entry.base_len != plan.pos or entry.epoch != self.epoch:
            self._answer_repeat(entry, session)
            return None
        if entry.rows < 1 or not has_rows or entry.logits not in _LOGIT_ROWS or entry.want not in _WANTS:
            raise StageError(
                f"{self.spec}: a step of {entry.rows} rows, in the frame: {has_rows}, logits={entry.logits!r:.80}, "
                f"want={entry.want!r:.80}: it must have rows, and ask for none, last or all as logits or argmax"
            )
        plan.check_append(entry.rows)
        session.seq += 1
        return session

    def _answer_repeat(self, entry: Entry, session: StageSession) -> None:
        """Answers a repeat of the session's last step as the first time; anything else out of turn is refused."""
        self._require_epoch(entry)
        if not 1 <= entry.seq == session.seq - 1:
            raise StageError(
                f"{self.spec}: session {entry.session} stands at seq {session.seq}, row {session.cache.pos}; "
                f"an entry with seq {entry.seq}, row {entry.base_len} is refused"
            )
        entry.rows, entry.fault = 0, session.fault
        if session.fault is None:
            entry.acks.append(session.ack)

    def _control(self, entry: Entry, steps: Sequence[_Step]) -> None:
        """Applies an entry that has no rows."""
        self._require_epoch(entry)
        if any(step.session == entry.session for step, _, _ in steps):
            raise StageError(f"{self.spec}: session {entry.session} has a step in this frame already: one a frame is allowed")
        match entry.op:
            case "open":
                entry.acks.append(self._open(entry))
            case "close":
                entry.acks.append(self._close(entry))
            case _:
                raise StageError(f"{self.spec}: an entry of op {entry.op!r:.80}: it must be open, step or close")

    def _require_epoch(self, entry: Entry) -> None:
        if entry.epoch != self.epoch:
            raise StageError(f"an entry of epoch {entry.epoch}, but {self.spec} is wired in epoch {self.epoch}: refused")

    def _is_next(self, entry: Entry, session: StageSession) -> bool:
        """Whether an entry takes its session's turn, be it applied or a tombstone: no other entry changes a session."""
        turn = (self.epoch, session.seq, session.cache.pos)
        return entry.op == "step" and (entry.epoch, entry.seq, entry.base_len) == turn

    def _session(self, entry: Entry) -> StageSession:
        session = self.sessions.get(entry.session)
        if session is None:
            raise StageError(f"{self.spec} has no session {entry.session}: open it first")
        return session

    def _open(self, entry: Entry) -> int:
        if entry.session in self.sessions or len(self.sessions) >= MAX_SESSIONS:
            raise StageError(f"{self.spec}: session {entry.session} is open already, or {MAX_SESSIONS} are")
        before = self.device.allocated_bytes
        ctx, copies = self._checked_args(entry.args)
        layers = self.spec.layers
        cache = Cache.new_ppn_slice(self.device, layers.start, layers.stop, self.spec.cfg, ctx, policy=self.spec.policy)
        try:
            snapshots = [cache.new_snapshot() for _ in range(copies)]
        except BaseException:
            cache.close()
            raise
        allocated = self.device.allocated_bytes - before
        self.sessions[entry.session] = StageSession(cache, snapshots, allocated)
        return allocated

    def _checked_args(self, args: Mapping[str, Any]) -> tuple[int, int]:
        """What an open entry asks for: rows of context, and copies of the recurrent state."""
        bounds = {"ctx": (1, self.spec.cfg.max_ctx), "snapshots": (0, MAX_SNAPSHOTS), "speculate": (0, self.spec.max_rows)}
        for name, (lo, hi) in bounds.items():
            value = args.get(name)
            if type(value) is not int or not lo <= value <= hi:
                raise InputError(f"{self.spec}: a session with {name}={value!r:.80}: it must be an integer from {lo} to {hi}")
        if args.get("recurrent") not in get_args(Recurrent):
            raise InputError(f"{self.spec}: a session with recurrent={args.get('recurrent')!r:.80}: choose replay or states")
        return args["ctx"], state_copies(args["snapshots"], args["recurrent"], args["speculate"])

    def _close(self, entry: Entry) -> int:
        session = self.sessions.pop(entry.session, None)
        if session is None:
            return 0
        session.close()
        return session.bytes

    def _run(self, steps: list[_Step], x: Array) -> list[Array]:
        batch = StepBatch(tuple([Segment(e.base_len, e.rows, e.logits) for e, _, _ in steps]))  # type: ignore[arg-type]
        started = time.perf_counter()
        try:
            y = self.model.forward(batch, x, [session.cache for _, session, _ in steps])
            shape = (batch.n_logits if self._last else len(x), self._width)
            if y.shape != shape or y.dtype != _F32:
                raise StageError(f"{self.spec}: the model returned {y.dtype} {y.shape} where float32 {shape} belongs")
        except Exception as error:
            log.exception("%s: a step failed", self.spec)
            for entry, session, _ in steps:
                self._bury(entry, error)
                session.fault = entry.fault
            return []
        counters = self.counters
        counters.compute_s += time.perf_counter() - started
        counters.steps += 1
        counters.rows += len(x)
        for entry, session, _ in steps:
            plan = session.cache.plan
            plan.pos += entry.rows
            session.ack, session.fault = plan.pos, None
            entry.acks.append(plan.pos)
        return _answers(batch, [e for e, _, _ in steps], y) if self._last else [np.ascontiguousarray(y)]

    def _bury(self, entry: Entry, error: Exception) -> None:
        self.counters.faults += 1
        message = str(error).encode(errors="replace")[:MAX_FAULT_BYTES].decode(errors="ignore")
        entry.fault = [self.spec.stage, type(error).__name__, message]
        self._pass_tombstone(entry)

    def _pass_tombstone(self, entry: Entry) -> None:
        """A tombstone takes its session's turn, without rows."""
        session = self.sessions.get(entry.session)
        if session is not None and self._is_next(entry, session):
            session.seq += 1
            session.fault = entry.fault
        entry.rows = 0


def _answers(batch: StepBatch, entries: Sequence[Entry], logits: Array) -> list[Array]:
    """One array an entry that asked for something: its logits rows f32 `[n, n_vocab]`, or their argmax i32 `[n]`."""
    answers: list[Array] = []
    at = 0
    for segment, entry in zip(batch.segments, entries, strict=True):
        n = segment.logit_count
        entry.rows = 0
        if n == 0:
            continue
        rows = logits[at : at + n]
        at += n
        entry.out = len(answers)
        answers.append(rows.argmax(-1).astype(np.int32) if entry.want == "argmax" else rows)
    return answers
