"""What Ray itself offers beside our lanes, and stages that compute nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.dag import InputNode

from memra_pp.cache import Cache
from memra_pp.config import ModelConfig
from memra_pp.driver.launch.ray_runtime import deferred_signals, runtime
from memra_pp.models.protocol import Array, StepBatch


class PassThrough:
    """A `StageModel` that computes nothing: its rows are what comes in."""

    def __init__(self, cfg: ModelConfig, last: bool) -> None:
        self.cfg, self._last = cfg, last

    @classmethod
    def load(cls, path: str, layers: range, device: Any) -> PassThrough:
        cfg = ModelConfig.from_hf(path)
        return cls(cfg, layers.stop >= cfg.n_trunk)

    def workspace_bytes(self, max_rows: int) -> int:
        return 8 * self.cfg.n_embd * max_rows

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        rows = x if x.ndim == 2 else np.zeros((len(x), self.cfg.n_embd), np.float32)
        return rows[batch.logit_rows] if self._last else rows


class Sleeper(PassThrough):
    """A `StageModel` that sleeps, for each of its layers as long as `write_config` was told. The column of a row that is its
    first layer's says how long it slept for it, in seconds."""

    @classmethod
    def load(cls, path: str, layers: range, device: Any) -> Sleeper:
        made = super().load(path, layers, device)
        made._first, made._layers = layers.start, len(layers)
        return made

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        rows = super().forward(batch, x, caches).copy()
        told = self.cfg.hparams
        started = time.perf_counter()
        time.sleep(self._layers * (told["layer_sleep_s"] + len(x) * told["row_sleep_s"]))
        rows[:, self._first] = time.perf_counter() - started
        return rows


def write_config(folder: Path, layers: int, width: int, layer_sleep_s: float = 0.0, row_sleep_s: float = 0.0) -> None:
    """A model without weights, with as wide a vocabulary as its rows. A `Sleeper` sleeps for `layer_sleep_s` in each layer,
    and for `row_sleep_s` more for each row."""
    config = {
        "layer_sleep_s": layer_sleep_s,
        "row_sleep_s": row_sleep_s,
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "vocab_size": width,
        "max_position_embeddings": 65536,
    }
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def ray_of(cpus: int) -> Iterator[None]:
    """The Ray that `launch` would start, with room for so many stages: for pipelines that are up at the same time."""
    with deferred_signals():
        runtime.acquire(cpus)
    try:
        yield
    finally:
        with deferred_signals():
            runtime.release()


@ray.remote(num_cpus=0)
class Echo:
    """A Ray actor that returns its argument."""

    def forward(self, x: Array) -> Array:
        return x

    def ack(self) -> None:
        pass


@contextmanager
def echoes(count: int) -> Iterator[list[Any]]:
    """As many actors, ready."""
    actors = [Echo.remote() for _ in range(count)]
    try:
        ray.get([actor.ack.remote() for actor in actors])
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def chained_calls(actors: Sequence[Any], row: Array) -> Callable[[], None]:
    """The row by reference through all actors."""

    def step() -> None:
        ref: Any = row
        for actor in actors:
            ref = actor.forward.remote(ref)
        ray.get(ref)

    return step


def calls_to_all(actors: Sequence[Any]) -> Callable[[], None]:
    """A call of each actor, and all answers."""
    return lambda: ray.get([actor.ack.remote() for actor in actors])


@contextmanager
def compiled_graph(actors: Sequence[Any], row: Array) -> Iterator[Callable[[], None]]:
    """The row through a Ray compiled graph of all actors. It spins a core a stage while idle, so it slows others."""
    with InputNode() as node:
        dag: Any = node
        for actor in actors:
            dag = actor.forward.bind(dag)
    graph = dag.experimental_compile()
    try:
        yield lambda: ray.get(graph.execute(row))
    finally:
        graph.teardown()
