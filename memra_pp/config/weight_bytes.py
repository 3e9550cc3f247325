"""How many bytes a model's weights take, layer by layer, from tensor headers or, without tensor files, from the config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from ..errors import ConfigError
from .families import n_mtp
from .fields import MAX_VOCAB, Fields, show
from .gguf_file import open_gguf
from .model import ModelConfig
from .safetensors_file import open_safetensors
from .weight_estimate import Tensor, tensors_of


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


def read_weight_bytes(path: str | PathLike[str], cfg: ModelConfig) -> WeightBytes:
    """The bytes of the checkpoint at `path`, whose config is `cfg`: a GGUF file, a directory with `*.safetensors`, one such
    file, or a `config.json` (the files beside it count). Without tensor files: the estimate. Only headers are read.

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
        return _of_gguf(path, cfg)
    place = path.parent if path.name == "config.json" else path
    if path.suffix == ".safetensors" or (place.is_dir() and any(place.glob("*.safetensors"))):
        return _of_safetensors(place, cfg)
    return _estimate(cfg, str(path), f", no tensor files {'in' if path.is_dir() else 'beside'} {path.name or path}")


def estimate_weight_bytes(cfg: ModelConfig) -> WeightBytes:
    """The bytes that the config's shapes, `dtype` (bf16 where none is named) and `quantization_config` come to.

    Raises:
        ConfigError: a field that a shape needs is missing or bad; it is named.
    """
    return _estimate(cfg, "config")


def _estimate(cfg: ModelConfig, where: str, why: str = "") -> WeightBytes:
    storage = _storage(cfg, where)
    tensors = ((tensor.name, storage.nbytes(tensor)) for tensor in tensors_of(cfg, where))
    layers, parts, _ = _sort(cfg, where, _hf_place, tensors)
    tied = not parts[_Part.MATRIX]
    return _weight_bytes(layers, parts, tied, True, f"estimated: {storage.label}{why}")


_ELEMENTS: Mapping[str, tuple[str, int]] = {
    "bfloat16": ("bf16", 2),
    "float16": ("f16", 2),
    "float32": ("f32", 4),
    "float64": ("f64", 8),
}
"""A config's `dtype` -> its short name and bytes an element."""


@dataclass(frozen=True)
class _Storage:
    """How a checkpoint stores its elements: `element` bytes each, but packable matrices as `packed(rows, cols)` bytes.

    `only` is a part that a packed tensor's name has to hold; the modules in `kept` are not packed.
    """

    label: str
    element: int
    packed: Callable[[int, int], int] | None = None
    only: str = ""
    kept: frozenset[str] = frozenset()

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor, scales included."""
        if self.packed is None or not tensor.packable or self.only not in tensor.name or self._keeps(tensor.name):
            return tensor.rows * tensor.cols * self.element
        return self.packed(tensor.rows, tensor.cols)

    def _keeps(self, name: str) -> bool:
        """Whether `kept` names the module or a module around it; `*` stands for a layer's number."""
        exact = _module(name).removesuffix(".weight").split(".")
        starred = ["*" if part.isdigit() else part for part in exact]
        ends = [(a, b) for a in range(len(exact)) for b in range(a + 1, len(exact) + 1)]
        return bool(self.kept) and any(".".join(parts[a:b]) in self.kept for parts in (exact, starred) for a, b in ends)


def _module(name: str) -> str:
    """A tensor's or module's name without the wrappers that checkpoints differ in, `model.` and `language_model.`."""
    while name.startswith(("model.", "language_model.")):
        name = name.partition(".")[2]
    return name


def _storage(cfg: ModelConfig, where: str) -> _Storage:
    """How the config says that the weights are stored: `dtype` (bf16 where none is named) and `quantization_config`.

    A quantisation that is not known here counts as none, which over-estimates; the label says so.

    Raises:
        ConfigError: a field of the wrong type or range, named.
    """
    f = Fields(cfg.arch, cfg.hparams, where)
    name = "dtype" if f.given("dtype") else "torch_dtype"
    dtype = f.raw.get(name) or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _ELEMENTS:
        raise f.bad(name, f"one of {', '.join(_ELEMENTS)}")
    label, element = _ELEMENTS[dtype.removeprefix("torch.")]
    quant = f.inside("quantization_config")
    if not quant.raw:
        return _Storage(label, element)
    listed = quant.raw.get("modules_to_not_convert") or ()
    if not isinstance(listed, (list, tuple)) or not all(isinstance(module, str) for module in listed):
        raise quant.bad("modules_to_not_convert", "a list of module names")
    kept = frozenset(_module(module) for module in listed)
    match quant.raw.get("quant_method"):
        case "mxfp4":
            return _Storage(f"{label}, experts mxfp4", element, _mxfp4, "experts.", kept)
        case "fp8":
            return _Storage(f"{label}, matrices fp8", element, _fp8(quant), kept=kept)
        case "awq" | "gptq" as method:
            bits = quant.count("bits", most=8)
            return _Storage(f"{label}, matrices {method} {bits} bit", element, _grouped(quant, bits), kept=kept)
        case other:
            return _Storage(f"{label} (quantisation {show(other)} is not known here, so this is too much)", element)


def _mxfp4(rows: int, cols: int) -> int:
    """32 elements take 16 bytes and a scale of one."""
    return rows * -(-cols // 32) * 17


def _fp8(quant: Fields) -> Callable[[int, int], int]:
    """A byte an element, and an f32 scale a block of `weight_block_size`, or a row."""
    block = quant.raw.get("weight_block_size") or [1, MAX_VOCAB]
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise quant.bad("weight_block_size", "a list of two whole numbers above 0")
    return lambda rows, cols: rows * cols + 4 * -(-rows // block[0]) * -(-cols // block[1])


def _grouped(quant: Fields, bits: int) -> Callable[[int, int], int]:
    """`bits` an element, an f16 scale and a zero of `bits` a group of a row, an i32 group number a column (GPTQ)."""
    size = quant.count("group_size", least=-1)

    def packed(rows: int, cols: int) -> int:
        groups = rows * (-(-cols // size) if size > 0 else 1)
        return -(-(rows * cols + groups) * bits // 8) + 2 * groups + 4 * cols

    return packed


def _of_gguf(path: Path, cfg: ModelConfig) -> WeightBytes:
    file = open_gguf(path)
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"{path}: one of {show(parts)} parts; merge them first (llama-gguf-split --merge)")
    return _from_headers(cfg, str(path), _gguf_place, ((t.name, t.nbytes) for t in file.tensors.values()), 1)


def _of_safetensors(path: Path, cfg: ModelConfig) -> WeightBytes:
    tensors = open_safetensors(path).values()
    files = {t.file for t in tensors}
    for file in files:
        of = re.search(r"-of-(\d{1,9})$", file.stem)
        if of and int(of[1]) > len(files):
            raise ConfigError(f"{file}: one of {int(of[1])} parts, of which {len(files)} are here; fetch the others")
    return _from_headers(cfg, str(path), _hf_place, ((t.name, t.nbytes) for t in tensors), len(files))


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
    name = _module(name)
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
