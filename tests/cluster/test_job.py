"""A job that is really submitted: its answers are those of the same prompts alone, whatever ends it in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_nodes import Nodes, free_port, ray_nodes

import memra_pp

JOB = Path(__file__).parents[2] / "cluster" / "job.py"
NEW, PROMPTS = 24, 12
SUBMIT_S = 240.0
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[Nodes, str]]:
    """A head with a dashboard, which takes jobs, and its address."""
    with ray_nodes() as nodes:
        port = free_port()
        nodes.add(3, more=("--include-dashboard=true", f"--dashboard-port={port}"))
        yield nodes, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def alone(hybrid: Path) -> dict[str, list[int]]:
    with memra_pp.launch(hybrid, backend="local") as pipe:
        return {f"p{i}": list(pipe.generate([5, 6, i], max_new_tokens=NEW)) for i in range(PROMPTS)}


def write_job(folder: Path, model: Path, prompts: str = "prompts.jsonl", **more: Any) -> Path:
    """A job's directory; the path of its answers."""
    lines = [json.dumps({"id": f"p{i}", "tokens": [5, 6, i]}) for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    answers = folder / "answers.jsonl"
    said = {"model": str(model), "prompts": prompts, "answers": str(answers), "max_new_tokens": NEW, "stages": 2, **more}
    (folder / "job.yaml").write_text(yaml.safe_dump(said))
    return answers


def ray_job(head: tuple[Nodes, str], *command: str) -> subprocess.CompletedProcess[str]:
    nodes, address = head
    ray = str(Path(sys.executable).parent / "ray")
    line = [ray, "job", command[0], f"--address={address}", *command[1:]]
    return subprocess.run(line, env=nodes.env, capture_output=True, text=True, timeout=SUBMIT_S)


def submit(head: tuple[Nodes, str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    run = ["--", sys.executable, str(JOB), "job.yaml"]
    return ray_job(head, "submit", f"--working-dir={folder}", *options, *run)


def answered(path: Path) -> dict[str, list[int]]:
    """What each prompt was answered, once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line["tokens"] for line in lines}


def test_a_submitted_job_answers_as_the_prompts_alone(
    head: tuple[Nodes, str], hybrid: Path, tmp_path: Path, alone: dict[str, list[int]]
) -> None:
    answers = write_job(tmp_path, hybrid, draft={"k": 4}, concurrency=5)
    run = submit(head, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{PROMPTS} answered, 0 before" in run.stdout
    assert answered(answers) == alone
    again = submit(head, tmp_path)
    assert again.returncode == 0 and f"0 answered, {PROMPTS} before" in again.stdout and answered(answers) == alone


def test_a_job_that_is_wrong_fails_with_its_line(head: tuple[Nodes, str], hybrid: Path, tmp_path: Path) -> None:
    write_job(tmp_path, hybrid, stagse=2)
    run = submit(head, tmp_path)
    assert run.returncode == 1 and "no such key: 'stagse'; did you mean stages?" in run.stdout


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_job_that_is_ended_goes_on_when_it_is_submitted_again(
    head: tuple[Nodes, str], hybrid: Path, tmp_path: Path, alone: dict[str, list[int]], how: str
) -> None:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(head[1])  # what `ray job stop` asks, without the seconds in which that starts
    answers = write_job(tmp_path, hybrid, concurrency=1)
    assert submit(head, tmp_path, "--no-wait", f"--submission-id=ends-by-{how}").returncode == 0
    while not answers.exists() or answers.read_bytes().count(b"\n") < 2:
        os.sched_yield()
    if how == "stop":
        assert client.stop_job(f"ends-by-{how}")
        while client.get_job_status(f"ends-by-{how}") not in ENDED:
            os.sched_yield()
    else:
        os.kill(writer_of(answers), signal.SIGKILL)
        answers.write_bytes(answers.read_bytes()[:-5])
    before = answers.read_bytes().count(b"\n")
    run = submit(head, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert before < PROMPTS and f"{PROMPTS - before} answered, {before} before" in run.stdout
    assert answered(answers) == alone


def test_prompts_come_from_a_queue_and_what_was_taken_is_not_lost(
    head: tuple[Nodes, str], hybrid: Path, tmp_path: Path, alone: dict[str, list[int]]
) -> None:
    import ray
    from ray.util.queue import Queue

    answers = write_job(tmp_path, hybrid, "queue:asked", concurrency=3)
    taken = {"id": "p0", "item": {"id": "p0", "tokens": [5, 6, 0]}}  # by a job that was killed before it had answered
    answers.with_name("answers.jsonl.taken").write_text(json.dumps(taken) + "\n")
    ray.init(address=head[0].address, namespace="memra_pp", log_to_driver=False)
    try:
        options = {"name": "asked", "namespace": "memra_pp", "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
        queue = Queue(actor_options=options)
        queue.put_nowait_batch([{"id": f"p{i}", "tokens": [5, 6, i]} for i in range(1, PROMPTS)] + [None])
        run = submit(head, tmp_path)
        queue.shutdown(force=True)
    finally:
        ray.shutdown()
    assert run.returncode == 0, run.stdout + run.stderr
    assert answered(answers) == alone


def writer_of(path: Path) -> int:
    """The process that has a file open."""
    for proc in Path("/proc").iterdir():
        ours = proc.name.isdigit() and "job.py" in (proc / "cmdline").read_text()
        if ours and any(fd.resolve() == path for fd in (proc / "fd").iterdir()):
            return int(proc.name)
    raise LookupError(path)
