"""Whole forwards of the CUDA backend, its kernels executed on the CPU: the logits of the CPU backend, and of any other cut."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from fiber_gpu import FiberGpu
from on_cpu import kernel_names
from runs import MODELS, Run, some

from memra_pp.cache import KvPolicy
from memra_pp.kernels import CpuDev
from memra_pp.kernels.cuda.attention import VECTORS
from memra_pp.kernels.cuda.compile import SOURCES
from memra_pp.kernels.cuda.device import CudaDev
from memra_pp.kernels.cuda.gpu import Gpu


@pytest.mark.parametrize(("policy", "close"), [(KvPolicy(), 1e-4), (KvPolicy(k="fp8", v="q4_0", ring="all"), 5e-3)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu(data: Path, fibers: FiberGpu, name: str, policy: KvPolicy, close: float) -> None:
    """As close as a code of the coarser format that a last bit has turned."""
    cpu, cuda = Run(data / name, CpuDev(), policy), Run(data / name, CudaDev(fibers), policy)
    for tokens in ((some(40, 1), some(3, 2), some(9, 3)), ([7], [8], []), (some(5, 4), [9], some(2, 5))):
        np.testing.assert_allclose(cuda.step(*tokens), cpu.step(*tokens), rtol=0, atol=close)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_longer_chunk(data: Path, gpu: Gpu, name: str) -> None:
    run, text = Run(data / name, CudaDev(gpu), KvPolicy()), some(30, 6)
    whole = run.step(text, [], [])
    alone = np.concatenate([run.step([], [token], []) for token in text])
    mixed = [run.step(some(1, i), [], text[at : at + 5])[-5:] for i, at in enumerate(range(0, 30, 5))]
    np.testing.assert_array_equal(alone, whole)
    np.testing.assert_array_equal(np.concatenate(mixed), whole)


@pytest.mark.parametrize("name", MODELS)
def test_a_rollback_leads_where_plain_feeding_does(data: Path, gpu: Gpu, name: str) -> None:
    run, text = Run(data / name, CudaDev(gpu), KvPolicy(), 2), some(30, 7)
    cache = run.caches[0]
    run.step(text[:11], [])
    snap, kept = cache.snapshot(), cache.new_snapshot()
    run.step(some(6, 8), [], captures={0: ((2, kept),)})
    cache.rollback(snap, 0)
    back = run.step(text[11:], [])
    np.testing.assert_array_equal(back, run.step([], text)[11:])


def test_no_kernel_is_forgotten() -> None:
    """Each is launched by the backend, or by a test of its own; those that the backend launches, by the forwards above."""
    texts = [path.read_text() for folder in (Path(__file__).parent, SOURCES.parent) for path in folder.glob("*.py")]
    launched = set(re.findall(r'"(\w+)"', "\n".join(texts)))
    products = {f"matmul_{kind}": (1, 2, 4, 8, "tiles") for kind in ("f32", "bf16", "q8")}
    families = {"attend_split": VECTORS, **products}
    launched |= {f"{family}_{member}" for family, members in families.items() for member in members}
    assert set(kernel_names(SOURCES)) <= launched
