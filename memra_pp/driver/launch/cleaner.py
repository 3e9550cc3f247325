"""The janitor's process. It reads `+PATH` and `-PATH` until the driver is gone, whatever ended it; then it ends the Ray
processes that were started for one of the directories that are left, and removes it.

It runs without site packages, and loads little before there is something to clean: it is started with a launch.
"""

from __future__ import annotations

import os
import signal
import sys
import time

HOME = "MEMRA_RAY_HOME"
"""The environment variable that the processes of a Ray, started in a directory, inherit."""
RAYS = (b"ray::", b"/ray/")
"""What the command of a process of Ray's has in it."""
CLEAN_S = 30.0
LOOK_S = 0.05
QUIET_LOOKS = 20
"""So many looks that find nobody in a row are the end: one that is just being started may not be seen by a single one."""


def main() -> None:
    """Watches until the driver is gone, then cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: set[str] = set()
    for line in sys.stdin:
        sign, path = line[:1], line[1:].rstrip("\n")
        (watched.add if sign == "+" else watched.discard)(path)
    for path in watched:
        clean(path)


def clean(path: str) -> None:
    """Ends the Ray that was started in a directory, and removes it."""
    import shutil

    deadline, quiet = time.monotonic() + CLEAN_S, 0
    while quiet < QUIET_LOOKS and time.monotonic() < deadline:
        pids = started_in(path)
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            try:  # noqa: SIM105
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(LOOK_S)
    while os.path.exists(path) and time.monotonic() < deadline:
        shutil.rmtree(path, ignore_errors=True)


def started_in(path: str) -> list[int]:
    """Ray's processes there that are alive: what a user has started meanwhile inherits the variable too, and is no Ray."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _belongs(f"/proc/{name}", path)]


def _belongs(proc: str, path: str) -> bool:
    """By what it has inherited, or, where its title has been written over that, by the logs that it has open there."""
    try:
        command = _read(f"{proc}/cmdline")
        if not any(name in command for name in RAYS):
            return False
        if f"{HOME}={path}\0".encode() in _read(f"{proc}/environ"):
            return True
        return any(os.readlink(f"{proc}/fd/{fd}").startswith(path + "/") for fd in os.listdir(f"{proc}/fd"))
    except OSError:  # it is gone, or another's
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    main()
