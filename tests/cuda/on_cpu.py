"""CUDA C++ kernels executed on the CPU: `build` compiles them with `fibers.h`, `Kernels` launches them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Argument = np.ndarray[Any, Any] | np.generic
"""Of a launch: an array whose address is passed, or a scalar of exactly the parameter's type (an address: `np.uint64`)."""

_HERE = Path(__file__).parent
_COMPILER = ("g++", "-std=c++17")
_FLAGS = (
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
)
_SANITIZERS = {
    # Without the section's name, g++ watches no variable that is in one.
    "address": ("-fsanitize=address", "-fsanitize-sections=fibers_shared"),
    "undefined": ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
}
_SANITIZERS["both"] = _SANITIZERS["address"] + _SANITIZERS["undefined"]
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(')
_ONE_AT_A_TIME = threading.Lock()


class KernelError(Exception):
    """A source that does not compile, or a launch that was refused or did not end; the message says why."""


def kernel_names(sources_dir: Path, defines: Iterable[str] = ()) -> list[str]:
    """The `extern "C"` kernels of `kernels.cu` and all that it includes, in order."""
    # Read after preprocessing, so that it does not matter how macros spell a kernel.
    options = ("-E", "-P", "-x", "c++", "-DCUDA_ON_CPU=1", "-D__launch_bounds__(...)=", *_source_options(sources_dir, defines))
    return list(dict.fromkeys(_KERNEL.findall(_compile(*options, str(sources_dir / "kernels.cu")))))


def build(
    sources_dir: Path, out_dir: Path, *, sanitize: str | None = None, ucontext: bool = False, defines: Iterable[str] = ()
) -> Path:
    """Compiles `sources_dir/kernels.cu` with every kernel exported, and returns the library in `out_dir`.

    What has been built of the same sources and options is returned as it is. `sanitize` is "address", "undefined" or "both":
    only a process with `sanitizer_environment` can load such a library. `ucontext` chooses the portable switch of stacks.
    Raises `KernelError` with the compiler's words.
    """
    defines = tuple(defines)
    exports = "".join(f"FIBERS_EXPORT({name})\n" for name in kernel_names(sources_dir, defines))
    options = [*_FLAGS, *_source_options(sources_dir, defines), "-include", str(_HERE / "fibers.h"), "-Wno-unknown-pragmas"]
    if sanitize is not None:
        # With all checks in, optimising takes the compiler longer than it saves those who run it once.
        options += [*_SANITIZERS[sanitize], "-O0"]
    if ucontext:
        options += ["-DFIBERS_UCONTEXT"]
    library = out_dir / f"kernels-{_digest(sources_dir, options)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=out_dir) as building:
            source, built = Path(building, "kernels.cpp"), Path(building, "kernels.so")
            source.write_text(f'#include "kernels.cu"\n{exports}')
            _compile(*options, str(source), "-o", str(built))
            built.replace(library)
    return library


def sanitizer_environment(sanitize: str) -> dict[str, str]:
    """The environment of a process that is to load a library built with `sanitize`."""
    if sanitize == "undefined":
        return {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    # Its allocator has to be the process's from the start; what Python leaves behind at its end is not a finding.
    preload = _compile("-print-file-name=libasan.so").strip()
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return {**os.environ, "LD_PRELOAD": preload, **options}


class Kernels:
    """The kernels of a library that `build` made."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fibers_error.restype = ctypes.c_char_p

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Argument],
        shared: int = 0,
        order: int = 0,
    ) -> None:
        """Runs kernel `name` on `grid` blocks of `block` threads (one to three sizes each) and returns when it has ended.

        `args` are checked against the kernel's parameters; arrays are C-contiguous. `shared` is the size of the dynamic shared
        memory in bytes. `order` is that in which blocks, warps and lanes take turns: 0 ascending, 1 reversed, 2 shuffled.
        Raises `KernelError` if arguments and parameters differ, if CUDA would refuse the launch, or if threads wait forever.
        """
        letters = self._parameters(name)
        if len(args) != len(letters):
            raise KernelError(f"{name} takes {len(letters)} arguments, not {len(args)}")
        values = [_value(letter, arg) for letter, arg in zip(letters, args, strict=True)]
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        sizes = [ctypes.c_uint(size) for size in (*_three(grid), *_three(block))]
        run = getattr(self._library, f"{name}__cpu")
        with _ONE_AT_A_TIME:
            if run(addresses, *sizes, ctypes.c_size_t(shared), ctypes.c_int(order)):
                raise KernelError(f"{name}: {self._library.fibers_error().decode()}")

    def _parameters(self, name: str) -> str:
        """A letter for the type of each parameter: NumPy's, `P` for a pointer."""
        try:
            letters = getattr(self._library, f"{name}__parameters")
        except AttributeError:
            raise KernelError(f"there is no kernel {name}") from None
        letters.restype = ctypes.c_char_p
        return str(letters().decode())


def _value(letter: str, arg: Argument) -> np.ndarray[Any, Any]:
    """An array that holds what the kernel gets for `arg`."""
    if letter == "P" and isinstance(arg, np.ndarray):
        if not arg.flags.c_contiguous:
            raise KernelError(f"an array of shape {arg.shape} and strides {arg.strides} is not contiguous")
        return np.array(arg.ctypes.data, np.uint64)
    if not isinstance(arg, np.generic) or arg.dtype != np.dtype(letter):
        raise KernelError(f"{arg!r} for a parameter of type {np.dtype(letter)}")
    return np.array(arg)


def _three(sizes: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes + (1,) * (3 - len(sizes))


def _source_options(sources_dir: Path, defines: Iterable[str]) -> list[str]:
    return [f"-I{sources_dir}", *(f"-D{define}" for define in defines)]


def _digest(sources_dir: Path, options: Sequence[str]) -> str:
    files = sorted([*_HERE.glob("*.h"), *sources_dir.glob("*.cu"), *sources_dir.glob("*.cuh")])
    content = [f"{path}\n{path.read_text()}" for path in files]
    return hashlib.sha256("\n".join([*options, *content]).encode()).hexdigest()[:16]


def _compile(*options: str) -> str:
    """What g++ says; its warnings go where this process's do."""
    done = subprocess.run([*_COMPILER, *options], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(done.stderr)
    sys.stderr.write(done.stderr)
    return done.stdout
