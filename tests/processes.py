"""What is left of processes: those that inherited a mark, or write where their parent told them to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MARK = "MEMRA_TEST_MARK"
"""The environment variable that a test gives its child, with a value of its own."""


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def marked(mark: str, folder: Path | None = None) -> list[int]:
    """Processes that inherited the mark, or, where Ray has written a title over it, write to files in `folder`."""
    found = []
    for proc in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if proc.name.isdigit() and (_inherited(proc, mark) or _writes_to(proc, folder)):
                found.append(int(proc.name))
    return [pid for pid in found if alive(pid)]


def _inherited(proc: Path, mark: str) -> bool:
    return f"{MARK}={mark}\0".encode() in (proc / "environ").read_bytes()


def _writes_to(proc: Path, folder: Path | None) -> bool:
    return folder is not None and os.readlink(proc / "fd" / "1").startswith(f"{folder}/")
