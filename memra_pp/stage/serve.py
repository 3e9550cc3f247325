"""A stage's loops over its lanes: frames from upstream to downstream, and the control lane beside them."""

from __future__ import annotations

import logging
import threading

from ..errors import FrameError, LaneError
from .frames import STATS, STOP, Entry, Frame
from .lanes import Lane
from .worker import StageWorker

log = logging.getLogger(__name__)

IDLE_S = 0.5
SEND_S = 60.0
HEARTBEAT_S = 1.0
SILENCE_S = 60.0
"""A stage whose driver sends no heartbeat for this long ends itself."""


def serve_frames(worker: StageWorker, up: Lane, down: Lane, stop: threading.Event) -> None:
    """Receives, applies and passes on frames until `stop` is set; sets it when a lane breaks.

    Raises:
        LaneError: a neighbour is gone.
    """
    try:
        while not stop.is_set():
            frame = up.recv(IDLE_S)
            if frame is None:
                continue
            worker.apply(frame)
            try:
                down.send(frame, SEND_S)
            except FrameError as error:
                worker.refuse(frame, error)
                down.send(frame, SEND_S)
    finally:
        stop.set()


def serve_control(worker: StageWorker, lane: Lane, stop: threading.Event) -> None:
    """Answers the driver's heartbeats and questions until it says stop, closes the lane or falls silent; then sets `stop`.

    Closes the lane at its end, and so tells the driver of a stage that no longer serves.

    A question is a frame of one entry, ping, stats or stop; it comes back with the answer in the entry's note.
    """
    try:
        while not stop.is_set():
            frame = lane.recv(SILENCE_S)
            if frame is None:
                log.error("%s: no heartbeat from the driver for %.0f s; ending", worker.spec, SILENCE_S)
                return
            for i, entry in enumerate(frame.entries):
                if entry.op == STOP:
                    return
                if entry.op == STATS:
                    frame.notes[i] = {"answer": worker.stats()}
            lane.send(frame, SEND_S)
    except LaneError as error:
        log.warning("%s: the driver's control lane ended (%s)", worker.spec, error)
    finally:
        stop.set()
        lane.close()


def question(op: int, frame_id: int) -> Frame:
    """A control frame: `op` is PING, STATS or STOP."""
    return Frame(frame_id, [Entry(op, 0, 0, 0)])
