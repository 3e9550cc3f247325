"""`Outbox`: a stage's sending end, which a neighbour that is still busy does not hold up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from .frames import Frame
from .lanes import Lane
from .spans import SEND, Spans

SEND_S = 60.0


class Outbox:
    """Sends frames in order. What the socket does not take of one at once is sent by a thread; the next frame waits for it."""

    def __init__(self, lane: Lane, spans: Spans) -> None:
        self._lane, self._spans = lane, spans
        self._sender = ThreadPoolExecutor(1, "outbox")
        self._sending: Future[None] | None = None

    def send(self, frame: Frame) -> bool:
        """Sends a frame, or leaves it to the thread; then its arrays must stay as they are until the next call returns.

        Returns:
            Whether all of it has been sent.

        Raises:
            FrameError: no frame carries this; nothing of it was sent.
            LaneError: the peer is gone, or did not take the frame before this one in time.
        """
        if self._sending is not None:
            self._sending.result()
            self._sending = None
            self._spans.blocked(frame)
        if rest := self._lane.begin(frame):
            self._sending = self._sender.submit(self._finish, frame, rest, self._spans.free)
        elif self._spans.tracing:
            self._spans.keep(frame, SEND, self._spans.free, monotonic())
        return not rest

    def check(self) -> None:
        """Raises LaneError if the frame that was left to the thread could not be sent."""
        if self._sending is not None and self._sending.done():
            self._sending.result()

    def close(self) -> None:
        """Waits for what is being sent, and ends the thread."""
        self._sender.shutdown()

    def _finish(self, frame: Frame, rest: Sequence[memoryview], began: float) -> None:
        self._lane.finish(rest, SEND_S)
        if self._spans.tracing:
            self._spans.keep(frame, SEND, began, monotonic())
