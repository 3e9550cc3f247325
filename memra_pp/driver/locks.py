"""`OwnedLock`: a lock for code that an interrupt or a finalizer may enter at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import StageError

T = TypeVar("T")


class OwnedLock:
    """A lock that knows whether the calling thread holds it, so that a finalizer in the middle of a step can see that it is."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the lock (`threading.Condition` asks the same way)."""
        return bool(self._lock._is_owned())

    def try_run(self, action: Callable[[], object]) -> bool:
        """Calls `action` with the lock held, unless another thread holds it; whether it did."""
        return self._held(action, 0.0) is not None

    def run(self, action: Callable[[], T], timeout: float, busy: str) -> T:
        """Calls `action` with the lock held. A thread that holds it does not take it again.

        Raises:
            StageError: another thread held it for `timeout` seconds; `busy` says with what.
        """
        done = self._held(action, timeout)
        if done is None:
            raise StageError(f"{busy} for {timeout:.0f} s")
        return done[0]

    def _held(self, action: Callable[[], T], timeout: float) -> tuple[T] | None:
        """What `action` gives with the lock held; None if it could not be taken in time."""
        try:
            if not self._lock.acquire(timeout=timeout):
                return None
            return (action(),)
        finally:
            # An interrupt strikes at calls of Python functions: before this one of C's there is no such place, and none may be.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # it was not taken
                pass
