"""Every error that memra_pp raises, and the checks of arguments that raise them.

Each message says what was wrong, the value, what was allowed and what to do next.
"""

from __future__ import annotations

import operator
from typing import Any


class MemraError(Exception):
    """Base of every error raised by memra_pp."""


class ConfigError(MemraError):
    """A model, policy, fence or option that cannot be used; nothing was started or changed."""


class InputError(MemraError):
    """A bad argument to a live session or pipeline (tokens, prompt, accept count); nothing was changed."""


class CacheError(MemraError):
    """A cache operation that would break an invariant; the cache is as it was before the call."""


class RingLapped(CacheError):
    """Rows that the caller needs have been overwritten in a ring: a full re-prime is required."""


class SnapshotPinned(CacheError):
    """An append would overwrite rows that a live pinned snapshot needs."""


class CapacityExceeded(CacheError):
    """More rows, sessions or snapshots than were allocated."""


class AdmissionError(MemraError):
    """A request that some stage's device cannot hold; nothing was reserved.

    `verdict` is admission's `Defer` or `Refuse`, where it gave one: the `stage` that binds, the bytes it is `short_by`, and
    `retry_after_s`, None where no waiting helps: then `longest_ctx` says what would fit.
    """

    def __init__(self, message: str, verdict: Any = None) -> None:
        super().__init__(message)
        self.verdict = verdict


class StageError(MemraError):
    """A stage failed, died or did not answer in time."""


class SessionCancelled(MemraError):
    """A call of a session that was cancelled; others do not notice. Close the session."""


class LaneError(StageError):
    """A lane between processes broke: end of file, silence, a bad frame or a failed handshake."""


class FrameError(LaneError):
    """A frame that cannot travel: too long, or holding what no frame carries. Nothing was sent."""


def require(ok: bool, error: type[MemraError], name: str, value: object, allowed: str) -> None:
    """Raises `error`, naming the argument, its value and what is allowed, unless `ok`."""
    if not ok:
        raise error(f"{name}={value!r:.80}: it must be {allowed}")


def checked_int(error: type[MemraError], name: str, value: Any, lo: int, hi: int) -> int:
    """`value` as a plain int from `lo` to `hi`; a bool, a float or a text is not one.

    Raises:
        error: it is not; the message names the argument, its value and the bounds.
    """
    try:
        number = lo - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = lo - 1
    require(lo <= number <= hi, error, name, value, f"an integer from {lo} to {hi}")
    return number
