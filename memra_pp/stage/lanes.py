"""`Lane`: a socket that frames travel between the driver and the stages. Every call has a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Sequence
from socket import MSG_DONTWAIT, SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET
from typing import Any

import numpy as np

from ..errors import FrameError, LaneError
from .frames import Frame, encode, read

STALL_S = 5.0
"""A frame that has begun to arrive and then stays silent for this long breaks its lane."""

BUFFER_BYTES = 1 << 16

_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Lane:
    """One connected, authenticated socket. One thread sends and one receives."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self.peer = peer
        self._buffer, self._spare = memoryview(bytearray(BUFFER_BYTES)), memoryview(b"")
        self._whole = (self._buffer,)
        self._arrived: list[int] = []
        self._used = 0
        self._recv_timeout = math.nan  # none that was asked for
        sock.settimeout(None)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether more has arrived already than the frame received last, so that no selector will tell of it."""
        return sum(self._arrived) > self._used

    def send(self, frame: Frame, timeout: float) -> None:
        """Sends a frame. Raises as `begin` and `finish` do."""
        if rest := self.begin(frame):
            self.finish(rest, timeout)

    def begin(self, frame: Frame) -> list[memoryview]:
        """Sends of a frame what the socket takes at once, with one call. What is left is for `finish`, before the next frame.
        Arrays are not copied.

        Raises:
            FrameError: no frame carries this; nothing was sent.
            LaneError: the peer is gone.
        """
        buffers, total = encode(frame)
        try:
            if len(buffers) == 1:
                sent = self._sock.send(buffers[0], MSG_DONTWAIT)
            else:
                sent = self._sock.sendmsg(buffers if len(buffers) <= _IOV_MAX else buffers[:_IOV_MAX], (), MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except ValueError as error:
            raise FrameError(f"an array cannot be sent to {self.peer} ({error}): it must be C-contiguous") from error
        except OSError as error:
            raise self._broken("send to", error) from error
        return [] if sent == total else _behind(buffers, sent)

    def finish(self, rest: Sequence[memoryview], timeout: float) -> None:
        """Sends what `begin` has left.

        Raises:
            LaneError: the peer is gone, or did not take the bytes within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        try:
            for part in rest:
                while len(part):
                    self._sock.setsockopt(SOL_SOCKET, SO_SNDTIMEO, _timeval(left(deadline)))
                    part = part[self._sock.send(part) :]
        except OSError as error:
            raise self._broken("send to", error) from error

    def recv(self, timeout: float) -> Frame | None:
        """The next frame, its arrays views of a buffer that the next `recv` overwrites; None if none began in time.

        A frame that has begun may take longer than `timeout`, as long as it goes on arriving. What has arrived of it is
        kept when a signal handler raises, and the next call goes on from there: `extend` over `map` notes how many bytes came
        in the same C call that reads them.

        Raises:
            LaneError: end of file, a bad frame, or silence in the middle of one.
        """
        arrived = self._arrived
        if used := self._used:
            if arrived[0] == used:
                self._used = 0
                arrived.clear()
            else:
                self._drop_used()
        try:
            if not arrived:
                if timeout != self._recv_timeout:
                    self._set_recv_timeout(timeout)
                arrived.extend(map(self._sock.recv_into, self._whole))
            frame, size = read(self._buffer, arrived[0])
            while frame is None:
                self._grow(size)
                self._fill(size)
                frame, size = read(self._buffer, sum(arrived))
        except BlockingIOError as error:
            if not arrived:
                return None
            raise self._broken("receive the rest of a frame from", error) from error
        except OSError as error:
            raise self._broken("receive from", error) from error
        self._used = size
        return frame

    def give_back(self, slot: int) -> None:
        """Tells the sender of the frames that a slot, 1 to 255, is free again: a byte against their stream.

        Raises:
            LaneError: the peer is gone.
        """
        try:
            self._sock.send(bytes((slot,)), MSG_DONTWAIT)
        except OSError as error:
            raise self._broken("give a slot back to", error) from error

    def await_slot(self, timeout: float) -> int:
        """The next slot that the receiver of the frames gives back.

        Raises:
            LaneError: the peer is gone, or gave none back within `timeout` seconds.
        """
        try:
            self._set_recv_timeout(timeout)
            given = self._sock.recv(1)
        except OSError as error:
            raise self._broken("have a slot back from", error) from error
        if not given:
            raise LaneError(f"{self.peer} closed the lane")
        return given[0]

    def keep(self, frame: Frame) -> None:
        """Leaves the frame received last as it is until the next but one is received, if any of its arrays is a view."""
        if not any(np.may_share_memory(a, self._buffer) for a in frame.arrays):
            return
        rest = sum(self._arrived) - self._used
        if len(self._spare) < max(rest, BUFFER_BYTES):
            self._spare = memoryview(bytearray(max(rest, BUFFER_BYTES)))
        self._spare[:rest] = self._buffer[self._used : self._used + rest]
        self._buffer, self._spare = self._spare, self._buffer
        self._whole = (self._buffer,)
        self._arrived[:] = [rest] if rest else []
        self._used = 0

    def hang_up(self) -> None:
        """Ends the connection and wakes whoever waits on it. Its descriptor stays its own."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket and wakes whoever waits on it."""
        self.hang_up()
        self._sock.close()

    def _fill(self, until: int) -> None:
        """Reads until the buffer holds `until` bytes, and whatever came with them; `STALL_S` is waited for each part."""
        if self._recv_timeout != STALL_S:
            self._set_recv_timeout(STALL_S)
        while (got := sum(self._arrived)) < until:
            self._arrived[:] = [got]
            self._arrived.extend(map(self._sock.recv_into, (self._buffer[got:],)))
            if not self._arrived[-1]:
                raise LaneError(f"{self.peer} closed the lane")

    def _set_recv_timeout(self, seconds: float) -> None:
        value = _timeval(seconds)
        self._recv_timeout = seconds
        self._sock.setsockopt(SOL_SOCKET, SO_RCVTIMEO, value)

    def _drop_used(self) -> None:
        """Forgets the frame handed out last; what came behind it moves to the front. No signal handler can raise between
        the last assignments, nor before `clear` has done its work: one raises only after a call."""
        if rest := sum(self._arrived) - self._used:
            moved = bytes(self._buffer[self._used : self._used + rest])
            self._buffer[:rest] = moved
            self._arrived[:] = [rest]
            self._used = 0
        else:
            self._used = 0
            self._arrived.clear()

    def _grow(self, size: int) -> None:
        if size > len(self._buffer):
            larger = memoryview(bytearray(size))
            got = sum(self._arrived)
            larger[:got] = self._buffer[:got]
            self._buffer, self._whole = larger, (larger,)

    def _broken(self, doing: str, error: OSError) -> LaneError:
        silent = isinstance(error, BlockingIOError | TimeoutError)
        why = "it has stopped taking part" if silent else error.strerror or str(error)
        return LaneError(f"could not {doing} {self.peer}: {why}")


def _timeval(seconds: float) -> bytes:
    """A kernel timeout: set only where it changes, it is cheaper than a poll before each call."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


def left(deadline: float) -> float:
    """Seconds until a deadline of `time.monotonic`.

    Raises:
        TimeoutError: it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _behind(buffers: Sequence[Any], sent: int) -> list[memoryview]:
    """What lies behind the first `sent` bytes of `buffers`."""
    rest = []
    for buffer in buffers:
        whole = memoryview(buffer)
        if sent < whole.nbytes:
            rest.append(whole.cast("B")[sent:])
        sent = max(0, sent - whole.nbytes)
    return rest
