"""`DflashTapSink`: copies of the residual after chosen layers, for a drafter that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheError
from .device import Buffer


@dataclass
class DflashTapSink:
    """Row `r` of the residual after `layer_ids[s]` goes to `buf[base + r, s*hidden : (s+1)*hidden]`.

    `buf` is f32 `[t, len(layer_ids) * hidden]`. A stage fills the slots of its own layers only; the driver gathers the
    stages' slots in slot order.
    """

    layer_ids: tuple[int, ...]
    buf: Buffer
    hidden: int
    t: int
    base: int = 0

    @classmethod
    def armed(cls, layer_ids: tuple[int, ...], hidden: int, rows: int) -> DflashTapSink:
        """A sink of host memory for `rows` rows, zeroed."""
        buf = np.zeros((rows, len(layer_ids) * hidden), np.float32)
        return cls(layer_ids=layer_ids, buf=buf, hidden=hidden, t=rows)

    def write(self, layer: int, rows: NDArray[np.float32]) -> None:
        """Stores `rows` f32 `[n, hidden]`, the residual after `layer`; nothing if the layer is not tapped.

        Raises:
            CacheError: the rows do not fit behind `base`.
        """
        slots = [slot for slot, tapped in enumerate(self.layer_ids) if tapped == layer]
        if not slots:
            return
        end = self.base + len(rows)
        if end > self.t:
            raise CacheError(f"tap rows [{self.base}, {end}) do not fit in a sink of {self.t} rows: arm a larger one")
        for slot in slots:
            self._slot(slot, len(rows))[:] = rows

    def place(self, slots: Sequence[int], rows: NDArray[np.float32]) -> None:
        """Stores what another sink, of `slots` alone, holds: f32 `[n, len(slots) * hidden]`, as a stage sends it."""
        for at, slot in enumerate(slots):
            self._slot(slot, len(rows))[:] = rows[:, at * self.hidden : (at + 1) * self.hidden]

    def _slot(self, slot: int, rows: int) -> Buffer:
        return self.buf[self.base : self.base + rows, slot * self.hidden : (slot + 1) * self.hidden]
