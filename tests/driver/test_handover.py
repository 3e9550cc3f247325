"""A session that is exported goes on bit for bit, by stages cut elsewhere; what is not its file is refused at no cost."""

from __future__ import annotations

import errno
import io
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from fragile import chain, fragile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from overlapping import hold, until
from ringed import launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_stands
from test_recovery import at_every_frame

import memra_pp
from memra_pp import aio
from memra_pp.driver import handover, session_file
from memra_pp.errors import AdmissionError, CacheError, InputError, SessionCancelled, StageError
from memra_pp.stage.frames import OPEN, SEAT, WRITE

__all__ = ["fragile"]

MODELS = ["hybrid", "gemma3_tiny", "ringed"]
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
TOKENS = some_tokens(200)
PROMPT = TOKENS[:50]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pipes(model: str, *stages: int) -> Iterator[memra_pp.Pipeline]:
    for n in stages:
        with launch_tiny(model, stages=n, prefill_chunk=16) as pipe:
            yield pipe
            assert_empty(pipe, rebuilds=0)


@pytest.fixture
def pipe(model: str) -> Iterator[memra_pp.Pipeline]:
    yield from pipes(model, 2)


def exported(session: memra_pp.Session) -> io.BytesIO:
    file = io.BytesIO()
    session.export(file)
    file.seek(0)
    return file


def test_a_text_goes_on_by_one_three_and_six_stages(model: str, pipe: memra_pp.Pipeline) -> None:
    text = list(pipe.generate(PROMPT, max_new_tokens=40, sampling=GREEDY))
    with pipe.open(PROMPT, max_new_tokens=40, speculate=3) as session:
        made = list(session.generate(15, GREEDY))
        file = exported(session)
        assert made + list(session.generate(25, GREEDY)) == text  # the one exported goes on as well
    for other in pipes(model, 1, 3, 6):
        for draft in (None, memra_pp.Draft(k=3)):
            file.seek(0)
            with other.import_session(file) as session:
                assert session.tokens == [*PROMPT, *made[:-1]]
                assert_books_agree(session)
                assert made + list(session.generate(25, GREEDY, draft)) == text


@pytest.mark.parametrize("mode", ["replay", "states"])
def test_what_is_owed_is_told_first(model: str, pipe: memra_pp.Pipeline, mode: Any) -> None:
    """A rollback, a replay, a kept state, snapshots that the stages have not been told of: then every byte is as if fed."""
    wants = []
    for other in pipes(model, 3):
        with pipe.open(PROMPT, max_new_tokens=60, speculate=4, snapshots=3, recurrent=mode) as session:
            session.prefill()
            snap = session.snapshot()
            session.verify(TOKENS[50:54])
            for accept in (2, 0):
                session.rollback(snap, accept)
                session.snapshot().close()
                file, fed = exported(session), TOKENS[: 50 + accept]
                with other.import_session(file) as copy:
                    assert copy.shape == session.shape
                    assert_stands(copy, fed)
                    row = copy.decode(7)
                    assert_stands(copy, [*fed, 7], row[None])
                wants.append((row, fed))
            session.rollback(snap, 0)  # it is as it was: snapshots lead where they led
            assert_stands(session, [*PROMPT, 7], session.decode(7)[None])
        np.testing.assert_array_equal(row, wants[-1][0])


def test_the_last_row_and_a_pending_token_are_carried(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT, max_new_tokens=20) as session:
        row = session.prefill()
        assert session.last_logits is not None and (session.last_logits == row).all()
        with pipe.import_session(exported(session)) as copy:
            assert copy.last_logits is not None and (copy.last_logits == row).all()
            with pytest.raises(InputError, match="nothing was sampled"):
                next(iter(copy.generate(3, GREEDY)))
        done = session.round((), GREEDY, next=int(row.argmax()))
        assert session.last_logits is None
        with pipe.import_session(exported(session)) as copy:
            assert copy.round((), GREEDY).next == session.round((), GREEDY).next and done.next == copy.tokens[-1]


@pytest.mark.parametrize("size", [1, 1000, 4096])
def test_parts_go_in_pieces(model: str, pipe: memra_pp.Pipeline, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe.open(PROMPT[:5], max_new_tokens=3) as session:
        session.prefill()
        whole = exported(session).getvalue()
        if size == 1 and len(whole) > 20_000:
            size = 333
        monkeypatch.setattr(handover, "MAX_PIECE", size)
        file = exported(session)
        assert file.getvalue() == whole
        with pipe.import_session(file) as copy:
            assert_stands(copy, PROMPT[:5])


def test_long_rings_are_carried_by_their_view(pipe: memra_pp.Pipeline) -> None:
    """Past a ring's end, so that it was moved; what has left the view is not in the file."""
    tokens = some_tokens(5000)
    with launch_tiny("ringed", stages=2) as pipe:
        with pipe.open(tokens, max_new_tokens=4400, snapshots=2) as session:
            session.prefill()
            with pipe.import_session(exported(session)) as copy:
                assert_books_agree(copy)
                early = copy.snapshot()
                assert_stands(copy, [*tokens, 1], copy.decode(1)[None])
                more = some_tokens(4050)
                copy.extend(more)
                copy.rollback(early, 1)
                assert_stands(copy, [*tokens, 1, 2], copy.decode(2)[None])
        assert_empty(pipe)


def test_a_stage_lost_at_any_piece(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_PIECE", 1 << 20)
    with launch_tiny(model, stages=3, prefill_chunk=16) as pipe:

        def there_and_back() -> list[Any]:
            with pipe.open(PROMPT[:9], max_new_tokens=9) as session:
                made = [session.prefill().tolist()]
                file = exported(session)
                with pipe.import_session(file) as copy:
                    made.append(copy.decode(5).tolist())
                session.park()
                session.unpark()
                made.append(session.decode(5).tolist())
            return made

        at_every_frame(pipe, there_and_back, least=20)
        assert_empty(pipe, rebuilds=None)


def test_a_parked_session_holds_no_bytes_and_another_fits(model: str) -> None:
    with launch_tiny(model, stages=2) as pipe:
        with pipe.open(PROMPT, max_new_tokens=30, snapshots=1) as session:
            row, snap = session.prefill(), session.snapshot()
            session.park()
            assert_empty(pipe)
            for call in (lambda: session.decode(1), session.snapshot, lambda: list(session.generate(3)), session.park):
                with pytest.raises(InputError, match="parked"):
                    call()
            with pipe.open(PROMPT, max_new_tokens=30) as other:
                other.prefill()
            session.unpark()
            with pytest.raises(InputError, match="not parked"):
                session.unpark()
            with pytest.raises(CacheError, match="has ended"):
                session.rollback(snap, 0)
            assert session.last_logits is not None and (session.last_logits == row).all()
            assert_stands(session, [*PROMPT, 3], session.decode(3)[None])
            assert session.snapshot().pos == len(PROMPT) + 1
        assert_empty(pipe)


def test_unparking_waits_for_bytes_and_stays_parked_when_there_are_none(tmp_path: Path) -> None:
    data = Path(__file__).parents[1] / "data" / "hybrid"
    with memra_pp.launch(data, stages=2, backend="local", budget_bytes=300_000) as pipe:
        session = pipe.open(PROMPT, max_new_tokens=80)
        session.prefill()
        session.park()
        others = []
        with pytest.raises(AdmissionError):
            while True:
                others.append(pipe.open(PROMPT, max_new_tokens=80))
        for timeout in (None, 0.01):
            with pytest.raises(AdmissionError, match="short"):
                session.unpark(timeout)
        threading.Timer(0.2, others.pop().close).start()
        session.unpark(60)
        assert_stands_in_text(pipe, session)
        for other in others:
            other.close()
        session.park()
        session.close()
        assert_empty(pipe)


def assert_stands_in_text(pipe: memra_pp.Pipeline, session: memra_pp.Session) -> None:
    row = session.decode(9)
    session.park()
    with pipe.open([*PROMPT, 9], max_new_tokens=8) as other:
        np.testing.assert_array_equal(other.prefill(), row)
    session.unpark()


def test_a_parked_session_that_nobody_keeps_is_no_ones(pipe: memra_pp.Pipeline) -> None:
    session = pipe.open(PROMPT, max_new_tokens=3)
    session.prefill()
    session.park()
    del session
    list(pipe.generate([1], max_new_tokens=1))


def test_files_that_can_be_read_and_written_once_only(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT[:3], max_new_tokens=3) as session:
        session.prefill()
        ours, theirs = os.pipe()
        with os.fdopen(theirs, "wb") as out, os.fdopen(ours, "rb") as file:
            reading = threading.Thread(target=lambda: copies.append(pipe.import_session(file)))
            copies: list[memra_pp.Session] = []
            reading.start()
            session.export(out)
            out.close()
            reading.join(60)
        with copies[0] as copy:
            assert_stands(copy, PROMPT[:3])


def test_a_path_has_the_whole_file_or_none(pipe: memra_pp.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a session.mpp"
    with pipe.open(PROMPT, max_new_tokens=9) as session:
        with pytest.raises(InputError, match="nothing has been fed"):
            session.export(path)
        session.prefill()
        session.export(path)
        first = path.read_bytes()

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(session_file.os, "fsync", full)
            session.decode(1)
            with pytest.raises(InputError, match=r"cannot be written .*No space left"):
                session.export(path)
        with pytest.raises(InputError, match="cannot be written"):
            session.export(tmp_path / "no folder" / "x")
        assert path.read_bytes() == first and list(tmp_path.iterdir()) == [path]
        assert_stands(session, [*PROMPT, 1, 2], session.decode(2)[None])
        session.export(path)
        with pipe.import_session(path) as copy:
            assert_stands(copy, [*PROMPT, 1, 2])


def refused(pipe: memra_pp.Pipeline, data: bytes, match: str = ".") -> None:
    """In one line, before anything is allocated."""
    frames = len(chain(pipe).log)
    with pytest.raises(InputError, match=match) as error:
        pipe.import_session(io.BytesIO(data))
    assert "\n" not in str(error.value) and len(chain(pipe).log) == frames and pipe.stats()["sessions"] == 0


@pytest.fixture(scope="module")
def file(model: str) -> bytes:
    with launch_tiny(model, stages=2) as pipe, pipe.open(PROMPT, max_new_tokens=9) as session:
        session.prefill(want="argmax")
        return exported(session).getvalue()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(pipe: memra_pp.Pipeline, file: bytes, at: float, bit: int) -> None:
    bad = bytearray(file)
    bad[int(at * len(file))] ^= 1 << bit
    refused(pipe, bytes(bad))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_refused(pipe: memra_pp.Pipeline, file: bytes, at: float) -> None:
    refused(pipe, file[: int(at * len(file))], "cut|ends")


def test_what_is_not_this_models_is_refused(pipe: memra_pp.Pipeline, file: bytes, model: str) -> None:
    refused(pipe, file + b"\0", "cut or added to")
    refused(pipe, b"GGUF" + bytes(100), "no file of a session")
    refused(pipe, file[:8] + struct.pack("<I", 2) + file[12:], "version 2, and 1 is read here")
    refused(pipe, file[:12] + struct.pack("<I", 2**32 - 1) + file[16:], "header's bytes=4294967295")
    for other in set(MODELS) - {model}:
        with launch_tiny(other, stages=1) as theirs:
            refused(theirs, file)
    with pytest.raises(InputError, match="cannot be read"):
        pipe.import_session("/no/such/file")


def with_header(file: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header, whose checksum is right."""
    size = struct.unpack_from("<I", file, 12)[0]
    header = msgpack.unpackb(file[16 : 16 + size])
    change(header)
    packed = msgpack.packb(header)
    return file[:12] + struct.pack("<I", len(packed)) + packed + session_file._sum(packed) + file[16 + size + 16 :]


BAD_HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another model": lambda h: h.update(model="0" * 32),
    "another policy": lambda h: h["policy"].update(k="f32", ring="step"),
    "a policy of the future": lambda h: h["policy"].update({"x" * 999: 1, b"y": 2}),
    "no policy": lambda h: h.update(policy=None),
    "no tokens": lambda h: h.update(tokens=[]),
    "more tokens": lambda h: h["tokens"].append(1),
    "tokens that are none": lambda h: h.update(tokens=[2**40] * 50),
    "texts for tokens": lambda h: h.update(tokens=["1"] * 50),
    "too many tokens": lambda h: h.update(tokens=[1] * 30_000),
    "a shape that is none": lambda h: h.update(shape=7),
    "a huge shape": lambda h: h["shape"].update(ctx=2**40),
    "a shape too small": lambda h: h["shape"].update(ctx=49),
    "a bad mode": lambda h: h["shape"].update(recurrent="often"),
    "too many snapshots": lambda h: h["shape"].update(snapshots=1000),
    "bad logits": lambda h: h.update(logits=b"abc"),
    "a bad next": lambda h: h.update(next=-1),
    "a field more": lambda h: h.update(extra=1),
    "a field less": lambda h: h.pop("next"),
}


def test_rows_of_another_kind_of_processor_are_taken_and_told_of(
    pipe: memra_pp.Pipeline, file: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for made_on, told in (("riscv cuda", 1), (None, 0)):
        caplog.clear()
        data = file if made_on is None else with_header(file, lambda h, made_on=made_on: h.update(made_on=made_on))
        with pipe.import_session(io.BytesIO(data)) as copy:
            assert_stands(copy, PROMPT)
        assert len([r for r in caplog.records if "later bits may differ" in r.getMessage()]) == told


@pytest.mark.parametrize("change", BAD_HEADERS.values(), ids=list(BAD_HEADERS))
def test_a_header_that_lies_is_refused(pipe: memra_pp.Pipeline, file: bytes, change: Callable[[dict[str, Any]], Any]) -> None:
    refused(pipe, with_header(file, change))


def test_a_header_that_says_nothing_is_refused(pipe: memra_pp.Pipeline, file: bytes) -> None:
    for packed in (b"\x80", b"\xc0", b"\x93\x01\x02\x03", b"\xff", b"\xdd\xff\xff\xff\xff", b""):
        bad = file[:12] + struct.pack("<I", len(packed)) + packed + session_file._sum(packed) + bytes(1000)
        refused(pipe, bad)


@pytest.mark.parametrize("name", ["hybrid", "gemma3_tiny"])
def test_a_session_that_there_is_no_room_for_is_refused_by_admission(name: str) -> None:
    data = Path(__file__).parents[1] / "data" / name
    with memra_pp.launch(data, stages=2, backend="local") as pipe, pipe.open(PROMPT, max_new_tokens=9) as session:
        session.prefill()
        file = exported(session)
    with memra_pp.launch(data, stages=1, backend="local", budget_bytes=1000) as pipe:
        with pytest.raises(AdmissionError):
            pipe.import_session(file)
        assert_empty(pipe)


def test_a_stage_that_cannot_fill_a_session_ends_it(
    pipe: memra_pp.Pipeline, file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(chain(pipe)._workers[1].device, "store", lambda *args: 1 // 0)
        with pytest.raises(StageError, match="could not be handed over: stage 1"):
            pipe.import_session(io.BytesIO(file))
    assert_empty(pipe)


DRAFTERS = ["right", "mostly right", "wrong", None]


def drafting(text: list[int], start: int, kind: str | None) -> memra_pp.Draft | None:
    """Drafts the text itself, or with a slip in every third place, or nonsense."""

    def propose(tokens: list[int], k: int) -> list[int]:
        ahead = text[len(tokens) - start :][:k]
        if kind == "wrong":
            return [(t + 1) % 61 for t in ahead]
        return [(t + 1) % 61 if kind == "mostly right" and i % 3 == 2 else t for i, t in enumerate(ahead)]

    return None if kind is None else memra_pp.Draft(k=4, by=propose)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("mode", ["replay", "states"])
def test_a_text_that_is_left_anywhere_goes_on_right_there(pipe: memra_pp.Pipeline, kind: str | None, mode: Any) -> None:
    """Left after any number of tokens, in the middle of a round too: with generate, by hand, or from a file."""
    text = list(pipe.generate(PROMPT, max_new_tokens=30, sampling=GREEDY))
    draft = drafting(text, len(PROMPT), kind)
    for count in range(1, 9):
        with pipe.open(PROMPT, max_new_tokens=40, speculate=4, snapshots=2, recurrent=mode) as session:
            tokens = session.generate(30, GREEDY, draft)
            made = [next(tokens) for _ in range(count)]
            tokens.close()  # type: ignore[attr-defined]
            assert session.tokens == [*PROMPT, *made[:-1]] and session._calls.sampled() == made[-1]
            with pipe.import_session(exported(session)) as copy:
                assert made + list(copy.generate(30 - count, GREEDY)) == text
            made += session.generate(5, GREEDY, draft)
            made += list(session.generate(1, GREEDY))
            assert made == text[: count + 6]
            assert_stands(session, [*PROMPT, *made], session.decode(made[-1])[None])


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_text_that_has_ended_stands_behind_its_last_token(pipe: memra_pp.Pipeline, kind: str | None) -> None:
    """Wherever in a round it ends: not a row more is there than without drafts."""
    text = list(pipe.generate(PROMPT, max_new_tokens=30, sampling=GREEDY))
    for end in dict.fromkeys(text[:12]):
        ending = memra_pp.SamplingParams(temperature=0, eos_ids=(end,))
        with pipe.open(PROMPT, max_new_tokens=40, speculate=4) as session:
            made = list(session.generate(30, ending, drafting(text, len(PROMPT), kind)))
            assert made == text[: text.index(end)] and session.tokens == [*PROMPT, *made]
            assert [*made, end, *session.generate(3, GREEDY)] == text[: len(made) + 4]


def test_what_is_no_file_is_an_input_error(pipe: memra_pp.Pipeline, tmp_path: Path) -> None:
    (tmp_path / "read only").write_bytes(b"x")
    with pipe.open(PROMPT, max_new_tokens=9) as session, (tmp_path / "read only").open("rb") as unwritable:
        session.prefill()
        closed = io.BytesIO()
        closed.close()
        for target in (None, 5, io.StringIO(), closed, unwritable, "a\0b", "\ud800", tmp_path, "/dev/full", "/proc/x"):
            with pytest.raises(InputError, match="cannot be written"):
                session.export(target)  # type: ignore[arg-type]
        with open("/dev/full", "wb", buffering=0) as full, pytest.raises(InputError, match="No space left"):
            session.export(full)  # type: ignore[arg-type]
        for source in (None, 5, io.StringIO("text"), closed, "a\0b", tmp_path):
            with pytest.raises(InputError, match=r"cannot be read|binary file|it was cut"):
                pipe.import_session(source)  # type: ignore[arg-type]
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "behind it")
        session.export(link)
        assert link.is_symlink() and (tmp_path / "behind it").stat().st_size > 100
        os.mkfifo(tmp_path / "fifo")
        for special in ("/dev/null", tmp_path / "fifo"):
            with pytest.raises(InputError, match="no plain file"):
                session.export(special)
        assert Path("/dev/null").is_char_device()
        assert_stands(session, [*PROMPT, 1], session.decode(1)[None])


def test_a_file_may_hold_more_before_the_session_and_take_little_at_a_time(pipe: memra_pp.Pipeline, tmp_path: Path) -> None:
    class Sips(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:1000])

    with pipe.open(PROMPT, max_new_tokens=9) as session:
        session.prefill()
        with Sips(tmp_path / "sips", "w+") as file:
            file.write(b"before")
            session.export(file)  # type: ignore[arg-type]
            file.seek(6)
            with pipe.import_session(file) as copy:  # type: ignore[arg-type]
                assert_stands(copy, PROMPT)


def test_parking_and_closing_in_any_order_leaves_no_bytes(pipe: memra_pp.Pipeline) -> None:
    session = pipe.open(PROMPT, max_new_tokens=9)
    session.prefill()
    session.park()
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.unpark()
    assert_empty(pipe)


def test_a_session_that_is_closed_while_it_waits_to_unpark_is_told_so() -> None:
    data = Path(__file__).parents[1] / "data" / "hybrid"
    with memra_pp.launch(data, stages=2, backend="local", budget_bytes=200_000) as pipe:
        session = pipe.open(PROMPT, max_new_tokens=80)
        session.prefill()
        session.park()
        with pipe.open(PROMPT, max_new_tokens=80):
            told: list[SessionCancelled] = []

            def unpark() -> None:
                with pytest.raises(SessionCancelled, match="was closed while it waited") as caught:
                    session.unpark(60)
                told.append(caught.value)

            waits = threading.Thread(target=unpark)
            waits.start()
            until(lambda: pipe.stats()["admission"]["waiting"] == 1)
            session.close()
            waits.join(60)
            assert told and pipe.stats()["admission"]["waiting"] == 0
        assert_empty(pipe)


@pytest.mark.parametrize("already", [True, False])
def test_a_session_that_is_closed_when_it_has_just_been_admitted_is_not_opened(
    pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch, already: bool
) -> None:
    session = pipe.open(PROMPT, max_new_tokens=9)
    session.prefill()
    session.park()
    close = session.close if already else lambda: pipe._opener.end_later(session.id)
    opens, admitted, whole = list[int](), pipe._door.enter, pipe.chain._send
    monkeypatch.setattr(pipe._door, "enter", lambda *args: (admitted(*args), close())[0])
    monkeypatch.setattr(pipe.chain, "_send", lambda f: (opens.extend(e.op for e in f.entries if e.op == OPEN), whole(f)))
    with pytest.raises(SessionCancelled, match="closed in the middle"):
        session.unpark()
    session.close()
    assert not opens
    assert_empty(pipe)


def test_one_unparks_at_a_time(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT, max_new_tokens=9) as session:
        session.prefill()
        session.park()
        told: list[str] = []

        def unpark() -> None:
            try:
                session.unpark()
            except InputError as error:
                told.append(str(error))

        threads = [threading.Thread(target=unpark) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(told) == 7 and all("not parked" in text or "another call" in text for text in told)
        assert_stands(session, [*PROMPT, 4], session.decode(4)[None])


def test_a_fault_while_a_session_is_unparked_leaves_it_parked(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe.open(PROMPT, max_new_tokens=9) as session:
        session.prefill()
        session.park()
        with monkeypatch.context() as patch:
            patch.setattr(chain(pipe)._workers[1].device, "store", lambda *args: 1 // 0)
            with pytest.raises(StageError, match="could not be handed over"):
                session.unpark()
        assert_empty(pipe)
        session.unpark()
        assert_stands(session, [*PROMPT, 4], session.decode(4)[None])


def test_cancel_ends_an_export(pipe: memra_pp.Pipeline) -> None:
    class Cancels(io.BytesIO):
        def write(self, data: Any) -> int:
            session.cancel()
            return super().write(data)

    session = pipe.open(PROMPT, max_new_tokens=9)
    session.prefill()
    with pytest.raises(SessionCancelled):
        session.export(Cancels())
    session.close()
    assert_empty(pipe)


def test_tasks_that_wait_to_unpark_hold_up_nobody() -> None:
    """More of them than there are threads, and they wait for what one of them is to give back."""
    import asyncio

    data = Path(__file__).parents[1] / "data" / "hybrid"

    async def crowd() -> None:
        async with aio.launch(data, stages=2, backend="local", budget_bytes=200_000) as pipe:
            parked = []
            for _ in range(40):
                parked.append(await pipe.open(PROMPT, max_new_tokens=80, timeout=1))
                await parked[-1].prefill()
                await parked[-1].park()
            holder = await pipe.open(PROMPT, max_new_tokens=80, timeout=1)

            async def turn(session: aio.Session) -> None:
                await session.unpark(60)
                await session.decode(4)
                await session.close()

            turns = [asyncio.create_task(turn(session)) for session in parked]
            waits = asyncio.create_task(pipe.import_session(io.BytesIO(), timeout=60).__aenter__())
            await asyncio.sleep(0)
            await holder.close()
            turns[-1].cancel()
            done = await asyncio.gather(*turns, waits, return_exceptions=True)
            assert [type(one) for one in done[:-2]] == [type(None)] * 39 and isinstance(done[-1], InputError)
            await parked[-1].close()
            stats = await pipe.stats()
            assert stats["sessions"] == 0 and stats["admission"]["waiting"] == 0

    asyncio.run(crowd())


@pytest.mark.parametrize("op", [OPEN, SEAT, WRITE])
@pytest.mark.parametrize("how", ["unpark", "import"])
def test_a_task_that_is_cancelled_while_stages_are_filled_does_not_hold_up_its_loop(
    pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch, how: str, op: int
) -> None:
    import asyncio

    async def cancelled() -> None:
        tasks = aio.Pipeline(pipe)
        session, file = await tasks.open(PROMPT, max_new_tokens=9), io.BytesIO()
        await session.prefill()
        await session.export(file)
        await session.park()
        file.seek(0)
        with monkeypatch.context() as patch:
            there, go = hold(pipe, patch, op)
            opening = session.unpark() if how == "unpark" else tasks.import_session(file).__aenter__()
            task = asyncio.create_task(opening)
            assert await asyncio.to_thread(there.wait, 30)
            task.cancel()
            for _ in range(20):  # turns of the loop, which would not come to its end
                await asyncio.sleep(0)
            go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await session.close()

    asyncio.run(cancelled())
    assert_empty(pipe)


def test_tasks_hand_over_too(tmp_path: Path) -> None:
    import asyncio

    data = Path(__file__).parents[1] / "data" / "hybrid"

    async def there_and_back() -> None:
        async with aio.launch(data, stages=2, backend="local", max_ctx=200) as pipe:
            async with pipe.open(PROMPT, max_new_tokens=9) as session:
                await session.prefill()
                await session.export(tmp_path / "s")
                await session.park()
                await session.unpark()
                row = await session.decode(4)
            async with pipe.import_session(tmp_path / "s") as copy:
                assert (await copy.decode(4) == row).all()
            assert (await pipe.stats())["rebuilds"] == 0

    asyncio.run(there_and_back())
