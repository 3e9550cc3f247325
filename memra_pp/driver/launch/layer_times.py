"""What decode and prefill take in each layer, the embedding and the head: measured by running layers alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal, TypeAlias

import numpy as np

from ...admission import WorkTimes
from ...cache import Cache, KvPolicy
from ...config import ModelConfig, read_weight_bytes
from ...config.fence import valid_cuts
from ...errors import ConfigError
from ...kernels import CpuDev
from ...models.protocol import Array, Segment, StageModel, StepBatch
from ..chain import Progress

WorkKind: TypeAlias = Literal["decode", "prefill"]

CONTEXT = 512
"""Rows that a measured decode has behind it, and the most of a measured prefill chunk."""

REPEATS: Mapping[WorkKind, int] = {"decode": 9, "prefill": 3}

_Seconds: TypeAlias = dict[WorkKind, float]
_Step: TypeAlias = Callable[[int, int, int], float]
"""Runs `rows` rows at `pos` with so many rows of logits, called with `(pos, rows, logits)`; the seconds it took."""


def measure_layers(
    path: Path,
    cfg: ModelConfig,
    model: type[StageModel],
    policy: KvPolicy,
    threads: int,
    prefill_chunk: int,
    progress: Progress,
) -> dict[WorkKind, WorkTimes]:
    """Seconds that a step of either kind of work takes, each the median of several, run here, in this process.

    A decode step is one row behind `CONTEXT` others; a prefill step is a prompt's only chunk, of `prefill_chunk` rows but at
    most `CONTEXT`. Both want one row of logits. The stages are taken to be alike: on a cluster, this node stands for all.

    Layers are loaded and measured one at a time, and of those of one kind (an equal plan, and equal bytes of weights in the
    files) only one. Layers that share K/V run together, and an even part of their time is each one's. The head is the last
    layer with a row of logits less that layer without: of a decode step, as a prefill's is the same work. The embedding is the
    first layer less another of its kind; where there is none, it is in the first layer's time. MTP/NextN blocks that `model`
    runs are in the last layer's.

    Args:
        path: the model's files.
        threads: kernel threads, as many as a stage will have.
        prefill_chunk: most rows in one step.
        progress: told which layers are being measured.

    Raises:
        ConfigError: the weights are missing, damaged or not of this model.
    """
    pieces = _pieces(cfg)
    kinds = _kinds(path, cfg, pieces)
    device = CpuDev(threads=threads)
    try:
        bench = _Bench(path, cfg, model, policy, device, prefill_chunk)
        embed, of_kind, head = _measured(bench, pieces, kinds, progress)
    finally:
        device.close()
    sizes = [min(piece.stop, cfg.n_trunk) - piece.start for piece in pieces]
    shares = [(of_kind[kind], size) for kind, size in zip(kinds, sizes, strict=True) for _ in range(size)]
    return {work: WorkTimes(embed[work], tuple(took[work] / size for took, size in shares), head) for work in REPEATS}


def _measured(
    bench: _Bench, pieces: Sequence[range], kinds: Sequence[Hashable], progress: Progress
) -> tuple[_Seconds, dict[Hashable, _Seconds], float]:
    """The seconds of the embedding, of a piece of each kind, and of the head."""
    first, last = pieces[0], pieces[-1]
    others: dict[Hashable, range] = {}
    for kind, piece in zip(kinds[1:], pieces[1:], strict=True):
        others.setdefault(kind, piece)
    twin = others.pop(kinds[0], None)
    inner = {kind: piece for kind, piece in others.items() if piece != last}
    steps = len(inner) + 2
    progress(f"timing {_named(first)} and the embedding", 0, steps)
    embedded, *bare = bench.seconds((first, 0), *([] if twin is None else [(twin, 0)]))
    of_kind = {kinds[0]: bare[0] if bare else embedded}
    for done, (kind, piece) in enumerate(inner.items(), 1):
        progress(f"timing {_named(piece)}", done, steps)
        [of_kind[kind]] = bench.seconds((piece, 0))
    progress(f"timing {_named(last)} and the head", steps - 1, steps)
    headed, headless = bench.seconds((last, 1), (last, 0))
    of_kind.setdefault(kinds[-1], headless)
    embed: _Seconds = {work: max(0.0, took - of_kind[kinds[0]][work]) for work, took in embedded.items()}
    return embed, of_kind, max(0.0, headed["decode"] - headless["decode"])


def _pieces(cfg: ModelConfig) -> list[range]:
    """The layers that no cut parts, as stages would own them: the MTP/NextN blocks are with the last trunk layer."""
    return [range(lo, hi) for lo, hi in pairwise([0, *valid_cuts(cfg), cfg.n_layer])]


def _kinds(path: Path, cfg: ModelConfig, pieces: Sequence[range]) -> list[Hashable]:
    """What pieces that take equal times have in common: if no headers tell the bytes of weights, each is a kind of its own."""
    try:
        weights = read_weight_bytes(path, cfg)
    except ConfigError:
        return list(pieces)
    if weights.estimated:
        return list(pieces)
    return [tuple((cfg.layers[il], weights.layers[il]) for il in piece) for piece in pieces]


def _named(piece: range) -> str:
    return f"layer {piece.start}" if len(piece) == 1 else f"layers {piece.start}-{piece.stop - 1}"


@dataclass(frozen=True)
class _Bench:
    """Loads pieces of a model, and times steps of them."""

    path: Path
    cfg: ModelConfig
    model: type[StageModel]
    policy: KvPolicy
    device: CpuDev
    prefill_chunk: int

    def seconds(self, *runs: tuple[range, int]) -> list[_Seconds]:
        """The seconds of each run, a piece and its rows of logits. They take turns, so that a slow moment is all's."""
        context = max(1, min(CONTEXT, self.cfg.max_ctx - 1))
        chunk = min(self.prefill_chunk, context)
        steps: dict[WorkKind, tuple[int, int]] = {"decode": (context, 1), "prefill": (0, chunk)}
        with ExitStack() as stack:
            loaded = {piece: stack.enter_context(self._loaded(piece, context, chunk)) for piece in dict(runs)}
            took = {
                work: _medians([partial(loaded[piece], pos, rows, logits) for piece, logits in runs], REPEATS[work])
                for work, (pos, rows) in steps.items()
            }
        return [{work: took[work][run] for work in took} for run in range(len(runs))]

    @contextmanager
    def _loaded(self, piece: range, context: int, chunk: int) -> Iterator[_Step]:
        """A piece alone, warm, with `context` rows in its cache."""
        model = self.model.load(self.path, piece, self.device)
        x = self._input(piece, context)
        with Cache.new_ppn_slice(self.device, piece.start, piece.stop, self.cfg, context + 1, policy=self.policy) as cache:

            def step(pos: int, rows: int, logits: int) -> float:
                cache.pos = pos
                batch = StepBatch((Segment(pos, rows, logits),))
                started = perf_counter()
                model.forward(batch, x[:rows], [cache])
                return perf_counter() - started

            for pos in range(0, context, chunk):
                step(pos, min(chunk, context - pos), 0)
            step(context, 1, 1)
            yield step

    def _input(self, piece: range, rows: int) -> Array:
        """What enters a piece: tokens, or hidden rows."""
        random = np.random.default_rng(0)
        if piece.start == 0:
            return random.integers(self.cfg.n_vocab, size=rows, dtype=np.int32)
        return random.standard_normal((rows, self.cfg.n_embd), np.float32)


def _medians(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    rounds = [[run() for run in runs] for _ in range(repeats)]
    return [median(took) for took in zip(*rounds, strict=True)]
