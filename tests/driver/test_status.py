"""`StatusDoor`: a pipeline tells who holds its key how it fares, in bounded time whatever it is at, and leaves nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memra_pp
from memra_pp.driver.figures import status
from memra_pp.driver.figures.registry import Registered, entries, registry
from memra_pp.driver.figures.status import ask
from memra_pp.errors import ConfigError, LaneError, StageError
from memra_pp.stage import listener
from memra_pp.stage.frames import STOP, Entry, Frame
from memra_pp.stage.listener import KEY_BYTES, connect

WAIT_S = 60.0
DRIVER = """
import sys, memra_pp
pipe = memra_pp.launch(sys.argv[1], stages=2, backend="local")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "memra-pp"


@pytest.fixture
def pipe(tiny: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(tiny, stages=2, backend="local", threads=1) as made:
        yield made


@pytest.fixture
def driver(tiny: Path) -> Iterator[subprocess.Popen[str]]:
    """A pipeline in a process of its own."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child: Any = subprocess.Popen([sys.executable, "-c", DRIVER, str(tiny)], **pipes)
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.communicate(timeout=WAIT_S)


def asked(place: Registered) -> dict[str, Any]:
    answer = ask(place)
    assert answer is not None
    return answer


def gone(path: Path) -> bool:
    """Whether it is, or soon is: a janitor is at it."""
    deadline = time.monotonic() + WAIT_S
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not path.exists()


def test_the_door_tells_what_the_pipeline_does(pipe: memra_pp.Pipeline, tiny: Path) -> None:
    with pipe.open([5, 6, 7], max_new_tokens=4) as session:
        list(session.generate(3))
        [place] = entries()
        answer, stats = asked(place), pipe.stats()
    assert (answer["name"], answer["pid"], answer["model"], answer["backend"]) == (place.name, os.getpid(), str(tiny), "local")
    assert answer["health"] == pipe.health() and answer["why"] is None and answer["up_s"] > 0
    assert answer["stats"] == stats and stats["tokens"] == 3 and stats["sessions"] == 1


def test_every_pipeline_of_a_process_has_a_door_while_it_is_open(pipe: memra_pp.Pipeline, tiny: Path) -> None:
    [first] = entries()
    with memra_pp.launch(tiny, stages=1, backend="local", threads=1):
        both = entries()
        assert both[0] == first and [len(asked(place)["stats"]["stages"]) for place in both] == [2, 1]
    assert entries() == [first]
    pipe.close()
    pipe.close()
    assert entries() == [] and list(registry().iterdir()) == [] and ask(first) is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("status", "lane-"))]


def test_only_its_user_can_reach_a_door_or_its_key(pipe: memra_pp.Pipeline, own_registry: Path) -> None:
    [place] = entries()
    modes = {path: path.stat().st_mode & 0o777 for path in (own_registry, place.path, place.path / "key")}
    assert list(modes.values()) == [0o700, 0o700, 0o600] and len(place.key()) == KEY_BYTES


def test_a_stranger_without_the_key_is_told_nothing_and_holds_nobody_up(pipe: memra_pp.Pipeline) -> None:
    [place] = entries()
    with pytest.raises(LaneError, match="key"):
        connect(place.address, status.ROLE, bytes(KEY_BYTES), WAIT_S, "the door")
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as rude:
        for stranger, says in ((silent, b""), (rude, listener._HELLO + status.ROLE.encode().ljust(16, b"\0") + bytes(64))):
            stranger.settimeout(WAIT_S)
            stranger.connect(place.address.removeprefix("unix:"))
            stranger.sendall(says)
        assert asked(place)["health"]["ready"]
        assert len(b"".join(iter(lambda: rude.recv(1 << 16), b""))) == 64  # its nonce and proof, and no answer
    with contextlib.closing(
        connect(place.address, status.ROLE, place.key(), WAIT_S, "the door")
    ) as lane:  # who holds the key, and asks for what is no status
        lane.send(Frame(1, [Entry(STOP, 0, 0, 0)]), WAIT_S)
        with pytest.raises(LaneError, match="closed"):
            lane.recv(WAIT_S)
    assert asked(place)["health"]["ready"]


def test_what_the_stages_do_not_say_in_time_is_said_to_be_missing(
    pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    [place] = entries()
    monkeypatch.setattr(status, "STATS_S", 0.05)
    asked_for, go, stats = [], threading.Event(), pipe.report.stats

    def slowly() -> dict[str, Any]:
        asked_for.append(threading.current_thread())
        assert go.wait(WAIT_S)
        return stats()

    monkeypatch.setattr(pipe.report, "stats", slowly)
    for _ in range(3):
        answer = asked(place)
        assert answer["stats"] is None and "have not answered" in answer["why"] and answer["health"]["ready"]
    assert len(asked_for) == 1  # whoever asks meanwhile waits for the same answer
    go.set()
    asked_for[0].join(WAIT_S)
    monkeypatch.setattr(status, "STATS_S", WAIT_S)
    assert asked(place)["stats"] is not None


def test_a_pipeline_that_has_failed_says_why(pipe: memra_pp.Pipeline) -> None:
    [place] = entries()
    pipe.chain.fail(StageError("stage 1 (layers 3 to 5) on cpu:1 is gone"))
    answer = asked(place)
    assert answer["health"]["state"] == "failed" and "stage 1" in answer["health"]["cause"]
    assert answer["stats"] is None and "stage 1" in answer["why"]


def test_a_driver_that_ends_without_closing_leaves_nothing(driver: subprocess.Popen[str], own_registry: Path) -> None:
    assert len(entries()) == 1
    driver.communicate(timeout=WAIT_S)
    assert list(own_registry.iterdir()) == []


def test_a_driver_that_is_stopped_does_not_answer_and_one_that_is_killed_leaves_nothing(
    driver: subprocess.Popen[str], own_registry: Path
) -> None:
    [place] = entries()
    assert place.pid == driver.pid and asked(place)["health"]["ready"]
    driver.send_signal(signal.SIGSTOP)
    with pytest.raises(StageError, match="does not answer"):
        ask(place)
    assert entries() == [place]
    driver.send_signal(signal.SIGCONT)
    assert asked(place)["health"]["ready"]
    driver.send_signal(signal.SIGKILL)
    driver.wait(WAIT_S)
    assert gone(place.path) and ask(place) is None and list(own_registry.iterdir()) == []


def test_an_entry_that_nobody_is_behind_is_removed(own_registry: Path) -> None:
    gone_pid = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    own_registry.mkdir(mode=0o700)
    for name in (f"{gone_pid.stdout.strip()}-1", f"{os.getpid()}-7777"):
        (own_registry / name).mkdir()
        (own_registry / name / "key").write_bytes(bytes(KEY_BYTES))
    with socket.socket(socket.AF_UNIX) as bound:  # a socket that has no listener
        bound.bind(str(own_registry / f"{os.getpid()}-7777" / "door"))
        (own_registry / "notes.txt").touch()
        assert len(entries()) == 2 and [ask(place) for place in entries()] == [None, None]
    assert [path.name for path in own_registry.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("what", ["file", "open to others", "link"])
def test_a_pipeline_launches_without_a_registry_and_says_so_once(
    tiny: Path, own_registry: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(status, "_warned", threading.Event())
    match what:
        case "file":
            own_registry.touch()
        case "open to others":
            own_registry.mkdir()
            own_registry.chmod(0o755)
        case "link":
            (own_registry.parent / "elsewhere").mkdir(mode=0o700)
            own_registry.symlink_to("elsewhere")
    with pytest.raises(ConfigError, match=str(own_registry)):
        registry()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with memra_pp.launch(tiny, stages=1, backend="local", threads=1) as pipe:
                assert list(pipe.generate([5, 6, 7], max_new_tokens=2))
    assert [record.message for record in caplog.records if "memra-pp status" in record.message] == [caplog.records[0].message]
    assert str(own_registry) in caplog.records[0].message


def test_a_path_that_is_too_long_for_a_socket_costs_the_door_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with memra_pp.launch(tiny, stages=1, backend="local", threads=1) as pipe:
        assert list(pipe.generate([5, 6, 7], max_new_tokens=2))
    assert list((deep / "memra-pp").iterdir()) == []
