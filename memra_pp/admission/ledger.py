"""`Ledger`: what each stage's device can still hold. A session is charged on every stage or on none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..errors import AdmissionError


class Ledger:
    """Bytes reserved against each stage's budget."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self.budgets = tuple(budgets)
        self._reserved = [0] * len(budgets)
        self._live: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def reserve(self, session: int, charges: Sequence[int]) -> None:
        """Charges a session, `charges[s]` bytes on stage `s`.

        Raises:
            AdmissionError: a stage cannot hold its share, or the session is charged already; nothing was reserved anywhere.
        """
        with self._lock:
            if session in self._live:
                raise AdmissionError(f"session {session} is charged {self._live[session]} bytes already: release it first")
            for stage, (charge, reserved, budget) in enumerate(zip(charges, self._reserved, self.budgets, strict=True)):
                if reserved + charge > budget:
                    raise AdmissionError(
                        f"stage {stage} needs {charge} bytes for this session and has {budget - reserved} of {budget} free "
                        f"({reserved + charge - budget} short): close a session, shorten the context or add stages"
                    )
            self._live[session] = tuple(charges)
            self._reserved = [r + c for r, c in zip(self._reserved, charges, strict=True)]

    def release(self, session: int) -> None:
        """Gives back exactly what `reserve` took; a second release does nothing."""
        with self._lock:
            charges = self._live.pop(session, None)
            if charges is not None:
                self._reserved = [r - c for r, c in zip(self._reserved, charges, strict=True)]

    @property
    def reserved(self) -> tuple[int, ...]:
        """Bytes reserved on each stage."""
        return tuple(self._reserved)
