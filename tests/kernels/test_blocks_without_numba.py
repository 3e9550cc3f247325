"""A process in which numba cannot be imported still packs blocks, and says once that it is slower."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging, sys
logging.basicConfig(format="%(message)s")
sys.modules["numba"] = None
from memra_pp.kernels import blocks
import numpy as np
print(blocks.backend(), blocks.quantize("q8_0", np.arange(32, dtype=np.float32))[-1])
"""


def test_numpy_takes_over_and_says_so():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numpy", "127"]
    assert done.stderr.count("numba cannot be imported") == 1
