"""Lanes: only who holds the key gets one, nobody waits without end, and what arrives is a frame, nothing or an error."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memra_pp.errors import LaneError
from memra_pp.stage import lanes
from memra_pp.stage import listener as listening
from memra_pp.stage.frames import CLOSE, GENERAL, MAX_BODY_BYTES, MAX_HEAD_BYTES, PLAIN, PREFIX, STEP, Entry, Frame, encode
from memra_pp.stage.lanes import Lane
from memra_pp.stage.listener import KEY_BYTES, MAX_PENDING_HANDSHAKES, Listener, connect

KEY, OTHER = bytes(KEY_BYTES), b"\1" * KEY_BYTES
WAIT_S = 20.0
SHORT_S = 0.05


def threads_of_lanes():
    return [t for t in threading.enumerate() if t.name.startswith("lane-")]


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path):
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
def listener(address):
    made = Listener(address, KEY)
    yield made
    made.close()
    assert not threads_of_lanes()


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    a, b = Lane(ours, "the peer"), Lane(theirs, "the other")
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


def dial(listener):
    """A bare socket to a listener."""
    kind, _, rest = listener.address.partition(":")
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    sock.settimeout(WAIT_S)
    sock.connect(rest if kind == "unix" else (rest.rpartition(":")[0], int(rest.rpartition(":")[2])))
    return contextlib.closing(sock)


def rows(n, first=0):
    return Frame(n, [Entry(STEP, 1, 2, 3, 4, n)], [np.arange(first, first + n, dtype=np.float32)])


def same(a, b):
    alike = [x.shape == y.shape and np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True)]
    return (a.id, a.entries, a.notes, a.hops) == (b.id, b.entries, b.notes, b.hops) and all(alike)


def talk(n):
    """A frame that is not plain."""
    return Frame(n, [Entry(CLOSE, 1, 0, 3), *rows(n).entries], [*rows(n).arrays, *rows(n + 1).arrays], {0: {"bytes": [n]}}, 2)


def packet(frame):
    """A frame's bytes, as a lane sends them."""
    a, b = socket.socketpair()
    with contextlib.closing(a), contextlib.closing(b):
        Lane(a, "nobody").send(frame, WAIT_S)
        return b.recv(1 << 20)


# Handshake


def test_lanes_are_handed_out_by_role_and_carry_frames_both_ways(listener):
    with contextlib.ExitStack() as stack:
        ours = {role: connect(listener.address, role, KEY, WAIT_S, "the stage") for role in ("frames", "control", "x" * 16)}
        theirs = {role: listener.accept(role, WAIT_S) for role in reversed(ours)}
        for lane in (*ours.values(), *theirs.values()):
            stack.callback(lane.close)
        for number, role in enumerate(ours, start=1):
            ours[role].send(rows(number), WAIT_S)
            assert same(theirs[role].recv(WAIT_S), rows(number))
            theirs[role].send(rows(number, 7), WAIT_S)
            assert same(ours[role].recv(WAIT_S), rows(number, 7))


def test_a_client_without_the_key_gets_no_lane(listener):
    with pytest.raises(LaneError, match="does not hold this pipeline's key"):
        connect(listener.address, "frames", OTHER, WAIT_S, "the stage")
    with pytest.raises(LaneError, match="no peer opened a frames lane"):
        listener.accept("frames", SHORT_S)


def test_a_client_that_skips_its_proof_gets_no_lane(listener):
    """It answers the server's proof with the server's own: each side signs under its own name."""
    with dial(listener) as sock:
        sock.sendall(listening._HELLO + b"frames".ljust(16, b"\0") + bytes(32))
        challenge = b""
        while len(challenge) < 64:
            challenge += sock.recv(64 - len(challenge))
        sock.sendall(challenge[32:])
        assert sock.recv(1) == b""
    with pytest.raises(LaneError):
        listener.accept("frames", SHORT_S)


def test_a_server_without_the_key_is_refused_before_the_client_proves_anything(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = pool.submit(connect, f"tcp:127.0.0.1:{server.getsockname()[1]}", "frames", KEY, WAIT_S, "the stage")
        sock, _ = server.accept()
        with sock:
            sock.settimeout(WAIT_S)
            hello = sock.recv(4096)
            assert hello.startswith(listening._HELLO) and KEY not in hello
            sock.sendall(bytes(64))
            with pytest.raises(LaneError, match="does not hold this pipeline's key"):
                client.result(WAIT_S)
            assert sock.recv(1) == b""


def test_nonces_are_fresh(listener):
    seen = set()
    for _ in range(4):
        with dial(listener) as sock:
            sock.sendall(listening._HELLO + b"frames".ljust(16, b"\0") + bytes(32))
            seen.add(sock.recv(32))
    assert len(seen) == 4


def test_silent_clients_block_nobody(listener):
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_PENDING_HANDSHAKES - 1):
            stack.enter_context(dial(listener))
        lane = connect(listener.address, "frames", KEY, WAIT_S, "the stage")
        stack.callback(lane.close)
        accepted = listener.accept("frames", WAIT_S)
        stack.callback(accepted.close)
        accepted.send(rows(1), WAIT_S)
        assert same(lane.recv(WAIT_S), rows(1))


def test_who_comes_when_too_many_shake_hands_is_dropped_until_they_are_gone(listener):
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(listener)) for _ in range(MAX_PENDING_HANDSHAKES)]
        with pytest.raises(LaneError):
            connect(listener.address, "frames", KEY, WAIT_S, "the stage")
        for sock in silent:
            sock.shutdown(socket.SHUT_RDWR)
        for thread in threads_of_lanes():
            if thread.name == "lane-handshake":
                thread.join(WAIT_S)
        connect(listener.address, "frames", KEY, WAIT_S, "the stage").close()


def test_a_silent_client_is_dropped_at_the_deadline(listener, monkeypatch):
    monkeypatch.setattr(listening, "HANDSHAKE_S", SHORT_S)
    with dial(listener) as sock:
        assert sock.recv(1) == b""


def test_a_client_that_trickles_is_dropped_at_the_deadline(listener, monkeypatch):
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.3)
    with dial(listener) as sock, pytest.raises(OSError):
        sock.settimeout(SHORT_S)
        for byte in itertools.cycle(listening._HELLO[:1]):
            sock.send(byte.to_bytes())
            with contextlib.suppress(TimeoutError):
                if sock.recv(1) == b"":
                    raise BrokenPipeError


def test_a_silent_server_is_given_up_at_the_deadline(monkeypatch):
    monkeypatch.setattr(listening, "HANDSHAKE_S", SHORT_S)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(LaneError, match="the stage"):
        connect(f"tcp:127.0.0.1:{server.getsockname()[1]}", "frames", KEY, WAIT_S, "the stage")


@pytest.mark.parametrize(
    "junk", [b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"memra_pp/2\n" + bytes(200), b"\x80\x04."]
)
def test_junk_is_dropped_and_the_next_client_served(listener, junk):
    with dial(listener) as sock, contextlib.suppress(OSError):
        sock.sendall(junk)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    lane = connect(listener.address, "frames", KEY, WAIT_S, "the stage")
    listener.accept("frames", WAIT_S).close()
    lane.close()


@pytest.mark.parametrize("role", ["", "x" * 17, "a b", "a\0", "röle", "\udcff", "a/b", "1", "x" * 10_000])
def test_a_role_that_is_no_short_name_is_refused(listener, role):
    with pytest.raises(LaneError, match="role"):
        connect(listener.address, role, KEY, WAIT_S, "the stage")


ADDRESSES = [
    "", "unix", "unix:", "unix:\0name", "tcp", "tcp:", "tcp:1", "tcp::1", "tcp:127.0.0.1:", "tcp:127.0.0.1:-1",
    "tcp:127.0.0.1:65536", "tcp:127.0.0.1:x", "tcp:127.0.0.1:²", "udp:127.0.0.1:1", "unix:/no/such/place", "unix:/" + "x" * 200,
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_is_a_lane_error(address):
    with pytest.raises(LaneError):
        connect(address, "frames", KEY, WAIT_S, "the stage")
    with pytest.raises(LaneError):
        Listener(address, KEY)


def test_where_nobody_listens_there_is_no_lane(address):
    Listener(address, KEY).close()
    where = address if address.startswith("unix") else "tcp:127.0.0.1:1"
    with pytest.raises(LaneError, match="the stage"):
        connect(where, "frames", KEY, WAIT_S, "the stage")


def test_closing_a_listener_leaves_nothing_but_the_lanes_handed_out(address):
    listener = Listener(address, KEY)
    with contextlib.ExitStack() as stack:
        stack.enter_context(dial(listener))
        ours, unclaimed = (connect(listener.address, role, KEY, WAIT_S, "the stage") for role in ("frames", "control"))
        theirs = listener.accept("frames", WAIT_S)
        for lane in (ours, theirs, unclaimed):
            stack.callback(lane.close)
        listener.close()
        listener.close()
        assert not threads_of_lanes()
        assert not address.startswith("unix:") or not os.path.exists(address.removeprefix("unix:"))
        with pytest.raises(LaneError, match="closed the lane"):
            unclaimed.recv(WAIT_S)
        ours.send(rows(3), WAIT_S)
        assert same(theirs.recv(WAIT_S), rows(3))


def test_whoever_waits_for_a_peer_is_told_that_nobody_listens_any_more(listener, pool):
    waiting = pool.submit(listener.accept, "status", None)
    while "status" not in listener._ready:
        pass
    listener.close()
    with pytest.raises(LaneError, match="nobody listens"):
        waiting.result(WAIT_S)


def test_a_second_listener_at_an_address_is_refused_and_takes_nothing(tmp_path):
    first = Listener(f"unix:{tmp_path}/s", KEY)
    with pytest.raises(LaneError, match="cannot listen"):
        Listener(first.address, KEY)
    connect(first.address, "frames", KEY, WAIT_S, "the stage").close()
    first.close()


# Frames


def test_nothing_is_none_and_a_late_frame_still_comes(pair):
    a, b = pair
    assert a.recv(SHORT_S) is None and a.recv(0.0) is None and a.recv(-1.0) is None
    b.send(rows(2), WAIT_S)
    assert same(a.recv(WAIT_S), rows(2)) and a.recv(0.0) is None


def test_frames_sent_at_once_come_one_by_one_and_pending_tells(pair):
    a, b = pair
    sent = [rows(1, 1), talk(500), rows(40_000), rows(0), talk(0), rows(3, 3)]
    b._sock.sendall(packet(sent[0]) + packet(sent[1]))
    assert same(a.recv(WAIT_S), sent[0]) and a.pending
    assert same(a.recv(WAIT_S), sent[1]) and not a.pending
    b._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    b._sock.sendall(b"".join(map(packet, sent)))
    for frame in sent:
        assert same(a.recv(WAIT_S), frame)
    assert not a.pending


def test_a_first_wait_of_no_time_has_an_end(pair, pool):
    receiving, sending = pool.submit(pair[0].recv, 0.0), pool.submit(pair[0].send, rows(1 << 20), 0.0)
    try:
        assert receiving.result(WAIT_S) is None
        with pytest.raises(LaneError, match="stopped taking part"):
            sending.result(WAIT_S)
    finally:
        pair[0].close()


def test_a_buffer_is_used_again(pair):
    a, b = pair
    b.send(rows(4), WAIT_S)
    first = a.recv(WAIT_S).arrays[0]
    b.send(rows(4, 9), WAIT_S)
    a.recv(WAIT_S)
    assert first[0] == 9


def test_frames_far_larger_than_the_sockets_pass_both_ways_at_once(pair, pool):
    big = Frame(1, [], [np.arange(1 << 20, dtype=np.int32), np.empty((0, 3), np.float32), np.ones((3, 5), np.float32)])
    for lane in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            lane._sock.setsockopt(socket.SOL_SOCKET, option, 4096)
    sends = [pool.submit(lane.send, big, WAIT_S) for lane in pair]
    with ThreadPoolExecutor(2) as receivers:
        for reply in receivers.map(lambda lane: lane.recv(WAIT_S), pair):
            assert same(reply, big)
    assert [s.result(WAIT_S) for s in sends] == [None, None]


def test_a_frame_may_have_more_arrays_than_one_call_can_gather(pair, pool):
    a, b = pair
    many = Frame(1, [], [np.full(n % 3, n, np.int32) for n in range(3000)])
    sending = pool.submit(b.send, many, WAIT_S)
    assert same(a.recv(WAIT_S), many) and sending.result(WAIT_S) is None


GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
UNSENDABLE = {
    "another type": [np.zeros(1)],
    "transposed": [GRID.T],
    "every other": [GRID[0, ::2]],
    "a column": [GRID[:, :2]],
    "backwards": [GRID[::-1]],
    "the last of more than one call can gather": [*[GRID] * 2000, GRID.T],
}


@pytest.mark.parametrize("entries", [0, 1])
@pytest.mark.parametrize("arrays", UNSENDABLE.values(), ids=list(UNSENDABLE))
def test_a_frame_that_cannot_travel_leaves_the_lane_whole(pair, arrays, entries):
    a, b = pair
    entry = Entry(STEP, 1, 2, 3, 4, 4)
    for frame in (Frame(1, [entry] * entries, arrays), Frame(1, [entry._replace(op=None)], [GRID])):
        with pytest.raises(LaneError, match=r"only f32 and i32|C-contiguous|cannot be packed"):
            b.send(frame, WAIT_S)
    b.send(rows(1), WAIT_S)
    assert same(a.recv(WAIT_S), rows(1)) and a.recv(0.0) is None


@pytest.mark.parametrize("entries", [0, 1])
def test_a_view_of_whole_rows_travels_as_it_reads(pair, entries):
    a, b = pair
    for view in (GRID[1:3], GRID[2], GRID[2, 1:4], GRID[1:1], GRID.T.copy(), GRID.reshape(-1)):
        frame = Frame(1, [Entry(STEP, 1, 2, 3, 4, 4)] * entries, [view])
        b.send(frame, WAIT_S)
        assert same(a.recv(WAIT_S), frame)


def test_a_frame_without_elements_passes_a_socket_that_takes_it_in_parts(pair, pool):
    a, b = pair
    taken = []

    class Slow:
        """A socket whose first call takes a few bytes only."""

        def sendmsg(self, buffers, ancillary, flags):
            taken.append(b._sock.send(b"".join([memoryview(part).tobytes() for part in buffers])[:7]))
            return taken[-1]

        def __getattr__(self, name):
            return getattr(b._sock, name)

    slow = Lane(Slow(), "the peer")
    for frame in (rows(0), Frame(1, rows(0).entries, [np.empty((0, 3), np.float32)]), rows(5), talk(5), talk(0)):
        slow.send(frame, WAIT_S)
        assert same(a.recv(WAIT_S), frame)
    assert taken == [7] * 5


class Full:
    """A socket that has room for nothing at once."""

    def __init__(self, sock):
        self._sock = sock

    def sendmsg(self, buffers, ancillary, flags):
        raise BlockingIOError

    def __getattr__(self, name):
        return getattr(self._sock, name)


@pytest.mark.parametrize("frame", [rows(0), rows(5), rows(100_000), talk(3)], ids=["no rows", "rows", "many rows", "general"])
@pytest.mark.parametrize("full", [True, False], ids=["a full one", "an empty one"])
def test_what_the_socket_does_not_take_at_once_is_left_to_be_finished(pair, pool, frame, full):
    a, b = pair
    lane = Lane(Full(b._sock), "the peer") if full else b
    left, (_, total) = lane.begin(frame), encode(frame)
    assert sum(map(len, left)) == total if full else bool(left) == (total > 100_000)
    sending = pool.submit(lane.finish, left, WAIT_S)
    assert same(a.recv(WAIT_S), frame)
    sending.result(WAIT_S)


def test_a_frame_without_arrays_is_left_too(pair):
    a, b = pair
    bare = Frame(1, [Entry(CLOSE, 1, 0, 3)])
    while not (rest := b.begin(bare)):
        pass
    while a.recv(0.0) is not None:
        pass
    b.finish(rest, WAIT_S)
    assert same(a.recv(WAIT_S), bare) and a.recv(0.0) is None


def test_a_frame_that_is_kept_stays_as_it_is_and_what_came_behind_is_not_lost(pair):
    a, b = pair
    b._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    b._sock.sendall(b"".join(packet(rows(n, n)) for n in (4, 30_000, 5, 6)))
    kept = None
    for n in (4, 30_000, 5, 6):
        frame = a.recv(WAIT_S)
        assert same(frame, rows(n, n)) and (kept is None or same(kept, rows(kept.id, kept.id)))
        a.keep(frame)
        kept = frame
    assert a.recv(0.0) is None and same(kept, rows(6, 6))
    buffers = {id(a._buffer), id(a._spare)}
    for n in range(1, 5):
        b.send(rows(n), WAIT_S)
        a.keep(a.recv(WAIT_S))
        assert {id(a._buffer), id(a._spare)} == buffers


def test_a_frame_whose_arrays_are_its_own_needs_no_other_buffer(pair):
    a, b = pair
    b.send(rows(4), WAIT_S)
    frame, buffer = a.recv(WAIT_S), a._buffer
    frame.arrays = [one.copy() for one in frame.arrays]
    a.keep(frame)
    assert a._buffer is buffer


def test_a_peer_that_takes_nothing_breaks_a_send_at_its_deadline(pair):
    with pytest.raises(LaneError, match="send to the peer: it has stopped taking part"):
        pair[0].send(rows(1 << 20), SHORT_S)


def test_a_frame_that_began_may_come_later_than_the_wait_for_one(pair, pool):
    a, b = pair
    data = packet(rows(5))
    b._sock.sendall(data[:10])
    receiving = pool.submit(a.recv, SHORT_S)
    for byte in data[10:]:
        b._sock.sendall(byte.to_bytes())
    assert same(receiving.result(WAIT_S), rows(5))


@pytest.mark.parametrize("frame", [rows(5), talk(5)], ids=["plain", "general"])
@pytest.mark.parametrize("end", [1, PREFIX.size - 1, PREFIX.size, PREFIX.size + 1, 127, 128, 129, -1])
def test_silence_or_the_end_in_the_middle_of_a_frame_is_an_error(pair, monkeypatch, frame, end):
    monkeypatch.setattr(lanes, "STALL_S", SHORT_S)
    a, b = pair
    b._sock.sendall(packet(frame)[:end])
    with pytest.raises(LaneError, match="rest of a frame from the peer: it has stopped taking part"):
        a.recv(WAIT_S)
    b.close()
    with pytest.raises(LaneError, match="the peer closed the lane"):
        a.recv(WAIT_S)


def test_the_end_is_an_error_for_both_calls_and_comes_after_what_was_sent(pair):
    a, b = pair
    b.send(rows(2), WAIT_S)
    b.close()
    assert same(a.recv(WAIT_S), rows(2))
    for _ in range(2):
        with pytest.raises(LaneError, match="the peer closed the lane"):
            a.recv(WAIT_S)
        with pytest.raises(LaneError, match="could not send to the peer"):
            a.send(rows(2), WAIT_S)


@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(GENERAL ^ 1, 64, 0, 0, 0, 0, 0, 1),
        PREFIX.pack(GENERAL, MAX_HEAD_BYTES + 1, 0, 0, 0, 0, 0, 1),
        PREFIX.pack(GENERAL, 64, 0, 0, 0, 0, MAX_BODY_BYTES + 1, 1),
        PREFIX.pack(GENERAL, 2**32 - 1, 0, 0, 0, 0, 2**63 - 1, 1),
        PREFIX.pack(GENERAL, 64, 0, 0, 0, 0, -64, 1),
        PREFIX.pack(PLAIN, 192, 0, 0, 0, 0, MAX_BODY_BYTES + 1, 1),
        PREFIX.pack(PLAIN, 256, 0, 0, 0, 0, MAX_BODY_BYTES, 1),
        PREFIX.pack(PLAIN, MAX_HEAD_BYTES, 0, 0, 0, 0, 0, 1),
        b"\x80\x04\x95".ljust(PREFIX.size, b"\0"),
    ],
)
def test_what_is_no_frame_is_an_error_before_anything_is_allocated_for_it(pair, prefix):
    a, b = pair
    before = len(a._buffer)
    b._sock.sendall(prefix)
    with pytest.raises(LaneError, match="frame"):
        a.recv(WAIT_S)
    assert len(a._buffer) == before


@pytest.mark.parametrize("kind, head", [(GENERAL, 0), (GENERAL, 32), (GENERAL, 64), (GENERAL, 192), (PLAIN, 192)])
def test_a_malformed_head_is_an_error_again_and_again(pair, kind, head):
    a, b = pair
    b._sock.sendall(PREFIX.pack(kind, head, 0, 0, 0, 0, 192 - head, 1) + b"\xff" * 160 + packet(rows(1)))
    for _ in range(3):
        with pytest.raises(LaneError, match="malformed"):
            a.recv(WAIT_S)


@pytest.mark.parametrize(
    "call", [lambda lane: lane.recv(WAIT_S), lambda lane: lane.send(rows(1 << 20), WAIT_S)], ids=["recv", "send"]
)
def test_closing_a_lane_wakes_who_waits_on_it(pair, pool, call):
    waiting = pool.submit(call, pair[0])
    with pytest.raises(TimeoutError):
        waiting.result(SHORT_S)
    pair[0].close()
    with pytest.raises(LaneError):
        waiting.result(WAIT_S)
    for closed in (lambda: pair[0].recv(WAIT_S), lambda: pair[0].send(rows(1), WAIT_S), pair[0].close):
        with contextlib.suppress(LaneError):
            assert closed() is None


class Interrupted(Exception):
    """What a signal handler raises."""


def test_no_byte_is_lost_however_often_a_handler_raises_in_the_middle_of_a_frame(pair, pool):
    a, b = pair
    frame = rows(20_000)
    data = packet(frame)
    armed, struck = [], threading.Event()

    def handler(number, at):
        if armed:
            armed.clear()
            struck.set()
            raise Interrupted

    def feed_all_but_the_end():
        for at in range(0, len(data) - 64, 64):
            b._sock.sendall(data[at : at + 64])
            if armed:
                struck.clear()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                assert struck.wait(WAIT_S)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        feeding, interruptions = pool.submit(feed_all_but_the_end), 0
        feeding.add_done_callback(lambda _: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
        while not feeding.done():
            try:
                armed.append(True)
                a.recv(WAIT_S)
            except Interrupted:
                interruptions += 1
        armed.clear()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interruptions > 10
    b._sock.sendall(data[-64:])
    assert same(a.recv(WAIT_S), frame)


def after_call(number, call):
    """A call in which, after its `number`-th call into C, a handler raises: what it returns, and whether it raised."""
    left = itertools.count(number, -1)

    def profile(at, event, what):
        if event == "c_return" and next(left) == 0:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(profile)
    try:
        return call(), False
    except Interrupted:
        return None, True
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("first, second", [(rows(2), rows(3)), (talk(2), rows(30_000)), (rows(30_000), talk(3))])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_wherever_a_handler_raises_in_a_receive_the_next_one_goes_on(pair, pool, first, second, together):
    """Not one point is left to chance: a handler raises after each single call that a receive makes, in turn."""
    a, b = pair
    data, rest = (packet(first) + packet(second), b"") if together else (packet(first), packet(second))
    for number in itertools.count(1):
        sending = pool.submit(b._sock.sendall, data)
        assert same(a.recv(WAIT_S), first)
        sending.result(WAIT_S)
        sending = pool.submit(b._sock.sendall, rest)
        got, interrupted = after_call(number, lambda: a.recv(WAIT_S))
        kept, set_in_kernel = a._recv_timeout, a._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        assert set_in_kernel == (bytes(16) if math.isnan(kept) else lanes._timeval(kept))
        assert same(got or a.recv(WAIT_S), second)
        sending.result(WAIT_S)
        if not interrupted:
            break
    assert number > 2
