"""The job file and the logs of a job: what is wrong is said with its line, and what is answered is not asked again."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.job_file import FIELDS, Job, read_job
from cluster.job_prompts import Log, Prompt, file_prompts, queue_prompts
from memra_pp import Draft, SamplingParams
from memra_pp.cache import KvPolicy
from memra_pp.driver.launch.launch import launch
from memra_pp.errors import ConfigError

WHOLE = """
model: /models/m.gguf
prompts: prompts.jsonl
answers: /results/a.jsonl
"""


def job(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_the_example_can_be_read() -> None:
    read = read_job(Path(__file__).parents[2] / "cluster" / "job.yaml")
    assert read.launch["stages"] == 8 and read.draft == Draft(k=8) and read.sampling == SamplingParams(temperature=0)


def test_everything_else_is_an_option_of_launch() -> None:
    import inspect

    options = list(FIELDS)[list(FIELDS).index("stages") :]
    assert set(options) - {"kv_k", "kv_v", "ring"} <= set(inspect.signature(launch).parameters)


def test_what_is_given_is_passed_on(tmp_path: Path) -> None:
    text = "kv_k: fp8\nring: off\ncuts: [2, 5]\nsampling:\n  temperature: 0.5\n  stop: ['x']\nplacement_timeout: 5\n"
    read = read_job(job(tmp_path, WHOLE + text))
    policy = read.launch["policy"]
    assert (policy.k, policy.v, policy.ring) == ("fp8", KvPolicy().v, "off")
    assert read.launch["cuts"] == [2, 5] and read.launch["placement_timeout"] == 5.0
    assert read.sampling == SamplingParams(temperature=0.5, stop=("x",)) and read.draft is None


@pytest.mark.parametrize(
    ("more", "line", "said"),
    [
        ("stagse: 4\n", 5, "no such key: 'stagse'; did you mean stages?"),
        ("zzz: 4\n", 5, "there are model, prompts"),
        ("stages: four\n", 5, "stages is 'four': it must be a whole number from 1 to 4,096"),
        ("stages: true\n", 5, "whole number"),
        ("cuts: []\n", 5, "a list, such as"),
        ("cuts:\n  - 3\n  - x\n", 6, "a list, each of it a whole number"),
        ("balance: bites\n", 5, "one of even, bytes"),
        ("ring: true\n", 5, "one of off, step, all"),
        ("draft: 4\n", 5, "this must be lines of `key: value`, of k, by, recurrent"),
        ("draft:\n  k: 4\n  bye: x\n", 7, "did you mean by?"),
        ("sampling: {top_p: 0}\n", 5, "sampling: top_p"),
        ("sampling: {temperature: .nan}\n", 5, "a number from 0"),
        ("silence_timeout: .inf\n", 5, "a number from 1 to 86400"),
        ("stages: 1\nstages: 2\n", 6, "stages is here twice"),
        ("? [a, b]\n: 1\n", 5, "no such key: None"),
        ("stages: [1\n", 6, "this is no YAML"),
        ("stages: !!python/object/apply:os.system ['true']\n", 5, "this is no YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, more: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as no:
        read_job(job(tmp_path, WHOLE + more))
    assert str(no.value).startswith(f"{tmp_path / 'job.yaml'}:{line}: ") and said in str(no.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: this must be lines"),
        ("- a\n", ":1: this must be lines"),
        ("model: m\nprompts: p\n", ":1: answers is missing"),
        ("model: m\nprompts: p\nanswers: here.jsonl\n", ":3: answers is 'here.jsonl': it must be a path from the root"),
        ("a: \x00", "no YAML"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_job(job(tmp_path, text))


def test_a_file_that_is_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job(tmp_path / "none.yaml")
    (tmp_path / "long.yaml").write_bytes(b"# " * (1 << 20))
    with pytest.raises(ConfigError, match="longer than"):
        read_job(tmp_path / "long.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9\n")
    with pytest.raises(ConfigError, match="no YAML"):
        read_job(tmp_path / "latin.yaml")


def test_prompts_are_texts_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('Once upon\n\n{"id": "x", "tokens": [5, 6], "max_new_tokens": 3}\n{"prompt": "a"}\nlast')
    assert list(file_prompts(path)) == [
        Prompt("1", "Once upon"),
        Prompt("x", [5, 6], 3),
        Prompt("4", "a"),
        Prompt("5", "last"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", ":2 is no JSON"),
        (b'{"id": 1}', ":2: a prompt has either"),
        (b'{"prompt": "a", "tokens": []}', ":2: a prompt has either"),
        (b'{"prompt": "a", "max_new_tokens": 0}', ":2: max_new_tokens is 0"),
        (b'{"id": "1", "prompt": "a"}', ":2: id '1' was there before"),
        (b"\xff\xfe", ":2 is no UTF-8"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"first\n" + line + b"\n")
    prompts = file_prompts(path)
    assert next(prompts).id == "1"
    with pytest.raises(ConfigError, match=said):
        next(prompts)


def test_a_log_drops_a_torn_line_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    log = Log(path)
    log.add({"id": "a"})
    with pytest.raises(ConfigError, match="another job writes"):
        Log(path)
    log.add({"id": "b", "text": "ä\n"})
    log.close()
    path.write_bytes(path.read_bytes()[:-3])
    again = Log(path)
    assert again.lines == [{"id": "a"}]
    again.add({"id": "c"})
    again.close()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "c"]
    path.write_text("no json\n")
    with pytest.raises(ConfigError, match=":1 is no JSON"):
        Log(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        Log(tmp_path / "no" / "dir")


def reading(model: Path, folder: Path, prompts: str, **more: Any) -> Job:
    (folder / "prompts").write_text(prompts)
    return Job(str(model), str(folder / "prompts"), folder / "answers", **more)


def test_all_that_can_be_known_is_checked_before_a_job_loads_anything(
    monkeypatch: pytest.MonkeyPatch, hybrid: Path, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "cluster")
    check = importlib.import_module("job").check
    check(reading(hybrid, tmp_path, '{"tokens": [1]}\n'))
    with pytest.raises(ConfigError, match="prompts:2 is no JSON"):
        check(reading(hybrid, tmp_path, '{"tokens": [1]}\n{\n'))
    with pytest.raises(ConfigError, match="no tokenizer found"):
        check(reading(hybrid, tmp_path, '{"tokens": [1]}\na text\n'))
    with pytest.raises(ConfigError, match="/no/such/model"):
        check(reading(hybrid, tmp_path, '{"tokens": [1]}\n', draft=Draft(k=2, by="/no/such/model")))
    with pytest.raises(ConfigError, match="cannot be read"):
        check(Job(str(hybrid), str(tmp_path / "none"), tmp_path / "answers"))


def test_what_is_no_prompt_of_a_queue_is_told_and_keeps_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    asked = [
        ("#1", False, {"tokens": [5], "id": None}),
        ("#2", True, "text"),
        ("#3", True, {"tokens": {5}}),
        ("#4", True, {"prompt": "a", "more": object()}),
        ("x", True, {"id": "x", 3: 4}),
        ("#6", True, {"prompt": "a", "id": "x"}),
        ("#7", True, {"prompt": "a", "id": 2}),
        ("8", False, {"prompt": "a", "id": 8, "problem": "2 + 2"}),
        ("#9", True, {"prompt": "a", "deep": deep}),
        ("#10", False, {"prompt": "b"}),
    ]
    items = deque([*(item for *_, item in asked), None])
    monkeypatch.setattr("ray.util.queue.Queue", lambda **_: SimpleNamespace(get=lambda timeout: items.popleft()))
    log = Log(tmp_path / "taken")
    found = [prompt for prompt in queue_prompts("asked", log, {"2"}) if prompt]
    log.close()
    assert [(prompt.id, bool(prompt.problem)) for prompt in found] == [(name, bad) for name, bad, _ in asked]
    items += [{"prompt": "c"}, {"prompt": "c", "id": "8"}, None]
    again = Log(tmp_path / "taken")
    *before, fresh, repeated = [prompt for prompt in queue_prompts("asked", again, {"2"}) if prompt]
    again.close()
    assert before == found and (fresh.id, repeated.id) == ("#11", "#12") and "was there before" in repeated.problem


def test_a_prompt_that_leaves_a_queue_while_the_job_is_ended_is_written_down(
    monkeypatch: pytest.MonkeyPatch, hybrid: Path, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "cluster")
    run = importlib.import_module("job").Run
    polled, may_go = threading.Event(), threading.Event()

    def prompts() -> Iterator[Prompt]:
        polled.set()
        may_go.wait(60)
        taken.append("written")
        yield Prompt("a", [1])

    async def ended_meanwhile() -> None:
        loop = asyncio.get_running_loop()
        job = Job(str(hybrid), "queue:x", tmp_path / "answers", concurrency=2)
        running = asyncio.create_task(run(job, None, prompts(), set(), None).run())
        await asyncio.to_thread(polled.wait, 60)
        running.cancel()
        loop.call_later(0.05, may_go.set)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert taken == ["written"]

    taken: list[str] = []
    asyncio.run(ended_meanwhile())
