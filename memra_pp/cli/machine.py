"""The machine that a command runs on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .figures import Machine

PACKAGES = ("memra-pp", "ray", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x")


def machine() -> Machine:
    """What is known of this one."""
    return Machine(
        cpu=_proc("cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(memory.split()[0]) * 1024 if (memory := _proc("meminfo", "MemTotal")) else None,
        system=platform.platform(),
        load=os.getloadavg()[0],
        versions={"python": platform.python_version()} | {name: of for name in PACKAGES if (of := _version(name))},
    )


def _proc(file: str, field: str) -> str | None:
    """The first value of a field in one of proc(5)'s files."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
