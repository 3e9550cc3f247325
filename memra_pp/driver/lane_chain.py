"""`LaneChain`: a chain of stages in other processes, over lanes, with a heart that notices a death in seconds, and a way to
wire the stages anew when one has died."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..admission import Device
from ..errors import FrameError, LaneError, StageError
from ..stage.frames import SPANS, STATS, TRACE, Frame
from ..stage.lanes import Lane
from ..stage.serve import HEARTBEAT_S
from ..stage.spec import StageSpec
from .chain import Chain, health
from .heart import DEATH_S, Heart

T = TypeVar("T")
log = logging.getLogger(__name__)

SEND_S = 60.0
STATS_S = 10.0
AUTOPSY_S = 3.0
"""How long a broken chain waits to learn which stage broke it."""
WINDOW_S = 300.0
MOST_LOSSES = 8


class Ends(NamedTuple):
    """The driver's ends: a lane to the first stage, one from the last, and a control lane to each."""

    out: Lane
    back: Lane
    control: Sequence[Lane]


@dataclass(frozen=True)
class Recovery:
    """What is put up with: `most` recoveries within `WINDOW_S`, and `silence_s` seconds without a sign of life from a stage."""

    most: int = 0
    silence_s: float = DEATH_S

    @property
    def losses_a_step(self) -> int:
        """For `Chain.most_losses`: one step may cost half of the recoveries, within bounds. Who allows many expects stages to
        be lost for reasons of their own."""
        return min(max(Chain.most_losses, self.most // 2), MOST_LOSSES)


Rewire: TypeAlias = Callable[[int, Collection[int], Callable[[], bool]], tuple[Ends, str]]
"""Called with the epoch, the stages that fell silent, and what tells whether the chain is unwanted meanwhile: replaces stages
that are lost, and wires all of them; the ends, and what was lost and why. It may raise StageError, and is called again then."""


class LaneChain(Chain):
    """The driver's ends of the lanes, replaced with each epoch.

    `autopsy` says what is known of stages that ended (None: nothing); `on_close` ends whatever runs the stages.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        devices: Sequence[Device],
        homes: Sequence[int],
        ends: Ends,
        autopsy: Callable[[], str | None],
        on_close: Callable[[], None],
        recovery: Recovery | None = None,
        rewire: Rewire | None = None,
    ) -> None:
        super().__init__(specs, devices, homes)
        self._autopsy, self._on_close = autopsy, on_close
        self._recovery, self._rewire = recovery or Recovery(), rewire
        self.most_losses = self._recovery.losses_a_step
        self._recovered: deque[float] = deque()
        self._last: dict[str, Any] | None = None
        self._failure: StageError | None = None
        self._closed = False
        self._ready = threading.Event()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._plug(ends)
        atexit.register(self.close)  # for a pipeline that nobody closes

    def _plug(self, ends: Ends) -> None:
        self._ends = ends
        self._broken: StageError | None = None
        self._broke, self._silent = threading.Event(), set[int]()
        self._poll = select.poll()
        for fd in (self._bell, ends.back.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._heart = Heart(ends.control, lambda *news: self._stage_died(ends, *news), self._recovery.silence_s)
        self._ready.set()

    @property
    def failed(self) -> bool:
        return self._failure is not None or self._closed

    def rewire(self, error: StageError, unwanted: Callable[[], bool]) -> None:
        if not self.failed:
            self.fail(error)
        began = time.monotonic()
        while not self.failed:
            self._unplug()
            cause = self._broken or error
            if (rewire := self._rewire) is None or not self._may_recover(began):
                self.give_up(cause)
                break
            log.warning("%s: wiring the stages anew, epoch %d", cause, self.epoch + 1)
            self.epoch += 1
            try:
                ends, lost = rewire(self.epoch, self._silent, unwanted)
            except StageError as again:
                if unwanted():
                    self.give_up(again)
                self._broken = again
            except Exception as final:
                log.exception("a stage could not be replaced")
                self.give_up(StageError(f"{cause}; it could not be replaced: {final}"))
            else:
                took = time.monotonic() - began
                self._last = {"cause": str(cause), "lost": lost, "took_s": took, "epoch": self.epoch}
                log.warning("the stages serve again after %.1f s (%s)", took, lost)
                self._plug(ends)
                return
        raise self._failure or StageError("this pipeline is closed: launch it again")

    def health(self) -> dict[str, Any]:
        broken = self._failure or self._broken
        state = "closed" if self._closed else "failed" if self._failure else "recovering" if broken else "ready"
        return health(state, broken, self, self._last)

    def _send(self, frame: Frame) -> None:
        self._require_alive()
        try:
            self._ends.out.send(frame, SEND_S)
        except FrameError:
            raise
        except LaneError as error:
            raise self.fail(self._cause(error)) from error

    def recv(self, timeout: float) -> Frame | None:
        self._require_alive()
        try:
            if not self._ends.back.pending and not self._readable(timeout):
                return None
            frame = self._ends.back.recv(SEND_S)
        except LaneError as error:
            raise self.fail(self._cause(error)) from error
        if frame is not None:
            frame.arrays = [a.copy() for a in frame.arrays]
        return frame

    def wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed
            os.eventfd_write(self._bell, 1)

    def stats(self) -> list[dict[str, Any]]:
        return self._told(lambda heart: heart.ask(STATS, STATS_S))

    def trace_start(self) -> None:
        self._told(lambda heart: heart.ask(TRACE, STATS_S))

    def trace(self) -> tuple[list[bytes], list[int]]:
        return self._told(lambda heart: (heart.ask(SPANS, STATS_S), heart.clock_offsets(STATS_S)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ready.set()
        atexit.unregister(self.close)
        self._unplug()
        bell, self._bell = self._bell, -1  # no late `wake` writes to another's descriptor
        os.close(bell)
        self._on_close()

    def _told(self, asked: Callable[[Heart], T]) -> T:
        """What the stages answer, once a recovery under way is done; asked again if they are lost meanwhile."""
        heart = self._living()
        try:
            return asked(heart)
        except StageError:
            if self._closed or (heart is self._heart and not self._broke.wait(HEARTBEAT_S)):
                raise
            return asked(self._living())

    def _living(self) -> Heart:
        self._ready.wait(STATS_S)
        self._require_alive()
        return self._heart

    def _require_alive(self) -> None:
        if (broken := self._failure or self._broken) is not None:
            raise broken
        if self._closed:
            raise StageError("this pipeline is closed: launch it again")

    def _readable(self, timeout: float) -> bool:
        """Waits until a frame begins to arrive, a `wake`, or for `timeout` seconds; whether a frame does."""
        ready = [fd for fd, _ in self._poll.poll(round(timeout * 1000))]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return self._ends.back.fileno() in ready

    def _cause(self, error: LaneError) -> StageError:
        """The error that says which stage broke the chain, once the heart or the autopsy knows."""
        deadline = time.monotonic() + AUTOPSY_S
        while not self._broke.wait(timeout=0.05) and time.monotonic() < deadline:
            if found := self._findings():
                return StageError(found)
        return self._broken or StageError(f"the chain of stages broke: {error}")

    def _stage_died(self, ends: Ends, stage: int, cause: str, silent: bool) -> None:
        if ends is not self._ends:
            return
        if silent:
            self._silent.add(stage)
        found = self._findings()
        spec = self.specs[stage]
        self.fail(StageError(f"{spec} on {spec.device} is gone: {cause}" + (f" ({found})" if found else "")))

    def _findings(self) -> str | None:
        """What the autopsy tells; one that fails tells nothing."""
        try:
            return self._autopsy()
        except Exception:
            log.exception("the autopsy of the stages failed")
            return None

    def fail(self, error: StageError) -> StageError:
        if self._broken is None and not self._closed:
            self._broken = error
            self._ready.clear()
            self._broke.set()
            for lane in (self._ends.out, self._ends.back):
                lane.hang_up()
        return self._broken or error

    def give_up(self, error: StageError) -> None:
        self._broken = self._failure = self._failure or error
        self._ready.set()

    def _unplug(self) -> None:
        """Lets go of the lanes."""
        self._heart.close()
        self._ends.out.close()
        self._ends.back.close()

    def _may_recover(self, now: float) -> bool:
        """Whether there have been few enough recoveries lately; then this is one more."""
        while self._recovered and self._recovered[0] < now - WINDOW_S:
            self._recovered.popleft()
        if len(self._recovered) >= self._recovery.most:
            return False
        self._recovered.append(now)
        self.recoveries += 1
        return True
