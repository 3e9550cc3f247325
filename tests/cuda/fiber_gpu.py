"""`FiberGpu`: a `Gpu` whose memory is the host's and whose kernels are executed on the CPU by fibers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from host_gpu import HostGpu
from on_cpu import Kernels

from memra_pp.kernels.cuda.gpu import Size


class FiberGpu(HostGpu):
    """`launched` counts the launches of each kernel, `order` is that of its threads."""

    name = "a GPU of fibers"

    def __init__(self, kernels: Kernels, order: int = 0, free: int = 1 << 30) -> None:
        super().__init__(free)
        self.kernels, self.order = kernels, order
        self.launched: dict[str, int] = {}

    def launch(self, kernel: str, grid: Size, block: Size, args: Sequence[Any], shared: int = 0) -> None:
        self.launched[kernel] = self.launched.get(kernel, 0) + 1
        self.kernels.launch(kernel, grid, block, args, shared, self.order)
