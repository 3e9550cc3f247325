"""`Tenants`: what each tenant holds of every device, against the share that one may hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .ledger import Ledger


class Tenants:
    """Bytes held by tenant and device. `share` is the part of a device that one tenant may hold (None: all of it)."""

    def __init__(self, ledger: Ledger, share: float | None) -> None:
        self.share = share
        self._ledger = ledger
        self._held: dict[str, list[int]] = {}

    def allow(self, tenant: str | None, charges: Sequence[int]) -> bool:
        """Whether a tenant may hold `charges`, bytes a stage, beside what it holds (None: one that holds nothing)."""
        if self.share is None:
            return True
        more = self._ledger.by_device(charges)
        held = self._held.get(tenant) if tenant is not None else None
        wanted = more if held is None else [h + n for h, n in zip(held, more, strict=True)]
        return all(n <= self.share * capacity for n, capacity in zip(wanted, self._ledger.capacities, strict=True))

    def hold(self, tenant: str, charges: Sequence[int]) -> None:
        """Adds a session's bytes to what its tenant holds."""
        if self.share is None:
            return
        more = self._ledger.by_device(charges)
        held = self._held.get(tenant, [0] * len(more))
        self._held[tenant] = [h + n for h, n in zip(held, more, strict=True)]

    def rebuild(self, holders: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Works out again what tenants hold, from each session's tenant and charges."""
        self._held = {}
        for tenant, charges in holders:
            self.hold(tenant, charges)

    def give_back(self, tenant: str, charges: Sequence[int]) -> None:
        """Takes them off; a tenant that holds nothing is forgotten."""
        if self.share is None:
            return
        less = self._ledger.by_device(charges)
        left = [h - n for h, n in zip(self._held[tenant], less, strict=True)]
        if any(left):
            self._held[tenant] = left
        else:
            del self._held[tenant]
