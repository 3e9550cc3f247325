"""`OwnedLock`: a lock for code that an interrupt or a finalizer may enter at any moment."""

from __future__ import annotations

import threading
from typing import Any


class OwnedLock:
    """A lock that knows whether the calling thread holds it.

    So a finalizer that runs in the middle of a step can see that it does; and an interrupt between taking the lock and noting
    so costs nothing: `try: acquire ... finally: release_if_mine`. A thread that holds it does not take it again.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the lock (`threading.Condition` asks the same way)."""
        return bool(self._lock._is_owned())

    def acquire(self, timeout: float) -> bool:
        """Takes the lock within `timeout` seconds; whether it did."""
        return bool(self._lock.acquire(timeout=timeout))

    def release_if_mine(self) -> None:
        """Gives the lock back if the calling thread holds it."""
        if self.mine:
            self._lock.release()
