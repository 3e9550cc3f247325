"""A stage's side of handing a session over: pieces of its layers are read and written by entries that ride the chain.

Every stage sees each of them, in order with the session's steps; the one that has the layer acts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache import carry
from ..cache.carry import Part
from ..errors import InputError, StageError, checked_int, require
from ..kernels.memory import ArenaDev
from .frames import READ, SEAT, Entry, Frame, Note
from .session import StageSession
from .spec import StageSpec

MAX_PIECE = 4 << 20
"""Bytes of one piece."""


def apply(spec: StageSpec, device: ArenaDev, session: StageSession | None, entry: Entry, note: Note, frame: Frame) -> None:
    """Seats a fresh session at the entry's `base_len`, or reads or writes the `piece` of its note.

    What is read is added to the frame's arrays, i32 and padded with zeros; the note's `array` says which it is.

    Raises:
        StageError: there is no such session, it does not stand there, or others share the frame.
        InputError: the note names no piece of it, or too few bytes came.
    """
    if session is None or len(frame.entries) > 1:
        raise StageError(
            f"{spec}: session {entry.session} is not here, or {len(frame.entries)} entries share its frame: refused"
        )
    if entry.op == SEAT:
        _seat(spec, session, entry)
        return
    found = _piece(spec, session, entry, note)
    if found is None:
        return
    part, offset, size = found
    buffer = carry.buffer_of(session.cache, part)[offset : offset + size]
    if entry.op == READ:
        words = np.zeros(-(-size // 4), np.int32)
        words.view(np.uint8)[:size] = device.fetch(buffer)
        note["array"] = len(frame.arrays)
        frame.arrays.append(words)
        return
    given = frame.arrays[0] if frame.arrays else np.empty(0, np.int32)
    require(given.nbytes >= size, InputError, "a piece's bytes", given.nbytes, f"{size}")
    device.store(buffer, given.reshape(-1).view(np.uint8)[:size])


def _seat(spec: StageSpec, session: StageSession, entry: Entry) -> None:
    if session.seq != 1 or session.cache.plan.pos:
        raise StageError(f"{spec}: session {entry.session} has rows already: only a fresh one is seated")
    carry.seat(session.cache, checked_int(InputError, "the row to stand at", entry.base_len, 1, session.shape.ctx))


def _piece(spec: StageSpec, session: StageSession, entry: Entry, note: Note) -> tuple[Part, int, int] | None:
    """The part of a piece, where it begins there, and its bytes; None if the layer is another stage's."""
    if session.broken or session.cache.plan.pos != entry.base_len:
        raise StageError(
            f"{spec}: session {entry.session} is broken, or stands at row {session.cache.plan.pos} and not {entry.base_len}"
        )
    given: Any = note.get("piece")
    require(isinstance(given, list) and len(given) == 3, InputError, "piece", given, "a part, an offset and a size")
    known = carry.parts(spec.cfg, session.shape.ctx, spec.policy, entry.base_len)
    part = known[checked_int(InputError, "a piece's part", given[0], 0, len(known) - 1)]
    offset = checked_int(InputError, "a piece's offset", given[1], 0, part.bytes)
    size = checked_int(InputError, "a piece's size", given[2], 1, min(MAX_PIECE, max(1, part.bytes - offset)))
    return (part, offset, size) if part.layer in spec.layers else None
