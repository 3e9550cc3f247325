"""`Chain`: how frames get through all stages and back. In this process here; over lanes in `lane_chain`."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..admission import Device, pooled
from ..errors import StageError
from ..stage.frames import Frame
from ..stage.spec import StageSpec
from ..stage.worker import StageWorker

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many steps of a launch are done."""


def health(state: str, cause: StageError | None, chain: Chain, last: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `Chain.health` tells."""
    return {
        "ready": state == "ready",
        "state": state,
        "cause": None if cause is None else str(cause),
        "epoch": chain.epoch,
        "recoveries": chain.recoveries,
        "last_recovery": last,
    }


class Chain(ABC):
    """The stages in order. Frames come back in the order in which they were sent.

    One thread sends and receives, the scheduler's; `wake` and what follows it may be called from any. `specs` are the stages,
    `devices` what they run on, and `homes` the device of each, by index (see `pooled`).
    """

    most_losses = 3
    """A step that is on its way when this many stages are lost in a row may be what they die of. It goes by itself the last
    time, and if a stage is lost then too, it is."""

    def __init__(self, specs: Sequence[StageSpec], devices: Sequence[Device], homes: Sequence[int]) -> None:
        self.specs, self.devices, self.homes = tuple(specs), tuple(devices), tuple(homes)
        self.stages = len(homes)
        self.epoch = 1
        self.traversals = self.recoveries = 0

    @property
    def overlap(self) -> int:
        """How many frames may be on their way, each on another stage."""
        return self.stages

    def send(self, frame: Frame) -> None:
        """Sends a frame on its way through every stage.

        Raises:
            FrameError: no lane carries it; nothing was sent.
            StageError: a stage is gone; the message names it.
        """
        self.traversals += 1
        self._send(frame)

    @abstractmethod
    def _send(self, frame: Frame) -> None: ...

    @abstractmethod
    def recv(self, timeout: float) -> Frame | None:
        """The next frame that comes back, its arrays the caller's own; None if none did within `timeout` seconds, or before a
        `wake`.

        Raises:
            StageError: a stage is gone; the message names it.
        """

    @abstractmethod
    def wake(self) -> None:
        """Ends the `recv` under way, or the next one. Takes no lock."""

    @abstractmethod
    def fail(self, error: StageError) -> StageError:
        """Breaks the way through the stages, unless it is broken; the error that says why."""

    @abstractmethod
    def give_up(self, error: StageError) -> None:
        """Says that nobody sends or receives any more, unless the way has failed for good before."""

    @abstractmethod
    def rewire(self, error: StageError, unwanted: Callable[[], bool]) -> None:
        """Replaces stages that are lost, and has a new epoch begin, in which no stage has a session. Called by the one thread
        that sends and receives, after `error`; it returns early if it is `unwanted` meanwhile.

        Raises:
            StageError: it cannot be done, or was done too often; the pipeline has failed for good.
        """

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """See `Pipeline.health`."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a stage was lost, so that nothing more can be asked."""

    @abstractmethod
    def stats(self) -> list[dict[str, Any]]:
        """Each stage's counters and bytes (`StageWorker.stats`)."""

    @abstractmethod
    def trace_start(self) -> None:
        """Has every stage keep what becomes of frames from now on."""

    @abstractmethod
    def trace(self) -> tuple[list[bytes], list[int]]:
        """What each stage has kept since, as `Spans.take` gives it, and how far its clock is ahead of this process's, in
        nanoseconds; no more is kept."""

    @abstractmethod
    def close(self) -> None:
        """Ends every stage and what was started for it; closing twice is fine."""


class LocalChain(Chain):
    """Stages in this process: a frame passes them all while it is sent."""

    def __init__(self, workers: Sequence[StageWorker]) -> None:
        super().__init__([worker.spec for worker in workers], *pooled([worker.share() for worker in workers]))
        self._workers = list(workers)
        self._back: deque[Frame] = deque()
        self._bell = threading.Lock()
        self._failure: StageError | None = None
        for worker, home in zip(workers, self.homes, strict=True):
            worker.reserve(self.devices[home].budget)
        for worker, following in pairwise(self._workers):
            worker.boundary.lead_to(following.boundary)

    @property
    def overlap(self) -> int:
        return 1  # its stages take turns

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def _send(self, frame: Frame) -> None:
        self._require_open()
        for worker in self._workers:
            try:
                worker.apply(frame)
            except Exception as error:
                raise self.fail(StageError(f"{worker.spec} failed: {error!r}")) from error
        self._back.append(frame)

    def recv(self, timeout: float) -> Frame | None:
        self._require_open()
        if not self._back:
            self._bell.acquire(timeout=timeout)
        return self._back.popleft() if self._back else None

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def fail(self, error: StageError) -> StageError:
        self._failure = self._failure or error
        return self._failure

    def give_up(self, error: StageError) -> None:
        self.fail(error)

    def rewire(self, error: StageError, unwanted: Callable[[], bool]) -> None:
        raise self.fail(error)  # what died is this process

    def health(self) -> dict[str, Any]:
        return health("ready" if self._failure is None else "failed", self._failure, self)

    def stats(self) -> list[dict[str, Any]]:
        self._require_open()
        return [worker.stats() for worker in self._workers]

    def trace_start(self) -> None:
        self._require_open()
        for worker in self._workers:
            worker.spans.trace()

    def trace(self) -> tuple[list[bytes], list[int]]:
        self._require_open()
        return [worker.spans.take() for worker in self._workers], [0] * self.stages

    def close(self) -> None:
        self.fail(StageError("this pipeline is closed: launch it again"))
        workers, self._workers = self._workers, []
        with contextlib.ExitStack() as each:
            for worker in workers:
                each.callback(worker.close)

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure
