"""How lanes come to be: a listener and those who connect to it. Unix sockets on one node, TCP across nodes.

Both sides prove that they hold the pipeline's key (HMAC-SHA256 over both sides' nonces) before a frame is read; that runs
off the accept thread, with a deadline and a cap on how many may be pending.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import threading
import time
from socket import SO_SNDBUF, SOL_SOCKET

from ..errors import LaneError
from .lanes import Lane, left

HANDSHAKE_S = 2.0
MAX_PENDING_HANDSHAKES = 16
KEY_BYTES = 32
UNIX_BUFFER_BYTES = 1 << 20
"""Some rows of a prefill: a sender hands over more at a time, and the two take turns less often."""

_NONCE = 32
_DIGEST = 32
_ROLE = 16
_HELLO = b"memra_pp/1\n"


class Listener:
    """Accepts lanes at an address, `unix:PATH` or `tcp:HOST:PORT` (port 0: any), and sorts them by the role they asked for."""

    def __init__(self, address: str, key: bytes) -> None:
        self._key = key
        self._sock = _bind(address)
        self.address = address if address.startswith("unix:") else _tcp_address(self._sock)
        self._ready: dict[str, queue.Queue[Lane | None]] = {}
        self._greeting: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept_loop, name="lane-accept", daemon=True)
        self._thread.start()

    def accept(self, role: str, timeout: float | None) -> Lane:
        """The next lane whose peer asked for `role`.

        Raises:
            LaneError: none came within `timeout` seconds (None: for as long as it listens), or the listener was closed.
        """
        try:
            lane = self._queue(role).get(timeout=timeout)
        except queue.Empty:
            raise LaneError(f"no peer opened a {role} lane at {self.address} within {timeout:.0f} s") from None
        if lane is None:
            raise LaneError(f"nobody listens at {self.address} any more")
        return lane

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
                if (lane := ready.get()) is not None:
                    lane.close()
            ready.put(None)  # for whoever waits
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    def _queue(self, role: str) -> queue.Queue[Lane | None]:
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
        sock.settimeout(left(deadline))
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
