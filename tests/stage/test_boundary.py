"""Rows from GPU to GPU: in the right slot when the frame comes, never overwritten before they are read, and by way of the host
where slots cannot be had. On devices whose copies are done as late as a stream may do them."""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from host_gpu import DeviceGone, HostGpu
from toy_stage import N_EMBD, asking, expected_logits, frame, opening, step, tokens, worker

from memra_pp.errors import LaneError, StageError
from memra_pp.kernels.cuda.device import CudaDev
from memra_pp.stage.boundary import SLOTS
from memra_pp.stage.lanes import Lane
from memra_pp.stage.serve import serve_frames

WAIT_S = 20.0
FENCE = (0, 1, 2, 3)
STAGES = len(FENCE) - 1
LAST = STAGES - 1


class LateGpu(HostGpu):
    """Copies when it has to: once it is waited for."""

    def __init__(self, name):
        super().__init__()
        self.name, self.asked, self.waits = name, [], 0

    def copy(self, dst, src):
        self.asked.append((dst, src))

    def wait(self):
        self.waits += 1
        asked, self.asked = self.asked, []
        for dst, src in asked:
            super().copy(dst, src)

    def download(self, array):
        self.wait()
        return super().download(array)


def stages(*kinds):
    """A worker for each, on a GPU or the CPU. Hidden rows of a GPU's that were to be changed later show it."""
    made = [
        worker(s, FENCE, device=CudaDev(LateGpu(f"gpu {s}"), 1 << 24, 1) if kind == "gpu" else None)
        for s, kind in enumerate(kinds)
    ]
    return made


def close(workers):
    for w in workers:
        w.close()


@pytest.fixture
def local():
    """Stages of one process, each on a GPU of its own."""
    made = stages(*["gpu"] * STAGES)
    for before, after in pairwise(made):
        before.boundary.lead_to(after.boundary)
    yield made
    close(made)


def applied(workers, sent):
    """A frame after all stages, and the slots it was in between them."""
    slots = []
    for w in workers:
        w.apply(sent)
        slots.append(sent.slot)
        assert not (sent.slot and sent.arrays)
    return sent, slots


def opened(workers, *sessions):
    for session in sessions:
        sent, _ = applied(workers, frame(opening(session), notes={0: asking(session, FENCE)}))
        assert sent.fault(0) is None


def test_rows_go_by_slots_which_take_turns(local):
    opened(local, 1)
    for n in range(6):
        sent, slots = applied(local, frame(step(1, n + 1, n, 1, "last"), arrays=tokens(n)))
        assert slots == [n % SLOTS + 1] * LAST + [0]
        assert np.array_equal(sent.arrays[0], expected_logits([n]))
    assert [w.stats()["boundary"] for w in local] == ["slots"] * LAST + ["lane"]


def test_a_session_that_is_refused_leaves_the_others_their_rows(local):
    opened(local, 1, 2, 3)
    local[1].sessions[2].seq += 1
    sent, _ = applied(
        local,
        frame(step(1, 1, 0, 2, "all"), step(2, 1, 0, 3, "all"), step(3, 1, 0, 1, "all"), arrays=tokens(1, 2, 30, 31, 32, 4)),
    )
    assert [sent.fault(i) is None for i in range(3)] == [True, False, True]
    assert [a.tolist() for a in sent.arrays] == [expected_logits([1, 2]).tolist(), expected_logits([4]).tolist()]


def test_a_frame_of_which_nothing_is_taken_gives_its_slot_back(local):
    opened(local, 1)
    for w in local[1:]:
        w.sessions[1].seq += 100
    for _ in range(2 * SLOTS):
        sent, _ = applied(local, frame(step(1, local[0].sessions[1].seq, local[0].sessions[1].cache.pos, 1), arrays=tokens(5)))
        assert sent.fault(0) is not None


def test_a_slot_is_given_back_once_the_work_on_it_is_done_and_be_it_work_that_failed(local):
    opened(local, 1)
    middle, left = local[1], []
    gpu, give_back = middle.device.gpu, middle.boundary._give_back
    middle.boundary.come_back(lambda slot: (left.append(len(gpu.asked)), give_back(slot)))

    def asks_then_fails(x):
        gpu.copy(gpu.empty((1,), np.float32), x.reshape(-1)[:1])
        raise ValueError("after it has asked for something")

    middle.model.on_forward = asks_then_fails
    sent, _ = applied(local, frame(step(1, 1, 0, 1), arrays=tokens(3)))
    assert sent.fault(0)[1] == "ValueError" and left == [0]


def test_a_frame_that_cannot_be_sent_frees_its_slot(local):
    opened(local, 1, 2)
    for session in (1, 2):
        for _ in range(SLOTS):
            sent = frame(
                step(session, local[0].sessions[session].seq, local[0].sessions[session].cache.pos, 1), arrays=tokens(5)
            )
            local[0].apply(sent)
            assert sent.slot
            local[0].refuse(sent, LaneError("it is too long"))
            assert not sent.slot
            local[0].sessions[session].broken = False


@pytest.mark.parametrize("slot", [1, SLOTS + 1, 2**16 - 1])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_slot_that_there_is_not_costs_its_steps_alone(kind, slot):
    workers = stages("gpu", kind, "gpu")
    try:
        opened(workers, 1)
        bad = frame(step(1, 1, 0, 1))
        bad.slot = slot
        if kind == "gpu" and slot <= SLOTS:
            with pytest.raises(StageError, match="the stage before writes into none"):
                workers[1].apply(bad)
            return
        workers[1].apply(bad)
        assert "StageError" in bad.fault(0) and not bad.slot
        good = frame(step(1, 2, 0, 1), arrays=[np.ones((1, N_EMBD), np.float32)])
        workers[1].apply(good)
        assert good.fault(0) is None
    finally:
        close(workers)


class Served:
    """The first stages of three served over lanes by threads, each on a GPU of its own that takes part in the slots; the last
    one's output and its credits are this test's."""

    def __init__(self, patience=WAIT_S):
        self.workers = stages("gpu", "gpu", "gpu")
        pairs = [tuple(Lane(sock, "the neighbour") for sock in socket.socketpair()) for _ in range(STAGES + 1)]
        self.into, self.out = pairs[0][0], pairs[-1][1]
        self.ups, self.downs = [pair[1] for pair in pairs[:-1]], [pair[0] for pair in pairs[1:]]
        self.lanes = [lane for pair in pairs for lane in pair]
        for (before, after), down in zip(pairwise(self.workers), self.downs, strict=False):
            before.boundary.lead_out(after.boundary.offer(), lambda down=down: down.await_slot(patience))
        for w, up in zip(self.workers, self.ups, strict=True):
            w.boundary.come_back(up.give_back)
        self.stop = threading.Event()
        self.pool = ThreadPoolExecutor(STAGES)
        self.serving = {}

    def serve(self, *some):
        for s in some:
            self.serving[s] = self.pool.submit(serve_frames, self.workers[s], self.ups[s], self.downs[s], self.stop)

    def close(self):
        self.stop.set()
        for lane in self.lanes:
            lane.close()
        self.pool.shutdown()
        close(self.workers)


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


def opened_there(served, session=1):
    served.into.send(frame(opening(session), notes={0: asking(session, FENCE)}), WAIT_S)
    assert served.out.recv(WAIT_S).fault(0) is None


def test_every_row_is_read_before_it_is_overwritten(served):
    served.serve(*range(STAGES))
    opened_there(served)
    assert [w.boundary.kind for w in served.workers] == ["slots"] * LAST + ["lane"]
    for n in range(15):
        served.into.send(frame(step(1, n + 1, n, 1, "last"), arrays=tokens(n)), WAIT_S)
    for n in range(15):
        reply = served.out.recv(WAIT_S)
        assert reply.fault(0) is None and np.array_equal(reply.arrays[0], expected_logits([n]))


def test_a_stage_is_no_more_than_its_slots_ahead_of_the_next(served):
    served.serve(0)
    served.workers[1].sessions, served.workers[2].sessions = {}, {}
    served.into.send(frame(opening(1), notes={0: asking(1, FENCE)}), WAIT_S)
    for n in range(SLOTS + 3):
        served.into.send(frame(step(1, n + 1, n, 1, "last"), arrays=tokens(n)), WAIT_S)
    gpu, counters = served.workers[0].device.gpu, served.workers[0].counters
    while counters.steps <= SLOTS:
        assert not served.serving[0].done()
    assert counters.steps == SLOTS + 1 and not gpu.asked
    served.serve(1, 2)
    assert served.out.recv(WAIT_S).fault(0) is None
    for n in range(SLOTS + 3):
        assert np.array_equal(served.out.recv(WAIT_S).arrays[0], expected_logits([n]))


@pytest.mark.parametrize("gone", [True, False])
def test_a_next_stage_that_gives_nothing_back_ends_the_wait(gone):
    served = Served(patience=0.05)
    try:
        served.serve(0)
        served.into.send(frame(opening(1), notes={0: asking(1, FENCE)}), WAIT_S)
        if gone:
            served.ups[1].hang_up()
        for n in range(SLOTS + 1):
            served.into.send(frame(step(1, n + 1, n, 1, "last"), arrays=tokens(n)), WAIT_S)
        with pytest.raises(LaneError, match="the neighbour"):
            served.serving[0].result(WAIT_S)
        assert served.stop.is_set()
    finally:
        served.close()


def test_a_device_that_is_lost_ends_its_stage(served):
    served.serve(0)
    served.into.send(frame(opening(1), notes={0: asking(1, FENCE)}), WAIT_S)

    def gone(x):
        raise DeviceGone("an illegal address")

    served.workers[0].model.on_forward = gone
    served.into.send(frame(step(1, 1, 0, 1), arrays=tokens(3)), WAIT_S)
    with pytest.raises(DeviceGone):
        served.serving[0].result(WAIT_S)
    assert served.stop.is_set()


def by_host(workers, caplog):
    """Whether stage 0's rows travel in its frames, which is said once, and in its stats."""
    opened(workers, 1)
    for n in range(3):
        sent = frame(step(1, n + 1, n, 1), arrays=tokens(n))
        workers[0].apply(sent)
        assert not sent.slot and sent.arrays[0].tolist() == [[n + 1.0] * N_EMBD]
    assert workers[0].stats()["boundary"] == "host"
    return [r.message for r in caplog.records if "by way of the host" in r.message]


@pytest.mark.parametrize("why", ["no slots", "another machine", "an unknown machine", "not allowed", "not shared"])
def test_where_slots_cannot_be_had_rows_go_by_way_of_the_host(why, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    workers = stages("gpu", "cpu" if why == "no slots" else "gpu", "gpu")

    def refused(*args):
        raise StageError("the system says no")

    monkeypatch.setattr(workers[0].device.gpu, "attach", refused if why == "not allowed" else workers[0].device.gpu.attach)
    if why == "not shared":
        monkeypatch.setattr(workers[1].device.gpu, "share", refused)
    offer = workers[1].boundary.offer()
    machine = {"another machine": "elsewhere", "an unknown machine": None}
    if why in machine:
        offer = replace(offer, machine=machine[why])
    try:
        workers[0].boundary.lead_out(offer, lambda: 1)
        assert len(by_host(workers, caplog)) == 1
    finally:
        close(workers)


def test_stages_on_a_cpu_have_nothing_to_offer(caplog):
    workers = stages("cpu", "cpu", "cpu")
    try:
        assert [w.boundary.offer() for w in workers] == [None] * STAGES
        workers[0].boundary.lead_out(None, lambda: 1)
        assert workers[0].stats()["boundary"] == "lane" and not caplog.records
    finally:
        close(workers)
