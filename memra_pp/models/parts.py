"""What the reference forwards share: the run through a stage's layers, attention over the cache, reading of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol, Self

import numpy as np

from ..admission.cost import workspace_bytes
from ..cache import Cache, KvLayer
from ..config import KvPlan, ModelConfig
from ..errors import ConfigError
from ..kernels.addresses import addresses_of
from ..kernels.backend import Backend, Matrix, Rope, Rows
from ..kernels.batches import KvBatch, StateBatch, capture_table
from ..kernels.shapes import AttentionSpec
from ..kernels.spans import Spans
from .protocol import Array, StepBatch
from .stored import F32, Stored, inputs_of, widened
from .weights import Weights, open_weights

HEAD_CHUNK_ROWS = 8192
EMBEDDING = "model.embed_tokens.weight"


class Device(Protocol):
    """What a forward asks of the device that it is loaded for."""

    @property
    def backend(self) -> Backend:
        """The array operations there."""


class Step:
    """One step's rows on their way through the layers, and what is the same for all of these.

    Attributes:
        backend: the device's operations.
        spans: each session's rows in the batch.
        taps: where tapped residuals of a session go, and its rows in the batch.
    """

    def __init__(self, batch: StepBatch, caches: Sequence[Cache], backend: Backend) -> None:
        self.backend = backend
        self.spans = Spans([segment.pos for segment in batch.segments], [segment.rows for segment in batch.segments])
        slices = batch.slices
        self.taps = [(c.dflash_taps, where) for c, where in zip(caches, slices, strict=True) if c.dflash_taps is not None]
        self._caches = caches
        self._captures = [(i, rows, snap) for i, segment in enumerate(batch.segments) for rows, snap in segment.captures]
        self._addresses = [addresses_of(cache) for cache in caches]
        self._planes = np.stack([known.planes for known in self._addresses], axis=1)
        self._retained: dict[KvPlan, list[int]] = {}
        self._positions = batch.positions
        self._tables: dict[bytes, Rope] = {}

    def rope(self, inv_freq: F32) -> Rope:
        """`Backend.rope_tables` of the rows' positions, made once a step."""
        key = inv_freq.tobytes()
        if key not in self._tables:
            self._tables[key] = self.backend.rope_tables(self._positions, inv_freq)
        return self._tables[key]

    def kv(self, il: int) -> KvBatch:
        """The K/V rows of layer `il` in each session's cache.

        Raises:
            ConfigError: a cache has no such layer.
        """
        layers = [layer for cache in self._caches if (layer := cache.kv[il]) is not None]
        if len(layers) < len(self._caches):
            raise ConfigError(f"layer {il}'s cache is not on this stage: the cache was cut at another fence")
        return KvBatch(layers, self._planes[il], self.spans)

    def retain_from(self, layers: Sequence[KvLayer]) -> list[int]:
        """The first absolute row that each session's append to its layer must keep; one list for all layers of a plan."""
        plan = layers[0].plan
        if plan not in self._retained:
            self._retained[plan] = [cache.retain_from(layer) for cache, layer in zip(self._caches, layers, strict=True)]
        return self._retained[plan]

    def states(self, il: int) -> StateBatch:
        """The state of recurrent layer `il` in each session's cache, and the copies of it that are asked for.

        Raises:
            CacheError: a cache has no such layer.
        """
        states = [cache.state(il) for cache in self._caches]
        table = np.array([known.state_row(state) for known, state in zip(self._addresses, states, strict=True)], np.int64)
        copies = [(session, rows, snap.states[il]) for session, rows, snap in self._captures]
        return StateBatch(states, table, self.spans, capture_table(copies, states, self.spans))


@dataclass(frozen=True)
class Head:
    """The final norm and the output matrix."""

    norm: Rows
    matrix: Matrix
    eps: float

    def logits(self, x: Rows, backend: Backend) -> Rows:
        """f32 `[rows, n_vocab]` of hidden rows `[rows, n_embd]`."""
        return backend.matmul(backend.rms_norm(x, self.norm, self.eps), self.matrix)


class Forward(ABC):
    """A `StageModel` but for what a layer and the head compute: `run_layer`, `layer_width` and `load_head` say that.

    `layers` are the ones this forward runs. MTP/NextN blocks of the range are left out: a stage keeps their cache only.
    """

    def __init__(self, weights: Weights, layers: range, device: Device) -> None:
        self.cfg: ModelConfig = weights.cfg
        self.device, self.backend = device, device.backend
        self.layers = layers[: max(0, self.cfg.n_trunk - layers.start)]
        self.embedding: Weights | None = None
        self.head: Head | None = None

    @classmethod
    def load(cls, path: str | PathLike[str], layers: range, device: Device) -> Self:
        """Reads the tensors of `layers`; the embedding if the first layer is among them, the head if the last is.

        Raises:
            ConfigError: the file is not a model that this forward computes, or lacks a tensor.
        """
        weights = open_weights(path)
        model = cls(weights, layers, device)
        if layers.start == 0:
            require_shape(weights, EMBEDDING, (weights.cfg.n_vocab, weights.cfg.n_embd))
            model.embedding = weights
        if layers.stop >= weights.cfg.n_trunk:
            model.head = model.load_head(weights)
        return model

    @classmethod
    @abstractmethod
    def check(cls, cfg: ModelConfig) -> None:
        """Raises ConfigError for a model that this forward does not compute."""

    def forward(self, batch: StepBatch, x: Rows, caches: Sequence[Cache]) -> Rows:
        """Tokens or hidden rows in; hidden rows, or the logits asked for on the last stage, out (see `StageModel`)."""
        if self.embedding is not None:
            x = self.embed(self.embedding, x)
        rows = self._run(batch, x, caches)
        if self.head is None:
            return rows
        return self.backend.download(self.logits(self.head, self.backend.take(rows, batch.logit_rows)))

    def run_layers(self, batch: StepBatch, x: F32, caches: Sequence[Cache]) -> F32:
        """The layers alone: f32 `[rows, n_embd]` in and out."""
        return self.backend.download(self._run(batch, x, caches))

    def _run(self, batch: StepBatch, x: Rows, caches: Sequence[Cache]) -> Rows:
        rows = self.backend.upload(np.asarray(x, np.float32)) if isinstance(x, np.ndarray) else x
        step = Step(batch, caches, self.backend)
        for il in self.layers:
            self.run_layer(il, rows, step)
            for taps, where in step.taps:
                taps.write(il, self.backend.download(rows[where]))
        return rows

    def embed(self, weights: Weights, tokens: Array) -> F32:
        """The hidden rows of tokens: f32 `[rows, n_embd]`."""
        return weights.rows(EMBEDDING, tokens)

    def logits(self, head: Head, x: Rows) -> Rows:
        """f32 `[rows, n_vocab]` of hidden rows `[rows, n_embd]`."""
        return head.logits(x, self.backend)

    def workspace_bytes(self, max_rows: int) -> int:
        """Activations of the widest moment, and logits for every row on the last stage."""
        widest = max((self.layer_width(il) for il in self.layers), default=0)
        return workspace_bytes(max_rows, self.cfg.n_embd, widest, 0 if self.head is None else self.cfg.n_vocab)

    @abstractmethod
    def load_head(self, weights: Weights) -> Head:
        """The final norm and the output matrix."""

    @abstractmethod
    def run_layer(self, il: int, x: Rows, step: Step) -> None:
        """Layer `il` over f32 `x [rows, n_embd]`, in place; its rows or state go to the caches."""

    @abstractmethod
    def layer_width(self, il: int) -> int:
        """An upper bound of the f32 that layer `il` holds a row, beyond a few of `n_embd`."""


def attend(il: int, spec: AttentionSpec, q: Rows, k: Rows, v: Rows, step: Step) -> Rows:
    """Appends K and V rows of layer `il` to each session's cache and attends to it: f32 `[rows, n_head * head_dim_v]`.

    `q`, `k`, `v` are as of `split_heads`.

    Raises:
        ConfigError: a cache has no such layer.
        CacheError: the rows do not fit, or one holds what the format cannot keep (see `append_rows`).
    """
    batch = step.kv(il)
    step.backend.append_rows(batch, k, v, step.retain_from(batch.layers))
    return step.backend.attend_rows(q, batch, spec)


def packed(parts: Sequence[Stored], backend: Backend) -> Matrix:
    """Matrices of as many inputs, one below another, as one; in f32 unless all are kept in the same form."""
    if len({part.dtype for part in parts}) > 1:
        parts = [widened(part) for part in parts]
    return backend.pack(sum(len(part) for part in parts), inputs_of(parts[0]), parts)


def head_tensor(tied: bool) -> str:
    """The name of the output matrix: the embedding's if they are tied."""
    return EMBEDDING if tied else "lm_head.weight"


def load_head(weights: Weights, tied: bool, eps: float, backend: Backend) -> Head:
    """The head of a checkpoint.

    Raises:
        ConfigError: a tensor is missing or of another shape than the config says.
    """
    norm = backend.upload(load_norm(weights, "model.norm.weight", weights.cfg.n_embd))
    name, shape = head_tensor(tied), (weights.cfg.n_vocab, weights.cfg.n_embd)
    require_shape(weights, name, shape)
    return Head(norm, backend.pack(*shape, weights.pieces(name, HEAD_CHUNK_ROWS)), eps)


def load_norm(weights: Weights, name: str, width: int) -> F32:
    """What an RMS norm multiplies by, f32 `[width]`: `1 + w` in the families that do so."""
    return load_tensor(weights, name, width) + np.float32(weights.norm_offset)


def load_matrix(weights: Weights, name: str, n_out: int, n_in: int) -> Stored:
    """A matrix, in the form that it is kept in.

    Raises:
        ConfigError: it is missing or of another shape.
    """
    require_shape(weights, name, (n_out, n_in))
    return weights.matrix(name)


def load_tensor(weights: Weights, name: str, *shape: int) -> F32:
    """A tensor, f32.

    Raises:
        ConfigError: it is missing or of another shape.
    """
    require_shape(weights, name, shape)
    return weights.tensor(name)


def require_shape(weights: Weights, name: str, shape: tuple[int, ...]) -> None:
    """Raises ConfigError unless the tensor is of this shape."""
    found = weights.shape(name)
    if found != shape:
        raise ConfigError(f"{weights.path}: {name} is {found} and the config says {shape}: they are not of one model")


def inverse_frequencies(dim: int, theta: float, factor: float = 1.0) -> F32:
    """Rotary frequencies, f32 `[dim / 2]`: `theta^(-2i/dim)`, divided by a linear scaling factor."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    freq = np.float32(1.0) / np.power(np.float32(theta), exponent, dtype=np.float32)
    return np.asarray(freq / np.float32(factor), np.float32)
