"""`ModelConfig`: what a model's layers keep in the cache, one plan a layer, decided once by a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError

KvClass: TypeAlias = Literal["ordinary", "gemma4_global", "gemma4_window"]
RingUse: TypeAlias = Literal["never", "step", "reader"]


@dataclass(frozen=True)
class KvPlan:
    """An attention layer that keeps its own K and V rows.

    `window` is the number of positions a row sees, itself included (None: all of them). `ring` says when the layer may
    be held in a ring of rows: `never`, `step` (with `MEMRA_SWA_RING=1`) or `reader` (with `=all` only).
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    kv_class: KvClass = "ordinary"
    window: int | None = None
    ring: RingUse = "never"

    @property
    def kv_dim_k(self) -> int:
        """Elements of K a token."""
        return self.n_head_kv * self.head_dim_k

    @property
    def kv_dim_v(self) -> int:
        """Elements of V a token."""
        return self.n_head_kv * self.head_dim_v


@dataclass(frozen=True)
class RecurrentPlan:
    """A linear-attention layer with fixed f32 state: conv `[conv_width, conv_kernel - 1]`, SSM `[state_width]`."""

    conv_width: int
    conv_kernel: int
    state_width: int


@dataclass(frozen=True)
class SharedKvPlan:
    """A layer that owns nothing and reads the K/V rows of layer `source`."""

    source: int


LayerPlan: TypeAlias = KvPlan | RecurrentPlan | SharedKvPlan


@dataclass(frozen=True)
class ModelConfig:
    """A model as the cache sees it.

    `layers` holds one plan a layer: `n_trunk` trunk layers, then the MTP/NextN blocks. `max_ctx` is the model's context
    length in tokens. `hparams` is the text config under Hugging Face names, whatever file it came from: what a forward
    needs beyond the cache.
    """

    arch: str
    n_trunk: int
    n_embd: int
    n_vocab: int
    max_ctx: int
    layers: tuple[LayerPlan, ...]
    hparams: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def n_layer(self) -> int:
        """Layers with a plan, the trunk and the MTP/NextN blocks after it."""
        return len(self.layers)

    @cached_property
    def recurrent(self) -> bool:
        """Whether any layer keeps recurrent state, so that going back means replaying rows."""
        return any(isinstance(plan, RecurrentPlan) for plan in self.layers)

    def without_mtp(self) -> ModelConfig:
        """The same model with its MTP/NextN blocks left out."""
        return replace(self, layers=self.layers[: self.n_trunk])

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text, as the config names them; empty if it names none."""
        value = self.hparams.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        return frozenset(i for i in ids if isinstance(i, int))

    @classmethod
    def from_path(cls, path: str | PathLike[str]) -> ModelConfig:
        """`from_gguf` for a GGUF file, by its name, `from_hf` for anything else.

        Raises:
            ConfigError: as those.
        """
        suffix = Path(path).suffix
        if suffix not in ("", ".gguf", ".json", ".safetensors") and not Path(path).is_dir():
            raise ConfigError(f"{path}: is neither a .gguf file nor a directory with config.json on this machine")
        return cls.from_gguf(path) if suffix == ".gguf" else cls.from_hf(path)

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json`, a directory that holds one, or its dict.

        Raises:
            ConfigError: the file is missing or contradicts itself, or a layer's state cannot be sized.
        """
        from .hf import read_hf

        return read_hf(source)

    @classmethod
    def from_gguf(cls, path: str | PathLike[str]) -> ModelConfig:
        """Reads the metadata of a GGUF file; no tensor data is touched.

        Raises:
            ConfigError: the file is missing, truncated or corrupt, or a layer's state cannot be sized.
        """
        from .gguf import read_gguf

        return read_gguf(path)
