"""Where running pipelines of this user on this machine are found: a private directory with an entry each.

An entry is a directory `PID-N`, N counting a process's pipelines, with a Unix socket `door` and the `key` that opens it. It is
removed with its pipeline, by the janitor behind a driver that was killed, and by whoever finds it with nobody behind it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ...stage.listener import KEY_BYTES
from ..launch.janitor import janitor

PRIVATE = 0o700
_NAME = re.compile(r"([1-9]\d{0,9})-([1-9]\d{0,9})", re.ASCII)


@dataclass(frozen=True)
class Registered:
    """A pipeline's entry."""

    path: Path

    @property
    def name(self) -> str:
        """`PID-N`."""
        return self.path.name

    @property
    def pid(self) -> int:
        """The driver's process."""
        return int(self.name.partition("-")[0])

    @property
    def address(self) -> str:
        """Of its door."""
        return f"unix:{self.path}/door"

    def key(self) -> bytes:
        """What opens the door. Raises OSError if it is gone."""
        with open(self.path / "key", "rb") as file:
            return file.read(KEY_BYTES)

    def remove(self) -> None:
        """Removes it; twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)


def registry() -> Path:
    """`$XDG_RUNTIME_DIR/memra-pp`, or `/tmp/memra-pp-UID` where there is no such variable; made if it is not there.

    Raises:
        ConfigError: it is not this user's alone, or cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "memra-pp" if runtime else Path(f"/tmp/memra-pp-{os.getuid()}")
    try:
        path.mkdir(mode=PRIVATE, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be had ({error.strerror}): set XDG_RUNTIME_DIR to a directory of your own") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != PRIVATE:
        raise ConfigError(f"{path} must be a directory of user {os.getuid()} with mode 0700: move what is there away")
    return path


def enter(name: str) -> Registered:
    """A new entry, `PID-N`, with its key. It is removed when this process is killed, too.

    Raises:
        ConfigError, OSError: it cannot be made; nothing is left of it.
    """
    entry = Registered(registry() / name)
    entry.remove()  # of a process that had this number long ago
    entry.path.mkdir(mode=PRIVATE)
    try:
        janitor.watch(str(entry.path))
        with open(os.open(entry.path / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
    except BaseException:
        leave(entry)
        raise
    return entry


def leave(entry: Registered) -> None:
    """Removes an entry of this process."""
    entry.remove()
    janitor.forget(str(entry.path))


def entries() -> list[Registered]:
    """Every entry, by process and number. Raises ConfigError as `registry`."""
    found = [Registered(path) for path in registry().iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda entry: [*map(int, entry.name.split("-"))])
