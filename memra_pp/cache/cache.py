"""`Cache`: the K/V rows and recurrent state of one session over a range of layers, and snapshots of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ..config import KvPlan, ModelConfig, RecurrentPlan
from ..config.fence import check_fence, stage_layers
from ..errors import CacheError, ConfigError
from .device import Buffer, KvDev
from .formats import KvPolicy, resolved
from .layers import KvLayer, RecurLayer, allocate_all, free_all
from .plan import CachePlan, SnapshotMark
from .sizing import checked_ctx, checked_layers, snapshot_layout
from .taps import DflashTapSink


@dataclass(frozen=True)
class StateCopy:
    """A recurrent layer's copied state: f32 buffers of the sizes of `RecurLayer.conv_state` and `.ssm_state`."""

    conv: Buffer
    ssm: Buffer


@dataclass(eq=False)
class CacheSnapshot:
    """Lengths of every K/V layer (rows need no copy), copies of every recurrent layer's conv and SSM state, and `pos`.

    Good for any number of restores, until it is closed or an older one is restored.
    """

    cache: Cache
    states: dict[int, StateCopy]
    lens: dict[int, int] = field(default_factory=dict)
    pos: int = 0
    mark: SnapshotMark | None = None

    def drop(self) -> None:
        """Ends the snapshot and its pin; the buffers stay for `Cache.snapshot_into`."""
        if self.mark is not None:
            self.cache.plan.drop(self.mark)
            self.mark = None

    def close(self) -> None:
        """Ends the snapshot and gives its bytes back."""
        self.drop()
        for il, copy in self.states.items():
            free_all(self.cache.state(il).dev, [copy.conv, copy.ssm])
        self.states = {}
        self.cache.forget(self)

    def __enter__(self) -> CacheSnapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Cache:
    """One session's cache.

    `kv[il]` and `recur[il]` are indexed by global layer; `None` where the layer is another's, of the other kind, or reads
    a shared one. `pos` is the next row to write; `max_ctx` the most rows there can be. `last_logits_dev` is f32
    `[n_vocab]` on the last stage's device, allocated at first use. Build one with `new`, `new_pp2`, `new_ppn` or
    `new_ppn_slice`.
    """

    def __init__(self, devs: Sequence[tuple[KvDev, range]], cfg: ModelConfig, max_ctx: int, policy: KvPolicy) -> None:
        self.cfg = cfg
        self.max_ctx = max_ctx
        self.policy = policy
        self.kv: list[KvLayer | None] = [None] * cfg.n_layer
        self.recur: list[RecurLayer | None] = [None] * cfg.n_layer
        self._attention: list[tuple[int, KvLayer]] = []
        self.last_logits_dev: Buffer | None = None
        self.dflash_taps: DflashTapSink | None = None
        self._last_dev = devs[-1][0]
        self._snapshots: list[CacheSnapshot] = []
        try:
            for dev, layers in devs:
                self._alloc(dev, layers)
            rings = [layer.ring for layer in self.kv if layer is not None and layer.ring is not None]
            self.plan = CachePlan(max_ctx, rings)
            self._attention = [(il, layer) for il, layer in enumerate(self.kv) if layer is not None]
        except BaseException:
            self._free_layers()
            raise

    @classmethod
    def new(cls, dev: KvDev, cfg: ModelConfig, max_ctx: int, *, policy: KvPolicy | None = None) -> Cache:
        """A whole model's cache on one device.

        Raises:
            ConfigError: `max_ctx` is less than 1.
            CapacityExceeded: the device has not that many bytes; nothing stays allocated.
        """
        return cls.new_ppn_slice(dev, 0, cfg.n_layer, cfg, max_ctx, policy=policy)

    @classmethod
    def new_pp2(
        cls, dev0: KvDev, dev1: KvDev, split: int, cfg: ModelConfig, max_ctx: int, *, policy: KvPolicy | None = None
    ) -> Cache:
        """A whole model's cache, layers before `split` on `dev0` and the rest on `dev1`."""
        return cls.new_ppn([dev0, dev1], [0, split, cfg.n_trunk], cfg, max_ctx, policy=policy)

    @classmethod
    def new_ppn(
        cls,
        devs: Sequence[KvDev],
        fence: Sequence[int],
        cfg: ModelConfig,
        max_ctx: int,
        *,
        policy: KvPolicy | None = None,
    ) -> Cache:
        """A whole model's cache, each layer through the device of the stage that runs it; MTP layers through the last.

        Raises:
            ConfigError: the fence is not valid for the model, or has not one stage a device.
            CapacityExceeded: a device has not that many bytes; nothing stays allocated.
        """
        check_fence(cfg, fence)
        if len(devs) != len(fence) - 1:
            raise ConfigError(f"{len(devs)} devices for a fence of {len(fence) - 1} stages: pass one device a stage")
        parts = [(dev, stage_layers(cfg, fence, s)) for s, dev in enumerate(devs)]
        return cls(parts, cfg, checked_ctx(max_ctx), resolved(policy))

    @classmethod
    def new_ppn_slice(
        cls, dev: KvDev, lo: int, hi: int, cfg: ModelConfig, max_ctx: int, *, policy: KvPolicy | None = None
    ) -> Cache:
        """The slice of layers `[lo, hi)` on one device: what a stage owns.

        Raises:
            ConfigError: the range is not in the model, or `max_ctx` is less than 1.
            CapacityExceeded: the device has not that many bytes; nothing stays allocated.
        """
        return cls([(dev, checked_layers(cfg, lo, hi))], cfg, checked_ctx(max_ctx), resolved(policy))

    @property
    def pos(self) -> int:
        """The absolute row the next append goes to."""
        return self.plan.pos

    @pos.setter
    def pos(self, value: int) -> None:
        self.plan.pos = value

    def retain_from(self, layer: KvLayer) -> int:
        """The first absolute row of `layer` that an append at `pos` must keep."""
        return 0 if layer.ring is None else self.plan.retain_from(layer.ring)

    def state(self, layer: int) -> RecurLayer:
        """The recurrent state of `layer`.

        Raises:
            CacheError: the layer is not recurrent, or not of this slice.
        """
        found = self.recur[layer]
        if found is None:
            raise CacheError(f"layer {layer} keeps no recurrent state here")
        return found

    def last_logits(self) -> Buffer:
        """The last stage's buffer for one logits row, f32 `[n_vocab]`, allocated at first use."""
        if self.last_logits_dev is None:
            self.last_logits_dev = self._last_dev.uninit(self.cfg.n_vocab)
        return self.last_logits_dev

    def new_snapshot(self) -> CacheSnapshot:
        """The buffers of a snapshot, not taken yet: `snapshot_into` takes it without allocating.

        Raises:
            CapacityExceeded: the device has not that many bytes; nothing stays allocated.
        """
        snap = CacheSnapshot(self, {})
        self._snapshots.append(snap)
        try:
            for il, layer in enumerate(self.recur):
                if layer is not None:
                    snap.states[il] = StateCopy(*allocate_all(layer.dev, snapshot_layout(layer.plan, il)))
        except BaseException:
            snap.close()
            raise
        return snap

    def snapshot(self, pin: bool = True) -> CacheSnapshot:
        """Takes a snapshot of everything at `pos`. A pinned one keeps the rows it needs from being overwritten."""
        snap = self.new_snapshot()
        self.snapshot_into(snap, pin)
        return snap

    def snapshot_into(self, snap: CacheSnapshot, pin: bool = True) -> None:
        """Takes `snap` anew, at `pos`, with no allocation.

        Raises:
            CacheError: `snap` was closed, or is another cache's; nothing has changed.
        """
        self.mark_snapshot(snap, self.plan.pos, pin)
        _copy_all(
            (layer.dev, [(copy.conv, layer.conv_state), (copy.ssm, layer.ssm_state)]) for layer, copy in self._copies(snap)
        )

    def mark_snapshot(self, snap: CacheSnapshot, pos: int, pin: bool = True) -> None:
        """Makes `snap` one of row `pos`, after a step over that row whose forward has copied the states there into it.

        Raises:
            CacheError: `snap` was closed, or is another cache's; nothing has changed.
        """
        if snap not in self._snapshots:
            raise CacheError("this snapshot was closed, or is another cache's: it holds no copy of the state; take a new one")
        if snap.mark is not None:
            self.plan.drop(snap.mark)
        snap.mark = self.plan.snapshot(pin, pos)
        snap.pos = pos
        snap.lens = {il: min(pos, layer.len) for il, layer in self._attention}

    def can_rollback(self, snap: CacheSnapshot, accept: int) -> bool:
        """Whether `rollback` will succeed."""
        return snap.mark is not None and self.plan.can_rollback(snap.mark, accept)

    def rollback(self, snap: CacheSnapshot, accept: int) -> None:
        """Returns to `snap`: state copied back, `pos = snap.pos`, every `len` the saved one plus `accept` (a layer that
        lagged behind `pos`, as an MTP block that no forward runs, keeps its own).

        The caller then replays the `accept` rows, which rewrites the same K/V rows and advances the state. Snapshots
        taken since have ended.

        Raises:
            RingLapped: the rows the snapshot needs are overwritten: full re-prime required. Nothing has changed.
            CacheError: the snapshot has ended, or `accept` is not 0 to the rows fed since. Nothing has changed.
        """
        if snap.mark is None:
            raise CacheError("this snapshot has ended: it was closed, or an older one was restored; take a new one")
        self.plan.rollback(snap.mark, accept)
        for il, length in snap.lens.items():
            layer = self.kv[il]
            if layer is not None and length >= snap.pos:
                layer.set_len(length + accept)
        _copy_all(
            (recur.dev, [(recur.conv_state, copy.conv), (recur.ssm_state, copy.ssm)]) for recur, copy in self._copies(snap)
        )

    def forget(self, snap: CacheSnapshot) -> None:
        """Stops owning a snapshot that gave its bytes back."""
        if snap in self._snapshots:
            self._snapshots.remove(snap)

    def close(self) -> None:
        """Gives every byte back, snapshots' included; closing twice is fine."""
        for snap in list(self._snapshots):
            snap.close()
        if self.last_logits_dev is not None:
            self._last_dev.free(self.last_logits_dev)
            self.last_logits_dev = None
        self._free_layers()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _alloc(self, dev: KvDev, layers: range) -> None:
        for il in layers:
            match self.cfg.layers[il]:
                case KvPlan() as plan:
                    self.kv[il] = KvLayer.alloc(dev, plan, il, self.max_ctx, self.policy)
                case RecurrentPlan() as plan:
                    self.recur[il] = RecurLayer.alloc(dev, plan, il, self.max_ctx, self.policy)
                case _:
                    pass

    def _copies(self, snap: CacheSnapshot) -> list[tuple[RecurLayer, StateCopy]]:
        return [(self.state(il), copy) for il, copy in snap.states.items()]

    def _free_layers(self) -> None:
        owned: list[KvLayer | RecurLayer] = [layer for layer in (*self.kv, *self.recur) if layer is not None]
        for layer in owned:
            free_all(layer.dev, layer.buffers())
        self.kv = [None] * self.cfg.n_layer
        self.recur = [None] * self.cfg.n_layer
        self._attention = []


def _copy_all(layers: Iterable[tuple[KvDev, list[tuple[Buffer, Buffer]]]]) -> None:
    """The copies of all layers of a device at once."""
    devices: dict[int, tuple[KvDev, list[tuple[Buffer, Buffer]]]] = {}
    for dev, copies in layers:
        devices.setdefault(id(dev), (dev, []))[1].extend(copies)
    for dev, copies in devices.values():
        dev.copy_all(copies)
