"""`LaneChain`: an answer, or in bounded time an error that names the stage; an interrupted step leaves the chain usable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memra_pp.admission import Device
from memra_pp.admission.outcome import Outcome
from memra_pp.cache import KvPolicy
from memra_pp.config import KvPlan, ModelConfig
from memra_pp.driver import heart, lane_chain
from memra_pp.driver.batcher import Batcher
from memra_pp.driver.lane_chain import Ends, LaneChain, Recovery
from memra_pp.driver.scheduler import Scheduler
from memra_pp.driver.work import Work
from memra_pp.errors import StageError
from memra_pp.stage.frames import OPEN, OPS, PING, STEP, Entry
from memra_pp.stage.lanes import Lane
from memra_pp.stage.spec import StageSpec

WAIT_S = 20.0
STAGES = 3
CFG = ModelConfig("toy", STAGES, 32, 40, 64, (KvPlan(1, 32, 32),) * STAGES)
SPECS = [StageSpec("toy", CFG, tuple(range(STAGES + 1)), s, KvPolicy(), 1, 8) for s in range(STAGES)]

HOLD = len(OPS)
CHILD = (
    f"HOLD = {HOLD}"
    + """
import socket, sys, threading
from types import SimpleNamespace
from memra_pp.stage.lanes import Lane
from memra_pp.stage.serve import serve_control, serve_frames
from memra_pp.stage.spans import Spans
stage, up, down, control = map(int, sys.argv[1:])

def apply(frame):
    entry = frame.entries[0]
    if entry.op == HOLD and entry.session == stage:
        print("holding", flush=True)
        sys.stdin.readline()
    frame.arrays = [a * 10 + stage for a in frame.arrays]
    for note in frame.notes.values():
        note["held"].append(stage)
    frame.hops += 1

worker = SimpleNamespace(spec=f"stage {stage}", stats=lambda: {"stage": stage}, apply=apply, spans=Spans(3))
up, down, control = (Lane(socket.socket(fileno=fd), "a neighbour") for fd in (up, down, control))
stop = threading.Event()
thread = threading.Thread(target=serve_control, args=(worker, control, stop))
thread.start()
try:
    serve_frames(worker, up, down, stop)
finally:
    up.close()
    down.close()
    thread.join()
"""
)


class Stages:
    """A chain of processes that write their number behind each row and into a note; a `HOLD` entry waits for a line on one's
    input."""

    def __init__(self, autopsy=lambda: None):
        pairs = [socket.socketpair() for _ in range(STAGES + 1)]
        controls = [socket.socketpair() for _ in range(STAGES)]
        self.processes, self.closed = [], 0
        for s in range(STAGES):
            theirs = [pairs[s][1], pairs[s + 1][0], controls[s][1]]
            fds = [sock.fileno() for sock in theirs]
            args = [sys.executable, "-c", CHILD, str(s), *map(str, fds)]
            self.processes.append(subprocess.Popen(args, pass_fds=fds, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL))
        out, back = Lane(pairs[0][0], str(SPECS[0])), Lane(pairs[-1][1], str(SPECS[-1]))
        control = [Lane(ours, str(spec)) for (ours, _), spec in zip(controls, SPECS, strict=True)]
        for sock in (*(b for _, b in pairs[:-1]), *(a for a, _ in pairs[1:]), *(b for _, b in controls)):
            sock.close()
        self.chain = LaneChain(
            SPECS,
            [Device(str(spec), 1) for spec in SPECS],
            range(STAGES),
            Ends(out, back, control),
            autopsy,
            self.on_close,
            Recovery(silence_s=WAIT_S),  # a stage that starts is not silent
        )
        self.scheduler = Scheduler(self.chain, Batcher(STAGES, 64, 1 << 20))
        self.roundtrip(Entry(PING, 0, 0, 1), [], WAIT_S)

    def on_close(self):
        self.closed += 1

    def hold(self, stage, timeout=10 * WAIT_S):
        return self.roundtrip(Entry(HOLD, stage, 0, 1), [], timeout)

    def roundtrip(self, entry, arrays, timeout, note=None):
        work = Work(entry, arrays, timeout, note)
        self.scheduler.submit(work)
        self.scheduler.wait(work)
        return work.result()

    def holding(self, stage):
        assert self.processes[stage].stdout.readline() == b"holding\n"

    def let_go(self, stage):
        self.processes[stage].stdin.write(b"\n")
        self.processes[stage].stdin.flush()

    def close(self):
        self.scheduler.close()
        self.chain.close()
        self.chain.close()
        assert self.closed == 1 and self.chain.failed and not self.chain._heart._thread.is_alive()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(heart, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(lane_chain, "AUTOPSY_S", WAIT_S)


@pytest.fixture
def stages():
    made = Stages()
    yield made
    made.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


def echo(stages, n):
    """A step of `n` rows; the numbers of the stages stand behind each row in the order in which they had it."""
    reply = stages.roundtrip(Entry(STEP, 1, n, 1, 0, n, n), [np.full(n, n, np.int32)], WAIT_S)
    assert reply.fault is None and not reply.note and (reply.answers == np.full(n, n * 1000 + 12)).all()
    return reply


def test_frames_pass_every_stage_and_answers_are_the_callers_own(stages):
    replies = [echo(stages, n) for n in range(1, 6)]
    assert all((reply.answers == np.full(n, n * 1000 + 12)).all() for n, reply in enumerate(replies, start=1))
    for note in ({"args": {"ctx": 8}, "held": []}, {"held": []}):
        reply = stages.roundtrip(Entry(OPEN, 1, 0, 1), [], WAIT_S, note)
        assert reply.note == note | {"held": [*range(STAGES)]} and reply.answers is None
    assert stages.chain.stats() == [{"stage": s} for s in range(STAGES)] and not stages.chain.failed


@pytest.mark.parametrize("victim", range(STAGES))
def test_a_step_blocked_while_a_stage_dies_raises_an_error_that_names_it(stages, pool, victim):
    blocked = pool.submit(stages.hold, victim)
    stages.holding(victim)
    stages.processes[victim].kill()
    with pytest.raises(StageError, match=f"stage {victim} .*is gone"):
        blocked.result(WAIT_S)
    assert stages.chain.failed
    for asked in (lambda: echo(stages, 1), stages.chain.stats):
        with pytest.raises(StageError, match="stage"):
            asked()


def test_a_stage_stopped_in_a_step_is_named_by_its_silence(stages):
    stages.chain._heart._silence_s = 1.0
    os.kill(stages.processes[1].pid, signal.SIGSTOP)
    with pytest.raises(StageError, match=r"stage 1 .*is gone: silent"):
        echo(stages, 1)


def test_an_idle_chain_notices_a_death_by_itself(stages):
    stages.processes[2].kill()
    assert stages.chain._broke.wait(WAIT_S)
    with pytest.raises(StageError, match=r"stage 2 .*is gone"):
        echo(stages, 1)


def test_the_autopsy_is_told_and_one_that_fails_hides_nothing(pool):
    def broken():
        raise RuntimeError("no autopsy today")

    for autopsy, said in ((lambda: "stage 1 died: out of memory", "out of memory"), (broken, "stage 1 .*is gone")):
        stages = Stages(autopsy)
        try:
            blocked = pool.submit(stages.hold, 1)
            stages.holding(1)
            stages.processes[1].kill()
            with pytest.raises(StageError, match=said):
                blocked.result(WAIT_S)
        finally:
            stages.close()


def test_an_answer_that_never_comes_is_an_error_at_the_timeout_and_fails_the_chain(stages):
    with pytest.raises(StageError, match="no answer from the pipeline within 0 s"):
        stages.hold(1, timeout=0.2)
    with pytest.raises(StageError, match="no answer"):
        echo(stages, 1)


class Interrupted(Exception):
    """What a signal handler raises."""


def waits_for_an_answer():
    """Whether the main thread waits to be told."""
    at = sys._current_frames()[threading.main_thread().ident]
    while at is not None and at.f_code is not Outcome.wait.__code__:
        at = at.f_back
    return at is not None


def test_the_late_answer_of_an_interrupted_step_is_skipped_by_the_next(stages, pool):
    def handler(number, at):
        raise Interrupted

    def interrupt():
        stages.holding(1)
        while not waits_for_an_answer():
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(3):
            interrupting = pool.submit(interrupt)
            with pytest.raises(Interrupted):
                stages.hold(1)
            interrupting.result(WAIT_S)
            stages.let_go(1)
            echo(stages, 7)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_stages_end_when_the_chain_closes_and_nothing_can_be_asked_after(stages):
    stages.scheduler.close()
    stages.chain.close()
    for process in stages.processes:
        process.wait(WAIT_S)
    for asked in (lambda: echo(stages, 1), stages.chain.stats):
        with pytest.raises(StageError):
            asked()


def test_closing_the_chain_ends_a_step_that_waits(stages, pool, monkeypatch):
    monkeypatch.setattr(lane_chain, "AUTOPSY_S", 0.0)
    blocked = pool.submit(stages.hold, 1)
    stages.holding(1)
    stages.scheduler.close()
    with pytest.raises(StageError, match="closed"):
        blocked.result(WAIT_S)


@pytest.mark.parametrize(("most", "losses"), [(0, 3), (3, 3), (7, 3), (8, 4), (10, 5), (16, 8), (1 << 20, 8)])
def test_one_step_may_cost_half_of_the_recoveries_within_bounds(most: int, losses: int) -> None:
    assert Recovery(most).losses_a_step == losses
