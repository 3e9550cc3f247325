"""What a model's layers take is measured with a clock that stands still but for what the forwards of these tests add to it."""

from __future__ import annotations

import logging
import weakref
from typing import Any, get_args

import numpy as np
import pytest

import memra_pp
from memra_pp import cli
from memra_pp.admission import fence_by_time
from memra_pp.cache import KvPolicy
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan, SharedKvPlan
from memra_pp.driver.launch import layer_times
from memra_pp.driver.launch.launch import Balance
from memra_pp.driver.launch.layer_times import CONTEXT, REPEATS, measure_layers
from memra_pp.models import Gemma3

POLICY = KvPolicy()
EMBED, HEAD = 0.25, 40.0
KV = KvPlan(1, 32, 32)


class Clock:
    """Costs of each layer a row, and one more a step; of the embedding a row; and of the head a row of logits."""

    def __init__(self, layers: dict[int, float]) -> None:
        self.layers, self.now = layers, 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, ran: range, rows: int, logits: int, first: bool, last: bool) -> None:
        self.now += sum(self.layers[il] * (rows + 1) for il in ran) + EMBED * rows * first + HEAD * logits * last


def toy(cfg: ModelConfig, clock: Clock) -> Any:
    """A `StageModel` class without weights or arithmetic."""

    class Toy:
        alive: weakref.WeakSet[Any] = weakref.WeakSet()  # noqa: RUF012
        loads: list[range] = []  # noqa: RUF012
        steps: list[tuple[range, int, int]] = []  # noqa: RUF012

        def __init__(self, layers: range) -> None:
            self.cfg, self.layers = cfg, layers

        @classmethod
        def load(cls, path: Any, layers: range, device: Any) -> Any:
            assert len(cls.alive) < 2
            model = cls(layers)
            cls.alive.add(model)
            cls.loads.append(layers)
            return model

        def workspace_bytes(self, max_rows: int) -> int:
            return 0

        def forward(self, batch: Any, x: Any, caches: Any) -> Any:
            [segment], [cache] = batch.segments, caches
            assert cache.pos == segment.pos and cache.max_ctx >= segment.pos + segment.rows
            kept = [il for il in self.layers if cache.kv[il] is not None or cache.recur[il] is not None]
            assert kept == [il for il in self.layers if not isinstance(cfg.layers[il], SharedKvPlan)]
            tokens = x.dtype == np.int32 and x.ndim == 1 and x.min() >= 0 and x.max() < cfg.n_vocab
            assert tokens if self.layers.start == 0 else x.dtype == np.float32 and x.shape[1] == cfg.n_embd
            assert len(x) == segment.rows
            self.steps.append((self.layers, segment.pos, segment.rows))
            last = self.layers.stop == cfg.n_layer
            clock.step(self.layers, segment.rows, segment.logits, self.layers.start == 0, last)

    return Toy


def model(*layers: Any, n_mtp: int = 0, max_ctx: int = 4096) -> ModelConfig:
    return ModelConfig("test", len(layers) - n_mtp, 64, 100, max_ctx, layers)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """`(cfg, costs, chunk) -> ({work: WorkTimes}, the model's class, what was told)`."""

    def measure(cfg: ModelConfig, costs: list[float], chunk: int = 64) -> Any:
        clock, told = Clock(dict(enumerate(costs))), []
        monkeypatch.setattr(layer_times, "perf_counter", clock)
        model = toy(cfg, clock)
        times = measure_layers(tmp_path, cfg, model, POLICY, 1, chunk, lambda *step: told.append(step))
        return times, model, told

    return measure


def test_each_layer_and_the_head_are_told_apart(measured):
    cfg, costs = model(KV, RecurrentPlan(4, 3, 8), KV, KV), [1.0, 4.0, 2.0, 8.0]
    times, toy, told = measured(cfg, costs)
    for work, rows in (("decode", 1), ("prefill", 64)):
        # Nothing says that another layer is of the first's kind, so that the embedding is in that one's time.
        assert times[work].embed_s == 0
        assert times[work].layers_s == tuple(c * (rows + 1) + EMBED * rows * (il == 0) for il, c in enumerate(costs))
        assert times[work].head_s == HEAD
    assert toy.loads == [range(il, il + 1) for il in range(4)]
    assert not toy.alive
    texts = ["layer 0 and the embedding", "layer 1", "layer 2", "layer 3 and the head"]
    assert told == [(f"timing {text}", done, 4) for done, text in enumerate(texts)]


def test_the_kinds_of_work_want_different_cuts(measured):
    cfg = model(*[KV] * 8)
    times, _, _ = measured(cfg, [1.0] * 8, chunk=512)
    assert fence_by_time(cfg, times["decode"], 2) == (0, 7, 8)
    assert fence_by_time(cfg, times["prefill"], 2) == (0, 4, 8)


def test_layers_that_share_rows_run_together(measured):
    cfg = model(KV, KV, SharedKvPlan(1), SharedKvPlan(0), KV, KV)
    times, toy, _ = measured(cfg, [1.0, 2.0, 3.0, 6.0, 5.0, 7.0])
    assert toy.loads == [range(4), range(4, 5), range(5, 6)]
    assert times["decode"].layers_s == (6.0 + EMBED / 4,) * 4 + (10.0, 14.0)


@pytest.mark.parametrize("layers", [[KV, KV], [KV, SharedKvPlan(0)], [KV]])
def test_what_a_model_runs_after_its_trunk_is_the_last_layer_s(measured, layers):
    cfg = model(*layers, KV, n_mtp=1)
    times, toy, _ = measured(cfg, [1.0] * (len(layers) + 1))
    assert toy.loads[-1].stop == cfg.n_layer
    assert sum(times["decode"].layers_s) == 2 * cfg.n_layer + EMBED
    assert len(times["decode"].layers_s) == cfg.n_trunk
    assert times["prefill"].head_s == HEAD


@pytest.mark.parametrize(
    ("chunk", "max_ctx", "context"), [(1, 4096, CONTEXT), (200, 4096, CONTEXT), (4096, 100, 99), (8, 1, 1)]
)
def test_a_decode_has_a_context_behind_it_and_a_prefill_none(measured, chunk, max_ctx, context):
    times, toy, _ = measured(model(KV, KV, max_ctx=max_ctx), [1.0, 1.0], chunk)
    fill = [(pos, min(chunk, context - pos)) for pos in range(0, context, chunk)]
    steps = [(pos, rows) for layers, pos, rows in toy.steps if layers.start == 0]
    assert steps[: len(fill)] == fill
    assert set(steps[len(fill) :]) == {(context, 1), (0, min(chunk, context))}
    assert times["prefill"].layers_s[1] == min(chunk, context) + 1


def test_a_slow_moment_is_no_layer_s_time(monkeypatch, tmp_path):
    clock = Clock({0: 1.0, 1: 1.0, 2: 1.0})
    cfg = model(KV, KV, KV)
    monkeypatch.setattr(layer_times, "perf_counter", clock)

    class Stalled(toy(cfg, clock)):
        def forward(self, *step: Any) -> None:
            super().forward(*step)
            clock.now += 1000.0 * (len(self.steps) % 5 == 0)

    times = measure_layers(tmp_path, cfg, Stalled, POLICY, 1, 512, lambda *step: None)
    assert max(times["decode"].layers_s) < 4 and times["decode"].head_s == HEAD


class Costly(Gemma3):
    """The tiny model, with costs."""

    clock = Clock(dict.fromkeys(range(6), 1.0))
    loads: list[range] = []  # noqa: RUF012
    ran: list[int] = []  # noqa: RUF012

    @classmethod
    def load(cls, path: Any, layers: range, device: Any) -> Any:
        cls.loads.append(layers)
        return super().load(path, layers, device)

    def forward(self, batch: Any, x: Any, caches: Any) -> Any:
        y = super().forward(batch, x, caches)
        self.ran.append(self.layers.start)
        self.clock.step(self.layers, len(x), batch.n_logits, self.embedding is not None, self.head is not None)
        return y


@pytest.fixture
def costly(monkeypatch):
    monkeypatch.setattr(layer_times, "perf_counter", Costly.clock)
    monkeypatch.setattr(Costly, "loads", [])
    monkeypatch.setattr(Costly, "ran", [])
    return Costly


def test_layers_of_one_kind_are_measured_once_and_the_embedding_against_another_of_its_kind(costly, tiny):
    cfg = ModelConfig.from_path(tiny)
    times = measure_layers(tiny, cfg, costly, POLICY, 1, 64, lambda *step: None)
    kinds = [plan == cfg.layers[0] for plan in cfg.layers]
    twin, other = 1 + kinds[1:].index(True), kinds.index(False)
    first, *inner = [range(il, il + 1) for il in (0, twin, other) if il != 5]
    assert costly.loads == [first, *inner, range(5, 6)]
    filled, timed = 2 * (CONTEXT // 64 + 1), sum(REPEATS.values())
    assert costly.ran[filled : filled + 2 * timed] == [0, twin] * timed
    for work, rows in (("decode", 1), ("prefill", 64)):
        assert times[work].embed_s == EMBED * rows
        assert times[work].layers_s == (rows + 1,) * 6
        assert times[work].head_s == HEAD


@pytest.mark.parametrize(("balance", "fence"), [("time", [0, 5, 6]), ("time:decode", [0, 5, 6]), ("time:prefill", [0, 3, 6])])
def test_a_launch_cuts_where_the_work_asked_for_is_fastest(costly, tiny, caplog, balance, fence):
    prompt, told = list(range(3, 40)), []
    options: dict[str, Any] = {"backend": "local", "stages": 2, "max_ctx": 256, "stage_model": costly}
    with memra_pp.launch(tiny, **options) as pipe, pipe.open(prompt) as s:
        assert pipe.stats()["cut"] == {"by": "even"}
        even = [s.prefill(), s.decode(7)]
    with (
        caplog.at_level(logging.INFO, "memra_pp.driver.launch.cut"),
        memra_pp.launch(tiny, balance=balance, progress=lambda text, done, of: told.append(text), **options) as pipe,
        pipe.open(prompt) as s,
    ):
        timed = [s.prefill(), s.decode(7)]
        stats = pipe.stats()
    assert np.array_equal(np.array(even).view(np.uint32), np.array(timed).view(np.uint32))
    assert stats["fence"] == fence
    assert stats["cut"]["by"] == ("time:decode" if balance == "time" else balance)
    assert stats["cut"]["decode"] == {
        "fence": [0, 5, 6],
        "stage_s": [10 + EMBED, 2 + HEAD],
        "embed_s": EMBED,
        "layers_s": [2.0] * 6,
        "head_s": HEAD,
    }
    assert stats["cut"]["prefill"]["stage_s"] == [3 * 513 + 512 * EMBED, 3 * 513 + HEAD]
    [record] = caplog.records
    assert "decode is fastest with the fence [0, 5, 6] and prefill is fastest with the fence [0, 3, 6]" in record.message
    assert told[0] == "timing layer 0 and the embedding" and any("loading" in text for text in told)


def test_stats_tell_what_cut_a_model(tiny, monkeypatch):
    def by(**options: Any) -> Any:
        with memra_pp.launch(tiny, backend="local", max_ctx=64, **options) as pipe:
            return pipe.stats()["cut"]

    assert by() == by(stages=4) == {"by": "even"}
    assert by(cuts=[3]) == by(cuts=[1]) == {"by": "cuts"}
    assert by(stages=2, balance="bytes") == {"by": "bytes"}
    monkeypatch.setenv("MEMRA_PP_SPLITS", "1,2")
    assert by() == {"by": "cuts"}


def test_real_times_of_a_real_model(tiny):
    with memra_pp.launch(tiny, backend="local", stages=3, balance="time", max_ctx=256) as pipe:
        cut = pipe.stats()["cut"]
        assert list(pipe.fence) == cut["decode"]["fence"]
    for work in ("decode", "prefill"):
        assert min(cut[work]["layers_s"]) > 0 <= cut[work]["head_s"]
        assert sum(cut[work]["stage_s"]) == pytest.approx(
            cut[work]["embed_s"] + sum(cut[work]["layers_s"]) + cut[work]["head_s"]
        )
    assert sum(cut["prefill"]["layers_s"]) > sum(cut["decode"]["layers_s"])


def test_the_command_takes_every_balance_that_launch_does():
    for balance in get_args(Balance):
        assert cli._parser().parse_args(["run", "--prompt", "x", "--balance", balance]).balance == balance
