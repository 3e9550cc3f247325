"""Opens GGUF files: metadata and where each tensor lies, with every length checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The file is mapped,
not read; arrays are decoded when they are first used, since a vocabulary of 262,144 strings is most of the work.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, overload

from ..errors import ConfigError
from .fields import show
from .ggml_types import GGML_TYPES

MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 20
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_STRING_BYTES = 65535, 256, 64 << 20
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types with a fixed size, as `struct` and `array` codes."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a GGUF file. `shape` is in NumPy's order (rows first); `offset` is in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """The ggml type: `F32`, `Q4_K`, ..."""
        return GGML_TYPES[self.type_id].name


class GgufArray(Sequence[Any]):
    """A metadata array, decoded at first use."""

    def __init__(self, path: Path, key: str, kind: int, count: int, data: memoryview) -> None:
        self._path, self._key, self._kind, self._count, self._data = path, key, kind, count, data

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        return self.values[at]

    def __repr__(self) -> str:
        return f"GgufArray({self._key}, {self._count} values)"

    @cached_property
    def values(self) -> Sequence[Any]:
        """All values.

        Raises:
            ConfigError: a string is not UTF-8.
        """
        if self._kind == _STRING:
            return self._strings()
        out = array(_SCALARS[self._kind], self._data.tobytes())
        if sys.byteorder == "big":
            out.byteswap()
        return [b != 0 for b in out] if self._kind == _BOOL else out

    def _strings(self) -> list[str]:
        data, unpack, pos, out = self._data.tobytes(), _U64.unpack_from, 0, []
        try:
            for _ in range(self._count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                out.append(data[start:pos].decode())
        except UnicodeDecodeError as e:
            raise ConfigError(f"{self._path}: {self._key}[{len(out)}] is not UTF-8 ({e.reason}); the file is damaged") from e
        return out


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file. Metadata values are scalars, strings and `GgufArray`s."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    view: memoryview

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, mapped from the file."""
        info = self.tensors[name]
        return self.view[info.offset : info.offset + info.nbytes]


def open_gguf(path: str | PathLike[str]) -> GgufFile:
    """Opens a GGUF file and checks that all it says lies within it.

    Raises:
        ConfigError: the file cannot be read, is no GGUF of version 2 or 3, is truncated or corrupt; says where.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(4)
            if head != b"GGUF":
                raise ConfigError(f"{path}: not a GGUF file (it starts with {head!r}, a GGUF with b'GGUF')")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}); give the path of a .gguf file") from e
    return _Reader(path, memoryview(mapped)).read()


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path, self.view, self.size, self.pos = path, view, len(view), 4

    def fail(self, what: str) -> NoReturn:
        raise ConfigError(f"{self.path}: at byte {self.pos}: {what}; the file is damaged or incomplete, fetch it again")

    def read(self) -> GgufFile:
        version = self.number(_U32)
        if version not in (2, 3):
            big = ", big-endian" if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3) else ""
            raise ConfigError(f"{self.path}: GGUF version {version}{big} is not read here; convert it to version 3")
        n_tensors, n_keys = self.number(_U64), self.number(_U64)
        if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
            self.fail(f"{n_keys} metadata keys and {n_tensors} tensors, more than {MAX_KEYS} and {MAX_TENSORS}")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.text(MAX_KEY_BYTES, "a metadata key")
            if key in metadata:
                self.fail(f"metadata key {show(key)} is there twice")
            metadata[key] = self.value(key)
        tensors = self.tensors(n_tensors, metadata.get("general.alignment", 32))
        return GgufFile(self.path, version, metadata, tensors, self.view)

    def skip(self, n: int, what: str) -> int:
        """The position of `n` bytes, which the cursor passes."""
        start = self.pos
        if n > self.size - start:
            self.fail(f"{what} of {n} bytes in the {self.size - start} left")
        self.pos = start + n
        return start

    def number(self, form: struct.Struct) -> int:
        return int(form.unpack_from(self.view, self.skip(form.size, "a number"))[0])

    def text(self, most: int, what: str) -> str:
        n = self.number(_U64)
        if n > most:
            self.fail(f"{what} of {n} bytes, more than {most}")
        start = self.skip(n, what)
        try:
            return str(self.view[start : self.pos], "utf-8")
        except UnicodeDecodeError as e:
            self.fail(f"{what} is not UTF-8 ({e.reason})")

    def value(self, key: str) -> Any:
        kind = self.number(_U32)
        if kind == _STRING:
            return self.text(MAX_STRING_BYTES, f"the string {show(key)}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.fail(f"metadata key {show(key)} has the unknown value type {kind}")
        form = struct.Struct("<" + _SCALARS[kind])
        found = form.unpack_from(self.view, self.skip(form.size, f"the value of {show(key)}"))[0]
        return found != 0 if kind == _BOOL else found

    def array(self, key: str) -> GgufArray:
        kind, count = self.number(_U32), self.number(_U64)
        start = self.pos
        if kind == _STRING:
            self.skip_strings(key, count)
        elif kind in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[kind]), f"the array {show(key)}")
        else:
            self.fail(f"the array {show(key)} has elements of type {kind}; scalars and strings are read")
        return GgufArray(self.path, key, kind, count, self.view[start : self.pos])

    def skip_strings(self, key: str, count: int) -> None:
        view, unpack, pos, last = self.view, _U64.unpack_from, self.pos, self.size - 8
        if count > (self.size - pos) // 8:
            self.fail(f"{count} strings in {show(key)}, more than the {self.size - pos} bytes left can hold")
        for at in range(count):
            if pos > last:
                self.fail(f"string {at} of {show(key)} begins past the end")
            pos += 8 + unpack(view, pos)[0]
        if pos > self.size:
            self.fail(f"the strings of {show(key)} end past the end")
        self.pos = pos

    def tensors(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail(f"general.alignment={show(alignment)} is not a power of two up to {MAX_ALIGNMENT}")
        found = [self.tensor(alignment) for _ in range(count)]
        start = -(-self.pos // alignment) * alignment
        out: dict[str, TensorInfo] = {}
        end, before = start, ""
        for info in sorted(found, key=lambda t: t.offset):
            at = start + info.offset
            if at < end:
                self.fail(f"tensors {show(before)} and {show(info.name)} overlap")
            end, before = at + info.nbytes, info.name
            if end > self.size:
                self.fail(f"tensor {show(info.name)} ends at byte {end} of {self.size}")
            out[info.name] = TensorInfo(info.name, info.shape, info.type_id, at, info.nbytes)
        if len(out) != count:
            self.fail(f"{count - len(out)} tensor names are there twice")
        return out

    def tensor(self, alignment: int) -> TensorInfo:
        """One tensor's entry; its offset counts from the start of the data section."""
        name = self.text(MAX_NAME_BYTES, "a tensor name")
        n_dims = self.number(_U32)
        if not 1 <= n_dims <= MAX_DIMS:
            self.fail(f"tensor {show(name)} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
        dims = [self.number(_U64) for _ in range(n_dims)]
        type_id, offset = self.number(_U32), self.number(_U64)
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            self.fail(f"tensor {show(name)} has the unknown ggml type {type_id}")
        if min(dims) < 1 or dims[0] % kind.block:
            self.fail(f"tensor {show(name)} has the shape {dims}; {kind.name} packs {kind.block} elements a block")
        if offset % alignment:
            self.fail(f"tensor {show(name)} lies at {offset}, not a multiple of {alignment}")
        return TensorInfo(name, tuple(reversed(dims)), type_id, offset, prod(dims) // kind.block * kind.nbytes)
