"""A checkpoint's tensors under Hugging Face names, read from a mapped file on demand: as f32, or as they are kept."""

from __future__ import annotations

import itertools
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..config.ggml_types import GGML_TYPES
from ..config.gguf import config_of
from ..config.gguf_file import GgufFile, TensorInfo, open_gguf
from ..config.hf import read_hf
from ..config.safetensors_file import SafeTensor, open_safetensors
from ..errors import ConfigError, InputError
from .stored import F32, KEPT, U8, Stored, kept_bytes, viewed, widened

CHUNK_BYTES = 4 << 20
"""f32 bytes dequantised at a time by `tensor` and `matrix`, which bounds their scratch memory."""

PLUS_ONE = re.compile(r"gemma3(_text)?|qwen3_next|qwen3_5(_moe)?(_text)?|step3p[57](_text)?")
"""`model_type`s whose RMS norms multiply by `1 + w` in the transformers library (Qwen's gated norm aside)."""


class Weights(ABC):
    """The tensors of one checkpoint, each read when it is asked for.

    `norm_offset` is what a forward adds to the weights of RMS norms that multiply by `1 + w`: 1.0 where the file holds
    `w`, 0.0 where it holds `1 + w` (GGUF) or the family has no such norms. `bytes_read` counts the tensor bytes (as
    stored) read so far.
    """

    cfg: ModelConfig
    norm_offset: float
    path: Path
    bytes_read: int = 0

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the checkpoint has the tensor (a tied `lm_head.weight` is not there)."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, rows first.

        Raises:
            ConfigError: no such tensor; it and the file are named.
        """

    @abstractmethod
    def stored_as(self, name: str) -> str:
        """The tensor's type in the file: `BF16`, `Q8_0`, ...

        Raises:
            ConfigError: no such tensor; it and the file are named.
        """

    @abstractmethod
    def _rows(self, name: str) -> tuple[U8, Callable[[U8], F32]]:
        """The stored bytes `[rows, row_bytes]`, mapped, and what turns some of them into f32 `[rows, K]`."""

    def tensor(self, name: str) -> F32:
        """The whole tensor, f32, C-contiguous and the caller's own.

        Raises:
            ConfigError: no such tensor, or stored in a type that cannot be read.
        """
        shape = self.shape(name)
        if not prod(shape):
            return np.empty(shape, np.float32)
        out = np.empty((prod(shape[:-1]), shape[-1] if shape else 1), np.float32)
        _fill(out, self._read(*self._rows(name), _chunk_rows(out.shape[1])))
        return out.reshape(shape)

    def rows(self, name: str, ids: Sequence[int] | NDArray[np.integer[Any]]) -> F32:
        """Rows `ids` of a matrix, f32 `[len(ids), K]`; only those are read.

        Raises:
            ConfigError: no such tensor, or stored in a type that cannot be read.
            InputError: a row that is not there.
        """
        data, decode = self._rows(name)
        at = np.asarray(ids, np.int64).reshape(-1)
        outside = at[(at < 0) | (at >= len(data))]
        if len(outside):
            raise InputError(f"row {outside[0]} of {name}: it has rows 0 to {len(data) - 1}; give token ids of this model")
        return self._decode(data[at], decode)

    def matrix(self, name: str) -> Stored:
        """A whole matrix in the form that it is kept in (see `stored`): a view of the file where that is what lies there.

        Raises:
            ConfigError: no such tensor, not of two dimensions, or stored in a type that cannot be read.
        """
        shape = self.shape(name)
        if len(shape) != 2 or not prod(shape):
            raise ConfigError(f"{self.path}: {name} is {shape}: it is no matrix; use tensor")
        kind, (rows, cols) = self.stored_as(name), shape
        if kind in KEPT and self._rows(name)[0].nbytes == kept_bytes(kind, shape):
            return next(self.pieces(name, rows))
        pieces = self.pieces(name, _chunk_rows(cols))
        first = next(pieces)
        out = np.empty((rows, *first.shape[1:]), first.dtype)
        _fill(out, itertools.chain([first], pieces))
        return out

    def pieces(self, name: str, rows: int) -> Iterator[Stored]:
        """`matrix` in pieces of at most so many rows, in order.

        Raises:
            ConfigError: as `matrix`.
        """
        data, decode = self._rows(name)
        kind = self.stored_as(name)
        return self._read(data, KEPT[kind][1] if kind in KEPT else decode, rows)

    def _read(self, data: U8, decode: Callable[[U8], Stored], rows: int) -> Iterator[Stored]:
        """What `decode` makes of stored rows, so many at a time."""
        for at in range(0, len(data), rows):
            yield self._decode(data[at : at + rows], decode)

    def _decode(self, data: U8, decode: Callable[[U8], Stored]) -> Stored:
        self.bytes_read += data.nbytes
        return np.ascontiguousarray(decode(data))

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self.path}: holds no tensor {name}; is it the checkpoint of {self.cfg.arch}, and whole?")


def _chunk_rows(cols: int) -> int:
    """How many rows of `cols` weights are dequantised at a time."""
    return max(1, CHUNK_BYTES // (4 * cols))


def _fill(out: Stored, pieces: Iterable[Stored]) -> None:
    """Writes pieces one below another."""
    at = 0
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)


def open_weights(path: str | PathLike[str]) -> Weights:
    """Opens a `.gguf` file, a directory with `config.json` and `*.safetensors`, or one `.safetensors` file beside its
    `config.json`. Nothing but headers is read.

    Raises:
        ConfigError: it is none of these, or corrupt, or of an architecture whose tensor names are not known.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufWeights(path)
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return SafetensorsWeights(path)
    found = "is another kind of file" if path.exists() else "does not exist"
    raise ConfigError(f"{path}: {found}; give a .gguf file, or a directory with config.json and *.safetensors")


class SafetensorsWeights(Weights):
    """Weights of safetensors files, F16, BF16, F32 or F64."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cfg = read_hf(path if path.is_dir() else path.parent)
        self.norm_offset = 1.0 if PLUS_ONE.fullmatch(self.cfg.arch) else 0.0
        self._tensors = open_safetensors(path)
        self._files: dict[Path, U8] = {}

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def stored_as(self, name: str) -> str:
        return self._info(name).dtype

    def _rows(self, name: str) -> tuple[U8, Callable[[U8], F32]]:
        info = self._info(name)
        if info.dtype not in _DECODE:
            raise ConfigError(f"{self.path}: {name} is stored as {info.dtype}; {', '.join(_DECODE)} are read")
        if info.file not in self._files:
            self._files[info.file] = _map(info.file)
        data = self._files[info.file][info.offset : info.offset + info.nbytes]
        return data.reshape(prod(info.shape[:-1]), -1), _DECODE[info.dtype]

    def _info(self, name: str) -> SafeTensor:
        info = self._find(name)
        if info is None:
            raise self._missing(name)
        return info

    def _find(self, name: str) -> SafeTensor | None:
        """`name`, or as a wrapped checkpoint spells it, or one saved without its head."""
        inner = name.removeprefix("model.")
        for spelled in (name, f"language_model.{name}", f"model.language_model.{inner}", inner):
            if spelled in self._tensors:
                return self._tensors[spelled]
        return None


def _map(file: Path) -> U8:
    try:
        with file.open("rb") as f:
            return np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from e


_DECODE: Mapping[str, Callable[[U8], F32]] = {
    "F32": lambda data: viewed(data, np.dtype("<f4")),
    "F16": lambda data: viewed(data, np.dtype("<f2")).astype(np.float32),
    "BF16": lambda data: widened(viewed(data, np.dtype("<u2"))),
    "F64": lambda data: viewed(data, np.dtype("<f8")).astype(np.float32),
}

_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_QWEN_NAMES = {**_BLOCK_NAMES, "post_attention_layernorm": "ffn_norm"}
GGUF_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma3_text": {
        **_BLOCK_NAMES,
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "qwen2": _QWEN_NAMES,
    "qwen3": _QWEN_NAMES,
}
"""Names within a block, Hugging Face -> llama.cpp, of the families that llama.cpp stores as they are (it permutes the
rows of q and k of its `llama` architecture)."""
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GgufWeights(Weights):
    """Weights of a GGUF file, dequantised by the `gguf` package."""

    norm_offset = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: GgufFile = open_gguf(path)
        self.cfg = config_of(self._file)
        if self.cfg.arch not in GGUF_NAMES:
            known = ", ".join(GGUF_NAMES)
            raise ConfigError(f"{path}: tensors of a {self.cfg.arch} GGUF are not read; read here: {known}; use safetensors")
        parts = self._file.metadata.get("split.count", 1)
        if parts != 1:
            raise ConfigError(f"{path}: one of {parts} parts; merge them first (llama-gguf-split --merge)")

    def has(self, name: str) -> bool:
        return self._spelled(name) in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def stored_as(self, name: str) -> str:
        return self._info(name).type_name

    def _rows(self, name: str) -> tuple[U8, Callable[[U8], F32]]:
        info = self._info(name)
        data = np.frombuffer(self._file.data(info.name), np.uint8).reshape(prod(info.shape[:-1]), -1)
        return data, _dequantiser(self.path, info)

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(self._spelled(name))
        if info is None:
            raise self._missing(name)
        return info

    def _spelled(self, name: str) -> str:
        """llama.cpp's name of a tensor; "" for one it has no name for."""
        stem, _, kind = name.rpartition(".")
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{kind}"
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        block = GGUF_NAMES[self.cfg.arch].get(match[2], "") if match else ""
        return f"blk.{match[1]}.{block}.{kind}" if match and block else ""


def _dequantiser(path: Path, info: TensorInfo) -> Callable[[U8], F32]:
    """`gguf.quants.dequantize` for the tensor's type, without its split into 16 rows at a time, most of its cost."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as e:
        raise ConfigError(f"{path}: GGUF tensors need the gguf package; pip install 'memra-pp[gguf]'") from e
    kind = GGML_TYPES[info.type_id].name
    blocks = getattr(quants, kind, None)

    def decode(data: U8) -> F32:
        try:
            if blocks is None:
                plain: F32 = quants.dequantize(data, GGMLQuantizationType(info.type_id))
                return plain
            blocks.init_grid()
            rows: F32 = blocks.dequantize_rows(data)
            return rows
        except (NotImplementedError, ValueError) as e:
            raise ConfigError(f"{path}: {info.name} is stored as {kind}, which cannot be dequantised ({e})") from e

    return decode
