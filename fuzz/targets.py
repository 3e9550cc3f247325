"""What is fuzzed: everything that reads bytes from outside. Each target takes bytes, and may raise nothing but a `MemraError`.

`SEEDS` are inputs that are taken, to begin from. Targets of files go through a file, as users do.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import gguf
import msgpack
import numpy as np

from memra_pp.cache import KvPolicy
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.config.gguf import config_of
from memra_pp.config.gguf_file import open_gguf
from memra_pp.config.safetensors_file import open_safetensors
from memra_pp.driver import session_file
from memra_pp.driver.session_file import Header, Reader
from memra_pp.errors import MemraError
from memra_pp.stage import frames, listener
from memra_pp.stage.frames import OPEN, STEP, Entry, Frame

DATA = Path(__file__).parents[1] / "tests" / "data"
KEY = bytes(range(32))
CFG = ModelConfig("toy", 2, 32, 40, 64, (KvPlan(1, 32, 32), RecurrentPlan(4, 3, 8)))
POLICY = KvPolicy()
MAX_INPUT = 1 << 16


def frame(data: bytes) -> None:
    """What a lane hands out of bytes that have arrived."""
    buffer = bytearray(max(len(data), 1 << 10))
    buffer[: len(data)] = data
    with suppress(MemraError):
        got, size = frames.read(memoryview(buffer), len(data))
        if got is not None:
            assert size <= len(data)
            frames.encode(got)


def greeting(data: bytes) -> None:
    """A listener's side of the handshake, against a client that says `data`; none of them holds the key."""
    ours, theirs = socket.socketpair()
    with ours, theirs, suppress(MemraError, OSError):
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        listener._prove_to_client(ours, KEY)
        raise AssertionError("a client without the key was let in")


def challenge(data: bytes) -> None:
    """A client's side of it, against a listener without the key."""
    ours, theirs = socket.socketpair()
    with ours, theirs, suppress(MemraError, OSError):
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        listener._prove_to_server(ours, "frames", KEY)
        raise AssertionError("a listener without the key was believed")


def session(data: bytes) -> None:
    """A session's file."""
    with suppress(MemraError):
        list(Reader(io.BytesIO(data), CFG, POLICY, "model", 64).pieces(100))


def session_header(data: bytes) -> None:
    """A session's file whose header has the right checksum, whatever it holds."""
    session(session_file._PREFIX.pack(session_file.MAGIC, 1, len(data)) + data + session_file._sum(data) + bytes(4000))


def config(data: bytes) -> None:
    """A `config.json`."""
    _through_a_file("config.json", data, ModelConfig.from_hf)


def safetensors(data: bytes) -> None:
    """A checkpoint, and the index of one."""
    _through_a_file("model.safetensors", data, open_safetensors)
    _through_a_file("model.safetensors.index.json", data, lambda path: open_safetensors(path.parent))


def gguf_file(data: bytes) -> None:
    """A GGUF file, and the config that it holds."""
    _through_a_file("model.gguf", data, lambda path: config_of(open_gguf(path)))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="memra-fuzz-")


def _through_a_file(name: str, data: bytes, read: Callable[[Path], object]) -> None:
    path = Path(_folder().name) / name
    path.write_bytes(data)
    with suppress(MemraError):
        read(path)
    path.unlink()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (frame, greeting, challenge, session, session_header, config, safetensors, gguf_file)
}


def _frames() -> list[bytes]:
    rows = np.ones((3, 32), np.float32)
    made = [
        Frame(1, [Entry(STEP, 1, 1, 1, 0, 3)], [rows]),
        Frame(2, [Entry(OPEN, 1, 0, 1)], [], {0: {"args": {"ctx": 8}, "held": [], "offsets": [0], "charges": [8]}}),
        Frame(3, [Entry(STEP, 1, 1, 1, 0, 3), Entry(STEP, 2, 1, 1, 0, 1)], [rows], {1: {"fault": [1, "kind", "text"]}}),
    ]
    return [b"".join(bytes(memoryview(b).cast("B")) for b in frames.encode(one)[0]) for one in made]


def _header() -> bytes:
    shape = {"ctx": 20, "snapshots": 1, "recurrent": "replay", "speculate": 0}
    return msgpack.packb(asdict(Header("model", "cpu", asdict(POLICY), [0, 2], shape, [1, 2, 3], None, b"")))


def _session() -> bytes:
    out = io.BytesIO()
    header = Header(**msgpack.unpackb(_header()))
    writer = session_file.Writer(out, header)
    for part in session_file.parts(CFG, 20, POLICY, 3):
        writer.piece(memoryview(bytes(part.bytes)))
        writer.end_part()
    return out.getvalue()


def _gguf() -> bytes:
    path = Path(_folder().name) / "seed.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    for name, value in {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}.items():
        writer.add_uint32(f"gemma3.{name}", value)
    for name, value in {
        "head_count": 2,
        "head_count_kv": 1,
        "key_length": 32,
        "value_length": 32,
        "sliding_window": 16,
    }.items():
        writer.add_uint32(f"gemma3.attention.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _safetensors() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"x": "y"}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def _index() -> bytes:
    return json.dumps({"metadata": {"total_size": 16}, "weight_map": {"a": "model.safetensors"}}).encode()


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "frame": _frames,
    "greeting": lambda: [listener._HELLO + b"frames".ljust(16, b"\0") + bytes(32) + bytes(32)],
    "challenge": lambda: [bytes(32) + bytes(32) + b"\1"],
    "session": lambda: [_session()],
    "session_header": lambda: [_header()],
    "config": lambda: [path.read_bytes() for path in sorted((DATA / "configs").glob("*.json"))],
    "safetensors": lambda: [_safetensors(), _index()],
    "gguf_file": lambda: [_gguf()],
}
