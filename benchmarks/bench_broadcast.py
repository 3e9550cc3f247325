"""A snapshot on 8 stages: what it costs the caller, and a decode step that takes one or goes back to one on every stage, with
all their acks back.

Beside it `ray.get` of a call of each of 8 actors, and the floor: a message of 64 bytes through 8 Python processes over bare
Unix sockets. Medians in microseconds, taken in turns.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from _peers import PassThrough, calls_to_all, echoes, write_config
from _relay import relays
from _report import Report, parser, say
from _timing import in_turns

import memra_pp

STAGES, WIDTH, MESSAGE = 8, 64, 64
ROUNDS, STEPS, CALLS = 12, 100, 20
FASTER, OF_FLOOR = 10.0, 2.0
"""How many times as fast as actor calls it should be, and how many times the floor it may take."""
LATER = "a snapshot, told with the next step"


def main() -> None:
    args = parser(__doc__).parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_config(folder, STAGES, WIDTH)
        pipe = stack.enter_context(memra_pp.launch(folder, stages=STAGES, stage_model=PassThrough, threads=1))
        session = stack.enter_context(pipe.open([1], max_new_tokens=8, speculate=1, snapshots=2))
        session.prefill()
        base = session.snapshot()
        session.decode(1)

        def snapshot() -> None:
            session.snapshot().close()

        def decode() -> None:
            session.rollback(base, 0)
            session.decode(1, want="argmax")

        def decode_behind_a_snapshot() -> None:
            session.rollback(base, 0)
            with session.snapshot():
                session.decode(1, want="argmax")

        ours = {
            LATER: snapshot,
            "a decode step with a rollback": decode,
            "a decode step with a rollback and a snapshot": decode_behind_a_snapshot,
        }
        calls = calls_to_all(stack.enter_context(echoes(STAGES)))
        relay = stack.enter_context(relays(STAGES, MESSAGE))
        say("taking turns")
        steps = {name: (step, STEPS) for name, step in ours.items()}
        took = in_turns(steps | {"relay": (relay, STEPS), "calls": (calls, CALLS)}, 2 if args.quick else ROUNDS)
    medians = {name: 1e6 * statistics.median(times) for name, times in took.items()}
    report = Report(f"{STAGES} stages: told to all, and all acks back")
    for name in ours:
        report.add(name, medians[name], "us", peer="ray.get of actor calls", peer_value=medians["calls"], at_most=1 / FASTER)
        if name != LATER:
            report.add(name, medians[name], "us", peer="bare socket relay", peer_value=medians["relay"], at_most=OF_FLOOR)
    report.give_out(args)


if __name__ == "__main__":
    main()
