"""Fair timing for the benches: one thread, an honest NumPy, medians of interleaved calls."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping

SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Settings that keep OpenBLAS from using the processor it runs on."""


def one_thread_process() -> None:
    """Starts this program again, once, with one BLAS thread and nothing that slows NumPy: OpenBLAS looks at load time."""
    wanted = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in os.environ.items() if name not in SLOWING} | wanted
    if env != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def medians(*calls: Callable[[], object], rounds: int = 15) -> list[float]:
    """Seconds a call, each the median of `rounds`.

    The calls take turns, so that a disturbance falls on all alike, each after an untimed call of its own: what it finds
    in the processor's caches is not what another left there.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, seconds, strict=True):
            call()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def in_turns(calls: Mapping[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, by name: of each in turn as many as is said beside it, `rounds` times. A turn more goes before,
    unmeasured."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, (call, count) in calls.items():
            for _ in range(count):
                start = time.perf_counter()
                call()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
    return seconds
