"""`Outcome`: told once, to whoever waits for it. Nobody waits inside a lock of Python's, where a finalizer may run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """A result that somebody waits for, in a thread or a task, or the error that came instead. The first one told stays.

    `on_told`, once set, is called when it is told; it must neither raise nor wait for others. One waits at a time.
    """

    __slots__ = ("_error", "_told", "_value", "on_told")

    def __init__(self) -> None:
        self.on_told: Callable[[], object] | None = None
        self._told = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it was told."""
        return self._told

    def result(self) -> T:
        """What was told; raises the error if it was one, or `RuntimeError` if nothing was told yet."""
        if self._error is not None:
            raise self._error
        if not self._told:
            raise RuntimeError("nothing was told yet: wait first")
        return self._value  # type: ignore[return-value]

    def cancelled(self) -> bool:
        """Whether whoever waits was sent away."""
        return isinstance(self._error, CancelledError)

    def tell(self, value: T) -> None:
        """Tells the result."""
        if not self._told:
            self._value = value
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Tells that there is none, and why."""
        if not self._told:
            self._error = error
            self._wake()

    def cancel(self) -> None:
        """Sends whoever waits away."""
        self.fail(CancelledError())

    def wait(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds; whether it was told."""
        bell = threading.Lock()
        bell.acquire()
        self.on_told = bell.release
        if not self._told:
            bell.acquire(timeout=timeout)
        return self._told

    async def wait_async(self, timeout: float) -> bool:
        """`wait` for a task."""
        loop = asyncio.get_running_loop()
        bell: asyncio.Future[None] = loop.create_future()
        self.on_told = lambda: _call(loop, lambda: _ring(bell))
        if not self._told:
            late = loop.call_later(timeout, _ring, bell)
            try:
                await bell
            finally:
                late.cancel()
        return self._told

    def _wake(self) -> None:
        self._told = True  # first: who sets `on_told` looks at it afterwards
        told, self.on_told = self.on_told, None
        if told is not None:
            with contextlib.suppress(RuntimeError):  # two told it at once, and the bell rings already
                told()


def _call(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop has ended
        loop.call_soon_threadsafe(action)


def _ring(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)
