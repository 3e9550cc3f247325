"""`CostModel`: what a session is charged on each stage. It is what the stage allocates: both walk the same layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from ..cache import KvPolicy, slab_bytes, stage_layers
from ..cache.sizing import Recurrent, checked_ctx, layer_layout, round_up, snapshot_layout
from ..config import LayerPlan, ModelConfig
from ..config.fence import check_fence
from .shape import SessionShape

KEPT_SHAPES = 8192
"""Shapes whose charges are kept: requests come in a few, and laying one out takes as long as deciding on it."""


def layer_charge(plan: LayerPlan, shape: SessionShape, policy: KvPolicy) -> int:
    """Bytes that one layer adds to a session's slab: its buffers, and a copy of its state for every slot.

    Raises:
        ConfigError: a context below 1.
    """
    cache = layer_layout(plan, 0, checked_ctx(shape.ctx), policy)
    return slab_bytes(cache) + shape.slots * slab_bytes(snapshot_layout(plan, 0))


def workspace_bytes(max_rows: int, n_embd: int, widest: int, n_vocab: int = 0) -> int:
    """An upper bound of what a forward holds beside the cache, in bytes: for each of `max_rows` rows, f32 activations of the
    widest moment (a few of `n_embd` and `widest` more) and, where the head is, `n_vocab` logits."""
    return 4 * max_rows * (4 * n_embd + widest + n_vocab)


class CostModel:
    """Bytes of the slab that a session takes on each stage of a fence.

    A stage's slab holds every buffer of `stage_layout`, each rounded up to `SLAB_ALIGN`, and is rounded up to the granularity
    of the stage's device. Layers with equal plans have equal layouts, so one of a kind is laid out and multiplied.

    Args:
        granularities: bytes, one number a stage (default: 1 each).

    Raises:
        ConfigError: the fence is not one of the model; the message names the nearest that is.
    """

    def __init__(
        self, cfg: ModelConfig, fence: Sequence[int], policy: KvPolicy, granularities: Sequence[int] | None = None
    ) -> None:
        self.cfg = cfg
        self.fence = check_fence(cfg, fence)
        self.policy = policy
        stages = len(self.fence) - 1
        self.granularities = tuple(granularities or [1] * stages)
        self._plans = list(dict.fromkeys(cfg.layers))
        kinds = {plan: kind for kind, plan in enumerate(self._plans)}
        self._counts = [
            tuple(Counter(kinds[cfg.layers[il]] for il in stage_layers(cfg, self.fence, s)).items()) for s in range(stages)
        ]
        self._charges = lru_cache(KEPT_SHAPES)(self._lay_out)

    def charge(self, stage: int, ctx: int, *, speculate: int = 0, snapshots: int = 1, recurrent: Recurrent = "replay") -> int:
        """Bytes that a session of `ctx` rows takes on `stage`: one slab."""
        return self.charges(SessionShape(ctx, snapshots, recurrent, speculate))[stage]

    def charges(self, shape: SessionShape) -> tuple[int, ...]:
        """Bytes that a session takes on every stage.

        Raises:
            ConfigError: a context below 1.
        """
        return self._charges(shape)

    def _lay_out(self, shape: SessionShape) -> tuple[int, ...]:
        each = [layer_charge(plan, shape, self.policy) for plan in self._plans]
        stages = [sum([n * each[kind] for kind, n in counts]) for counts in self._counts]
        return tuple(map(round_up, stages, self.granularities))
