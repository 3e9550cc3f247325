"""Frames: what travels a lane. A fixed prefix, a msgpack header and raw array bytes; every length is bounded before use.

Wire format, little-endian: `magic u32, header bytes u32, body bytes u64` and 48 zeros (so that arrays are
aligned in the receiver's buffer), the header padded with zeros to a multiple of
64, then each array's bytes, each padded to a multiple of 64. The header is
`[id, [entry, ...], [[dtype, shape], ...]]`; an entry is the list of an `Entry`'s fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import msgpack
import numpy as np

from ..errors import LaneError
from ..models.protocol import Array

PREFIX = struct.Struct("<IIQ48x")
MAGIC = 0x3150504D  # "MPP1"
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 29
MAX_DIMS = 3
ALIGN = 64
DTYPES = {"f": np.dtype("<f4"), "i": np.dtype("<i4")}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_PADDING = bytes(ALIGN)


@dataclass(slots=True)
class Entry:
    """One session's part of a frame.

    `op` is open, step or close. `seq` counts the session's entries, `epoch` the wiring of the lanes, `base_len` is the
    session's `pos` before the rows. `rows` rows of the frame's array are this session's; `logits` and `want` say what the
    last stage answers, and `out` which array of the returning frame holds it. Each stage adds to `acks`. A stage that
    cannot apply the entry sets `fault` (`[stage, kind, message]`); it then travels on without rows.
    """

    op: str
    session: int
    seq: int
    epoch: int
    base_len: int = 0
    rows: int = 0
    logits: str = "none"
    want: str = "logits"
    args: dict[str, Any] = field(default_factory=dict)
    acks: list[Any] = field(default_factory=list)
    out: int | None = None
    fault: list[Any] | None = None

    def pack(self) -> list[Any]:
        """The fields in order, for msgpack."""
        return [
            self.op, self.session, self.seq, self.epoch, self.base_len, self.rows,
            self.logits, self.want, self.args, self.acks, self.out, self.fault,
        ]  # fmt: skip


_SIGNATURES = frozenset(
    (str, int, int, int, int, int, str, str, dict, list, out, fault) for out in (int, NoneType) for fault in (list, NoneType)
)
"""The types an entry's fields may have."""

_SHAPES = frozenset((int,) * dims for dims in range(1, MAX_DIMS + 1))


@dataclass(slots=True)
class Frame:
    """Entries in order, and the arrays they speak of: the rows on the way down the chain, answers on the way back."""

    id: int
    entries: list[Entry]
    arrays: list[Array] = field(default_factory=list)


def encode(frame: Frame, packer: msgpack.Packer) -> tuple[list[Any], int]:
    """The buffers of a frame, to be sent in order with one gathering call, and their bytes in all. Arrays are not copied.

    `packer` is the sender's own: making one costs more than packing a header.

    Raises:
        LaneError: a receiver would not take it: too long, or an array that is not f32 or i32 of 1 to 3 dimensions.
    """
    buffers: list[Any] = [b""]
    described, body = [], 0
    for a in frame.arrays:
        shape, size = a.shape, a.nbytes
        if a.dtype not in CODES or not 1 <= len(shape) <= MAX_DIMS:
            raise LaneError(f"an array {a.dtype} of shape {a.shape}: only f32 and i32 of 1 to {MAX_DIMS} dimensions travel")
        described.append((CODES[a.dtype], shape))
        if size:
            buffers.append(a)
        if pad := -size % ALIGN:
            buffers.append(_PADDING[:pad])
        body += size + pad
    header = packer.pack((frame.id, [e.pack() for e in frame.entries], described))
    size = len(header)
    if size > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        raise _too_long(size, body)
    pad = -size % ALIGN
    buffers[0] = PREFIX.pack(MAGIC, size, body) + header + _PADDING[:pad]
    return buffers, PREFIX.size + size + pad + body


def frame_bytes(buffer: memoryview) -> tuple[int, int]:
    """`(header bytes, bytes in all)` of the frame whose prefix `buffer` begins with, checked against the bounds.

    Raises:
        LaneError: not a frame, or longer than allowed.
    """
    magic, header, body = PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise LaneError(f"a frame begins with {magic:#010x}, not {MAGIC:#010x}: the peer does not speak this protocol")
    if header > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        raise _too_long(header, body)
    return header, PREFIX.size + header + -header % ALIGN + body


def decode(buffer: memoryview, header_bytes: int) -> Frame:
    """The frame that fills `buffer`, prefix included; its arrays are views of it.

    Raises:
        LaneError: the header is not what `encode` writes, or disagrees with the body.
    """
    at = PREFIX.size + header_bytes
    try:
        frame_id, packed, described = msgpack.unpackb(buffer[PREFIX.size : at])
        at += -at % ALIGN
        arrays: list[Array] = []
        for code, shape in described:
            if type(shape) is not list or tuple(map(type, shape)) not in _SHAPES or min(shape) < 0:
                raise TypeError(f"an array of shape {shape!r:.80}")
            a: Array = np.ndarray(shape, DTYPES[code], buffer, at)
            arrays.append(a)
            size = a.nbytes
            at += size + -size % ALIGN
        entries = [_entry(fields, len(arrays)) for fields in packed]
        if type(frame_id) is not int or at != len(buffer):
            raise ValueError(f"id {frame_id!r:.80}, {at} of {len(buffer)} bytes")
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, msgpack.UnpackException) as error:
        raise LaneError(f"a frame is malformed ({error})") from error
    return Frame(frame_id, entries, arrays)


def _entry(fields: list[Any], arrays: int) -> Entry:
    if tuple(map(type, fields)) not in _SIGNATURES or min(fields[1:6]) < 0:
        raise TypeError(f"an entry of {fields!r:.200}")
    entry = Entry(*fields)
    if entry.out is not None and not 0 <= entry.out < arrays:
        raise ValueError(f"an entry answered by array {entry.out} of {arrays}")
    return entry


def _too_long(header: int, body: int) -> LaneError:
    return LaneError(
        f"a frame of {header} header and {body} body bytes: at most {MAX_HEADER_BYTES} and {MAX_BODY_BYTES} are "
        "allowed; feed fewer rows at a time"
    )
