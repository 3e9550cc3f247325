"""`cubin`: the kernels compiled for one architecture by NVRTC, once, and kept on disk.

NVRTC is called directly: CuPy's own compile step appends `-ftz=true`, and the last such option wins, which changes results.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from ...errors import ConfigError

SOURCES = Path(__file__).parent / "src"
MAIN = "kernels.cu"
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""IEEE arithmetic, and no product fused with a sum unless the source says so: the bits of the CPU kernels."""
INSTALL = "install memra-pp[cuda12] or memra-pp[cuda13], whichever the driver supports"


def cubin(arch: str) -> Path:
    """The kernels' cubin for an architecture, such as `sm_90`, compiled unless it is there already.

    It is kept in `$XDG_CACHE_HOME/memra_pp` (`~/.cache/memra_pp`), named by the sources, the options, the architecture and the
    compiler's version.

    Raises:
        ConfigError: NVRTC or CUDA's headers are not installed, or the sources do not compile; the message has its log.
    """
    nvrtc = _nvrtc()
    options = (*OPTIONS, f"-arch={arch}", f"-I{SOURCES}", f"-I{_headers()}")
    key = hashlib.sha256(repr((nvrtc.getVersion(), options)).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    kept = _cache_dir() / f"{arch}-{key.hexdigest()[:32]}.cubin"
    if not kept.exists():
        _write(kept, _compiled(nvrtc, options))
    return kept


def _compiled(nvrtc: Any, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram((SOURCES / MAIN).read_text(), MAIN, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise ConfigError(f"the CUDA kernels do not compile ({error}):\n{nvrtc.getProgramLog(program)}") from error
        code: bytes = nvrtc.getCUBIN(program)
        return code + b"\0"  # CuPy takes the last byte for the end of a string: it belongs to the program headers
    finally:
        nvrtc.destroyProgram(program)


def _nvrtc() -> Any:
    """CuPy's bindings of NVRTC, which need no driver.

    Raises:
        ConfigError: CuPy or NVRTC is not installed.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"the CUDA backend needs CuPy and NVRTC ({error}): {INSTALL}") from error
    return nvrtc


def _headers() -> Path:
    """Where CUDA's headers are: in the wheel of its runtime, or in a toolkit named by `CUDA_HOME` or `CUDA_PATH`."""
    found = importlib.util.find_spec("nvidia")
    wheels = [Path(root) for root in (found.submodule_search_locations or ())] if found is not None else []
    places = [wheel / name / "include" for wheel in wheels for name in ("cuda_runtime", "cu13")]
    places += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for place in places:
        if (place / "cuda_fp16.h").exists():
            return place
    raise ConfigError(f"cuda_fp16.h is in none of {', '.join(map(str, places)) or 'the wheels'}: {INSTALL}")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "memra_pp"


def _write(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: others may compile the same at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(name, path)
