"""The CUDA kernels compiled for the CPU, once a run of the tests, and the GPUs that tests run on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fiber_gpu import FiberGpu
from on_cpu import Kernels, build

from memra_pp.kernels.cuda.compile import SOURCES
from memra_pp.kernels.cuda.gpu import CupyGpu, Gpu

ORDERS = {"ascending": 0, "reversed": 1, "shuffled": 2}


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Every kernel of the backend; compiled with the sanitizer that `KERNELS_SANITIZE` names, if it does."""
    return Kernels(build(SOURCES, tmp_path_factory.mktemp("kernels"), sanitize=os.environ.get("KERNELS_SANITIZE")))


@pytest.fixture(params=ORDERS)
def fibers(request: pytest.FixtureRequest, kernels: Kernels) -> FiberGpu:
    """A GPU of fibers, in each order of threads."""
    return FiberGpu(kernels, ORDERS[request.param])


@pytest.fixture(params=[*ORDERS, pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """The same, and a real one."""
    if request.param == "cuda":
        gpu: Gpu = CupyGpu()
    else:
        gpu = FiberGpu(request.getfixturevalue("kernels"), ORDERS[request.param])
    yield gpu
    gpu.close()
