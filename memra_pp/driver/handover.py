"""A session's bytes on their way out of the stages and into others: pieces that ride the chain, in order with its steps."""

from __future__ import annotations

import logging
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ..admission import SessionShape
from ..cache.carry import parts
from ..errors import StageError
from ..models.protocol import Array
from ..stage.carry import MAX_PIECE
from ..stage.frames import READ, SEAT, WRITE, Entry, Note
from .books import Books
from .session_file import Header, Reader, Writer
from .work import Reply, Steps

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from . import steps as session_steps
    from .pipeline import Pipeline


def header_of(pipe: Pipeline, shape: SessionShape, tokens: list[int], next: int | None, logits: bytes) -> Header:
    """What a file says of a session of this pipeline."""
    return Header(
        model=pipe.fingerprint,
        made_on=_made_on(pipe),
        policy=asdict(pipe.policy),
        fence=list(pipe.fence),
        shape=asdict(shape),
        tokens=list(tokens),
        next=next,
        logits=logits,
    )


def _made_on(pipe: Pipeline) -> str:
    """The kinds of processors that compute this pipeline's rows."""
    kinds = sorted({device.name.partition(":")[0] for device in pipe.chain.devices})
    return "+".join(f"{platform.machine()} {kind}" for kind in kinds)


def send_out(pipe: Pipeline, steps: session_steps.Steps, header: Header, books: Books, out: BinaryIO) -> Steps[None]:
    """Writes a session that owes nothing.

    Raises:
        Rewired: a stage was lost meanwhile.
        SessionCancelled: the session was cancelled.
        InputError: the file does not take it.
        StageError: a stage could not read a piece.
    """
    writer, pos = Writer(out, header), books.plan.pos
    for index, part in enumerate(parts(pipe.cfg, books.shape.ctx, pipe.policy, pos)):
        for offset in range(0, part.bytes, MAX_PIECE):
            size = min(MAX_PIECE, part.bytes - offset)
            entry = Entry(READ, books.session, 0, books.epoch, pos)
            reply = yield from _asked(steps, entry, [], {"piece": [index, offset, size]})
            if reply.answers is None:
                raise StageError(f"no stage has {part.kind} of layer {part.layer}: this is a bug")
            writer.piece(reply.answers.data.cast("B")[:size])
        writer.end_part()


def take_in(pipe: Pipeline, steps: session_steps.Steps, books: Books, reader: Reader) -> Steps[None]:
    """Fills a fresh session with what a file holds. Raises as `send_out`."""
    pos, there, here = reader.pos, reader.header.made_on, _made_on(pipe)
    if there != here:
        log.warning("session %d was computed on %s and goes on on %s: later bits may differ", books.session, there, here)
    yield from _asked(steps, Entry(SEAT, books.session, 0, books.epoch, pos), [], None)
    for index, _, offset, data in reader.pieces(MAX_PIECE):
        words = np.frombuffer(data + bytes(-len(data) % 4), np.int32)
        entry = Entry(WRITE, books.session, 0, books.epoch, pos)
        yield from _asked(steps, entry, [words], {"piece": [index, offset, len(data)]})


def _asked(steps: session_steps.Steps, entry: Entry, arrays: list[Array], note: Note | None) -> Steps[Reply]:
    reply = yield from steps.ask(entry, arrays, note)
    if reply.fault is not None:
        stage, kind, message = reply.fault
        raise StageError(f"session {entry.session} could not be handed over: stage {stage}: {message} ({kind})")
    return reply
