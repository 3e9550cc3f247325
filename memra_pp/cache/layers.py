"""What a cache holds for one layer: K/V planes or recurrent state, in buffers of the layer's device."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import KvPlan, RecurrentPlan
from ..errors import CacheError
from .device import Buffer, KvDev
from .formats import KvPolicy
from .ring import KvRing
from .sizing import Allocation, KvLayout, kv_layout, layer_layout


@dataclass
class KvLayer:
    """An attention layer's quantised K and V rows.

    `k`, `v` are u8 planes: row `r` begins at `r * tok_bytes`. `len` is the number of absolute rows written, mirrored in
    `len_d`, one device i32 set in place. With a `ring`, absolute row `a` is at physical row `a - ring.base`.
    """

    dev: KvDev
    index: int
    plan: KvPlan
    layout: KvLayout
    k: Buffer
    v: Buffer
    len_d: Buffer
    ring: KvRing | None
    len: int = 0

    @classmethod
    def alloc(cls, dev: KvDev, plan: KvPlan, layer: int, max_ctx: int, policy: KvPolicy) -> KvLayer:
        """Allocates the layer's planes on `dev`."""
        layout = kv_layout(plan, max_ctx, policy)
        ring = None if layout.ring_window is None else KvRing(layout.rows, layout.ring_window)
        k, v, len_d = allocate_all(dev, layer_layout(plan, layer, max_ctx, policy))
        return cls(dev=dev, index=layer, plan=plan, layout=layout, k=k, v=v, len_d=len_d, ring=ring)

    @property
    def kv_dim_k(self) -> int:
        """Elements of K a token."""
        return self.plan.kv_dim_k

    @property
    def kv_dim_v(self) -> int:
        """Elements of V a token."""
        return self.plan.kv_dim_v

    @property
    def k_tok_bytes(self) -> int:
        """Bytes of K a token."""
        return self.layout.k_tok_bytes

    @property
    def v_tok_bytes(self) -> int:
        """Bytes of V a token."""
        return self.layout.v_tok_bytes

    @property
    def base(self) -> int:
        """The absolute row at physical row 0."""
        return 0 if self.ring is None else self.ring.base

    def physical_rows(self, start: int, end: int) -> range:
        """The physical rows of absolute rows `[start, end)`.

        Raises:
            CacheError: the range is not in the planes.
        """
        if self.ring is not None:
            return self.ring.physical_range(start, end)
        if not 0 <= start <= end <= self.layout.rows:
            raise CacheError(f"rows [{start}, {end}) are not in planes of {self.layout.rows} rows")
        return range(start, end)

    def set_len(self, length: int) -> None:
        """Sets `len` and its device mirror together."""
        self.len = length
        self.dev.set_i32_one(self.len_d, length)

    def buffers(self) -> list[Buffer]:
        """Every buffer of the layer."""
        return [self.k, self.v, self.len_d]


@dataclass
class RecurLayer:
    """A recurrent layer's state, f32: `conv_state` (`[conv_width, conv_kernel - 1]`, flat) and two stable SSM buffers.

    A scan reads `ssm_state`, writes `ssm_state_alt` and calls `swap`: `ssm_state` always names the current one, the other
    is undefined between steps. Neither is ever reallocated.
    """

    dev: KvDev
    plan: RecurrentPlan
    conv_state: Buffer
    ssm_state: Buffer
    ssm_state_alt: Buffer

    @classmethod
    def alloc(cls, dev: KvDev, plan: RecurrentPlan, layer: int, max_ctx: int, policy: KvPolicy) -> RecurLayer:
        """Allocates zeroed state on `dev`."""
        conv, ssm, alt = allocate_all(dev, layer_layout(plan, layer, max_ctx, policy))
        return cls(dev=dev, plan=plan, conv_state=conv, ssm_state=ssm, ssm_state_alt=alt)

    def swap(self) -> None:
        """Makes the buffer a scan has just written the current one: names swap, bytes stay."""
        self.ssm_state, self.ssm_state_alt = self.ssm_state_alt, self.ssm_state

    def buffers(self) -> list[Buffer]:
        """Every buffer of the layer."""
        return [self.conv_state, self.ssm_state, self.ssm_state_alt]


def allocate_all(dev: KvDev, layout: list[Allocation]) -> list[Buffer]:
    """Every buffer of a layout, or none: what was allocated before a failure is given back."""
    done: list[Buffer] = []
    try:
        for a in layout:
            done.append(allocate(dev, a))
    except BaseException:
        free_all(dev, done)
        raise
    return done


def allocate(dev: KvDev, a: Allocation) -> Buffer:
    """One buffer of a layout: zeroed where it is state, of any value where rows are written before they are read."""
    match a.dtype:
        case "u8":
            return dev.alloc_u8(a.elements)
        case "i32":
            return dev.htod_i32([0] * a.elements)
        case "f32":
            return dev.zeros(a.elements)


def free_all(dev: KvDev, buffers: list[Buffer]) -> None:
    """Gives buffers back, last first."""
    for buf in reversed(buffers):
        dev.free(buf)
