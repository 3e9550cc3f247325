"""`Scheduler`: the one thread that owns the way through the stages. It forms micro-batches, sends them, and hands out what
comes back."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..admission.outcome import Outcome
from ..errors import FrameError, InputError, StageError
from ..models.protocol import Array
from ..stage.frames import CLOSE, OPEN, Entry, Frame, Note
from ..stage.spans import RECV, SEND, Spans
from .batcher import MAX_ENTRIES, Batcher
from .chain import Chain
from .tokens import chunks
from .work import Rewired, Work, replies

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""How often a scheduler, or one that waits for it, looks around though nothing happens."""
REOPEN_S = 60.0
"""How long the stages may take to open sessions again, in frames of many."""
CLOSE_S = 60.0
"""How long a close waits for a frame that is computed in this process."""


class _Flight(NamedTuple):
    works: list[Work]
    timeout: float
    sent: float

    @property
    def deadline(self) -> float:
        return self.sent + self.timeout


class Scheduler:
    """Takes entries from any thread, and tells each what came back.

    When a stage is lost it has the chain wired anew, opens every session again, sends opens and closes that were on their way
    once more, and tells everybody else `Rewired`. Once that cannot be done, or the scheduler was closed, all are told so.
    `spans` keeps its sends and receives for a trace. `hops` counts the ways of frames that came back, to the first stage, from
    each to the next, and back here, and `hop_s` the seconds they spent there rather than in a stage's hands.
    """

    def __init__(self, chain: Chain, batcher: Batcher) -> None:
        self._chain, self._batcher = chain, batcher
        self._inbox: deque[Work] = deque()
        self._gathering: set[int] = set()
        self._flying: dict[int, _Flight] = {}
        self._open: dict[int, Note] = {}
        self._ids = itertools.count(1)
        self.spans = Spans(chain.stages)
        self.hops, self.hop_s = 0, 0.0
        self._stopping = self._telling = False
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="memra-scheduler", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Has an entry sent when its turn comes. It never blocks, nor takes a lock: a finalizer may call it."""
        self._inbox.append(work)
        looks = self._telling and self.mine  # at its inbox, when it has told
        if not (looks or threading.get_ident() in self._gathering or self._ended is not None):
            self._chain.wake()
        if self._ended is not None:
            work.fail(StageError(self._ended))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Has what this thread submits meanwhile looked at at the end, once: the scheduler's thread is not woken for each."""
        gathering = threading.get_ident()
        try:
            self._gathering.add(gathering)
            yield
        finally:
            self._gathering.discard(gathering)
            self._chain.wake()

    def wait(self, outcome: Outcome[Any]) -> None:
        """Waits until a submitted entry was told: at the latest when a frame before it, or its own, is overdue."""
        while not outcome.wait(IDLE_S):
            if not self._thread.is_alive():
                outcome.fail(StageError(self._ended or "the scheduler has ended: launch the pipeline again"))

    @property
    def mine(self) -> bool:
        """Whether the calling thread is the scheduler's own, which must not wait: in a finalizer that happened to run there."""
        return threading.current_thread() is self._thread

    @property
    def idle(self) -> bool:
        """Whether no frame is on its way."""
        return not (self._flying or self._inbox)

    def piece_rows(self, left: int) -> int:
        """How many rows the next piece of a prefill should have, of which `left` rows are left."""
        return self._batcher.piece_rows(left)

    def stop(self) -> None:
        """Has the thread end, and every entry be told so, without waiting for it."""
        self._stopping = True
        self._chain.wake()

    def close(self) -> None:
        """Stops the thread and waits for its end."""
        self.stop()
        if not self.mine:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        ended = "this pipeline is closed: launch it again"
        try:
            while not self._stopping:
                try:
                    self._turn()
                except StageError as error:
                    self._recover(error)
        except StageError as error:
            ended = str(error)
        except BaseException as error:
            log.exception("the scheduler failed")
            ended = f"the scheduler failed ({type(error).__name__}: {error}): launch the pipeline again"
        self._ended = ended
        self._chain.give_up(StageError(ended))
        waiting = [work for flight in self._flying.values() for work in flight.works] + self._batcher.clear()
        while self._inbox:
            waiting.append(self._inbox.popleft())
        for work in waiting:
            work.fail(StageError(ended))

    def _turn(self) -> None:
        now = time.monotonic()
        while self._inbox:
            self._take(self._inbox.popleft(), now)
        while batch := self._batcher.take(now):
            self._send(batch, now)
        if self._inbox:  # more has come meanwhile
            return
        frame = self._chain.recv(self._patience(now))
        if frame is not None:
            if self.spans.tracing:
                self.spans.keep(frame, RECV, now, time.monotonic())
            self._hand_out(frame)
        elif self._flying:
            self._require_punctual()

    def _take(self, work: Work, now: float, lost: Sequence[Work] = ()) -> None:
        """An entry that is to be sent, unless it was prepared for stages as they are no more: an open or a close means the same
        to them still. `lost` is what was on its way to those."""
        if work.entry.epoch != self._chain.epoch:
            if work.entry.op not in (OPEN, CLOSE):
                work.fail(Rewired(work in lost, lost == [work]))
                return
            work.entry = work.entry._replace(epoch=self._chain.epoch)
        self._batcher.add(work, now)

    def _recover(self, error: StageError) -> None:
        flying = [work for flight in self._flying.values() for work in flight.works]
        lost = flying + self._batcher.clear()
        self._flying.clear()
        try:
            self._rewire(error)
        except BaseException as final:
            self._chain.give_up(StageError(str(final)))
            for work in lost:
                work.fail(StageError(str(final)))
            raise
        now = time.monotonic()
        for work in lost:
            self._take(work, now, flying)

    def _rewire(self, error: StageError) -> None:
        """Has the stages wired anew, and every session opened again, in its place."""
        while True:
            self._chain.rewire(error, lambda: self._stopping)
            try:
                for sessions in chunks(list(self._open), MAX_ENTRIES):
                    self._reopen(sessions)
            except StageError as again:
                error = again
            else:
                return

    def _reopen(self, sessions: Sequence[int]) -> None:
        frame = Frame(next(self._ids), [Entry(OPEN, session, 0, self._chain.epoch) for session in sessions])
        frame.notes = {i: {**self._open[session], "held": []} for i, session in enumerate(sessions)}
        self._chain.send(frame)
        deadline, back = time.monotonic() + REOPEN_S, None
        while back is None:
            back = self._chain.recv(IDLE_S)
            if self._stopping or (back is None and time.monotonic() > deadline):
                raise self._chain.fail(StageError(f"{len(sessions)} sessions were not opened again within {REOPEN_S:.0f} s"))
        if (fault := next(filter(None, map(back.fault, range(len(sessions)))), None)) is not None:
            raise self._chain.fail(StageError(f"stage {fault[0]} could not open a session again: {fault[2]}"))

    def _send(self, works: list[Work], now: float) -> None:
        arrays = works[0].arrays if len(works) == 1 else _joined(works)
        notes = {i: work.note for i, work in enumerate(works) if work.note is not None}
        frame = Frame(next(self._ids), [work.entry for work in works], arrays, notes)
        timeout = min([work.timeout for work in works])
        self._flying[frame.id] = _Flight(works, timeout, now)
        began = time.monotonic() if self.spans.tracing else 0.0
        try:
            self._chain.send(frame)
            if self.spans.tracing:
                self.spans.keep(frame, SEND, began, time.monotonic())
        except FrameError as error:
            del self._flying[frame.id]
            self._batcher.back(works, 0.0, time.monotonic())
            for work in works:
                work.fail(InputError(f"this step cannot be sent: {error}"))

    def _hand_out(self, frame: Frame) -> None:
        flight = self._flying.get(frame.id)
        if flight is None:
            raise StageError(f"frame {frame.id} came back and was not on its way: launch the pipeline again")
        if (first := next(iter(self._flying))) != frame.id:  # opens and closes are written down in the order of frames
            raise StageError(f"frame {frame.id} came back before frame {first}, which is lost")
        if frame.hops != self._chain.stages:
            raise StageError(f"{frame.hops} of {self._chain.stages} stages applied frame {frame.id}: launch the pipeline again")
        del self._flying[frame.id]
        now = time.monotonic()
        self.hops += frame.hops + 1
        self.hop_s += max(0.0, now - flight.sent - frame.busy / 1e6)
        self._batcher.back(flight.works, frame.slowest / 1e6, now)
        self._telling = True
        try:
            for work, reply in zip(flight.works, replies(frame), strict=True):
                if work.entry.op and reply.fault is None:
                    self._keep_count(work)
                work.tell(reply)
        finally:
            self._telling = False

    def _keep_count(self, work: Work) -> None:
        """Knows which sessions the stages have open, and how each was."""
        if work.entry.op == OPEN and work.note is not None:
            self._open[work.entry.session] = {name: said for name, said in work.note.items() if name != "held"}
        elif work.entry.op == CLOSE:
            self._open.pop(work.entry.session, None)

    def _patience(self, now: float) -> float:
        """How long to wait for a frame before something else is due."""
        due = min([flight.deadline for flight in self._flying.values()], default=now + IDLE_S)
        held = self._batcher.held_s(now)
        return max(0.0, due - now if held is None else min(held, due - now))

    def _require_punctual(self) -> None:
        now = time.monotonic()
        for flight in self._flying.values():
            if flight.deadline <= now:
                raise self._chain.fail(StageError(f"no answer from the pipeline within {flight.timeout:.0f} s: a stage hangs"))


def _joined(works: list[Work]) -> list[Array]:
    """The rows of all entries, one after another."""
    arrays = [array for work in works for array in work.arrays]
    return [np.concatenate(arrays)] if arrays else []
