"""A chain of relays over bare Unix sockets: what it costs at least to get a message through some Python processes and back.

Run as a program, a relay: `_relay.py HERE THERE BYTES` receives messages of that length at one socket and passes them on to the
next until the first ends; with BYTES 0, messages that begin with lengths and a msgpack header, which it reads and writes anew.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack

WAIT_S = 20.0
LENGTHS = struct.Struct("<II")
HEADER = {"session": 1, "seq": 1, "base_len": 77, "acks": 0}


@contextmanager
def relays(stages: int, size: int, *, header: bool = False) -> Iterator[Callable[[], None]]:
    """As many processes in a row; a call sends a message of `size` bytes through all and waits until it is back."""
    with tempfile.TemporaryDirectory(prefix="memra-relay-") as name, ExitStack() as stack:
        paths = [f"{name}/{i}" for i in range(stages + 1)]
        back_at = stack.enter_context(listen(paths[-1]))
        for pair in pairwise(paths):
            command = [sys.executable, str(Path(__file__)), *pair, "0" if header else str(size)]
            process = stack.enter_context(subprocess.Popen(command))  # leaving it waits for its end
            stack.callback(process.kill)
        out = stack.enter_context(connect(paths[0]))
        back_at.settimeout(WAIT_S)
        back = stack.enter_context(back_at.accept()[0])
        message, buffer = bytes(size), memoryview(bytearray(size))

        def bare() -> None:
            out.sendall(message)
            if not receive(back, buffer):
                raise RuntimeError("a relay has ended")

        def headed() -> None:
            send_message(out, HEADER, message)
            came = receive_message(back)
            if came is None or came[0]["acks"] != stages:
                raise RuntimeError("a relay has ended")

        yield headed if header else bare


def relay(here: str, there: str, size: int) -> None:
    """Passes messages on until the socket ends."""
    with listen(here) as listener, connect(there) as down:
        up, _ = listener.accept()
        with up:
            if size:
                buffer = memoryview(bytearray(size))
                while receive(up, buffer):
                    down.sendall(buffer)
            else:
                while (message := receive_message(up)) is not None:
                    header, body = message
                    send_message(down, {**header, "acks": header["acks"] + 1}, body)


def send_message(sock: socket.socket, header: dict[str, int], body: Any) -> None:
    """Sends lengths, a msgpack header and the body."""
    packed = msgpack.packb(header)
    sock.sendmsg([LENGTHS.pack(len(packed), len(body)) + packed, body])


def receive_message(sock: socket.socket) -> tuple[dict[str, int], memoryview] | None:
    """What `send_message` sent; None at end of file."""
    lengths = memoryview(bytearray(LENGTHS.size))
    if not receive(sock, lengths):
        return None
    n, size = LENGTHS.unpack(lengths)
    rest = memoryview(bytearray(n + size))
    return (msgpack.unpackb(rest[:n]), rest[n:]) if receive(sock, rest) else None


def listen(path: str) -> socket.socket:
    """A socket that one other may connect to."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    return listener


def connect(path: str) -> socket.socket:
    """Connects once somebody listens there."""
    sock = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            sock.connect(path)
            return sock
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def receive(sock: socket.socket, buffer: memoryview) -> bool:
    """Fills `buffer`; False at end of file."""
    at = 0
    while at < len(buffer):
        got = sock.recv_into(buffer[at:])
        if got == 0:
            return False
        at += got
    return True


if __name__ == "__main__":
    relay(sys.argv[1], sys.argv[2], int(sys.argv[3]))
