"""`Boundary`: how rows pass from stage to stage. On a CPU they travel in the frame. From GPU to GPU they are copied into slots
there, and the frame only names the slot; where the system does not allow that, they travel by way of the host.

The receiving stage owns its slots for as long as it lives. The sending stage writes into one that is free, waits for the copy,
and only then sends the frame; the receiver gives the slot back when its own work on the rows is done. No events are shared:
a refused append has to be known before its frame goes on, so the sender waits for its stream anyway.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..errors import StageError
from ..kernels.backend import Rows
from ..kernels.cuda.device import CudaDev
from ..kernels.cuda.gpu import DeviceArray, Gpu
from ..kernels.memory import ArenaDev
from ..models.protocol import Array
from .frames import Frame
from .spans import clock
from .spec import StageSpec

log = logging.getLogger(__name__)

SLOTS = 2
"""One is read while the other is written."""

Slot: TypeAlias = int
"""From 1 to `SLOTS`."""


@dataclass(frozen=True)
class Offer:
    """What lets another process of the machine write into a stage's slots, `[SLOTS, rows, n_embd]`."""

    machine: str | None
    handle: bytes
    rows: int


class Boundary:
    """A stage's two ends.

    Attributes:
        kind: how rows leave: `lane`, in frames from a CPU; `slots`, on the next stage's GPU; or `host`, in frames from a GPU.
    """

    def __init__(self, spec: StageSpec, device: ArenaDev) -> None:
        self._spec, self._device = spec, device
        self._gpu = device.gpu if isinstance(device, CudaDev) else None
        self._slots: DeviceArray | None = None
        self._give_back: Callable[[Slot], None] = _nobody
        self._outlet: _Outlet | None = None
        self._known: tuple[Offer, DeviceArray] | None = None
        self.kind = "lane" if self._gpu is None or spec.last else "host"
        if self._gpu is not None and spec.stage:
            self._slots = self._gpu.persistent((SLOTS, spec.max_rows, spec.cfg.n_embd), np.float32)

    def offer(self) -> Offer | None:
        """What the stage before this one needs, if it is another process; None where there are no slots, or none are shared."""
        if self._gpu is None or self._slots is None:
            return None
        try:
            return Offer(clock()["of"], self._gpu.share(self._slots), self._slots.shape[1])
        except StageError as error:
            log.warning("%s: %s", self._spec, error)
            return None

    def lead_to(self, other: Boundary) -> None:
        """Has rows leave by the slots of the next stage, which is in this process and takes turns with this one."""
        if self._gpu is not None and other._slots is not None:
            self._outlet, self.kind = _Outlet(self._gpu, other._slots, _none_left), "slots"
            other._give_back = self._outlet.free.append

    def lead_out(self, offer: Offer | None, await_slot: Callable[[], Slot]) -> None:
        """Has rows leave by the slots of the next stage, in another process, if it offers some and they can be had.
        `await_slot` waits until one is given back, and raises LaneError if none is."""
        if self._gpu is None or self._spec.last:
            return
        self._outlet, self.kind = None, "host"
        try:
            slots = self._attached(self._gpu, offer)
        except StageError as error:
            log.warning("%s: rows reach the next stage by way of the host: %s", self._spec, error)
            return
        self._outlet, self.kind = _Outlet(self._gpu, slots, await_slot), "slots"

    def come_back(self, give_back: Callable[[Slot], None]) -> None:
        """Has slots of this stage be given back so."""
        self._give_back = give_back

    def room(self, slot: Slot) -> int:
        """How many rows a slot has; 0 if there is none of that number."""
        return 0 if self._slots is None or slot > SLOTS else int(self._slots.shape[1])

    def rows(self, slot: Slot, rows: int) -> DeviceArray:
        """The first rows in a slot, f32 `[rows, n_embd]`: `room` says how many there can be."""
        return None if self._slots is None else self._slots[slot - 1][:rows]

    def done(self, slot: Slot) -> None:
        """Gives a slot back, if there is one of that number, when this stage's work on its rows is done.

        Raises:
            LaneError: the stage before is gone.
        """
        if self._gpu is not None and self.room(slot):
            self._gpu.wait()
            self._give_back(slot)

    def give(self, frame: Frame, rows: Rows) -> list[Array]:
        """Puts f32 `[rows, n_embd]` into a frame's slot; or the array of the frame that they travel in.

        Raises:
            LaneError: the next stage gives no slot back.
        """
        if self._outlet is None:
            host = rows if isinstance(rows, np.ndarray) else self._device.backend.download(rows)
            return [np.ascontiguousarray(host)]
        frame.slot = self._outlet.put(rows)
        return []

    def take_back(self, frame: Frame) -> None:
        """Frees the slot of a frame that is not sent."""
        if frame.slot and self._outlet is not None:
            self._outlet.free.append(frame.slot)
        frame.slot = 0

    def _attached(self, gpu: Gpu, offer: Offer | None) -> DeviceArray:
        """The next stage's slots. A process attaches the same memory once."""
        if offer is None:
            raise StageError("that stage is on no GPU, or shares no memory")
        if offer.machine is None or offer.machine != clock()["of"]:
            raise StageError("that stage is on another machine")
        if self._known is None or self._known[0] != offer:
            self._known = offer, gpu.attach(offer.handle, (SLOTS, offer.rows, self._spec.cfg.n_embd), np.float32)
        return self._known[1]


class _Outlet:
    """The sending end: the next stage's slots, and which are free."""

    def __init__(self, gpu: Gpu, slots: DeviceArray, await_slot: Callable[[], Slot]) -> None:
        self._gpu, self._slots, self._await_slot = gpu, slots, await_slot
        self.free = deque(range(1, SLOTS + 1))

    def put(self, rows: Rows) -> Slot:
        slot = self.free.popleft() if self.free else self._await_slot()
        if not 1 <= slot <= SLOTS:
            raise StageError(f"the next stage gave slot {slot} back: there are {SLOTS}; this is a bug")
        source = self._gpu.upload(rows) if isinstance(rows, np.ndarray) else rows
        self._gpu.copy(self._slots[slot - 1][: len(rows)], source)
        self._gpu.wait()
        return slot


def _nobody(slot: Slot) -> None:
    raise StageError(f"slot {slot} cannot be given back: the stage before writes into none; this is a bug")


def _none_left() -> Slot:
    raise StageError("the next stage, of this process, has given no slot back: this is a bug")
