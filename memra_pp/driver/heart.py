"""`Heart`: the control lanes. Asks every stage for a sign of life, and is the first to know when one is gone."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import LaneError, StageError
from ..stage.frames import CLOCK, OPS, PING, STOP
from ..stage.lanes import Lane
from ..stage.serve import HEARTBEAT_S, question
from ..stage.spans import clock

log = logging.getLogger(__name__)

DEATH_S = 5.0
"""A stage that leaves the pings of this long unanswered is taken for dead, if nothing else is said. Time in which this process
was itself stopped, and sent none, does not count."""

BEATS = 5
SEND_S = 2.0


CLOCK_ROUNDS = 8


class _Answer(NamedTuple):
    """What a stage has said, and when it was asked and heard here, in nanoseconds."""

    text: Any
    asked: int
    heard: int


class Heart:
    """One thread that pings every stage each second, or more often, and hands out their answers.

    `on_death(stage, cause, silent)` is called once for each stage that closes its lane, or before it is silent for more than
    `silence_s` seconds.
    """

    def __init__(self, lanes: Sequence[Lane], on_death: Callable[[int, str, bool], None], silence_s: float) -> None:
        self._lanes = list(lanes)
        self._on_death, self._silence_s = on_death, silence_s
        self._ids = itertools.count(1)
        self._answers: dict[tuple[int, int], _Answer] = {}
        self._asked: dict[tuple[int, int], int] = {}
        self._gone: dict[int, str] = {}
        self._news = threading.Condition()
        self._send_locks = [threading.Lock() for _ in lanes]
        self._unanswered = [0] * len(lanes)
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        for stage, lane in enumerate(self._lanes):
            self._selector.register(lane, selectors.EVENT_READ, stage)
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def ask(self, op: int, timeout: float) -> list[Any]:
        """Every stage's answer to a control question.

        Raises:
            StageError: a stage is gone, or did not answer within `timeout` seconds.
        """
        return [answer.text for answer in self._ask(op, timeout)]

    def clock_offsets(self, timeout: float) -> list[int]:
        """How many nanoseconds each stage's clock (`stage.spans.clock`) is ahead of this process's. That of a stage on another
        machine is taken to have been asked half-way between question and answer, of several the pair that lies closest.

        Raises:
            StageError: as `ask`, or an answer that is none.
        """
        here = clock()["of"]
        rounds = [self._ask(CLOCK, timeout) for _ in range(CLOCK_ROUNDS)]
        return [
            _offset(lane.peer, here, min(answers, key=lambda a: a.heard - a.asked))
            for lane, answers in zip(self._lanes, zip(*rounds, strict=True), strict=True)
        ]

    def _ask(self, op: int, timeout: float) -> list[_Answer]:
        asked = [(stage, next(self._ids)) for stage in range(len(self._lanes))]
        try:
            for stage, frame_id in asked:
                self._asked[stage, frame_id] = time.monotonic_ns()
                if stage not in self._gone:
                    self._send(stage, op, frame_id)
            with self._news:
                self._news.wait_for(
                    lambda: self._gone or self._stop.is_set() or all(key in self._answers for key in asked), timeout
                )
                if self._gone:
                    stage, cause = next(iter(self._gone.items()))
                    raise StageError(f"{self._lanes[stage].peer} is gone: {cause}")
                late = [self._lanes[stage].peer for stage, frame_id in asked if (stage, frame_id) not in self._answers]
                if late and self._stop.is_set():
                    raise StageError(f"no answer to {OPS[op]}: the pipeline was closed, or is being wired anew")
                if late:
                    raise StageError(f"no answer to {OPS[op]} within {timeout:.0f} s from {', '.join(late)}")
                return [self._answers[key] for key in asked]
        finally:
            with self._news:
                for key in asked:
                    self._asked.pop(key, None)
                    self._answers.pop(key, None)

    def close(self) -> None:
        """Tells every stage to stop, and ends the thread."""
        with self._news:
            self._stop.set()
            self._news.notify_all()
        self._thread.join(timeout=2 * HEARTBEAT_S)
        for stage, lane in enumerate(self._lanes):
            with contextlib.suppress(StageError):
                self._send(stage, STOP, next(self._ids))
            lane.close()
        self._thread.join(timeout=SEND_S)
        self._selector.close()

    @property
    def _beat_s(self) -> float:
        """From ping to ping: some, before a silence is too long."""
        return min(HEARTBEAT_S, self._silence_s / BEATS)

    def _beat(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= due:
                due = now + self._beat_s
                self._ping()
            for key, _ in self._selector.select(timeout=max(0.0, min(due - now, self._beat_s / 4))):
                self._hear(key.data)

    def _ping(self) -> None:
        for stage in sorted(key.data for key in self._selector.get_map().values()):
            if (self._unanswered[stage] + 1) * self._beat_s >= self._silence_s:
                self._lost(stage, f"silent for {self._silence_s:.0f} s", silent=True)
                continue
            self._unanswered[stage] += 1
            try:
                self._send(stage, PING, next(self._ids))
            except StageError as error:
                self._lost(stage, str(error))

    def _hear(self, stage: int) -> None:
        lane, more = self._lanes[stage], True
        while more:
            try:
                frame = lane.recv(SEND_S)
            except LaneError as error:
                self._lost(stage, str(error))
                return
            if frame is None:
                return
            heard = time.monotonic_ns()
            self._unanswered[stage] = 0
            with self._news:
                if (asked := self._asked.get((stage, frame.id))) is not None:
                    self._answers[stage, frame.id] = _Answer(frame.notes.get(0, {}).get("answer"), asked, heard)
                    self._news.notify_all()
            more = lane.pending

    def _lost(self, stage: int, cause: str, silent: bool = False) -> None:
        self._selector.unregister(self._lanes[stage])
        if self._stop.is_set():
            return
        with self._news:
            self._gone[stage] = cause
            self._news.notify_all()
        try:
            self._on_death(stage, cause, silent)
        except Exception:
            log.exception("%s is gone, and telling so failed", self._lanes[stage].peer)

    def _send(self, stage: int, op: int, frame_id: int) -> None:
        with self._send_locks[stage]:
            self._lanes[stage].send(question(op, frame_id), SEND_S)


def _offset(peer: str, here: str | None, answer: _Answer) -> int:
    text = answer.text
    if not isinstance(text, dict) or type(text.get("ns")) is not int:
        raise StageError(f"{peer} gave {text!r:.80} for its clock: launch the pipeline again")
    shared = here is not None and text.get("of") == here
    return 0 if shared else text["ns"] - (answer.asked + answer.heard) // 2
