"""Frames: what is encoded comes back; what is not a frame is a `LaneError`, before anything is allocated for it."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.errors import LaneError
from memra_pp.stage import frames as frames_module
from memra_pp.stage.frames import (
    ALIGN,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    Entry,
    Frame,
    decode,
    encode,
    payload_lengths,
)

COUNTS = st.integers(0, 2**64 - 1)
ACKS = st.recursive(st.none() | st.booleans() | COUNTS | st.text(max_size=9), lambda c: st.lists(c, max_size=3), max_leaves=4)
ARGS = st.dictionaries(st.text(max_size=9), ACKS, max_size=4)


def encoded(frame):
    return b"".join(encode(frame, msgpack.Packer()))


def decoded(data):
    """As a lane receives it: prefix first, then exactly what it announces."""
    header, payload = payload_lengths(data[: PREFIX.size])
    buffer = memoryview(bytearray(data))[PREFIX.size : PREFIX.size + payload]
    if len(buffer) < payload:
        raise LaneError("truncated")
    return decode(buffer, header)


def raw(header, body=b"", announced=None):
    """A frame of any header."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    padding = bytes(-len(packed) % ALIGN)
    return PREFIX.pack(MAGIC, len(packed), len(body) if announced is None else announced) + packed + padding + body


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from([np.float32, np.int32]))
    bits = draw(st.binary(min_size=4 * int(np.prod(shape)), max_size=4 * int(np.prod(shape))))
    return np.frombuffer(bits, dtype).reshape(shape)


@st.composite
def frames(draw):
    held = draw(st.lists(arrays(), max_size=4))
    outs = st.none() | st.integers(0, len(held) - 1) if held else st.none()
    entry = st.builds(
        Entry, st.text(max_size=9), COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.text(max_size=9), st.text(max_size=9),
        ARGS, st.lists(ACKS, max_size=4), outs, st.none() | st.lists(ACKS, max_size=3),
    )  # fmt: skip
    return Frame(draw(COUNTS), draw(st.lists(entry, max_size=4)), held)


def sample():
    entry = Entry("step", 3, 4, 1, 17, 2, "last", "argmax", {"ctx": 8}, [17, 17], 1, [0, "StageError", "why"])
    return Frame(
        9, [entry, Entry("open", 4, 0, 1)], [np.arange(48, dtype=np.float32).reshape(2, 24), np.arange(2, dtype=np.int32)]
    )


def same(a, b):
    alike = [
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(a.arrays, b.arrays, strict=True)
    ]
    return (a.id, a.entries) == (b.id, b.entries) and all(alike)


@given(frames())
@settings(deadline=None)
def test_a_frame_comes_back_as_it_was(frame):
    assert same(decoded(encoded(frame)), frame)


@given(frames())
@settings(deadline=None)
def test_arrays_are_views_at_aligned_places_of_the_received_bytes(frame):
    data = encoded(frame)
    assert len(data) % ALIGN == 0
    header, payload = payload_lengths(data[: PREFIX.size])
    buffer = np.frombuffer(bytearray(data), np.uint8)
    start = buffer.__array_interface__["data"][0]
    for a in decode(memoryview(buffer)[PREFIX.size : PREFIX.size + payload], header).arrays:
        if a.size:
            assert np.shares_memory(a, buffer) and (a.__array_interface__["data"][0] - start) % ALIGN == 0


@given(arrays(), st.integers(0, 2))
def test_an_array_of_any_layout_arrives_as_it_reads(a, how):
    view = [a.T, a[::-1], a[..., ::2]][how]
    back = decoded(encoded(Frame(1, [], [view]))).arrays[0]
    assert back.shape == view.shape and back.tobytes() == view.tobytes()


def test_sending_copies_no_array():
    a = np.ones((4, 64), np.float32)
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), a) for b in encode(Frame(1, [], [a]), msgpack.Packer()))


def test_a_frame_that_was_refused_leaves_the_packer_clean():
    packer = msgpack.Packer()
    for bad in (Entry("step", 2**64, 0, 0), Entry("step", 0, 0, 0, args={"x": object()}), Entry("\udcff", 0, 0, 0)):
        with pytest.raises((OverflowError, TypeError, ValueError)):
            encode(Frame(1, [Entry("open", 1, 1, 1), bad]), packer)
        assert same(decoded(b"".join(encode(sample(), packer))), sample())


@pytest.mark.parametrize(
    "a",
    [
        np.ones(2),
        np.ones(2, np.int64),
        np.ones(2, np.float16),
        np.ones(2, bool),
        np.ones(2, ">f4"),
        np.ones((1, 1, 1, 1), np.float32),
    ],
    ids=lambda a: f"{a.dtype}{a.ndim}",
)
def test_what_a_receiver_would_refuse_is_not_sent(a):
    with pytest.raises(LaneError, match="only f32 and i32"):
        encoded(Frame(1, [], [a]))


@pytest.mark.parametrize("bound", ["MAX_HEADER_BYTES", "MAX_BODY_BYTES"])
def test_a_frame_past_a_bound_is_not_sent(bound, monkeypatch):
    monkeypatch.setattr(frames_module, bound, 64)
    with pytest.raises(LaneError, match="fewer rows"):
        encoded(Frame(1, [Entry("open", 1, 0, 1)] * 4, [np.zeros(17, np.float32)]))


@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(MAGIC ^ 1, 1, 0),
        PREFIX.pack(MAGIC, MAX_HEADER_BYTES + 1, 0),
        PREFIX.pack(MAGIC, 2**32 - 1, 0),
        PREFIX.pack(MAGIC, 1, MAX_BODY_BYTES + 1),
        PREFIX.pack(MAGIC, 1, 2**64 - 1),
        b"GET / HTTP/1.1\r\n".ljust(PREFIX.size, b"\0"),
    ],
)
def test_a_prefix_past_the_bounds_is_refused_unread(prefix):
    with pytest.raises(LaneError):
        payload_lengths(prefix)


def test_the_bounds_themselves_are_allowed():
    assert payload_lengths(PREFIX.pack(MAGIC, MAX_HEADER_BYTES, MAX_BODY_BYTES)) == (
        MAX_HEADER_BYTES,
        MAX_HEADER_BYTES + MAX_BODY_BYTES,
    )


FIELDS = ["step", 1, 1, 1, 0, 1, "none", "logits", {}, [], None, None]
WRONG_VALUES = {
    **dict.fromkeys(range(1, 6), (None, "1", 1.0, True, -1, -(2**63), [], {})),
    **dict.fromkeys((0, 6, 7), (None, 1, b"x", [])),
    8: (None, [], "x"),
    9: (None, {}, "x"),
    10: (-1, 0, 1, 2**64 - 1, "0", True),
    11: (0, "x", {}, True),
}
BAD_FIELDS = [
    *([*FIELDS[:at], wrong, *FIELDS[at + 1 :]] for at, values in WRONG_VALUES.items() for wrong in values),
    FIELDS[:-1], [*FIELDS, None], [], "step", 7, None, {"op": "step"}, dict(zip("abcdefghijkl", FIELDS, strict=True)),
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda f: str(f)[:50])
def test_an_entry_of_wrong_fields_is_refused(fields):
    with pytest.raises(LaneError, match="malformed"):
        decoded(raw([1, [fields], []]))


BAD_HEADERS = [
    7, None, [], "abc", b"", b"\xc1", {"a": 1, "b": 2, "c": 3},
    [1, [], [], []], [1, []], [1, 2, 3], [1, None, []], [1, [], None],
    [[], [], []], [{}, [], []], ["1", [], []], [None, [], []], [True, [], []], [1.0, [], []],
]  # fmt: skip


@pytest.mark.parametrize("header", BAD_HEADERS, ids=str)
def test_a_header_of_another_form_is_refused(header):
    with pytest.raises(LaneError, match="malformed"):
        decoded(raw(header))


BAD_SHAPES = [
    [-1], [MAX_BODY_BYTES + 1], [2**64 - 1], [1, 1, 1, 1], [], [1.0], ["1"], [True], [None], [[1]],
    None, 4, "4", b"\x01", {"1": 1},
]  # fmt: skip


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=str)
@pytest.mark.parametrize("code", ["f", "i", "d", 0, None, []], ids=str)
def test_an_array_of_another_shape_or_type_is_refused(code, shape):
    with pytest.raises(LaneError, match="malformed"):
        decoded(raw([1, [], [[code, shape]]], bytes(64)))


@pytest.mark.parametrize(
    "shapes, body",
    [
        ([[2**29, 2**29, 2**29]], 64),
        ([[17]], 64),
        ([[16], [1]], 64),
        ([[16]], 128),
        ([], 64),
        ([[0]], 64),
        ([[1]], 0),
        ([[1]] * 9, 64),
    ],
    ids=str,
)
def test_arrays_that_disagree_with_the_body_are_refused(shapes, body):
    with pytest.raises(LaneError, match="array"):
        decoded(raw([1, [], [["f", shape] for shape in shapes]], bytes(body)))


@pytest.mark.parametrize("shape", [(0,), (0, 2**29), (2**29, 0, 2**29), (0, 0, 0)], ids=str)
def test_an_array_without_elements_keeps_its_shape(shape):
    assert decoded(raw([1, [], [["f", list(shape)]]])).arrays[0].shape == shape


HUGE = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\x93\x01\xdd\x7f\xff\xff\xff",
    b"\x91" * 100_000,  # nested
    b"\x81\xc0" * 50_000,
]


def peak_bytes(data):
    tracemalloc.start()
    try:
        with pytest.raises(LaneError):
            decoded(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", HUGE, ids=lambda h: h[:7].hex())
def test_announced_lengths_are_not_allocated(header):
    data = raw(header)
    assert peak_bytes(data) < 1_000_000 + 40 * len(data)


def survives(data):
    """Decoding gives a frame no larger than its bytes, or a `LaneError`: nothing else."""
    try:
        frame = decoded(data)
    except LaneError:
        return
    assert sum(a.nbytes for a in frame.arrays) <= len(data)
    for entry in frame.entries:
        assert min(entry.session, entry.seq, entry.epoch, entry.base_len, entry.rows) >= 0
        assert entry.out is None or frame.arrays[entry.out] is not None


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_do_no_harm(junk):
    survives(junk.ljust(PREFIX.size, b"\0"))
    survives(raw(junk, bytes(64)))


@given(
    st.recursive(
        ACKS | st.floats() | st.binary(max_size=9),
        lambda c: st.lists(c, max_size=5) | st.dictionaries(st.text(), c),
        max_leaves=30,
    )
)
@settings(max_examples=300, deadline=None)
def test_random_headers_do_no_harm(header):
    survives(raw(header))
    survives(raw([1, [header], [header]], bytes(64)))


@given(frames(), st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_bytes_do_no_harm(frame, data):
    bad = bytearray(encoded(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(bad))


def test_a_frame_cut_anywhere_is_refused():
    data = encoded(sample())
    header, _ = payload_lengths(data[: PREFIX.size])
    for end in range(PREFIX.size, len(data)):
        with pytest.raises(LaneError):
            decode(memoryview(data)[PREFIX.size : end], header)
    for end in range(PREFIX.size):
        with pytest.raises((LaneError, struct.error)):
            payload_lengths(data[:end])


def test_a_header_length_that_cuts_the_header_is_refused():
    data = encoded(sample())
    header, payload = payload_lengths(data[: PREFIX.size])
    for wrong in (*range(header), header + 1):
        with pytest.raises(LaneError):
            decode(memoryview(data)[PREFIX.size : PREFIX.size + payload], wrong)
