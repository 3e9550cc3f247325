"""`LaneChain`: a chain of stages in other processes, over lanes, with a heart that notices a death in seconds."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..admission import Device
from ..errors import FrameError, LaneError, StageError
from ..stage.frames import SPANS, STATS, TRACE, Frame
from ..stage.lanes import Lane
from ..stage.spec import StageSpec
from .chain import Chain
from .heart import Heart

log = logging.getLogger(__name__)

SEND_S = 60.0
STATS_S = 10.0
AUTOPSY_S = 3.0
"""How long a broken chain waits to learn which stage broke it."""


class LaneChain(Chain):
    """The driver's ends: a lane to the first stage, one from the last, and a control lane to each.

    `autopsy` says what is known of stages that ended (None: nothing); `on_close` ends whatever runs the stages.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        devices: Sequence[Device],
        homes: Sequence[int],
        out: Lane,
        back: Lane,
        control: Sequence[Lane],
        autopsy: Callable[[], str | None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(devices, homes)
        self._specs = list(specs)
        self._out, self._back = out, back
        self._autopsy, self._on_close = autopsy, on_close
        self._failure: StageError | None = None
        self._failed = threading.Event()
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (self._bell, back.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._heart = Heart(control, self._stage_died)
        atexit.register(self.close)  # for a pipeline that nobody closes

    @property
    def failed(self) -> bool:
        return self._failure is not None or self._closed

    def _send(self, frame: Frame) -> None:
        self._require_alive()
        try:
            self._out.send(frame, SEND_S)
        except FrameError:
            raise
        except LaneError as error:
            raise self.fail(self._cause(error)) from error

    def recv(self, timeout: float) -> Frame | None:
        self._require_alive()
        try:
            if not self._back.pending and not self._readable(timeout):
                return None
            frame = self._back.recv(SEND_S)
        except LaneError as error:
            raise self.fail(self._cause(error)) from error
        if frame is not None:
            frame.arrays = [a.copy() for a in frame.arrays]
        return frame

    def wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed
            os.eventfd_write(self._bell, 1)

    def stats(self) -> list[dict[str, Any]]:
        self._require_alive()
        return self._heart.ask(STATS, STATS_S)

    def trace_start(self) -> None:
        self._require_alive()
        self._heart.ask(TRACE, STATS_S)

    def trace(self) -> tuple[list[bytes], list[int]]:
        self._require_alive()
        return self._heart.ask(SPANS, STATS_S), self._heart.clock_offsets(STATS_S)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._heart.close()
        self._out.close()
        self._back.close()
        bell, self._bell = self._bell, -1  # no late `wake` writes to another's descriptor
        os.close(bell)
        self._on_close()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise StageError("this pipeline is closed: launch it again")

    def _readable(self, timeout: float) -> bool:
        """Waits until a frame begins to arrive, a `wake`, or for `timeout` seconds; whether a frame does."""
        ready = [fd for fd, _ in self._poll.poll(round(timeout * 1000))]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return self._back.fileno() in ready

    def _cause(self, error: LaneError) -> StageError:
        """The error that says which stage broke the chain, once the heart or the autopsy knows."""
        deadline = time.monotonic() + AUTOPSY_S
        while not self._failed.wait(timeout=0.05) and time.monotonic() < deadline:
            if found := self._findings():
                return StageError(found)
        return self._failure or StageError(f"the chain of stages broke: {error}")

    def _stage_died(self, stage: int, cause: str) -> None:
        found = self._findings()
        self.fail(StageError(f"{self._specs[stage]} is gone: {cause}" + (f" ({found})" if found else "")))

    def _findings(self) -> str | None:
        """What the autopsy tells; one that fails tells nothing."""
        try:
            return self._autopsy()
        except Exception:
            log.exception("the autopsy of the stages failed")
            return None

    def fail(self, error: StageError) -> StageError:
        if self._failure is None and not self._closed:
            self._failure = error
            self._failed.set()
            for lane in (self._out, self._back):
                lane.hang_up()
        return self._failure or error
