"""Devices by name, and what is said when there are none."""

from __future__ import annotations

import numpy as np
import pytest

import memra_pp
from memra_pp.errors import ConfigError
from memra_pp.kernels import CpuDev
from memra_pp.kernels.devices import kind_of, open_device, require_gpus


@pytest.mark.parametrize(("name", "kind"), [("cpu", "cpu"), ("cpu:12", "cpu"), ("cuda", "cuda"), ("cuda:0", "cuda")])
def test_a_name_says_the_kind(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:99999", "CPU", None, 3])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match="it must be cpu, cpu:N, cuda or cuda:N"):
        open_device(name, 1)


def test_a_cpu_has_the_threads_asked_for():
    device = open_device("cpu:3", 2, index=0)
    assert isinstance(device, CpuDev) and device.threads.n == 2 and device.spare_bytes() > 0
    device.close()


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine with CuPy and no driver."""
    from memra_pp.kernels.cuda import gpu

    monkeypatch.setattr(gpu, "visible_gpus", lambda: 0)


def test_a_gpu_that_is_not_there_is_named(no_gpu):
    require_gpus(["cpu", "cpu:7"])
    with pytest.raises(ConfigError, match="device cuda:2: no GPU is visible here"):
        require_gpus(["cuda:0", "cuda:2"])


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_nothing_is_started_without_a_gpu(no_gpu, hybrid, backend):
    with pytest.raises(ConfigError, match="no GPU is visible here"):
        memra_pp.launch(hybrid, stages=2, devices="cuda", backend=backend)


@pytest.mark.parametrize("balance", ["time", "time:prefill"])
def test_no_gpu_is_cut_by_what_a_cpu_measures(no_gpu, hybrid, balance):
    with pytest.raises(ConfigError, match=f"balance='{balance}' on devices .* measured on a CPU; pass cuts"):
        memra_pp.launch(hybrid, stages=2, devices="cuda", balance=balance, backend="local")


def test_a_cpu_s_planes_are_shared_by_dlpack():
    device = CpuDev()
    plane = device.alloc_u8(64)
    shared = np.from_dlpack(device.export(plane))
    plane[7] = 5
    assert shared[7] == 5
