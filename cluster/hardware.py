"""What a model's stages take on devices that nobody needs to have: the simulator's inputs from a config and a data sheet."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import yaml

from cluster.simulator import Compute, Driver, Link, Load, Outcome, Pipeline, Recovery, simulate
from memra_pp.admission import plan
from memra_pp.cache import KvPolicy, cache_allocated_bytes_for_layers
from memra_pp.config import ModelConfig, WeightBytes, estimate_weight_bytes, stage_layers
from memra_pp.config.fence import nearest_even_fence
from memra_pp.errors import ConfigError, require

PROMPT = 16
ENDS = 3
"""Stages of a model that repeats its layers of which all are seen: first, middle and last. More do not change what fits."""


COUNTS = ("memory", "flops", "per_node")


@dataclass(frozen=True)
class Hardware:
    """Devices, links and software. Bytes, seconds, and both a second; the defaults are an H100 SXM's.

    Attributes:
        memory: of a device (80 GiB).
        memory_bytes_per_s: at which weights and caches are read: 70 % of the data sheet's 3.35 TB/s.
        flops: of matrix products: half of the data sheet's 989 Tflop/s in bf16, dense.
        layer_s: that a layer takes beside its bytes and operations, to start its kernels.
        per_node: devices that share a node.
        inside_s, between_s: from one stage's end of a frame to the start of the next, within a node and between two: as
            measured here, Python and sockets.
        inside_bytes_per_s, between_bytes_per_s: of a link: NVLink one way, a 400 Gb/s network adapter a device.
        turnaround_s, driver_frame_s, driver_entry_s: see `Pipeline` and `Driver`: as measured here.
        jitter: of a stage's time, standard deviation over mean.
        detect_s, start_s, wire_s: see `Recovery`: a killed process is noticed by the end of its lanes.
        load_bytes_per_s: at which a stage that replaces another reads its weights.
    """

    memory: float = 80 * 2**30
    memory_bytes_per_s: float = 0.7 * 3.35e12
    flops: float = 0.5 * 989e12
    layer_s: float = 50e-6
    per_node: float = 8
    inside_s: float = 150e-6
    between_s: float = 200e-6
    inside_bytes_per_s: float = 450e9
    between_bytes_per_s: float = 50e9
    turnaround_s: float = 100e-6
    driver_frame_s: float = 250e-6
    driver_entry_s: float = 50e-6
    jitter: float = 0.02
    detect_s: float = 0.05
    start_s: float = 5.0
    wire_s: float = 0.05
    load_bytes_per_s: float = 2e9

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in COUNTS or name.endswith("_per_s") else 0
            counts = isinstance(value, (int, float)) and least <= value < inf
            require(counts, ConfigError, name, value, f"a number from {least}")

    @classmethod
    def read(cls, file: str | None, given: dict[str, float]) -> Hardware:
        """The defaults, but what a YAML file says, and before that what is given.

        Raises:
            ConfigError: the file cannot be read, or names something else.
        """
        told: Any = {}
        if file is not None:
            try:
                told = yaml.safe_load(Path(file).read_text())
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from error
        names = [field.name for field in fields(cls)]
        known = isinstance(told, dict) and told.keys() <= set(names)
        require(known, ConfigError, file or "", told, f"a map of some of {', '.join(names)}")
        return cls(**{**told, **given})


@dataclass(frozen=True)
class Model:
    """A model and what its sessions are: `ctx` rows each, `batch` of them for each stage, as far as so many fit."""

    cfg: ModelConfig
    weights: WeightBytes
    policy: KvPolicy
    ctx: int
    batch: int

    @classmethod
    def of(cls, cfg: ModelConfig, ctx: int, batch: int) -> Model:
        """With weights in bf16, and no MTP blocks."""
        cfg = cfg.without_mtp()
        return cls(cfg, estimate_weight_bytes(cfg), KvPolicy.from_env(), ctx, batch)

    def repeated(self, layers: int, stages: int) -> Model:
        """A model whose every stage has the first `layers` of this one's."""
        require(1 <= layers <= self.cfg.n_trunk, ConfigError, "layers of a stage", layers, f"1 to {self.cfg.n_trunk}")
        cfg = replace(self.cfg, n_trunk=layers * stages, layers=self.cfg.layers[:layers] * stages)
        return replace(self, cfg=cfg, weights=replace(self.weights, layers=self.weights.layers[:layers] * stages))


@dataclass(frozen=True)
class Forecast:
    """What a model does on a number of devices.

    Attributes:
        layers: most of one stage.
        fit: sessions that fit beside the weights (None: any number), of which some are `served`.
        ideal: tokens a second of stages that never wait.
        recovery_s: from a stage's death until every session goes on, half of its rows replayed.
    """

    layers: int
    fit: int | None
    served: int
    outcome: Outcome
    ideal: float
    recovery_s: float


def forecast(model: Model, hardware: Hardware, stages: int, layers: int | None = None) -> Forecast:
    """Simulates a model on so many devices, cut evenly; with `layers`, one that repeats the first of them on every stage.

    Raises:
        ConfigError: it cannot be cut so often, or not a session fits.
    """
    planned = model if layers is None else model.repeated(layers, min(stages, ENDS))
    model = model if layers is None else model.repeated(layers, stages)
    devices = [int(hardware.memory)] * (stages if layers is None else min(stages, ENDS))
    cut = plan(planned.cfg, devices, model.ctx, policy=model.policy, weights=planned.weights).even
    if cut.sessions == 0:
        raise ConfigError(f"no session of {model.ctx} rows fits on {stages} devices: use more, or shorter sessions")
    served = min(model.batch * stages, cut.sessions or model.batch * stages)
    pipeline, batch = _pipeline(model, hardware, stages), served / stages
    replay = simulate(pipeline, Load(served, model.ctx // 2, warmup=1, tokens=2, replay=True))
    load_s = max(stage.weight_bytes for stage in cut.stages) / hardware.load_bytes_per_s
    recovery = Recovery(hardware.detect_s, hardware.start_s, load_s, hardware.wire_s)
    return Forecast(
        layers=max(len(stage.layers) for stage in cut.stages),
        fit=cut.sessions,
        served=served,
        outcome=simulate(pipeline, Load(served, PROMPT)),
        ideal=batch / max(stage.step_s(batch, batch) for stage in pipeline.stages),
        recovery_s=recovery.until_served_s(stages) + replay.first_s,
    )


def _pipeline(model: Model, hardware: Hardware, stages: int) -> Pipeline:
    fence = nearest_even_fence(model.cfg, stages)
    inside = Link(hardware.inside_s, hardware.inside_bytes_per_s)
    between = Link(hardware.between_s, hardware.between_bytes_per_s)
    nodes = [int(s // hardware.per_node) for s in range(stages)]
    hops = [inside if here == there else between for here, there in pairwise([0, *nodes, 0])]
    return Pipeline(
        stages=tuple(_compute(model, hardware, stage_layers(model.cfg, fence, s), s == stages - 1) for s in range(stages)),
        links=tuple(hops),
        driver=Driver(hardware.driver_frame_s, hardware.driver_entry_s),
        row_bytes=4 * model.cfg.n_embd,
        turnaround_s=hardware.turnaround_s,
        jitter=hardware.jitter,
    )


def _compute(model: Model, hardware: Hardware, layers: range, last: bool) -> Compute:
    """Every step reads the stage's weights once and the cache of each of its sessions, as full as it gets, and does two
    operations for each row and parameter, which has two bytes. The embedding is looked up, the head is computed."""
    weights = model.weights.of_stage(layers, False, last)
    cache = cache_allocated_bytes_for_layers(model.cfg, layers.start, layers.stop, model.ctx, policy=model.policy)
    return Compute(
        fixed_s=weights / hardware.memory_bytes_per_s + len(layers) * hardware.layer_s,
        row_s=weights / hardware.flops,
        entry_s=cache / hardware.memory_bytes_per_s,
    )
