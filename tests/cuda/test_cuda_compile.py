"""NVRTC takes the kernels for every architecture that matters, and what is compiled is kept."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from memra_pp.errors import ConfigError
from memra_pp.kernels.cuda import compile as compiling
from memra_pp.kernels.cuda.compile import cubin


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "memra_pp"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of the test's own."""
    folder = tmp_path / "src"
    folder.mkdir()
    monkeypatch.setattr(compiling, "SOURCES", folder)
    return folder


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles(arch: str) -> None:
    """Into an ELF file that ends where its program headers do."""
    code = cubin(arch).read_bytes()
    assert code[:4] == b"\x7fELF"
    start, (size, count) = struct.unpack_from("<Q", code, 32)[0], struct.unpack_from("<HH", code, 54)
    assert len(code) == start + size * count


def test_what_was_compiled_is_kept_until_a_source_changes(sources: Path, cache: Path) -> None:
    kernel = sources / "kernels.cu"
    kernel.write_text('extern "C" __global__ void one(int* x) { *x = 1; }')
    first = cubin("sm_90")
    stamp = first.stat().st_mtime_ns
    assert cubin("sm_90") == first and first.stat().st_mtime_ns == stamp
    assert cubin("sm_80") != first
    kernel.write_text('extern "C" __global__ void one(int* x) { *x = 2; }')
    assert cubin("sm_90") != first and sorted(path.suffix for path in cache.iterdir()) == [".cubin"] * 3


def test_products_are_not_fused_with_sums(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code of `a * b + c` has a product and a sum: with the fused option it has neither."""
    source = 'extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }'
    (sources / "kernels.cu").write_text(source)
    apart = cubin("sm_90").read_bytes()
    monkeypatch.setattr(compiling, "OPTIONS", ("-std=c++17", "-fmad=true"))
    assert cubin("sm_90").read_bytes() != apart


def test_a_source_that_does_not_compile_is_told_with_the_log(sources: Path, cache: Path) -> None:
    (sources / "kernels.cu").write_text("__global__ void f() { nonsense; }")
    with pytest.raises(ConfigError, match=r"do not compile[\s\S]*nonsense"):
        cubin("sm_90")
    assert not cache.exists()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(ConfigError, match=r"cuda_fp16.h is in none of .* install memra-pp\[cuda12\]"):
        cubin("sm_90")
