"""`Ushers`: threads that open and close sessions for somebody who must not wait meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Ushers:
    """At most `most` threads, started as they are needed.

    They are daemons: an interpreter that ends does not wait for one that waits for bytes, as it does for an executor's.
    """

    def __init__(self, most: int) -> None:
        self._most, self._started = most, 0
        self._due: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._submitted: set[Future[Any]] = set()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has a thread do it."""
        done: Future[T] = Future()
        self._submitted.add(done)
        done.add_done_callback(self._submitted.discard)
        self._due.put(lambda: _do(work, done))
        if self._started < self._most:
            self._started += 1
            Thread(target=self._serve, name="memra-usher", daemon=True).start()
        return done

    def finish(self) -> None:
        """Waits until all that was submitted is done."""
        wait(tuple(self._submitted))

    def end(self) -> None:
        """Ends the threads, once they have done what was submitted."""
        for _ in range(self._started):
            self._due.put(None)

    def _serve(self) -> None:
        while (due := self._due.get()) is not None:
            due()


def _do(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        done.set_exception(error)
