"""Lanes: authenticated sockets between the driver and the stages. Unix sockets on one node, TCP across nodes.

Both sides prove that they hold the pipeline's key (HMAC-SHA256 over both sides' nonces) before a frame is read; that runs
off the accept thread, with a deadline and a cap on how many may be pending. Every call has a deadline.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from socket import MSG_DONTWAIT, SO_RCVTIMEO, SO_SNDBUF, SO_SNDTIMEO, SOL_SOCKET
from typing import Any

import numpy as np

from ..errors import FrameError, LaneError
from .frames import Frame, encode, read

HANDSHAKE_S = 2.0
MAX_PENDING_HANDSHAKES = 16
KEY_BYTES = 32
STALL_S = 5.0
"""A frame that has begun to arrive and then stays silent for this long breaks its lane."""

BUFFER_BYTES = 1 << 16
UNIX_BUFFER_BYTES = 1 << 20
"""Some rows of a prefill: a sender hands over more at a time, and the two take turns less often."""

_NONCE = 32
_DIGEST = 32
_ROLE = 16
_HELLO = b"memra_pp/1\n"
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
                    self._sock.setsockopt(SOL_SOCKET, SO_SNDTIMEO, _timeval(_left(deadline)))
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


def _left(deadline: float) -> float:
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


class Listener:
    """Accepts lanes at an address, `unix:PATH` or `tcp:HOST:PORT` (port 0: any), and sorts them by the role they asked for."""

    def __init__(self, address: str, key: bytes) -> None:
        self._key = key
        self._sock = _bind(address)
        self.address = address if address.startswith("unix:") else _tcp_address(self._sock)
        self._ready: dict[str, queue.Queue[Lane]] = {}
        self._greeting: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept_loop, name="lane-accept", daemon=True)
        self._thread.start()

    def accept(self, role: str, timeout: float) -> Lane:
        """The next lane whose peer asked for `role`.

        Raises:
            LaneError: none came within `timeout` seconds.
        """
        try:
            return self._queue(role).get(timeout=timeout)
        except queue.Empty:
            raise LaneError(f"no peer opened a {role} lane at {self.address} within {timeout:.0f} s") from None

    def close(self) -> None:
        """Stops accepting and drops who is in the handshake or was not asked for; lanes already handed out stay open."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(timeout=HANDSHAKE_S)
        with self._lock:
            greeting = dict(self._greeting)
        for thread, sock in greeting.items():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=HANDSHAKE_S)
        for ready in self._ready.values():
            while not ready.empty():
                ready.get().close()
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    def _queue(self, role: str) -> queue.Queue[Lane]:
        with self._lock:
            return self._ready.setdefault(role, queue.Queue())

    def _accept_loop(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._greet, args=(sock,), name="lane-handshake", daemon=True)
            with self._lock:
                room = len(self._greeting) < MAX_PENDING_HANDSHAKES
                if room:
                    self._greeting[thread] = sock
            if room:
                thread.start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            role = _prove_to_client(sock, self._key)
            self._queue(role).put(Lane(sock, f"the peer of a {role} lane"))
        except (OSError, LaneError):
            sock.close()
        finally:
            with self._lock:
                del self._greeting[threading.current_thread()]


def connect(address: str, role: str, key: bytes, timeout: float, peer: str) -> Lane:
    """Opens a lane of `role` to a listener. `peer` names the other side in errors.

    Raises:
        LaneError: nobody listens there, the other side does not hold the key, or the role is not a short ASCII name.
    """
    if not (role.isascii() and role.isidentifier() and len(role) <= _ROLE):
        raise LaneError(f"a lane of role {role!r:.80}: it must be an ASCII name of at most {_ROLE} characters")
    family, target = _target(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(target)
        _tune(sock)
        _prove_to_server(sock, role, key)
    except (OSError, LaneError) as error:
        sock.close()
        raise LaneError(f"no {role} lane to {peer} at {address}: {error}") from error
    return Lane(sock, peer)


def _prove_to_server(sock: socket.socket, role: str, key: bytes) -> None:
    deadline = time.monotonic() + HANDSHAKE_S
    name, mine = role.encode().ljust(_ROLE, b"\0"), secrets.token_bytes(_NONCE)
    sock.sendall(_HELLO + name + mine)
    theirs = _exactly(sock, _NONCE, deadline)
    _require_mac(_exactly(sock, _DIGEST, deadline), _mac(key, b"server", name, mine, theirs))
    sock.sendall(_mac(key, b"client", name, mine, theirs))
    if _exactly(sock, 1, deadline) != b"\1":
        raise LaneError("the handshake was not accepted")


def _prove_to_client(sock: socket.socket, key: bytes) -> str:
    deadline = time.monotonic() + HANDSHAKE_S
    _tune(sock)
    if _exactly(sock, len(_HELLO), deadline) != _HELLO:
        raise LaneError("the peer does not speak this protocol")
    name, theirs, mine = _exactly(sock, _ROLE, deadline), _exactly(sock, _NONCE, deadline), secrets.token_bytes(_NONCE)
    sock.sendall(mine + _mac(key, b"server", name, theirs, mine))
    _require_mac(_exactly(sock, _DIGEST, deadline), _mac(key, b"client", name, theirs, mine))
    sock.sendall(b"\1")
    return name.rstrip(b"\0").decode("ascii", "replace")


def _mac(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")


def _require_mac(got: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(got, expected):
        raise LaneError("the other side does not hold this pipeline's key")


def _exactly(sock: socket.socket, n: int, deadline: float) -> bytes:
    data = b""
    while len(data) < n:
        sock.settimeout(_left(deadline))
        more = sock.recv(n - len(data))
        if not more:
            raise LaneError("the other side closed the connection in the handshake")
        data += more
    return data


def _bind(address: str) -> socket.socket:
    family, target = _target(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(target)
        sock.listen(MAX_PENDING_HANDSHAKES)
    except OSError as error:
        sock.close()
        raise LaneError(f"cannot listen at {address}: {error}") from error
    return sock


def _target(address: str) -> tuple[int, str | tuple[str, int]]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest and "\0" not in rest:  # no abstract name: no directory would guard it
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise LaneError(f"a lane address {address!r}: it must be unix:PATH or tcp:HOST:PORT")
    return socket.AF_INET, (host, int(port))


def _tcp_address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"tcp:{host}:{port}"


def _tune(sock: socket.socket) -> None:
    """TCP sizes its buffers itself; a Unix socket keeps the size it has been given, as far as the system allows."""
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        sock.setsockopt(SOL_SOCKET, SO_SNDBUF, UNIX_BUFFER_BYTES)
