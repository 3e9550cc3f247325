"""`FragileChain`: stages in this process that are lost when a test says so, and there again, empty, once wired anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ringed

from memra_pp.driver.chain import LocalChain
from memra_pp.driver.lane_chain import Recovery
from memra_pp.driver.launch import launch
from memra_pp.errors import StageError
from memra_pp.stage.frames import Frame
from memra_pp.stage.worker import StageWorker

SLOW_S = 0.02


class FragileChain(LocalChain):
    """`losses[n]` is how many stages apply frame `n` before one is lost, and with it every frame on its way; with all of them,
    the frame is lost on its way back. `log` has the ops of each frame. A stage dies of each frame with the token `deadly`.

    Frames of numbers in `dropped` never come back, those in `repeated` do twice, and those in `slow` take a while."""

    def __init__(self, workers: Sequence[StageWorker]) -> None:
        super().__init__(workers)
        self.losses: dict[int, int] = {}
        self.log: list[list[int]] = []
        self.deadly = -1
        self.dropped, self.repeated, self.slow = set[int](), set[int](), set[int]()
        self.most = 1 << 30
        self.most_losses = Recovery(self.most).losses_a_step
        self._lost: StageError | None = None

    @property
    def overlap(self) -> int:
        return self.stages

    def lose(self) -> None:
        """A stage dies, whatever is under way."""
        self._lost = StageError("stage 1 is gone")
        self.wake()

    def lose_at(self, frame: int, passed: int) -> None:
        """A stage dies at a frame, counted from now."""
        self.losses[len(self.log) + frame] = passed

    def _send(self, frame: Frame) -> None:
        self._require_there()
        self.log.append([entry.op for entry in frame.entries])
        dies = any(self.deadly in rows.tolist() for rows in frame.arrays)
        passed = self.losses.pop(len(self.log) - 1, 1 if dies else None)
        number = len(self.log) - 1
        if number in self.slow:
            time.sleep(SLOW_S)
        if passed is None:
            super()._send(frame)
            if number in self.dropped:
                self._back.pop()
            elif number in self.repeated:
                self._back.append(self._back[-1])
            return
        for worker in self._workers[:passed]:
            worker.apply(frame)
            worker.boundary.take_back(frame)
        self._lost = StageError(f"stage {passed} is gone")
        if passed < self.stages:
            self._require_there()

    def recv(self, timeout: float) -> Frame | None:
        self._require_there()
        return super().recv(timeout)

    def fail(self, error: StageError) -> StageError:
        self._lost = self._lost or error
        return self._lost

    def give_up(self, error: StageError) -> None:
        super().fail(error)

    def close(self) -> None:
        super().fail(StageError("this pipeline is closed: launch it again"))
        super().close()

    def rewire(self, error: StageError, unwanted: Callable[[], bool]) -> None:
        if unwanted() or self.recoveries == self.most:
            raise super().fail(error)
        self.recoveries += 1
        self.epoch += 1
        self._back.clear()
        self._lost = None
        for worker in self._workers:
            worker.begin(self.epoch)

    def _require_there(self) -> None:
        if self._lost is not None:
            raise self._lost


@pytest.fixture(autouse=True)
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pipeline in this process is of fragile stages."""
    for module in (ringed, launch):
        monkeypatch.setattr(module, "LocalChain", FragileChain)


def chain(pipe: Any) -> FragileChain:
    """A pipeline's fragile stages."""
    made = pipe.chain
    assert isinstance(made, FragileChain)
    return made
