"""Frames: what travels a lane. A fixed prefix, a msgpack header and raw array bytes; every length is bounded before use.

Wire format, little-endian: `magic u32, header bytes u32, body bytes u64` and 48 zeros (so that arrays are
aligned in the receiver's buffer), the header padded with zeros to a multiple of
64, then each array's bytes, each padded to a multiple of 64. The header is
`[id, [entry, ...], [[dtype, shape], ...]]`; an entry is the list of an `Entry`'s fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
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
DTYPES = {"f": np.dtype(np.float32), "i": np.dtype(np.int32)}
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


@dataclass(slots=True)
class Frame:
    """Entries in order, and the arrays they speak of: the rows on the way down the chain, answers on the way back."""

    id: int
    entries: list[Entry]
    arrays: list[Array] = field(default_factory=list)


def encode(frame: Frame, packer: msgpack.Packer) -> list[bytes | memoryview]:
    """The buffers of a frame, to be sent in order with one gathering call. Arrays are not copied.

    `packer` is the sender's own: making one costs more than packing a header.

    Raises:
        LaneError: a receiver would not take it: too long, or an array that is not f32 or i32 of 1 to 3 dimensions.
    """
    arrays = [np.ascontiguousarray(a) for a in frame.arrays]
    header = packer.pack([frame.id, [e.pack() for e in frame.entries], [_described(a) for a in arrays]])
    body = sum(_padded(a.nbytes) for a in arrays)
    _check_bounds(len(header), body)
    pad = _padded(len(header)) - len(header)
    buffers: list[bytes | memoryview] = [PREFIX.pack(MAGIC, len(header), body) + header + _PADDING[:pad]]
    for a in arrays:
        if a.nbytes:
            buffers.append(a.data.cast("B"))
        if a.nbytes % ALIGN:
            buffers.append(_PADDING[: _padded(a.nbytes) - a.nbytes])
    return buffers


def payload_lengths(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """`(header bytes, bytes after the prefix)` of a frame, checked against the bounds.

    Raises:
        LaneError: not a frame, or longer than allowed.
    """
    magic, header, body = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise LaneError(f"a frame begins with {magic:#010x}, not {MAGIC:#010x}: the peer does not speak this protocol")
    _check_bounds(header, body)
    return header, _padded(header) + body


def decode(payload: memoryview, header_bytes: int) -> Frame:
    """The frame in `payload`; its arrays are views of it.

    Raises:
        LaneError: the header is not what `encode` writes, or disagrees with the body.
    """
    try:
        frame_id, packed, described = msgpack.unpackb(payload[:header_bytes])
        entries = [_entry(fields, len(described)) for fields in packed]
        shapes = [(DTYPES[code], _shape(shape)) for code, shape in described]
        if type(frame_id) is not int:
            raise TypeError(f"the id {frame_id!r:.80}")
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise LaneError(f"a frame's header is malformed ({error})") from error
    arrays, at = [], _padded(header_bytes)
    for dtype, shape in shapes:
        count = prod(shape)
        if at + count * dtype.itemsize > len(payload):
            raise LaneError(f"a frame announces an array of shape {shape}, longer than its {len(payload)} bytes")
        arrays.append(np.frombuffer(payload, dtype, count, at).reshape(shape))
        at += _padded(count * dtype.itemsize)
    if at != len(payload):
        raise LaneError(f"a frame's arrays end at byte {at} of {len(payload)}")
    return Frame(frame_id, entries, arrays)


def _entry(fields: list[Any], arrays: int) -> Entry:
    if tuple(map(type, fields)) not in _SIGNATURES:
        raise TypeError(f"an entry of {fields!r:.200}")
    entry = Entry(*fields)
    if min(fields[1:6]) < 0 or (entry.out is not None and not 0 <= entry.out < arrays):
        raise ValueError(f"an entry of {fields!r:.200} with {arrays} arrays")
    return entry


def _described(a: Array) -> list[Any]:
    if a.dtype not in CODES or a.ndim > MAX_DIMS:
        raise LaneError(f"an array {a.dtype} of shape {a.shape}: only f32 and i32 of 1 to {MAX_DIMS} dimensions travel")
    return [CODES[a.dtype], a.shape]


def _shape(shape: Any) -> tuple[int, ...]:
    if not (
        type(shape) is list and 1 <= len(shape) <= MAX_DIMS and all(type(n) is int and 0 <= n <= MAX_BODY_BYTES for n in shape)
    ):
        raise ValueError(f"an array of shape {shape!r:.80}")
    return tuple(shape)


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _check_bounds(header: int, body: int) -> None:
    if header > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        raise LaneError(
            f"a frame of {header} header and {body} body bytes: at most {MAX_HEADER_BYTES} and {MAX_BODY_BYTES} are "
            "allowed; feed fewer rows at a time"
        )
