"""Memory of a GPU in two processes: what the other writes is read here, and a slot is written across two streams of one GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from memra_pp.kernels.cuda.gpu import CupyGpu

pytestmark = pytest.mark.gpu

SHAPE = (2, 8, 32)
WRITER = f"""
import sys
import numpy as np
from memra_pp.kernels.cuda.gpu import CupyGpu
gpu = CupyGpu()
slots = gpu.attach(bytes.fromhex(sys.argv[1]), {SHAPE}, np.float32)
gpu.copy(slots[1][:3], gpu.upload(np.arange(96, dtype=np.float32).reshape(3, 32)))
gpu.wait()
"""


def test_another_process_writes_into_a_slot() -> None:
    gpu = CupyGpu()
    slots = gpu.persistent(SHAPE, np.float32)
    gpu.clear(slots)
    gpu.wait()
    subprocess.run([sys.executable, "-c", WRITER, gpu.share(slots).hex()], check=True, timeout=120)
    seen = gpu.download(slots)
    assert np.array_equal(seen[1][:3].reshape(-1), np.arange(96)) and not seen[0].any() and not seen[1][3:].any()


def test_two_streams_of_a_gpu_pass_rows_on() -> None:
    before, after = CupyGpu(), CupyGpu()
    slots = after.persistent(SHAPE, np.float32)
    for n in range(200):
        rows = np.full(SHAPE[1:], n, np.float32)
        before.copy(slots[n % 2], before.upload(rows))
        before.wait()
        assert np.array_equal(after.download(slots[n % 2]), rows)
        after.wait()
