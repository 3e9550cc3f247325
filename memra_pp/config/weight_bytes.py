"""How many bytes a model's weights take, layer by layer, from tensor headers or, without tensor files, from the config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from fractions import Fraction
from math import ceil
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from ..errors import ConfigError
from .families import n_mtp
from .fields import Fields, show
from .gguf_file import open_gguf
from .model import ModelConfig
from .safetensors_file import open_safetensors
from .weight_estimate import tensors_of
from .weight_storage import module_name, storage_of


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a checkpoint's tensors, as stored, by where a pipeline needs them.

    `layers` has one entry a layer of the config, MTP/NextN blocks at the end. `embedding` is the first stage's: the token
    matrix, Gemma 4's per-layer embedding, small tables that every stage computes with, and what was not recognised.
    `head` is the last stage's: the output matrix of `head_matrix` bytes and the final norm. `tied`: that matrix is the
    embedding's (and counted in both), so that a single stage holds it once. `estimated`: computed from the config, not
    read from tensor headers. `source` says in a phrase where the numbers are from.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    estimated: bool
    source: str
    head_matrix: int = 0

    def of_stage(self, layers: range, first: bool, last: bool) -> int:
        """Bytes that a stage with these layers holds; `first` and `last` say which end of the model is its."""
        once = self.head_matrix if self.tied and first and last else 0
        ends = (self.embedding if first else 0) + (self.head if last else 0) - once
        return sum(self.layers[il] for il in layers) + ends

    @property
    def whole(self) -> int:
        """Bytes of the checkpoint, what a single stage holds."""
        return self.of_stage(range(len(self.layers)), first=True, last=True)

    def scaled(self, total: int, source: str) -> WeightBytes:
        """`total` bytes shared out in these proportions, to the byte; what rounding leaves is the embedding's."""
        whole = self.whole
        layers = tuple(n * total // whole for n in self.layers)
        matrix = self.head_matrix * total // whole
        end = (self.head - self.head_matrix) * total // whole
        embedding = total - sum(layers) - end - (0 if self.tied else matrix)
        return replace(self, layers=layers, embedding=embedding, head=matrix + end, head_matrix=matrix, source=source)


Kept: TypeAlias = Callable[[str, Sequence[int]], int]
"""Bytes that a tensor of a type (`BF16`, `Q8_0`, ...) and a shape takes once it is loaded."""


def read_weight_bytes(path: str | PathLike[str], cfg: ModelConfig, kept: Kept | None = None) -> WeightBytes:
    """The bytes of the checkpoint at `path`, whose config is `cfg`: a GGUF file, a directory with `*.safetensors`, one such
    file, or a `config.json` (the files beside it count). Without tensor files: the estimate. Only headers are read.

    With `kept`, the bytes that the tensors take once they are loaded; tensor files are needed then.

    Vision and audio towers are not counted, nor are MTP blocks that `cfg` leaves out, nor an output matrix beside a config
    that ties it. A tensor that is not recognised counts for the first stage, and `source` says how many there were.

    Raises:
        ConfigError: a file is damaged, one of several parts is missing, or the tensors are not those of `cfg` (the layer
            or tensor is named); or as `estimate_weight_bytes`.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: does not exist; give a .gguf file, a checkpoint's directory or a config.json")
    if path.suffix == ".gguf":
        return _of_gguf(path, cfg, kept)
    place = path.parent if path.name == "config.json" else path
    if path.suffix == ".safetensors" or (place.is_dir() and any(place.glob("*.safetensors"))):
        return _of_safetensors(place, cfg, kept)
    if kept is not None:
        raise ConfigError(f"{path}: holds no tensor files; give a .gguf file, or a directory with *.safetensors")
    return _estimate(cfg, str(path), f", no tensor files {'in' if path.is_dir() else 'beside'} {path.name or path}")


def estimate_weight_bytes(cfg: ModelConfig) -> WeightBytes:
    """The bytes that the config's shapes, `dtype` (bf16 where none is named) and `quantization_config` come to.

    Raises:
        ConfigError: a field that a shape needs is missing or bad; it is named.
    """
    return _estimate(cfg, "config")


def weights_of_total(cfg: ModelConfig, total: int) -> WeightBytes:
    """`total` bytes, shared out as the estimate is, or evenly over layers where the config cannot be estimated."""
    given = f"given: {total / (1 << 30):,.1f} GiB"
    try:
        return estimate_weight_bytes(cfg).scaled(total, f"{given}, shared out as an estimate is")
    except ConfigError:
        even = WeightBytes((1,) * cfg.n_layer, 0, 0, False, True, "")
        return even.scaled(total, f"{given}, evenly over layers, as the config is too short for an estimate")


def weights_of_bits(cfg: ModelConfig, bits: Fraction) -> WeightBytes:
    """`bits` a parameter.

    Raises:
        ConfigError: as `estimate_weight_bytes`; the parameters are counted as there.
    """
    counted = [(tensor.name, tensor.rows * tensor.cols) for tensor in tensors_of(cfg, "config")]
    parameters = sum(n for _, n in counted)
    source = f"given: {float(bits):g} bits for each of {_large(parameters)} parameters"
    return _of_shapes(cfg, "config", counted, "").scaled(ceil(parameters * bits / 8), source)


def _estimate(cfg: ModelConfig, where: str, why: str = "") -> WeightBytes:
    storage, tensors = storage_of(cfg, where), list(tensors_of(cfg, where))
    parameters = _large(sum(tensor.rows * tensor.cols for tensor in tensors))
    stored = [(tensor.name, storage.nbytes(tensor)) for tensor in tensors]
    return _of_shapes(cfg, where, stored, f"estimated: {storage.label}, {parameters} parameters{why}")


def _of_shapes(cfg: ModelConfig, where: str, tensors: Iterable[tuple[str, int]], source: str) -> WeightBytes:
    layers, parts, _ = _sort(cfg, where, _hf_place, tensors)
    return _weight_bytes(layers, parts, not parts[_Part.MATRIX], True, source)


def _large(n: int) -> str:
    """A number in billions or millions."""
    return f"{n / 1e9:.1f} B" if n >= 10**9 else f"{n / 1e6:.1f} M"


def _of_gguf(path: Path, cfg: ModelConfig, kept: Kept | None) -> WeightBytes:
    file = open_gguf(path)
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"{path}: one of {show(parts)} parts; merge them first (llama-gguf-split --merge)")
    sizes = [(t.name, t.nbytes if kept is None else kept(t.type_name, t.shape)) for t in file.tensors.values()]
    return _from_headers(cfg, str(path), _gguf_place, sizes, 1)


def _of_safetensors(path: Path, cfg: ModelConfig, kept: Kept | None) -> WeightBytes:
    tensors = open_safetensors(path).values()
    files = {t.file for t in tensors}
    for file in files:
        of = re.search(r"-of-(\d{1,9})$", file.stem)
        if of and int(of[1]) > len(files):
            raise ConfigError(f"{file}: one of {int(of[1])} parts, of which {len(files)} are here; fetch the others")
    sizes = [(t.name, t.nbytes if kept is None else kept(t.dtype, t.shape)) for t in tensors]
    return _from_headers(cfg, str(path), _hf_place, sizes, len(files))


class _Part(Enum):
    TABLE = auto()  # the token embedding's matrix
    FRONT = auto()  # what else the first stage holds
    MATRIX = auto()  # the output matrix
    END = auto()  # what else the last stage holds
    OTHER = auto()  # not of the text model, or of MTP blocks that the config leaves out
    UNKNOWN = auto()


_Place: TypeAlias = _Part | int
"""A part, or a layer."""

_HF_PARTS: Mapping[str, _Part] = {
    "embed_tokens": _Part.TABLE,
    "embed_tokens_per_layer": _Part.FRONT,
    "per_layer_model_projection": _Part.FRONT,
    "per_layer_projection_norm": _Part.FRONT,
    "rotary_emb": _Part.FRONT,
    "norm": _Part.END,
    "lm_head": _Part.MATRIX,
}
_TOWER = re.compile(r"(visual|vision|audio|vit|embed_(vision|audio)|multi_?modal|mm)(_\w+)?")
"""The first part of a name in what wrapped checkpoints hold beside the text model."""
_GGUF_PARTS: Mapping[str, _Part] = {
    "token_embd": _Part.TABLE,
    "token_embd_norm": _Part.FRONT,
    "per_layer_token_embd": _Part.FRONT,
    "per_layer_model_proj": _Part.FRONT,
    "per_layer_proj_norm": _Part.FRONT,
    "rope_freqs": _Part.FRONT,
    "rope_factors_long": _Part.FRONT,
    "rope_factors_short": _Part.FRONT,
    "output_norm": _Part.END,
    "output": _Part.MATRIX,
}


def _hf_place(name: str, cfg: ModelConfig) -> _Place:
    """Where a tensor of a Hugging Face checkpoint belongs; what MTP blocks share is the first block's."""
    name = module_name(name)
    first = name.partition(".")[0]
    if first == "mtp" and cfg.n_layer == cfg.n_trunk:
        return _Part.OTHER
    if first in ("mtp", "layers"):
        layer = re.match(r"(mtp\.)?layers\.(\d{1,9})\.", name)
        at = int(layer[2]) if layer else 0
        return cfg.n_trunk + at if first == "mtp" else at if layer else _Part.UNKNOWN
    return _Part.OTHER if _TOWER.fullmatch(first) else _HF_PARTS.get(first, _Part.UNKNOWN)


def _gguf_place(name: str, cfg: ModelConfig) -> _Place:
    layer = re.match(r"blk\.(\d{1,9})\.", name)
    return int(layer[1]) if layer else _GGUF_PARTS.get(name.partition(".")[0], _Part.UNKNOWN)


def _sort(
    cfg: ModelConfig, where: str, place: Callable[[str, ModelConfig], _Place], tensors: Iterable[tuple[str, int]]
) -> tuple[list[int], dict[_Part, int], int]:
    """Bytes by layer and by part, and how many tensors were not recognised.

    Raises:
        ConfigError: a tensor of a layer that the config does not have.
    """
    layers, parts, unknown = [0] * cfg.n_layer, dict.fromkeys(_Part, 0), 0
    most = cfg.n_trunk + n_mtp(Fields(cfg.arch, cfg.hparams, where))
    for name, nbytes in tensors:
        at = place(name, cfg)
        if isinstance(at, int) and at >= most:
            raise _foreign(cfg, where, f"holds {show(name)}, but the config has {most} layers")
        if isinstance(at, _Part):
            parts[at] += nbytes
            unknown += at is _Part.UNKNOWN
        elif at < cfg.n_layer:
            layers[at] += nbytes
    return layers, parts, unknown


def _foreign(cfg: ModelConfig, where: str, what: str) -> ConfigError:
    return ConfigError(f"{where}: {what}; is it the checkpoint of this {cfg.arch} config, and whole?")


def _from_headers(
    cfg: ModelConfig,
    where: str,
    place: Callable[[str, ModelConfig], _Place],
    tensors: Iterable[tuple[str, int]],
    files: int,
) -> WeightBytes:
    """The bytes of tensors that have to be all of the model, as a plan from a part of it would be wrong."""
    layers, parts, unknown = _sort(cfg, where, place, tensors)
    tied = Fields(cfg.arch, cfg.hparams, where).flag("tie_word_embeddings")
    for il in range(cfg.n_trunk):
        if not layers[il]:
            raise _foreign(cfg, where, f"holds no tensor of layer {il}")
    for part, what in ((_Part.TABLE, "token embedding"), (_Part.END, "final norm"), (_Part.MATRIX, "output matrix")):
        if not parts[part] and not (part is _Part.MATRIX and tied):
            raise _foreign(cfg, where, f"holds no {what}")
    source = f"headers of {files} tensor file{'s' * (files > 1)}"
    if unknown:
        source += f", {unknown} unknown tensor{'s' * (unknown > 1)} of {parts[_Part.UNKNOWN]} B counted for the first stage"
    if cfg.n_layer > cfg.n_trunk and not any(layers[cfg.n_trunk :]):
        source += ", no MTP blocks there"
    return _weight_bytes(layers, parts, tied, False, source)


def _weight_bytes(layers: list[int], parts: Mapping[_Part, int], tied: bool, estimated: bool, source: str) -> WeightBytes:
    matrix = parts[_Part.TABLE] if tied else parts[_Part.MATRIX]
    front = parts[_Part.TABLE] + parts[_Part.FRONT] + parts[_Part.UNKNOWN]
    return WeightBytes(tuple(layers), front, matrix + parts[_Part.END], tied, estimated, source, matrix)
