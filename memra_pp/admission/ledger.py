"""`Ledger`: the bytes of every device and who has them. A session is charged on every stage or on none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import AdmissionError
from .arena import Arena


@dataclass(frozen=True)
class Device:
    """A device whose memory sessions share: `budget` bytes for their slabs, in units of `granularity`."""

    name: str
    budget: int
    granularity: int = 1


def pooled(shares: Sequence[Device]) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The devices of which `shares` are the parts, one a stage, and the device of every stage, by index. Parts of one name are
    of one device, which holds their sum."""
    budgets: dict[str, int] = {}
    units: dict[str, int] = {}
    for share in shares:
        budgets[share.name] = budgets.get(share.name, 0) + share.budget
        units[share.name] = max(units.get(share.name, 1), share.granularity)
    names = list(budgets)
    devices = tuple(Device(name, budgets[name] // units[name] * units[name], units[name]) for name in names)
    return devices, tuple(names.index(share.name) for share in shares)


@dataclass(frozen=True)
class Shortage:
    """Why a session does not fit: `stage`, on `device`, needs `need` bytes where `room` are, `short_by` too few. They are what
    is free there, the largest piece of it where it lies apart, or all that the device has."""

    stage: int
    device: str
    need: int
    room: int
    short_by: int
    of: Literal["free", "in one piece", "in all"]

    def __str__(self) -> str:
        has = f"device {self.device} has {self.room:,} {self.of} ({self.short_by:,} short)"
        return f"stage {self.stage} needs {self.need:,} bytes for this session and {has}"


@dataclass(slots=True, eq=False)
class _Pool:
    """One device's books. `learned` bytes were seen in use for something else, and stay set aside; `free` ones are neither
    that nor reserved, and fall below 0 where what was learned is reserved already."""

    device: Device
    arena: Arena
    free: int
    learned: int = 0

    @classmethod
    def of(cls, device: Device) -> _Pool:
        size = device.budget // device.granularity * device.granularity
        return cls(device, Arena(size), size)

    @property
    def capacity(self) -> int:
        return self.arena.size - self.learned


class Ledger:
    """Slabs reserved in each device's arena. Not thread-safe: it has one owner.

    Args:
        devices: the devices.
        homes: the device of every stage, by index (default: one device a stage, in order).

    Raises:
        AdmissionError: a device is no stage's home, or a stage's home is no device.
    """

    def __init__(self, devices: Sequence[Device], homes: Sequence[int] | None = None) -> None:
        self.homes = tuple(range(len(devices)) if homes is None else homes)
        if set(self.homes) != set(range(len(devices))):
            raise AdmissionError(f"homes={self.homes}: every one of the {len(devices)} devices must be the home of a stage")
        self._one_to_one = self.homes == tuple(range(len(devices)))
        self._pools = [_Pool.of(device) for device in devices]
        self._of_stage = [self._pools[home] for home in self.homes]
        self._learned = [0] * len(self.homes)
        self._live: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def reserve(self, session: int, charges: Sequence[int]) -> Sequence[int] | Shortage:
        """The offsets of slabs of `charges[s]` bytes on each stage `s`, or why there are none; then nothing was reserved.

        Raises:
            AdmissionError: the session has its slabs already.
        """
        if session in self._live:
            raise AdmissionError(f"session {session} has its slabs already: release it first")
        if (shortage := self.shortage(charges)) is not None:
            return shortage
        offsets: list[int] = []
        for pool, charge in zip(self._of_stage, charges, strict=True):
            offset = pool.arena.take(charge)
            if offset is None:
                self._give_back(offsets, charges)
                return self._fragmented(len(offsets), charges)
            offsets.append(offset)
            pool.free -= charge
        self._live[session] = offsets, charges
        return offsets

    def release(self, session: int) -> bool:
        """Gives back exactly what `reserve` took; whether there was anything. A second release does nothing."""
        if session not in self._live:
            return False
        self._give_back(*self._live.pop(session))
        return True

    def holds(self, session: int) -> bool:
        """Whether a session has its slabs."""
        return session in self._live

    def rebuild(self) -> None:
        """Works the free bytes out again from the sessions that are live, after an interrupt in the middle of a change."""
        for pool in self._pools:
            taken = [
                (offset, offset + size)
                for offsets, charges in self._live.values()
                for home, offset, size in zip(self._of_stage, offsets, charges, strict=True)
                if home is pool and size
            ]
            pool.arena = Arena(pool.arena.size, taken)
            pool.learned = min(
                pool.arena.size, sum(n for home, n in zip(self._of_stage, self._learned, strict=True) if home is pool)
            )
            pool.free = pool.arena.size - pool.learned - sum(end - start for start, end in taken)

    def learn(self, stage: int, used: int) -> None:
        """Sets `used` bytes of its device's budget aside for a stage; what is set aside never falls."""
        pool = self._of_stage[stage]
        more = min(max(0, used - self._learned[stage]), pool.capacity)
        self._learned[stage] += more
        pool.learned += more
        pool.free -= more

    def shortage(self, charges: Sequence[int], empty: bool = False) -> Shortage | None:
        """What `charges` lack most, bytes a stage, pieces apart; with `empty`, were no session there. None: nothing.

        On a device that stages share, the stage that needs most is named.
        """
        worst, device = 0, 0
        for i, (pool, need) in enumerate(zip(self._pools, self.by_device(charges), strict=True)):
            short_by = need - (pool.capacity if empty else pool.free)
            if short_by > worst:
                worst, device = short_by, i
        if not worst:
            return None
        stage = max((s for s, home in enumerate(self.homes) if home == device), key=charges.__getitem__)
        name, need = self._pools[device].device.name, charges[stage]
        return Shortage(stage, name, need, max(0, need - worst), worst, "in all" if empty else "free")

    def by_device(self, charges: Sequence[int]) -> Sequence[int]:
        """Bytes a device of bytes a stage."""
        if self._one_to_one:
            return charges
        needs = [0] * len(self._pools)
        for home, charge in zip(self.homes, charges, strict=True):
            needs[home] += charge
        return needs

    @property
    def live(self) -> int:
        """Sessions that have slabs."""
        return len(self._live)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Bytes of each device that sessions may hold: the budget less what was learned."""
        return tuple(pool.capacity for pool in self._pools)

    @property
    def reserved(self) -> tuple[int, ...]:
        """Bytes reserved on each device."""
        return tuple(pool.capacity - pool.free for pool in self._pools)

    def reserved_at(self, stage: int) -> int:
        """Bytes reserved on a stage's device."""
        pool = self._of_stage[stage]
        return pool.capacity - pool.free

    def devices(self) -> list[dict[str, Any]]:
        """Each device's name, stages and live sessions, and its bytes: budget, learned, reserved, free, largest free block."""
        return [
            {
                "device": pool.device.name,
                "stages": [stage for stage, home in enumerate(self.homes) if home == i],
                "sessions": self.live,
                "budget_bytes": pool.arena.size,
                "learned_bytes": pool.learned,
                "reserved_bytes": pool.capacity - pool.free,
                "free_bytes": max(0, pool.free),
                "largest_free_bytes": max(0, min(pool.arena.largest, pool.free)),
            }
            for i, pool in enumerate(self._pools)
        ]

    def _give_back(self, offsets: Sequence[int], charges: Sequence[int]) -> None:
        for pool, offset, size in zip(self._of_stage, offsets, charges, strict=False):  # the first stages', if not all fitted
            pool.arena.give(offset, size)
            pool.free += size

    def _fragmented(self, stage: int, charges: Sequence[int]) -> Shortage:
        pool, need = self._of_stage[stage], charges[stage]
        return Shortage(stage, pool.device.name, need, pool.arena.largest, need - pool.arena.largest, "in one piece")
