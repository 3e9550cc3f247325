"""Frames: what is encoded comes back; what is not a frame is a `LaneError`, before anything is allocated for it."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.errors import InputError, LaneError
from memra_pp.stage import frames as frames_module
from memra_pp.stage.frames import (
    ALIGN,
    CLOSE,
    GENERAL,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    MAX_MICROS,
    MAX_NOTE_LIST,
    OPEN,
    OPS,
    PLAIN,
    PREFIX,
    STEP,
    TOPK,
    Entry,
    Frame,
    encode,
    read,
    want_code,
)

COUNTS = st.integers(0, 2**63 - 1)
IDS = st.integers(-(2**63), 2**63 - 1)
MICROS = st.integers(0, MAX_MICROS)
MARKS = st.tuples(st.integers(0, 2**16 - 1), MICROS, MICROS, st.integers(0, 2**16 - 1))
"""Of a frame: hops, what the slowest stage took and all of them, a slot."""
VALUES = st.recursive(st.none() | st.booleans() | COUNTS | st.text(max_size=9), lambda c: st.lists(c, max_size=3), max_leaves=4)
MAPS = st.dictionaries(st.text(max_size=9), VALUES, max_size=4)
FAULTS = st.tuples(COUNTS, st.text(max_size=9), st.text(max_size=9)).map(list)
NOTES = st.fixed_dictionaries({}, optional={"args": MAPS, "bytes": st.lists(COUNTS), "answer": VALUES, "fault": FAULTS})
ENTRIES = st.builds(Entry, *[COUNTS] * len(Entry._fields))

FIELDS_OF_ENTRY = len(Entry._fields)
ONES = (1,) * FIELDS_OF_ENTRY

ROOM = 256
"""A receiver's buffer is no smaller."""

HEAD = 192
"""Bytes of a plain head."""


def encoded(frame):
    buffers, total = encode(frame)
    data = b"".join(memoryview(b).tobytes() for b in buffers)
    assert len(data) == total
    return data


def received(data, got=None):
    """What `read` makes of a buffer with `data` of which `got` bytes have arrived; the rest of the buffer is junk."""
    buffer = bytearray(data[:got]).ljust(max(ROOM, len(data)), b"\xa5")
    return read(memoryview(buffer), len(data[:got]))


def decoded(data):
    frame, size = received(data)
    if frame is None:
        assert size > len(data)
        raise LaneError("more bytes are needed")
    assert size <= len(data)
    return frame


def raw(entries=(), records=(), notes=b"\x80", body=b"", *, counts=None, head=None, announced=None, kind=GENERAL):
    """A general frame of any fields."""
    notes = notes if isinstance(notes, bytes) else msgpack.packb(notes)
    counts = counts or (len(entries), len(records), len(notes))
    rest = struct.pack("<3I", *counts) + b"".join([struct.pack(f"<{FIELDS_OF_ENTRY}q", *e) for e in entries])
    rest += b"".join([struct.pack("<3q", *r) for r in records]) + notes
    rest += bytes(-(PREFIX.size + len(rest)) % ALIGN)
    head = PREFIX.size + len(rest) if head is None else head
    return PREFIX.pack(kind, head, 0, 0, 0, 0, len(body) if announced is None else announced, 1) + rest + body


def raw_plain(entry=(0,) * FIELDS_OF_ENTRY, record=(0, 0, 0), body=b"", *, head=HEAD, announced=None):
    """A plain frame of any fields."""
    prefix = PREFIX.pack(PLAIN, head, 0, 0, 0, 0, len(body) if announced is None else announced, 1)
    return (prefix + struct.pack(f"<{FIELDS_OF_ENTRY}q", *entry) + struct.pack("<3q", *record)).ljust(HEAD, b"\0") + body


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=2)))
    shape = (*shape[:1], *(max(1, n) for n in shape[1:]))
    dtype = draw(st.sampled_from([np.float32, np.int32]))
    bits = draw(st.binary(min_size=4 * int(np.prod(shape)), max_size=4 * int(np.prod(shape))))
    return np.frombuffer(bits, dtype).reshape(shape)


@st.composite
def plain_frames(draw):
    held = draw(st.lists(arrays(), max_size=1))
    return Frame(draw(IDS), [draw(ENTRIES)], held, {}, *draw(MARKS))


@st.composite
def general_frames(draw):
    entries = draw(st.lists(ENTRIES, max_size=4))
    notes = st.dictionaries(st.integers(0, len(entries) - 1), NOTES) if entries else st.just({})
    held = draw(st.lists(arrays(), max_size=4))
    return Frame(draw(IDS), entries, held, draw(notes), *draw(MARKS))


def frames():
    return plain_frames() | general_frames()


def sample():
    note = {"args": {"ctx": 8}, "bytes": [17, 17], "fault": [0, "StageError", "why"]}
    return Frame(
        9,
        [Entry(STEP, 3, 4, 1, 17, 2, 1, 1), Entry(OPEN, 4, 0, 1)],
        [np.arange(48, dtype=np.float32).reshape(2, 24), np.arange(2, dtype=np.int32)],
        {1: note},
        2,
    )


def plain_sample():
    return Frame(9, [Entry(STEP, 3, 4, 1, 17, 2, 1, 1)], [np.arange(48, dtype=np.float32).reshape(2, 24)], {}, 2)


def bare_sample():
    return Frame(9, [Entry(STEP, 3, 4, 1, 17, snapshot=1)], [], {}, 2, 1234)


SAMPLES = [
    pytest.param(plain_sample(), id="plain"),
    pytest.param(bare_sample(), id="plain, no array"),
    pytest.param(sample(), id="general"),
]


def same(a, b):
    alike = [
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(a.arrays, b.arrays, strict=True)
    ]
    heads = [(one.id, one.entries, one.notes, one.hops, one.slot, one.slowest, one.busy) for one in (a, b)]
    return heads[0] == heads[1] and all(alike)


@given(frames())
@settings(deadline=None)
def test_a_frame_comes_back_as_it_was(frame):
    assert same(decoded(encoded(frame)), frame)


@given(frames())
@settings(deadline=None)
def test_arrays_are_views_at_aligned_places_of_the_received_bytes(frame):
    data = encoded(frame)
    assert len(data) % ALIGN == 0
    buffer = np.frombuffer(bytearray(data).ljust(ROOM, b"\0"), np.uint8).copy()
    start = buffer.__array_interface__["data"][0]
    for a in read(memoryview(buffer), len(data))[0].arrays:
        if a.size:
            assert np.shares_memory(a, buffer) and (a.__array_interface__["data"][0] - start) % ALIGN == 0


@given(frames(), st.data())
@settings(deadline=None)
def test_what_has_come_behind_a_frame_is_not_touched(frame, data):
    sent = encoded(frame)
    back, size = received(sent + data.draw(st.binary(max_size=400)))
    assert size == len(sent) and same(back, frame)


def test_one_entry_with_an_array_or_none_and_nothing_to_say_has_the_plain_head():
    a = np.zeros((1, 16), np.float32)
    for held, size in ([a], HEAD + a.nbytes), ([], HEAD):
        data = encoded(Frame(1, [Entry(STEP, 1, 1, 1, 0, 1)], held))
        assert data[:4] == struct.pack("<I", PLAIN) and len(data) == size
    assert encoded(Frame(1, [Entry(STEP, 1, 1, 1, 0, 1)], [a], {0: {}}))[:4] == struct.pack("<I", GENERAL)


@pytest.mark.parametrize("entries", [0, 1, 2])
def test_sending_copies_no_array(entries):
    a = np.ones((4, 64), np.float32)
    buffers, _ = encode(Frame(1, [Entry(STEP, 1, 1, 1, 0, 4)] * entries, [a]))
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), a) for b in buffers)


def test_what_is_wanted_has_a_name_and_a_code():
    assert [want_code(want, 40) for want in ("logits", "argmax", "topk:1", "topk:40")] == [0, 1, 2, 41]
    for bad in (
        "topk:0",
        "topk:41",
        "topk:-1",
        "topk:",
        "topk: 3",
        "topk:1.5",
        "5",
        "embedding",
        "",
        None,
        1,
        "topk:" + "9" * 30,
    ):
        with pytest.raises(InputError, match="topk:1 to 40"):
            want_code(bad, 40)
    assert TOPK.itemsize == 8


def test_a_buried_entry_has_a_fault_and_no_rows_and_keeps_what_its_note_said():
    frame = Frame(1, [Entry(STEP, 1, 1, 1, 0, 2), Entry(OPEN, 2, 0, 1)], [], {1: {"bytes": [3]}})
    assert frame.fault(0) is frame.fault(1) is None
    frame.bury(0, [0, "A", "b"])
    frame.bury(1, [1, "C", "d"])
    assert frame.entries == [Entry(STEP, 1, 1, 1, 0, 0), Entry(OPEN, 2, 0, 1)]
    assert frame.fault(0) == [0, "A", "b"] and frame.notes[1] == {"bytes": [3], "fault": [1, "C", "d"]}
    assert same(decoded(encoded(frame)), frame)


ENDLESS = {}
ENDLESS["x"] = ENDLESS
UNPACKABLE = [
    *(Frame(1, [Entry(*(0,) * at, wrong, *(0,) * (FIELDS_OF_ENTRY - 1 - at))])
      for at in range(FIELDS_OF_ENTRY) for wrong in (None, "1", 1.0, [], {}, 2**63, -(2**63) - 1)),
    *(Frame(frame_id, []) for frame_id in (None, "1", 1.0, 2**63)),
    *(Frame(1, [], hops=hops) for hops in (-1, 2**16, None)),
    *(Frame(1, [], slot=slot) for slot in (-1, 2**16, None)),
    *(Frame(1, [], **{name: micros}) for name in ("slowest", "busy") for micros in (-1, MAX_MICROS + 1, None)),
    *(Frame(1, [Entry(OPEN, 1, 0, 1)], notes={0: {"x": x}}) for x in (object(), 2**64, "\udcff", ENDLESS)),
    Frame(1, [(0,) * (FIELDS_OF_ENTRY - 1)]), Frame(1, [(0,) * (FIELDS_OF_ENTRY + 1)]), Frame(1, [None]),
]  # fmt: skip


@pytest.mark.parametrize("held", [[], [np.zeros(3, np.int32)]], ids=["bare", "with an array"])
@pytest.mark.parametrize("frame", UNPACKABLE, ids=lambda f: repr(f)[:70])
def test_a_frame_that_cannot_be_packed_is_a_lane_error(frame, held):
    with pytest.raises(LaneError, match="cannot be packed"):
        encode(Frame(frame.id, frame.entries, held, frame.notes, frame.hops, frame.slowest, frame.busy, frame.slot))


@pytest.mark.parametrize("entries", [0, 1])
@pytest.mark.parametrize(
    "a",
    [
        np.ones(2),
        np.ones(2, np.int64),
        np.ones(2, np.float16),
        np.ones(2, bool),
        np.ones(2, ">f4"),
        np.array(1, np.float32),
        np.ones((3, 0), np.float32),
        np.ones((1, 1, 1), np.float32),
        np.ones((1, 1, 1, 1), np.float32),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_what_a_receiver_would_refuse_is_not_sent(a, entries):
    with pytest.raises(LaneError, match="only f32 and i32"):
        encode(Frame(1, [Entry(CLOSE, 1, 0, 1)] * entries, [a]))


@pytest.mark.parametrize("entries", [1, 4])
@pytest.mark.parametrize("bound", ["MAX_HEAD_BYTES", "MAX_BODY_BYTES"])
def test_a_frame_past_a_bound_is_not_sent(bound, entries, monkeypatch):
    monkeypatch.setattr(frames_module, bound, 64)
    with pytest.raises(LaneError, match="fewer rows"):
        encode(Frame(1, [Entry(OPEN, 1, 0, 1)] * entries, [np.zeros(17, np.float32)]))


BAD_PREFIXES = [
    PREFIX.pack(GENERAL ^ 1, HEAD, 0, 0, 0, 0, 0, 1),
    PREFIX.pack(PLAIN ^ 2, HEAD, 0, 0, 0, 0, 0, 1),
    *(PREFIX.pack(kind, head, 0, 0, 0, 0, 0, 1) for kind in (GENERAL, PLAIN) for head in (MAX_HEAD_BYTES + 1, 2**32 - 1)),
    *(
        PREFIX.pack(k, HEAD, 0, 0, 0, 0, body, 1)
        for k in (GENERAL, PLAIN)
        for body in (MAX_BODY_BYTES + 1, 2**63 - 1, -1, -(2**63))
    ),
    *(PREFIX.pack(PLAIN, head, 0, 0, 0, 0, MAX_BODY_BYTES, 1) for head in (0, 64, HEAD - 1, HEAD + 1, 256, MAX_HEAD_BYTES)),
    b"GET / HTTP/1.1\r\n".ljust(PREFIX.size, b"\0"),
    bytes(PREFIX.size),
]


@pytest.mark.parametrize("prefix", BAD_PREFIXES, ids=lambda p: p[:24].hex())
def test_a_prefix_past_the_bounds_is_refused_unread(prefix):
    with pytest.raises(LaneError):
        received(prefix)


@pytest.mark.parametrize("kind, head", [(GENERAL, MAX_HEAD_BYTES), (PLAIN, HEAD)])
def test_the_bounds_themselves_are_allowed(kind, head):
    assert received(PREFIX.pack(kind, head, 0, 0, 0, 0, MAX_BODY_BYTES, 1)) == (None, head + MAX_BODY_BYTES)


@pytest.mark.parametrize("wrong", [-1, -2, -(2**63)])
@pytest.mark.parametrize("at", range(FIELDS_OF_ENTRY))
def test_a_negative_field_is_refused(at, wrong):
    entry = [*(1,) * at, wrong, *(1,) * (FIELDS_OF_ENTRY - 1 - at)]
    for data in (raw([entry]), raw([ONES, entry, ONES]), raw_plain(entry)):
        with pytest.raises(LaneError, match="malformed: a negative field"):
            decoded(data)


def test_the_largest_fields_are_allowed_and_no_op_is_unheard_of():
    most = Entry(*[2**63 - 1] * FIELDS_OF_ENTRY)
    assert decoded(raw([most])).entries == decoded(raw_plain(most)).entries == [most]
    assert most.op >= len(OPS)


BAD_NOTES = [
    7, None, [], "abc", b"", b"\xc1", b"\x80\x80", b"\x81", {"a": {}}, {"0": {}}, {1: {}}, {-1: {}}, {2**64 - 1: {}},
    {True: {}}, {0.0: {}}, {None: {}}, b"\x81\x90\x80", b"\x81\x80\x80", {0: None}, {0: []}, {0: 1}, {0: "args"},
    *({0: {"fault": f}} for f in (0, 1.0, True, "x", "abc", {}, {0: 1, "a": 2, "b": 3}, [], [0, "a"], [0, "a", "b", "c"],
                                  ["a", 0, "b"], [True, "a", "b"], [0, b"a", "b"], [0, "a", None], [[], "a", "b"])),
    {0: {"x": [0] * (MAX_NOTE_LIST + 1)}}, b"\x81\x00" + b"\x81\xa1x\xa1\xff", b"\x81\x00\x81\xa1x\xc7\x05\xff12345",
    b"\x91" * 900 + b"\xc0", b"\x81\x00" + b"\x91" * 900 + b"\xc0", b"\x81\x00\x81\xa5fault" + b"\x91" * 900 + b"\xc0",
]  # fmt: skip


@pytest.mark.parametrize("notes", BAD_NOTES, ids=lambda n: str(n)[:50])
def test_notes_of_another_form_are_refused(notes):
    with pytest.raises(LaneError, match="malformed"):
        decoded(raw([ONES], notes=notes))


def test_a_fault_of_none_is_none():
    assert decoded(raw([ONES], notes={0: {"fault": None}})).fault(0) is None


BAD_RECORDS = [
    *((code, 1, 0) for code in (-1, -2, 2, 3, 2**63 - 1, -(2**63))),
    *((0, rows, 0) for rows in (-1, 2**63 - 1, -(2**63), 2**61, 2**62)),
    *((0, 1, width) for width in (-1, 2**63 - 1, -(2**63), 2**61, 2**62)),
    *((0, n, n) for n in (-1, -2, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1)),
    *((1, 0, width) for width in (-1, 2**63 - 1, 2**62)),
]


@pytest.mark.parametrize("record", BAD_RECORDS, ids=str)
def test_an_array_of_another_shape_or_type_is_refused(record):
    for data in (raw([], [record], body=bytes(64)), raw_plain(record=record, body=bytes(64))):
        with pytest.raises(LaneError, match="malformed"):
            decoded(data)


@pytest.mark.parametrize(
    "shapes, body",
    [
        ([(2**29, 2**29)], 64),
        ([(17, 0)], 64),
        ([(16, 0), (1, 0)], 64),
        ([(16, 0)], 128),
        ([], 64),
        ([(0, 0)], 64),
        ([(1, 0)], 0),
        ([(1, 0)] * 9, 64),
        ([(4, 4), (0, 5), (4, 5)], 128),
        ([(4, 4)], 16),
        ([(4, 0)], 32),
    ],
    ids=str,
)
def test_arrays_that_disagree_with_the_body_are_refused(shapes, body):
    records = [(0, *shape) for shape in shapes]
    with pytest.raises(LaneError, match="malformed"):
        decoded(raw([], records, body=bytes(body)))
    if len(records) == 1:
        with pytest.raises(LaneError, match="malformed"):
            decoded(raw_plain(record=records[0], body=bytes(body)))


@pytest.mark.parametrize("record", [(2, 1, 0), (2, 0, 1), (3, 0, 0)], ids=str)
def test_no_array_has_one_record_only(record):
    assert decoded(raw_plain(record=(2, 0, 0))).arrays == []
    for data in (raw_plain(record=record), raw([ONES], [(2, 0, 0)])):
        with pytest.raises(LaneError, match="malformed"):
            decoded(data)


@pytest.mark.parametrize("shape", [(0,), (0, 1), (0, 2**29), (0, 2**60)], ids=str)
def test_an_array_without_elements_keeps_its_shape(shape):
    record = (0, shape[0], *(shape[1:] or (0,)))
    assert decoded(raw([], [record])).arrays[0].shape == decoded(raw_plain(record=record)).arrays[0].shape == shape


@pytest.mark.parametrize(
    "counts",
    [
        (0, 0, 1), (2, 0, 1), (1, 1, 1), (1, 0, 0), (1, 0, 2), (1, 0, 64), (0, 0, 65), (0, 2, 17), (0, 3, 1),
        *((*(0,) * at, count, *(0,) * (2 - at)) for at in range(3) for count in (2**16, 2**31, 2**32 - 1)), (2**32 - 1,) * 3,
    ],
    ids=str,
)  # fmt: skip
def test_counts_that_disagree_with_the_head_are_refused(counts):
    with pytest.raises(LaneError, match="malformed"):
        decoded(raw([ONES], counts=counts))


HUGE = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\x81\x00\x81\xa1x\xdd\x7f\xff\xff\xff",
    b"\x91" * 100_000,  # nested
    b"\x81\xc0" * 50_000,
    (b"\x81\x00" + b"\xdd\x00\x00\x70\x00" * 1000).ljust(100_000, b"\xc0"),  # nested, each level as long as the bytes allow
]


def peak_bytes(data):
    buffer = memoryview(bytearray(data).ljust(ROOM, b"\0"))
    tracemalloc.start()
    try:
        with pytest.raises(LaneError):
            read(buffer, len(data))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("notes", HUGE, ids=lambda h: h[:7].hex())
def test_announced_lengths_are_not_allocated(notes):
    data = raw([ONES], notes=notes)
    assert peak_bytes(data) < 1_000_000 + 40 * len(data)


@pytest.mark.parametrize("at", range(3))
def test_announced_counts_are_not_allocated(at):
    assert peak_bytes(raw(counts=(*(0,) * at, 2**32 - 1, *(0,) * (2 - at)))) < 100_000


def survives(data):
    """Reading gives a frame no larger than its bytes, that can be sent on, or a `LaneError`: nothing else."""
    try:
        frame = decoded(data)
    except LaneError:
        return
    assert sum(a.nbytes for a in frame.arrays) <= len(data)
    assert all(a.dtype in frames_module.DTYPES and a.ndim in (1, 2) and a.flags.c_contiguous for a in frame.arrays)
    assert all(type(n) is int and n >= 0 for entry in frame.entries for n in entry)
    for i, note in frame.notes.items():
        assert frame.entries[i] and isinstance(note, dict)
        if (fault := frame.fault(i)) is not None:
            stage, kind, message = fault
            assert (type(stage), type(kind), type(message)) == (int, str, str)
    frame.hops = min(frame.hops, 2**16 - 2) + 1
    again = decoded(encoded(frame))
    assert again.entries == frame.entries and repr(again.notes) == repr(frame.notes)


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_do_no_harm(junk):
    survives(junk)
    for kind, head in ((PLAIN, HEAD), (GENERAL, HEAD), (GENERAL, 256)):
        survives(PREFIX.pack(kind, head, 0, 0, 0, 0, max(0, (PREFIX.size + len(junk)) // ALIGN * ALIGN - head), 1) + junk)
    survives(raw([ONES], notes=junk))
    survives(raw([ONES], [(0, 16, 0)], notes=b"\x81\x00" + junk, body=bytes(64)))


LENGTHS = st.sampled_from([0, 1, 2, 44, 64, 108, 128, 192, 2**16, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
FIELDS = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20) | st.sampled_from([2**31, 2**32, 2**61, 2**62])


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_random_fields_do_no_harm(data):
    entries = data.draw(st.lists(st.tuples(*[FIELDS] * FIELDS_OF_ENTRY), max_size=3))
    records = data.draw(st.lists(st.tuples(st.integers(-1, 2) | FIELDS, FIELDS, FIELDS), max_size=3))
    body = bytes(data.draw(st.sampled_from([0, 16, 64, 128, 192])))
    changed = {
        "counts": data.draw(st.none() | st.tuples(LENGTHS, LENGTHS, LENGTHS)),
        "head": data.draw(st.none() | LENGTHS),
        "announced": data.draw(st.none() | LENGTHS | FIELDS),
    }
    survives(raw(entries, records, body=body, **changed))
    survives(raw(entries, records, body=body))
    for entry, record in zip(entries, records, strict=False):
        survives(raw_plain(entry, record, body))
        survives(raw_plain(entry, record, body, head=changed["head"] or HEAD, announced=changed["announced"]))


@given(
    st.recursive(
        VALUES | st.floats() | st.binary(max_size=9) | FIELDS,
        lambda c: st.lists(c, max_size=5) | st.dictionaries(st.text(max_size=5) | st.integers(-1, 2), c),
        max_leaves=30,
    )
)
@settings(max_examples=300, deadline=None)
def test_random_notes_do_no_harm(notes):
    survives(raw([ONES], notes=notes))
    survives(raw([ONES], [(0, 1, 0)], {0: notes}, bytes(64)))
    survives(raw([ONES], notes={0: {"fault": notes, "answer": notes}}))


@given(frames(), st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_do_no_harm(frame, data):
    bad = bytearray(encoded(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(bad))


@pytest.mark.parametrize("frame", SAMPLES)
def test_of_a_frame_cut_anywhere_more_is_needed_and_no_more_than_there_is(frame):
    data = encoded(frame)
    for end in range(len(data)):
        none, size = received(data, end)
        assert none is None and end < size <= len(data) and size == (len(data) if end >= PREFIX.size else PREFIX.size)


@pytest.mark.parametrize("frame", SAMPLES)
def test_another_length_of_the_head_is_refused(frame):
    """Whether the body still ends where it did or moves with the head."""
    data = encoded(frame)
    kind, head, *marks, body, frame_id = PREFIX.unpack(data[: PREFIX.size])
    for wrong in {*range(head + body + 200)} - {head}:
        for announced in (body, head + body - wrong):
            with pytest.raises(LaneError):
                decoded(PREFIX.pack(kind, wrong, *marks, announced, frame_id) + data[PREFIX.size :] + bytes(400))
