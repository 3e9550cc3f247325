"""The bench of `scripts/gpu_check.sh` runs whole, at sizes at which its figures mean nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fiber_gpu import FiberGpu
from on_cpu import Kernels

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_bench.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_bench", module)
    spec.loader.exec_module(module)
    return module


def test_every_figure_is_there_and_bytes_are_as_planned(bench: ModuleType, kernels: Kernels) -> None:
    sizes = bench.Sizes(copied=1 << 16, context=512, prefill=128, recurrent=1, repeats=1)
    figures = bench.Bench(FiberGpu(kernels), sizes).figures()
    assert len(figures) == 10 and all(figure.value > 0 for figure in figures)
    planned, allocated = figures[-2:]
    assert 0 <= planned.value - allocated.value < 256 * 40
    lines = bench.table("a title", figures).splitlines()
    assert len(lines) == 11 and lines[1].endswith("1.00 of copy")
