"""What a pipeline refuses, what it charges, and that nothing is held after a close."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memra_pp
from memra_pp.cache import Cache, KvPolicy, slab_bytes, stage_layout
from memra_pp.errors import AdmissionError, CapacityExceeded, ConfigError, InputError, MemraError, StageError
from memra_pp.models import Gemma3
from memra_pp.models.protocol import Array, StepBatch


class Faulty(Gemma3):
    """Fails on a step that holds token 13."""

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        if x.dtype == np.int32 and 13 in x:
            raise ZeroDivisionError("unlucky")
        return super().forward(batch, x, caches)


@pytest.fixture
def pipe(tiny: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(tiny, backend="local", stages=3) as pipe:
        yield pipe
        assert all(stage["allocated_bytes"] == 0 for stage in pipe.stats()["stages"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stages": 0}, "stages"),
        ({"stages": 7}, "6"),
        ({"cuts": [4, 2]}, "cuts"),
        ({"cuts": [0]}, "cuts"),
        ({"cuts": [6]}, "cuts"),
        ({"cuts": [2], "stages": 3}, "stages"),
        ({"backend": "cloud"}, "backend"),
        ({"threads": 0}, "threads"),
        ({"max_ctx": 20_000}, "max_ctx"),
        ({"prefill_chunk": 5000}, "prefill_chunk"),
        ({"budget_bytes": [1, 2]}, "budget_bytes"),
        ({"step_timeout": 0}, "step_timeout"),
    ],
)
def test_a_launch_that_cannot_be_names_the_option(tiny: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        memra_pp.launch(tiny, **{"backend": "local", **options})


def test_a_model_that_is_not_there_or_damaged(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        memra_pp.launch(tmp_path / "nothing", backend="local")
    shutil.copytree(tiny, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="safetensors"):
        memra_pp.launch(tmp_path / "cut", backend="local")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ConfigError, match="GGUF"):
        memra_pp.launch(tmp_path / "text.gguf", backend="local")


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([1, 512], {}),
        ([-1], {}),
        (["a"], {}),
        ([1.5], {}),
        ([1] * 17_000, {}),
        ([1], {"max_new_tokens": -1}),
        ([1], {"speculate": 512}),
        ([1], {"recurrent": "rewind"}),
        ([1], {"snapshots": 65}),
    ],
)
def test_a_bad_request_is_refused_and_costs_no_live_session(
    pipe: memra_pp.Pipeline, prompt: list[Any], options: dict[str, Any]
) -> None:
    with pipe.open([5, 6, 7], max_new_tokens=4) as live:
        row = live.prefill()
        with pytest.raises(InputError):
            pipe.open(prompt, **{"max_new_tokens": 4, **options})
        assert live.pos == 3
        assert row.shape == live.decode(8).shape


def test_bad_tokens_and_calls_out_of_order_change_nothing(pipe: memra_pp.Pipeline) -> None:
    with pipe.open([5, 6, 7], max_new_tokens=4, speculate=2) as session:
        with pytest.raises(InputError, match="prefill"):
            session.decode(1)
        session.prefill()
        for call, argument in ((session.decode, 512), (session.verify, [1] * 4), (session.verify, []), (session.extend, [-1])):
            with pytest.raises(InputError):
                call(argument)  # type: ignore[operator]
        with pytest.raises(InputError, match="already"):
            session.prefill()
        with pytest.raises(InputError, match="nothing was sampled"):
            next(session.generate(1))
        with pytest.raises(CapacityExceeded, match="max_new_tokens"):
            session.extend([1] * 200)
        assert session.tokens == [5, 6, 7]
        session.decode(1)
    with pytest.raises(InputError, match="closed"):
        session.decode(1)
    session.close()


def test_what_is_charged_is_what_each_stage_allocates(pipe: memra_pp.Pipeline) -> None:
    with pipe.open([1] * 50, max_new_tokens=100) as session:
        stages = pipe.stats()["stages"]
        for s, stage in enumerate(stages):
            layout = stage_layout(pipe.cfg, pipe.fence, s, session.shape.ctx, pipe.policy)
            assert stage["planned_bytes"] == stage["allocated_bytes"] == slab_bytes(layout) > 0


def test_a_session_of_exactly_the_free_bytes_is_admitted_and_one_byte_more_is_not(tiny: Path) -> None:
    with memra_pp.launch(tiny, backend="local", stages=2) as pipe:
        ctx = 10 + 8
        need = [slab_bytes(stage_layout(pipe.cfg, pipe.fence, s, ctx, pipe.policy)) for s in range(2)]
    with memra_pp.launch(tiny, backend="local", stages=2, budget_bytes=need) as pipe:
        with pipe.open([1] * 5, max_new_tokens=5), pytest.raises(AdmissionError, match="stage 0"):
            pipe.open([1], max_new_tokens=0)
        with pipe.open([1] * 5, max_new_tokens=5):
            pass
    with (
        memra_pp.launch(tiny, backend="local", stages=2, budget_bytes=[need[0], need[1] - 1]) as pipe,
        pytest.raises(AdmissionError, match=r"stage 1.*1 short"),
    ):
        pipe.open([1] * 5, max_new_tokens=5)


def test_every_cut_of_the_model_gives_the_same_text(tiny: Path) -> None:
    texts = set()
    for cuts in itertools.chain([[]], [[c] for c in range(1, 6)]):
        with memra_pp.launch(tiny, backend="local", cuts=cuts) as pipe:
            texts.add(
                tuple(pipe.generate([5, 6, 7], max_new_tokens=8, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=())))
            )
    assert len(texts) == 1


def test_a_fault_in_one_session_leaves_the_others_alone(tiny: Path) -> None:
    with memra_pp.launch(tiny, backend="local", stages=2, stage_model=Faulty) as pipe:
        with pipe.open([5, 6], max_new_tokens=8) as good, pipe.open([7, 8], max_new_tokens=8) as bad:
            good.prefill(), bad.prefill()
            with pytest.raises(StageError, match=r"stage 0.*unlucky"):
                bad.decode(13)
            with pytest.raises(StageError, match="close it"):
                bad.decode(1)
            good.decode(9)
        assert all(stage["allocated_bytes"] == 0 for stage in pipe.stats()["stages"])


def test_generate_ends_with_the_context(tiny: Path) -> None:
    with memra_pp.launch(tiny, backend="local", max_ctx=20) as pipe:
        assert (
            len(list(pipe.generate([1] * 15, max_new_tokens=100, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=()))))
            == 6
        )


def test_a_generator_dropped_in_the_middle_gives_its_bytes_back(pipe: memra_pp.Pipeline) -> None:
    tokens = pipe.generate([5, 6, 7], max_new_tokens=50, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=()))
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert pipe.stats()["sessions"] == 0


def test_a_closed_pipeline_refuses_and_closes_twice(tiny: Path) -> None:
    with memra_pp.launch(tiny, backend="local") as pipe:
        session = pipe.open([1], max_new_tokens=1)
    pipe.close()
    session.close()
    with pytest.raises(MemraError, match="closed"):
        session.prefill()
    with pytest.raises(StageError, match="closed"):
        pipe.open([1], max_new_tokens=1)


def test_the_environment_names_stages_formats_and_ring_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MEMRA_PP_SPLITS", "2,3"), ("MEMRA_KV_V", "q4_0"), ("MEMRA_SWA_RING", "all")):
        monkeypatch.setenv(name, value)
    with memra_pp.launch(tiny, backend="local") as pipe:
        monkeypatch.setenv("MEMRA_KV_V", "nonsense")
        assert pipe.fence == (0, 2, 3, 6)
        assert pipe.policy == KvPolicy(v="q4_0", ring="all")
        assert len(list(pipe.generate([1], max_new_tokens=2, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=())))) == 2
    with pytest.raises(ConfigError, match="MEMRA_KV_V"):
        memra_pp.launch(tiny, backend="local")


def test_a_directory_without_a_tokenizer_says_so(pipe: memra_pp.Pipeline) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        _ = pipe.tokenizer


def test_stats_can_be_written_as_json(pipe: memra_pp.Pipeline) -> None:
    assert json.loads(json.dumps(pipe.stats()))["traversals"] == 0


@pytest.mark.parametrize("name", ["max_new_tokens", "speculate", "snapshots"])
def test_numpy_integers_are_integers_and_nothing_else_is(pipe: memra_pp.Pipeline, name: str) -> None:
    with pipe.open([5, 6, 7], max_new_tokens=4) as live:
        live.prefill()
        with pipe.open([1], **{"max_new_tokens": 4, name: np.int64(2)}) as session:
            assert type(session.shape.ctx) is int
        for value in (2.0, True, "2", *([] if name == "max_new_tokens" else [None]), [2], np.float32(2)):
            with pytest.raises(InputError, match=name):
                pipe.open([1], **{"max_new_tokens": 4, name: value})
        live.decode(8)


class Interrupts:
    """Raises KeyboardInterrupt once an entry has come back, as Ctrl-C may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pipe: memra_pp.Pipeline) -> None:
        self.armed = False
        whole = pipe.scheduler.wait

        def wait(outcome: Any) -> None:
            whole(outcome)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

        monkeypatch.setattr(pipe.scheduler, "wait", wait)


def test_an_interrupted_open_or_close_is_finished_by_the_next(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch, pipe)

    def bytes_held() -> list[tuple[int, int]]:
        return [(stage["planned_bytes"], stage["allocated_bytes"]) for stage in pipe.stats()["stages"]]

    with pipe.open([1], max_new_tokens=1):
        one = bytes_held()
        interrupts.armed = True
        with pytest.raises(KeyboardInterrupt):
            pipe.open([1], max_new_tokens=1)
        assert all(planned == allocated for planned, allocated in bytes_held())
        second = pipe.open([1], max_new_tokens=1)
        assert bytes_held() == [(2 * planned, 2 * allocated) for planned, allocated in one]
        interrupts.armed = True
        with pytest.raises(KeyboardInterrupt):
            second.close()
        with pipe.open([1], max_new_tokens=1):
            assert bytes_held() == [(2 * planned, 2 * allocated) for planned, allocated in one]
        assert bytes_held() == one


def test_an_interrupted_step_fails_its_session_alone(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch, pipe)
    with pipe.open([1, 2], max_new_tokens=4) as a, pipe.open([1, 2], max_new_tokens=4) as b:
        a.prefill(), b.prefill()
        interrupts.armed = True
        with pytest.raises(KeyboardInterrupt):
            a.decode(3)
        with pytest.raises(StageError, match="interrupted"):
            a.decode(3)
        assert b.decode(3).shape == (512,)


def test_a_session_in_another_threads_call_is_busy(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    with pipe.open([1, 2], max_new_tokens=4) as session:
        session.prefill()
        whole = pipe.chain._send

        def send(frame: Any) -> None:
            inside.set()
            assert go_on.wait(20)
            whole(frame)

        monkeypatch.setattr(pipe.chain, "_send", send)
        other = threading.Thread(target=session.decode, args=(3,))
        other.start()
        assert inside.wait(20)
        with pytest.raises(InputError, match="thread"):
            session.decode(4)
        go_on.set()
        other.join(20)
        assert session.tokens == [1, 2, 3]


def test_a_failed_local_launch_ends_what_it_had_loaded(tiny: Path) -> None:
    def threads() -> int:
        return threading.active_count()

    class Breaks(Gemma3):
        @classmethod
        def load(cls, path: Any, layers: range, device: Any) -> Gemma3:
            if layers.start:
                raise ConfigError("no second stage")
            return super().load(path, layers, device)

    before = threads()
    for _ in range(3):
        with pytest.raises(ConfigError, match="no second stage"):
            memra_pp.launch(tiny, backend="local", stages=2, threads=4, stage_model=Breaks)
    assert threads() == before


def test_stats_name_the_formats_that_are_held(tiny: Path) -> None:
    with memra_pp.launch(tiny, backend="local", policy=KvPolicy(fp8_ordinary=True)) as pipe:
        assert pipe.stats()["kv"] == ["fp8/fp8"]
    with pytest.raises(StageError, match="closed"):
        pipe.stats()


def test_generation_ends_with_the_token_that_completes_a_stop_text(gemma: Path) -> None:
    with memra_pp.launch(gemma, backend="local") as pipe:
        prompt = pipe.tokenizer.encode("1, 2, 3, 4, 5, 6,")
        decode = pipe.tokenizer.decode
        plain = list(pipe.generate(prompt, max_new_tokens=16))
        assert "9, 1" in decode(plain)
        for draft in (None, memra_pp.Draft(k=4)):
            stopping = memra_pp.SamplingParams(temperature=0, stop=("never", "9, 1"))
            tokens = list(pipe.generate(prompt, max_new_tokens=16, sampling=stopping, draft=draft))
            assert tokens == plain[: len(tokens)]
            assert decode(tokens).endswith("9, 1")


def test_a_drafter_that_misbehaves_costs_an_error_and_no_session(pipe: memra_pp.Pipeline) -> None:
    for by, says in (
        (lambda tokens, k: [512], "511"),
        (lambda tokens, k: [1] * (k + 1), "k="),
        (lambda tokens, k: None, "None"),
    ):
        with pytest.raises(InputError, match=says):
            list(pipe.generate([5, 6, 7], max_new_tokens=8, draft=memra_pp.Draft(k=2, by=by)))
    with pipe.open([5, 6, 7], max_new_tokens=8, speculate=2) as session:
        with pytest.raises(InputError, match="speculate=2"):
            next(session.generate(4, draft=memra_pp.Draft(k=3)))
        with pytest.raises(InputError, match="prefill"):
            session.round([1], next=2)
        session.prefill()
        with pytest.raises(InputError, match="next="):
            session.round([1])
        for drafts in ([1, 2, 3], [512], ["a"], None):
            with pytest.raises(InputError):
                session.round(drafts, next=2)  # type: ignore[arg-type]
        assert session.tokens == [5, 6, 7]
        assert session.round([1, 2], next=2).rows.shape == (3,)


def test_what_is_wanted_comes_back(pipe: memra_pp.Pipeline) -> None:
    with pipe.open([5, 6, 7], max_new_tokens=8, speculate=2) as a, pipe.open([5, 6, 7], max_new_tokens=8, speculate=2) as b:
        logits = np.stack([a.prefill(), a.decode(8), *a.verify([9, 10]), a.extend([11, 12])])
        best = [b.prefill(want="topk:7"), b.decode(8, want="topk:7"), *b.verify([9, 10], want="topk:7")]
        for row, top in zip(logits, best, strict=False):
            assert top["id"].tolist() == np.argsort(-row, kind="stable")[:7].tolist()
            np.testing.assert_array_equal(top["logit"], row[top["id"]])
        assert b.extend([11, 12], want="argmax") == logits[-1].argmax()
        for want in ("topk:0", "topk:513", "best", None):
            with pytest.raises(InputError, match="topk:1 to 512"):
                b.decode(1, want=want)  # type: ignore[arg-type]
        assert b.tokens == a.tokens


def test_a_stage_model_that_is_none_is_refused_before_anything_is_started(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="stage_model=<class 'int'> has no load, no workspace_bytes, no forward"):
        memra_pp.launch(tiny, stage_model=int)  # type: ignore[arg-type]
