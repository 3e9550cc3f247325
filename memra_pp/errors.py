"""Every error that memra_pp raises. Each message says what was wrong, the value, what was allowed and what to do next."""


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
    """A request that some stage's device cannot hold; nothing was reserved."""


class StageError(MemraError):
    """A stage failed, died or did not answer in time."""


class LaneError(StageError):
    """A lane between processes broke: end of file, silence, a bad frame or a failed handshake."""
