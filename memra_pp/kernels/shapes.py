"""What kernels need to know of a layer, whatever device they run on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..cache.formats import BLOCK
from ..errors import ConfigError


@dataclass(frozen=True)
class AttentionSpec:
    """What attention needs to know of a layer.

    `head_dim_k` and `head_dim_v` are elements a head, multiples of 32. `window` is the number of positions a row sees,
    itself included (None: all). `scale` multiplies the scores.

    Raises:
        ConfigError: a dimension, window or scale that cannot be.
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int | None
    scale: float

    def __post_init__(self) -> None:
        if self.n_head_kv < 1:
            raise ConfigError(f"AttentionSpec(n_head_kv={self.n_head_kv}): must be at least 1")
        for name, dim in (("head_dim_k", self.head_dim_k), ("head_dim_v", self.head_dim_v)):
            if dim < BLOCK or dim % BLOCK:
                raise ConfigError(f"AttentionSpec({name}={dim}): must be a positive multiple of {BLOCK}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"AttentionSpec(window={self.window}): must be at least 1, or None to see every position")
        if not math.isfinite(self.scale):
            raise ConfigError(f"AttentionSpec(scale={self.scale}): must be finite")


class DeltaShape(NamedTuple):
    """Heads of a gated delta net: `n_k` of q and k, `d_k` wide, and `n_v` (a multiple) of v, `d_v` wide."""

    n_k: int
    n_v: int
    d_k: int
    d_v: int

    @property
    def conv_width(self) -> int:
        """Channels of q, k and v together."""
        return 2 * self.n_k * self.d_k + self.value_width

    @property
    def value_width(self) -> int:
        """Channels of v."""
        return self.n_v * self.d_v

    @property
    def state_width(self) -> int:
        """Elements of the recurrent state."""
        return self.n_v * self.d_k * self.d_v
