"""`StageWorker`: one stage's sessions and model. A plain object: the same worker runs in a Ray actor and in the caller's
process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..cache import Cache, CacheSnapshot
from ..cache.sizing import state_copies
from ..errors import MemraError, StageError
from ..kernels import CpuDev
from ..kernels.cpu import available_bytes
from ..models.protocol import Array, Segment, StageModel, StepBatch
from .frames import Entry, Frame
from .spec import StageSpec

log = logging.getLogger(__name__)

RESERVE_BYTES = 128 << 20
"""Left free beside weights, workspace and caches."""

MAX_SESSIONS = 65536


@dataclass
class StageSession:
    """A session on this stage: its cache slice, the next `seq` it takes, and the ack of the one before."""

    cache: Cache
    snapshots: list[CacheSnapshot]
    bytes: int
    seq: int = 1
    ack: Any = None

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


@dataclass
class StageWorker:
    """Applies frames to one stage's sessions, in order, and answers with each entry's ack."""

    spec: StageSpec
    model: StageModel
    device: CpuDev
    epoch: int = 1
    counters: StageCounters = field(default_factory=StageCounters)
    sessions: dict[int, StageSession] = field(default_factory=dict)

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
        steps: list[tuple[Entry, StageSession, Array]] = []
        at = 0
        for entry in frame.entries:
            rows = frame.arrays[0][at : at + entry.rows] if entry.rows else None
            at += entry.rows
            if entry.fault is not None:
                self._pass_tombstone(entry)
                continue
            try:
                session = self._admit(entry)
                if session is not None and rows is not None:
                    steps.append((entry, session, rows))
            except MemraError as error:
                self._bury(entry, error)
        frame.arrays = self._run(steps) if steps else []

    def stats(self) -> dict[str, Any]:
        """Counters, bytes and lengths of this stage, as msgpack can carry them."""
        return {
            "stage": self.spec.stage,
            "layers": [self.spec.layers.start, self.spec.layers.stop],
            "device": f"cpu x{self.spec.threads}",
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

    def _admit(self, entry: Entry) -> StageSession | None:
        """Checks an entry and applies what is not rows; the session whose rows are to run, None if there are none."""
        if entry.epoch != self.epoch:
            raise StageError(f"an entry of epoch {entry.epoch}, but {self.spec} is wired in epoch {self.epoch}: refused")
        if entry.op == "open":
            entry.acks.append(self._open(entry))
            return None
        if entry.op == "close":
            entry.acks.append(self._close(entry))
            return None
        session = self._session(entry)
        if entry.seq == session.seq - 1:
            entry.acks.append(session.ack)
            entry.rows = 0
            return None
        if entry.seq != session.seq or entry.base_len != session.cache.pos:
            raise StageError(
                f"{self.spec}: session {entry.session} stands at seq {session.seq}, row {session.cache.pos}; "
                f"an entry with seq {entry.seq}, row {entry.base_len} is refused"
            )
        return session

    def _session(self, entry: Entry) -> StageSession:
        session = self.sessions.get(entry.session)
        if session is None:
            raise StageError(f"{self.spec} has no session {entry.session}: open it first")
        return session

    def _open(self, entry: Entry) -> int:
        if entry.session in self.sessions or len(self.sessions) >= MAX_SESSIONS:
            raise StageError(f"{self.spec}: session {entry.session} is open already, or {MAX_SESSIONS} are")
        before = self.device.allocated_bytes
        args, layers = entry.args, self.spec.layers
        cache = Cache.new_ppn_slice(self.device, layers.start, layers.stop, self.spec.cfg, args["ctx"], policy=self.spec.policy)
        try:
            copies = state_copies(args["snapshots"], args["recurrent"], args["speculate"])
            snapshots = [cache.new_snapshot() for _ in range(copies)]
        except BaseException:
            cache.close()
            raise
        allocated = self.device.allocated_bytes - before
        self.sessions[entry.session] = StageSession(cache, snapshots, allocated)
        return allocated

    def _close(self, entry: Entry) -> int:
        session = self.sessions.pop(entry.session, None)
        if session is None:
            return 0
        session.close()
        return session.bytes

    def _run(self, steps: list[tuple[Entry, StageSession, Array]]) -> list[Array]:
        batch = StepBatch(tuple(Segment(e.base_len, e.rows, e.logits) for e, _, _ in steps))  # type: ignore[arg-type]
        parts = [rows for _, _, rows in steps]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts)
        started = time.perf_counter()
        try:
            y = self.model.forward(batch, x, [s.cache for _, s, _ in steps])
        except (MemraError, ArithmeticError, MemoryError, ValueError, TypeError, LookupError, RuntimeError) as error:
            log.exception("%s: a step failed", self.spec)
            for entry, session, _ in steps:
                self._bury(entry, error)
                session.seq += 1
            return []
        self.counters.compute_s += time.perf_counter() - started
        self.counters.steps += 1
        self.counters.rows += len(x)
        for entry, session, _ in steps:
            session.cache.pos += entry.rows
            session.seq += 1
            session.ack = session.cache.pos
            entry.acks.append(session.ack)
        return _answers(batch, [e for e, _, _ in steps], y) if self.spec.last else [y]

    def _bury(self, entry: Entry, error: Exception) -> None:
        self.counters.faults += 1
        entry.rows = 0
        entry.fault = [self.spec.stage, type(error).__name__, str(error)]

    def _pass_tombstone(self, entry: Entry) -> None:
        session = self.sessions.get(entry.session)
        if session is not None and entry.op == "step" and entry.seq == session.seq:
            session.seq += 1
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
