"""`StatusDoor`: where `memra-pp status` asks a running pipeline how it fares, and how it asks.

A question is a frame of one entry, as on a control lane; the answer is in its note: who the pipeline is, the seconds `up_s`
that it has been there, `at` on the driver's clock, its `health`, and its `stats`, or `why` there are none.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...admission.outcome import Outcome
from ...errors import ConfigError, LaneError, StageError
from ...stage.frames import STATS, Entry, Frame
from ...stage.lanes import Lane
from ...stage.listener import Listener, connect
from .registry import Registered, enter, leave

if TYPE_CHECKING:
    from .report import Report

log = logging.getLogger(__name__)

ROLE = "status"
STATS_S = 2.0
"""How long the stages may take to answer; then the health alone is told."""
LANE_S = 2.0
ANSWER_S = STATS_S + LANE_S
JOIN_S = 5.0
_warned = threading.Event()


def open_door(name: str, report: Report, about: Mapping[str, Any]) -> list[StatusDoor]:
    """A pipeline's door; none, which is logged once, where there can be none."""
    try:
        return [StatusDoor(name, report, about)]
    except (ConfigError, OSError, LaneError) as error:
        if not _warned.is_set():
            _warned.set()
            log.warning("memra-pp status will not find this process's pipelines: %s", error)
        return []


class StatusDoor:
    """Listens in this pipeline's entry of the registry. Nothing is done, nor is anybody awake, while nobody asks."""

    def __init__(self, name: str, report: Report, about: Mapping[str, Any]) -> None:
        self._report, self._about = report, {"name": name, "pid": os.getpid(), **about}
        self._since = time.monotonic()
        self._place = enter(name)
        try:
            self._listener = Listener(self._place.address, self._place.key())
        except BaseException:
            leave(self._place)
            raise
        self._reading: Outcome[dict[str, Any]] | None = None
        self._open = True
        self._threads = [threading.Thread(target=self._serve, name="status", daemon=True)]
        self._threads[0].start()
        atexit.register(self.stop)  # for a pipeline that nobody closes

    def stop(self) -> None:
        """See `Watcher`."""
        if self._open and os.getpid() == self._place.pid:  # a forked child has no part in it
            self._open = False
            atexit.unregister(self.stop)
            self._listener.close()
            leave(self._place)

    def join(self) -> None:
        """See `Watcher`."""
        for thread in self._threads:
            thread.join(JOIN_S)

    def _serve(self) -> None:
        with contextlib.suppress(LaneError):  # it was closed
            while True:
                with contextlib.closing(self._listener.accept(ROLE, None)) as lane:
                    self._answer(lane)

    def _answer(self, lane: Lane) -> None:
        try:
            frame = lane.recv(LANE_S)
            if frame is not None and [entry.op for entry in frame.entries] == [STATS]:
                frame.notes[0] = {"answer": self._told()}
                lane.send(frame, LANE_S)
        except LaneError as error:
            log.info("who asked for the status is gone: %s", error)

    def _told(self) -> dict[str, Any]:
        stats, at = self._stats(), time.monotonic()
        return {**self._about, "up_s": at - self._since, "at": at, "health": self._report.health(), **stats}

    def _stats(self) -> dict[str, Any]:
        """What the stages say in time: they are asked by a thread, of which there is one at most."""
        reading = self._reading
        if reading is None or reading.done():
            self._reading = reading = Outcome()
            thread = threading.Thread(target=self._read, args=(reading,), name="status-read", daemon=True)
            self._threads[1:] = [thread]
            thread.start()
        if not reading.wait(STATS_S):
            return {"stats": None, "why": f"the stages have not answered within {STATS_S:.0f} s"}
        try:
            return {"stats": reading.result(), "why": None}
        except StageError as error:
            return {"stats": None, "why": str(error)}

    def _read(self, reading: Outcome[dict[str, Any]]) -> None:
        try:
            reading.tell(self._report.stats())
        except StageError as error:
            reading.fail(error)
        except Exception as error:
            log.exception("the status could not be read")
            reading.fail(StageError(f"the status could not be read: {error!r}"))


def ask(entry: Registered) -> dict[str, Any] | None:
    """What a pipeline answers; None if it has ended: then its entry is removed.

    Raises:
        StageError: it does not answer in time, or not as one does.
    """
    try:
        lane = connect(entry.address, ROLE, entry.key(), LANE_S, f"process {entry.pid}")
    except (FileNotFoundError, LaneError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConnectionRefusedError) or (isinstance(cause, FileNotFoundError) and not _alive(entry.pid)):
            entry.remove()
        if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            return None
        raise StageError(f"pipeline {entry.name} does not answer: {error}") from error
    with contextlib.closing(lane):
        lane.send(Frame(1, [Entry(STATS, 0, 0, 0)]), LANE_S)
        frame = lane.recv(ANSWER_S)
    answer = None if frame is None else frame.notes.get(0, {}).get("answer")
    if not isinstance(answer, dict):
        raise StageError(f"pipeline {entry.name} does not answer within {ANSWER_S:.0f} s")
    return answer


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
