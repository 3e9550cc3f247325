"""`memra-pp status`: finds pipelines of other processes, shows them once, as JSON or live; what it cannot is one line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memra_pp
from memra_pp import cli
from memra_pp.cli.status import HOME, REST_OF_SCREEN
from memra_pp.cli.status_text import listed, shown
from memra_pp.cli.table import human
from memra_pp.driver.figures import status
from memra_pp.driver.figures.registry import entries
from memra_pp.errors import StageError

WAIT_S = 60
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def pipe(hybrid: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(hybrid, stages=2, backend="local", threads=1, budget_bytes=300_000) as made:
        yield made


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "memra_pp.cli", "status", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def busy(pipe: memra_pp.Pipeline) -> memra_pp.Session:
    """A session that has generated, and somebody who was refused."""
    session = pipe.open([5, 6, 7], max_new_tokens=8, speculate=2)
    list(session.generate(4, GREEDY))
    with pytest.raises(memra_pp.AdmissionError):
        pipe.open([5], max_new_tokens=16000)
    return session


def test_another_process_sees_what_the_pipeline_sees(pipe: memra_pp.Pipeline) -> None:
    with busy(pipe):
        for args in ((), (str(os.getpid()),), (entries()[0].name,)):
            done = run("--json", *args)
            assert done.returncode == 0, done.stderr
            [answer] = json.loads(done.stdout)
            assert answer["stats"] == pipe.stats() and answer["pid"] == os.getpid()


def test_once_shows_every_figure(pipe: memra_pp.Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    with busy(pipe):
        assert cli.main(["status", "--once"]) == 0
        stats = pipe.stats()
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:4] == ["hybrid", entries()[0].name, "local", "ready"]
    assert "1 session, 4 tokens" in text
    table = {line.split()[0]: line for line in text.splitlines() if line}
    for stage in stats["stages"]:
        row, held = table[str(stage["stage"])], stage["bytes"]
        assert f"{stage['layers'][0]}-{stage['layers'][1] - 1}" in row
        assert all(f"  {human(held[kind])}" in row for kind in ("k", "v", "recurrent", "snapshot"))
    for device in stats["devices"]:
        assert all(human(device[f"{kind}_bytes"]) in table[device["device"]] for kind in ("budget", "reserved", "free"))
    assert "1 admitted, 0 deferred, 1 refused, 0 waiting" in text
    [why] = stats["admission"]["reasons"]
    assert f"refused by stage {why['stage']}, {why['reason']}: 1" in text


def test_several_pipelines_are_listed_and_one_is_shown_by_its_name(pipe: memra_pp.Pipeline, tiny: Path) -> None:
    with memra_pp.launch(tiny, stages=1, backend="local", threads=1):
        names = [place.name for place in entries()]
        done = run()
        assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
            [names[0], "hybrid", "2"],
            [names[1], "gemma3_tiny", "1"],
        ]
        assert run(str(os.getpid())).stdout.splitlines()[1:] and run(names[1]).stdout.startswith("gemma3_tiny")
        assert [answer["name"] for answer in json.loads(run("--json").stdout)] == names


def test_on_a_terminal_it_is_drawn_again_and_again_until_the_pipeline_ends(pipe: memra_pp.Pipeline) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-m", "memra_pp.cli", "status"], stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    try:
        with busy(pipe) as session:
            frames = [drawn(ours)]
            list(session.generate(3, GREEDY))
            frames.append(drawn(ours))
        assert all(frame.startswith(HOME) and "hybrid" in frame for frame in frames)
        assert "tok/s" not in frames[0] and "tok/s" in frames[1] and "7 tokens" in frames[1]
        pipe.close()
        assert "has ended" in drawn(ours, "ended") and child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def drawn(terminal: int, until: str = REST_OF_SCREEN) -> str:
    """What a terminal is sent, up to the end of a screen."""
    text = ""
    while until not in text:
        text += os.read(terminal, 1).decode("ascii", "replace")
    return text


def test_who_does_not_answer_is_said_not_to(
    pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = entries()[0].name
    monkeypatch.setattr(status, "connect", refusing)
    assert cli.main(["status", "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{name}  does not answer"
    assert cli.main(["status", "--json"]) == 0
    [answer] = json.loads(capsys.readouterr().out)
    assert answer["health"] is None and answer["stats"] is None and "timed out" in answer["why"]
    assert "does not answer" in listed([answer])[1]


def refusing(*args: Any) -> None:
    raise StageError("timed out")


def test_a_pipeline_that_recovers_shows_why_and_no_figures(pipe: memra_pp.Pipeline) -> None:
    answer = status.ask(entries()[0])
    assert answer is not None
    last = {"cause": "stage 1 is gone", "lost": "stage 1 died", "took_s": 3.5, "epoch": 2}
    told = {"state": "recovering", "cause": "stage 0 is gone", "recoveries": 2, "last_recovery": last}
    lines = shown({**answer, "health": {**answer["health"], **told}, "stats": None, "why": "no answer"})
    assert lines[0].split()[3] == "recovering" and lines[1] == "cause: stage 0 is gone"
    assert lines[2] == "recoveries: 2, the last in 3.5 s: stage 1 died" and lines[3] == "no figures just now: no answer"


@pytest.mark.parametrize("args", [(), ("4194305",), ("../../etc",)])
def test_no_pipeline_is_one_line(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", *args]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(f"memra-pp: error: no pipeline{' '.join(('', *args))} of yours runs")
    assert said.err.count("\n") == 1
