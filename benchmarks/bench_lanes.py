"""A 4-stage chain passing an 8 KB row: our stages beside bare Unix sockets, a Ray compiled graph and chained actor calls.

The bare chain comes twice: raw bytes of a known length, and with the least that says whose row it is: a prefix of lengths
and a msgpack header that each stage reads and writes anew. Neither knows sessions, checks or deadlines.

Prints the median of each in microseconds, taken in turns in one run, and the share of a core that an idle stage uses.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import ray
from ray.dag import InputNode

import memra_pp
from memra_pp.cache import Cache
from memra_pp.config import ModelConfig
from memra_pp.models.protocol import Array, StepBatch
from memra_pp.stage.frames import STEP, Entry

STAGES = 4
WIDTH = 2048  # 8 KB of f32
ROUNDS, STEPS = 12, 100
LENGTHS = struct.Struct("<II")
IDLE_S = 5.0


class PassThrough:
    """A `StageModel` that computes nothing."""

    def __init__(self, cfg: ModelConfig) -> None:
        self.cfg = cfg

    @classmethod
    def load(cls, path: str, layers: range, device: Any) -> PassThrough:
        return cls(ModelConfig.from_hf(path))

    def workspace_bytes(self, max_rows: int) -> int:
        return 8 * WIDTH * max_rows

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        return x


def write_config(folder: Path) -> None:
    """A small llama whose rows are 8 KB."""
    config = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": STAGES, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64, "vocab_size": WIDTH,
        "max_position_embeddings": 65536,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def our_step(pipe: memra_pp.Pipeline) -> Callable[[], None]:
    """One row through our chain: entry checks, acks, counters and all."""
    session = pipe.open([1], max_new_tokens=60000)
    row = np.ones((1, WIDTH), np.float32)
    at = 0

    def step() -> None:
        nonlocal at
        reply = pipe.chain.roundtrip(Entry(STEP, session.id, at + 1, pipe.chain.epoch, at, 1, 1), [row], 10.0)
        at += 1
        assert reply.arrays[0].nbytes == row.nbytes and reply.hops == STAGES

    return step


def _bare_stage(here: str, there: str, header: bool) -> None:
    """Receives and passes on messages until the socket ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(here)
    listener.listen(1)
    up, _ = listener.accept()
    down = connect(there)
    if header:
        while (message := receive_message(up)) is not None:
            entry, row = message
            send_message(down, {**entry, "acks": entry["acks"] + 1}, row)
    else:
        buf = memoryview(bytearray(64 + 4 * WIDTH))
        while receive(up, buf):
            down.sendmsg([buf[:64], buf[64:]])


def send_message(sock: socket.socket, entry: dict[str, int], row: Array) -> None:
    """Sends lengths, a msgpack header and a row."""
    header = msgpack.packb(entry)
    sock.sendmsg([LENGTHS.pack(len(header), row.nbytes) + header, row])


def receive_message(sock: socket.socket) -> tuple[dict[str, int], Array] | None:
    """What `send_message` sent; None at end of file."""
    lengths = memoryview(bytearray(LENGTHS.size))
    if not receive(sock, lengths):
        return None
    n, size = LENGTHS.unpack(lengths)
    rest = memoryview(bytearray(n + size))
    return (msgpack.unpackb(rest[:n]), np.frombuffer(rest, np.float32, offset=n)) if receive(sock, rest) else None


def connect(path: str) -> socket.socket:
    """Connects once somebody listens there."""
    sock = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + 20
    while True:
        try:
            sock.connect(path)
            return sock
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def receive(sock: socket.socket, buf: memoryview) -> bool:
    """Fills `buf`; False at end of file."""
    at = 0
    while at < len(buf):
        got = sock.recv_into(buf[at:])
        if got == 0:
            return False
        at += got
    return True


def bare_step(folder: Path, header: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """The floor: the same row over the same number of processes, with no protocol or hardly one; and what ends it."""
    paths = [str(folder / f"bare{header}{i}") for i in range(STAGES + 1)]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(paths[-1])
    listener.listen(1)
    spawn = mp.get_context("spawn")
    stages = [spawn.Process(target=_bare_stage, args=(*pair, header), daemon=True) for pair in pairwise(paths)]
    for stage in stages:
        stage.start()
    out = connect(paths[0])
    back, _ = listener.accept()
    head, row, buf = bytes(64), np.ones((1, WIDTH), np.float32), memoryview(bytearray(64 + 4 * WIDTH))

    def step() -> None:
        if header:
            send_message(out, {"session": 1, "seq": 1, "base_len": 77, "acks": 0}, row)
            message = receive_message(back)
            assert message is not None and message[0]["acks"] == STAGES
        else:
            out.sendmsg([head, row])
            assert receive(back, buf)

    def close() -> None:
        out.close()
        for stage in stages:
            stage.join(timeout=5)

    return step, close


@ray.remote(num_cpus=0)
class Echo:
    """A Ray actor that returns its argument."""

    def forward(self, x: Array) -> Array:
        return x


def call_step() -> Callable[[], None]:
    """The row by reference through chained actor calls."""
    actors = [Echo.remote() for _ in range(STAGES)]
    row = np.ones((1, WIDTH), np.float32)

    def step() -> None:
        ref: Any = row
        for actor in actors:
            ref = actor.forward.remote(ref)
        assert ray.get(ref).nbytes == row.nbytes

    return step


def graph_step() -> tuple[Callable[[], None], Callable[[], None]]:
    """The row through a Ray compiled graph; and what tears it down."""
    actors = [Echo.remote() for _ in range(STAGES)]
    with InputNode() as node:
        dag: Any = node
        for actor in actors:
            dag = actor.forward.bind(dag)
    graph = dag.experimental_compile()
    row = np.ones((1, WIDTH), np.float32)

    def step() -> None:
        assert ray.get(graph.execute(row)).nbytes == row.nbytes

    return step, graph.teardown


def median_us(step: Callable[[], None], steps: int) -> list[float]:
    """Each step's time in microseconds."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def idle_share(pids: list[int]) -> float:
    """The largest share of a core that one of the processes uses while nothing is asked of it."""
    tick = os.sysconf("SC_CLK_TCK")

    def used(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / tick

    before = [used(pid) for pid in pids]
    time.sleep(IDLE_S)
    return max(used(pid) - b for pid, b in zip(pids, before, strict=True)) / IDLE_S


def main() -> None:
    """Runs all four in turns and prints the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder)
        with memra_pp.launch(folder, stages=STAGES, backend="ray", stage_model=PassThrough, threads=1) as pipe:
            idle = idle_share([s["pid"] for s in pipe.stats()["stages"]])
            bare, end_bare = bare_step(folder, header=False)
            headed, end_headed = bare_step(folder, header=True)
            chains = {"memra_pp": our_step(pipe), "bare sockets": bare, "with a header": headed, "actor calls": call_step()}
            times: dict[str, list[float]] = {label: [] for label in chains}
            for chain in chains.values():
                median_us(chain, STEPS)
            for _ in range(ROUNDS):
                for label, chain in chains.items():
                    times[label] += median_us(chain, STEPS // 5 if label == "actor calls" else STEPS)
            end_bare()
            end_headed()
            # A compiled graph spins a core a stage while idle, so it would slow the others: it runs last.
            graph, end_graph = graph_step()
            median_us(graph, STEPS)
            times["compiled graph"] = median_us(graph, ROUNDS * STEPS)
            end_graph()
    ours = statistics.median(times["memra_pp"])
    print(f"{STAGES} stages, {4 * WIDTH} B a row, median us (ratio to memra_pp)")
    for label, values in times.items():
        print(f"  {label:15} {statistics.median(values):9.1f}  {statistics.median(values) / ours:6.2f}x")
    print(f"  an idle stage uses {100 * idle:.1f} % of a core")


if __name__ == "__main__":
    main()
