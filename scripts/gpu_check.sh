#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, then a table of rates beside a device copy. Needs CuPy with NVRTC, NumPy,
# msgpack and pytest; neither Ray, numba nor a network. Writes gpu.json and gpu.txt into the folder given (default: here).
set -euo pipefail
out=$(realpath "${1:-.}")
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
python=${PYTHON:-python3}
"$python" -m pytest -m gpu -q -p no:cacheprovider tests/cuda/test_cuda_{append,forward,golden}.py tests/cuda/test_gpu_share.py
"$python" scripts/gpu_bench.py --json "$out/gpu.json" | tee "$out/gpu.txt"
