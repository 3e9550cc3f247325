"""`Spans`: where a stage's time goes. Totals that are always kept, and what became of every frame, kept when asked for."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from .frames import MAX_MICROS, Frame

KINDS = ("recv", "compute", "blocked", "send")
RECV, COMPUTE, BLOCKED, SEND = range(len(KINDS))

FIELDS = ("frame", "kind", "began", "ended", "rows", "entries")
"""Of a span: the frame's id, when the span began and ended, in nanoseconds of `time.monotonic_ns`, and what the frame had."""

MAX_SPANS = 1 << 16
"""Kept at most, the last ones. So many fit in one answer."""

PAUSE_S = 0.5
"""A wait for input that is longer may be no bubble, but a pause of whoever drives the pipeline: see `Spans.totals`."""


class Spans:
    """A stage's time in seconds, from its first frame to its last: busy with one, waiting until the one before it was sent, and
    all the rest, waiting for one. `stages` is how many the pipeline has, `free` since when the stage waits for a frame."""

    def __init__(self, stages: int) -> None:
        self.busy = self.wait_in = self.wait_out = 0.0
        self.free = 0.0
        self.tracing = False
        self._stages = stages
        self._pauses = self._before = 0.0
        self._kept: deque[tuple[int, int, float, float, int, int]] = deque(maxlen=MAX_SPANS)

    def computed(self, frame: Frame, began: float) -> None:
        """A frame that was there at `began` has now been applied."""
        now = monotonic()
        took = now - began
        if free := self.free:
            waited = began - free
            self.wait_in += waited
            if waited > PAUSE_S and waited > self._stages * max(self._before, 1e-6 * frame.slowest):
                self._pauses += waited
        self.busy += took
        self.free, self._before = now, took
        if (micros := int(1e6 * took)) > frame.slowest:
            frame.slowest = min(micros, MAX_MICROS)
        frame.busy = min(frame.busy + micros, MAX_MICROS)
        if self.tracing:
            self.keep(frame, RECV, free or began, began)
            self.keep(frame, COMPUTE, began, now)

    def blocked(self, frame: Frame) -> None:
        """The frame applied last has waited until now for the one before it to be sent."""
        began, self.free = self.free, monotonic()
        self.wait_out += self.free - began
        if self.tracing:
            self.keep(frame, BLOCKED, began, self.free)

    def totals(self) -> dict[str, float]:
        """Seconds `busy_s`, `wait_in_s` and `wait_out_s`, and `bubble`, the share in which the stage waited.

        A wait for input longer than half a second does not count for the bubble, unless the pipeline may have been at work
        all the while: if it is no longer than all stages together take at the pace of the slowest that this one knows of,
        itself with the frame before or one upstream with the frame that came then.
        """
        waited = self.wait_in - self._pauses + self.wait_out
        return {
            "busy_s": self.busy,
            "wait_in_s": self.wait_in,
            "wait_out_s": self.wait_out,
            "bubble": waited / (waited + self.busy) if waited else 0.0,
        }

    def trace(self) -> None:
        """Keeps spans from now on, and forgets those kept."""
        self._kept.clear()
        self.tracing = True

    def take(self) -> bytes:
        """The spans kept, each the `FIELDS` in i64; no more of them are kept."""
        self.tracing = False
        kept, self._kept = self._kept, deque(maxlen=MAX_SPANS)
        spans = np.array(list(kept), np.float64).reshape(-1, len(FIELDS))
        spans[:, 2:4] *= 1e9
        return spans.astype(np.int64).tobytes()

    def keep(self, frame: Frame, kind: int, began: float, ended: float) -> None:
        """Keeps a span; for who is `tracing`."""
        rows = sum(entry.rows for entry in frame.entries)
        self._kept.append((frame.id, kind, began, ended, rows, len(frame.entries)))


def clock() -> dict[str, Any]:
    """This process's clock: the nanoseconds `ns` of `time.monotonic_ns`, and what it is the clock `of`: all processes since one
    start of a machine share it, None if that is not known."""
    return {"ns": monotonic_ns(), "of": _boot_id()}


@cache
def _boot_id() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None
