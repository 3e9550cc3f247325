"""The machine that a command runs on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .figures import Machine

PACKAGES = ("memra-pp", "ray", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x")


def machine() -> Machine:
    """What is known of this one."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=platform.platform(),
        load=os.getloadavg()[0],
        versions={"python": platform.python_version()} | {name: of for name in PACKAGES if (of := _version(name))},
    )


def _cpu() -> str:
    """The name of its processor, as proc(5)'s cpuinfo has it on x86; elsewhere of its architecture."""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
