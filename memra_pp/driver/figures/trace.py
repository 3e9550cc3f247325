"""A pipeline's trace: the spans of all stages on one clock as Chrome trace events, which Perfetto shows too, and how long
frames took from stage to stage.

The format is the JSON object of "Trace Event Format" (Duvall and others, Google).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StageError
from ...stage.spans import COMPUTE, FIELDS, KINDS, RECV, SEND

Spans = NDArray[np.int64]
"""`[n, 6]`, in the order of `stage.spans.FIELDS`."""

DRIVER = 0
"""The driver's number in a trace; a stage's is its own plus 1."""

FRAMES_TRACK, SEND_TRACK = 1, 2
"""Sending may go on while the stage does something else, so it has a track of its own."""


def chrome_trace(names: Sequence[str], stages: Sequence[bytes], offsets: Sequence[int], driver: bytes) -> dict[str, Any]:
    """The trace as one object for `json.dump`, its times in microseconds since the first span began.

    A frame is linked from stage to stage by flow events. Under `otherData`, `hops` has `from`, `to`, `frames`, `median_us` and
    `p99_us` of every hop: the time from a frame's having been computed on a stage, or from when the driver began to send it,
    until all of it was on the next.

    Args:
        names: what to call the stages.
        stages: what each of them has kept, as `stage.spans.Spans.take` gives it.
        offsets: how far each one's clock is ahead of the driver's, in nanoseconds.
        driver: what the driver has kept: its sends and receives.

    Raises:
        StageError: what a stage has kept is no list of spans.
    """
    who = ["driver", *names]
    spans = [_unpacked(name, packed) for name, packed in zip(who, [driver, *stages], strict=True)]
    for own, offset in zip(spans, [0, *offsets], strict=True):
        own[:, 2:4] -= offset
    start = min((int(own[:, 2].min()) for own in spans if len(own)), default=0)
    for own in spans:
        own[:, 2:4] -= start
    hops = [_Hop.between(spans, pid, (pid + 1) % len(who)) for pid in range(len(who))]
    events = [event for pid, name in enumerate(who) for event in _named(pid, name)]
    events += [event for pid, own in enumerate(spans) for event in _slices(pid, own)]
    numbers = itertools.count(1)
    events += [event for hop in hops for event in hop.flows(numbers)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"hops": [hop.told() for hop in hops if hop.frames]},
    }


@dataclass(frozen=True)
class _Hop:
    """The way from one track to the next: when each frame left and when it had come, in nanoseconds, by its id."""

    source: int
    target: int
    left: dict[int, int]
    come: dict[int, int]

    @classmethod
    def between(cls, spans: Sequence[Spans], source: int, target: int) -> _Hop:
        left = _moments(spans[source], SEND, "began") if source == DRIVER else _moments(spans[source], COMPUTE, "ended")
        come = _moments(spans[target], RECV, "ended") if target == DRIVER else _moments(spans[target], COMPUTE, "began")
        return cls(source, target, left, come)

    @property
    def frames(self) -> list[int]:
        return [frame for frame in self.left if frame in self.come]

    def told(self) -> dict[str, Any]:
        """The hop in numbers."""
        took = [(self.come[frame] - self.left[frame]) / 1e3 for frame in self.frames]
        median, p99 = np.percentile(took, [50, 99]).tolist()
        ends = ["driver" if pid == DRIVER else f"stage {pid - 1}" for pid in (self.source, self.target)]
        return {"from": ends[0], "to": ends[1], "frames": len(took), "median_us": median, "p99_us": p99}

    def flows(self, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
        """Two events a frame: they belong to the slices in which they lie, so none is at the end of its own."""
        leaves = (SEND_TRACK, 0) if self.source == DRIVER else (FRAMES_TRACK, -1)
        comes = (FRAMES_TRACK, -1 if self.target == DRIVER else 0)
        for frame in self.frames:
            flow = {"cat": "hop", "name": "frame", "id": next(numbers)}
            for phase, pid, (tid, shift), at in (
                ({"ph": "s"}, self.source, leaves, self.left[frame]),
                ({"ph": "f", "bp": "e"}, self.target, comes, self.come[frame]),
            ):
                yield {**phase, **flow, "pid": pid, "tid": tid, "ts": (at + shift) / 1e3}


def _unpacked(name: str, packed: bytes) -> Spans:
    if not isinstance(packed, bytes) or len(packed) % (8 * len(FIELDS)):
        raise StageError(f"{name} gave {packed!r:.80} where spans of {8 * len(FIELDS)} bytes belong: launch the pipeline again")
    spans = np.frombuffer(packed, np.int64).reshape(-1, len(FIELDS)).copy()
    kinds = np.unique(spans[:, FIELDS.index("kind")])
    if not np.isin(kinds, range(len(KINDS))).all():
        raise StageError(f"{name} gave spans of the kinds {kinds}, known are 0 to {len(KINDS) - 1}: launch the pipeline again")
    return spans


def _moments(spans: Spans, kind: int, field: str) -> dict[int, int]:
    chosen = spans[spans[:, FIELDS.index("kind")] == kind]
    return dict(zip(chosen[:, 0].tolist(), chosen[:, FIELDS.index(field)].tolist(), strict=True))


def _named(pid: int, name: str) -> Iterator[dict[str, Any]]:
    """What the viewer calls a process and its tracks."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, track in ((FRAMES_TRACK, "frames"), (SEND_TRACK, "send")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}


def _slices(pid: int, spans: Spans) -> Iterator[dict[str, Any]]:
    """An event a span, in the order in which they began."""
    for frame, kind, began, ended, rows, entries in spans[spans[:, 2].argsort(kind="stable")].tolist():
        yield {
            "ph": "X", "cat": "stage", "name": KINDS[kind], "pid": pid, "tid": SEND_TRACK if kind == SEND else FRAMES_TRACK,
            "ts": began / 1e3, "dur": (ended - began) / 1e3, "args": {"frame": frame, "rows": rows, "entries": entries},
        }  # fmt: skip
