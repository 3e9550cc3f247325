"""Opening sessions: what is charged is what is held, waits end, and whatever goes wrong in between leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from overlapping import hold

import memra_pp
from memra_pp.admission import Admit, Defer, Refuse
from memra_pp.cache import slab_bytes, stage_layout
from memra_pp.config import ModelConfig
from memra_pp.driver.launch import cut
from memra_pp.errors import AdmissionError, CapacityExceeded, ConfigError, InputError, StageError
from memra_pp.models import Gemma3, Qwen35
from memra_pp.stage.frames import CLOSE, OPEN, STEP

WAIT_S = 30.0
PROMPT, NEW = [1, 2, 3], 20


def charges_of(model: Path, stages: int = 2, ctx: int = len(PROMPT) + NEW + 8) -> list[int]:
    with memra_pp.launch(model, backend="local", stages=stages) as pipe:
        return [slab_bytes(stage_layout(pipe.cfg, pipe.fence, s, ctx, pipe.policy, snapshots=1)) for s in range(stages)]


@pytest.fixture(scope="module")
def charges(data: Path) -> list[int]:
    return charges_of(data / "hybrid")


@pytest.fixture
def room_for(hybrid: Path, charges: list[int]) -> Iterator[Callable[..., memra_pp.Pipeline]]:
    """Launches pipelines that have room for some sessions; everything they gave out has come back when they close."""
    made: list[memra_pp.Pipeline] = []

    def launch(sessions: int = 2, **options: Any) -> memra_pp.Pipeline:
        budgets = [sessions * charge for charge in charges]
        pipe = memra_pp.launch(hybrid, backend="local", stages=2, threads=1, **{"budget_bytes": budgets} | options)
        made.append(pipe)
        return pipe

    yield launch
    for pipe in made:
        if not pipe.chain.failed:
            for session in list(pipe._sessions.values()):
                session.close()
            for device in pipe.stats()["devices"]:
                assert device["reserved_bytes"] == device["allocated_bytes"] == 0
                assert device["largest_free_bytes"] == device["free_bytes"]
        pipe.close()


def opened(pipe: memra_pp.Pipeline, **options: Any) -> memra_pp.Session:
    return pipe.open(PROMPT, **{"max_new_tokens": NEW} | options)


def test_stats_show_what_every_device_has_given_out(room_for, charges):
    pipe = room_for(3)
    sessions = [opened(pipe) for _ in range(2)]
    list(sessions[0].generate(4))
    stats = pipe.stats()
    for stage, (device, charge) in enumerate(zip(stats["devices"], charges, strict=True)):
        assert device == {
            "device": f"cpu:{stage}",
            "stages": [stage],
            "sessions": 2,
            "budget_bytes": 3 * charge,
            "learned_bytes": 0,
            "reserved_bytes": 2 * charge,
            "allocated_bytes": 2 * charge,
            "free_bytes": charge,
            "largest_free_bytes": charge,
        }
    assert stats["admission"] == {
        "admitted": 2, "deferred": 0, "refused": 0, "waiting": 0, "typical_hold_s": 10.0, "reasons": []
    }  # fmt: skip
    sessions[0].close()
    assert [d["largest_free_bytes"] for d in pipe.stats()["devices"]] == charges  # a hole in front, and what is behind


def test_without_a_timeout_an_open_that_has_to_wait_is_refused_at_once(room_for, charges):
    pipe = room_for(1)
    holder = opened(pipe)
    with pytest.raises(AdmissionError, match=r"stage 0 needs .* try again in about .* s.*timeout") as refused:
        opened(pipe)
    verdict = refused.value.verdict
    assert isinstance(verdict, Defer) and verdict.short_by == max(charges) and verdict.retry_after_s > 0
    with pytest.raises(AdmissionError) as refused:
        opened(pipe, timeout=0)
    assert isinstance(refused.value.verdict, Defer) and holder.pos == 0


def test_what_can_never_fit_is_refused_at_once_and_the_context_it_names_is_admitted(room_for):
    pipe = room_for(2)
    with pytest.raises(AdmissionError, match="longest context that fits is") as refused:
        opened(pipe, max_new_tokens=5000, timeout=WAIT_S)
    verdict = refused.value.verdict
    assert isinstance(verdict, Refuse) and verdict.retry_after_s is None
    new = verdict.longest_ctx - len(PROMPT) - 8
    with opened(pipe, max_new_tokens=new) as session:
        assert session.shape.ctx == verdict.longest_ctx
    with pytest.raises(AdmissionError):
        opened(pipe, max_new_tokens=new + 1)


def test_an_open_waits_until_another_session_closes_and_the_first_to_come_is_the_first_to_open(room_for):
    pipe, order = room_for(1), []
    holder = opened(pipe)

    def client(name: int) -> None:
        with opened(pipe, timeout=WAIT_S) as session:
            order.append(name)
            assert len(list(session.generate(2))) == 2

    clients = [threading.Thread(target=client, args=(name,)) for name in range(3)]
    for n, thread in enumerate(clients, start=1):
        thread.start()
        until(lambda n=n: pipe.stats()["admission"]["waiting"] == n)
    holder.close()
    for thread in clients:
        thread.join(WAIT_S)
    assert order == [0, 1, 2]


def until(true: Callable[[], bool]) -> None:
    """Asks over and over; each answer takes a trip through the stages' books."""
    deadline = threading.Event()
    timer = threading.Timer(WAIT_S, deadline.set)
    timer.start()
    try:
        while not true():
            assert not deadline.is_set()
    finally:
        timer.cancel()


def test_a_wait_that_is_over_leaves_the_queue_and_says_when_to_try_again(room_for):
    pipe = room_for(1)
    holder = opened(pipe)
    with pytest.raises(AdmissionError, match=r"did not come free in time.*try again in about") as refused:
        opened(pipe, timeout=0.01)
    assert isinstance(refused.value.verdict, Refuse) and refused.value.verdict.reason == "deadline"
    assert pipe.stats()["admission"] == {
        "admitted": 1, "deferred": 0, "refused": 1, "waiting": 0, "typical_hold_s": 10.0,
        "reasons": [{"verdict": "refused", "stage": refused.value.verdict.stage, "reason": "deadline", "count": 1}],
    }  # fmt: skip
    holder.close()
    opened(pipe)


@pytest.mark.parametrize("timeout", [-1, "1", float("nan"), float("inf"), True, [1]])
def test_a_timeout_is_a_bounded_number_of_seconds(room_for, timeout):
    with pytest.raises(InputError, match="timeout"):
        opened(room_for(1), timeout=timeout)


@pytest.fixture
def turned_away() -> Iterator[Callable[..., None]]:
    """Has a thread wait for a session of a full pipeline, in vain: it is to be sent away with a `StageError`."""
    threads, said = [], []

    def start(pipe: memra_pp.Pipeline) -> None:
        def client() -> None:
            with pytest.raises(StageError, match="while this session waited") as error:
                opened(pipe, timeout=WAIT_S)
            said.append(error)

        threads.append(threading.Thread(target=client))
        threads[-1].start()
        until(lambda: pipe._door.stats()["admission"]["waiting"] == len(threads))

    yield start
    for thread in threads:
        thread.join(WAIT_S)
    assert len(said) == len(threads) > 0


def test_a_pipeline_that_closes_sends_those_who_wait_away(room_for, turned_away):
    pipe = room_for(1)
    holder = opened(pipe)
    turned_away(pipe)
    turned_away(pipe)
    pipe.close()
    with pytest.raises(StageError, match="closed"):
        opened(pipe)
    assert holder.pos == 0


def test_who_waits_sees_to_closes_that_were_cut_short(room_for):
    """As when a finalizer has closed a session in the middle of another thread's step."""
    pipe = room_for(1)
    holder = opened(pipe)
    thread = threading.Thread(target=lambda: opened(pipe, timeout=WAIT_S).close())
    thread.start()
    until(lambda: pipe._door.stats()["admission"]["waiting"] == 1)
    pipe._sessions.pop(holder.id)
    pipe._opener._ending.add(holder.id)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_who_waits_is_told_when_a_stage_is_lost(room_for, turned_away, monkeypatch):
    pipe = room_for(1)
    holder = opened(pipe)
    turned_away(pipe)
    monkeypatch.setattr(type(pipe.chain), "failed", True)
    until(lambda: pipe._door.stats()["admission"]["waiting"] == 0)
    monkeypatch.undo()
    assert holder.pos == 0


def test_an_interrupt_while_waiting_leaves_the_queue(room_for, monkeypatch):
    pipe = room_for(1)
    holder = opened(pipe)

    def interrupted() -> None:
        assert pipe._door.stats()["admission"]["waiting"] == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pipe._opener, "finish", interrupted)
        opened(pipe, timeout=WAIT_S)
    assert pipe.stats()["admission"]["waiting"] == 0
    holder.close()
    opened(pipe)


def test_a_session_that_is_dropped_is_closed_when_the_next_one_comes(room_for):
    pipe = room_for(1)
    session = opened(pipe)
    del session
    gc.collect()
    with opened(pipe) as session:
        traversals = pipe.stats()["traversals"]
    del session
    gc.collect()
    assert pipe.stats()["traversals"] == traversals + 1 and not pipe._drops


def test_a_task_waits_without_a_thread_and_one_that_is_cancelled_leaves_the_queue(room_for):
    pipe = room_for(1)

    async def tasks() -> None:
        holder = await pipe.open_async(PROMPT, max_new_tokens=NEW)
        threads = threading.active_count()
        waits = [asyncio.create_task(pipe.open_async(PROMPT, max_new_tokens=NEW, timeout=WAIT_S)) for _ in range(3)]
        await asyncio.sleep(0)
        assert pipe.stats()["admission"]["waiting"] == 3 and threading.active_count() == threads
        waits[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        holder.close()
        first = await waits[1]
        assert not waits[2].done() and pipe.stats()["admission"]["waiting"] == 1
        first.close()
        (await waits[2]).close()
        holder = opened(pipe)
        with pytest.raises(AdmissionError) as refused:
            await pipe.open_async(PROMPT, max_new_tokens=NEW, timeout=0.01)
        assert refused.value.verdict.reason == "deadline"
        with pytest.raises(InputError, match="timeout"):
            await pipe.open_async(PROMPT, timeout=-1)

    asyncio.run(tasks())


def test_a_task_that_is_cancelled_while_its_stages_open_gives_everything_back(room_for, monkeypatch):
    pipe = room_for(1)
    reached, go = hold(pipe, monkeypatch, OPEN)

    async def tasks() -> None:
        task = asyncio.create_task(pipe.open_async(PROMPT, max_new_tokens=NEW))
        await asyncio.to_thread(reached.wait, WAIT_S)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        (await pipe.open_async(PROMPT, max_new_tokens=NEW, timeout=WAIT_S)).close()

    asyncio.run(tasks())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_refuses_at_the_last_moment_costs_nothing_on_any(room_for, monkeypatch, stage):
    pipe = room_for(1)
    device = pipe.chain._workers[stage].device
    slab = device.slab

    def full(offset: int, size: int) -> Any:
        monkeypatch.setattr(device, "slab", slab)
        raise CapacityExceeded("the device is full")

    monkeypatch.setattr(device, "slab", full)
    with pytest.raises(AdmissionError, match=f"stage {stage}: the device is full"):
        opened(pipe)
    assert [d["reserved_bytes"] for d in pipe._door.stats()["devices"]] == [0, 0]
    assert [d["reserved_bytes"] + d["allocated_bytes"] for d in pipe.stats()["devices"]] == [0, 0]
    opened(pipe)


def test_a_stage_that_cannot_close_a_session_keeps_its_bytes_charged_until_it_can(room_for, monkeypatch):
    pipe = room_for(2)
    kept, going = opened(pipe), opened(pipe)
    slab = pipe.chain._workers[0].sessions[going.id].slab

    def stuck() -> None:
        monkeypatch.undo()
        raise RuntimeError("the device is busy")

    monkeypatch.setattr(slab, "close", stuck)
    with pytest.raises(StageError, match=r"stage 0 could not close session .*the device is busy"):
        going.close()
    assert [d["reserved_bytes"] for d in pipe._door.stats()["devices"]] == list(pipe._opener.held)
    assert len(list(kept.generate(3))) == 3
    opened(pipe).close()


def test_a_reset_keeps_the_session_s_slab(room_for, charges):
    """Also one that fails: what the stage holds is what was charged, and others come and go."""
    pipe = room_for(2)
    session = opened(pipe)
    session.prefill()
    worker = pipe.chain._workers[1]
    before = worker.sessions[session.id].slab
    worker.model.forward, forward = raising(RuntimeError("unlucky")), worker.model.forward
    with pytest.raises(StageError, match="unlucky"):
        session.decode(1)
    worker.model.forward = forward
    assert worker.sessions[session.id].slab is before and worker.device.slab_bytes == charges[1]
    opened(pipe).close()


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*args: Any) -> Any:
        raise error

    return raise_it


def test_a_wait_ends_in_time_and_stats_are_there_while_another_session_opens(room_for, monkeypatch):
    pipe = room_for(2)
    holder = opened(pipe)
    reached, go = hold(pipe, monkeypatch, OPEN)
    thread = threading.Thread(target=lambda: opened(pipe).close())
    thread.start()
    assert reached.wait(WAIT_S)
    with pytest.raises(AdmissionError, match="did not come free in time"):
        opened(pipe, timeout=0.01)
    assert pipe.stats()["devices"][0]["sessions"] == 2 and holder.pos == 0
    go.set()
    thread.join(WAIT_S)


def test_a_wait_ends_in_time_and_stats_are_there_in_the_middle_of_a_step_that_a_close_waits_for(room_for, monkeypatch):
    pipe = room_for(2)
    busy, dropped = opened(pipe), opened(pipe)
    reached, go = hold(pipe, monkeypatch, STEP)
    thread = threading.Thread(target=busy.prefill)
    thread.start()
    assert reached.wait(WAIT_S)
    pipe._opener.end_later(dropped.id)
    assert pipe.stats()["devices"][0]["sessions"] == 2
    pipe._opener._meanwhile(lambda: True)
    assert not go.is_set()
    go.set()
    thread.join(WAIT_S)
    assert pipe._door.stats()["devices"][0]["sessions"] == 1  # closed by the thread whose step it was


def test_a_close_is_sent_once_however_many_wait_for_it(room_for, monkeypatch):
    """A second one would come back after the session is open again, when it is unparked, and take its bytes from it."""
    pipe = room_for(4)
    session = opened(pipe)
    session.prefill()
    closes = []
    closing, go = hold(pipe, monkeypatch, CLOSE)
    held = pipe.chain._send
    monkeypatch.setattr(
        pipe.chain, "_send", lambda frame: (closes.extend(e.session for e in frame.entries if e.op == CLOSE), held(frame))
    )
    threads = [
        threading.Thread(target=session.park),
        *(threading.Thread(target=lambda: opened(pipe).close()) for _ in range(3)),
    ]
    threads[0].start()
    assert closing.wait(WAIT_S)
    for thread in threads[1:]:
        thread.start()
    until(lambda: len(pipe._opener._sent) == len(threads))
    go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert closes.count(session.id) == 1


def test_a_task_that_waits_is_told_when_a_stage_is_lost(room_for, monkeypatch):
    pipe = room_for(1)
    holder = opened(pipe)

    async def tasks() -> None:
        waits = asyncio.create_task(pipe.open_async(PROMPT, max_new_tokens=NEW, timeout=WAIT_S))
        await asyncio.sleep(0)
        with monkeypatch.context() as patched:
            patched.setattr(type(pipe.chain), "failed", True)
            with pytest.raises(StageError, match="while this session waited"):
                await waits

    asyncio.run(tasks())
    assert holder.pos == 0


@pytest.mark.parametrize("op", [OPEN, CLOSE])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_cuts_an_open_or_a_close_short_is_made_good_by_the_next(room_for, monkeypatch, op, after, error):
    pipe = room_for(2)
    kept, going = opened(pipe), opened(pipe)
    submit, armed = pipe.scheduler.submit, [True]

    def cut(work: Any) -> None:
        strike = armed and work.entry.op == op
        if strike and not after:
            armed.clear()
            raise error
        submit(work)
        if strike:
            pipe.scheduler.wait(work)
            armed.clear()
            raise error

    if op == CLOSE:
        monkeypatch.setattr(pipe.scheduler, "submit", cut)
        with pytest.raises(error):
            going.close()
    else:
        going.close()
        monkeypatch.setattr(pipe.scheduler, "submit", cut)
        with pytest.raises(error):
            opened(pipe)
    opened(pipe).close()
    assert len(list(kept.generate(3))) == 3


def test_what_stages_hold_is_compared_with_what_was_charged(room_for, monkeypatch):
    pipe = room_for(2)
    with opened(pipe):
        pipe.chain._workers[1].device.slab_bytes += 1
        with pytest.raises(StageError, match=r"stage 1 holds .* were charged"):
            opened(pipe)
        pipe.chain._workers[1].device.slab_bytes -= 1


def test_a_device_that_hands_out_more_than_was_planned_gives_less_to_sessions(room_for, charges):
    class Hungry(Qwen35):
        """Keeps a buffer of its own, which its workspace did not plan for."""

        def workspace_bytes(self, max_rows: int) -> int:
            return 1000

        def forward(self, *args: Any) -> Any:
            self.device.free(self.device.uninit(400))
            return super().forward(*args)

    pipe = room_for(2, stage_model=Hungry)
    with opened(pipe) as session:
        list(session.generate(2))
    assert [d["learned_bytes"] for d in pipe.stats()["devices"]] == [600, 600]
    with opened(pipe), pytest.raises(AdmissionError, match="600 short"):
        opened(pipe)


def test_stages_may_share_a_device(hybrid, charges, monkeypatch):
    whole = sum(charges)
    for devices in (["cpu:0", "cpu:0"], "auto"):
        monkeypatch.setenv("MEMRA_PP_DEVICES", "cpu:0, cpu:0")
        with memra_pp.launch(hybrid, backend="local", stages=2, devices=devices, budget_bytes=[whole - 1, 1]) as pipe:
            with (
                opened(pipe),
                pytest.raises(AdmissionError, match=rf"device cpu:0 has 0 free \({whole:,} short\)"),
            ):
                opened(pipe)
            [device] = pipe.stats()["devices"]
            assert (device["stages"], device["budget_bytes"], device["device"]) == ([0, 1], whole, "cpu:0")
            with opened(pipe) as session:
                assert len(list(session.generate(3))) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ["cpu:0"]},
        {"devices": ["cpu:0", "gpu:0"]},
        {"devices": ["cpu:0", 1]},
        {"devices": "gpu"},
        {"bypass": -1},
        {"bypass": 1.5},
        {"tenant_share": 0},
        {"tenant_share": 1.5},
        {"tenant_share": "half"},
        {"default_max_new_tokens": 0},
        {"balance": "time:verify"},
        {"balance": "time", "stages": None, "cuts": [4]},
        {"balance": "time", "stages": None},
        {"balance": "time", "stages": 99},
        {"balance": "bytes", "stages": None, "cuts": [4]},
        {"balance": "bytes", "stages": 99},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_before_anything_starts(hybrid, options):
    with pytest.raises(ConfigError, match=list(options)[-1].removesuffix("s")):
        memra_pp.launch(hybrid, backend="local", **{"stages": 2} | options)


def test_a_request_that_does_not_say_how_much_it_wants_is_charged_a_default_and_not_the_whole_context(hybrid):
    with memra_pp.launch(hybrid, backend="local", default_max_new_tokens=40) as pipe:
        with pipe.open(PROMPT) as session:
            assert session.shape.ctx == len(PROMPT) + 40 + 8
        assert len(list(pipe.generate(PROMPT, sampling=memra_pp.SamplingParams(eos_ids=())))) == 40
    with memra_pp.launch(hybrid, backend="local") as pipe, pipe.open(PROMPT, speculate=2) as session:
        assert session.shape.ctx == len(PROMPT) + 512 + 72 < pipe.max_ctx


def test_a_tenant_s_cap_and_a_bypass_reach_admission(room_for):
    pipe = room_for(4, tenant_share=0.5, bypass=1)
    mine = [opened(pipe, tenant="me") for _ in range(2)]
    with pytest.raises(AdmissionError, match=r"tenant 'me' may hold 0\.5"):
        opened(pipe, tenant="me")
    yours = opened(pipe, tenant="you")
    mine[0].close()
    mine.append(opened(pipe, tenant="me"))
    assert yours.pos == 0
    for tenant in (None, 7, "x" * 1000):
        with pytest.raises(InputError, match="tenant"):
            opened(pipe, tenant=tenant)


def test_a_verdict_of_admission_is_what_the_door_gives(room_for):
    pipe = room_for(1)
    session, request, wait_s = pipe._asked(PROMPT, NEW, 0, "replay", 1, None, "")
    admit = pipe._door.enter(request, wait_s, lambda: None)
    assert isinstance(admit, Admit) and pipe.stats()["devices"][0]["reserved_bytes"] == admit.charges[0]
    pipe._door.leave(session.id)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("uneven", [1, 2, 5])
def test_a_cut_by_bytes_holds_the_most_sessions_that_any_cut_can(hybrid, stages, uneven):
    budgets = [1_000_000 * (uneven if s == stages - 1 else 1) for s in range(stages)]

    def fits(**cut: Any) -> tuple[int, list[int]]:
        with memra_pp.launch(hybrid, backend="local", budget_bytes=budgets, max_ctx=1000, **cut) as pipe:
            sessions = []
            with pytest.raises(AdmissionError):
                while True:
                    sessions.append(pipe.open(PROMPT, max_new_tokens=5000))
            return len(sessions), list(pipe.fence)

    n, fence = fits(stages=stages, balance="bytes")
    cuts = itertools.combinations(range(1, 8), stages - 1)
    assert n == max(fits(cuts=list(cut))[0] for cut in cuts) >= fits(stages=stages)[0]
    if uneven == 5:
        assert fence[-2] < 8 * (stages - 1) // stages


def test_a_cut_by_bytes_weighs_what_the_stages_will_hold(gemma, tiny):
    """Gemma-3-270M's output matrix is kept in q8_0, as are those of its layers that its file has in q8_0 and q5_0."""
    cfg = ModelConfig.from_path(gemma)
    weights = cut._weights(cfg, gemma, Gemma3)
    assert weights.head_matrix == cfg.n_vocab * cfg.n_embd // 32 * 34
    assert weights.head == weights.head_matrix + 4 * cfg.n_embd and weights.embedding == 0
    attention, forward = cfg.n_embd * (1024 + 256 + 256), cfg.n_embd * 2 * 2048
    kept = cfg.n_layer * (attention + forward)
    plain = 268_098_176 - (cfg.n_vocab + 1) * cfg.n_embd - kept
    assert sum(weights.layers) == kept // 32 * 34 + 4 * plain
    with memra_pp.launch(tiny, backend="local", stages=3, balance="bytes", max_ctx=256) as pipe:
        assert len(pipe.fence) == 4 and list(pipe.generate([1, 2], max_new_tokens=3))


def test_a_cut_by_bytes_needs_a_device_for_every_stage(hybrid):
    with pytest.raises(ConfigError, match="devices"):
        memra_pp.launch(hybrid, backend="local", stages=2, balance="bytes", devices=["cpu", "cpu"])


def test_a_task_whose_open_finds_no_thread_any_more_leaves_nothing_reserved(room_for):
    pipe = room_for(2)

    async def tasks() -> None:
        await asyncio.get_running_loop().shutdown_default_executor()
        with pytest.raises(RuntimeError, match="shutdown"):
            await pipe.open_async(PROMPT, max_new_tokens=NEW)

    asyncio.run(tasks())
    opened(pipe).close()
    assert [device["reserved_bytes"] for device in pipe.stats()["devices"]] == [0, 0]
