"""Every test of a kernel's bytes again, with the kernels sanitized: no access outside an array, nothing undefined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from on_cpu import sanitizer_environment

HERE = Path(__file__).parent
FILES = [str(HERE / f"test_cuda_{topic}.py") for topic in ("append", "attention", "delta", "matmul", "rows")]


def test_no_kernel_steps_outside_its_arrays() -> None:
    """In one order of threads: what a kernel touches does not depend on it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-k",
        "not reversed and not shuffled",
        "-p",
        "no:cacheprovider",
        *FILES,
    ]
    environment = {**sanitizer_environment("both"), "KERNELS_SANITIZE": "both"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
