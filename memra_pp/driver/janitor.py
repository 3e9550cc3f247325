"""Cleans up behind a driver that was killed: a process of its own, which outlives it by what there is to do.

It is told of directories, and forgets those that the driver has removed itself. When the driver is gone, whatever ended it, it
ends the Ray processes that were started for one of them, and removes it. It runs without site packages, in some megabytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HOME = "MEMRA_RAY_HOME"
"""The environment variable that the processes of a Ray, started in a directory, inherit."""
RAYS = (b"ray::", b"/ray/")
"""What the command of a process of Ray's has in it."""
CLEAN_S = 30.0
EXIT_S = 5.0
LOOK_S = 0.05
QUIET_LOOKS = 20
"""So many looks that find nobody in a row are the end: one that is just being started may not be seen by a single one."""


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
                    [sys.executable, "-S", "-E", __file__],
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


def clean(path: str) -> None:
    """Ends the Ray that was started in a directory, and removes it."""
    deadline, quiet = time.monotonic() + CLEAN_S, 0
    while quiet < QUIET_LOOKS and time.monotonic() < deadline:
        pids = started_in(path)
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    while Path(path).exists() and time.monotonic() < deadline:
        shutil.rmtree(path, ignore_errors=True)


def started_in(path: str) -> list[int]:
    """Ray's processes there that are alive: what a user has started meanwhile inherits the variable too, and is no Ray."""
    found = []
    for proc in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if proc.name.isdigit() and _belongs(proc, path):
                found.append(int(proc.name))
    return found


def _belongs(proc: Path, path: str) -> bool:
    """By what it has inherited, or, where its title has been written over that, by where its output goes."""
    command = (proc / "cmdline").read_bytes()
    if not any(name in command for name in RAYS):
        return False
    if f"{HOME}={path}\0".encode() in (proc / "environ").read_bytes():
        return True
    return any(os.readlink(proc / "fd" / fd).startswith(path + "/") for fd in ("1", "2"))


def main() -> None:
    """Reads `+PATH` and `-PATH` until the driver is gone, then cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: set[str] = set()
    for line in sys.stdin:
        sign, path = line[:1], line[1:].rstrip("\n")
        (watched.add if sign == "+" else watched.discard)(path)
    for path in watched:
        clean(path)


if __name__ == "__main__":
    main()
