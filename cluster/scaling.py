"""How the pipeline scales: measured on this machine and simulated beside it, or simulated for devices to be rented.

python -m cluster.scaling measure                       # 1 to 8 stages that sleep; ends with 1 if throughput is off by 10 %
python -m cluster.scaling simulate --model config.json  # 8 to 1,024 GPUs
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks._report import Report, add_outputs, integers, say
from cluster.hardware import Hardware, Model, forecast
from cluster.simulator import Load, simulate
from memra_pp.cli.options import positive
from memra_pp.config import ModelConfig
from memra_pp.errors import MemraError

OFF = 0.1
"""By how much the simulated throughput may be off the measured one."""
NODES = 2
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODEL = Path(__file__).parents[1] / "tests/data/configs/llama3_1-70b.json"


def measure(stages: Sequence[int], tokens: int) -> Report:
    """Pipelines of so many stages, as they are and as they are simulated."""
    from cluster.measure import PER_STAGE, PROMPT, WARMUP, calibrate, killed, pipeline, streams, watched
    from cluster.raylets import raylets

    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    with raylets(max(*stages, 2), NODES):
        parts = calibrate(say)
        for n in stages:
            say(f"{n} stages")
            with pipeline(n) as pipe, streams(pipe, n * PER_STAGE) as of:
                seen, death = watched(of, tokens), killed(of)
            told = simulate(parts.of(n), Load(n * PER_STAGE, PROMPT, WARMUP, tokens))
            replay = simulate(parts.of(n), Load(n * PER_STAGE, death.rows, warmup=1, tokens=2, replay=True))
            for what, value, simulated in (
                ("throughput, tok/s", seen.pace.tokens_per_s, told.pace.tokens_per_s),
                ("step p50, ms", 1e3 * seen.pace.step_p50_s, 1e3 * told.pace.step_p50_s),
                ("step p99, ms", 1e3 * seen.pace.step_p99_s, 1e3 * told.pace.step_p99_s),
                ("bubble, %", 100 * sum(seen.bubble) / n, 100 * sum(told.bubble) / n),
                ("bubble of the worst stage, %", 100 * max(seen.bubble), 100 * max(told.bubble)),
                ("recovery, s", death.whole_s, parts.recovery.until_served_s(n) + replay.first_s),
            ):
                found[what].append((n, value, simulated))
    report = Report(
        f"stages that sleep, {PER_STAGE} sessions for each, on {NODES} nodes of this machine", "stages", asdict(parts)
    )
    for name, points in found.items():
        what, unit = name.rsplit(", ", 1)
        compare(report, what, unit, points, OFF if what == "throughput" else None)
    return report


def compare(
    report: Report, what: str, unit: str, points: Sequence[tuple[int, float, float]], within: float | None = None
) -> None:
    """Adds what was measured of so many stages and what was simulated, which should be `within` that part of each other."""
    bounds = {} if within is None else {"at_least": 1 - within, "at_most": 1 + within}
    for n, value, simulated in points:
        report.add(what, value, unit, at=n, peer="simulated", peer_value=simulated, **bounds)


def forecasts(model: Model, hardware: Hardware, stages: Sequence[int], layers: int | None) -> Report:
    """A model on so many devices each; one with a layer a stage where there are more of them than it has layers."""
    title = f"{model.cfg.arch}, {model.cfg.n_trunk} layers, {model.weights.source}, sessions of {model.ctx:,} rows, simulated"
    report = Report(title, "GPUs", asdict(hardware) | {"ctx": model.ctx, "batch": model.batch})
    found = []
    for n in stages:
        say(f"{n} GPUs")
        found.append((n, forecast(model, hardware, n, layers or (1 if n > model.cfg.n_trunk else None))))
    for n, seen in found:
        report.add("layers of a stage, most", seen.layers, "layers", at=n)
    for n, seen in found:
        report.add("sessions served", seen.served, "sessions", at=n, peer="that fit", peer_value=seen.fit)
    for n, seen in found:
        report.add("throughput", seen.outcome.pace.tokens_per_s, "tok/s", at=n, peer="without a bubble", peer_value=seen.ideal)
    for name in ("step_p50_s", "step_p99_s"):
        for n, seen in found:
            report.add(name[:-2].replace("_", " "), 1e3 * getattr(seen.outcome.pace, name), "ms", at=n)
    for n, seen in found:
        report.add("bubble", 100 * sum(seen.outcome.bubble) / n, "%", at=n)
    for n, seen in found:
        report.add("driver at work", 100 * seen.outcome.driver_busy, "%", at=n)
    for n, seen in found:
        report.add("recovery", seen.recovery_s, "s", at=n)
    return report


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="pipelines on this machine, beside their simulation")
    measuring.add_argument("--stages", type=integers, default=tuple(range(1, 9)), metavar="N,N", help="(default: 1 to 8)")
    measuring.add_argument(
        "--tokens", type=int, default=60, help="of each session, in each of some rounds (default: %(default)s)"
    )
    simulating = commands.add_parser("simulate", help="a model on devices", description=Hardware.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    simulating.add_argument("--model", default=MODEL, help="a config.json (default: Llama 3.1 70B's)")
    simulating.add_argument("--gpus", type=integers, default=GPUS, metavar="N,N", help="stages (default: 8 to 1024)")
    simulating.add_argument("--layers-per-stage", type=int, metavar="L", help="repeat the model's first L on every stage")
    simulating.add_argument("--ctx", type=positive, default=8192, help="rows of a session (default: %(default)s)")
    simulating.add_argument("--batch", type=int, default=8, help="sessions for each stage, if they fit (default: %(default)s)")
    simulating.add_argument("--hardware", metavar="FILE.yaml", help="what the hardware is, where it is not the default")
    for field in fields(Hardware):
        simulating.add_argument(
            "--" + field.name.replace("_", "-"), type=float, metavar="X", help=f"(default: {field.default:g})"
        )
    for command in (measuring, simulating):
        add_outputs(command)
    return made


def main() -> None:
    args = parser().parse_args()
    try:
        if args.command == "measure":
            report = measure(args.stages, args.tokens)
        else:
            given = {field.name: n for field in fields(Hardware) if (n := getattr(args, field.name)) is not None}
            model = Model.of(ModelConfig.from_path(args.model), args.ctx, args.batch)
            report = forecasts(model, Hardware.read(args.hardware, given), args.gpus, args.layers_per_stage)
    except MemraError as error:
        sys.exit(f"error: {error}")
    report.give_out(args)
    sys.exit(not report.met)


if __name__ == "__main__":
    main()
