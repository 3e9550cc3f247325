"""`memra-pp run`: text in, text and a report out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..driver.cut import fence_for
from ..driver.drafters import Draft
from ..driver.launch import launch, model_path
from ..driver.model_drafter import ModelDrafter
from ..driver.pipeline import Pipeline
from ..driver.sampling import SamplingParams
from ..driver.tokens import checked_prompt
from ..errors import InputError
from ..models import load_tokenizer
from ..models.tokenizer import Tokenizer
from .demo import demo_weights
from .options import policy
from .table import columns

BAR_WIDTH = 24


def run(args: argparse.Namespace) -> None:
    """Continues a text, and reports on every stage."""
    model = demo_weights() if args.model is None else Path(args.model)
    formats = policy(args)
    ids, tokenizer = _encoded(model, args)
    draft = _draft(args, model)
    started = time.perf_counter()
    steps = None if args.json else _Progress()
    with launch(
        model,
        stages=args.stages,
        cuts=args.cuts,
        balance=args.balance,
        backend=args.backend,
        policy=formats,
        max_ctx=args.max_ctx,
        threads=args.threads,
        progress=steps,
    ) as pipe:
        loaded = time.perf_counter() - started
        if steps is not None:
            steps.done(loaded)
        report = _generate(pipe, tokenizer, ids, draft, args)
    report["load_s"] = loaded
    if args.json:
        print(json.dumps(report))
    else:
        print(_table(report))


def _generate(
    pipe: Pipeline, tokenizer: Tokenizer, ids: list[int], draft: Draft | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Streams the text (unless `--json`) and returns the report, taken while the session is open."""
    stream, text, tokens = tokenizer.stream(), "", []
    greedy = SamplingParams(temperature=0, eos_ids=tuple(tokenizer.eos_ids))
    if not args.json:
        print(args.prompt, end="", flush=True)
    times = [time.perf_counter()]
    try:
        with pipe.open(ids, max_new_tokens=args.max_new, speculate=args.speculate) as session:
            opened = pipe.stats()["traversals"]
            for token in session.generate(args.max_new, greedy, draft):
                times.append(time.perf_counter())
                tokens.append(token)
                text += _emit(stream.push(token), args.json)
            text += _emit(stream.flush(), args.json)
            stats = pipe.stats()
    finally:
        _emit("\n", args.json)
    return {
        "text": text,
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "first_token_s": times[1] - times[0] if tokens else None,
        "tokens_per_s": (len(tokens) - 1) / (times[-1] - times[1]) if len(tokens) > 1 else None,
        "traversals": stats["traversals"] - opened,
        **{name: stats[name] for name in ("rounds", "drafted", "accepted", "rebuilds")},
        "kv": stats["kv"],
        "stages": stats["stages"],
    }


def _emit(piece: str, quiet: bool) -> str:
    if not quiet:
        print(piece, end="", flush=True)
    return piece


def _table(report: dict[str, Any]) -> str:
    header = ("stage", "layers", "device", "planned B", "allocated B", "compute s", "wait s", "rows")
    rows = [
        (
            str(s["stage"]),
            f"{s['layers'][0]}-{s['layers'][1] - 1}",
            s["device"],
            f"{s['planned_bytes']:,}",
            f"{s['allocated_bytes']:,}",
            f"{s['compute_s']:.2f}",
            f"{s['wait_s']:.2f}",
            str(s["rows"]),
        )
        for s in report["stages"]
    ]
    return "\n" + "\n".join(columns(header, *rows)) + "\n" + _summary(report)


def _summary(report: dict[str, Any]) -> str:
    count = len(report["tokens"])
    parts = [f"{count} token{'' if count == 1 else 's'}"]
    if report["first_token_s"] is not None:
        parts.append(f"the first after {report['first_token_s']:.2f} s")
    if report["tokens_per_s"] is not None:
        parts.append(f"then {report['tokens_per_s']:.1f} tok/s")
    if report["drafted"]:
        parts.append(f"{report['rounds']} rounds, {report['drafted']} drafted, {report['accepted']} accepted")
        parts.append(f"{report['traversals']} traversals, {count / report['traversals']:.2f} tokens each")
    return ", ".join([*parts, f"K/V {', '.join(report['kv'])}", f"loaded in {report['load_s']:.1f} s"])


class _Progress:
    """A bar on stderr while stages come up: one step a stage, redrawn in place on a terminal."""

    def __init__(self) -> None:
        self._loaded = 0
        self._tty = sys.stderr.isatty()

    def __call__(self, text: str, done: int, of: int) -> None:
        filled = BAR_WIDTH * done // of
        bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}"
        print(f"\r{bar:<72}" if self._tty else bar, end="" if self._tty else "\n", file=sys.stderr, flush=True)

    def done(self, seconds: float) -> None:
        """Clears the bar."""
        if self._tty:
            print("\r" + " " * 72 + "\r", end="", file=sys.stderr, flush=True)


def _encoded(model: Path, args: argparse.Namespace) -> tuple[list[int], Tokenizer]:
    """The prompt's ids. It, the model and the cuts are checked before anything is started."""
    if not args.prompt:
        raise InputError("the prompt is empty: give --prompt some text")
    cfg = ModelConfig.from_path(model_path(model))
    fence_for(cfg, args.stages, args.cuts)
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(args.prompt)
    return checked_prompt(ids, cfg.n_vocab, cfg.max_ctx if args.max_ctx is None else args.max_ctx), tokenizer


def _draft(args: argparse.Namespace, model: Path) -> Draft | None:
    """How to speculate. A drafting model is checked before anything is started."""
    if not args.speculate:
        if args.drafter is not None:
            raise InputError(f"--drafter {args.drafter} without --speculate: say how many drafts a round may have, such as 4")
        return None
    by = args.drafter or "ngram"
    if by != "ngram":
        ModelDrafter.check(ModelConfig.from_path(model_path(by)), ModelConfig.from_path(model_path(model)).n_vocab)
    return Draft(k=args.speculate, by=by)
