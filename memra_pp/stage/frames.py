"""Frames: what travels a lane. Fixed-size records, an optional msgpack header and raw array bytes; every count and length is
bounded before use.

Wire format, little-endian: a prefix (`kind u32`, `head bytes u32`, `hops u16`, `slot u16`, `slowest u32`, `busy u32`, `body
bytes i64`, `id i64`);
the counts of entries, arrays and bytes of notes (`u32` each); a record an entry (the fields of `Entry`, i64); a record an array
(dtype, rows, width or 0, i64); the notes in msgpack; zeros up to a multiple of 64: that is the head. Then each array's bytes,
each padded with zeros to a multiple of 64.

A plain frame, one entry with one array or none and no notes, leaves out the counts and the notes, and has a record of dtype 2
for no array: it is what a generation sends for every token, and a hop reads its head with one call and writes it with one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from ..errors import FrameError, InputError, LaneError, require

if TYPE_CHECKING:
    from ..models.protocol import Array

PREFIX = struct.Struct("<IIHHIIqq")
GENERAL, PLAIN = 0x3147504D, 0x3150504D  # "MPG1", "MPP1"
MAX_HEAD_BYTES = 1 << 22
MAX_BODY_BYTES = 1 << 29
MAX_NOTE_LIST = 1 << 12
ALIGN = 64

OPS = ("step", "open", "close", "reset", "ping", "stats", "stop", "clock", "trace", "spans", "seat", "read", "write")
STEP, OPEN, CLOSE, RESET, PING, STATS, STOP, CLOCK, TRACE, SPANS, SEAT, READ, WRITE = range(len(OPS))
LOGITS, ARGMAX = range(2)
TOPK = np.dtype([("id", "<i4"), ("logit", "<f4")])
"""What `topk:n` answers: `[rows, n]` of these, best first; equal logits by lower id."""

DTYPES = (np.dtype("<f4"), np.dtype("<i4"))
_FIELDS = 15
_ENTRY = struct.Struct(f"<{_FIELDS}q")
_ARRAY = struct.Struct("<3q")
_COUNTS = struct.Struct("<3I")
_PLAIN = struct.Struct(f"<IIHHIIqq{_FIELDS}q3q12x")  # padded to a multiple of ALIGN
_NO_ARRAY = len(DTYPES), 0, 0
_NO_NOTES = msgpack.packb({})
_PADDING = bytes(ALIGN)
MAX_MICROS = 2**32 - 1

Note = dict[str, Any]


class Entry(NamedTuple):
    """One session's part of a frame: a record of integers.

    `op` indexes `OPS`. `seq` counts the session's steps, `epoch` the wiring of the lanes. A step is applied in this order:

    - `restore`, if not 0, is 1 + the slot of the snapshot to roll back to, keeping `accept` rows;
    - the user's snapshots in the slots of the bit mask `drop` end;
    - `rows` rows of the frame's array are appended at `base_len`, the session's `pos` after the rollback. The last stage
      answers the last `logits` of them as `want` says: 0 their logits, 1 the argmax, 1 + n the n best;
    - `snapshot`, if not 0, is 1 + the slot that the state after the first `snapshot_at` rows goes to, pinned if `pin`;
    - the states after each of the `keep` rows before the last go to the slots behind the user's.

    A seat has a fresh session stand at `base_len`; a read or a write is of the `piece` that its note names, of a session that
    stands there, and has a frame to itself.
    """

    op: int
    session: int
    seq: int
    epoch: int
    base_len: int = 0
    rows: int = 0
    logits: int = 0
    want: int = LOGITS
    restore: int = 0
    accept: int = 0
    drop: int = 0
    snapshot: int = 0
    snapshot_at: int = 0
    pin: int = 0
    keep: int = 0


_entry_of: Any = partial(tuple.__new__, Entry)
"""An entry of a record's fields, unpacked and checked: made without the steps of `Entry.__new__`, on every hop of a token."""


def want_code(want: str, n_vocab: int) -> int:
    """`Entry.want` of `logits`, `argmax` or `topk:n`.

    Raises:
        InputError: it is none of these, or more than the vocabulary is wanted.
    """
    text = want if isinstance(want, str) else ""
    if text in ("logits", "argmax"):
        return (LOGITS, ARGMAX)[text == "argmax"]
    kind, _, n = text.partition(":")
    some = kind == "topk" and n.isdecimal() and len(n) < 10 and 1 <= int(n) <= n_vocab
    require(some, InputError, "want", want, f"logits, argmax or topk:1 to {n_vocab}")
    return ARGMAX + int(n)


@dataclass(slots=True)
class Frame:
    """Entries in order, and the arrays they speak of: the rows on the way down the chain; on the way back one array an entry
    that is answered, in order. With a `slot`, which counts from 1, the rows are no array of the frame: they are on the next
    stage's GPU already, in that slot.

    `hops` counts the stages that have applied the frame: all its entries, or what a note says of one. `slowest` is the longest
    that one of them took for it and `busy` what all of them took, in microseconds, `MAX_MICROS` for whatever is longer.
    `notes[i]` is what entry `i` says beyond its record: `args` of an open and the `bytes` each stage allocated for it, the
    `answer` to a question, the `piece` of a read or a write and the `array` in which a read has it, the `taps` of a step, or
    the `fault` (`[stage, kind, message]`) of an entry that a stage could not apply. Such an entry travels on without rows.

    Taps: `taps` holds the tapped `layers`, the `rows`, the last ones, that are tapped, and for every stage that runs some of
    those layers `[array, slots]` in `parts`: which of the frame's arrays, counted from behind its rows or answers, holds
    those slots side by side.
    """

    id: int
    entries: list[Entry]
    arrays: list[Array] = field(default_factory=list)
    notes: dict[int, Note] = field(default_factory=dict)
    hops: int = 0
    slowest: int = 0
    busy: int = 0
    slot: int = 0

    def bury(self, index: int, fault: list[Any]) -> None:
        """Makes an entry a tombstone: it travels on with the fault, and without rows."""
        self.entries[index] = self.entries[index]._replace(rows=0)
        self.notes.setdefault(index, {})["fault"] = fault

    def fault(self, index: int) -> list[Any] | None:
        """The fault of an entry, None if it has none."""
        note = self.notes.get(index)
        return None if note is None else note.get("fault")


def encode(frame: Frame) -> tuple[list[Any], int]:
    """The buffers of a frame, to be sent in order with one gathering call, and their bytes in all. Arrays are not copied.

    Raises:
        FrameError: a receiver would not take it: too long, or an array that is not f32 or i32, `[n]` or `[n, width]`.
    """
    arrays, entries = frame.arrays, frame.entries
    try:
        if len(entries) == 1 and len(arrays) < 2 and not frame.notes:
            body = 0
            record: Sequence[int] = _NO_ARRAY
            if arrays:
                a = arrays[0]
                size = a.nbytes
                body, record = size + -size % ALIGN, _record(a.dtype, a.shape)
            buffers: list[Any] = [
                _PLAIN.pack(
                    PLAIN, _PLAIN.size, frame.hops, frame.slot, frame.slowest, frame.busy, body, frame.id, *entries[0], *record
                )
            ]
            if arrays:
                buffers += a, _PADDING[: body - size]
        else:
            body = sum(a.nbytes + -a.nbytes % ALIGN for a in arrays)
            buffers = [_general_head(frame, body)]
            for a in filter(np.size, arrays):
                buffers += filter(len, (a.data.cast("B"), _PADDING[: -a.nbytes % ALIGN]))
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise FrameError(f"a frame with id {frame.id!r:.80}, entries {entries!r:.200} cannot be packed ({error})") from error
    head = len(buffers[0])
    if head > MAX_HEAD_BYTES or body > MAX_BODY_BYTES:
        raise _too_long(FrameError, head, body)
    return buffers, head + body


@lru_cache(maxsize=256)
def _record(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Sequence[int]:
    """What the receiver needs to rebuild an array: dtype, rows, and width or 0. Generations send few shapes."""
    if dtype in DTYPES:
        if len(shape) == 2 and shape[1]:
            return DTYPES.index(dtype), shape[0], shape[1]
        if len(shape) == 1:
            return DTYPES.index(dtype), shape[0], 0
    raise FrameError(f"an array {dtype} of shape {shape}: only f32 and i32, [n] or [n, width], travel")


def _general_head(frame: Frame, body: int) -> bytes:
    entries, records = frame.entries, [_record(a.dtype, a.shape) for a in frame.arrays]
    notes = msgpack.packb(frame.notes) if frame.notes else _NO_NOTES
    size = PREFIX.size + _COUNTS.size + _ENTRY.size * len(entries) + _ARRAY.size * len(records) + len(notes)
    pad = -size % ALIGN
    prefix = PREFIX.pack(GENERAL, size + pad, frame.hops, frame.slot, frame.slowest, frame.busy, body, frame.id)
    counts = _COUNTS.pack(len(entries), len(records), len(notes))
    return b"".join((prefix, counts, *starmap(_ENTRY.pack, entries), *starmap(_ARRAY.pack, records), notes, _PADDING[:pad]))


def read(buffer: memoryview, got: int) -> tuple[Frame | None, int]:
    """The frame that the first `got` bytes of `buffer` hold, its arrays views of it, and its bytes in all; no frame, and the
    bytes needed first, if they do not hold it whole. The buffer itself has room for a plain head.

    Raises:
        LaneError: not a frame, longer than allowed, or not what `encode` writes.
    """
    if got < PREFIX.size:
        return None, PREFIX.size
    found = _PLAIN.unpack_from(buffer)
    kind, head, hops, slot, slowest, busy, body, frame_id = found[:8]
    if head > MAX_HEAD_BYTES or not 0 <= body <= MAX_BODY_BYTES:
        raise _too_long(LaneError, head, body)
    plain = kind == PLAIN and head == _PLAIN.size
    if not plain and kind != GENERAL:
        raise LaneError(f"a frame begins with {kind:#010x}, a head of {head} bytes: the peer does not speak this protocol")
    size: int = head + body
    if got < size:
        return None, size
    try:
        if plain:
            fields = found[8:]
            if min(fields) < 0:
                raise _negative(fields)
            frame, end = Frame(frame_id, [_entry_of(fields[:_FIELDS])], [], {}, hops, slowest, busy, slot), head
            if (record := fields[_FIELDS:]) != _NO_ARRAY:
                array, end = _array(buffer[:size], head, record)
                frame.arrays.append(array)
        else:
            frame, end = _read_general(buffer[:size])
        if end != size:
            raise ValueError(f"its arrays end at byte {end} of {size}")
    except (ValueError, TypeError, IndexError, OverflowError, MemoryError, struct.error, msgpack.UnpackException) as error:
        raise LaneError(f"a frame is malformed: {error}") from error
    return frame, size


def _negative(record: Sequence[int]) -> ValueError:
    return ValueError(f"a negative field in the record {record}")


def _array(buffer: memoryview, at: int, record: Sequence[int]) -> tuple[Array, int]:
    """The array that a record describes, which begins at byte `at`, and where the next one does."""
    code, rows, width = record
    a: Array = np.ndarray((rows, width) if width else rows, DTYPES[code], buffer, at)
    size = a.nbytes
    return a, at + size + -size % ALIGN


def _read_general(buffer: memoryview) -> tuple[Frame, int]:
    """A frame with any number of entries, arrays and notes, and where its arrays end."""
    _, head, hops, slot, slowest, busy, _, frame_id = PREFIX.unpack_from(buffer)
    n_entries, n_arrays, n_notes = _COUNTS.unpack_from(buffer, PREFIX.size)
    first = PREFIX.size + _COUNTS.size
    second = first + n_entries * _ENTRY.size
    third = second + n_arrays * _ARRAY.size
    end = third + n_notes
    if head != end + -end % ALIGN:
        raise ValueError(f"a head of {head} bytes for {n_entries} entries, {n_arrays} arrays and {n_notes} bytes of notes")
    entries = list(map(_entry_of, _ENTRY.iter_unpack(buffer[first:second])))
    for entry in entries:
        if min(entry) < 0:
            raise _negative(entry)
    arrays, at = [], head
    for record in _ARRAY.iter_unpack(buffer[second:third]):
        if min(record) < 0:
            raise _negative(record)
        array, at = _array(buffer, at, record)
        arrays.append(array)
    return Frame(frame_id, entries, arrays, _notes(buffer[third:end], n_entries), hops, slowest, busy, slot), at


def _notes(packed: memoryview, entries: int) -> dict[int, Note]:
    if packed == _NO_NOTES:
        return {}
    notes = msgpack.unpackb(packed, strict_map_key=False, max_array_len=MAX_NOTE_LIST)
    if type(notes) is not dict or not all(type(i) is int and 0 <= i < entries for i in notes):
        raise TypeError(f"notes that are not a map from some of the {entries} entries")
    for i, note in notes.items():
        if type(note) is not dict:
            raise TypeError(f"the note of entry {i} is not a map")
        fault = note.get("fault")
        if fault is not None and (type(fault) is not list or [*map(type, fault)] != [int, str, str]):
            raise TypeError(f"the fault of entry {i} is not a stage, a kind and a message")
    return notes


def _too_long(error: type[LaneError], head: int, body: int) -> LaneError:
    return error(
        f"a frame of {head} bytes of head and {body} of arrays: at most {MAX_HEAD_BYTES} and {MAX_BODY_BYTES} are allowed; "
        "feed fewer rows at a time"
    )
