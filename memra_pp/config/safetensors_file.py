"""Reads the headers of safetensors checkpoints: where each tensor lies, with every length checked before it is used.

Format: https://github.com/huggingface/safetensors, a little-endian u64 header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import ConfigError
from .fields import show

MAX_HEADER = 100_000_000
"""Bytes; the bound of the reference implementation."""
INDEX = "model.safetensors.index.json"

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a checkpoint: `shape` rows first, `offset` in bytes from the start of `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int


def open_safetensors(path: str | PathLike[str]) -> dict[str, SafeTensor]:
    """The tensors of a `.safetensors` file, or of a directory: those that `model.safetensors.index.json` lists, or else
    those of every `*.safetensors` in it. Only headers are read.

    Raises:
        ConfigError: nothing there, or a header or the index is corrupt, contradicts the file or names one elsewhere.
    """
    path = Path(path)
    if not path.is_dir():
        return _merge([path])
    index = path / INDEX
    if index.is_file():
        return _indexed(path, index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path}: holds no {INDEX} and no *.safetensors; give a checkpoint's directory")
    return _merge(files)


def _indexed(directory: Path, index: Path) -> dict[str, SafeTensor]:
    raw = _json(index, _read(index, MAX_HEADER)[0])
    listed = raw.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(f"{index}: weight_map={show(listed)} is not an object of tensor names and file names")
    for name, file in listed.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0\ud800-\udfff]+\.safetensors", file):
            raise ConfigError(f"{index}: {show(name)} is in {show(file)}, not a *.safetensors file of this directory")
    found = _merge([directory / file for file in sorted(set(listed.values()))])
    for name, file in listed.items():
        if name not in found or found[name].file.name != file:
            raise ConfigError(f"{index}: says that {show(name)} is in {file}, which does not hold it; fetch both again")
    return {name: found[name] for name in listed}


def _merge(files: Iterable[Path]) -> dict[str, SafeTensor]:
    out: dict[str, SafeTensor] = {}
    for file in files:
        for name, info in _header(file).items():
            if name in out:
                raise ConfigError(f"{file}: tensor {show(name)} is in {out[name].file.name} too; leave one of the files")
            out[name] = info
    return out


def _header(file: Path) -> dict[str, SafeTensor]:
    head, total = _read(file, 8)
    size = int.from_bytes(head, "little")
    if size > MAX_HEADER:
        raise ConfigError(f"{file}: a header of {size} bytes, more than {MAX_HEADER}; not a safetensors file")
    left = total - 8 - size
    if left < 0:
        raise ConfigError(f"{file}: the header of {size} bytes is cut short; fetch the file again")
    raw = _json(file, _read(file, 8 + size)[0][8:])
    raw.pop("__metadata__", None)
    found = sorted((_tensor(file, name, entry, left, 8 + size) for name, entry in raw.items()), key=lambda t: t.offset)
    for a, b in pairwise(found):
        if a.offset + a.nbytes > b.offset:
            raise ConfigError(f"{file}: tensors {show(a.name)} and {show(b.name)} overlap; fetch the file again")
    return {t.name: t for t in found}


def _tensor(file: Path, name: str, entry: Any, left: int, start: int) -> SafeTensor:
    """One entry of a header whose data section begins at byte `start` and has `left` bytes."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{file}: {show(name)}={show(entry)} is not a tensor's entry")
    dtype, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ConfigError(f"{file}: {show(name)} has dtype {show(dtype)}, not one of {', '.join(DTYPE_BYTES)}")
    if not _wholes(shape) or len(shape) > 8:
        raise ConfigError(f"{file}: {show(name)} has shape {show(shape)}, not a list of whole numbers")
    if not _wholes(ends) or len(ends) != 2 or not ends[0] <= ends[1] <= left:
        raise ConfigError(f"{file}: {show(name)} has data_offsets {show(ends)}, not a range in the {left} data bytes")
    nbytes = ends[1] - ends[0]
    if prod(shape) * DTYPE_BYTES[dtype] != nbytes:
        raise ConfigError(f"{file}: {show(name)} of {dtype} {shape} cannot take {nbytes} bytes; fetch the file again")
    return SafeTensor(name, tuple(shape), dtype, file, start + ends[0], nbytes)


def _wholes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file}: its header is not JSON ({e}); fetch the file again") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: its header is {show(raw)}, not a JSON object")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name is there twice")
    return out


def _read(file: Path, n: int) -> tuple[bytes, int]:
    """The first `n` bytes (or what is there) and the file's size."""
    try:
        with file.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            return f.read(min(n, size)), size  # room is made for all that is asked for
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror}); give a checkpoint's file or directory") from e
