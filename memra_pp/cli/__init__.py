"""`memra-pp`: the command. What a subcommand needs is loaded when it is run."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..admission.shape import slack_rows
from ..cache.formats import K_CHOICES, V_CHOICES
from ..errors import MemraError
from .demo import demo_weights
from .options import count, cuts, ids, lengths, positive, seconds, size, sizes, weights

__all__ = ["demo_weights", "main"]

MODEL_HELP = "a GGUF file or a model directory (default: the demo weights)"


def main(argv: Sequence[str] | None = None) -> int:
    """The `memra-pp` command; its exit code: 0, 1 for an error said in one line, 2 for bad usage, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    words = sys.argv[1:] if argv is None else [*argv]
    args = _parser().parse_args(words, argparse.Namespace(words=words))
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
        self.exit(2, f"memra-pp: error: {' '.join(message.split())}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="memra-pp", description="The pipeline-parallel cache runtime.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="continue a text, and report on every stage")
    run.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    _add_prompt(run)
    _add_max_new(run)
    _add_launch(run)
    run.add_argument("--speculate", type=count, default=0, metavar="K", help="most drafts a round (default: 0, none)")
    run.add_argument("--drafter", help="ngram, or the model that drafts: a GGUF file or a directory (default: ngram)")
    run.add_argument("--trace", metavar="FILE", help="write what every stage did when, for chrome://tracing or Perfetto")
    run.set_defaults(run=_run)

    export = commands.add_parser("export", help="continue a text, and write the session to a file that import goes on from")
    export.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    _add_prompt(export)
    export.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    export.add_argument("--room", type=count, default=256, metavar="N", help="tokens that may follow later (default: 256)")
    _add_max_new(export)
    _add_launch(export)
    export.set_defaults(run=_export)

    imported = commands.add_parser("import", help="continue the text of an exported session, with stages cut anywhere")
    imported.add_argument("file", metavar="FILE", help="what export has written")
    imported.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    imported.add_argument("--ids", action="store_true", help="show token ids: no tokenizer is needed")
    _add_max_new(imported)
    _add_launch(imported)
    imported.set_defaults(run=_import)

    bench = commands.add_parser("bench", help="measure a model on stages: tokens a second, latency, where time and bytes go")
    bench.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    bench.add_argument("--seconds", type=seconds, default=30.0, metavar="S", help="how long to measure (default: 30)")
    bench.add_argument("--sessions", type=positive, default=8, metavar="N", help="most sessions at a time (default: 8)")
    bench.add_argument(
        "--prompts", type=lengths, default=(64, 256, 1024), metavar="N,N", help="tokens of the prompts (default: 64,256,1024)"
    )
    bench.add_argument("--speculate", type=count, default=4, metavar="K", help="most drafts a round (default: 4; 0: no rounds)")
    bench.add_argument("--report", metavar="FILE", help="write a page with pictures: one HTML file that needs no network")
    _add_launch(bench)
    bench.set_defaults(run=_bench)

    plan = commands.add_parser("plan", help="say how many sessions fit on given devices, what limits them and what helps")
    plan.add_argument("model", metavar="MODEL", help="a config.json, a model directory or a GGUF file; no weights are loaded")
    plan.add_argument(
        "--devices", type=sizes, required=True, help="each stage's memory in order, such as 80GiB,80GiB,48GiB or 8x80GiB"
    )
    plan.add_argument(
        "--ctx",
        type=positive,
        required=True,
        help=f"rows of every session, all of them: prompt, new tokens and {slack_rows(0)} of slack ({slack_rows(1)} when "
        "speculating); 32k is 32,768",
    )
    plan.add_argument("--sessions", type=positive, metavar="N", help="how many are to fit (default: as many as do)")
    plan.add_argument(
        "--cuts", type=cuts, help="the cut to use, first layer of every stage after the first (default: the best)"
    )
    _add_formats(plan)
    plan.add_argument("--weights", type=weights, help="what they take, such as 40GiB or 4.5bpw (default: as the files say)")
    plan.add_argument("--speculate", type=count, default=0, metavar="K", help="most drafts a round (default: 0, none)")
    plan.add_argument("--snapshots", type=count, default=1, metavar="N", help="most live snapshots a session (default: 1)")
    plan.add_argument(
        "--recurrent", choices=("replay", "states"), default="replay", help="how recurrent state rolls back (default: replay)"
    )
    plan.add_argument("--no-mtp", action="store_true", help="leave MTP/NextN blocks out")
    plan.add_argument("--reserve", type=size, help="bytes of each device that are left alone (default: 1GiB)")
    plan.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    plan.set_defaults(run=_plan)

    status = commands.add_parser("status", help="show how a running pipeline of yours on this machine fares")
    status.add_argument(
        "pipeline", nargs="?", metavar="PID", help="its process, or its name out of the list of them (default: the only one)"
    )
    status.add_argument("--once", action="store_true", help="show it once, rather than every second until Ctrl-C")
    status.add_argument("--json", action="store_true", help="print one JSON list, an object a pipeline, and end")
    status.set_defaults(run=_status)
    return parser


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, help="pipeline stages, cut evenly (default: 1, or MEMRA_PP_STAGES)")
    parser.add_argument("--cuts", type=cuts, help="first layer of every stage after the first, such as 6,12")
    parser.add_argument(
        "--balance",
        default="even",
        choices=("even", "bytes", "time", "time:decode", "time:prefill"),
        help="cut evenly, where most sessions fit, or where measured decode (time for short) or prefill is fastest",
    )
    parser.add_argument("--backend", default="ray", choices=("ray", "local"), help="Ray actors, or all in this process")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="what stages run on (default: auto)")
    parser.add_argument("--max-ctx", type=int, help="longest context in tokens (default: the model's)")
    parser.add_argument("--threads", type=int, help="kernel threads a stage (default: the cores shared out)")
    _add_formats(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and tables")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="the text to continue")
    given.add_argument("--tokens", type=ids, help="or its token ids, such as 2,105,9; what follows is shown as ids too")


def _add_max_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new", type=count, default=64, help="most tokens to generate (default: 64)")


def _add_formats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-k", choices=K_CHOICES, help="K format (default: MEMRA_KV_K or q8_0)")
    parser.add_argument("--kv-v", choices=V_CHOICES, help="V format (default: MEMRA_KV_V or q5_1)")
    parser.add_argument("--ring", choices=("off", "step", "all"), help="hold windows in rings (default: MEMRA_SWA_RING or off)")


def _run(args: argparse.Namespace) -> None:
    from .run import run

    run(args)


def _export(args: argparse.Namespace) -> None:
    from .handover import export

    export(args)


def _import(args: argparse.Namespace) -> None:
    from .handover import import_

    import_(args)


def _bench(args: argparse.Namespace) -> None:
    from .bench.command import bench

    bench(args)


def _plan(args: argparse.Namespace) -> None:
    from .plan import plan

    plan(args)


def _status(args: argparse.Namespace) -> None:
    from .status import status

    status(args)


def _drop_stdout() -> None:
    """What is buffered for an output that takes no more is not tried again at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminated(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)
