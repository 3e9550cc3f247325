"""What `memra-pp bench` finds out, as facts. Their fields are the names that `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where the command ran, and with what. Stages of a cluster may be elsewhere. `load` is how many processes ran or wanted to
    in the minute before."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    load: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Model:
    """The model that was benched. `weight_bytes` is what its files hold, None where their headers do not tell."""

    name: str
    arch: str
    layers: int
    n_embd: int
    n_vocab: int
    max_ctx: int
    weight_bytes: int | None


@dataclass(frozen=True)
class Stage:
    """A stage, with all sessions open that were held. `layers` are `[first, end)`; `weight_bytes` are those of its layers,
    embedding and head in the model's files, `planned_bytes` what the sizing functions say of the sessions, `allocated_bytes`
    what its device counts, and `arena_bytes` what that may be at most."""

    stage: int
    layers: tuple[int, int]
    device: str
    weight_bytes: int | None
    planned_bytes: int
    allocated_bytes: int
    arena_bytes: int


@dataclass(frozen=True)
class Launch:
    """How the model was launched. `cut_by` is what chose the fence; `kv` the formats in use, as `K/V`."""

    fence: tuple[int, ...]
    cut_by: str
    backend: str
    kv: tuple[str, ...]
    ring: str
    load_s: float


@dataclass(frozen=True)
class Held:
    """`sessions` that were open at once, each of `ctx` rows, and the median time of an open."""

    sessions: int
    ctx: int
    open_ms: float


@dataclass(frozen=True)
class Prefill:
    """A prompt of `rows` tokens, alone: the median of `runs`."""

    rows: int
    runs: int
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True)
class StageTime:
    """Where a stage's seconds went: busy, waiting for a frame, waiting until one was sent; `bubble` is the share waited."""

    busy_s: float
    wait_in_s: float
    wait_out_s: float
    bubble: float


@dataclass(frozen=True)
class Decode:
    """`sessions` that decode at once. A step is what a session waits for a token: the median and the 99th percentile of
    `steps` of them, of all sessions."""

    sessions: int
    steps: int
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    stages: tuple[StageTime, ...]


@dataclass(frozen=True)
class Hop:
    """The way of a frame from one process to the next while one session decodes."""

    source: str
    target: str
    frames: int
    median_us: float
    p99_us: float


@dataclass(frozen=True)
class Rollback:
    """Rounds by hand, medians: a plain decode; a snapshot, and `drafts + 1` tokens verified; and the decode after a rollback
    that keeps `accepted` of them, which takes the stages back."""

    rounds: int
    drafts: int
    accepted: int
    decode_ms: float
    verify_ms: float
    back_ms: float


@dataclass(frozen=True)
class Speculation:
    """One session that continues a text which repeats itself, with a drafter or with none (`off`)."""

    drafter: str
    tokens: int
    tokens_per_s: float
    drafted: int
    accepted: int
    tokens_per_traversal: float


@dataclass(frozen=True)
class Figures:
    """What was measured, in `measured_s` seconds, after `warm_s` for the first steps, in which kernels may be compiled.
    `left_out` says in a sentence each what was not, and why."""

    warm_s: float
    measured_s: float
    held: Held
    stages: tuple[Stage, ...]
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]
    hops: tuple[Hop, ...]
    rollback: tuple[Rollback, ...]
    speculation: tuple[Speculation, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """All of it. `command` is the command line, `began` when it was given, in ISO 8601 with the offset from UTC."""

    command: str
    began: str
    machine: Machine
    model: Model
    launch: Launch
    figures: Figures
