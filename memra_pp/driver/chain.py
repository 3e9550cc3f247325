"""`Chain`: how a frame gets through all stages and back. In this process here; over lanes in `lane_chain`."""

from __future__ import annotations

import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..admission import Device, pooled
from ..errors import StageError
from ..models.protocol import Array
from ..stage.frames import Entry, Frame, Note
from ..stage.worker import StageWorker
from .locks import OwnedLock

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many steps of a launch are done."""


CLOSE_S = 60.0
"""How long a close waits for another thread's step."""


class Chain(ABC):
    """The stages in order. One frame travels at a time.

    `devices` are what the stages run on, and `homes` the device of each, by index (see `pooled`). Whoever has sent a frame
    calls `after_step` when it has come back.
    """

    def __init__(self, devices: Sequence[Device], homes: Sequence[int]) -> None:
        self.devices, self.homes = tuple(devices), tuple(homes)
        self.stages = len(homes)
        self.epoch = 1
        self.traversals = 0
        self._closed = False
        self._lock = OwnedLock()
        self._ids = itertools.count(1)
        self.after_step: Callable[[], None] = lambda: None

    def roundtrip(self, entry: Entry, arrays: list[Array], timeout: float, note: Note | None = None) -> Frame:
        """Sends an entry, its rows and its note through every stage; the frame as it came back, its arrays the caller's own.

        Raises:
            StageError: a stage died or did not answer within `timeout` seconds; the message names it.
        """
        if self._lock.mine:
            raise StageError("a step was begun in the middle of another one of this thread, by a signal handler or a finalizer")

        def step() -> Frame:
            self.traversals += 1
            return self._roundtrip(Frame(next(self._ids), [entry], arrays, {} if note is None else {0: note}), timeout)

        reply = self._lock.run(step, timeout, "the pipeline was busy with other threads' steps")
        self.after_step()
        return reply

    @property
    def in_step(self) -> bool:
        """Whether this thread is in the middle of a step: in a signal handler, or a finalizer that ran meanwhile."""
        return self._lock.mine

    @property
    def idle(self) -> bool:
        """Whether no frame is on its way."""
        return self._lock.try_run(lambda: None)

    def _require_open(self) -> None:
        if self._closed:
            raise StageError("this pipeline is closed: launch it again")

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a stage was lost, so that nothing more can be asked."""

    @abstractmethod
    def _roundtrip(self, frame: Frame, timeout: float) -> Frame: ...

    @abstractmethod
    def stats(self) -> list[dict[str, Any]]:
        """Each stage's counters and bytes (`StageWorker.stats`)."""

    @abstractmethod
    def close(self) -> None:
        """Ends every stage and what was started for it; closing twice is fine."""


class LocalChain(Chain):
    """Stages in the caller's process, applied one after another."""

    def __init__(self, workers: Sequence[StageWorker]) -> None:
        super().__init__(*pooled([worker.share() for worker in workers]))
        self._workers = list(workers)
        for worker, home in zip(workers, self.homes, strict=True):
            worker.reserve(self.devices[home].budget)

    @property
    def failed(self) -> bool:
        return self._closed

    def _roundtrip(self, frame: Frame, timeout: float) -> Frame:
        self._require_open()
        for worker in self._workers:
            worker.apply(frame)
        return frame

    def stats(self) -> list[dict[str, Any]]:
        self._require_open()
        return [worker.stats() for worker in self._workers]

    def close(self) -> None:
        if self.in_step:
            self._end()
            return
        try:
            self._lock.run(self._end, CLOSE_S, "the pipeline was busy with another thread's step")
        except StageError as error:
            log.warning("closing although %s", error)
            self._end()

    def _end(self) -> None:
        self._closed = True
        workers, self._workers = self._workers, []
        with contextlib.ExitStack() as each:
            for worker in workers:
                each.callback(worker.close)
