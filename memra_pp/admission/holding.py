"""`HoldTimes`: how long sessions keep their bytes, and from it, when some may be free."""

from __future__ import annotations

LEAST_S, MOST_S = 0.05, 3600.0
UNKNOWN_S = 10.0
"""The typical time while none has been seen."""

_UNIT_S = 0.001
_BUCKETS = 32
_MOST_COUNTED = 1024


class HoldTimes:
    """A histogram of seconds from admission to release, in powers of two of a millisecond; old ones fade."""

    def __init__(self) -> None:
        self._counts = [0.0] * _BUCKETS
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        if self._total >= _MOST_COUNTED:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        self._counts[min(_BUCKETS - 1, int(max(0.0, seconds) / _UNIT_S).bit_length())] += 1
        self._total += 1

    @property
    def typical_s(self) -> float:
        """The upper bound of the median's bucket, in seconds."""
        if not self._total:
            return UNKNOWN_S
        seen = 0.0
        for bucket, count in enumerate(self._counts):
            seen += count
            if 2 * seen >= self._total:
                return _UNIT_S * (1 << bucket)
        return MOST_S

    def retry_after_s(self, wanted: int, reserved: int) -> float:
        """Seconds after which `wanted` bytes are likely to be free on a device that has `reserved`: those come back once in a
        typical holding time (Little's law)."""
        return min(MOST_S, max(LEAST_S, self.typical_s * wanted / max(1, reserved)))
