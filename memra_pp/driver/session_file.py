"""The file of a session that is handed over: what it is of, its tokens, and the bytes of every layer, all with checksums.

Format, little-endian: `MEMRAPPS`, the version (u32), the bytes of the header (u32), the header in msgpack, its checksum; then
each part in the order of `cache.carry.parts`, followed by its checksum; nothing behind the last. Checksums are BLAKE2b, 16
bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgpack

from ..admission import SessionShape
from ..cache import KvPolicy
from ..cache.carry import Part, parts
from ..config import ModelConfig
from ..errors import InputError, MemraError, checked_int, require

MAGIC = b"MEMRAPPS"
VERSION = 1
MAX_HEADER = 1 << 26
MAX_TEXT = 1 << 10
BLOCK = 1 << 20
SUM = 16
_PREFIX = struct.Struct("<8sII")
SAMPLES, SAMPLE = 32, 1 << 16


@dataclass(frozen=True)
class Header:
    """What a file says of its session.

    `model` is `fingerprint`'s; `made_on` names the kind of processor that computed the rows; `fence` is where the stages were
    cut that it comes from. `tokens` were fed, and `next` was sampled behind them (None: nothing was); `logits` is the last
    row's, f32 (empty: it was not asked for).
    """

    model: str
    made_on: str
    policy: dict[str, Any]
    fence: list[int]
    shape: dict[str, Any]
    tokens: list[int]
    next: int | None
    logits: bytes

    @classmethod
    def checked(cls, given: Any, cfg: ModelConfig) -> Header:
        """A header out of a file, for a session of a model.

        Raises:
            InputError: a field is missing, or not what it should be.
        """
        whole = isinstance(given, dict) and given.keys() == cls.__annotations__.keys()
        require(whole, InputError, "header", given, "a header's fields")
        texts = all(isinstance(given[name], str) and len(given[name]) <= MAX_TEXT for name in ("model", "made_on"))
        tokens, logits = given["tokens"], given["logits"]
        held = isinstance(tokens, list) and 0 < len(tokens) <= cfg.max_ctx
        known = held and all(type(t) is int and 0 <= t < cfg.n_vocab for t in tokens)
        row = isinstance(logits, bytes) and len(logits) in (0, 4 * cfg.n_vocab)
        pending = given["next"] is None or (type(given["next"]) is int and 0 <= given["next"] < cfg.n_vocab)
        if not (texts and known and row and pending and isinstance(given["policy"], dict) and isinstance(given["fence"], list)):
            raise InputError("the header is not one of a session of this model: export it again")
        return cls(**given)


def _require_same_policy(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    if theirs == ours:
        return
    more = [name for name in theirs if name not in ours][:4]
    differ = [name for name, value in ours.items() if theirs.get(name) != value] or more
    told = (", ".join(f"{name!s:.40}={of.get(name)!r:.40}" for name in differ) for of in (theirs, ours))
    raise InputError(
        "the session was made with the K/V policy {}, and this pipeline has {}: launch with the session's".format(*told)
    )


class Writer:
    """Writes a session's file, front to back.

    Raises:
        InputError: the file takes no bytes.
    """

    def __init__(self, out: BinaryIO, header: Header) -> None:
        self._out = out
        packed = msgpack.packb(asdict(header))
        self._write(_PREFIX.pack(MAGIC, VERSION, len(packed)) + packed + _sum(packed))
        self._hash = hashlib.blake2b(digest_size=SUM)

    def piece(self, data: memoryview) -> None:
        """More of the part under way."""
        self._write(data)
        self._hash.update(data)

    def end_part(self) -> None:
        """The part is whole."""
        self._write(self._hash.digest())
        self._hash = hashlib.blake2b(digest_size=SUM)

    def _write(self, data: bytes | memoryview) -> None:
        with _as_input_errors("written"):
            _write_all(self._out, data)


class Reader:
    """Reads a session's file, which was checked as a whole before.

    Args:
        file: a file that can be sought, where the session begins; it goes to the file's end.
        cfg, policy, model: of the pipeline that is to have the session; `model` is its fingerprint.
        limit: most rows of context there.

    Raises:
        InputError: the file is of something else, of a later version, cut or damaged.
    """

    def __init__(self, file: BinaryIO, cfg: ModelConfig, policy: KvPolicy, model: str, limit: int) -> None:
        self._file = file
        with _as_input_errors("read"):
            first = file.tell()
            self._end = file.seek(0, os.SEEK_END)
            file.seek(first)
        magic, version, length = _PREFIX.unpack(self._exactly(_PREFIX.size, "header"))
        if magic != MAGIC:
            raise InputError("this is no file of a session: pass one that export has written")
        if version != VERSION:
            raise InputError(f"the file is of version {version}, and {VERSION} is read here: use the release that wrote it")
        packed = self._exactly(checked_int(InputError, "the header's bytes", length, 1, MAX_HEADER), "header")
        self._require_sum(_sum(packed), "header")
        try:
            given = msgpack.unpackb(packed, max_array_len=cfg.max_ctx, max_map_len=64, max_bin_len=4 * cfg.n_vocab)
        except (ValueError, msgpack.UnpackException) as error:
            raise InputError(f"the header cannot be read ({error}): export the session again") from error
        self.header = header = Header.checked(given, cfg)
        if header.model != model:
            raise InputError("the session is of another model: its rows mean nothing to this one")
        _require_same_policy(header.policy, asdict(policy))
        shape = SessionShape.checked(header.shape, "the session's ", cfg.max_ctx, cfg.max_ctx)
        self.pos = len(header.tokens)
        if self.pos > min(shape.ctx, limit):
            raise InputError(f"the session has {self.pos} rows, and {min(shape.ctx, limit)} are the most here: raise max_ctx")
        self.shape = SessionShape(min(shape.ctx, limit), **shape.states)
        self.parts = parts(cfg, self.shape.ctx, policy, self.pos)
        self._first = file.tell()
        self._check()

    def pieces(self, size: int) -> Iterator[tuple[int, Part, int, bytes]]:
        """Every part in pieces of at most `size` bytes: its index, the part, the offset and the bytes."""
        self._file.seek(self._first)
        for index, part in enumerate(self.parts):
            for offset in range(0, part.bytes, size):
                yield index, part, offset, self._exactly(min(size, part.bytes - offset), "rows")
            self._file.seek(SUM, os.SEEK_CUR)

    def _check(self) -> None:
        whole = self._first + sum(part.bytes + SUM for part in self.parts)
        if self._end != whole:
            raise InputError(f"the file has {self._end} bytes, and {whole} belong to this session: it was cut or added to")
        for part in self.parts:
            digest = hashlib.blake2b(digest_size=SUM)
            for offset in range(0, part.bytes, BLOCK):
                digest.update(self._exactly(min(BLOCK, part.bytes - offset), "rows"))
            self._require_sum(digest.digest(), f"{part.kind} of layer {part.layer}")

    def _require_sum(self, found: bytes, name: str) -> None:
        if self._exactly(SUM, name) != found:
            raise InputError(f"the file is damaged: the checksum of its {name} is another; export the session again")

    def _exactly(self, size: int, name: str) -> bytes:
        with _as_input_errors("read"):
            data = self._file.read(size) if size <= self._end - self._file.tell() else b""
        if not isinstance(data, bytes):
            raise InputError(f"the session's file gives {type(data).__name__} and not bytes: open it as a binary file")
        if len(data) != size:
            raise InputError(f"the file ends in the middle of its {name}: it was cut")
        return data


def fingerprint(model: Path, cfg: ModelConfig) -> str:
    """What tells a model from another: architecture and plans, and of each weights file its size and evenly spaced samples."""
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    digest = hashlib.blake2b(repr((cfg.arch, cfg.n_trunk, cfg.n_embd, cfg.n_vocab, cfg.layers)).encode(), digest_size=SUM)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}".encode())
        with file.open("rb") as weights:
            for sample in range(SAMPLES):
                weights.seek(max(0, size - SAMPLE) * sample // (SAMPLES - 1))
                digest.update(weights.read(SAMPLE))
    return digest.hexdigest()


@contextlib.contextmanager
def to_write(target: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    """A file to write, which can be sought.

    What is at a path is replaced once the new file is whole and on the disk; else it stays. What cannot be sought is written at
    the end.

    Raises:
        InputError: it cannot be written: a full disk, no such folder, nothing that is a file.
    """
    with _as_input_errors("written"), contextlib.ExitStack() as stack:
        if isinstance(target, str | os.PathLike):
            path = Path(os.path.realpath(target))
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is no plain file: open it, and pass that")
            yield stack.enter_context(_replacing(path))
            return
        if target.seekable():
            yield target
            return
        copy = stack.enter_context(tempfile.TemporaryFile())
        yield copy
        copy.seek(0)
        for block in iter(lambda: copy.read(BLOCK), b""):
            _write_all(target, block)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:40]}.", delete=False) as out:
        try:
            yield cast(BinaryIO, out.file)
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened(source: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    """A file to read, that can be sought: what can be read once only is copied to the disk first.

    Raises:
        InputError: there is none.
    """
    with contextlib.ExitStack() as stack:
        with _as_input_errors("read"):
            if isinstance(source, str | os.PathLike):
                source = stack.enter_context(open(source, "rb"))
            if not source.seekable():
                once, source = source, stack.enter_context(tempfile.TemporaryFile())
                for block in iter(lambda: once.read(BLOCK), b""):
                    source.write(block)
                source.seek(0)
        yield source


@contextlib.contextmanager
def _as_input_errors(done: str) -> Iterator[None]:
    """What a path or a file that callers pass may raise, as their error."""
    try:
        yield
    except MemraError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise InputError(f"the session's file cannot be {done} ({why}): pass a path, or a binary file, with room") from error


def _write_all(out: BinaryIO, data: bytes | memoryview) -> None:
    """A file without a buffer may take less than it is given at a time."""
    left = memoryview(data)
    while len(left):
        left = left[out.write(left) :]


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SUM).digest()
