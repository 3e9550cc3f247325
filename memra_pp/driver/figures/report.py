"""`Report`: what a pipeline tells of itself. Its own counters are here; all else is asked of whoever keeps it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ...config import KvPlan
from ..chain import Chain
from ..door import Door
from ..opener import Opener
from ..scheduler import Scheduler


class Report:
    """The figures of one pipeline; any thread may ask for them. It knows nothing of the `Pipeline`, and may outlive it."""

    def __init__(self, cut: Mapping[str, Any], chain: Chain, scheduler: Scheduler, door: Door, opener: Opener) -> None:
        self._spec, self._cut = chain.specs[0], cut
        self._chain, self._scheduler, self._door, self._opener = chain, scheduler, door, opener
        self._counters = dict.fromkeys(("tokens", "rounds", "drafted", "accepted", "rebuilds"), 0)
        self._counting = threading.Lock()

    def count(self, **more: int) -> None:
        """Adds to the counters of `stats`."""
        with self._counting:
            for name, value in more.items():
                self._counters[name] += value

    def health(self) -> dict[str, Any]:
        """See `Pipeline.health`."""
        return self._chain.health()

    def stats(self) -> dict[str, Any]:
        """See `Pipeline.stats`; it opens and closes nothing.

        Raises:
            StageError: the pipeline is closed, or a stage does not answer.
        """
        stages, books, planned = self._opener.books(lambda: (self._chain.stats(), self._door.stats(), self._opener.held))
        for device in books["devices"]:
            device["allocated_bytes"] = sum(stages[s]["allocated_bytes"] for s in device["stages"])
        plans, policy = self._spec.cfg.layers, self._spec.policy
        return {
            "fence": list(self._spec.fence),
            "cut": dict(self._cut),
            "kv": list(dict.fromkeys("/".join(policy.formats(plan)) for plan in plans if isinstance(plan, KvPlan))),
            "ring": policy.ring,
            "sessions": self._opener.live,
            "traversals": self._chain.traversals,
            "hops": self._scheduler.hops,
            "hop_s": self._scheduler.hop_s,
            "recoveries": self._chain.recoveries,
            **self._counters,
            "stages": [{**stage, "planned_bytes": n} for stage, n in zip(stages, planned, strict=True)],
            **books,
        }
