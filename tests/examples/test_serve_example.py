"""`examples/serve.py`: OpenAI's own client against the server as it runs, with stages that are killed under it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, marked

import memra_pp

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"
BUDGET = 5_000_000
LONG, TOO_LONG = 12_000, 16_000
"""Tokens of a session that fits the budget, but not twice, and of one that never does."""
LETTERS = "\u2581abcdefghijklmnopqrstuvwxyz"
PROMPTS = ["hello world", "the sea", "one stage", "a cache of rows", "zebra", "draft and verify"]


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a vocabulary of single bytes and some letters: it writes much that is no UTF-8."""
    from sentencepiece import sentencepiece_model_pb2 as pb

    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny / name, folder)
    proto = pb.ModelProto()
    proto.trainer_spec.model_type, proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = proto.trainer_spec.BPE, 2, 1
    proto.normalizer_spec.add_dummy_prefix = False
    special = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2)]
    single = [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    words = [(word, 1) for word in (*LETTERS, *(a + b for a in LETTERS for b in LETTERS))]
    for number, (piece, kind) in enumerate([*special, *single, *words][:512]):
        proto.pieces.add(piece=piece, score=-float(number), type=kind)
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    return folder


@dataclass(frozen=True)
class Running:
    """A server, and what it says of itself."""

    process: subprocess.Popen[str]
    url: str
    model: str

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a path."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    @property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def complete(self, prompt: Any, **options: Any) -> Any:
        return self.client.completions.create(**{"model": self.model, "prompt": prompt, "temperature": 0, **options})

    def sessions(self) -> int:
        return int(self.get("/stats")[1]["sessions"])


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[Running]:
    """A server in a process of its own, which leaves no process behind."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mark, tmp = secrets.token_hex(8), Path("/tmp") / f"m{secrets.token_hex(4)}"
    tmp.mkdir()
    env = {**os.environ, MARK: mark, "TMPDIR": str(tmp), "RAY_TMPDIR": str(tmp), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, EXAMPLE, "--model", model, "--stages", "2", "--port", str(port), *options]
    with (tmp / "log").open("w+") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            ready = any(f":{port}/v1" in line for line in process.stdout)
            assert ready, (tmp / "log").read_text()
            yield Running(process, f"http://127.0.0.1:{port}", model.name)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(120)
            finally:
                process.kill()
            process.stdout.close()
    assert status == 0
    awaited(lambda: marked(mark, tmp) == [])
    shutil.rmtree(tmp)


def awaited(true: Callable[[], bool], within_s: float = 120.0) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with serving(model, "--budget", str(BUDGET), "--wait", "0.5") as running:
        yield running


@pytest.fixture(scope="module")
def pipe(model: Path) -> Iterator[memra_pp.Pipeline]:
    """The same model in this process."""
    with memra_pp.launch(model, backend="local") as pipe:
        yield pipe


def text_of(pipe: memra_pp.Pipeline, prompt: str, tokens: int, **sampling: Any) -> str:
    """What follows a prompt."""
    ids = pipe.tokenizer.encode(prompt)
    params = memra_pp.SamplingParams(**{"temperature": 0, "eos_ids": tuple(pipe.tokenizer.eos_ids), **sampling})
    made = list(pipe.generate(ids, max_new_tokens=tokens, sampling=params))
    return pipe.tokenizer.decode([*ids, *made]).removeprefix(prompt)


def joined(stream: Any) -> tuple[str, str, Any]:
    """The text of a stream's chunks, why it ended, and its usage."""
    text, end, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text, end = text + choice.text, choice.finish_reason or end
    return text, end, usage


def test_texts_are_those_of_generate_streamed_or_not(server: Running, pipe: memra_pp.Pipeline) -> None:
    for prompt in PROMPTS:
        expected = text_of(pipe, prompt, 24)
        whole = server.complete(prompt, max_tokens=24)
        n = len(pipe.tokenizer.encode(prompt))
        assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (n, 24, n + 24)
        stream = server.complete(prompt, max_tokens=24, stream=True, stream_options={"include_usage": True})
        assert joined(stream) == (expected, "length", whole.usage)


def test_sampled_texts_follow_the_seed(server: Running, pipe: memra_pp.Pipeline) -> None:
    warm = {"temperature": 0.9, "top_p": 0.8, "seed": 11}
    assert server.complete("hello", max_tokens=32, **warm).choices[0].text == text_of(pipe, "hello", 32, **warm)
    several = {server.complete("hello", max_tokens=32, temperature=1.0).choices[0].text for _ in range(3)}
    assert len(several) == 3


def test_several_prompts_in_one_request(server: Running, pipe: memra_pp.Pipeline) -> None:
    expected = [prompt + text_of(pipe, prompt, 12) for prompt in PROMPTS[:3]]
    whole = server.complete(PROMPTS[:3], max_tokens=12, echo=True)
    assert [choice.text for choice in whole.choices] == expected and whole.usage.completion_tokens == 36
    ids = [pipe.tokenizer.encode(prompt) for prompt in PROMPTS[:3]]
    texts = [""] * 3
    for chunk in server.complete(ids, max_tokens=12, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    assert server.complete(ids[1], max_tokens=12).choices[0].text == text_of(pipe, PROMPTS[1], 12)


def test_clients_at_the_same_time_get_the_texts_they_get_alone(server: Running, pipe: memra_pp.Pipeline) -> None:
    expected = [text_of(pipe, prompt, 48) for prompt in PROMPTS]

    def both(prompt: str) -> tuple[str, str]:
        return server.complete(prompt, max_tokens=48).choices[0].text, joined(
            server.complete(prompt, max_tokens=48, stream=True)
        )[0]

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(both, PROMPTS)) == [(text, text) for text in expected]


def test_a_text_ends_before_the_first_of_the_stop_texts(server: Running, pipe: memra_pp.Pipeline) -> None:
    text = text_of(pipe, "hello world", 40)
    change = next(at for at in range(2, 40) if text[at] != text[at - 1])
    for stops in (text[change - 1 : change + 3], [text[20:26], "none such"], text[0], [text + "more"]):
        cut = min(at for stop in [stops, [stops]][isinstance(stops, str)] if (at := f"{text}{text}more".find(stop)) >= 0)
        expected = (text[:cut], "stop") if cut < len(text) else (text, "length")
        whole = server.complete("hello world", max_tokens=40, stop=stops).choices[0]
        assert (whole.text, whole.finish_reason) == expected
        assert joined(server.complete("hello world", max_tokens=40, stop=stops, stream=True))[:2] == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 2}, "n=2: Input should be 1"),
        ({"logprobs": 3}, "logprobs=3: Input should be None"),
        ({"best_of": 2}, "best_of=2: .*Known are model, prompt, max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0: .*greater than or equal to 1"),
        ({"max_tokens": "many"}, "max_tokens='many': .*valid integer"),
        ({"max_tokens": 20_000}, "max_tokens=20000: both must fit a context of 16384"),
        ({"temperature": -1}, "temperature=-1.0: it must be a finite number >= 0"),
        ({"top_p": 0}, "top_p=0.0: it must be a number > 0 and <= 1"),
        ({"seed": -1}, "seed=-1: it must be an integer from 0"),
        ({"stop": ""}, "stop='': .*at least 1 character"),
        ({"stop": list("abcde")}, "stop=.*at most 4"),
        ({"prompt": []}, r"prompt=\[\]: "),
        ({"prompt": [[5], []]}, r"prompt=\[\[5\], \[\]\]: "),
        ({"prompt": [512]}, "no token 512"),
        ({"prompt": {"text": "a"}}, "prompt={'text': 'a'}: "),
        ({"max_tokens": TOO_LONG}, "the longest context that fits is .* rows"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: Running, options: dict[str, Any], says: str) -> None:
    import openai

    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            server.complete(**{"prompt": "hello", "stream": stream, **options})
        assert refused.value.type == "invalid_request_error"
    assert server.sessions() == 0


def test_what_cannot_be_served_is_one_line_before_anything_is_started(model: Path, hybrid: Path) -> None:
    for options, says in (
        (["--model", "/no/such/model"], "no such model"),
        (["--model", str(model), "--stages", "99"], "99"),
        (["--model", str(model), "--cuts", "3,2"], "cuts"),
        (["--model", str(hybrid)], "no tokenizer found"),
    ):
        done = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1 and done.stderr.startswith("serve: error: ") and says in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_another_path_or_content_type_is_told_what_there_is(server: Running) -> None:
    status, answer = server.get("/v1/chat/completions")
    assert status == 404 and "POST /v1/completions" in answer["error"]["message"]
    status, answer = server.get("/v1/completions")
    assert status == 405 and "GET /v1/completions: Method Not Allowed" in answer["error"]["message"]
    latin = urllib.request.Request(f"{server.url}/v1/completions", b'{"a": "\xe9"}', {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as unread:
        urllib.request.urlopen(latin, timeout=60)
    assert unread.value.code == 400 and json.load(unread.value)["error"]["code"] is None
    asked = urllib.request.Request(f"{server.url}/v1/completions", b"{}", {"Content-Type": "application/x-www-form-urlencoded"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=60)
    assert "where application/json belongs" in json.load(refused.value)["error"]["message"]


def test_models_and_health(server: Running) -> None:
    import openai

    assert [model.id for model in server.client.models.list()] == [server.model]
    with pytest.raises(openai.NotFoundError, match=f"model='other': this server has {server.model}"):
        server.complete("hello", model="other")
    status, health = server.get("/health")
    assert status == 200 and health["ready"]


def test_a_full_server_says_when_to_ask_again(server: Running) -> None:
    import openai

    with server.complete("hello", max_tokens=LONG, stream=True) as held:
        next(iter(held))
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="bytes short") as full:
                server.complete("hello", max_tokens=LONG, stream=stream)
            assert int(full.value.response.headers["retry-after"]) >= 1
        assert server.sessions() == 1
    awaited(lambda: server.sessions() == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_gives_its_bytes_back(server: Running, stream: bool) -> None:
    ask = {"model": server.model, "prompt": "hello", "max_tokens": LONG, "temperature": 0, "stream": stream}
    body = json.dumps(ask).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        awaited(lambda: server.sessions() == 1)
    awaited(lambda: server.sessions() == 0)
    _, stats = server.get("/stats")
    assert [device["reserved_bytes"] + device["allocated_bytes"] for device in stats["devices"]] == [0, 0]


def test_a_killed_stage_is_a_pause(server: Running, pipe: memra_pp.Pipeline) -> None:
    expected = text_of(pipe, "the sea", 2000)
    stream = iter(server.complete("the sea", max_tokens=2000, stream=True))
    first = next(stream).choices[0].text
    os.kill(server.get("/stats")[1]["stages"][1]["pid"], signal.SIGKILL)
    assert first + joined(stream)[0] == expected
    assert server.get("/stats")[1]["rebuilds"] == 1


def test_a_server_that_cannot_answer_in_time_says_so_and_one_that_has_failed_is_replaced(model: Path) -> None:
    import openai

    with serving(model, "--wait", "0", "--patience", "0.5") as server:

        def answers() -> bool:
            with contextlib.suppress(openai.InternalServerError):
                return server.complete("hello", max_tokens=4).choices[0].finish_reason == "length"
            return False

        def kill() -> None:
            os.kill(server.get("/stats")[1]["stages"][0]["pid"], signal.SIGKILL)

        awaited(answers)
        kill()
        with pytest.raises(openai.InternalServerError, match="no token came in time") as late:
            server.complete("hello", max_tokens=4)
        assert late.value.status_code == 503
        for _ in range(3):
            awaited(answers)
            kill()
        awaited(lambda: server.get("/health")[1]["state"] == "failed")
        with pytest.raises(openai.InternalServerError, match=r"stage 0 \(layers 0 to 2\) .* is gone") as failed:
            server.complete("hello", max_tokens=4)
        assert failed.value.status_code == 503
        awaited(answers)
        assert server.get("/health")[1]["epoch"] == 1
