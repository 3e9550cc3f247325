"""What a session is opened for, out of what a caller asks and what the pipeline allows."""

from __future__ import annotations

from ..admission import MAX_SNAPSHOTS, SessionShape, checked_recurrent, session_ctx
from ..cache.sizing import Recurrent
from ..errors import InputError, checked_int, require
from ..stage.frames import MAX_BODY_BYTES, TOPK

MAX_NEW_TOKENS = 1 << 40
MAX_TENANT = 256


def most_drafts(prefill_chunk: int, n_vocab: int) -> int:
    """The most drafts of a round: they and one token more are one step, whose answers are in one frame."""
    return min(prefill_chunk, MAX_BODY_BYTES // (TOPK.itemsize * n_vocab)) - 1


def asked_shape(
    prompt: int, max_ctx: int, most: int, new: int, speculate: int, recurrent: Recurrent, snapshots: int
) -> SessionShape:
    """The shape of a session for a prompt of that many tokens, `new` behind it, and at most `most` drafts a round.

    Raises:
        InputError: a number out of its bounds, or no such mode.
    """
    new = checked_int(InputError, "max_new_tokens", new, 0, MAX_NEW_TOKENS)
    speculate = checked_int(InputError, "speculate", speculate, 0, most)
    snapshots = checked_int(InputError, "snapshots", snapshots, 0, MAX_SNAPSHOTS)
    ctx = session_ctx(prompt, new, speculate, max_ctx)
    return SessionShape(ctx, snapshots, checked_recurrent(recurrent), speculate)


def checked_tenant(tenant: str) -> str:
    """A tenant's name; raises InputError for what is none."""
    named = isinstance(tenant, str) and len(tenant) <= MAX_TENANT
    require(named, InputError, "tenant", tenant, f"a text of at most {MAX_TENANT} characters")
    return tenant
