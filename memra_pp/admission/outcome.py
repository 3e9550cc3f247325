"""`Outcome`: told once, to whoever waits for it. Nobody waits inside a lock of Python's, where a finalizer may run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

from .verdicts import Admit, Refuse


class Outcome:
    """The verdict on a request that waits, or that it was sent away.

    `on_told`, once set, is called when it is told; it must not block or raise.
    """

    def __init__(self) -> None:
        self.on_told: Callable[[], object] | None = None
        self._verdict: Admit | Refuse | None = None
        self._cancelled = False

    def done(self) -> bool:
        """Whether it was told."""
        return self._cancelled or self._verdict is not None

    def cancelled(self) -> bool:
        """Whether the request was sent away."""
        return self._cancelled

    def result(self) -> Admit | Refuse:
        """The verdict.

        Raises:
            CancelledError: the request was sent away, or nothing was told yet.
        """
        if self._verdict is None:
            raise CancelledError
        return self._verdict

    def tell(self, verdict: Admit | Refuse) -> None:
        """Tells the verdict."""
        self._verdict = verdict
        self._wake()

    def cancel(self) -> None:
        """Sends the request away."""
        self._cancelled = True
        self._wake()

    def _wake(self) -> None:
        if self.on_told is not None:
            self.on_told()
