"""An OpenAI-compatible server on Ray Serve: `/v1/completions` over one pipeline, which one replica owns.

    pip install 'memra-pp[serve,gguf]'
    python examples/serve.py --model model.gguf --stages 2
    curl localhost:8000/v1/completions --json '{"model": "model", "prompt": "Once upon a time", "max_tokens": 32}'

It starts a Ray of this machine, of which the replica and each stage take a CPU; on a cluster, deploy `Server.bind(...)` like
any other application. All listens on loopback (`--host` says otherwise) but a port that Serve opens for each replica, which
Ray's token guards.
"""

import argparse
import asyncio
import json
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # a Ray that is started here listens on loopback alone
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.exceptions import HTTPException

import memra_pp
from memra_pp.cli.options import cuts
from memra_pp.driver.launch.cut import fence_for
from memra_pp.driver.launch.launch import model_path
from memra_pp.errors import AdmissionError, InputError, MemraError, StageError
from memra_pp.models import load_tokenizer, stage_model_for

Ids = Annotated[list[int], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Ask(BaseModel):
    """What may be asked for. What else OpenAI's interface has is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=128)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    echo: bool = False
    user: str = ""
    n: Literal[1] = 1
    logprobs: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


app = FastAPI()


def refusal(status: int, message: str, code: str | None = None, retry_after_s: float | None = None) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    headers = None if retry_after_s is None else {"Retry-After": str(math.ceil(retry_after_s))}
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers)


@app.exception_handler(MemraError)
@app.exception_handler(TimeoutError)
def problem(request: Request | None, error: Exception) -> JSONResponse:
    """What of an error the client is told."""
    match error:
        case AdmissionError() if error.verdict.retry_after_s is not None:
            return refusal(429, str(error), "rate_limit_exceeded", error.verdict.retry_after_s)
        case AdmissionError():  # it never fits; the message has the longest context that would
            return refusal(400, str(error), "context_length_exceeded")
        case InputError():
            return refusal(400, str(error))
        case StageError():
            return refusal(503, str(error))
        case TimeoutError():
            return refusal(503, "no token came in time: the stages recover, or have too much to do; ask again later")
    return refusal(500, str(error))


@app.exception_handler(RequestValidationError)
def misread(request: Request, error: RequestValidationError) -> JSONResponse:
    """Which value was wrong, and what is allowed."""
    where, given = error.errors()[0]["loc"][:2], error.body
    if len(where) < 2 or not isinstance(given, dict):
        kind = request.headers.get("content-type", "missing").lower()
        hint = "" if "json" in kind else f"; its Content-Type is {kind:.80}, where application/json belongs"
        return refusal(400, f"the body is not a JSON object: {error.errors()[0]['msg']}{hint}")
    allowed = "; or: ".join(dict.fromkeys(e["msg"] for e in error.errors() if e["loc"][:2] == where))
    return refusal(400, f"{where[1]}={given.get(where[1])!r:.80}: {allowed}. Known are {', '.join(Ask.model_fields)}")


@app.exception_handler(HTTPException)
def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
    """No such path, or no such method of it; or a body that cannot be read."""
    said, code = f"{request.method} {request.url.path:.80}: {error.detail}", None
    if error.status_code in (404, 405):
        said, code = f"{said}. This server has POST /v1/completions, and GET /v1/models, /health and /stats", "unknown_url"
    answer = refusal(error.status_code, said, code)
    answer.headers.update(error.headers or {})
    return answer


class Piece(NamedTuple):
    """Some text behind a prompt, the tokens it took, and with the last of it, why it ended."""

    index: int
    text: str
    tokens: int = 0
    end: Literal["stop", "length"] | None = None

    @property
    def choice(self) -> dict[str, Any]:
        return {"index": self.index, "text": self.text, "logprobs": None, "finish_reason": self.end}


class Text:
    """A text as its tokens come, up to the first of `stops`; what may be the beginning of one is held back."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decoder, self._stops, self._held, self.stopped = tokenizer.stream(), stops, "", False
        self.prompt = "".join([self._decoder.push(token) for token in prompt])

    def push(self, token: int) -> str:
        """What can be shown after one more token."""
        held = self._held + self._decoder.push(token)
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        begun = [n for stop in self._stops for n in range(1, len(stop)) if held.endswith(stop[:n])]
        self.stopped = bool(found)
        shown = min(found) if found else len(held) - max(begun, default=0)
        self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self._held + self._decoder.flush()


async def events(
    ask: Ask, prompts: list[list[int]], head: dict[str, Any], first: Piece, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[str, None]:
    """The pieces as server-sent events. An error is the last of them."""
    made = first.tokens
    async with aclosing(pieces):
        yield event({**head, "choices": [first.choice]})
        try:
            async for piece in pieces:
                made += piece.tokens
                if piece.text or piece.end:
                    yield event({**head, "choices": [piece.choice]})
        except (MemraError, TimeoutError) as error:
            yield f"data: {problem(None, error).body.decode()}\n\n"
            return
    if ask.stream_options and ask.stream_options.get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(prompts, made)})
    yield "data: [DONE]\n\n"


async def together(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """What several generators yield, as it comes."""
    steps = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                stream = steps.pop(step)
                if (piece := step.result()) is not None:
                    yield piece
                    steps[asyncio.ensure_future(anext(stream, None))] = stream
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def usage(prompts: list[list[int]], made: int) -> dict[str, int]:
    given = sum(map(len, prompts))
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


@serve.deployment(max_ongoing_requests=1024, max_constructor_retry_count=1, health_check_period_s=2)
@serve.ingress(app)
class Server:
    """A request waits `wait_s` for bytes that others hold, and `patience_s` for each token, whatever recovers meanwhile."""

    async def __init__(self, name: str, wait_s: float, patience_s: float, launch: dict[str, Any]) -> None:
        self.name, self.wait_s, self.patience_s = name, wait_s, patience_s
        self.closing = AsyncExitStack()
        self.pipe = await self.closing.enter_async_context(memra_pp.aio.launch(**launch))
        self.tokenizer = self.pipe.tokenizer

    async def __del__(self) -> None:
        await self.closing.aclose()

    def check_health(self) -> None:
        """Has Serve start another replica when the pipeline has failed for good."""
        if (health := self.pipe.health())["state"] == "failed":
            raise RuntimeError(health["cause"])

    @app.get("/health")
    async def health(self) -> JSONResponse:
        health = self.pipe.health()
        return JSONResponse(health, 200 if health["ready"] else 503)

    @app.get("/stats")
    async def stats(self) -> dict[str, Any]:
        return await self.pipe.stats()

    @app.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0, "owned_by": "memra-pp"}]}

    @app.post("/v1/completions", response_model=None)
    async def completions(self, ask: Ask) -> JSONResponse | StreamingResponse:
        if ask.model != self.name:
            return refusal(404, f"model={ask.model!r:.80}: this server has {self.name}", "model_not_found")
        prompts = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts]
        longest, limit = max(map(len, prompts)), self.pipe.sync.max_ctx
        if longest + ask.max_tokens > limit:
            said = f"a prompt of {longest} tokens and max_tokens={ask.max_tokens}: both must fit a context of {limit}"
            return refusal(400, said, "context_length_exceeded")
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        head["model"] = self.name
        pieces = self.pieces(ask, prompts)
        if ask.stream:
            first = await anext(pieces)  # an error before there is any text still has a status
            return StreamingResponse(events(ask, prompts, head, first, pieces), media_type="text/event-stream")
        whole, made = [Piece(index, "") for index in range(len(prompts))], 0
        async for piece in pieces:
            whole[piece.index] = piece._replace(text=whole[piece.index].text + piece.text)
            made += piece.tokens
        return JSONResponse({**head, "choices": [piece.choice for piece in whole], "usage": usage(prompts, made)})

    async def pieces(self, ask: Ask, prompts: list[list[int]]) -> AsyncGenerator[Piece, None]:
        """The texts behind all prompts, as they come. No session begins before all are open."""
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        sampling = memra_pp.SamplingParams(ask.temperature, ask.top_p, seed=seed, eos_ids=tuple(self.tokenizer.eos_ids))
        async with AsyncExitStack() as stack:
            texts = []
            for index, prompt in enumerate(prompts):
                opening = self.pipe.open(prompt, max_new_tokens=ask.max_tokens, timeout=self.wait_s, tenant=ask.user)
                async with asyncio.timeout(self.wait_s + self.patience_s):
                    session = await stack.enter_async_context(opening)
                tokens = await stack.enter_async_context(aclosing(session.generate(ask.max_tokens, sampling)))
                texts.append(self.text(ask, index, Text(self.tokenizer, prompt, ask.stops), tokens))
            async with aclosing(together(texts)) as pieces:
                async for piece in pieces:
                    yield piece

    async def text(self, ask: Ask, index: int, text: Text, tokens: AsyncGenerator[int, None]) -> AsyncGenerator[Piece, None]:
        """The text behind one prompt."""
        made = 0
        if ask.echo:
            yield Piece(index, text.prompt)
        while not text.stopped:
            async with asyncio.timeout(self.patience_s):
                token = await anext(tokens, None)
            if token is None:
                break
            made += 1
            yield Piece(index, text.push(token), 1)
        yield Piece(index, text.flush(), 0, "stop" if text.stopped or made < ask.max_tokens else "length")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server over a pipeline of stages.")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a directory with its tokenizer.model")
    parser.add_argument("--stages", type=int, help="how many stages to cut it into, evenly (default: 1, or MEMRA_PP_STAGES)")
    parser.add_argument("--cuts", type=cuts, help="or the first layer of each stage after the first, such as 5,11")
    parser.add_argument("--max-ctx", type=int, help="longest context of a session, in tokens")
    parser.add_argument("--budget", type=int, help="bytes that a stage's caches may take")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds that a request may wait for bytes")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that it may wait for a token")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


def check(args: argparse.Namespace) -> Sequence[int]:
    """Where the model is cut. A model that cannot be run, cut so or served as text is refused before anything is started."""
    cfg = memra_pp.ModelConfig.from_path(args.model)
    fence = fence_for(cfg, args.stages, args.cuts)
    stage_model_for(cfg)
    load_tokenizer(args.model)
    return fence


def main() -> None:
    args = options()
    try:
        model, fence = model_path(args.model), check(args)
    except MemraError as error:
        sys.exit(f"serve: error: {error}")
    stages = len(fence) - 1
    launch = {"model": model, "cuts": list(fence[1:-1])}
    launch |= {"max_ctx": args.max_ctx, "budget_bytes": args.budget}
    name = model.name.removesuffix(".gguf")
    ray.init("local", num_cpus=max(stages + 1, os.cpu_count() or 1), include_dashboard=False)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit())
        serve.start(http_options={"host": args.host, "port": args.port})
        serve.run(Server.bind(name, args.wait, args.patience, launch))
        print(f"{name} is served at http://{args.host}:{args.port}/v1", flush=True)
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
