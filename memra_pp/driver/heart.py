"""`Heart`: the control lanes. Asks every stage for a sign of life, and is the first to know when one is gone."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import LaneError, StageError
from ..stage.lanes import Lane
from ..stage.serve import HEARTBEAT_S, question

DEATH_S = 5.0
"""A stage that has been silent for this long is taken for dead."""

SEND_S = 2.0


class Heart:
    """One thread that pings every stage each second and hands out their answers.

    `on_death(stage, cause)` is called once for each stage that closes its lane or falls silent.
    """

    def __init__(self, lanes: Sequence[Lane], on_death: Callable[[int, str], None]) -> None:
        self._lanes = list(lanes)
        self._on_death = on_death
        self._ids = itertools.count(1)
        self._answers: dict[tuple[int, int], Any] = {}
        self._asked: set[tuple[int, int]] = set()
        self._news = threading.Condition()
        self._send_locks = [threading.Lock() for _ in lanes]
        self._heard = [time.monotonic()] * len(lanes)
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        for stage, lane in enumerate(self._lanes):
            self._selector.register(lane, selectors.EVENT_READ, stage)
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def ask(self, op: str, timeout: float) -> list[Any]:
        """Every stage's answer to a control question.

        Raises:
            StageError: a stage is gone, or did not answer within `timeout` seconds.
        """
        asked = [(stage, next(self._ids)) for stage in range(len(self._lanes))]
        with self._news:
            self._asked.update(asked)
        for stage, frame_id in asked:
            self._send(stage, op, frame_id)
        with self._news:
            complete = self._news.wait_for(lambda: all(key in self._answers for key in asked), timeout)
            answers = [self._answers.pop(key, None) for key in asked]
            self._asked.difference_update(asked)
        if not complete:
            missing = [stage for stage, answer in enumerate(answers) if answer is None]
            raise StageError(f"stages {missing} did not answer {op!r} within {timeout:.0f} s: see pipe.health()")
        return answers

    def close(self) -> None:
        """Tells every stage to stop, and ends the thread."""
        self._stop.set()
        self._thread.join(timeout=2 * HEARTBEAT_S)
        for stage, lane in enumerate(self._lanes):
            with contextlib.suppress(StageError):
                self._send(stage, "stop", next(self._ids))
            lane.close()
        self._selector.close()

    def _beat(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= due:
                due = now + HEARTBEAT_S
                self._ping(now)
            for key, _ in self._selector.select(timeout=max(0.0, min(due - now, HEARTBEAT_S / 4))):
                self._hear(key.data)

    def _ping(self, now: float) -> None:
        for stage in sorted(key.data for key in self._selector.get_map().values()):
            if now - self._heard[stage] > DEATH_S:
                self._lost(stage, f"silent for {DEATH_S:.0f} s")
                continue
            try:
                self._send(stage, "ping", next(self._ids))
            except StageError as error:
                self._lost(stage, str(error))

    def _hear(self, stage: int) -> None:
        try:
            frame = self._lanes[stage].recv(SEND_S)
        except LaneError as error:
            self._lost(stage, str(error))
            return
        if frame is None:
            return
        self._heard[stage] = time.monotonic()
        with self._news:
            if (stage, frame.id) in self._asked:
                self._answers[stage, frame.id] = frame.entries[0].acks[0]
                self._news.notify_all()

    def _lost(self, stage: int, cause: str) -> None:
        self._selector.unregister(self._lanes[stage])
        self._on_death(stage, cause)

    def _send(self, stage: int, op: str, frame_id: int) -> None:
        with self._send_locks[stage]:
            self._lanes[stage].send(question(op, frame_id), SEND_S)
