"""`Threads`: a stage's few threads, for kernels that run without the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import ConfigError


class _Part(NamedTuple):
    """Units `[lo, hi)` of a kernel's work, and where its outcome (None or the exception) goes."""

    kernel: Callable[..., object]
    args: tuple[Any, ...]
    lo: int
    hi: int
    outcomes: SimpleQueue[BaseException | None]


class Threads:
    """Up to `n` threads that share out a kernel's units, the caller's own among them. `n = 1` starts none.

    Raises:
        ConfigError: `n` is less than 1.
    """

    def __init__(self, n: int = 1) -> None:
        if n < 1:
            raise ConfigError(f"Threads(n={n}): at least one thread is needed; pass 1 to work on the caller's alone")
        self.n = n
        self._inboxes: list[SimpleQueue[_Part | None]] = [SimpleQueue() for _ in range(n - 1)]
        self._workers = [
            threading.Thread(target=_serve, args=(inbox,), name=f"memra-kernel-{index}", daemon=True)
            for index, inbox in enumerate(self._inboxes, start=1)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, kernel: Callable[..., object], total: int, grain: int, *args: Any) -> None:
        """Calls `kernel(*args, lo, hi)` over `[0, total)` in at most `n` contiguous parts of at least `grain` units.

        Returns when all parts are done. What a part raises is raised here, after the others have ended.
        """
        parts = max(1, min(len(self._inboxes) + 1, total // max(1, grain)))
        if parts == 1:
            kernel(*args, 0, total)
            return
        outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        for index in range(1, parts):
            lo, hi = total * index // parts, total * (index + 1) // parts
            self._inboxes[index - 1].put(_Part(kernel, args, lo, hi, outcomes))
        errors = [_outcome(kernel, args, 0, total // parts), *(outcomes.get() for _ in range(1, parts))]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the threads; later `run`s work on the caller's alone. Closing twice is harmless."""
        for inbox in self._inboxes:
            inbox.put(None)
        for worker in self._workers:
            worker.join()
        self._inboxes, self._workers = [], []

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _serve(inbox: SimpleQueue[_Part | None]) -> None:
    while (part := inbox.get()) is not None:
        part.outcomes.put(_outcome(part.kernel, part.args, part.lo, part.hi))


def _outcome(kernel: Callable[..., object], args: tuple[Any, ...], lo: int, hi: int) -> BaseException | None:
    """Runs one part; what it raised, for the caller's thread to raise once every part has ended."""
    try:
        kernel(*args, lo, hi)
    except BaseException as error:  # noqa: BLE001
        return error
    return None
