"""A pipeline's trace: the spans of all stages on one clock, as Chrome trace events, which Perfetto shows too, and how long
frames took from stage to stage.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StageError
from ..stage.spans import COMPUTE, FIELDS, KINDS, RECV, SEND

Spans = NDArray[np.int64]
"""`[n, 6]`, as `stage.spans.Spans.take` packs them."""

Moments = dict[int, int]
"""When something happened to a frame, in nanoseconds, by the frame's id."""

FRAMES_TRACK, SEND_TRACK = 1, 2
"""What a stage sends may overlap what it does else, so it has a track of its own."""


def chrome_trace(
    stages: Sequence[bytes], names: Sequence[str], offsets: Sequence[int], driver: bytes = b""
) -> dict[str, Any]:
    """The trace as one JSON object. Under `otherData`, `hops` has of every hop `from`, `to`, `frames`, `median_us`, `p99_us`:
    from a frame's being computed on a stage, or the driver's beginning to send it, to its being whole on the next.

    Args:
        stages: every stage's spans, in order, as `stage.spans.Spans.take` gives them.
        names: what to call the stages.
        offsets: how far each stage's clock is ahead of the driver's, in nanoseconds.
        driver: the driver's own spans: what it has sent and received.

    Raises:
        StageError: what a stage has given is no list of spans.
    """
    who = ["driver", *names]
    spans = [_unpacked(packed, name) for packed, name in zip([driver, *stages], who, strict=True)]
    for one, offset in zip(spans, [0, *offsets], strict=True):
        one[:, 2:4] -= offset
    start = min((int(one[:, 2].min()) for one in spans if len(one)), default=0)
    for one in spans:
        one[:, 2:4] -= start
    ways = list(_ways(spans, who))
    events = [event for pid, name in enumerate(who) for event in _track_names(pid, name)]
    events += [event for pid, one in enumerate(spans) for event in _slices(pid, one)]
    numbers = itertools.count(1)
    for way in ways:
        events += [event for frame in way.frames for event in way.flow(frame, next(numbers))]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"hops": [way.times() for way in ways if way.frames]}}
