"""Cleans up behind a driver that was killed: a process of its own, which outlives it by what there is to do (see `cleaner`).

It is told of directories, and forgets those that the driver has removed itself.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

from . import cleaner

EXIT_S = 5.0


class Janitor:
    """The process, while there are directories to watch. All threads of a driver share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._watched: set[str] = set()

    def watch(self, path: str) -> None:
        """Has a directory removed when this process is gone."""
        with self._lock:
            self._watched.add(path)
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", cleaner.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            self._tell(f"+{path}")

    def forget(self, path: str) -> None:
        """The directory is gone."""
        with self._lock:
            self._watched.discard(path)
            self._tell(f"-{path}")
            if self._watched or self._process is None:
                return
            process, self._process = self._process, None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=EXIT_S)

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # somebody has ended it
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()


janitor = Janitor()
"""This process's."""
