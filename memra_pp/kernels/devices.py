"""Devices by name: `cpu`, `cpu:N`, `cuda`, `cuda:N`."""

from __future__ import annotations

import re

from ..errors import ConfigError
from .cpu import CpuDev
from .memory import ArenaDev

ALLOWED = "cpu, cpu:N, cuda or cuda:N"
_NAME = re.compile(r"(cpu|cuda)(?::(\d{1,4}))?")


def kind_of(name: str) -> str:
    """`cpu` or `cuda`.

    Raises:
        ConfigError: a name that there is not.
    """
    return _parsed(name)[0]


def open_device(name: str, threads: int, index: int | None = None) -> ArenaDev:
    """A stage's device. `threads` are a CPU's; `index` is a GPU's place among those this process sees (None: as it is named).

    Raises:
        ConfigError: there is no such device here, or what it needs is not installed.
    """
    kind, number = _parsed(name)
    if kind == "cpu":
        return CpuDev(threads=threads)
    from .cuda.device import CudaDev
    from .cuda.gpu import CupyGpu

    return CudaDev(CupyGpu(number if index is None else index))


def free_bytes(name: str, gpu: int | None = None) -> int:
    """Bytes that a device can still give: a GPU its own memory, a CPU the machine's. `gpu` is as `index` of `open_device`.

    Raises:
        ConfigError: as `open_device`.
    """
    device = open_device(name, 1, gpu)
    try:
        return device.spare_bytes()
    finally:
        device.close()


def require_gpus(names: list[str]) -> None:
    """Whether this process sees every GPU that is named.

    Raises:
        ConfigError: it does not, or CuPy is not installed.
    """
    numbers = [number for kind, number in map(_parsed, names) if kind == "cuda"]
    if not numbers:
        return
    from .cuda.gpu import visible_gpus

    count = visible_gpus()
    if max(numbers) >= count:
        seen = "no GPU is visible here" if not count else f"{count} GPUs are visible here"
        raise ConfigError(f"device cuda:{max(numbers)}: {seen}; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use cpu")


def _parsed(name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(f"a device {name!r:.80}: it must be {ALLOWED}")
    return match[1], int(match[2] or 0)
