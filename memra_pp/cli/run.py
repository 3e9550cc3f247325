"""`memra-pp run`: text in, text and a report out."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..driver.launch.launch import launch, model_path
from ..driver.pipeline import Pipeline
from ..driver.speculation.drafters import Draft
from ..driver.speculation.model_drafter import ModelDrafter
from ..errors import InputError
from .demo import demo_weights
from .options import policy
from .progress import Bar
from .table import columns
from .words import Words, read_words


def run(args: argparse.Namespace) -> None:
    """Continues a text, and reports on every stage."""
    if args.trace is not None:
        require_writable(Path(args.trace), "--trace")
    model = demo_weights() if args.model is None else Path(args.model)
    words = read_words(model, args)
    draft = _draft(args, model)
    with launched(model, args) as (pipe, loaded):
        report, trace = _generate(pipe, words, draft, args)
    report["load_s"] = loaded
    if trace is not None:
        report["hops"] = trace["otherData"]["hops"]
        Path(args.trace).write_text(json.dumps(trace))
    if args.json:
        print(json.dumps(report))
    else:
        print(_table(report))


@contextlib.contextmanager
def launched(model: Path, args: argparse.Namespace) -> Iterator[tuple[Pipeline, float]]:
    """The pipeline that the options ask for, with a bar while it comes up, and the seconds that took."""
    started = time.perf_counter()
    bar = None if args.json else Bar()
    with launch(
        model,
        stages=args.stages,
        cuts=args.cuts,
        balance=args.balance,
        devices=args.device,
        backend=args.backend,
        policy=policy(args),
        max_ctx=args.max_ctx,
        threads=args.threads,
        progress=bar,
    ) as pipe:
        loaded = time.perf_counter() - started
        if bar is not None:
            bar.clear()
        yield pipe, loaded


def _generate(
    pipe: Pipeline, words: Words, draft: Draft | None, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Streams the text (unless `--json`); the report, taken while the session is open, and the trace if one was asked for."""
    text, tokens = "", []
    emit(words.shown, args.json)
    if args.trace is not None:
        pipe.trace_start()
    times = [time.perf_counter()]
    try:
        with pipe.open(words.ids, max_new_tokens=args.max_new, speculate=args.speculate) as session:
            opened = pipe.stats()["traversals"]
            for token in session.generate(args.max_new, words.greedy, draft):
                times.append(time.perf_counter())
                tokens.append(token)
                text += emit(words.decoder.push(token), args.json)
            text += emit(words.decoder.flush(), args.json)
            stats = pipe.stats()
            trace = None if args.trace is None else pipe.trace()
    finally:
        emit("\n", args.json)
    report = {
        "text": text,
        "prompt_tokens": len(words.ids),
        "tokens": tokens,
        "first_token_s": times[1] - times[0] if tokens else None,
        "tokens_per_s": (len(tokens) - 1) / (times[-1] - times[1]) if len(tokens) > 1 else None,
        "traversals": stats["traversals"] - opened,
        **{name: stats[name] for name in ("rounds", "drafted", "accepted", "rebuilds")},
        "kv": stats["kv"],
        "stages": stats["stages"],
    }
    return report, trace


def emit(piece: str, quiet: bool) -> str:
    """Prints a piece of a text, unless it is to be quiet; the piece."""
    if not quiet:
        print(piece, end="", flush=True)
    return piece


def _table(report: dict[str, Any]) -> str:
    header = ("stage", "layers", "device", "planned B", "allocated B", "busy s", "wait in s", "wait out s", "bubble %", "rows")
    rows = [
        (
            str(s["stage"]),
            f"{s['layers'][0]}-{s['layers'][1] - 1}",
            s["device"],
            f"{s['planned_bytes']:,}",
            f"{s['allocated_bytes']:,}",
            f"{s['busy_s']:.2f}",
            f"{s['wait_in_s']:.2f}",
            f"{s['wait_out_s']:.2f}",
            f"{100 * s['bubble']:.0f}",
            str(s["rows"]),
        )
        for s in report["stages"]
    ]
    lines = ["", *columns(header, *rows)]
    if "hops" in report:
        lines += ["", *columns(*_hops(report["hops"]), left=[0])]
    return "\n".join([*lines, _summary(report)])


def _hops(hops: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table of hop times, its header first."""
    rows = [
        (f"{hop['from']} to {hop['to']}", str(hop["frames"]), f"{hop['median_us']:,.0f}", f"{hop['p99_us']:,.0f}")
        for hop in hops
    ]
    return [("hop", "frames", "median us", "p99 us"), *rows]


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


def require_writable(path: Path, option: str) -> None:
    """Whether a file can be written there, before minutes are spent on what is to go into it. None is left behind."""
    there = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written ({error.strerror}): name a file that can") from error
    if not there:
        path.unlink()


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
