"""The cache's work on a GPU in GB/s, bytes read and written, beside a copy within the device in the same run; and tokens/s."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memra_pp.cache import Cache, KvPolicy, slice_layout
from memra_pp.cache.sizing import slab_bytes
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.kernels.batches import KvBatch
from memra_pp.kernels.cuda.backend import CudaBackend
from memra_pp.kernels.cuda.device import CudaDev
from memra_pp.kernels.cuda.gpu import CupyGpu, Gpu
from memra_pp.kernels.shapes import AttentionSpec
from memra_pp.kernels.spans import Spans
from memra_pp.models import Segment, StepBatch, stage_model_for
from memra_pp.models.weights import open_weights

ROUNDS = 5
MODEL = Path(__file__).parents[1] / "tests" / "data" / "hybrid"


@dataclass(frozen=True)
class Sizes:
    """What is measured: bytes of a copy, rows of a context and of a prefill, recurrent layers of a stage, and repetitions."""

    copied: int = 512 << 20
    context: int = 32768
    prefill: int = 4096
    recurrent: int = 12
    repeats: int = 50


@dataclass(frozen=True)
class Figure:
    """A rate, and what part of the copy's it is (0: it is no rate of bytes)."""

    name: str
    value: float
    unit: str
    of_copy: float = 0.0


class Bench:
    """A GPU, and the rate of a copy on it."""

    def __init__(self, gpu: Gpu, sizes: Sizes) -> None:
        self.gpu, self.sizes = gpu, sizes
        source, target = (gpu.empty((sizes.copied,), np.uint8) for _ in range(2))
        self.copy = self.rate(lambda: gpu.copy(target, source), 2 * sizes.copied)

    def rate(self, work: Callable[[], Any], moved: int) -> float:
        """GB/s of work that moves so many bytes: the median of some rounds, each of many repetitions."""
        return moved / self.seconds(work) / 1e9

    def seconds(self, work: Callable[[], Any]) -> float:
        work()
        took = []
        for _ in range(ROUNDS):
            self.wait()
            started = time.perf_counter()
            for _ in range(self.sizes.repeats):
                work()
            self.wait()
            took.append((time.perf_counter() - started) / self.sizes.repeats)
        return statistics.median(took)

    def wait(self) -> None:
        """Until all that was asked for is done."""
        self.gpu.download(self.gpu.empty((1,), np.uint8))

    def figure(self, name: str, work: Callable[[], Any], moved: int) -> Figure:
        rate = self.rate(work, moved)
        return Figure(name, rate, "GB/s", rate / self.copy)

    def figures(self) -> list[Figure]:
        return [Figure("copy within the device", self.copy, "GB/s", 1.0), *self.attention(), *self.snapshot(), *self.decode()]

    def attention(self) -> list[Figure]:
        """Append, decode attention, dequantise and rebase of one layer of 8 K/V heads, 128 wide, in q8_0 and q5_1."""
        sizes, backend = self.sizes, CudaBackend(self.gpu)
        plan, spec = KvPlan(8, 128, 128), AttentionSpec(8, 128, 128, None, 128**-0.5)
        dev = CudaDev(self.gpu)
        cfg = ModelConfig("bench", 1, 1024, 32, sizes.context + 8, (plan,))
        random = np.random.default_rng(0)
        k, v = (self.gpu.upload(random.standard_normal((sizes.prefill, 1024), np.float32)) for _ in range(2))
        with Cache.new(dev, cfg, sizes.context + 8, policy=KvPolicy()) as cache:
            layer = cache.kv[0]
            assert layer is not None
            for at in range(0, sizes.context, sizes.prefill):
                backend.append_rows(KvBatch.of([layer], Spans((at,), (sizes.prefill,))), k, v, [0])
            one = KvBatch.of([layer], Spans((sizes.context - 1,), (1,)))
            q = self.gpu.upload(random.standard_normal((1, 32, 128), np.float32))
            whole = KvBatch.of([layer], Spans((0,), (sizes.prefill,)))
            stored = sizes.context * layer.layout.tok_bytes
            blocks = sizes.context * 32
            out = self.gpu.empty((blocks * 32,), np.float32)
            unpack = [np.int32(0), layer.k, out, np.int64(blocks)]
            keep = sizes.context // 4
            codes, places = np.array([one.planes[0]]), np.array([[0, sizes.context - keep, keep, 0]], np.int64)
            flag = self.gpu.upload(np.full(1, 2**64 - 1, np.uint64))
            moving = [self.gpu.upload(codes), self.gpu.upload(places), np.int32(32), np.int32(32), flag]
            return [
                self.figure(
                    f"append of {sizes.prefill} rows",
                    lambda: backend.append_rows(whole, k, v, [0]),
                    sizes.prefill * (8 * 1024 + layer.layout.tok_bytes),
                ),
                self.figure(f"decode attention over {sizes.context} rows", lambda: backend.attend_rows(q, one, spec), stored),
                self.figure(
                    f"dequantise {sizes.context} rows of q8_0",
                    lambda: self.gpu.launch("dequantise", (-(-blocks // 8),), (256,), unpack),
                    sizes.context * (layer.k_tok_bytes + 4096),
                ),
                self.figure(
                    f"rebase of {keep} rows",
                    lambda: self.gpu.launch("rebase_rows", (16, 1, 2), (256,), moving),
                    2 * keep * layer.layout.tok_bytes,
                ),
            ]

    def snapshot(self) -> list[Figure]:
        """Snapshot and restore of a stage's recurrent layers, as wide as Qwen3.5-27B's: 48 heads of 128 by 128."""
        layers = (RecurrentPlan(10240, 4, 48 * 128 * 128),) * self.sizes.recurrent
        cfg = ModelConfig("bench", len(layers), 5120, 32, 64, layers)
        dev = CudaDev(self.gpu)
        with Cache.new(dev, cfg, 64, policy=KvPolicy()) as cache:
            snap = cache.snapshot()
            moved = 2 * 4 * self.sizes.recurrent * (10240 * 3 + 48 * 128 * 128)
            return [
                self.figure(f"snapshot of {moved / 2e6:.0f} MB", lambda: cache.snapshot_into(snap), moved),
                self.figure(f"restore of {moved / 2e6:.0f} MB", lambda: cache.rollback(snap, 0), moved),
            ]

    def decode(self) -> list[Figure]:
        """Tokens a second of a tiny hybrid model, which are its launches, and planned beside allocated bytes."""
        cfg, dev = open_weights(MODEL).cfg, CudaDev(self.gpu)
        model = stage_model_for(cfg).load(MODEL, range(cfg.n_layer), dev)
        planned = slab_bytes(slice_layout(cfg, range(cfg.n_layer), 4096, KvPolicy(), 1))
        before = dev.allocated_bytes
        with Cache.new(dev, cfg, 4096, policy=KvPolicy()) as cache:
            cache.snapshot()
            allocated = dev.allocated_bytes - before

            def step() -> None:
                model.forward(StepBatch((Segment(cache.pos, 1),)), np.array([7], np.int32), [cache])
                cache.pos += 1

            per_s = 1 / self.seconds(step)
        return [
            Figure("decode of the tiny hybrid model", per_s, "tok/s"),
            Figure("its cache and a snapshot, planned as a slab", planned, "B"),
            Figure("its cache and a snapshot, allocated", allocated, "B"),
        ]


def table(title: str, figures: Sequence[Figure]) -> str:
    lines = [title]
    for figure in figures:
        part = f"{figure.of_copy:7.2f} of copy" if figure.of_copy else ""
        lines.append(f"{figure.name:45} {figure.value:14,.1f} {figure.unit:6} {part}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--gpu", type=int, default=0, help="which of the visible GPUs (default: 0)")
    args = parser.parse_args(argv)
    gpu = CupyGpu(args.gpu)
    figures = Bench(gpu, Sizes()).figures()
    title = f"{gpu.name}, {time.strftime('%Y-%m-%d')}"
    print(table(title, figures))
    if args.json is not None:
        args.json.write_text(json.dumps({"gpu": title, "figures": [asdict(figure) for figure in figures]}, indent=1) + "\n")
    gpu.close()


if __name__ == "__main__":
    main(sys.argv[1:])
