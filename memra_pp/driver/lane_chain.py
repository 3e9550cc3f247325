"""`LaneChain`: a chain of stages in other processes, over lanes, with a heart that notices a death in seconds."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..admission import Device
from ..errors import FrameError, InputError, LaneError, StageError
from ..stage.frames import STATS, Frame
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
        self._heart = Heart(control, self._stage_died)
        atexit.register(self.close)  # for a pipeline that nobody closes

    @property
    def failed(self) -> bool:
        return self._failure is not None or self._closed

    def _roundtrip(self, frame: Frame, timeout: float) -> Frame:
        if self._failure is not None:
            raise self._failure
        self._require_open()
        try:
            self._send(frame)
            while True:
                reply = self._back.recv(timeout)
                if reply is None:
                    raise self._fail(StageError(f"no answer from the pipeline within {timeout:.0f} s: a stage hangs"))
                if reply.id == frame.id:
                    reply.arrays = [a.copy() for a in reply.arrays]
                    return reply
        except FrameError as error:
            raise InputError(f"this step cannot be sent: {error}") from error
        except LaneError as error:
            raise self._fail(self._cause(error)) from error

    def stats(self) -> list[dict[str, Any]]:
        self._require_open()
        return self._heart.ask(STATS, STATS_S)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._heart.close()
        self._out.close()
        self._back.close()
        self._on_close()

    def _send(self, frame: Frame) -> None:
        try:
            self._out.send(frame, SEND_S)
        except LaneError:
            raise
        except BaseException:  # an interrupt: some of the frame may have been sent
            self._fail(StageError("a frame was interrupted while it was sent: launch the pipeline again"))
            raise

    def _cause(self, error: LaneError) -> StageError:
        """The error that says which stage broke the chain, once the heart or the autopsy knows."""
        deadline = time.monotonic() + AUTOPSY_S
        while not self._failed.wait(timeout=0.05) and time.monotonic() < deadline:
            if found := self._findings():
                return StageError(found)
        return self._failure or StageError(f"the chain of stages broke: {error}")

    def _stage_died(self, stage: int, cause: str) -> None:
        found = self._findings()
        self._fail(StageError(f"{self._specs[stage]} is gone: {cause}" + (f" ({found})" if found else "")))

    def _findings(self) -> str | None:
        """What the autopsy tells; one that fails tells nothing."""
        try:
            return self._autopsy()
        except Exception:
            log.exception("the autopsy of the stages failed")
            return None

    def _fail(self, error: StageError) -> StageError:
        """Marks the chain failed, once, and wakes whoever waits on a lane."""
        if self._failure is None and not self._closed:
            self._failure = error
            self._failed.set()
            for lane in (self._out, self._back):
                with contextlib.suppress(OSError):
                    lane.close()
        return self._failure or error
